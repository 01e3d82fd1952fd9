"""The boundary of every operation: how failures are reported, and how many requests of one caller may wait."""

import errno
import functools
import inspect
import logging
import time
import traceback
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast

from pyfuse3 import FUSEError

from .. import linux
from ..loop import SHARE
from .handles import OpenFiles

log = logging.getLogger(__name__)

_FIRST_KERNEL_ERRNO = 512

# The same failure is logged again only after this many seconds: clients must not be able to fill the log.
_TELL_AGAIN_SECONDS = 60.0
# The message of the RuntimeError that threading.Thread.start raises; the error has no type of its own.
_NO_THREAD = "can't start new thread"


class Requests:
    """The requests that have come in.

    Attributes:
        counts: how many there were, by operation.
        waiting: how many are not answered yet, by the caller's client uid, or by `OpenFiles.opener`.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.waiting: dict[int, int] = {}
        self._logged: dict[tuple[str, type[Exception], int], float] = {}  # cause -> when

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
_P = ParamSpec("_P")
_T = TypeVar("_T")


def answers(
    handler: Callable[Concatenate[_C, _P], Coroutine[Any, Any, _T]],
) -> Callable[Concatenate[_C, _P], Coroutine[Any, Any, _T]]:
    """Wrap an operation: an error of the tree is passed on, any other exception is logged and answered with EIO.

    Without this, one unexpected exception would end the daemon, and every client with it. A caller with too many
    requests waiting gets EAGAIN, so that there is always a worker left to read those of others. So does a request that
    needs a thread when the machine starts no more of them (RLIMIT_NPROC, `pids.max`).
    """

    name = handler.__name__
    # A request that only gives something back is never refused.
    counted = name not in ("release", "releasedir")
    has_context = "ctx" in inspect.signature(handler).parameters

    @functools.wraps(handler)
    async def guarded(self: _C, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        self.requests.counts[name] += 1
        if counted:
            caller: int = cast("Any", args[-1]).uid if has_context else self.files.opener(args[0])
            waiting = self.requests.waiting
            others = waiting.get(caller, 0)
            if others >= SHARE:
                raise FUSEError(errno.EAGAIN)
            waiting[caller] = others + 1
        try:
            return await handler(self, *args, **kwargs)
        except OSError as exc:
            raise FUSEError(_errno_to_pass_on(exc)) from None
        except FUSEError:
            raise
        except Exception as exc:
            if isinstance(exc, RuntimeError) and str(exc) == _NO_THREAD:
                if self.requests.is_news(name, exc):
                    log.warning("%s: %s: answered EAGAIN", name, exc)
                raise FUSEError(errno.EAGAIN) from None
            linux.act_as_daemon()  # the traceback reads source files
            if self.requests.is_news(name, exc):
                log.exception("%s%r failed: answered EIO", name, args)
            raise FUSEError(errno.EIO) from None
        finally:
            if counted:
                others = waiting[caller] - 1
                if others:
                    waiting[caller] = others
                else:
                    del waiting[caller]

    return cast("Callable[Concatenate[_C, _P], Coroutine[Any, Any, _T]]", guarded)


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
