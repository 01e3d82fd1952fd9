"""Sockets that have a path, made and reached as the daemon (`linux.ownfiles`)."""

import contextlib
import os
import socket

from .credentials import as_daemon


@as_daemon
def listen(path: str, *, mode: int | None = None, backlog: int = socket.SOMAXCONN) -> socket.socket:
    """Return a stream socket that listens at `path`, in place of one that was left at `path`.

    Args:
        path: where.
        mode: its permissions, if they are not to be what the umask makes them.
        backlog: how many may wait to be accepted.

    Raises:
        OSError: it cannot be made.
    """
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
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
def connect(path: str, seconds: float) -> socket.socket:
    """Return a stream socket that is connected to the one at `path`, and waits no longer than this in any call.

    Raises:
        OSError: no process listens at `path`, or it does not accept in time.
    """
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connected.settimeout(seconds)
    try:
        connected.connect(path)
    except OSError:
        connected.close()
        raise
    return connected
