"""A mounted file system: its kind, what its file handles are worth, and whether whoever asks it may have to wait."""

import contextlib
import logging
import os
import resource
import threading
import time
from dataclasses import dataclass
from functools import cached_property

from .. import linux
from ..linux import Stat
from . import calls

log = logging.getLogger(__name__)

# Their id (f_fsid) is their own, and stays.
_KNOWN_BY_ID = ("ext2", "ext3", "ext4", "btrfs")

# The id of a tmpfs (from Linux 5.13 on) is its own, too, but nothing of it is left when the machine was started again.
_LOST_WITH_THE_BOOT = "tmpfs"
_BOOT_ID = "/proc/sys/kernel/random/boot_id"

# A rename leaves the ctime of what is renamed alone. (Of what is remote, nobody knows: with sshfs it is the mtime.)
_SILENT_KINDS = frozenset({"vfat", "msdos", "exfat"})

_MEMORY_KINDS = frozenset({"tmpfs", "ramfs"})
_PLAIN_KINDS = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", *_MEMORY_KINDS})

# Kinds that begin so: networks, and daemons such as FUSE's. (autofs mounts something when it is looked at.)
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

# A local file system that kept the session loop waiting so long, twice in a while, is asked from threads for a while.
_SLOW_SECONDS = 0.005
_SLOW_FOR_SECONDS = 10.0

# So long a file system may take to tell about itself when it is met.
_MEET_SECONDS = 2.0


@dataclass(eq=False)
@dataclass(eq=False)
class Filesystem:
    """One mount of the tree: where handles of its objects are decoded."""

    number: int
    kind: str
    path: str
    fd: int
    flags: int = 0
    has_handles: bool = True
    decodable: bool = True
    watched: bool = False  # does fanotify report changes behind the mount?
    device: int = 0  # st_dev
    slow_until: float = 0.0  # by time.monotonic()
    suspect_until: float = 0.0  # the same
    below_remote: bool = False  # is it mounted inside of what is remote?
    pin: int = -1  # refers to the mount where `fd` does not, so that no other one is given its id
    is_certain: bool = False  # is its number that of no other one that is mounted at the same place later?

    @property
    def has_posix_rules(self) -> bool:
        """Do mode bits and POSIX ACLs alone decide, on this machine, and does every change show in the ctime?"""
        return self.kind in _PLAIN_KINDS

    @property
    def in_memory(self) -> bool:
        """Does nobody ever have to wait for what is there?"""
        return self.kind in _MEMORY_KINDS

    @cached_property
    def remote(self) -> bool:
        """May any call wait for another machine or process, perhaps for ever?"""
        return self.kind.startswith(_REMOTE_KINDS)

    @property
    def by_threads(self) -> bool:
        """Is what is above an object found out by threads alone (`look`)?"""
        return self.remote or self.below_remote

    @property
    def tells_moves(self) -> bool:
        """Does the ctime of an object show that it was renamed?"""
        return not self.remote and self.kind not in _SILENT_KINDS

    @property
    def waits(self) -> bool:
        """Is it better asked from a thread?"""
        return self.remote or self.below_remote or (self.slow_until > 0 and time.monotonic() < self.slow_until)

    def stat(self, fd: int) -> Stat:
        """The stat of a descriptor on it; if it is remote, as the kernel remembers it: a thread has just asked."""
        return calls.statx_fd(fd)[0] if self.remote else calls.fstat(fd)

    def begin(self) -> tuple[float, int]:
        """Call before it is asked from the session loop; the result is for `took`."""
        now = time.monotonic()
        return now, _waits_of_this_thread() if now < self.suspect_until else -1

    def took(self, began: tuple[float, int]) -> None:
        """It has answered, or failed. If it made the loop wait for long, threads are to ask it for a while.

        On a busy machine a call may take long for want of a processor, and threads would make that worse. To find out
        costs as much as a fast call: so only after a first one that took long it is asked of the next ones.
        """
        since, waits = began
        now = time.monotonic()
        if now - since <= _SLOW_SECONDS or self.in_memory:
            return
        if waits < 0:
            self.suspect_until = now + _SLOW_FOR_SECONDS
        elif _waits_of_this_thread() > waits:
            self.slow_until = now + _SLOW_FOR_SECONDS
            self.suspect_until = self.slow_until + _SLOW_FOR_SECONDS

    def describe(self, fd: int) -> None:
        """Find out what file handles it has. `fd` refers to where it is mounted."""
        self.device = calls.ask(linux.ROOT, fd).st_dev
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

    def describe_remote(self, fd: int) -> None:
        """The same, of what may never answer: for a moment everything waits for it, but no longer."""
        answer = Filesystem(self.number, self.kind, self.path, -1)
        own = calls.dup(fd)

        def ask() -> None:
            with contextlib.suppress(OSError):
                answer.describe(own)
                done.set()

        done = threading.Event()
        threading.Thread(target=ask, daemon=True).start()
        if done.wait(_MEET_SECONDS):
            calls.close(own)
            for name in ("device", "fd", "flags", "has_handles", "decodable"):
                setattr(self, name, getattr(answer, name))
        else:
            self.has_handles = self.decodable = False
            log.warning("%s (%s) does not answer", self.path, self.kind)


def _waits_of_this_thread() -> int:
    """How often it has given up the processor to wait for something (getrusage(2))."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


# -- the same file system, met again ---------------------------------------------------------------


def identity(fd: int, kind: str) -> int | str:
    """What tells the file system that `fd` (O_PATH) is on from another one mounted there later; 0 if nothing does."""
    if kind in _KNOWN_BY_ID:
        return calls.fstatvfs(fd).f_fsid
    if kind == _LOST_WITH_THE_BOOT:
        number, boot = calls.fstatvfs(fd).f_fsid, boot_id()
        return f"{number}@{boot}" if number and boot else 0
    if kind == "xfs":  # of which f_fsid is the number of the device
        with contextlib.suppress(OSError):
            opened = calls.open(linux.ROOT, fd, os.O_RDONLY | os.O_NONBLOCK)
            try:
                return calls.xfs_uuid(opened).hex()
            finally:
                calls.close(opened)
    return 0


def boot_id() -> str:
    """What names the time since the machine was started; "" if the kernel does not tell."""
    with contextlib.suppress(OSError), open(_BOOT_ID, encoding="ascii") as file:
        return file.read().strip()
    return ""


def key(inside: str, kind: str, identity: int | str) -> str:
    """What the index knows a file system by: where in the tree it is mounted, its kind, and its `identity`."""
    return _storable(f"{inside}\0{kind}\0{identity}")


def former_key(inside: str, kind: str, identity: int | str) -> str | None:
    """What the index of 0.1.0 knew it by, if that was something else.

    What is known from then is taken to be of the file system that is there now.
    """
    return key(inside, kind, 0) if kind in ("xfs", _LOST_WITH_THE_BOOT) and identity else None


def is_lost(known_as: str, boot: str) -> bool:
    """Is a file system that the index knows by this key gone for good?"""
    _, _, known = known_as.partition("\0")
    kind, _, identity = known.partition("\0")
    _, at, its_boot = identity.partition("@")
    return kind == _LOST_WITH_THE_BOOT and bool(at) and bool(boot) and its_boot != boot


def _storable(text: str) -> str:
    """The text as a database takes it, and unlike any other's, also if it has bytes that are no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return "\0" + os.fsencode(text).hex()
    return text
