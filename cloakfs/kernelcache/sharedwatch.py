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
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from subprocess import DEVNULL, CalledProcessError

import trio

import cloakfs

from ..linux import fanotify, ownfiles, programs, sockets
from ..linux.fanotify import FAN_Q_OVERFLOW, Event
from .interest import InterestTable
from .marks import event_fsid
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
_ANSWER_SECONDS = 1.0
_LOCK_SECONDS = 5.0  # another process may wait for an answer twice
_ANSWER_IN_LOOP_SECONDS = 0.3  # all requests wait
_STOPPED_CHECKS = 2  # a second apart, after which a watcher that passes nothing on counts as stopped
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
        CalledProcessError: likewise.
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
            self._link.note(handle)

    async def note_known(self) -> None:
        """Have changes of all that the kernel may know reported; this takes a while if that is very much."""
        for number, handle in enumerate(self.known()):
            self.note(handle)
            if not number % _NOTES_AT_ONCE:
                await trio.lowlevel.checkpoint()

    def add(self, fd: int) -> int:
        """Watch the whole file system that `fd` (O_PATH suffices) is on (`FilesystemMarks.add`).

        If there is no watcher just now, or it does not answer at once, this is done as soon as there is one.
        """
        fsid = event_fsid(fd)
        if self._link is not None and not self._link.is_broken:
            try:
                self._link.add(fd, _ANSWER_IN_LOOP_SECONDS)
            except WatchRefused:
                raise
            except OSError:
                self._link.give_up()
        self._filesystems.append(fd)
        return fsid

    @property
    def is_interrupted(self) -> bool:
        """Whether nothing is reported just now, since there is no watcher."""
        return self._link is None or self._link.is_broken

    @property
    def notes(self) -> int:
        """How many objects were noted since the connection was made; the same ones may have been noted repeatedly."""
        return 0 if self._link is None else self._link.notes

    def check(self) -> None:
        """Leave a watcher that passes nothing on. This is to be called every second."""
        if self._link is not None and self._link.is_stopped():
            log.warning("the watcher of changes (process %d) has stopped; it is replaced", self._link.watcher)
            self._link.give_up()

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
        for event in fanotify.parse(raw, -1 if self._own or self._link is None else self._link.pid):
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
        self.on_unwatched(True)
        has_failed = False
        while self._link is None:
            try:
                known = tuple(self._filesystems)
                self._link = await trio.to_thread.run_sync(partial(self._connect, known))
                for fd in self._filesystems[len(known) :]:  # were added meanwhile
                    self._link.add(fd, _ANSWER_IN_LOOP_SECONDS)
            except (OSError, CalledProcessError) as exc:
                self.close()
                if not has_failed:
                    log.warning("changes behind the mount are not reported: %s", exc)
                has_failed = True
                await trio.sleep(_RETRY_SECONDS)
        await self.note_known()
        if has_failed:
            log.info("changes behind the mount are reported again")
        self.on_unwatched(False)

    def _connect(self, filesystems: Sequence[int]) -> "_WatcherLink":
        return _connect(self._path, self._lock, own=self._own, filesystems=filesystems)


class WatchRefused(OSError):
    """The watcher cannot watch a file system."""


class _WatcherLink:
    """The connection to a watcher.

    Args:
        path: where it listens.
        own: whether to be told of one's own changes.

    Attributes:
        connection: its socket.
        table: where to say what the kernel knows.
        pid: this process, as events have it.
        watcher: the process that has answered.
        notes: how often `note` was called.
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
            connection.send(json.dumps({"own": own}).encode())
            said, fds, _, _ = socket.recv_fds(connection, _LARGEST, 2)
            if len(fds) < 2:
                raise ConnectionResetError
        except OSError:
            connection.close()
            raise
        connection.setblocking(False)
        table, self._events = fds
        self.table = InterestTable(table)
        answer = json.loads(said.removeprefix(ANSWER))
        self._column, self.pid = int(answer["column"]), int(answer["pid"])
        self.watcher = sockets.peer_pid(connection)
        self.notes = 0
        self._hurried = 0
        self._added = 0
        self._seen: tuple[int, int] = 0, 0  # the count when it was last looked at, and how often it was the same
        self._queue, self._poll = select.poll(), select.poll()
        self._queue.register(self._events, select.POLLIN)
        self._poll.register(self._events, select.POLLIN)
        self._poll.register(connection, select.POLLIN)

    def note(self, handle: bytes) -> None:
        """Want to hear of an object."""
        self.notes += 1
        self.table.note(self._column, handle)

    def add(self, fd: int, seconds: float = _ANSWER_SECONDS) -> None:
        """Have the watcher watch the file system that `fd` is on.

        Raises:
            WatchRefused: it cannot be watched.
            OSError: the watcher does not answer in so many seconds.
        """
        self._added += 1
        deadline = time.monotonic() + seconds
        try:
            self.connection.settimeout(seconds)
            socket.send_fds(self.connection, [ADD + b"%d" % self._added], [fd])
            while True:
                self.connection.settimeout(max(deadline - time.monotonic(), _STEP_SECONDS))
                said = self.connection.recv(_LARGEST)
                if not said:
                    raise ConnectionResetError
                if said.startswith(EVENTS):
                    self.unread.append(said)
                elif (answer := json.loads(said.removeprefix(ANSWER)))["number"] == self._added:
                    break
        finally:
            self.connection.setblocking(False)
        if answer["errno"] is not None:
            raise WatchRefused(answer["errno"], os.strerror(answer["errno"]))

    def give_up(self) -> None:
        """Have nothing more come, as if the watcher had ended."""
        self.is_broken = True
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def is_stopped(self) -> bool:
        """Whether the watcher has passed on nothing for a while, though there is something."""
        count, (before, times) = self.table.count, self._seen
        is_at_work = bool(count & 1 or self._queue.poll(0))
        self._seen = count, times + 1 if is_at_work and count == before else 0
        return self._seen[1] >= _STOPPED_CHECKS

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
            return said.removeprefix(EVENTS) if said.startswith(EVENTS) else b""  # else an answer that came too late
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
        except OSError:  # there is none, or it is just dying, or it does not answer
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
    deadline = time.monotonic() + _LOCK_SECONDS
    while not ownfiles.lock(fd):
        if time.monotonic() > deadline:
            raise TimeoutError(errno.ETIMEDOUT, "another process that connects does not come to an end")
        time.sleep(_LOCK_RETRY_SECONDS)
