"""Sockets that have a path, made and reached as the daemon (`linux.ownfiles`)."""

import contextlib
import os
import socket
import struct

from .credentials import as_daemon


@as_daemon
def listen(
    path: str, *, mode: int | None = None, backlog: int = socket.SOMAXCONN, kind: int = socket.SOCK_STREAM
) -> socket.socket:
    """Return a socket that listens at `path`, in place of one that was left at `path`.

    Args:
        path: where.
        mode: its permissions, if they are not to be what the umask makes them.
        backlog: how many may wait to be accepted.
        kind: of the socket.

    Raises:
        OSError: it cannot be made.
    """
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    listening = socket.socket(socket.AF_UNIX, kind)
    try:
        listening.bind(path)
        if mode is not None:
            os.chmod(path, mode)
        listening.listen(backlog)
    except OSError:
        listening.close()
        raise
    return listening


@as_daemon
def connect(path: str, seconds: float, kind: int = socket.SOCK_STREAM) -> socket.socket:
    """Return a socket of this kind that is connected to the one at `path`, and waits no longer than this in any call.

    Raises:
        OSError: no process listens at `path`, or it does not accept in time.
    """
    connected = socket.socket(socket.AF_UNIX, kind)
    connected.settimeout(seconds)
    try:
        connected.connect(path)
    except OSError:
        connected.close()
        raise
    return connected


def peer_pid(connection: socket.socket) -> int:
    """Return the id of the process that has connected, in this process's pid namespace; 0 if it has none there."""
    pid, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return int(pid)
