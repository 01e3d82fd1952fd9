"""The socket, for root only, on which a daemon answers `state.client`."""

import contextlib
import json
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import trio

from .. import linux
from ..background.tasks import Tasks, cause
from ..config.render import format_options
from ..filesystem.trace import TooManyTracers, Tracer, Tracers
from ..identity import Caller, ClientCaller
from ..linux import ownfiles, sockets
from ..monitoring import Events
from ..policy import METHODS, Policy, is_built_in
from ..stacking.upper import UpperDaemons
from ..state.client import CONTROL_DIR, LONGEST_REQUEST, VERSION, plain, restored, socket_of
from ..state.runtime import PublishedState
from ..tracerecords import TraceFilter
from ..tree.views import Views

MOST_CONVERSATIONS = 16
"""The maximum of concurrent conversations; beyond it, the one that has been silent longest is ended."""


@dataclass(slots=True)
class _Client:
    """One end of a conversation.

    Attributes:
        pid: its process.
        scope: ends the conversation when it is cancelled.
        until_its_end: what lasts as long as the conversation.
        tracer: its records, if it traces.
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
        upper: the daemons of upper mounts.
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
        upper: UpperDaemons,
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
        self._upper = upper
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
        client.until_its_end.enter_context(self._upper.admit(client.pid))
        self._conversations.pop(client.scope, None)  # it stays silent all its life, and must never make room for others

    def _let_trace(self, client: _Client, wanted: TraceFilter) -> None:
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
                # A client that does not read holds up no other.
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
            self._let_trace(client, TraceFilter.parse(request["wanted"]))
            return {}
        if method == "events":
            return {"events": self._events.after(int(request["after"]))}
        if method is None:
            return {"options": self._published.options, "groups": self._groups, "plugin": _described(policy)}
        return _call_policy(policy, method, request)


def _call_policy(policy: Policy, method: str, request: dict[str, Any]) -> dict[str, Any]:
    """Return a plug-in's answer to the daemon of an upper mount, or what that has to find out first.

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
    access_queries: list[list[Any]] = []

    def accessible(caller: Caller, mode: int) -> bool:
        question = [plain(Caller(*caller)), mode]
        text = json.dumps(question)
        if text not in granted:
            access_queries.append(question)
            raise LookupError("only the upper mount knows this")
        return bool(granted[text])

    arguments = [restored(argument, accessible) for argument in request["arguments"]]
    if method == "forward":
        arguments = [ClientCaller(*who) for who in arguments]
    linux.act_as_daemon()  # a plug-in's code runs
    try:
        answer = getattr(policy, method)(*arguments)
        if method == "show":  # only these three fields of its answer count
            answer = replace(arguments[0], mode=int(answer.mode), uid=answer.uid, gid=answer.gid)
        result = {"answer": plain(answer)}
    except BaseException as exc:  # even SystemExit
        result = {"failed": cause(exc)}
    return {"access": access_queries[0]} if access_queries else result


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
    if not policy.is_plugin:
        return None
    methods = [method for method in METHODS if not is_built_in(policy, method)]
    return {"options": format_options(policy.options), "methods": methods, "hides": bool(policy.hides)}
