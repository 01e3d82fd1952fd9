"""Real users: processes with a real identity, which make system calls one by one on request."""

import contextlib
import os
import signal
from collections.abc import Callable, Iterable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self, TypeVar

T = TypeVar("T")


class User:
    """A process with this uid, gid and groups; `do` makes it call a function, and returns the result.

    Descriptors and the working directory stay between calls, so that races and inherited descriptors can be tested.
    """

    def __init__(self, uid: int, gid: int | None = None, groups: Iterable[int] = ()) -> None:
        self.uid = uid
        self.gid = uid if gid is None else gid
        self.groups = frozenset(groups)
        self._pipe, theirs = Pipe()
        self.pid = os.fork()
        if self.pid == 0:
            self._pipe.close()
            _live(theirs, self.uid, self.gid, self.groups)
        theirs.close()

    def do(self, call: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Return the result of the call, or raise what it raises."""
        self._pipe.send((call, args, kwargs))
        ok, value = self._pipe.recv()
        if not ok:
            raise value
        return value  # type: ignore[no-any-return]

    def start(self, call: Callable[..., object], *args: Any) -> None:
        """Make it start a call that may not return; see `has_answered` and `finish_within`."""
        self._pipe.send((call, args, {}))

    def has_answered(self, seconds: float = 0) -> bool:
        """Whether the call that was started has returned, or returns within so many seconds."""
        return self._pipe.poll(seconds)

    def answers_within(self, seconds: float) -> bool:
        """Whether the call that was started succeeds in time."""
        return self._pipe.poll(seconds) and bool(self._pipe.recv()[0])

    def finish_within(self, seconds: float) -> bool:
        """Wait for the call that was started; return whether it succeeded."""
        assert self._pipe.poll(seconds), f"no answer within {seconds} s"
        return bool(self._pipe.recv()[0])

    def answer_within(self, seconds: float) -> Any:
        """Wait for the call that was started; return its result."""
        assert self._pipe.poll(seconds), f"no answer within {seconds} s"
        ok, value = self._pipe.recv()
        if not ok:
            raise value
        return value

    def do_within(self, seconds: float, call: Callable[..., object], *args: Any) -> None:
        """Make it call a function that must return within so many seconds; raise what it raises."""
        self.start(call, *args)
        assert self._pipe.poll(seconds), f"{call.__name__} has not returned within {seconds} s"
        ok, value = self._pipe.recv()
        if not ok:
            raise value

    def error(self, call: Callable[..., object], *args: Any, **kwargs: Any) -> int:
        """Return the errno of the call, 0 if it succeeds."""
        try:
            self.do(call, *args, **kwargs)
        except OSError as exc:
            return exc.errno or -1
        return 0

    def close(self) -> None:
        if self.pid:
            self._pipe.close()
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.pid = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _live(pipe: Connection, uid: int, gid: int, groups: Iterable[int]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.setgroups(list(groups))
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    os.umask(0o022)
    try:
        while True:
            call, args, kwargs = pipe.recv()
            try:
                answer = True, call(*args, **kwargs)
            except Exception as exc:
                answer = False, exc
            pipe.send(answer)
    finally:
        os._exit(0)


def read(path: str | bytes) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def write(path: str | bytes, data: bytes, flags: int = os.O_CREAT | os.O_TRUNC, mode: int = 0o666) -> None:
    fd = os.open(path, os.O_WRONLY | flags, mode)
    try:
        os.write(fd, data)
    finally:
        os.close(fd)


def names(path: str | bytes | int) -> list[Any]:
    return sorted(os.listdir(path))


def become(uid: int, gid: int, groups: list[int]) -> None:
    """In a User started as root: become another user, and keep descriptors and working directory."""
    os.setgroups(groups)
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
