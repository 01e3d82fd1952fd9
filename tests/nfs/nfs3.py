"""A client that says to an NFSv3 server exactly what a test wants, also what no honest client would (RFC 1813)."""

import itertools
import socket
import struct
from collections.abc import Iterable

_PORTMAP, _NFS, _MOUNT = 100000, 100003, 100005
OK, PERM, NOENT, ACCES, NOTDIR, ISDIR, STALE, BADHANDLE = 0, 1, 2, 13, 20, 21, 70, 10001


def _opaque(data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + data + b"\0" * (-len(data) % 4)


class Client:
    """Requests as one user (AUTH_SYS)."""

    def __init__(self, host: str, uid: int, gid: int, groups: Iterable[int] = ()) -> None:
        self._host = host
        gids = list(groups)
        credentials = (
            struct.pack(">I", 0) + _opaque(b"test") + struct.pack(f">III{len(gids)}I", uid, gid, len(gids), *gids)
        )
        self._credentials = struct.pack(">I", 1) + _opaque(credentials) + struct.pack(">II", 0, 0)
        self._xids = itertools.count(1)
        self._nfs = self._connect(2049)

    def _connect(self, port: int) -> socket.socket:
        stream = socket.create_connection((self._host, port), timeout=30)
        stream.settimeout(30)
        return stream

    def _call(self, stream: socket.socket, program: int, version: int, procedure: int, arguments: bytes) -> bytes:
        xid = next(self._xids)
        call = struct.pack(">6I", xid, 0, 2, program, version, procedure) + self._credentials + arguments
        stream.sendall(struct.pack(">I", 1 << 31 | len(call)) + call)
        answer = b""
        last = False
        while not last:
            (mark,) = struct.unpack(">I", self._receive(stream, 4))
            last = bool(mark >> 31)
            answer += self._receive(stream, mark & ~(1 << 31))
        got, _, accepted, _, _, status = struct.unpack(">6I", answer[:24])
        assert (got, accepted, status) == (xid, 0, 0), answer
        return answer[24:]

    @staticmethod
    def _receive(stream: socket.socket, size: int) -> bytes:
        data = b""
        while len(data) < size:
            more = stream.recv(size - len(data))
            if not more:
                raise ConnectionError("the server hung up")
            data += more
        return data

    def mount(self, path: str) -> bytes:
        """The file handle of an export."""
        with self._connect(111) as stream:
            (port,) = struct.unpack(">I", self._call(stream, _PORTMAP, 2, 3, struct.pack(">4I", _MOUNT, 3, 6, 0)))
        with self._connect(port) as stream:
            answer = self._call(stream, _MOUNT, 3, 1, _opaque(path.encode()))
        status, size = struct.unpack(">II", answer[:8])
        assert status == OK, status
        return answer[8 : 8 + size]

    def getattr(self, handle: bytes) -> tuple[int, tuple[int, int, int]]:
        """The status, and mode, uid and gid."""
        answer = self._call(self._nfs, _NFS, 3, 1, _opaque(handle))
        (status,) = struct.unpack(">I", answer[:4])
        if status:
            return status, (0, 0, 0)
        _, mode, _, uid, gid = struct.unpack(">5I", answer[4:24])
        return status, (mode, uid, gid)

    def lookup(self, directory: bytes, name: str) -> tuple[int, bytes]:
        """The status, and the file handle."""
        answer = self._call(self._nfs, _NFS, 3, 3, _opaque(directory) + _opaque(name.encode()))
        status, size = struct.unpack(">II", answer[:8])
        return (status, b"") if status else (status, answer[8 : 8 + size])

    def walk(self, handle: bytes, *names: str) -> bytes:
        """The handle of a path; every part of it must be there."""
        for name in names:
            status, handle = self.lookup(handle, name)
            assert status == OK, (name, status)
        return handle

    def access(self, handle: bytes) -> tuple[int, int]:
        """The status, and which of READ 1, LOOKUP 2, MODIFY 4, EXTEND 8, DELETE 16, EXECUTE 32 are allowed."""
        answer = self._call(self._nfs, _NFS, 3, 4, _opaque(handle) + struct.pack(">I", 63))
        (status,) = struct.unpack(">I", answer[:4])
        return status, 0 if status else struct.unpack(">I", answer[-4:])[0]

    def read(self, handle: bytes, size: int = 1000) -> tuple[int, bytes]:
        """The status, and the file's first bytes."""
        answer = self._call(self._nfs, _NFS, 3, 6, _opaque(handle) + struct.pack(">QI", 0, size))
        status, has_attributes = struct.unpack(">II", answer[:8])
        if status:
            return status, b""
        start = 8 + 84 * has_attributes + 8
        (length,) = struct.unpack(">I", answer[start : start + 4])
        return status, answer[start + 4 : start + 4 + length]

    def write(self, handle: bytes, data: bytes) -> int:
        """The status of a stable write at the beginning."""
        arguments = _opaque(handle) + struct.pack(">QII", 0, len(data), 2) + _opaque(data)
        return int(struct.unpack(">I", self._call(self._nfs, _NFS, 3, 7, arguments)[:4])[0])

    def list(self, directory: bytes) -> tuple[int, list[str]]:
        """The status, and the names in a directory small enough for one answer (READDIR)."""
        arguments = _opaque(directory) + struct.pack(">QQI", 0, 0, 32768)
        answer = self._call(self._nfs, _NFS, 3, 16, arguments)
        status, has_attributes = struct.unpack(">II", answer[:8])
        if status:
            return status, []
        at = 8 + 84 * has_attributes + 8
        names = []
        while struct.unpack(">I", answer[at : at + 4])[0]:
            (size,) = struct.unpack(">I", answer[at + 12 : at + 16])
            names.append(answer[at + 16 : at + 16 + size].decode())
            at += 16 + size + -size % 4 + 8
        return status, sorted(set(names) - {".", ".."})

    def close(self) -> None:
        self._nfs.close()
