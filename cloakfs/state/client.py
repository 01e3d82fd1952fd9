"""The client of a running daemon: queries it for `cloakfs explain`, `table`, `trace`, `events` and `metrics`.

The options and the plug-in on disk may have changed since the mount. Each daemon therefore listens on a unix stream
socket, to which only root has access, and answers each line of JSON with another. The first line is about the version,
which must be the same on both sides:

    {"version": 1}                               {"version": 1}, from another version with "refused"

Then:

    {}                                           {"options": …, "groups": …, "plugin": null or {…}}
    {"method": "visible", "arguments": […]}      {"answer": …}, {"failed": why}, or {"access": [caller, mode]}
    {"method": "metrics"}                        {"metrics": …}: what `mount.publication.figures` returns
    {"method": "lie over"}                       {"xattrs": …}: from now on, the client is let in (`stacking.upper`)
    {"method": "trace", "wanted": {…}}           {}: from now on, there are records for the client (`filesystem.trace`)
    {"method": "fetch"}                          {"records": […], "dropped": COUNT}, at once, or within a second
    {"method": "events", "after": NUMBER}        {"events": […]}: those with a larger number that are kept (`events`)

With "access", the daemon queries its client: a plug-in needs to know what the kernel grants, and only the client has
the object. The client repeats its request, with all such queries and their answers as "access".
"""

import json
import os
from collections.abc import Callable, Generator
from dataclasses import replace
from functools import partial
from typing import Any, Self

from ..config.parse import parse_options
from ..identity import Caller, ClientCaller
from ..linux import sockets
from ..messages import UserError
from ..monitoring import Event
from ..policy import Attrs, Policy
from ..tracerecords import Record, TraceFilter
from .runtime import RUN_DIR, Mounted, mount_key

CONTROL_DIR = os.path.join(RUN_DIR, "control")

VERSION = 1
"""The version of the control protocol. In every later version, the first line and its answer have a "version"."""

LONGEST_REQUEST = 1 << 20
"""In bytes. A caller may be in 65,536 groups."""

PATIENCE_SECONDS = 10.0
"""How long a client waits for an answer."""

_LONGEST_ANSWER = 16 << 20
_MOST_ACCESS_QUERIES = 100

_ATTRS = ("name", "mode", "uid", "gid", "size", "nlink", "mtime_ns")


class DaemonError(UserError):
    """A daemon cannot be asked; the text is one line that says why."""


class RefusedError(DaemonError):
    """A daemon that lives does not take a request: it is of another version, about to end, or failed to answer."""


class PluginError(UserError):
    """A method of the plug-in raised something, in the daemon."""


def socket_of(key: str) -> str:
    """Return the path of the socket on which the daemon of the mount with this key listens."""
    return os.path.join(CONTROL_DIR, key)


# -- the daemon ------------------------------------------------------------------------------------


def plain(value: object) -> object:
    """Convert an argument or answer of a method for JSON; a value that is no valid answer becomes text."""
    match value:
        case Caller() | ClientCaller():
            return {"uid": value.uid, "gid": value.gid, "groups": sorted(value.groups)}
        case Attrs():
            return {name: getattr(value, name) for name in _ATTRS}
        case None | bool() | int() | str():
            return value
        case tuple() | list() | set() | frozenset():
            return [plain(item) for item in value]
        case _:
            return repr(value)


def restored(value: Any, access: Callable[[Caller, int], bool] | None = None) -> Any:
    """Return the argument or answer of which `plain` made this."""
    match value:
        case {"uid": uid, "gid": gid, "groups": groups}:
            return Caller(uid, gid, frozenset(groups))
        case {"name": _}:
            return Attrs(**{name: value[name] for name in _ATTRS}, _access=access)
        case _:
            return value


class Conversation:
    """A connection to the daemon of a mount; as a context manager, closes it on exit.

    Raises:
        RefusedError: the daemon is of another version, or is about to end.
        DaemonError: there is no daemon, or it does not answer.
    """

    def __init__(self, mount: Mounted) -> None:
        self._who = f"{mount.target}: its daemon (process {mount.pid})"
        try:
            self._socket = sockets.connect(socket_of(mount_key(mount.source, mount.target)), PATIENCE_SECONDS)
        except FileNotFoundError:
            raise RefusedError(
                f"{self._who} cannot be asked: it is of an earlier version, or is about to end"
            ) from None
        except OSError as exc:
            raise DaemonError(f"{self._who} cannot be asked: {exc.strerror or exc}") from exc
        self._answers = self._socket.makefile("rb")
        try:
            self._greet()
        except DaemonError:
            self.close()
            raise

    def _greet(self) -> None:
        version = self._exchange({"version": VERSION}).get("version")
        if version != VERSION:
            raise RefusedError(
                f"{self._who} cannot be asked: it speaks version {version!r} of the control protocol, and this cloakfs "
                f"{VERSION}; use the cloakfs that mounted it, or mount the tree again"
            )

    def close(self) -> None:
        """Close the connection."""
        self._answers.close()
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def query(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the daemon's answer.

        Raises:
            RefusedError: the daemon answers that it cannot.
            DaemonError: the daemon does not answer.
        """
        answer = self._exchange(request)
        if "refused" in answer:
            raise RefusedError(f"{self._who} does not answer: {answer['refused']}")
        return answer

    def _exchange(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            self._socket.sendall(json.dumps(request).encode() + b"\n")
            line = self._answers.readline(_LONGEST_ANSWER)
            if not line:
                raise OSError("it has ended")
            return dict(json.loads(line))
        except (OSError, ValueError, TypeError) as exc:
            raise DaemonError(f"{self._who} does not answer: {exc}") from exc


class Daemon(Conversation):
    """The daemon of a mount. After closing it, the methods of a plug-in cannot be called any more.

    Attributes:
        options: the options in force.
        policy: the policy in force. If it is a plug-in, its methods are calls to the daemon, which raise
            `DaemonError` and `PluginError`.

    Raises:
        DaemonError: the daemon cannot be asked, or is of another version.
    """

    def __init__(self, mount: Mounted) -> None:
        super().__init__(mount)
        try:
            answer = self.query({})
        except DaemonError:
            self.close()
            raise
        self.options = replace(parse_options(answer["options"])[0], groups=answer["groups"])
        self.policy = Policy(self.options)
        plugin = answer["plugin"]
        if plugin is not None:
            self.policy = Policy(parse_options(plugin["options"])[0])
            for method in plugin["methods"]:
                setattr(self.policy, method, partial(self._call, method))
            self.policy.hides = plugin["hides"]

    def _call(self, method: str, *arguments: Any) -> Any:
        access: list[list[Any]] = []
        request = {"method": method, "arguments": list(map(plain, arguments)), "access": access}
        answer = self.query(request)
        while "access" in answer:
            if len(access) >= _MOST_ACCESS_QUERIES:
                raise PluginError(f"{method} asks what is accessible again and again")
            who, mode = answer["access"]
            attrs = next(argument for argument in arguments if isinstance(argument, Attrs))
            access.append([who, mode, attrs.accessible(restored(who), mode)])
            answer = self.query(request)
        if "failed" in answer:
            raise PluginError(answer["failed"])
        return restored(answer["answer"])


def traced(mount: Mounted, wanted: TraceFilter) -> Generator[tuple[list[Record], int], None, None]:
    """Trace a mount: yield records, and how many have been dropped since then; at least once a second, even if none.

    Raises:
        DaemonError: the daemon cannot be asked, or ends.
    """
    with Conversation(mount) as conversation:
        conversation.query({"method": "trace", "wanted": wanted.plain()})
        while True:
            answer = conversation.query({"method": "fetch"})
            yield answer["records"], answer["dropped"]


class Watcher(Conversation):
    """A connection to the daemon of a mount (`Conversation`) that fetches its events.

    Attributes:
        last: the number of the last event that is known; only later ones are fetched.
    """

    def __init__(self, mount: Mounted, last: int = 0) -> None:
        super().__init__(mount)
        self.last = last

    def fetch(self) -> list[Event]:
        """Return the events since the last call, or at first those that the daemon keeps.

        Raises:
            DaemonError: the daemon does not answer.
        """
        events: list[Event] = self.query({"method": "events", "after": self.last})["events"]
        if events:
            self.last = events[-1]["number"]
        return events
