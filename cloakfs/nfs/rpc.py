"""The few ONC RPC calls (RFC 5531) that show whether a server answers, and whether it serves an export.

Each call has a connection and a time limit of its own, so that an export that hangs delays no other. libnfs would do
the same, but only by mounting, which takes several requests and has no time limit in the versions of Debian 12.
"""

import errno
import os
import secrets
import socket
import struct
import time
from collections.abc import Sequence

RPCBIND = 100000
NFS = 100003
MOUNT = 100005

NFS_PORT = 2049
RPCBIND_PORT = 111

OK, DELAY, WRONGSEC, MINOR_VERS_MISMATCH = 0, 10008, 10016, 10021
"""Status numbers of NFSv4 (RFC 7530 §13.1)."""

_CALL, _REPLY = 0, 1
_LAST_FRAGMENT = 1 << 31
_LONGEST_ANSWER = 1 << 16
_RESERVED_PORTS = range(1023, 511, -1)  # those of bindresvport(3): an export without `insecure` wants one of them
_NOWHERE = struct.pack("!II", 0, 0)  # credentials or verifier: AUTH_NONE
_ROOT = struct.pack("!6I", 1, 24, 0, 1, ord("c") << 24, 0) + bytes(8)  # AUTH_SYS: stamp, machine "c", 0, 0, no groups
_RETRY_SECONDS = 0.1

# Errors of MOUNT (RFC 1813 §5.1.5) and NFS that have a number of their own in the protocol.
_NAMES = {70: errno.ESTALE, 10001: errno.EBADF, 10006: errno.EREMOTEIO}


class NotAccepted(OSError):
    """The server refuses the call as such: the program, its version or the caller."""


def call(
    host: str,
    port: int,
    program: int,
    version: int,
    procedure: int,
    arguments: bytes = b"",
    *,
    source: str | None = None,
    timeout: float = 2.0,
) -> bytes:
    """Make one call over TCP and return its results, in XDR.

    Args:
        host: name or address.
        port: 1 to 65535.
        program: the number of the program, as registered with IANA.
        version: the version of the program.
        procedure: the number of the procedure.
        arguments: its arguments, in XDR.
        source: the address of this machine to call from, as root (AUTH_SYS, from a reserved port); None for a call
            without credentials.
        timeout: the limit for connecting and the answer together, in seconds.

    Raises:
        NotAccepted: the program, its version or the caller is refused.
        OSError: nothing listens, or nothing answers in time.
    """
    deadline = time.monotonic() + timeout
    xid = secrets.randbits(32)
    credentials = _NOWHERE if source is None else _ROOT
    message = struct.pack("!6I", xid, _CALL, 2, program, version, procedure) + credentials + _NOWHERE + arguments
    with _connected(host, port, source, timeout) as stream:
        stream.sendall(struct.pack("!I", _LAST_FRAGMENT | len(message)) + message)
        answer, last = b"", False
        while not last:
            (mark,) = struct.unpack("!I", _receive(stream, 4, deadline))
            last, size = bool(mark & _LAST_FRAGMENT), mark & ~_LAST_FRAGMENT
            if len(answer) + size > _LONGEST_ANSWER:
                raise NotAccepted(errno.EMSGSIZE, os.strerror(errno.EMSGSIZE))
            answer += _receive(stream, size, deadline)
    # xid, REPLY, MSG_ACCEPTED, verifier (flavour and length), SUCCESS.
    if len(answer) < 24 or struct.unpack_from("!3I", answer) != (xid, _REPLY, 0):
        raise NotAccepted(errno.EACCES, "the server does not accept the call")
    at = 20 + struct.unpack_from("!I", answer, 16)[0]
    if answer[at : at + 4] != bytes(4):
        raise NotAccepted(errno.EPROTONOSUPPORT, "the server does not offer this program or version")
    return answer[at + 4 :]


def _connected(host: str, port: int, source: str | None, timeout: float) -> socket.socket:
    if source is None:
        return socket.create_connection((host, port), timeout=timeout)
    family = socket.AF_INET6 if ":" in source else socket.AF_INET
    for own_port in _RESERVED_PORTS:
        stream = socket.socket(family, socket.SOCK_STREAM)
        try:
            stream.settimeout(timeout)
            # The port is free again as soon as this is closed.
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            stream.bind((source, own_port))
            stream.connect((host, port))
        except OSError as exc:
            stream.close()
            if exc.errno not in (errno.EADDRINUSE, errno.EADDRNOTAVAIL) or own_port == _RESERVED_PORTS[-1]:
                raise
        else:
            return stream
    raise AssertionError("the last port returns or raises")


def _receive(stream: socket.socket, count: int, deadline: float) -> bytes:
    received = b""
    while len(received) < count:
        stream.settimeout(max(deadline - time.monotonic(), 0.001))
        more = stream.recv(count - len(received))
        if not more:
            raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
        received += more
    return received


def null_call(host: str, port: int, program: int, version: int, timeout: float = 2.0) -> bool:
    """Whether this version of a program answers its NULL procedure (RFC 5531 §12) on a TCP port.

    Args:
        host: name or address.
        port: 1 to 65535.
        program: the number of the program, as registered with IANA.
        version: the version of the program.
        timeout: the limit for connecting and the answer together, in seconds.

    Returns:
        False if nothing listens, nothing answers in time, or the program or version is not served there.
    """
    try:
        call(host, port, program, version, 0, timeout=timeout)
    except OSError:
        return False
    return True


def lookup(host: str, port: int, names: Sequence[str], source: str, timeout: float = 2.0) -> int:
    """Look up a path from the root of an NFSv4 server, as a client does that mounts it, and ask for its attributes.

    Args:
        host: address of the server.
        port: its port.
        names: the names in the path.
        source: the address of this machine to call from, as root (AUTH_SYS, from a reserved port).
        timeout: the limit for all of it, in seconds. While the server says that it has yet to find out (NFS4ERR_DELAY),
            it is asked again.

    Returns:
        the status: 0, or the number of an error (RFC 7530 §13.1).

    Raises:
        OSError: nothing listens or answers in time, or the call is refused (`NotAccepted`).
    """
    # Of COMPOUND (RFC 7530 §15.2): no tag, minor version 0, PUTROOTFH (24), LOOKUPs (15), GETATTR (9) of the type.
    operations = [struct.pack("!I", 24), *(struct.pack("!I", 15) + _opaque(name) for name in names)]
    operations.append(struct.pack("!III", 9, 1, 1 << 1))
    arguments = struct.pack("!III", 0, 0, len(operations)) + b"".join(operations)
    deadline = time.monotonic() + timeout
    while True:
        left = max(deadline - time.monotonic(), 0.001)
        status = _status(call(host, port, NFS, 4, 1, arguments, source=source, timeout=left))
        if status != DELAY or left <= _RETRY_SECONDS:
            return status
        time.sleep(_RETRY_SECONDS)


def mount(host: str, path: str, source: str, timeout: float = 2.0) -> int:
    """Ask the MOUNT service of an NFSv3 server for the root of an export (RFC 1813 §5.2.1), and NFS for its attributes.

    Args:
        host: address of the server.
        path: the path that clients mount.
        source: the address of this machine to call from, as root (AUTH_SYS, from a reserved port).
        timeout: the limit for each of the three calls, in seconds.

    Returns:
        the status: 0, or the number of an error of MOUNT or NFS.

    Raises:
        OSError: nothing listens or answers in time, or the call is refused (`NotAccepted`).
    """
    # PMAPPROC_GETPORT (RFC 1833 §3.2) of MOUNT version 3 over TCP.
    arguments = struct.pack("!4I", MOUNT, 3, socket.IPPROTO_TCP, 0)
    (port,) = struct.unpack_from("!I", call(host, RPCBIND_PORT, RPCBIND, 2, 3, arguments, timeout=timeout))
    answer = call(host, port, MOUNT, 3, 1, _opaque(path), source=source, timeout=timeout)
    status = _status(answer)
    if status == OK:
        (length,) = struct.unpack_from("!I", answer, 4)
        handle = answer[4 : 8 + length + -length % 4]
        status = _status(call(host, NFS_PORT, NFS, 3, 1, handle, source=source, timeout=timeout))
    return status


def described(status: int) -> str:
    """Return what a status of NFS or MOUNT means, in words. Most numbers are those of errno."""
    code = _NAMES.get(status, status)
    return os.strerror(code) if status < 100 or status in _NAMES else f"NFS error {status}"


def _opaque(text: str) -> bytes:
    """Return a text as a string of XDR (RFC 4506 §4.11)."""
    data = os.fsencode(text)
    return struct.pack("!I", len(data)) + data + bytes(-len(data) % 4)


def _status(answer: bytes) -> int:
    if len(answer) < 4:
        raise NotAccepted(errno.EBADMSG, os.strerror(errno.EBADMSG))
    return int(struct.unpack_from("!I", answer)[0])
