"""A mounted file system: its kind, what its file handles are worth, and whether asking it may take long."""

import contextlib
import logging
import math
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import InitVar, dataclass
from typing import Any, TypeVar

from .. import linux
from ..linux import Stat, mountinfo, ownfiles
from . import calls

log = logging.getLogger(__name__)

_T = TypeVar("_T")

# Kinds whose id (f_fsid) is unique to the file system and permanent.
_KNOWN_BY_ID = ("ext2", "ext3", "ext4", "btrfs", "ceph")

# The id of a tmpfs (from Linux 5.13 on) is unique, too, but the file system is gone after a reboot.
_LOST_WITH_THE_BOOT = "tmpfs"
BOOT_ID = "/proc/sys/kernel/random/boot_id"

# Kinds on which a rename leaves the object's ctime unchanged. (Remote ones are unpredictable: sshfs shows the mtime.)
_SILENT_KINDS = frozenset({"vfat", "msdos", "exfat"})

# Kinds that can reserve blocks for a user or a group (resuid=, resgid=, tune2fs -u, -g).
_RESERVING_KINDS = frozenset({"ext2", "ext3", "ext4", "f2fs"})

_MEMORY_KINDS = frozenset({"tmpfs", "ramfs"})
PLAIN_KINDS = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", *_MEMORY_KINDS})

# Kinds whose files are made up by the kernel when they are read, most of which say that they are empty.
_MADE_UP_KINDS = frozenset(
    {
        "proc", "sysfs", "cgroup", "cgroup2", "debugfs", "tracefs", "configfs", "securityfs", "selinuxfs", "smackfs",
        "binfmt_misc", "rpc_pipefs", "nfsd", "fusectl", "pstore", "resctrl",
    }
)  # fmt: skip

# Prefixes of kinds served by a network or a daemon such as FUSE's. (autofs mounts something at a lookup.)
_REMOTE_KINDS = (
    "nfs",
    "cifs",
    "smb",
    "fuse",
    "9p",
    "ceph",
    "afs",
    "virtiofs",
    "lustre",
    "gfs",
    "ocfs",
    "autofs",
    "beegfs",
)

SLOW_SECONDS = 0.005
"""A local file system that blocks the session loop for longer than this, twice within SLOW_FOR_SECONDS, is called from
threads for that time."""

SLOW_FOR_SECONDS = 10.0


@dataclass(eq=False)
class MountedFilesystem:
    """One mount of the tree, which decodes the handles of its objects.

    Attributes:
        has_posix_rules: whether mode bits and POSIX ACLs alone decide, on this machine, and every change shows in the
            ctime.
        in_memory: whether it is in memory, so that no call on it ever has to wait.
        can_reserve: whether it is of a kind that can reserve blocks for a user or a group.
        reserves_for_groups: whether it may have blocks that only members of a group get. (`describe` finds that out,
            and `Housekeeping` again and again, since a remount may change it.)
        makes_up_files: whether content is made up when a file is read, so that it is not mapped.
        remote: whether any call may wait for another machine or process, perhaps for ever.
        by_threads: whether only threads may find out what is above an object (`prefault`).
        stat: returns the stat of a descriptor on it; if it is remote, what the kernel cached when it was prefaulted.
    """

    number: int
    kind: str
    path: str
    fd: int
    flags: int = 0
    has_handles: bool = True
    decodable: bool = True
    watched: bool = False  # whether fanotify reports changes behind the mount, on it and on all above it
    device: int = 0  # st_dev
    slow_until: float = 0.0  # by time.monotonic()
    suspect_until: float = 0.0  # likewise
    below_remote: InitVar[bool] = False  # whether it is mounted inside a remote file system
    pin: int = -1  # holds the mount where `fd` does not, so that its id is not given to another one
    is_certain: bool = False  # whether no other file system that is later mounted at the same place gets its number

    def __post_init__(self, below_remote: bool) -> None:
        # No properties and no method, since every request reads them.
        self.has_posix_rules = self.kind in PLAIN_KINDS
        self.in_memory = self.kind in _MEMORY_KINDS
        self.can_reserve = self.kind in _RESERVING_KINDS
        self.reserves_for_groups = self.kind not in PLAIN_KINDS or self.can_reserve
        self.makes_up_files = self.kind in _MADE_UP_KINDS
        self.remote = self.kind.startswith(_REMOTE_KINDS)
        self.by_threads = self.remote or below_remote
        self.stat = _stat_in_cache if self.remote else calls.fstat
        self._holds = 0

    @property
    def ctime_shows_renames(self) -> bool:
        """Whether the ctime of an object shows that it was renamed."""
        return not self.remote and self.kind not in _SILENT_KINDS

    @property
    def shared_key(self) -> str:
        """What mounts have in common that may show the same file. (A subvolume of btrfs has an st_dev of its own.)"""
        return self.kind if self.kind == "btrfs" else f"{os.major(self.device)}-{os.minor(self.device)}"

    @property
    def waits(self) -> bool:
        """Whether calls on it should be made in a thread."""
        return self.by_threads or (self.slow_until > 0 and time.monotonic() < self.slow_until)

    def timed(self, call: Callable[..., _T], *args: Any) -> _T:
        """Make a call on it in the session loop. If the loop had to wait for long, threads make the calls for a while.

        On a busy machine a call may take long for lack of a processor, and threads would make that worse. To
        distinguish the two costs as much as a fast call, so it is done only for a while after a first call that took
        long.
        """
        since = time.monotonic()
        waits = waits_of_this_thread() if since < self.suspect_until else -1
        try:
            return call(*args)
        finally:
            now = time.monotonic()
            if now - since > SLOW_SECONDS and not self.in_memory:
                if waits < 0:
                    self.suspect_until = now + SLOW_FOR_SECONDS
                elif waits_of_this_thread() > waits:
                    self.suspect_until = now + 2 * SLOW_FOR_SECONDS
                    self.slow_until = max(self.slow_until, now + SLOW_FOR_SECONDS)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Have threads make all calls on it meanwhile, since one may keep a directory locked until a client lets go.

        A client can make a read of a file that passes take for ever (`filesystem.passthrough`), and so the removal of
        the file, during which the kernel has the directory locked.
        """
        self._holds += 1
        self.slow_until = math.inf
        try:
            yield
        finally:
            self._holds -= 1
            if not self._holds:
                self.slow_until = 0.0

    def describe(self, fd: int) -> None:
        """Find out what kind of file handles it has. `fd` refers to the place at which it is mounted."""
        self.device = calls.fstat_as(linux.ROOT, fd).st_dev
        if self.can_reserve:
            self.reserves_for_groups = self.device not in mountinfo.devices_without_option(b"resgid=")
        try:
            self.fd = calls.open(linux.ROOT, fd, os.O_RDONLY | os.O_NONBLOCK)
        except OSError:
            self.decodable = False  # a device or socket that is a mount point itself
        for flags in (0, linux.AT_HANDLE_FID):
            try:
                handle, _ = calls.name_to_handle(fd, flags)
            except OSError:
                continue
            self.flags = flags
            try:
                calls.close(calls.find_handle(self.fd, handle))
            except OSError:
                self.decodable = False
            break
        else:
            self.has_handles = self.decodable = False

    def describe_remote(self, fd: int, seconds: float) -> None:
        """Find out what kind of file handles it has, if it answers within `seconds`: a remote one may never answer."""
        answer = MountedFilesystem(self.number, self.kind, self.path, -1)
        own = calls.dup(fd)

        def describe() -> None:
            with contextlib.suppress(OSError):
                answer.describe(own)
                done.set()

        done = threading.Event()
        threading.Thread(target=describe, daemon=True).start()
        if done.wait(seconds):
            calls.close(own)
            for name in ("device", "fd", "flags", "has_handles", "decodable"):
                setattr(self, name, getattr(answer, name))
        else:
            self.has_handles = self.decodable = False
            log.warning("%s (%s) does not answer", self.path, self.kind)


def _stat_in_cache(fd: int) -> Stat:
    return calls.statx_fd(fd)[0]


def waits_of_this_thread() -> int:
    """Return how often this thread has given up the processor to wait for something (getrusage(2))."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


# -- recognizing a file system ---------------------------------------------------------------------


def identity(fd: int, kind: str) -> int | str:
    """Return what distinguishes the file system of `fd` (O_PATH) from a later one at its place; 0 if nothing does."""
    if kind in _KNOWN_BY_ID:
        return calls.fstatvfs(fd).f_fsid
    if kind == _LOST_WITH_THE_BOOT:
        number, boot = calls.fstatvfs(fd).f_fsid, boot_id()
        return f"{number}@{boot}" if number and boot else 0
    if kind == "xfs":  # its f_fsid is the number of the device
        with contextlib.suppress(OSError):
            opened = calls.open(linux.ROOT, fd, os.O_RDONLY | os.O_NONBLOCK)
            try:
                return calls.xfs_uuid(opened).hex()
            finally:
                calls.close(opened)
    return 0


def boot_id() -> str:
    """Return the kernel's id of the present boot; "" if the kernel does not report it."""
    with contextlib.suppress(OSError), ownfiles.open(BOOT_ID, encoding="ascii") as file:
        return file.read().strip()
    return ""


def key(inside: str, kind: str, identity: int | str) -> str:
    """Return the index's key for a file system: where in the tree it is mounted, its kind, and its `identity`."""
    return _storable(f"{inside}\0{kind}\0{identity}")


def former_key(inside: str, kind: str, identity: int | str) -> str | None:
    """Return the key that the index of 0.1.0 used for it, if that was a different one.

    The entries from then are assumed to belong to the file system that is mounted now.
    """
    return key(inside, kind, 0) if kind in ("xfs", "ceph", _LOST_WITH_THE_BOOT) and identity else None


def is_lost(known_as: str, boot: str) -> bool:
    """Whether the file system that the index knows by this key is gone for good."""
    _, _, known = known_as.partition("\0")
    kind, _, identity = known.partition("\0")
    _, at, its_boot = identity.partition("@")
    return kind == _LOST_WITH_THE_BOOT and bool(at) and bool(boot) and its_boot != boot


def _storable(text: str) -> str:
    """Return the text in a form that the database accepts and that stays unique, even if it is not valid UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return "\0" + os.fsencode(text).hex()
    return text
