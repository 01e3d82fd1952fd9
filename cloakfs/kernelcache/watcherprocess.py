"""The watcher: reads what is changed on file systems that several mounts show, and tells those whom it concerns.

Each mount would read every change otherwise, whether its kernel knows anything there or not: the more mounts, the more
a change costs, also on the real tree. One process reads for all mounts of a machine instead. An event goes to the
daemons that have marked the object, or its directory (`interest`). Three kinds go further:

    of a directory itself (its mode, for example)        also to those who know the directory above, as it may have
                                                         been listed there
    of a file's attributes, without a name: by handle,   also to those who have marked `ANY_FILE`, as it may have
    or because it got another hard link                  been listed anywhere
    events were lost                                     to all

A daemon that does not take its events in time is let go. It connects anew, and takes everything as changed; so it does
when this process has died.

It imports no more than it needs, and nothing but the standard library.
"""

import contextlib
import errno
import json
import os
import select
import signal
import socket
import sys
import time
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from ..linux import fanotify, ownfiles, process, sockets
from ..linux.fanotify import FAN_ATTRIB, FAN_ONDIR, FAN_Q_OVERFLOW, OF_ITSELF, Event
from ..tree import calls
from .interest import ANY_FILE, COLUMNS, InterestTable
from .marks import FilesystemMarks

VERSION = 1
"""Of what daemons and this process say to each other, and of the table. Each version has a process of its own."""

NAME = "cloakfs-watcher"
"""The name that `ps` shows."""

EVENTS, ANSWER = b"E", b"A"
"""How messages to a daemon begin: with events as the kernel reports them, or JSON."""

HURRY, ADD = b"H", b"F"
"""What a daemon says: that it waits for what has happened until now, or that it shows a file system.

The latter comes with a descriptor, and is followed by a number, which the answer has, too.
"""

_IDLE_SECONDS = 10.0

_HELLO_SECONDS = 1.0  # for a daemon to say who it is

_NO_DESCRIPTOR_SECONDS = 0.1  # until there may be one again

# After events were read, others are left for so long, unless a daemon is in a hurry.
_PAUSE_SECONDS = 0.002

# While an inode is just being freed, its handle is ENOMEM at times, and afterwards ESTALE (ext4, Linux 6.18).
_ATTEMPTS = 3

_SO_SNDBUFFORCE = 32  # socket(7)
_BATCH = 65536
_MOST_UNREAD = 2 << 20  # bytes that a daemon has not taken yet: some 16,384 events, as the kernel keeps
_MOST_IN_MESSAGE = 16384  # a daemon handles these in one step, for which all its requests wait
_LARGEST = 1 << 16


@dataclass(eq=False)
class _Mount:
    """A mount that is told of changes.

    Attributes:
        connection: to its daemon.
        table: of its column.
        column: in the table.
        pid: its daemon.
        wants_own: whether it is told what its daemon has changed itself.
        shown: a descriptor on each file system that it shows, by the id that events carry.
        unsent: what it is about to be told.
    """

    connection: socket.socket
    table: InterestTable
    column: int
    pid: int
    wants_own: bool
    shown: dict[int, list[int]] = field(default_factory=dict)
    unsent: list[bytes] = field(default_factory=list)


class _Shown(NamedTuple):
    """Where a file system is shown.

    Attributes:
        tops: by the handle of a directory, a descriptor on each mount of the kernel that has it as its top.
    """

    tops: dict[bytes, list[int]]

    @property
    def fd(self) -> int:
        """A descriptor on it."""
        return next(iter(self.tops.values()))[0]

    def through(self, handle: bytes) -> list[int]:
        """Return descriptors on mounts by which all places are reached that a directory is in.

        It is in one directory of the file system, and where it is mounted as the top of a mount.
        """
        others = (fds[0] for top, fds in self.tops.items() if top != handle)
        return [*islice(others, 1), *self.tops.get(handle, ())]


class ChangeWatcher:
    """Serves the daemons that connect.

    Args:
        listening: where they connect.
        lock: the file that is locked by who connects, or starts a watcher.
        idle_seconds: how long to wait after the last daemon has left.
    """

    def __init__(self, listening: socket.socket, lock: str, idle_seconds: float = _IDLE_SECONDS) -> None:
        self._listening = listening
        self._lock = lock
        self._idle_seconds = idle_seconds
        self._socket = ownfiles.lstat(listening.getsockname())
        self._marks = FilesystemMarks(needs_targets=True)
        self._tables: list[tuple[InterestTable, dict[int, _Mount]]] = []
        self._mounts: dict[int, _Mount] = {}  # by the descriptor of the connection
        self._shown: dict[int, _Shown] = {}  # what `_shown_now` has returned since a mount came or went
        self._poll = select.epoll()
        self._poll.register(listening, select.EPOLLIN)
        self._poll.register(self._marks.fd, select.EPOLLIN)

    def run(self) -> None:
        """Serve until no daemon is left."""
        while True:
            ready = [fd for fd, _ in self._poll.poll(-1 if self._mounts else self._idle_seconds)]
            if not ready and self._is_over():
                return
            self._answer(ready)
            if self._marks.fd in ready:
                self._pass_on()
                self._rest()

    def _is_over(self) -> bool:
        """Whether this may end: nobody is about to connect."""
        lock = ownfiles.open_fd(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if not ownfiles.lock(lock):
                return False
            path = self._listening.getsockname()
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(ownfiles.lstat(path), self._socket):  # no other watcher has replaced this one
                    ownfiles.unlink(path)
            return True
        finally:
            os.close(lock)

    def _rest(self) -> None:
        """Let events come together for a while."""
        self._poll.modify(self._marks.fd, 0)
        ready = [fd for fd, _ in self._poll.poll(_PAUSE_SECONDS)]
        self._poll.modify(self._marks.fd, select.EPOLLIN)
        self._answer(ready)

    # -- daemons -----------------------------------------------------------------------------------

    def _answer(self, ready: list[int]) -> None:
        for fd in ready:
            if fd == self._listening.fileno():
                self._accept()
            elif (mount := self._mounts.get(fd)) is not None:
                try:
                    self._hear(mount)
                except (OSError, ValueError):
                    self._let_go(mount)

    def _accept(self) -> None:
        try:
            connection, _ = self._listening.accept()
        except OSError:  # there is no descriptor left
            time.sleep(_NO_DESCRIPTOR_SECONDS)
            return
        connection.settimeout(_HELLO_SECONDS)
        try:
            said = json.loads(connection.recv(_LARGEST))
            table, mounts = self._table()
            column = next(number for number in range(COLUMNS) if number not in mounts)
            table.clear(column)
            # As events have it, also of a daemon in a pid namespace. One that is not seen here is told of its own, too.
            pid = sockets.peer_pid(connection) or -1
            mount = _Mount(connection, table, column, pid, bool(said["own"]))
            answer = ANSWER + json.dumps({"column": column, "pid": pid}).encode()
            socket.send_fds(connection, [answer], [table.fd, self._marks.fd])
        except (OSError, ValueError, KeyError):
            connection.close()
            return
        connection.setblocking(False)
        with contextlib.suppress(OSError):  # in a container, it has as much room as others
            connection.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, _MOST_UNREAD)
        mounts[column] = self._mounts[connection.fileno()] = mount
        self._poll.register(connection, select.EPOLLIN)

    def _table(self) -> tuple[InterestTable, dict[int, _Mount]]:
        for table, mounts in self._tables:
            if len(mounts) < COLUMNS:
                return table, mounts
        self._tables.append((InterestTable(), {}))
        return self._tables[-1]

    def _hear(self, mount: _Mount) -> None:
        """Do what a daemon says.

        Raises:
            OSError: the daemon has ended.
        """
        said, fds, _, _ = socket.recv_fds(mount.connection, _LARGEST, 1)
        if not said:
            raise ConnectionResetError
        if not said.startswith(ADD):
            return
        self._shown.clear()
        problem: int | None = None if fds else errno.EMFILE  # the kernel had no descriptor left for it
        for fd in fds:
            try:
                fsid = self._marks.add(fd)
            except OSError as exc:
                os.close(fd)
                problem = exc.errno
            else:
                mount.shown.setdefault(fsid, []).append(fd)
        answer = {"number": int(said.removeprefix(ADD)), "errno": problem}
        mount.connection.send(ANSWER + json.dumps(answer).encode())

    def _let_go(self, mount: _Mount) -> None:
        """End what a mount is told. Its daemon, if it is still there, notices that."""
        self._poll.unregister(mount.connection)
        del self._mounts[mount.connection.fileno()]
        mount.connection.close()
        self._shown.clear()
        for table, mounts in self._tables:
            if table is mount.table:
                del mounts[mount.column]
        for fsid, fds in mount.shown.items():
            if not any(fsid in other.shown for other in self._mounts.values()):
                with contextlib.suppress(OSError):
                    self._marks.remove(fds[0])
            for fd in fds:
                os.close(fd)

    # -- events ------------------------------------------------------------------------------------

    def _pass_on(self) -> None:
        """Read events, and tell those whom they concern."""
        for table, _ in self._tables:
            table.begin()
        try:
            with contextlib.suppress(BlockingIOError):
                for record, pid in fanotify.records(fanotify.read(self._marks.fd, _BATCH)):
                    (event,) = fanotify.parse(record, -1)
                    for mount in self._concerned(event):
                        if mount.pid != pid or mount.wants_own or (event.mask & FAN_ONDIR and event.mask & OF_ITSELF):
                            mount.unsent.append(record)
            for mount in [mount for mount in self._mounts.values() if mount.unsent]:
                self._tell(mount)
        finally:
            for table, _ in self._tables:
                table.end()

    def _tell(self, mount: _Mount) -> None:
        records, mount.unsent = mount.unsent, []
        message = EVENTS
        try:
            for record in records:
                if len(message) + len(record) > _MOST_IN_MESSAGE:
                    mount.connection.send(message)
                    message = EVENTS
                message += record
            mount.connection.send(message)
        except OSError:  # it has ended, or does not read
            self._let_go(mount)

    def _concerned(self, event: Event) -> list[_Mount]:
        """Return the mounts that are told of an event."""
        try:
            handles = None if event.mask & FAN_Q_OVERFLOW else self._places(event)
        except OSError:  # it cannot be found out where it was
            handles = None
        if handles is None:
            return [*self._mounts.values()]
        found = {}
        for table, mounts in self._tables:
            for handle in handles:
                for column in table.wanted_by(handle):
                    if column in mounts:
                        found[id(table), column] = mounts[column]
        return [*found.values()]

    def _places(self, event: Event) -> set[bytes]:
        """Return of which objects, or places, a mount has to know one if it is to be told of an event.

        Raises:
            OSError: that cannot be told.
        """
        places = {event.directory, event.target}
        if event.mask & FAN_ATTRIB:
            if event.name == b"." and event.mask & FAN_ONDIR:
                places |= self._above(event)
            elif not event.directory and self._wants_any_file() and self._is_linked(event):
                places.add(ANY_FILE)
        return places

    def _wants_any_file(self) -> bool:
        return any(table.wanted_by(ANY_FILE) for table, _ in self._tables)

    def _shown_now(self, fsid: int) -> _Shown | None:
        """Return where a file system is shown; None if it is not any more."""
        if fsid not in self._shown:
            mounts: dict[int, int] = {}  # of the kernel
            for fd in (fd for mount in self._mounts.values() for fd in mount.shown.get(fsid, ())):
                mounts.setdefault(calls.name_to_handle(fd)[1], fd)
            if not mounts:
                return None
            tops: dict[bytes, list[int]] = {}
            for number, fd in mounts.items():
                tops.setdefault(_top(fd, number), []).append(fd)
            self._shown[fsid] = _Shown(tops)
        return self._shown[fsid]

    def _is_linked(self, event: Event) -> bool:
        """Whether a file that an event is about still has a name; True in doubt."""
        shown = self._shown_now(event.fsid)
        return shown is None or calls.is_linked(shown.fd, event.target)

    def _above(self, event: Event) -> set[bytes]:
        """Return the handle of the directory above the one that an event is about.

        For the top of a mount of the kernel, it is that of the place where it is mounted as well.

        Raises:
            OSError: it cannot be told.
        """
        shown = self._shown_now(event.fsid)
        if shown is None:
            return set()
        found = set()
        for mounted in shown.through(event.target):
            try:
                fd = _find(mounted, event.target)
            except OSError as exc:
                if exc.errno not in (errno.ESTALE, errno.ENOENT):
                    raise
                continue  # it is gone: an event with its name comes
            try:
                parent = calls.find_above(fd)
            finally:
                calls.close(fd)
            try:
                found.add(calls.name_to_handle(parent)[0])
            except OSError as exc:
                if exc.errno != errno.EOPNOTSUPP:  # outside, on a file system that is not watched
                    raise
            finally:
                calls.close(parent)
        return found


def _top(fd: int, mount: int) -> bytes:
    """Return the handle of the top of the mount of the kernel with this id, on which `fd` is.

    Raises:
        OSError: it cannot be told.
    """
    at, handle = calls.dup(fd), b""
    try:
        while True:
            try:
                here, number = calls.name_to_handle(at)
            except OSError as exc:
                if exc.errno != errno.EOPNOTSUPP or not handle:
                    raise
                return handle  # above is a file system without handles
            if number != mount or here == handle:  # "/" is above itself
                return handle
            handle, below = here, at
            at = calls.find_above(below)
            calls.close(below)
    finally:
        calls.close(at)


def _find(shown: int, handle: bytes) -> int:
    """Return a descriptor (O_PATH) for a file handle.

    Raises:
        OSError: there is nothing with this handle any more, or it cannot be told.
    """
    for left in reversed(range(_ATTEMPTS)):
        try:
            return calls.find_handle(shown, handle)
        except OSError as exc:
            if exc.errno != errno.ENOMEM or not left:
                raise
    raise AssertionError("it has been tried")


def main() -> None:
    """Listen at the path that is the first argument, and serve in the background. The second one is the lock's path."""
    path, lock = sys.argv[1:]
    for ignored in (signal.SIGHUP, signal.SIGINT):
        signal.signal(ignored, signal.SIG_IGN)
    watcher = ChangeWatcher(sockets.listen(path, mode=0o600, kind=socket.SOCK_SEQPACKET), lock)
    if os.fork():
        os._exit(0)
    process.call_this_process(NAME, path)
    watcher.run()
