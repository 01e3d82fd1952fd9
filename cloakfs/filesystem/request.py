"""The boundary of every operation: how failures are reported, and how many requests of one caller may wait."""

import errno
import functools
import inspect
import logging
import time
import traceback
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, TypeVarTuple

from pyfuse3 import FUSEError

from .. import linux
from ..counters import SUM, Counters
from ..loop import SHARE
from ..tree.notes import noting
from .handles import OpenFiles

if TYPE_CHECKING:
    from .trace import Trace

log = logging.getLogger(__name__)

_FIRST_KERNEL_ERRNO = 512

# The same failure is logged again only after this many seconds: clients must not be able to fill the log.
_TELL_AGAIN_SECONDS = 60.0
# The message of the RuntimeError that threading.Thread.start raises; the error has no type of its own.
_NO_THREAD = "can't start new thread"


class Requests:
    """The requests that have come in.

    Attributes:
        counters: what is counted of the answers.
        waiting: how many are not answered yet, by the caller's client uid, or by `OpenFiles.opener`.
        trace: makes records of them; None while nobody traces, which is all that tracing costs then.
    """

    def __init__(self) -> None:
        self.counters = Counters()
        self.waiting: dict[int, int] = {}
        self.trace: Trace | None = None
        self._logged: dict[tuple[str, type[Exception], int], float] = {}  # cause -> when

    def counts(self) -> dict[str, int]:
        """Return how many were answered, by operation."""
        return {operation: sum(row[:SUM]) for operation, row in self.counters.durations.items()}

    def failed(self, operation: str, code: int) -> FUSEError:
        """Count an answer with this error, and return what pyfuse3 makes one of."""
        self.counters.errors[operation, code] += 1
        return FUSEError(code)

    def is_news(self, what: str, exc: Exception) -> bool:
        """Whether this failure is to be logged, which it is not if it was logged just now."""
        cause = (what, type(exc), [line for _, line in traceback.walk_tb(exc.__traceback__)][-1])
        now = time.monotonic()
        if now < self._logged.get(cause, -_TELL_AGAIN_SECONDS) + _TELL_AGAIN_SECONDS:
            return False
        self._logged[cause] = now
        return True


class _Operations(Protocol):
    requests: Requests
    files: OpenFiles


_C = TypeVar("_C", bound=_Operations)
_P = TypeVarTuple("_P")  # pyfuse3 names no arguments
_T = TypeVar("_T")


def answers(
    handler: Callable[[_C, *_P], Coroutine[Any, Any, _T]],
) -> Callable[[_C, *_P], Coroutine[Any, Any, _T]]:
    """Wrap an operation: an error of the tree is passed on, any other exception is logged and answered with EIO.

    Without this, one unexpected exception would end the daemon, and every client with it. A caller with too many
    requests waiting gets EAGAIN, so that there is always a worker left to read those of others. So does a request that
    needs a thread when the machine starts no more of them (RLIMIT_NPROC, `pids.max`).
    """

    name = handler.__name__
    now = time.perf_counter_ns
    # A request that only gives something back is never refused.
    counted = name not in ("release", "releasedir")
    _, *parameters = inspect.signature(handler).parameters
    has_context = "ctx" in parameters

    @functools.wraps(handler)
    async def guarded(self: _C, *args: *_P) -> _T:
        given: Any = args
        requests = self.requests
        trace = requests.trace
        if trace is not None and noting.get() is None:  # otherwise, this is the call in the next line
            return await trace.answer(name, dict(zip(parameters, given, strict=True)), guarded(self, *args))
        if counted:
            caller: int = given[-1].uid if has_context else self.files.opener(given[0])
            waiting = requests.waiting
            others = waiting.get(caller, 0)
            if others >= SHARE:
                requests.counters.durations[name][0] += 1
                raise requests.failed(name, errno.EAGAIN)
            waiting[caller] = others + 1
        began = now()
        try:
            return await handler(self, *args)
        except OSError as exc:
            raise requests.failed(name, _errno_to_pass_on(exc)) from None
        except FUSEError as exc:
            requests.counters.errors[name, exc.errno] += 1
            raise
        except Exception as exc:
            if isinstance(exc, RuntimeError) and str(exc) == _NO_THREAD:
                if requests.is_news(name, exc):
                    log.warning("%s: %s: answered EAGAIN", name, exc)
                raise requests.failed(name, errno.EAGAIN) from None
            linux.act_as_daemon()  # the traceback reads source files
            if requests.is_news(name, exc):
                log.exception("%s%r failed: answered EIO", name, args)
            raise requests.failed(name, errno.EIO) from None
        finally:
            took = now() - began
            durations = requests.counters.durations[name]
            durations[took.bit_length()] += 1
            durations[SUM] += took
            if counted:
                others = waiting[caller] - 1
                if others:
                    waiting[caller] = others
                else:
                    del waiting[caller]

    return guarded


def _errno_to_pass_on(exc: OSError) -> int:
    """Return the error number in a form that FUSE can report.

    Real file systems have been seen to fail with the kernel's own numbers (ENOTSUPP is 524): the kernel refuses an
    answer with such a number, and the client waits for ever. ENOSYS would tell the kernel never to ask again on this
    mount.
    """
    code = exc.errno or errno.EIO
    if code == errno.ENOSYS:
        return errno.EOPNOTSUPP
    return code if 0 < code < _FIRST_KERNEL_ERRNO else errno.EIO
