"""NFS requests by hand, for handles that no well-behaved client would send: ONC RPC over TCP (RFC 5531, 1813, 7530)."""

import itertools
import socket
import struct
from types import TracebackType
from typing import Self

NFS = 100003
OK, PERM, NOENT, IO, ACCES, STALE, BADHANDLE = 0, 1, 2, 5, 13, 70, 10001

_REGULAR_V3 = "!IIIIIQQ"  # type, mode, nlink, uid, gid, size, used


def opaque(data: bytes) -> bytes:
    """XDR of a counted string."""
    return struct.pack("!I", len(data)) + data + bytes(-len(data) % 4)


class Refused(Exception):
    """The server's answer was an error; `status` is the protocol's number for it."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


class Wire:
    """A connection as one AUTH_SYS caller."""

    def __init__(self, port: int, *, version: int, uid: int = 0, gid: int = 0, host: str = "127.0.0.1") -> None:
        self._socket = socket.create_connection((host, port), timeout=20)
        self.version = version
        self._xid = itertools.count(1)
        body = struct.pack("!I", 0) + opaque(b"test") + struct.pack("!III", uid, gid, 0)
        self._auth = struct.pack("!I", 1) + opaque(body) + struct.pack("!II", 0, 0)

    def call(self, procedure: int, arguments: bytes) -> bytes:
        """The results of one call.

        Raises:
            OSError: the connection was lost, or nothing came for 20 s.
        """
        xid = next(self._xid)
        message = struct.pack("!IIIIII", xid, 0, 2, NFS, self.version, procedure) + self._auth + arguments
        self._socket.sendall(struct.pack("!I", 0x80000000 | len(message)) + message)
        data = b""
        last = False
        while not last:
            (mark,) = struct.unpack("!I", self._exactly(4))
            last = bool(mark & 0x80000000)
            data += self._exactly(mark & 0x7FFFFFFF)
        got, kind, state, _flavour, length = struct.unpack_from("!IIIII", data)
        (accepted,) = struct.unpack_from("!I", data, 20 + length)
        if (got, kind, state, accepted) != (xid, 1, 0, 0):
            raise OSError(f"the call was not accepted: {data[:40].hex()}")
        return data[24 + length :]

    def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            more = self._socket.recv(count - len(data))
            if not more:
                raise ConnectionError("the server closed the connection")
            data += more
        return data

    def getattr(self, handle: bytes) -> tuple[int, int]:
        """(file id, size) of what a handle names.

        Raises:
            Refused: the server does not take the handle.
        """
        if self.version == 3:
            answer = self.call(1, opaque(handle))
            _check(answer)
            _type, _mode, _nlink, _uid, _gid, size, _used = struct.unpack_from(_REGULAR_V3, answer, 4)
            (fileid,) = struct.unpack_from("!Q", answer, 4 + 20 + 16 + 8 + 8)
            return fileid, size
        # GETATTR of size (4) and fileid (20).
        answer = self._compound(handle, struct.pack("!IIII", 9, 1, 1 << 4 | 1 << 20, 0)[:12])
        size, fileid = struct.unpack_from("!QQ", answer, 8 + 4 + 4 + 4)
        return fileid, size

    def read(self, handle: bytes, count: int = 4096) -> bytes:
        """The beginning of a file's content, in NFSv4 without opening it (the anonymous state id)."""
        if self.version == 3:
            answer = self.call(6, opaque(handle) + struct.pack("!QI", 0, count))
            _check(answer)
            at = 8 + (84 if struct.unpack_from("!I", answer, 4)[0] else 0) + 8
        else:
            answer = self._compound(handle, struct.pack("!I", 25) + bytes(16) + struct.pack("!QI", 0, count))
            at = 8 + 4
        (length,) = struct.unpack_from("!I", answer, at)
        return answer[at + 4 : at + 4 + length]

    def write(self, handle: bytes, data: bytes) -> None:
        """Write to the beginning of a file, to stable storage."""
        if self.version == 3:
            _check(self.call(7, opaque(handle) + struct.pack("!QII", 0, len(data), 2) + opaque(data)))
        else:
            self._compound(handle, struct.pack("!I", 38) + bytes(16) + struct.pack("!QI", 0, 2) + opaque(data))

    def lookup(self, handle: bytes, name: bytes) -> bytes:
        """The handle of a name in a directory."""
        if self.version == 3:
            answer = self.call(3, opaque(handle) + opaque(name))
            _check(answer)
            return _counted(answer, 4)
        answer = self._compound(handle, struct.pack("!I", 15) + opaque(name), struct.pack("!I", 10))
        return _counted(answer, 8)

    def root(self) -> bytes:
        """The handle of the root of the server's name space (NFSv4)."""
        message = opaque(b"") + struct.pack("!IIII", 0, 2, 24, 10)
        answer = self.call(1, message)
        _check(answer)
        return _counted(answer[4 + 4 + 4 + 8 :], 8)

    def _compound(self, handle: bytes, *operations: bytes) -> bytes:
        """The result of the last operation on a handle, from its number on."""
        message = opaque(b"") + struct.pack("!III", 0, 1 + len(operations), 22) + opaque(handle) + b"".join(operations)
        answer = self.call(1, message)
        _check(answer)
        # Status, tag (empty), count; then number and status of all but the last, whose results are empty.
        return answer[4 + 4 + 4 + 8 * len(operations) :]

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _check(answer: bytes) -> None:
    (status,) = struct.unpack_from("!I", answer)
    if status:
        raise Refused(status)


def _counted(data: bytes, at: int) -> bytes:
    (length,) = struct.unpack_from("!I", data, at)
    return data[at + 4 : at + 4 + length]
