"""NFS requests by hand, for handles that no well-behaved client would send (RFC 1813, 7530)."""

import struct

from tests.nfs.rpc import Connection, counted, opaque

NFS = 100003
OK, PERM, NOENT, IO, ACCES, STALE, BADHANDLE = 0, 1, 2, 5, 13, 70, 10001

_REGULAR_V3 = "!IIIIIQQ"  # type, mode, nlink, uid, gid, size, used


class Refused(Exception):
    """The server's answer was an error; `status` is the protocol's number for it."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


class Wire(Connection):
    """A connection to an NFS server as one AUTH_SYS caller."""

    def __init__(self, port: int, *, version: int, uid: int = 0, gid: int = 0, host: str = "127.0.0.1") -> None:
        super().__init__(host, port, uid, gid)
        self.version = version

    def _ask(self, procedure: int, arguments: bytes) -> bytes:
        """The results of one call, which begin with the status.

        Raises:
            OSError: see `call`.
            Refused: it is an error.
        """
        answer = self.call(NFS, self.version, procedure, arguments)
        (status,) = struct.unpack_from("!I", answer)
        if status:
            raise Refused(status)
        return answer

    def getattr(self, handle: bytes) -> tuple[int, int]:
        """(file id, size) of what a handle names.

        Raises:
            Refused: the server does not take the handle.
        """
        if self.version == 3:
            answer = self._ask(1, opaque(handle))
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
            answer = self._ask(6, opaque(handle) + struct.pack("!QI", 0, count))
            at = 8 + (84 if struct.unpack_from("!I", answer, 4)[0] else 0) + 8
        else:
            answer = self._compound(handle, struct.pack("!I", 25) + bytes(16) + struct.pack("!QI", 0, count))
            at = 8 + 4
        return counted(answer, at)

    def write(self, handle: bytes, data: bytes) -> None:
        """Write to the beginning of a file, to stable storage."""
        if self.version == 3:
            self._ask(7, opaque(handle) + struct.pack("!QII", 0, len(data), 2) + opaque(data))
        else:
            self._compound(handle, struct.pack("!I", 38) + bytes(16) + struct.pack("!QI", 0, 2) + opaque(data))

    def setattr_mode(self, handle: bytes, mode: int) -> None:
        """Change the mode, by the anonymous state id (NFSv4 only)."""
        attributes = struct.pack("!III", 2, 0, 1 << 1) + opaque(struct.pack("!I", mode))
        self._compound(handle, struct.pack("!I", 34) + bytes(16) + attributes)

    def lookup(self, handle: bytes, name: bytes) -> bytes:
        """The handle of a name in a directory."""
        if self.version == 3:
            answer = self._ask(3, opaque(handle) + opaque(name))
            return counted(answer, 4)
        answer = self._compound(handle, struct.pack("!I", 15) + opaque(name), struct.pack("!I", 10))
        return counted(answer, 8)

    def root(self) -> bytes:
        """The handle of the root of the server's name space (NFSv4)."""
        message = opaque(b"") + struct.pack("!IIII", 0, 2, 24, 10)
        answer = self._ask(1, message)
        return counted(answer[4 + 4 + 4 + 8 :], 8)

    def _compound(self, handle: bytes, *operations: bytes) -> bytes:
        """The result of the last operation on a handle, from its number on."""
        message = opaque(b"") + struct.pack("!III", 0, 1 + len(operations), 22) + opaque(handle) + b"".join(operations)
        answer = self._ask(1, message)
        # Status, tag (empty), count; then number and status of all but the last, whose results are empty.
        return answer[4 + 4 + 4 + 8 * len(operations) :]
