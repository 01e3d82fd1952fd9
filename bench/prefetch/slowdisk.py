"""The slow-disk laboratory: a file system on which some processes get a limited number of reads and bytes per second.

It consists of an ext4 in a sparse file, mounted by a loop device, and of a cgroup in which the kernel throttles reads
from that device (blkio of cgroup v1, or io of v2). The file stays in memory, so that nothing but the throttle takes
time.
"""

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass

from cloakfs.linux import mountinfo

from ..peers import unmount
from ..workers import undisturbed

IOPS = 200
"""Reads per second, as of a disk that seeks."""

BPS = 120_000_000
"""Bytes per second."""

READ_AHEAD_KB = 128
"""How much the kernel reads ahead by itself: Linux's default. A loop device may have more."""

_IN_MEMORY = ("tmpfs", "ramfs")
_PATIENCE = 10.0


class SlowDiskError(Exception):
    """No slow disk can be made here; the message says why in one line."""


@dataclass(frozen=True)
class Disk:
    """A file system on a device of its own.

    Attributes:
        path: its root.
        device: the loop device, such as `loop0`.
        about: its properties that figures depend on.
    """

    path: str
    device: str
    about: str

    def bytes_read(self) -> int:
        """Return how many bytes the device has delivered so far."""
        with open(f"/sys/block/{self.device}/stat", encoding="ascii") as file:
            return int(file.read().split()[2]) * 512


@dataclass(frozen=True)
class SlowDisk(Disk):
    """A disk that is slow for some processes."""

    group: str

    def slow_down(self, pid: int) -> None:
        """Throttle a process with all its threads, and whatever they start, until they or the disk are gone.

        Raises:
            OSError: there is no such process.
        """
        with open(os.path.join(self.group, "cgroup.procs"), "w", encoding="ascii") as file:
            file.write(str(pid))


@contextlib.contextmanager
def slow_disk(
    mib: int, *, iops: int = IOPS, bps: int = BPS, read_ahead_kb: int = READ_AHEAD_KB, base: str | None = None
) -> Iterator[SlowDisk]:
    """Make an empty slow disk, for root, and remove it afterwards in any case.

    Args:
        mib: size, at least 16.
        iops: reads per second.
        bps: bytes read per second.
        read_ahead_kb: how much the kernel reads ahead from the device.
        base: an existing directory on a disk, by default $TMPDIR.

    Raises:
        SlowDiskError: the directory is in memory, or there is no ext4, loop device or throttle.
        OSError: the image cannot be written.
    """
    with contextlib.ExitStack() as stack:
        try:
            yield _set_up(stack, mib, iops, bps, read_ahead_kb, base)
        finally:
            with undisturbed():
                stack.close()


@contextlib.contextmanager
def fast_disk(mib: int, *, read_ahead_kb: int = READ_AHEAD_KB, base: str | None = None) -> Iterator[Disk]:
    """Make an empty disk that is as fast as the one below it: nothing is kept in memory there, and nothing throttled.

    Args:
        mib: size, at least 16.
        read_ahead_kb: how much the kernel reads ahead from the device.
        base: an existing directory on a disk, by default $TMPDIR.

    Raises:
        SlowDiskError: the directory is in memory, or there is no ext4 or loop device, or none with direct I/O.
        OSError: the image cannot be written.
    """
    with contextlib.ExitStack() as stack:
        try:
            _, path, _, block = _device(stack, mib, read_ahead_kb, base)
            device = os.path.basename(block)
            _run("losetup", "--direct-io=on", f"/dev/{device}")
            yield Disk(path, device, f"ext4 on {device}; {_settings(block)}; below, {device_of(os.path.dirname(path))}")
        finally:
            with undisturbed():
                stack.close()


def _set_up(
    stack: contextlib.ExitStack, mib: int, iops: int, bps: int, read_ahead_kb: int, base: str | None
) -> SlowDisk:
    place, path, name, block = _device(stack, mib, read_ahead_kb, base)
    with undisturbed():
        group = _throttle(stack, os.path.basename(place), name, iops, bps)
    device = os.path.basename(block)
    about = f"ext4 on {device}, throttled to {iops} reads/s and {bps / 1e6:g} MB/s; {_settings(block)}"
    return SlowDisk(path, device, about, group)


def _device(stack: contextlib.ExitStack, mib: int, read_ahead_kb: int, base: str | None) -> tuple[str, str, str, str]:
    """Make a disk; return its directory, its root, and its device: MAJOR:MINOR, and the directory in /sys."""
    require_disk(base or tempfile.gettempdir())
    with undisturbed():
        place = os.path.realpath(tempfile.mkdtemp(prefix="cloakfs-slow-", dir=base))
        stack.callback(shutil.rmtree, place)
    image, path = os.path.join(place, "image"), os.path.join(place, "disk")
    os.mkdir(path)
    with open(image, "xb") as file:
        file.truncate(mib << 20)
    # ext4 does nothing in the background: it has no tables to fill in later, and no journal.
    _run("mkfs.ext4", "-q", "-F", "-m", "0", "-O", "^has_journal", "-E", "lazy_itable_init=0", image)
    with undisturbed():
        stack.callback(unmount, path)  # this also removes the loop device
        _run("mount", "-t", "ext4", "-o", "loop,noatime", image, path)
    os.chmod(path, 0o755)
    number = os.stat(path).st_dev
    name = f"{os.major(number)}:{os.minor(number)}"
    block = os.path.realpath(f"/sys/dev/block/{name}")
    with undisturbed():
        _set_read_ahead(stack, os.path.join(block, "queue", "read_ahead_kb"), read_ahead_kb)
    return place, path, name, block


def _settings(block: str) -> str:
    return ", ".join(f"{one} {_setting(block, one)}" for one in ("read_ahead_kb", "max_sectors_kb", "scheduler"))


def require_disk(directory: str) -> None:
    """Check that a directory is on a disk.

    Raises:
        SlowDiskError: it is in memory.
    """
    kind = kind_of(directory)
    if kind in _IN_MEMORY:
        raise SlowDiskError(f"{directory}: lies on a {kind}, in memory; set TMPDIR to a directory on a disk")


def kind_of(directory: str) -> str:
    """Return the type of the file system that a directory is on, such as `ext4`."""
    known = mountinfo.by_path()
    at = os.path.realpath(directory)
    while at not in known:
        at = os.path.dirname(at)
    return known[at]


def device_of(directory: str) -> str:
    """Return what a directory is on, for the record: the device and its settings, or only the file system's type."""
    number = os.stat(directory).st_dev
    block = os.path.realpath(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    if not os.path.isdir(block):
        return kind_of(directory)
    if os.path.exists(os.path.join(block, "partition")):
        block = os.path.dirname(block)
    settings = [f"{setting} {_setting(block, setting)}" for setting in ("read_ahead_kb", "rotational", "scheduler")]
    return f"{kind_of(directory)} on {os.path.basename(block)}; {', '.join(settings)}"


def _setting(block: str, name: str) -> str:
    try:
        with open(os.path.join(block, "queue", name), encoding="ascii") as file:
            text = file.read().strip()
    except OSError:
        return "unknown"
    # Of several schedulers, the one in brackets is in use.
    return text.partition("[")[2].partition("]")[0] or text


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise SlowDiskError(f"{command[0]} is not installed (apt install e2fsprogs mount)") from None
    if done.returncode:
        raise SlowDiskError(" ".join(done.stderr.split()) or f"{command[0]}: exit status {done.returncode}")


def _set_read_ahead(stack: contextlib.ExitStack, path: str, kb: int) -> None:
    """Set the read-ahead, and restore it later, because the device keeps it for its next user."""
    try:
        with open(path, encoding="ascii") as file:
            before = file.read()
        _write(path, str(kb))
    except OSError as exc:
        raise SlowDiskError(f"{path}: {exc.strerror}") from exc
    stack.callback(_write, path, before)


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(text)


# -- the throttle --------------------------------------------------------------------------------------


def _throttle(stack: contextlib.ExitStack, name: str, device: str, iops: int, bps: int) -> str:
    """Make a cgroup that reads the device (MAJOR:MINOR) no faster than this; return its directory."""
    reasons = []
    for root, version in _hierarchies():
        try:
            if version == 1:
                limits = {"blkio.throttle.read_iops_device": iops, "blkio.throttle.read_bps_device": bps}
                return _group(stack, root, name, {file: f"{device} {value}" for file, value in limits.items()})
            _delegate_io(stack, root)
            return _group(stack, root, name, {"io.max": f"{device} riops={iops} rbps={bps}"})
        except OSError as exc:
            reasons.append(f"{exc.filename or root}: {exc.strerror}")
    raise SlowDiskError(
        "reads cannot be throttled here: " + ("; ".join(reasons) or "no cgroup hierarchy has blkio (v1) or io (v2)")
    )


def _hierarchies() -> Iterator[tuple[str, int]]:
    """Return where cgroups with the block I/O controller can be made, and the version of each."""
    with open("/proc/self/mounts", encoding="utf-8", errors="surrogateescape") as file:
        lines = [line.split() for line in file]
    for _, path, kind, options, *_ in lines:
        if kind == "cgroup" and "blkio" in options.split(","):
            yield path, 1
    for _, path, kind, *_ in lines:
        if kind == "cgroup2":
            with open(os.path.join(path, "cgroup.controllers"), encoding="ascii") as known:
                if "io" in known.read().split():
                    yield path, 2


def _delegate_io(stack: contextlib.ExitStack, root: str) -> None:
    path = os.path.join(root, "cgroup.subtree_control")
    with open(path, encoding="ascii") as file:
        if "io" in file.read().split():
            return
    _write(path, "+io")
    stack.callback(_write, path, "-io")


def _group(stack: contextlib.ExitStack, root: str, name: str, limits: dict[str, str]) -> str:
    group = os.path.join(root, name)
    os.mkdir(group)
    try:
        for file, text in limits.items():
            _write(os.path.join(group, file), text)
    except BaseException:
        os.rmdir(group)
        raise
    stack.callback(_remove, root, group)
    return group


def _remove(root: str, group: str) -> None:
    """Remove the cgroup, after moving the processes that are still in it."""
    deadline = time.monotonic() + _PATIENCE
    while True:
        with open(os.path.join(group, "cgroup.procs"), encoding="ascii") as file:
            for pid in file.read().split():
                with contextlib.suppress(OSError):  # it just ended
                    _write(os.path.join(root, "cgroup.procs"), pid)
        try:
            os.rmdir(group)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
        else:
            return
