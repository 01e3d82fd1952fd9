"""The boundary of every operation: how failures are reported, how many requests may wait, and whose turn it is."""

import errno
import functools
import inspect
import logging
import os
import time
import traceback
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any, Protocol, TypeVar, TypeVarTuple

import trio
from pyfuse3 import FUSEError

from ..fuse.loop import MOST_PENDING, MOST_WRITES, SHARE
from ..monitoring import SUM, Counters
from ..shares import Shares
from ..tree.notes import noting
from .handles import OpenFiles

log = logging.getLogger(__name__)

_FIRST_KERNEL_ERRNO = 512

# The same failure is logged again only after this many seconds: clients must not be able to fill the log.
_LOG_AGAIN_SECONDS = 60.0
# The log names at most this many callers that were refused more than their share: clients may have any number of uids.
_MOST_NAMED = 100

SLICE_SECONDS = 0.001
"""How long a request may keep the session loop to itself."""

_T = TypeVar("_T")

# The message of the RuntimeError that threading.Thread.start raises; the error has no type of its own.
_NO_THREAD = "can't start new thread"


class Recorder(Protocol):
    """Makes a record of each request (`filesystem.trace`)."""

    async def answer(self, operation: str, given: Mapping[str, Any], answer: Coroutine[Any, Any, _T]) -> _T:
        """Return the answer to a request, and make a record of it."""


class Requests:
    """The requests that have come in.

    Attributes:
        counters: what is counted of the answers.
        waiting: how many are not answered yet, by the caller's client uid, or by `OpenFiles.opener`.
        writes: the same of WRITE, which are not among the others.
        trace: makes records of them; None while there is no tracer and `mount --debug` does not log them. To find that
            out is all that tracing costs then.
    """

    def __init__(self) -> None:
        self.counters = Counters()
        self.waiting: Shares[int] = Shares(MOST_PENDING, SHARE)
        self.writes: Shares[int] = Shares(MOST_WRITES)
        self.trace: Recorder | None = None
        self._logged: dict[tuple[str, type[Exception], int], float] = {}  # cause -> when
        self._named: set[tuple[str, int]] = set()  # which callers the log has named, and of what they wanted more

    def counts(self) -> dict[str, int]:
        """Return how many were answered, by operation."""
        return {operation: sum(row[:SUM]) for operation, row in self.counters.durations.items()}

    def failed(self, operation: str, code: int) -> FUSEError:
        """Count an answer with this error, and return what pyfuse3 makes one of."""
        self.counters.errors[operation, code] += 1
        return FUSEError(code)

    def refuse(self, shares: Shares[int], what: str, caller: int, who: str, code: int) -> OSError:
        """Count that a caller wanted more than its share, and return the error; the log says so once of each caller."""
        shares.refused += 1
        if (what, caller) not in self._named and len(self._named) < _MOST_NAMED:
            self._named.add((what, caller))
            log.warning(
                "%s has %d %s, which is its share of %d: more are refused (%s)",
                who,
                shares.held.get(caller, 0),
                what,
                shares.most,
                errno.errorcode[code],
            )
            if len(self._named) == _MOST_NAMED:
                log.warning("callers that want more than their share are not named any more")
        return OSError(code, os.strerror(code))

    def is_news(self, what: str, exc: Exception) -> bool:
        """Whether this failure is to be logged, which it is not if it was logged just now."""
        cause = (what, type(exc), [line for _, line in traceback.walk_tb(exc.__traceback__)][-1])
        now = time.monotonic()
        if now < self._logged.get(cause, -_LOG_AGAIN_SECONDS) + _LOG_AGAIN_SECONDS:
            return False
        self._logged[cause] = now
        return True


class Turns:
    """The turns of all callers whose requests take long.

    Such requests are answered in slices. Between two slices, all other tasks that wait get to run. The slices of one
    caller take turns: however many of its requests take long, only one of them works each time that others have been
    served.
    """

    def __init__(self) -> None:
        self._waiting: dict[int, trio.Lock] = {}  # by caller: whose turn it is
        self._alone: dict[int, trio.Lock] = {}  # by caller: which request needs much at a time

    @asynccontextmanager
    async def alone(self, caller: int) -> AsyncIterator[None]:
        """Wait until no other request of this caller is in here."""
        lock = self._alone.setdefault(caller, trio.Lock())
        try:
            async with lock:
                yield
        finally:
            if not lock.locked():
                self._alone.pop(caller, None)

    async def wait_for_turn(self, caller: int) -> float:
        """Let others run, and wait for the caller's turn.

        Returns:
            when the next slice is over (`time.monotonic`).
        """
        turn = self._waiting.setdefault(caller, trio.Lock())
        try:
            async with turn:
                await trio.lowlevel.checkpoint()
        finally:
            if not turn.locked():
                self._waiting.pop(caller, None)
        return time.monotonic() + SLICE_SECONDS


class _Operations(Protocol):
    requests: Requests
    files: OpenFiles


_C = TypeVar("_C", bound=_Operations)
_P = TypeVarTuple("_P")  # pyfuse3 names no arguments


def operation(
    handler: Callable[[_C, *_P], Coroutine[Any, Any, _T]],
) -> Callable[[_C, *_P], Coroutine[Any, Any, _T]]:
    """Wrap an operation: an error of the tree is passed on, any other exception is logged and answered with EIO.

    Without this, one unexpected exception would end the daemon, and every client with it. A caller with too many
    requests waiting gets EAGAIN, so that there is always a worker left to read those of others. So does a request that
    needs a thread when the machine starts no more of them (RLIMIT_NPROC, `pids.max`).
    """

    name = handler.__name__
    now = time.perf_counter_ns
    # A request that only gives something back is never refused; locks that are waited for have shares of their own.
    counted = name not in ("release", "releasedir", "unlock", "setlk", "flock")
    is_write = name == "write"
    _, *parameters = inspect.signature(handler).parameters
    has_context = "ctx" in parameters

    @functools.wraps(handler)
    async def guarded(self: _C, *args: *_P) -> _T:
        given: Any = args
        requests = self.requests
        trace = requests.trace
        if trace is not None and noting.get() is None:  # otherwise, this is the call in the next line
            return await trace.answer(name, dict(zip(parameters, given, strict=False)), guarded(self, *args))
        if counted:
            caller: int = given[-1].uid if has_context else self.files.opener(given[0])
            waiting = requests.writes if is_write else requests.waiting
            # `Shares.has_share_left`, `take` and `give_back`, without the calls, for which each request would pay.
            held = waiting.held
            mine = held.get(caller, 0)
            if mine >= waiting.most_of_one or mine >= waiting.most - waiting.total:
                requests.counters.durations[name][0] += 1
                who = f"client uid {caller}" if caller >= 0 else f"server uid {-2 - caller}"  # see `OpenFiles.opener`
                requests.refuse(waiting, "requests waiting", caller, who, errno.EAGAIN)
                raise requests.failed(name, errno.EAGAIN)
            held[caller] = mine + 1
            waiting.total += 1
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
            if requests.is_news(name, exc):
                log.exception("%s%r failed: answered EIO", name, args)
            raise requests.failed(name, errno.EIO) from None
        finally:
            took = now() - began
            durations = requests.counters.durations[name]
            durations[took.bit_length()] += 1
            durations[SUM] += took
            if counted:
                waiting.total -= 1
                mine = held[caller] - 1
                if mine:
                    held[caller] = mine
                else:
                    del held[caller]

    return guarded


def _errno_to_pass_on(exc: OSError) -> int:
    """Return the error number in a form that FUSE can report.

    Real file systems have been seen to fail with the kernel's own numbers (ENOTSUPP is 524): the kernel refuses an
    answer with such a number, and the client waits for ever. After ENOSYS, the kernel would never send such a
    request on this mount again.
    """
    code = exc.errno or errno.EIO
    if code == errno.ENOSYS:
        return errno.EOPNOTSUPP
    return code if 0 < code < _FIRST_KERNEL_ERRNO else errno.EIO
