"""Tracing: a record of each request (`tracerecords`), and the tracers that have yet to fetch it.

A record has the caller, the request, the answer, and why. Records are made only while there are tracers.
"""

import contextlib
import errno
import fcntl
import json
import logging
import os
import stat
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import trio
from pyfuse3 import EntryAttributes, FileInfo, FUSEError, InodeT, RequestContext

from ..fuse.compatibility import requester
from ..identity import ClientId
from ..linux import process
from ..messages import UserError
from ..stacking.upper import UPPER
from ..tracerecords import Record, TraceFilter
from ..tree.nodes import Nodes
from ..tree.notes import Hidden, Notes, noting
from ..tree.objects import Object
from ..tree.views import Views
from ..view import View
from .handles import OpenFiles
from .operation import Requests
from .probing import known_path
from .selfprobe import SelfProbe

log = logging.getLogger(__name__)

_T = TypeVar("_T")

_ACCESS = {os.O_RDONLY: "O_RDONLY", os.O_WRONLY: "O_WRONLY", os.O_RDWR: "O_RDWR"}
_FLAGS = ("O_CREAT", "O_EXCL", "O_TRUNC", "O_APPEND", "O_NOATIME", "O_DIRECT")


class _Caller(NamedTuple):
    """Who makes a request: client ids, thread, and the name of its command if it still runs."""

    uid: int
    gid: int
    pid: int
    command: str | None


class _Target(NamedTuple):
    """What a request is about: an object, and perhaps a name in it, in the view with this number."""

    number: int
    obj: Object
    name: bytes | None = None


@dataclass(slots=True)
class _Begun:
    """A request that has not been answered yet."""

    operation: str
    given: Mapping[str, Any]
    notes: Notes
    time: float
    began: int
    caller: _Caller | None
    target: _Target | None
    paths: list[str | None]


class Trace:
    """Makes the records. There is a new one each time that tracing begins.

    Args:
        nodes: the objects of the mount.
        views: its views.
        files: what clients have open.
        requests: its requests.
        probe: the daemon's own requests, which go through its mount.
        publish: called with each record.
    """

    def __init__(
        self,
        nodes: Nodes,
        views: Views,
        files: OpenFiles,
        requests: Requests,
        probe: SelfProbe,
        publish: Callable[[Record], None],
    ) -> None:
        self._nodes = nodes
        self._views = views
        self._files = files
        self._requests = requests
        self._probe = probe
        self._publish = publish
        self._openers: dict[int, _Caller] = {}  # by handle: pyfuse3 does not report who reads and writes
        self._has_failed = False

    async def answer(self, operation: str, given: Mapping[str, Any], answer: Coroutine[Any, Any, _T]) -> _T:
        """Return the answer to a request, and publish a record of it.

        Args:
            operation: its name.
            given: its arguments, by name.
            answer: computes the answer; the only exceptions that it raises are `FUSEError` and cancellation.
        """
        notes = Notes()
        token = noting.set(notes)
        begun = None
        try:
            with self._no_failure_matters():
                begun = self._begin(operation, given, notes)
            try:
                result = await answer
            except FUSEError as exc:
                with self._no_failure_matters():
                    self._end(begun, None, exc)
                raise
            with self._no_failure_matters():
                self._end(begun, result, None)
            return result
        finally:
            noting.reset(token)

    @contextlib.contextmanager
    def _no_failure_matters(self) -> Any:
        """Keep a failure to make a record from becoming the answer; the first one is logged."""
        try:
            yield
        except Exception:
            if not self._has_failed:
                self._has_failed = True
                log.exception("a request cannot be traced")

    def _begin(self, operation: str, given: Mapping[str, Any], notes: Notes) -> _Begun:
        """Note what can only be found out before the request is answered."""
        caller = self._caller(operation, given)
        target, paths = self._target(given), self._paths(given)
        return _Begun(operation, given, notes, time.time(), time.perf_counter_ns(), caller, target, paths)

    def _end(self, begun: _Begun | None, result: object, exc: FUSEError | None) -> None:
        if begun is None:
            return
        took = (time.perf_counter_ns() - begun.began) // 1000
        operation, given = begun.operation, begun.given
        code = exc.errno if exc is not None else _error_in(operation, result)
        self._follow_handles(operation, given, result, begun.caller)
        paths = [path or later for path, later in zip(begun.paths, self._paths(given), strict=True)]
        is_daemon = begun.caller is not None and self._is_daemon(begun.caller)
        target = begun.target or self._target(given)
        # A successful request hid nothing from its caller, except from a listing.
        hidden = begun.notes.hidden if (code or operation == "readdir") and not is_daemon else []
        self._publish(
            {
                "time": begun.time,
                "operation": operation,
                "path": paths[0],
                "new_path": paths[1],
                "request": _arguments(operation, given),
                "pid": begun.caller.pid if begun.caller else None,
                "command": begun.caller.command if begun.caller else None,
                "client": {"uid": begun.caller.uid, "gid": begun.caller.gid} if begun.caller else None,
                "server": None if is_daemon else self._server(target, begun),
                "inside": is_daemon,
                "error": errno.errorcode.get(code, str(code)) if code else None,
                "answer": None if code else _result(operation, result),
                "remembers": _cacheable(operation, result),
                "hidden": [{"path": self._path_of(one, begun, target), "reason": one.reason} for one in hidden],
                "more_hidden": begun.notes.more if hidden else 0,
                "refused": None if hidden or exc is None else self._refusal(exc, begun, target),
                "microseconds": took,
            }
        )

    # -- who -----------------------------------------------------------------------------------------

    def _caller(self, operation: str, given: Mapping[str, Any]) -> _Caller | None:
        ctx: RequestContext | None = requester(given["token"]) if operation == "readdir" else given.get("ctx")
        if ctx is None:
            return self._openers.get(given["fh"])
        return _Caller(ctx.uid, ctx.gid, ctx.pid, process.command_of(ctx.pid))

    def _follow_handles(self, operation: str, given: Mapping[str, Any], result: object, caller: _Caller | None) -> None:
        if operation in ("release", "releasedir"):
            self._openers.pop(given["fh"], None)
        elif caller is not None:
            match result:
                case int() if operation == "opendir":
                    self._openers[result] = caller
                case FileInfo() as opened:
                    self._openers[opened.fh] = caller
                case (FileInfo() as opened, _):
                    self._openers[opened.fh] = caller

    def _is_daemon(self, caller: _Caller) -> bool:
        """Whether this daemon, or that of an upper mount, makes the request on its own behalf."""
        return caller.pid in self._probe.threads or (caller.uid, caller.gid) == UPPER[:2]

    def _server(self, target: _Target | None, begun: _Begun) -> dict[str, int] | None:
        """Return the identity that the request was served as; None if it has none."""
        who: tuple[int, int] | None = None
        view = self._view(target)
        file = self._files.by_fd.get(begun.given.get("fh", -1)) if "ctx" not in begun.given else None
        if begun.notes.caller is not None:
            who = begun.notes.caller.uid, begun.notes.caller.gid
        elif view is None or (begun.caller is not None and not view.admits(ClientId(begun.caller.uid))):
            return None
        elif view.fixed is not None:
            who = view.fixed.uid, view.fixed.gid
        elif begun.caller is not None and view.forwards_by_mapping:
            who = view.server_ids(*_client_ids(begun.caller))
        elif file is not None:
            return {"uid": file.uid}
        return None if who is None else {"uid": who[0], "gid": who[1]}

    def _view(self, target: _Target | None) -> View | None:
        is_top = target is None or (self._views.top and not target.number)
        return None if is_top or target is None else self._views.get(target.number)

    # -- what ----------------------------------------------------------------------------------------

    def _target(self, given: Mapping[str, Any]) -> _Target | None:
        """Return what the request is about; None if it is not known."""
        file = self._files.by_fd.get(given["fh"]) if given.get("fh") is not None else None
        if file is not None:
            return _Target(file.number, file.obj)
        for parent, name in (("parent_inode", "name"), ("parent_inode_old", "name_old"), ("inode", "")):
            if parent in given:
                return self._known(given[parent], given.get(name))
        return None

    def _known(self, inode: InodeT, name: bytes | None) -> _Target | None:
        obj = self._nodes.known_as(inode)
        return None if obj is None else _Target(self._nodes.view_of(inode), obj, name)

    def _paths(self, given: Mapping[str, Any]) -> list[str | None]:
        """Return the path that the request is about, and the second one if there are two (link, rename)."""
        second = next((name for name in ("new_parent_inode", "parent_inode_new") if name in given), None)
        other = None
        if second is not None:
            other = self._known(given[second], given["new_name" if second == "new_parent_inode" else "name_new"])
        if given.keys() <= {"ctx"}:  # statfs
            return [self._probe.mountpoint, None]
        return [self._path(self._target(given)), self._path(other)]

    def _path(self, target: _Target | None) -> str | None:
        """Return the last known path of a target, which is below the mount point; None if that is not known."""
        if target is None:
            return None
        mountpoint = self._probe.mountpoint
        return known_path(self._nodes, self._views, mountpoint, target.number, target.obj, target.name)

    def _path_of(self, hidden: Hidden, begun: _Begun, target: _Target | None) -> str | None:
        if target is None:
            return None
        if hidden.obj is not None:
            return self._path(_Target(target.number, hidden.obj))
        if hidden.name in (begun.given.get("name_new"), begun.given.get("new_name")):
            return begun.paths[1]
        return self._path(target._replace(name=hidden.name))

    # -- why -----------------------------------------------------------------------------------------

    def _refusal(self, exc: FUSEError, begun: _Begun, target: _Target | None) -> str | None:
        """Return why the request was refused, in words; None if the error says it all."""
        caller, view = begun.caller, self._view(target)
        if exc.errno == errno.EIO and not isinstance(exc.__context__, OSError):
            return "the daemon failed; see its log"
        if exc.errno == errno.EAGAIN:
            if caller is not None and not self._requests.waiting.has_share_left(caller.uid):
                return f"{self._requests.waiting.held.get(caller.uid, 0)} requests of this caller wait already"
            return None
        if exc.errno not in (errno.EACCES, errno.EPERM):
            return None
        if view is not None and caller is not None and not view.admits(ClientId(caller.uid)):
            return "the view does not let this caller in"
        if target is not None and target.name is not None and self._views.top and not target.number:
            return "there is no such view, or it does not let this caller in"
        if target is None or not isinstance(exc.__context__, PermissionError):
            return None
        why = "the real tree refuses it"
        with contextlib.suppress(OSError):  # it is gone by now
            if not self._nodes.mounts.waits(target.obj):
                info = target.obj.filesystem.stat(self._nodes.descriptors.fd(target.obj))
                mode = f"{stat.filemode(info.st_mode)} {info.st_uid}:{info.st_gid}"
                why += f" ({self._path(target._replace(name=None))} is {mode} there)"
        return why


def _client_ids(caller: _Caller) -> tuple[ClientId, ClientId]:
    return ClientId(caller.uid), ClientId(caller.gid)


def _error_in(operation: str, result: object) -> int:
    """Return the error of an answer that was not raised; 0 if there is none."""
    if operation == "lookup" and isinstance(result, EntryAttributes) and not result.st_ino:
        return errno.ENOENT
    return errno.EACCES if operation == "access" and result is False else 0


def _arguments(operation: str, given: Mapping[str, Any]) -> str | None:
    """Return the arguments of a request, apart from paths, in words; None if there are none."""
    match operation:
        case "read":
            return f"{given['size']} at {given['off']}"
        case "write":
            return f"{len(given['buf'])} at {given['off']}"
        case "getlk" | "setlk":
            return _lock(given["lock"])
        case "flock":
            return {fcntl.LOCK_SH: "shared", fcntl.LOCK_EX: "exclusive"}.get(given["op"], "unlock")
        case "open" | "create":
            flags = given["flags"]
            named = [_ACCESS.get(flags & os.O_ACCMODE, ""), *(name for name in _FLAGS if flags & getattr(os, name))]
            return "|".join(filter(None, named)) + (f" {given['mode'] & 0o7777:04o}" if operation == "create" else "")
        case "mkdir" | "mknod":
            return stat.filemode(given["mode"])
        case "access":
            return "".join(letter for letter, bit in zip("rwx", (4, 2, 1), strict=True) if given["mode"] & bit) or None
        case "getxattr" | "setxattr" | "removexattr":
            return os.fsdecode(given["name"])
        case "symlink":
            return os.fsdecode(given["target"])
        case "setattr":
            return ", ".join(_changes(given["attr"], given["fields"])) or None
    return None


def _lock(lock: Any) -> str:
    kind = {fcntl.F_RDLCK: "read", fcntl.F_WRLCK: "write"}.get(lock.type, "unlock")
    return f"{kind} {f'{lock.len} bytes' if lock.len else 'all'} from {lock.start}"


def _changes(attr: EntryAttributes, fields: Any) -> list[str]:
    changes = []
    if fields.update_mode:
        changes.append(f"mode {stat.S_IMODE(attr.st_mode):04o}")
    if fields.update_uid:
        changes.append(f"uid {attr.st_uid}")
    if fields.update_gid:
        changes.append(f"gid {attr.st_gid}")
    if fields.update_size:
        changes.append(f"size {attr.st_size}")
    return changes + [name for name in ("atime", "mtime") if getattr(fields, f"update_{name}")]


def _result(operation: str, result: object) -> str:
    """Return a successful answer in words: attributes as the client is shown them, a count of bytes, or 0."""
    if isinstance(result, tuple):  # create
        result = result[1]
    match result:
        case EntryAttributes():
            return f"{stat.filemode(result.st_mode)} {result.st_uid}:{result.st_gid}"
        case bytes() | bytearray() | memoryview():
            return os.fsdecode(bytes(result)) if operation == "readlink" else str(len(result))
        case int() if operation in ("write", "lseek"):
            return str(result)
        case list():
            return str(len(result))
    return "0"


def _cacheable(operation: str, result: object) -> dict[str, float] | None:
    """Return what the kernel may cache of an answer, and for how many seconds; None if the answer has no such field.

    "name" is where the name leads to (or that there is no such name), "attributes" what is shown of the object, and
    "content" whether it may go on using what it has read before.
    """
    if isinstance(result, tuple):
        result = result[1]
    match result:
        case EntryAttributes():
            attributes = {"attributes": result.attr_timeout} if result.st_ino else {}
            return attributes if operation in ("getattr", "setattr") else {"name": result.entry_timeout, **attributes}
        case FileInfo():
            return {"content": result.keep_cache}
    return None


# -- the tracers -----------------------------------------------------------------------------------


class TooManyTracers(UserError):
    """As many as possible trace the mount already; the text is one line that says so."""


MOST_TRACERS = 8
"""How many may trace one mount at a time."""

# An idle tracer gets an empty answer after this time, so that the daemon notices if the tracer has gone.
_IDLE_SECONDS = 0.5
# Records are handed over in batches: a tracer that fetched each one by itself would keep the loop busy.
_BATCH_SECONDS = 0.01


class Tracer:
    """The records that one tracer has not fetched yet. Their number is bounded, so that it may be as slow as it likes.

    Args:
        wanted: which records it wants.
        most: how many bytes of records are held until they are fetched; further records are dropped and counted.
    """

    def __init__(self, wanted: TraceFilter, most: int) -> None:
        self.wanted = wanted
        self._most = most
        self._records: deque[bytes] = deque()
        self._bytes = 0
        self._dropped = 0
        self._news = trio.Event()

    def put(self, record: bytes) -> None:
        """Add a record (JSON), or drop it if there is no room."""
        if self._bytes + len(record) > self._most:
            self._dropped += 1
            return
        self._records.append(record)
        self._bytes += len(record)
        self._news.set()

    async def fetch(self) -> bytes:
        """Wait for records; return `{"records": […], "dropped": COUNT}`: what was dropped came after these records."""
        with trio.move_on_after(_IDLE_SECONDS):
            await self._news.wait()
            await trio.sleep(_BATCH_SECONDS)
        answer = b'{"records": [%s], "dropped": %d}' % (b", ".join(self._records), self._dropped)
        self._records.clear()
        self._bytes = self._dropped = 0
        self._news = trio.Event()
        return answer


class Tracers:
    """All who trace one mount.

    Args:
        switch: called with True before the first one begins, and with False after the last one has ended.
        most_bytes: how many bytes of records are held for each until they are fetched.
    """

    def __init__(self, switch: Callable[[bool], None], most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._switch = switch
        self._tracers: set[Tracer] = set()

    @contextlib.contextmanager
    def attach(self, wanted: TraceFilter) -> Iterator[Tracer]:
        """Add a tracer, until the context ends.

        Raises:
            TooManyTracers: too many do already.
        """
        if len(self._tracers) >= MOST_TRACERS:
            raise TooManyTracers(f"{MOST_TRACERS} others trace this mount already")
        tracer = Tracer(wanted, self._most_bytes)
        if not self._tracers:
            self._switch(True)
        self._tracers.add(tracer)
        try:
            yield tracer
        finally:
            self._tracers.remove(tracer)
            if not self._tracers:
                self._switch(False)

    def publish(self, record: Record) -> None:
        """Hand a record to all tracers that want it."""
        text = None
        for tracer in self._tracers:
            if tracer.wanted.includes(record):
                text = text or json.dumps(record).encode()
                tracer.put(text)
