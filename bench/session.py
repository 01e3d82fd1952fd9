"""Around a measurement: what can fail is looked at before it begins, and signals let it clean up."""

import contextlib
import os
import signal
from collections.abc import Iterator

from .cli import fail
from .figures import Run


def require_matplotlib() -> None:
    """End the command if there can be no picture."""
    try:
        import matplotlib  # noqa: F401, PLC0415
    except ImportError:
        fail("--plot: there is no matplotlib (pip install 'cloakfs[bench]')", 1)


def require_writable(path: str) -> None:
    """Find that out before half an hour has passed; makes the directory."""
    try:
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        new = not os.path.exists(path)
        with open(path, "ab"):
            pass
        if new:
            with contextlib.suppress(OSError):
                os.unlink(path)
    except OSError as exc:
        fail(f"{path}: {exc.strerror}", 1)


def read(path: str) -> Run:
    """An earlier run; ends the command if that is none."""
    try:
        return Run.read(path)
    except OSError as exc:
        fail(f"{path}: {exc.strerror}", 1)
    except ValueError as exc:
        fail(f"{path}: {exc}", 2)


@contextlib.contextmanager
def interruptible(command: str) -> Iterator[None]:
    """Signals that end a program have it clean up first; then the command ends as if by Ctrl-C."""
    before = {n: signal.signal(n, signal.default_int_handler) for n in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    except KeyboardInterrupt:
        fail(f"{command}: interrupted", 1)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
