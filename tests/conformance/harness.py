"""What both suites need: the backing file system, a mount of it, running programs, the known differences."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pyfuse3

from cloakfs.linux import mountinfo
from cloakfs.state.runtime import RUN_DIR, STATE_DIR

CHECKOUT = Path(__file__).resolve().parents[2]
SUITES = CHECKOUT / ".cache" / "conformance" / "bin"
KNOWN_DIFFERENCES = Path(__file__).with_name("known_differences.toml")

PREFIX = "cloakfs-"
# What bind(2) takes is 107 bytes; pjdfstest's socket cases add 55 to a mount's path, which would fail on
# either side and so compare nothing.
LONGEST_PATH = 107 - 55

# Both hand the tree through as it is: the first has no policy, the second maps every id to itself.
MOUNTS: Mapping[str, str] = {
    "plain": "rw,no_root_squash,suid",
    "identity-map": "rw,suid,range_map=uid 0 -1 map 0 gid 0 -1 map 0",
}


@dataclasses.dataclass(frozen=True)
class Result:
    """The outcome of one case, with what the suite said about it."""

    outcome: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.outcome} ({self.detail})" if self.detail else self.outcome


@dataclasses.dataclass(frozen=True)
class Difference:
    """A case that is known to end differently on a mount, whichever of the two.

    Attributes:
        patched: whether it also does with the patches in contrib/pyfuse3.
    """

    suite: str
    case: str
    bare: str
    mounted: str
    reason: str
    patched: bool = True


@dataclasses.dataclass(frozen=True)
class Workspace:
    """A directory with a fresh ext4 file system in it."""

    path: Path
    ext4: Path

    def directory(self, name: str) -> Path:
        """Make a directory on the ext4 file system."""
        path = self.ext4 / name
        path.mkdir(mode=0o755)
        return path


@dataclasses.dataclass(frozen=True)
class Mount:
    """A mount of a directory of the backing file system."""

    source: Path
    mountpoint: Path


def missing_prerequisite() -> str | None:
    """Say why the suites cannot run here."""
    if os.geteuid() != 0:
        return "needs root: the suites switch users, and mount a loop device"
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "needs /dev/fuse"
    for program in ("mkfs.ext4", "losetup", "mount", "umount"):
        if shutil.which(program) is None:
            return f"needs {program}"
    if subprocess.run(["losetup", "--find"], capture_output=True, check=False).returncode != 0:
        return "needs a free loop device"
    longest = Path(tempfile.gettempdir()) / f"{PREFIX}12345678" / max(MOUNTS, key=len)
    if len(str(longest)) > LONGEST_PATH:
        return f"needs a TMPDIR with a shorter path than {tempfile.gettempdir()}"
    for suite in ("pjdfstest", "fsx"):
        if not os.access(SUITES / suite, os.X_OK):
            return f"needs {suite}: run scripts/build-conformance"
    return None


def disagreements(suite: str, bare: Mapping[str, Result], mounted: Mapping[str, Result]) -> list[str]:
    """Name every case that ends otherwise than on the backing file system, or than the list says."""
    is_patched = hasattr(pyfuse3.Operations, "fallocate")
    known = {one.case: one for one in known_differences(suite) if one.patched or not is_patched}
    absent = Result("absent")
    lines = []
    for case in sorted(bare.keys() | mounted.keys()):
        here, there = bare.get(case, absent), mounted.get(case, absent)
        if listed := known.get(case):
            if (here.outcome, there.outcome) != (listed.bare, listed.mounted):
                lines.append(f"{case}: {here} bare, {there} mounted; the list of known differences is out of date")
        elif here.outcome != there.outcome:
            lines.append(f"{case}: {here} bare, {there} mounted")
    return lines


def known_differences(suite: str | None = None) -> list[Difference]:
    """Read the list of known differences, of one suite or of both."""
    with KNOWN_DIFFERENCES.open("rb") as file:
        tables = tomllib.load(file)
    known = [Difference(name, **entry) for name, entries in tables.items() for entry in entries]
    return [one for one in known if suite in (None, one.suite)]


def mount_points(below: Path) -> list[Path]:
    """List what is mounted at or below a path; asks the kernel, as a dead mount answers no stat."""
    points = [Path(place.path) for place in mountinfo.by_id().values()]
    return [point for point in points if below in (point, *point.parents)]


def unmount(path: Path) -> None:
    """Unmount everything at or below a path, whatever state it is in."""
    for point in reversed(mount_points(path)):
        # --force aborts a FUSE connection, so that nobody goes on waiting for a daemon that does not
        # answer; --no-canonicalize keeps umount(8) itself from asking it.
        subprocess.run(["umount", "--no-canonicalize", "--force", "--lazy", point], capture_output=True, check=False)


def run(
    command: list[str | Path],
    *,
    timeout: float,
    below: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> tuple[int, str]:
    """Run a program; give its status and what it printed. `below`: the mount to abort when it hangs."""
    # A file, not a pipe: a daemon that keeps the descriptor open must not hold up its caller.
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        # The umask is the suites' expectation, not the caller's.
        with subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "RUST_BACKTRACE": "0", **(env or {})},
            umask=0o022,
        ) as process:
            try:
                process.wait(timeout)
            except BaseException:
                # A process that waits for a FUSE daemon cannot be killed before the connection is.
                if below is not None:
                    unmount(below)
                process.kill()
                raise
        output.seek(0)
        return process.returncode, output.read()


def checked(command: list[str | Path], *, timeout: float = 60) -> None:
    """Run a program that has to succeed."""
    status, output = run(command, timeout=timeout)
    if status != 0:
        raise RuntimeError(f"{' '.join(map(str, command))}: status {status}\n{output}")


def forget_mounts(name: str) -> None:
    """Remove what daemons left of mounts whose mount point has `name` in its path: state and log."""
    for left in [*Path(STATE_DIR).glob(f"*{name}*"), *Path(RUN_DIR).rglob(f"*{name}*")]:
        if left.is_dir():
            shutil.rmtree(left)
        else:
            left.unlink()


@contextmanager
def workspace() -> Iterator[Workspace]:
    """Provide a loop-mounted ext4 file system."""
    with ExitStack() as stack:
        # Not pytest's tmp_path: its parents are closed to the users the suites switch to.
        path = Path(tempfile.mkdtemp(prefix=PREFIX))
        stack.callback(shutil.rmtree, path, ignore_errors=True)
        stack.callback(forget_mounts, path.name)
        path.chmod(0o755)
        image, ext4 = path / "image", path / "ext4"
        ext4.mkdir()
        with image.open("wb") as file:
            file.truncate(512 << 20)
        checked(["mkfs.ext4", "-q", "-F", "-b", "4096", image])
        stack.callback(unmount, path)
        # A loop device that mount(8) sets up goes away with the last mount of it.
        checked(["mount", "-o", "loop", image, ext4])
        yield Workspace(path, ext4)


@contextmanager
def cloakfs_mount(source: Path, mountpoint: Path, options: str) -> Iterator[Path]:
    """Mount a tree for the time of a with block."""
    cloakfs = Path(sys.executable).with_name("cloakfs")
    mountpoint.mkdir()
    try:
        checked([cloakfs, "mount", source, mountpoint, "-o", options])
        yield mountpoint
        if mount_points(mountpoint):  # a program that hung, or was interrupted, took the mount with it
            checked([cloakfs, "umount", mountpoint])
    finally:
        unmount(mountpoint)
        mountpoint.rmdir()
