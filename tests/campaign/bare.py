"""Runs the two commands of README, `scripts/demo` and `scripts/test`, in a bare Debian 12 or 13, each from nothing.

With tests as arguments, `scripts/test` is given these. What is committed is tested. A root of the release is made with
mmdebstrap; all that happens in it is in mount and process namespaces of its own, which end with it. It takes as long as
`scripts/test`, and some minutes for what is fetched. Without --release, both releases have their turn.
"""

import argparse
import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

TOP = Path(__file__).parents[2]
RELEASES = ("bookworm", "trixie")  # Debian 12 and 13
CLONE = "/opt/cloakfs"
"""In the root: a clone of this repository."""

# How this machine reaches what apt and pip fetch from, if that takes more than the defaults.
_HOW_TO_FETCH = ("etc/resolv.conf", "etc/hosts", "etc/pip.conf", "etc/ssl/certs/ca-certificates.crt")
_ENVIRONMENT = (
    "SSL_CERT_FILE",
    "PIP_CERT",
    "PIP_INDEX_URL",
    "PIP_DEFAULT_TIMEOUT",
    "http_proxy",
    "https_proxy",
    "no_proxy",
)
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

# Not chroot(2), as paths in /proc would then be those of this machine.
_ENTER = """
root=$1
shift
mount --bind "$root" "$root"
mkdir -p "$root/machine"
mount -t proc proc "$root/proc"
for name in dev sys; do mount --rbind /$name "$root/$name"; done
mount -t tmpfs -o mode=755 tmpfs "$root/run"
cd "$root"
pivot_root . machine
cd /
umount --lazy /machine
rmdir /machine
exec "$@"
"""


def is_possible(campaign: str) -> bool:
    """Say so if mmdebstrap is lacking."""
    if shutil.which("mmdebstrap") is None:
        print(f"{campaign}: mmdebstrap is not installed (apt-get install mmdebstrap): NOT TESTED", file=sys.stderr)
        return False
    return True


@contextlib.contextmanager
def room() -> Iterator[Path]:
    """A directory for roots, removed in the end."""
    path = Path(tempfile.mkdtemp(prefix="cloakfs-debian-"))
    try:
        yield path
    finally:
        shutil.rmtree(path)


def make_root(release: str, root: Path, *packages: str) -> None:
    """Make a root of nothing but what every system of this release has, and these packages."""
    included = [f"--include={','.join(packages)}"] if packages else []
    subprocess.run(["mmdebstrap", "--quiet", "--variant=minbase", *included, release, str(root)], check=True)
    # Nothing is started that is installed later.
    policy = root / "usr/sbin/policy-rc.d"
    policy.write_text("#!/bin/sh\nexit 101\n")
    policy.chmod(0o755)


def make_builder(release: str, root: Path) -> None:
    """Make a root with a clone of this repository, in which its scripts can fetch what they need."""
    make_root(release, root, "ca-certificates", "git")
    for name in _HOW_TO_FETCH:
        if Path("/", name).exists():
            shutil.copyfile(Path("/", name), root / name)
    subprocess.run(["git", "clone", "--quiet", str(TOP), str(root / CLONE[1:])], check=True)


def run_in(root: Path, script: str, *, seen: bool = True) -> int:
    """Run a shell script in a root, and return its exit status.

    Args:
        root: the root.
        script: text for bash.
        seen: whether what it says is shown; if not, only when it fails.
    """
    environment = {"HOME": "/root", "LANG": "C.UTF-8", "PATH": _PATH}
    environment |= {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    done = subprocess.run(
        [
            "unshare", "--mount", "--propagation=private", "--pid", "--fork", "--kill-child",
            "bash", "-ec", _ENTER, "enter", str(root), "bash", "-c", script,
        ],
        env=environment, check=False, stdin=subprocess.DEVNULL,
        stdout=None if seen else subprocess.PIPE, stderr=None if seen else subprocess.STDOUT,
    )  # fmt: skip
    if done.returncode and not seen:
        sys.stderr.buffer.write(done.stdout)
    return done.returncode


def add_release(parser: argparse.ArgumentParser) -> None:
    """Add the option that says which releases have their turn."""
    parser.add_argument("--release", choices=RELEASES, action="append", help="Only this one.")


def _run(release: str, tests: Sequence[str]) -> bool:
    with room() as place:
        root = place / release
        make_builder(release, root)
        succeeded = True
        for command in (["scripts/demo"], ["scripts/test", *tests]):
            print(f"=== {release}: {shlex.join(command)}", flush=True)
            status = run_in(root, f"cd {CLONE} && {shlex.join(command)}")
            print(f"=== {release}: {shlex.join(command)}: exit status {status}", flush=True)
            succeeded &= status == 0
        return succeeded


def main() -> int:
    """Run the campaign; the exit status is 1 if anything went wrong."""
    parser = argparse.ArgumentParser(prog="scripts/campaign bare", description=__doc__)
    add_release(parser)
    parser.add_argument("tests", nargs="*", help="for scripts/test: tests/mount/test_listings.py, for example")
    given = parser.parse_args()
    if not is_possible("bare"):
        return 1
    results = [_run(release, given.tests) for release in given.release or RELEASES]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
