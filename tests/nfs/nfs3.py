"""A client that sends an NFSv3 server exactly what a test wants, even what no honest client would (RFC 1813)."""

import contextlib
import struct
from collections.abc import Sequence

from tests.nfs.rpc import Connection, counted, opaque
from tests.waiting import wait_until

_PORTMAP, _NFS, _MOUNT = 100000, 100003, 100005
OK, PERM, NOENT, ACCES, NOTDIR, ISDIR, STALE, BADHANDLE = 0, 1, 2, 13, 20, 21, 70, 10001

NOW = -1
"""As a time in `Client.setattr`: that of the server."""


class Client:
    """Requests as one user (AUTH_SYS)."""

    def __init__(self, host: str, uid: int, gid: int, groups: Sequence[int] = ()) -> None:
        self._who = (uid, gid, groups)
        self._host = host
        self._nfs = self._connect(2049)

    def _connect(self, port: int) -> Connection:
        return Connection(self._host, port, *self._who)

    def _ask(self, procedure: int, arguments: bytes) -> bytes:
        """Ask, once more if the server was restarted since, as any client does."""
        try:
            return self._nfs.call(_NFS, 3, procedure, arguments)
        except ConnectionError:
            self._nfs.close()
        answers: list[bytes] = []

        def is_answered() -> bool:
            with contextlib.suppress(ConnectionError):
                self._nfs = self._connect(2049)
                try:
                    answers.append(self._nfs.call(_NFS, 3, procedure, arguments))
                except ConnectionError:
                    self._nfs.close()
                    raise
            return bool(answers)

        wait_until(is_answered, 30, every=0.1)
        return answers[0]

    def mount(self, path: str) -> bytes:
        """The file handle of an export."""
        with self._connect(111) as portmapper:
            (port,) = struct.unpack("!I", portmapper.call(_PORTMAP, 2, 3, struct.pack("!4I", _MOUNT, 3, 6, 0)))
        with self._connect(port) as mountd:
            answer = mountd.call(_MOUNT, 3, 1, opaque(path.encode()))
        (status,) = struct.unpack_from("!I", answer)
        assert status == OK, status
        return counted(answer, 4)

    def getattr(self, handle: bytes) -> tuple[int, tuple[int, int, int]]:
        """The status, and mode, uid and gid."""
        answer = self._ask(1, opaque(handle))
        (status,) = struct.unpack("!I", answer[:4])
        if status:
            return status, (0, 0, 0)
        _, mode, _, uid, gid = struct.unpack("!5I", answer[4:24])
        return status, (mode, uid, gid)

    def changed(self, handle: bytes) -> tuple[int, int]:
        """When its attributes have changed: seconds and nanoseconds."""
        answer = self._ask(1, opaque(handle))
        (status,) = struct.unpack("!I", answer[:4])
        assert status == OK
        seconds, nanoseconds = struct.unpack("!II", answer[80:88])
        return seconds, nanoseconds

    def setattr(
        self,
        handle: bytes,
        *,
        mode: int | None = None,
        uid: int | None = None,
        gid: int | None = None,
        size: int | None = None,
        atime: int | None = None,
        mtime: int | None = None,
    ) -> int:
        """Change all of this at once, and return the status. Times are in seconds; NOW is the server's time."""
        arguments = opaque(handle)
        for value, form in ((mode, "!I"), (uid, "!I"), (gid, "!I"), (size, "!Q")):
            arguments += struct.pack("!I", value is not None) + (b"" if value is None else struct.pack(form, value))
        for seconds in (atime, mtime):
            how = 0 if seconds is None else 1 if seconds == NOW else 2
            arguments += struct.pack("!I", how) + (struct.pack("!II", seconds or 0, 0) if how == 2 else b"")
        return int(struct.unpack("!I", self._ask(2, arguments + struct.pack("!I", 0))[:4])[0])

    def lookup(self, directory: bytes, name: str) -> tuple[int, bytes]:
        """The status, and the file handle."""
        answer = self._ask(3, opaque(directory) + opaque(name.encode()))
        (status,) = struct.unpack_from("!I", answer)
        return status, b"" if status else counted(answer, 4)

    def walk(self, handle: bytes, *names: str) -> bytes:
        """The handle of a path; every part of it must be there."""
        for name in names:
            status, handle = self.lookup(handle, name)
            assert status == OK, (name, status)
        return handle

    def access(self, handle: bytes) -> tuple[int, int]:
        """The status, and which of READ 1, LOOKUP 2, MODIFY 4, EXTEND 8, DELETE 16, EXECUTE 32 are allowed."""
        answer = self._ask(4, opaque(handle) + struct.pack("!I", 63))
        (status,) = struct.unpack("!I", answer[:4])
        return status, 0 if status else struct.unpack("!I", answer[-4:])[0]

    def read(self, handle: bytes, size: int = 1000) -> tuple[int, bytes]:
        """The status, and the file's first bytes."""
        answer = self._ask(6, opaque(handle) + struct.pack("!QI", 0, size))
        status, has_attributes = struct.unpack("!II", answer[:8])
        if status:
            return status, b""
        return status, counted(answer, 8 + 84 * has_attributes + 8)

    def write(self, handle: bytes, data: bytes) -> int:
        """The status of a stable write at the beginning."""
        arguments = opaque(handle) + struct.pack("!QII", 0, len(data), 2) + opaque(data)
        return int(struct.unpack("!I", self._ask(7, arguments)[:4])[0])

    def list(self, directory: bytes) -> tuple[int, list[str]]:
        """The status, and the names in a directory small enough for one answer (READDIR)."""
        arguments = opaque(directory) + struct.pack("!QQI", 0, 0, 32768)
        answer = self._ask(16, arguments)
        status, has_attributes = struct.unpack("!II", answer[:8])
        if status:
            return status, []
        at = 8 + 84 * has_attributes + 8
        names = []
        while struct.unpack("!I", answer[at : at + 4])[0]:
            name = counted(answer, at + 12)
            names.append(name.decode())
            at += 12 + len(opaque(name)) + 8
        return status, sorted(set(names) - {".", ".."})

    def close(self) -> None:
        self._nfs.close()
