"""What surrounds a measurement: checks before it begins, and cleaning up when a signal ends it."""

import contextlib
import os
import signal
from collections.abc import Iterator
from typing import Protocol, Self, TypeVar

from cli.common import fail
from cli.exits import FAILED, WRONG


class _Run(Protocol):
    @classmethod
    def read(cls, path: str) -> Self: ...


_R = TypeVar("_R", bound=_Run)


def require_matplotlib(what: str = "--plot") -> None:
    """End the command if matplotlib is not installed, which `what` needs."""
    try:
        import matplotlib  # noqa: F401, PLC0415
    except ImportError:
        fail(f"{what}: matplotlib is not installed (pip install -e '.[bench]')", FAILED)


def require_writable(path: str) -> None:
    """End the command if the file cannot be written, before half an hour has passed. This makes its directory."""
    try:
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        new = not os.path.exists(path)
        with open(path, "ab"):
            pass
        if new:
            with contextlib.suppress(OSError):
                os.unlink(path)
    except OSError as exc:
        fail(f"{path}: {exc.strerror}", FAILED)


def read(path: str, kind: type[_R]) -> _R:
    """Return an earlier run of this kind; end the command if the file is not one."""
    try:
        return kind.read(path)
    except OSError as exc:
        fail(f"{path}: {exc.strerror}", FAILED)
    except ValueError as exc:
        fail(f"{path}: {exc}", WRONG)


@contextlib.contextmanager
def interruptible(command: str) -> Iterator[None]:
    """Clean up before a signal ends the command, which then ends as after Ctrl-C."""
    before = {n: signal.signal(n, signal.default_int_handler) for n in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    except KeyboardInterrupt:
        fail(f"{command}: interrupted", FAILED)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
