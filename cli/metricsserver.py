"""Serves metrics over HTTP, on a port or on a unix socket.

All users of the machine may connect to a port. They can neither make the daemons work more than once a second, nor
keep others from being answered by connections that say nothing.
"""

import contextlib
import errno
import grp
import hmac
import os
import signal
import socket
import socketserver
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

import sdnotify
from prometheus_client import make_wsgi_app

from cloakfs.nfs.health import Machine

from .openmetrics import registry

_FRESH_SECONDS = 1.0
"""For this long, the same figures are served again."""

_SILENCE_SECONDS = 5.0
"""How long a client may take to say anything."""

_MOST_CLIENTS = 32
"""The maximum of connections; beyond it, the oldest is ended."""


class MetricsServer:
    """Serves the figures of a machine.

    Args:
        place: an address with a port, or the path of a unix socket.
        group: the name of a group that may use the socket, besides root.
        token: what clients have to send, if anything.
        machine_state: returns the state of the machine.

    Attributes:
        place: where it is served, for people.

    Raises:
        LookupError: there is no such group.
        OSError: the place cannot be used.
    """

    def __init__(
        self, place: str | tuple[str, int], group: str | None, token: bytes | None, machine_state: Callable[[], Machine]
    ) -> None:
        app = make_wsgi_app(registry(_RecentState(machine_state).get))
        self._path = place if isinstance(place, str) else None
        self._server = _Unix(place, group) if isinstance(place, str) else _Inet(place)
        self._server.set_app(app if token is None else _guarded(app, token))
        self.place = self._server.place

    def serve(self) -> None:
        """Serve until SIGTERM or SIGINT, which end the process."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: sys.exit(0))
        try:
            sdnotify.SystemdNotifier().notify("READY=1")
            self._server.serve_forever()
        finally:
            self._server.server_close()
            if self._path is not None:
                with contextlib.suppress(OSError):
                    os.unlink(self._path)


class _RecentState:
    """The state of the machine, which is found out again after a second, for one client at a time."""

    def __init__(self, machine_state: Callable[[], Machine]) -> None:
        self._machine_state = machine_state
        self._lock = threading.Lock()
        self._state: Machine | None = None
        self._since = 0.0

    def get(self) -> Machine:
        with self._lock:
            if self._state is None or time.monotonic() - self._since > _FRESH_SECONDS:
                self._state = self._machine_state()
                self._since = time.monotonic()
            return self._state


def _guarded(app: Callable[..., Iterable[bytes]], token: bytes) -> Callable[..., Iterable[bytes]]:
    """Return an application that asks for the token first."""

    def guarded(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        scheme, _, given = environ.get("HTTP_AUTHORIZATION", "").partition(" ")
        if scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode("latin-1"), token):
            return app(environ, start_response)
        start_response("401 Unauthorized", [("WWW-Authenticate", "Bearer"), ("Content-Type", "text/plain")])
        return [b"a token is needed\n"]

    return guarded


class _Handler(WSGIRequestHandler):
    timeout = _SILENCE_SECONDS

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: clients could fill the log."""


class _Http(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True
    allow_reuse_address = True
    place = ""

    def __init__(self, address: Any) -> None:
        self._clients: dict[socket.socket, None] = {}  # the oldest first
        self._lock = threading.Lock()
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        # HTTPServer would ask the DNS for the name of the machine.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = "localhost", 0
        self.setup_environ()

    def get_request(self) -> tuple[socket.socket, tuple[str, int]]:
        connection, _ = self.socket.accept()
        return connection, ("local", 0)  # a unix socket has no address of a client

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._clients[request] = None
            while len(self._clients) > _MOST_CLIENTS:
                oldest = next(iter(self._clients))
                del self._clients[oldest]
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._clients.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a client that went away."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class _Inet(_Http):
    def __init__(self, address: tuple[str, int]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address)
        host = f"[{address[0]}]" if ":" in address[0] else address[0]
        self.place = f"http://{host}:{self.socket.getsockname()[1]}/metrics"


class _Unix(_Http):
    address_family = socket.AF_UNIX

    def __init__(self, path: str, group: str | None) -> None:
        self._group = -1 if group is None else _gid(group)
        super().__init__(path)
        self.place = path

    def server_bind(self) -> None:
        before = os.umask(0o177)
        try:
            self._bind_anew()
        finally:
            os.umask(before)
        path = str(self.server_address)
        if self._group >= 0:
            os.chown(path, -1, self._group)
            os.chmod(path, 0o660)

    def _bind_anew(self) -> None:
        """Bind the socket, also if an earlier one that nothing listens on any more is in the way."""
        path = str(self.server_address)
        try:
            super().server_bind()
        except OSError as exc:
            if exc.errno != errno.EADDRINUSE or not stat.S_ISSOCK(os.lstat(path).st_mode) or _is_served(path):
                raise
            os.unlink(path)
            super().server_bind()


def _gid(group: str) -> int:
    try:
        return int(group) if group.isdecimal() else grp.getgrnam(group).gr_gid
    except KeyError:
        raise LookupError(f"there is no group {group}") from None


def _is_served(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        client.setblocking(False)
        try:
            client.connect(path)
        except ConnectionRefusedError:
            return False
        except OSError:
            return True
    return True
