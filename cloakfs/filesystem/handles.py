"""What clients have open, and the entries of directories that were read ahead."""

import errno
import os
from collections import Counter
from typing import Any

import trio
from pyfuse3 import FileHandleT, FUSEError

from .. import linux
from ..shares import Shares
from ..tree import calls
from ..tree.actor import Actor, credentials
from ..tree.filesystems import MountedFilesystem
from ..tree.nodes import Nodes
from ..tree.objects import CompletenessProof, Object
from ..tree.request import SET_ID, Request

MOST_ENTRIES = 20_000
"""How many entries of directories are read ahead for one caller at most; they take some 3 MB."""


_MUCH = 1 << 20
"""Closing a file may take long if more bytes than this were written: ext4 sends them to the disk then, if the file was
emptied before."""


# How many files of one file system are closed at a time, where that may take long.
_CLOSING = 32
_NO_THREAD_SECONDS = 0.5


class OpenFile:
    """What a client has open; its handle is the number of the descriptor."""

    __slots__ = ("flags", "no_set_id_in", "number", "obj", "opener", "uid", "unreadable", "written")

    is_directory = False

    def __init__(self, at: Request, opener: linux.Credentials | None = None, flags: int = 0) -> None:
        self.obj = at.obj
        self.number = at.number  # the number of the view, which a reload may replace
        self.uid = at.who.uid
        self.opener = opener  # as whom further calls are made, where that matters
        self.flags = flags  # the client's flags of open(2)
        self.unreadable = False  # opened for its attributes alone
        # The epoch of `OpenFiles` in which it has no set-id bits, which the real tree would drop when it is written to.
        self.no_set_id_in = -1
        self.written = 0  # bytes

    @property
    def appends(self) -> bool:
        """Whether it was opened with O_APPEND."""
        return self.flags & os.O_APPEND != 0

    @property
    def executes(self) -> bool:
        """Whether it was opened by execve(2), which keeps it open as long as the program runs."""
        return self.flags & linux.FMODE_EXEC != 0

    @property
    def may_be_mapped(self) -> bool:
        """Whether it may be mapped for writing, which takes O_RDWR (mmap(2))."""
        return self.flags & os.O_ACCMODE == os.O_RDWR


Entry = tuple[bytes, int, int, int]
"""An entry of a directory that was read ahead: its name, the real position after it, DT_… (readdir(3)), and the same
position as clients see it (`tree.positions`). (A class of its own would take as long to make as all the rest.)"""


class OpenDirectory(OpenFile):
    """A directory that a client has open."""

    __slots__ = (
        "at_end", "begins", "cookie", "end", "found", "is_kept", "pending", "proof", "shown", "sought", "tweak",
        "unreported",
    )  # fmt: skip

    is_directory = True

    def __init__(self, at: Request) -> None:
        super().__init__(at)
        # The position at which `pending`, the entries read ahead, begin, and the same as clients see it.
        self.cookie = self.shown = 0
        self.pending: list[Entry] = []
        self.begins = True  # whether no entry has been checked since the beginning
        self.at_end = False  # whether nothing comes after `pending`
        self.tweak = -1  # the tweak of `tree.positions`; negative until it is needed
        self.end = 0  # the end, as clients see it
        # Names whose attributes were noted as known to the viewer, but did not fit into the reply.
        self.unreported: tuple[bytes, ...] = ()
        self.proof: CompletenessProof | None = None  # what it proves if nothing is in its way
        self.is_kept = False  # whether the kernel keeps what is answered
        # If it is remote: what names lead to (O_PATH), while a request is being served.
        self.found: dict[bytes, int] = {}
        self.sought: int | None = None  # the nodeid whose name is all that the kernel wants from this


class HalfRead:
    """Entries that were read ahead and not reported yet, by who opened the directory; their number is bounded.

    What exceeds the bound is dropped, and read again from the position where it began.
    """

    def __init__(self) -> None:
        # By uid: numbers of entries, the directory read last at the end.
        self._of: dict[int, dict[OpenDirectory, int]] = {}
        self._totals: Counter[int] = Counter()

    def take(self, file: OpenDirectory) -> None:
        """Exempt the entries of a directory from being dropped, since a request reads on, or has closed it."""
        files = self._of.get(file.uid)
        if files is None or file not in files:
            return
        self._totals[file.uid] -= files.pop(file)
        if not files:
            del self._of[file.uid], self._totals[file.uid]

    def put(self, file: OpenDirectory) -> None:
        """Allow the entries of a directory to be dropped, since no request reads it for now."""
        self.take(file)
        if not file.pending:
            return
        files = self._of.setdefault(file.uid, {})
        files[file] = len(file.pending)
        self._totals[file.uid] += len(file.pending)
        while self._totals[file.uid] > MOST_ENTRIES and len(files) > 1:
            oldest = next(iter(files))
            self._totals[file.uid] -= files.pop(oldest)
            oldest.pending = []
            oldest.cookie = oldest.shown = -1  # whichever position comes next, the descriptor is not there


class OpenFiles:
    """The files and directories that clients have open.

    Args:
        nodes: the objects.
        most: how many there may be.

    Attributes:
        by_fd: all of them, by descriptor.
        shares: how many descriptors each caller has, by its server uid: open ones, and those that are being closed.
        epoch: is increased whenever it is not known any more which files have set-id bits.
    """

    def __init__(self, nodes: Nodes, most: int) -> None:
        self._nodes = nodes
        self.by_fd: dict[int, OpenFile] = {}
        self.shares: Shares[int] = Shares(most)
        self.epoch = 0
        self._closing: dict[MountedFilesystem, trio.CapacityLimiter] = {}

    def opened(
        self,
        fd: int,
        at: Request,
        *,
        as_opener: bool = False,
        opener: linux.Credentials | None = None,
        flags: int = 0,
    ) -> FileHandleT:
        """Keep `fd`, which refers to the file of `at`, for a client.

        Args:
            fd: the descriptor.
            at: its object and stat are those of what was opened.
            as_opener: whether further calls on it are made as the caller that opened it.
            opener: the credentials for them, if these are not all of the caller's.
            flags: the client's flags of open(2).
        """
        if as_opener and opener is None:
            opener = credentials(at.who.caller, at.who.lacks)
        file = self.by_fd[fd] = OpenFile(at, opener, flags)
        self.shares.take(file.uid)
        filesystem = at.obj.filesystem
        # Where a thread was waited for, `at.info` may be from before that. (A remote one would be no newer now.)
        is_current = filesystem.remote or not (filesystem.by_threads or filesystem.slow_until > 0)
        if is_current and not at.info.st_mode & SET_ID:
            file.no_set_id_in = self.epoch
        if flags & os.O_TRUNC:
            at.obj.report_size(at.number, 0)
        self._nodes.registry.opened(at.obj, fd, at.number)
        return FileHandleT(fd)

    def opened_directory(self, fd: int, at: Request) -> OpenDirectory:
        """Keep `fd`, which refers to the directory of `at`, for a client."""
        directory = self.by_fd[fd] = OpenDirectory(at)
        self.shares.take(directory.uid)
        self._nodes.registry.opened(at.obj, fd, at.number)
        return directory

    def directory(self, fh: FileHandleT) -> OpenDirectory:
        """Return a directory that a client has open."""
        directory = self.by_fd[fh]
        assert isinstance(directory, OpenDirectory)
        return directory

    def close(self, fh: FileHandleT) -> OpenFile | None:
        """Close a client's file; return it if that is left to `close_in_thread`, because it may take long.

        The close of a remote file takes a request to its server.
        """
        file = self.by_fd.pop(fh)
        self._nodes.registry.closed(file.obj, fh)
        filesystem = file.obj.filesystem
        may_wait = filesystem.by_threads or filesystem.slow_until > 0  # what `waits` depends on, without a call
        if (may_wait and filesystem.waits) or (file.written > _MUCH and not filesystem.in_memory):
            return file
        calls.close(fh)
        self.shares.give_back(file.uid)
        return None

    async def close_in_thread(self, fh: FileHandleT, file: OpenFile) -> None:
        """Close the descriptor that `close` has left, in a thread.

        Each file system has only so many threads for this: one that hangs holds up no other. What is yet to be closed
        counts as the caller's.
        """
        limiter = self._closing.setdefault(file.obj.filesystem, trio.CapacityLimiter(_CLOSING))
        while True:
            try:
                await trio.to_thread.run_sync(calls.close, fh, limiter=limiter, abandon_on_cancel=True)
            except RuntimeError:  # no more threads can start
                await trio.sleep(_NO_THREAD_SECONDS)
            else:
                break
        self.shares.give_back(file.uid)

    def has_open(self, who: Actor, obj: Object) -> bool:
        """Whether `who` opened this file while it was visible. Directories do not count: nothing is read from them."""
        opened = (self.by_fd[fd] for fd in obj.open_files)
        return any(not file.is_directory and file.uid == who.uid for file in opened)

    def is_open(self, obj: Object, number: int) -> bool:
        """Whether a caller has opened this file, in the view of this number, to read or write it."""
        opened = (self.by_fd[fd] for fd in obj.open_files)
        return any(file.number == number and not file.is_directory and not file.unreadable for file in opened)

    def may_be_mapped(self, obj: Object) -> bool:
        """Whether a mapping of the file may have been modified without the real file knowing yet.

        When a mapping goes, the kernel writes it to the file before it closes the latter.
        """
        return any(self.by_fd[fd].may_be_mapped for fd in obj.open_files)

    def is_executed(self, obj: Object) -> bool:
        """Whether the file is a program that runs."""
        return any(self.by_fd[fd].executes for fd in obj.open_files)

    def may_have_set_id(self, obj: Object | None) -> None:
        """Note that a file, or any if it is None, may have set-id bits now, which it loses when it is written to."""
        if obj is None:
            self.epoch += 1
            return
        for fd in obj.open_files:
            self.by_fd[fd].no_set_id_in = -1

    def act_with_groups(self, obj: Object, who: Actor) -> None:
        """Write to the file, if `who` has opened it, with its groups from now on: it has become S_ISGID.

        A write by a user who is not in the group of the file drops that bit, also where it is not about execution.
        """
        for fd in obj.open_files:
            file = self.by_fd[fd]
            if file.opener == linux.Credentials(who.uid, who.gid, (), who.lacks):
                file.opener = credentials(who.caller, who.lacks)

    def may_lose_set_id(self, file: OpenFile) -> bool:
        """Whether the file may have lost set-id bits by being written to."""
        return file.no_set_id_in != self.epoch

    def check_set_id(self, fh: FileHandleT) -> None:
        """Note that the file has no set-id bits, if that is so."""
        file = self.by_fd[fh]
        if not file.obj.filesystem.remote and not calls.fstat(fh).st_mode & SET_ID:
            file.no_set_id_in = self.epoch

    def opener(self, fh: Any) -> int:
        """Return who counts as the caller of a request without one: the opener's server uid, as a number below 0."""
        file = self.by_fd.get(fh)
        return -1 if file is None else -2 - file.uid

    def require_readable(self, fh: FileHandleT) -> None:
        """Refuse to read what was opened for its attributes alone.

        Raises:
            FUSEError: EACCES: the file was opened for its attributes alone.
        """
        if self.by_fd[fh].unreadable:
            raise FUSEError(errno.EACCES)
