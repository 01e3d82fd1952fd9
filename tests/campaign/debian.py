"""Installs the Debian package in a bare chroot, works with it, upgrades it from 0.1.0 and purges it.

The chroot is Debian 12 with nothing but what every system has (mmdebstrap, --variant=minbase). Everything in it happens
in mount and process namespaces of its own, which end with it. Both packages are built with scripts/package: that of
0.1.0 from the last commit that had this version.
"""

import argparse
import contextlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

TOP = Path(__file__).parents[2]
# What apt, and mount(8), leave behind by themselves.
_OTHERS = ("/var/lib/dpkg/", "/var/lib/apt/", "/var/log/", "/var/cache/", "/run/mount", "/round/")

HANDLES = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
class Handle(ctypes.Structure):
    _fields_ = [("size", ctypes.c_uint), ("kind", ctypes.c_int), ("data", ctypes.c_ubyte * 128)]
handle, mount = Handle(size=128), ctypes.c_int()
if libc.name_to_handle_at(-100, os.fsencode(sys.argv[1]), ctypes.byref(handle), ctypes.byref(mount), 0):
    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
print(handle.kind, bytes(handle.data[:handle.size]).hex())
"""

ROUND = """
set -euE
trap 'echo "failed: $BASH_COMMAND" >&2' ERR
export DEBIAN_FRONTEND=noninteractive LC_ALL=C.UTF-8
get() { apt-get --yes "$@" >/round/apt.log 2>&1 || { cat /round/apt.log; exit 1; }; }
install() { get install --no-install-recommends "$1"; }
files() { find / -xdev | sort; }
handle() { python3 /round/handle.py "$1"; }
fails() { if "$@" >/round/said 2>&1; then echo "succeeded: $*" >&2; exit 1; fi; }

get update
for deb in old new; do
  get satisfy --no-install-recommends "$(dpkg-deb --field /round/$deb.deb Depends)"
done
files >/round/before
install /round/old.deb
echo "--- installed $(cloakfs --version)"
mkdir -p /srv/real /srv/one /srv/two
echo text >/srv/real/file
cloakfs mount /srv/real /srv/one -o no_root_squash
cloakfs mount /srv/real /srv/two -o no_root_squash
handle /srv/one/file >/round/handle.old
cloakfs umount /srv/one
echo '/srv/real *(ro)' >/etc/cloakfs/exports.d/real.exports

install /round/new.deb
echo "--- upgraded to $(cloakfs -V)"
[ "$(cat /srv/two/file)" = text ]  # the daemon of the old version goes on
fails apt-get -qq remove --yes cloakfs
grep -q "still mounted, so it cannot be removed" /round/said
cloakfs umount /srv/two
cloakfs mount /srv/real /srv/one -o no_root_squash
handle /srv/one/file >/round/handle.new
cmp /round/handle.old /round/handle.new
cloakfs status /srv/one | grep -q "^ tree  *"
cloakfs umount /srv/one
echo "--- file handles are the same"

/usr/share/doc/cloakfs/scripts/demo >/round/demo.log 2>&1 || { cat /round/demo.log; exit 1; }
grep -q "my diary" /round/demo.log
grep -q 'mkdir: cannot create directory .*: File exists' /round/demo.log
mount -t fuse.cloakfs /srv/real /srv/one -o ro
[ "$(cat /srv/one/file)" = text ]
umount /srv/one
for file in /usr/share/doc/cloakfs/examples/exports.d/*; do cloakfs check "$file" --text-only >/dev/null; done
for page in man8/cloakfs.8 man5/cloakfs.exports.5 man7/cloakfs-policy.7; do
  gzip -t /usr/share/man/$page.gz
done
bash -c '. /usr/share/bash-completion/completions/cloakfs; complete -p cloakfs' >/dev/null
[ -z "$(find /usr/lib/cloakfs -newer /round/before -name '*.pyc' -cnewer /var/lib/dpkg/info/cloakfs.list)" ]
echo "--- the demonstration ran"

cloakfs prune /srv/one >/dev/null
rm -rf /srv/real /srv/one /srv/two
get remove cloakfs
[ "$(cat /etc/cloakfs/exports.d/real.exports)" = '/srv/real *(ro)' ]
[ -n "$(find /var/lib/cloakfs -name nodes.sqlite)" ]
get purge cloakfs
files >/round/after
echo "--- purged"
"""


@contextlib.contextmanager
def _room() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="cloakfs-debian-"))
    try:
        yield path
    finally:
        shutil.rmtree(path)


def run(*command: str, cwd: Path = TOP) -> str:
    """Run a command, and return what it prints."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"debian: {' '.join(command[:4])}: {done.stdout}{done.stderr}")
    return done.stdout


def _package_of_0_1_0(room: Path) -> Path:
    """Build the Debian package of the last commit of 0.1.0."""
    changed = run("git", "log", "-1", "--format=%H", '-Sversion = "0.1.0"', "--", "pyproject.toml").strip()
    source = room / "source"
    source.mkdir()
    archive = room / "source.tar"
    run("git", "archive", f"--output={archive}", f"{changed}^")
    run("tar", "-xf", str(archive), "-C", str(source))
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(room), str(source))
    (wheel,) = room.glob("cloakfs-0.1.0-*.whl")
    return TOP / run("scripts/package", "--wheel", str(wheel)).strip().splitlines()[-1]


def _left(place: Path) -> list[str]:
    """Return what is there after all, and was not before."""
    before, after = (set((place / name).read_text().splitlines()) for name in ("before", "after"))
    return [path for path in sorted(after - before) if not path.startswith(_OTHERS)]


def main() -> int:
    """Run the campaign; the exit status is 1 if anything went wrong."""
    arguments = argparse.ArgumentParser(prog="scripts/campaign debian", description=__doc__)
    arguments.add_argument("--deb", type=Path, metavar="FILE", help="A package that has been built already.")
    arguments.add_argument("--old", type=Path, metavar="FILE", help="The same of 0.1.0.")
    given = arguments.parse_args()
    if shutil.which("mmdebstrap") is None:
        print("debian: mmdebstrap is not installed (apt-get install mmdebstrap): NOT TESTED", file=sys.stderr)
        return 1
    with _room() as room:
        old = given.old or _package_of_0_1_0(room)
        new = given.deb or TOP / run("scripts/package").strip().splitlines()[-1]
        root = room / "root"
        run("mmdebstrap", "--quiet", "--variant=minbase", "bookworm", str(root))
        place = root / "round"
        place.mkdir()
        shutil.copy(old, place / "old.deb")
        shutil.copy(new, place / "new.deb")
        (place / "handle.py").write_text(HANDLES)
        (place / "script").write_text(ROUND)
        mounts = "; ".join(f"mount --rbind /{name} {root}/{name}" for name in ("dev", "sys"))
        script = (
            f"mount --bind {root} {root}; {mounts}; mount -t proc proc {root}/proc; chroot {root} bash /round/script"
        )
        done = subprocess.run(
            ["unshare", "--mount", "--propagation=private", "--pid", "--fork", "--kill-child", "bash", "-ec", script],
            check=False,
        )
        if done.returncode:
            return 1
        left = _left(place)
        print("\n".join(["--- left behind:", *left]) if left else "--- nothing is left behind")
        return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
