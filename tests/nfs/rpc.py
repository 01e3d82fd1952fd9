"""ONC RPC over TCP by hand (RFC 5531), for clients that send what no well-behaved one would."""

import itertools
import socket
import struct
from collections.abc import Sequence
from types import TracebackType
from typing import Self

_LAST_FRAGMENT = 1 << 31


def opaque(data: bytes) -> bytes:
    """XDR of a counted string (RFC 4506)."""
    return struct.pack("!I", len(data)) + data + bytes(-len(data) % 4)


def counted(data: bytes, at: int) -> bytes:
    """The counted string that begins there."""
    (length,) = struct.unpack_from("!I", data, at)
    return data[at + 4 : at + 4 + length]


class Connection:
    """To a server, as one AUTH_SYS caller."""

    def __init__(self, host: str, port: int, uid: int, gid: int, groups: Sequence[int] = ()) -> None:
        self._stream = socket.create_connection((host, port), timeout=30)
        self._xids = itertools.count(1)
        ids = struct.pack(f"!3I{len(groups)}I", uid, gid, len(groups), *groups)
        body = struct.pack("!I", 0) + opaque(b"test") + ids
        self._credentials = struct.pack("!I", 1) + opaque(body) + struct.pack("!II", 0, 0)

    def call(self, program: int, version: int, procedure: int, arguments: bytes) -> bytes:
        """The results of one call.

        Raises:
            OSError: the call was not accepted, the connection was lost, or nothing came for 30 s.
        """
        xid = next(self._xids)
        message = struct.pack("!6I", xid, 0, 2, program, version, procedure) + self._credentials + arguments
        self._stream.sendall(struct.pack("!I", _LAST_FRAGMENT | len(message)) + message)
        data = b""
        last = False
        while not last:
            (mark,) = struct.unpack("!I", self._exactly(4))
            last = bool(mark & _LAST_FRAGMENT)
            data += self._exactly(mark & ~_LAST_FRAGMENT)
        got, kind, state, _flavour, length = struct.unpack_from("!5I", data)
        (accepted,) = struct.unpack_from("!I", data, 20 + length)
        if (got, kind, state, accepted) != (xid, 1, 0, 0):
            raise OSError(f"the call was not accepted: {data[:40].hex()}")
        return data[24 + length :]

    def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            more = self._stream.recv(count - len(data))
            if not more:
                raise ConnectionError("the server closed the connection")
            data += more
        return data

    def close(self) -> None:
        self._stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
