"""A mount's end of the watcher (`watcherprocess`): what others change, of what this mount's kernel may know."""

import contextlib
import errno
import json
import logging
import os
import select
import socket
import sys
import time
from collections.abc import Callable, Iterable
from subprocess import DEVNULL, CalledProcessError

import trio

import cloakfs

from ..linux import fanotify, ownfiles, programs, sockets
from ..linux.fanotify import FAN_Q_OVERFLOW, Event
from .interest import InterestTable
from .watcherprocess import ADD, ANSWER, EVENTS, HURRY, VERSION

log = logging.getLogger(__name__)

# As for the reaper: next to nothing is imported, and nothing from the working directory.
_PROGRAM = (
    sys.executable, "-I", "-S", "-c",
    "import sys; sys.path.append(sys.argv.pop(1)); from cloakfs.kernelcache import watcherprocess; "
    "watcherprocess.main()",
    os.path.dirname(os.path.dirname(os.path.abspath(cloakfs.__file__))),
)  # fmt: skip

_LOST = Event(FAN_Q_OVERFLOW, 0, b"", b"", b"")
_LARGEST = 1 << 16
_ANSWER_SECONDS = 5.0
_RETRY_SECONDS = 1.0
_STEP_SECONDS = 0.0003
_LOCK_RETRY_SECONDS = 0.005
_NOTES_AT_ONCE = 1000  # in a millisecond


def watcher_path(directory: str) -> str:
    """Return where the watcher listens."""
    return os.path.join(directory, f"watcher-{VERSION}")


class SharedWatch:
    """What a `Watch` is, but read by a process that reads for all mounts of this machine.

    Args:
        directory: where the watcher listens.
        own: as of a `Watch`.

    Attributes:
        on_own: as of a `Watch`.
        known: returns the handles of what the kernel may know.
        on_unwatched: is called with True when changes are not reported any more, and with False when they are again.
            What has changed in between is reported as lost events.

    Raises:
        OSError: no watcher can be started.
    """

    def __init__(self, directory: str, *, own: bool = False) -> None:
        self._path, self._lock = watcher_path(directory), f"{watcher_path(directory)}.lock"
        self._own = own
        self.on_own: Callable[[Event], None] | None = None
        self.known: Callable[[], Iterable[bytes]] = tuple
        self.on_unwatched: Callable[[bool], None] = lambda _: None
        self._filesystems: list[int] = []
        self._link: _WatcherLink | None = _connect(self._path, self._lock, own=own, filesystems=())

    # -- what the kernel may know ------------------------------------------------------------------

    def note(self, handle: bytes) -> None:
        """Have changes of an object, and in it, reported from now on: the kernel is about to be told of it."""
        if self._link is not None:
            self._link.table.note(self._link.column, handle)

    async def note_known(self) -> None:
        """Have changes of all that the kernel may know reported; this takes a while if that is very much."""
        for number, handle in enumerate(self.known()):
            self.note(handle)
            if not number % _NOTES_AT_ONCE:
                await trio.lowlevel.checkpoint()

    def add(self, fd: int) -> int:
        """Watch the whole file system that `fd` (O_PATH suffices) is on (`FilesystemMarks.add`)."""
        if self._link is None:
            raise ConnectionResetError
        fsid = self._link.add(fd)
        self._filesystems.append(fd)
        return fsid

    # -- what has changed --------------------------------------------------------------------------

    async def changes(self) -> list[Event]:
        """Return what others changed since the last call; wait until there is something."""
        while True:
            if self._link is None or self._link.is_broken:
                await self._connect_again()
                return [_LOST]
            if not self._link.unread:
                await trio.lowlevel.wait_readable(self._link.connection)
            events = self.read()
            if events:
                return events

    def read(self) -> list[Event]:
        """Return what others changed since the last call, without waiting; perhaps not all of it (`has_read_all`)."""
        if self._link is None:
            return []
        raw = self._link.read()
        return [_LOST] if raw is None else self.parse(raw)

    def parse(self, raw: bytes) -> list[Event]:
        """Return what others changed, of what the watcher has sent."""
        events = []
        for event in fanotify.parse(raw, -1 if self._own else os.getpid()):
            if not event.own:
                events.append(event)
            elif self.on_own is not None:
                self.on_own(event)
        return events

    def is_silent(self) -> bool:
        """Whether nothing has happened that was not read yet."""
        return self._link is not None and self._link.is_silent()

    has_read_all = is_silent

    async def next_step(self) -> bool:
        """Let others go on, before more is read; return whether there is anything to be read by then."""
        is_here = self._link is not None and self._link.has_some()
        await (trio.lowlevel.checkpoint() if is_here else trio.sleep(_STEP_SECONDS))
        return is_here

    def close(self) -> None:
        """Stop watching; no task may be waiting in `changes`."""
        if self._link is not None:
            self._link.close()
            self._link = None

    async def _connect_again(self) -> None:
        """Connect to a watcher, since this one has died, or let us go. It need not succeed at once."""
        log.info("changes behind the mount: the watcher has ended, or has let this mount go; connecting again")
        self.close()
        is_unwatched = False
        while True:
            try:
                link = await trio.to_thread.run_sync(self._connect)
            except (OSError, CalledProcessError) as exc:
                if not is_unwatched:
                    log.warning("changes behind the mount are not reported: %s", exc)
                    self.on_unwatched(True)
                is_unwatched = True
                await trio.sleep(_RETRY_SECONDS)
                continue
            self._link = link
            await self.note_known()
            if is_unwatched:
                log.info("changes behind the mount are reported again")
                self.on_unwatched(False)
            return

    def _connect(self) -> "_WatcherLink":
        return _connect(self._path, self._lock, own=self._own, filesystems=self._filesystems)


class _WatcherLink:
    """The connection to a watcher.

    Args:
        path: where it listens.
        own: whether to be told of one's own changes.

    Attributes:
        connection: its socket.
        table: where to say what the kernel knows.
        column: ours.
        unread: events that came with an answer.
        is_broken: whether the watcher has gone, or has let us go.

    Raises:
        OSError: there is none, or it does not answer.
    """

    def __init__(self, path: str, own: bool) -> None:
        self.unread: list[bytes] = []
        self.is_broken = False
        self.connection = connection = sockets.connect(path, _ANSWER_SECONDS, socket.SOCK_SEQPACKET)
        try:
            connection.send(json.dumps({"pid": os.getpid(), "own": own}).encode())
            said, fds, _, _ = socket.recv_fds(connection, _LARGEST, 2)
            if len(fds) < 2:
                raise ConnectionResetError
        except OSError:
            connection.close()
            raise
        connection.setblocking(False)
        table, self._events = fds
        self.table = InterestTable(table)
        self.column = int(json.loads(said.removeprefix(ANSWER))["column"])
        self._hurried = 0
        self._poll = select.poll()
        self._poll.register(self._events, select.POLLIN)
        self._poll.register(connection, select.POLLIN)

    def add(self, fd: int) -> int:
        """Have the watcher watch the file system that `fd` is on.

        Raises:
            OSError: it cannot be watched, or the watcher does not answer.
        """
        self.connection.settimeout(_ANSWER_SECONDS)
        try:
            socket.send_fds(self.connection, [ADD], [fd])
            while not (said := self.connection.recv(_LARGEST)).startswith(ANSWER):
                if not said:
                    raise ConnectionResetError
                self.unread.append(said)
        finally:
            self.connection.setblocking(False)
        answer = json.loads(said.removeprefix(ANSWER))
        if "errno" in answer:
            raise OSError(answer["errno"], os.strerror(answer["errno"]))
        return int(answer["fsid"])

    def read(self) -> bytes | None:
        """Return what the watcher has sent, as much as is handled in one step; None if some of it was lost."""
        if self.unread:
            return self.unread.pop(0).removeprefix(EVENTS)
        try:
            said = self.connection.recv(_LARGEST)
        except BlockingIOError:
            return b""
        except OSError:
            said = b""
        if said:
            return said.removeprefix(EVENTS)
        self.is_broken = True
        return None

    def has_some(self) -> bool:
        """Whether there is something to be read here."""
        return bool(self.unread) or any(fd == self.connection.fileno() for fd, _ in self._poll.poll(0))

    def is_silent(self) -> bool:
        """Whether there is nothing to be read, neither here nor by the watcher, and it is not just passing it on."""
        count = self.table.count
        if self.unread or self.is_broken or count & 1:
            return False
        if ready := self._poll.poll(0):
            if count != self._hurried and ready[0][0] == self._events:
                self._hurried = count
                with contextlib.suppress(OSError):
                    self.connection.send(HURRY)
            return False
        return self.table.count == count

    def close(self) -> None:
        """End the connection; return when the watcher holds none of our file systems any more."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
            self.connection.settimeout(_ANSWER_SECONDS)
            while self.connection.recv(_LARGEST):
                pass
        self.connection.close()
        self.table.close()
        os.close(self._events)


def _connect(path: str, lock: str, *, own: bool, filesystems: Iterable[int]) -> _WatcherLink:
    """Connect to the watcher of this machine, and have it watch these file systems; start it first if there is none.

    Raises:
        OSError: there is none, and none can be started.
        CalledProcessError: likewise.
    """
    ownfiles.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
    held = ownfiles.open_fd(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        _lock(held)
        try:
            link = _WatcherLink(path, own)
        except OSError:  # there is none, or it is just dying
            programs.run(
                [*_PROGRAM, path, lock], stdin=DEVNULL, stdout=DEVNULL, stderr=DEVNULL, cwd="/",
                start_new_session=True, check=True,
            )  # fmt: skip
            link = _WatcherLink(path, own)
    finally:
        os.close(held)
    try:
        for fd in filesystems:
            link.add(fd)
    except OSError:
        link.close()
        raise
    return link


def _lock(fd: int) -> None:
    """Wait for the lock of those who connect.

    Raises:
        TimeoutError: another process keeps it.
    """
    deadline = time.monotonic() + _ANSWER_SECONDS
    while not ownfiles.lock(fd):
        if time.monotonic() > deadline:
            raise TimeoutError(errno.ETIMEDOUT, "another process that connects does not come to an end")
        time.sleep(_LOCK_RETRY_SECONDS)
