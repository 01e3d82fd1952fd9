"""The protocol in which a running daemon answers questions, for `cloakfs explain`, `table`, `trace`, `events` and
`metrics`.

The options and the plug-in on disk may have changed since the mount. Each daemon therefore listens on a unix stream
socket, to which only root has access, and answers each line of JSON with another. The first line is about the version,
which must be the same on both sides:

    {"version": 1}                               {"version": 1}, from another version with "refused"

Then:

    {}                                           {"options": …, "groups": …, "plugin": null or {…}}
    {"method": "visible", "arguments": […]}      {"answer": …}, {"failed": why}, or {"access": [caller, mode]}
    {"method": "metrics"}                        {"metrics": …}: what `filesystem.figures` returns
    {"method": "lie over"}                       {"xattrs": …}: from now on, the client is let in (`above`)
    {"method": "trace", "wanted": {…}}           {}: from now on, records are kept for the client (`tracers`)
    {"method": "fetch"}                          {"records": […], "dropped": COUNT}, at once, or within a second
    {"method": "events", "after": NUMBER}        {"events": […]}: those with a larger number that are kept (`events`)

"access" is a question back: a plug-in needs to know what the kernel grants, and only the client has the object. The
client repeats its request, with all questions that came back and their answers as "access".
"""

import contextlib
import json
import os
import socket
import struct
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

import trio

from . import linux
from .above import Above
from .caller import Caller, ClientCaller
from .config.parse import parse_options
from .config.render import format_options
from .errors import UserError
from .events import Event, Events
from .linux import ownfiles, sockets
from .mounted import RUN_DIR, Mounted, PublishedState, mount_key
from .policy import METHODS, Attrs, Policy, is_built_in
from .tasks import Tasks, cause
from .tracers import Record, TooManyTracers, Tracer, Tracers, Wanted
from .views import Views

CONTROL_DIR = os.path.join(RUN_DIR, "control")

VERSION = 1
"""The version of the control protocol. In every later version, the first line and its answer have a "version"."""

MOST_CONVERSATIONS = 16
"""The maximum of concurrent conversations; beyond it, the one that has been silent longest is ended."""

LONGEST_REQUEST = 1 << 20
"""In bytes. A caller may be in 65,536 groups."""

PATIENCE_SECONDS = 10.0
"""How long a client waits for an answer."""

_MOST_QUESTIONS_BACK = 100

_ATTRS = ("name", "mode", "uid", "gid", "size", "nlink", "mtime_ns")


class DaemonError(UserError):
    """A daemon cannot be asked; the text is one line that says why."""


class PluginError(UserError):
    """A method of the plug-in raised something, in the daemon."""


def socket_of(key: str) -> str:
    """Return the path of the socket on which the daemon of the mount with this key listens."""
    return os.path.join(CONTROL_DIR, key)


# -- the daemon ------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Client:
    """One end of a conversation.

    Attributes:
        pid: its process.
        scope: ends the conversation when it is cancelled.
        until_its_end: what lasts as long as the conversation.
        tracer: what is kept for it if it traces.
    """

    pid: int
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    until_its_end: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    tracer: Tracer | None = None


class Control:
    """Serves the control socket of one mount's daemon; as a context manager, removes it on exit.

    Args:
        key: the key of the mount.
        published: holds the options in force.
        groups: the effective source of supplementary groups, as in the option `groups=`.
        views: hold the policy in force.
        above: the daemons of mounts that lie over this one.
        tracers: those who trace this mount.
        figures: returns the figures of the mount, ready for JSON.
        events: its events.
        xattrs: whether the mount supports extended attributes.
    """

    def __init__(
        self,
        key: str,
        published: PublishedState,
        groups: str | None,
        views: Views,
        above: Above,
        tracers: Tracers,
        figures: Callable[[], dict[str, Any]],
        events: Events,
        *,
        xattrs: bool = True,
    ) -> None:
        self._path = socket_of(key)
        self._published = published
        self._groups = groups
        self._views = views
        self._above = above
        self._tracers = tracers
        self._figures = figures
        self._events = events
        self._xattrs = xattrs
        self._conversations: dict[trio.CancelScope, None] = {}  # the one silent longest comes first

    def __enter__(self) -> None:
        ownfiles.makedirs(CONTROL_DIR, mode=0o700, exist_ok=True)
        self._listening = sockets.listen(self._path, mode=0o600)
        self._listening.setblocking(False)

    def __exit__(self, *exc: object) -> None:
        with contextlib.suppress(OSError):
            ownfiles.unlink(self._path)
        self._listening.close()

    async def serve(self, tasks: Tasks) -> None:
        """Answer requests for ever; each conversation is a task."""
        listening = trio.socket.from_stdlib_socket(self._listening)
        while True:
            connection, _ = await listening.accept()
            try:
                self._admit(connection, tasks)
            except BaseException:
                connection.close()
                raise

    def _admit(self, connection: trio.socket.SocketType, tasks: Tasks) -> None:
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid, uid, _ = struct.unpack("3i", credentials)
        if uid != 0:
            connection.close()
            return
        if len(self._conversations) >= MOST_CONVERSATIONS:
            silent = next(iter(self._conversations))
            del self._conversations[silent]
            silent.cancel()
        client = _Client(pid)
        self._conversations[client.scope] = None
        tasks.once("answering another command", self._converse, connection, client)

    async def _converse(self, connection: trio.socket.SocketType, client: _Client) -> None:
        try:
            with client.scope, contextlib.suppress(trio.BrokenResourceError), client.until_its_end:
                async with trio.SocketStream(connection) as stream:
                    await self._answer_lines(stream, client)
        finally:
            self._conversations.pop(client.scope, None)

    def _let_in(self, client: _Client) -> None:
        client.until_its_end.enter_context(self._above.let_in(client.pid))
        self._conversations.pop(client.scope, None)  # it stays silent all its life, and must never make room for others

    def _let_trace(self, client: _Client, wanted: Wanted) -> None:
        if client.tracer is not None:
            raise ValueError("it traces already")
        client.tracer = client.until_its_end.enter_context(self._tracers.attach(wanted))
        self._conversations.pop(client.scope, None)  # it may be slow, and there are few of them

    async def _answer_lines(self, stream: trio.SocketStream, client: _Client) -> None:
        received = bytearray()
        greeted = False
        async for data in stream:
            received += data
            *lines, rest = received.split(b"\n")
            for line in lines:
                if client.scope in self._conversations:
                    self._conversations[client.scope] = self._conversations.pop(client.scope)
                # A client that does not read holds up nobody else.
                if greeted:
                    await stream.send_all(await self._answer(line, client))
                else:
                    greeted, answer = _greeted(line)
                    await stream.send_all(answer)
            received = rest
            if len(received) > LONGEST_REQUEST:
                return

    async def _answer(self, line: bytes | bytearray, client: _Client) -> bytes:
        try:
            request = json.loads(line)
            if client.tracer is not None and request.get("method") == "fetch":
                return await client.tracer.fetch() + b"\n"
            answer = self._answer_to(request, client)
        except TooManyTracers as exc:
            answer = {"refused": str(exc)}
        except Exception as exc:
            answer = {"refused": cause(exc)}
        return json.dumps(answer).encode() + b"\n"

    def _answer_to(self, request: dict[str, Any], client: _Client) -> dict[str, Any]:
        policy = self._views.policy
        method = request.get("method")
        if method == "metrics":
            return {"metrics": self._figures()}
        if method == "lie over":
            self._let_in(client)
            return {"xattrs": self._xattrs}
        if method == "trace":
            self._let_trace(client, Wanted.parse(request["wanted"]))
            return {}
        if method == "events":
            return {"events": self._events.after(int(request["after"]))}
        if method is None:
            return {"options": self._published.options, "groups": self._groups, "plugin": _described(policy)}
        return _ask_policy(policy, method, request)


def _ask_policy(policy: Policy, method: str, request: dict[str, Any]) -> dict[str, Any]:
    """Return a plug-in's answer to a daemon that serves another mount above, or what it has to find out first.

    Args:
        policy: the plug-in.
        method: the method that is called.
        request: its `arguments`, and in `access`, what was found out meanwhile.

    Raises:
        ValueError: there is no such method.
    """
    if method not in METHODS:
        raise ValueError(f"{method!r} is not a method of a policy")
    granted = {json.dumps(question): answer for *question, answer in request.get("access", ())}
    asked_back: list[list[Any]] = []

    def accessible(caller: Caller, mode: int) -> bool:
        question = [_plain(Caller(*caller)), mode]
        text = json.dumps(question)
        if text not in granted:
            asked_back.append(question)
            raise LookupError("only the upper mount can tell")
        return bool(granted[text])

    arguments = [_restored(argument, accessible) for argument in request["arguments"]]
    if method == "forward":
        arguments = [ClientCaller(*who) for who in arguments]
    linux.act_as_daemon()  # a plug-in's code runs
    try:
        answer = getattr(policy, method)(*arguments)
        if method == "show":  # only these three fields of its answer count
            answer = replace(arguments[0], mode=int(answer.mode), uid=answer.uid, gid=answer.gid)
        told = {"answer": _plain(answer)}
    except BaseException as exc:  # even SystemExit
        told = {"failed": cause(exc)}
    return {"access": asked_back[0]} if asked_back else told


def _greeted(line: bytes | bytearray) -> tuple[bool, bytes]:
    """Return whether this is a first line of the same version, and the answer to it."""
    version = None
    with contextlib.suppress(ValueError, RecursionError, AttributeError):
        version = json.loads(line).get("version")
    answer: dict[str, object] = {"version": VERSION}
    is_same = type(version) is int and version == VERSION
    if not is_same:
        answer["refused"] = f"the request is in version {version!r} of the control protocol, and it speaks {VERSION}"
    return is_same, json.dumps(answer).encode() + b"\n"


def _described(policy: Policy) -> dict[str, Any] | None:
    """Return what a client needs to stand in for a plug-in; None for the built-in policy."""
    if type(policy) is Policy and not vars(policy).keys() & set(METHODS):
        return None
    methods = [method for method in METHODS if not is_built_in(policy, method)]
    return {"options": format_options(policy.options), "methods": methods, "hides": bool(policy.hides)}


# -- the client ------------------------------------------------------------------------------------


class Conversation:
    """A connection to the daemon of a mount; as a context manager, closes it on exit.

    Raises:
        DaemonError: there is no daemon, or it is of another version.
    """

    def __init__(self, mount: Mounted) -> None:
        self._who = f"{mount.target}: its daemon (process {mount.pid})"
        try:
            self._socket = sockets.connect(socket_of(mount_key(mount.source, mount.target)), PATIENCE_SECONDS)
        except FileNotFoundError:
            raise DaemonError(f"{self._who} cannot be asked: it is of an earlier version, or is about to end") from None
        except OSError as exc:
            raise DaemonError(f"{self._who} cannot be asked: {exc.strerror or exc}") from exc
        self._answers = self._socket.makefile("rb")
        try:
            self._greet()
        except DaemonError:
            self.close()
            raise

    def _greet(self) -> None:
        version = self._said({"version": VERSION}).get("version")
        if version != VERSION:
            raise DaemonError(
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

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the daemon's answer.

        Raises:
            DaemonError: the daemon does not answer.
        """
        answer = self._said(request)
        if "refused" in answer:
            raise DaemonError(f"{self._who} does not answer: {answer['refused']}")
        return answer

    def _said(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            self._socket.sendall(json.dumps(request).encode() + b"\n")
            line = self._answers.readline()
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
            told = self.ask({})
        except DaemonError:
            self.close()
            raise
        self.options = replace(parse_options(told["options"])[0], groups=told["groups"])
        self.policy = Policy(self.options)
        plugin = told["plugin"]
        if plugin is not None:
            self.policy = Policy(parse_options(plugin["options"])[0])
            for method in plugin["methods"]:
                setattr(self.policy, method, partial(self._call, method))
            self.policy.hides = plugin["hides"]

    def _call(self, method: str, *arguments: Any) -> Any:
        access: list[list[Any]] = []
        request = {"method": method, "arguments": list(map(_plain, arguments)), "access": access}
        answer = self.ask(request)
        while "access" in answer:
            if len(access) >= _MOST_QUESTIONS_BACK:
                raise PluginError(f"{method} asks what is accessible again and again")
            who, mode = answer["access"]
            attrs = next(argument for argument in arguments if isinstance(argument, Attrs))
            access.append([who, mode, attrs.accessible(_restored(who), mode)])
            answer = self.ask(request)
        if "failed" in answer:
            raise PluginError(answer["failed"])
        return _restored(answer["answer"])


def traced(mount: Mounted, wanted: Wanted) -> Generator[tuple[list[Record], int], None, None]:
    """Trace a mount: yield records, and how many have been dropped since then; at least once a second, even if none.

    Raises:
        DaemonError: the daemon cannot be asked, or ends.
    """
    with Conversation(mount) as conversation:
        conversation.ask({"method": "trace", "wanted": wanted.plain()})
        while True:
            answer = conversation.ask({"method": "fetch"})
            yield answer["records"], answer["dropped"]


class Watcher(Conversation):
    """Fetches the events of a mount; see `Conversation`.

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
        events: list[Event] = self.ask({"method": "events", "after": self.last})["events"]
        if events:
            self.last = events[-1]["number"]
        return events


# -- values on the wire ----------------------------------------------------------------------------


def _plain(value: object) -> object:
    """Convert an argument or answer of a method for JSON; a value that is no valid answer becomes text."""
    match value:
        case Caller() | ClientCaller():
            return {"uid": value.uid, "gid": value.gid, "groups": sorted(value.groups)}
        case Attrs():
            return {name: getattr(value, name) for name in _ATTRS}
        case None | bool() | int() | str():
            return value
        case tuple() | list() | set() | frozenset():
            return [_plain(item) for item in value]
        case _:
            return repr(value)


def _restored(value: Any, access: Callable[[Caller, int], bool] | None = None) -> Any:
    match value:
        case {"uid": uid, "gid": gid, "groups": groups}:
            return Caller(uid, gid, frozenset(groups))
        case {"name": _}:
            return Attrs(**{name: value[name] for name in _ATTRS}, _access=access)
        case _:
            return value
