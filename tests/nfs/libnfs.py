"""An NFS client in this process: libnfs (LGPL) by ctypes, with any uid, gids, version and port.

What libnfs itself keeps is turned off, so that each call is answered by the server.
"""

import contextlib
import ctypes
import errno
import itertools
import os
import stat
from collections.abc import Iterable
from types import TracebackType
from typing import NamedTuple, Self

NAMES = ("libnfs.so.13", "libnfs.so.14")
"""Of Debian 12 and 13. What is called here is the same in both."""

TIMEOUT_MS = 20_000

_pointer = ctypes.POINTER(ctypes.c_void_p)
_u64 = ctypes.c_uint64
_clients = itertools.count()


class _Stat(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_uint64)
        for name in (
            "dev", "ino", "mode", "nlink", "uid", "gid", "rdev", "size", "blksize", "blocks",
            "atime", "mtime", "ctime", "atime_nsec", "mtime_nsec", "ctime_nsec", "used",
        )
    ]  # fmt: skip


class _Timeval(ctypes.Structure):
    _fields_ = [("sec", ctypes.c_long), ("usec", ctypes.c_long)]


class _Dirent(ctypes.Structure):
    _fields_ = [
        ("next", ctypes.c_void_p), ("name", ctypes.c_char_p), ("inode", _u64),
        ("type", ctypes.c_uint32), ("mode", ctypes.c_uint32), ("size", _u64),
        ("atime", _Timeval), ("mtime", _Timeval), ("ctime", _Timeval),
        ("uid", ctypes.c_uint32), ("gid", ctypes.c_uint32), ("nlink", ctypes.c_uint32),
    ]  # fmt: skip


class _Handle(ctypes.Structure):
    _fields_ = [("len", ctypes.c_int), ("val", ctypes.POINTER(ctypes.c_char))]


class _Statvfs(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_uint64)
        for name in (
            "bsize", "frsize", "blocks", "bfree", "bavail", "files", "ffree", "favail", "fsid", "flag", "namemax",
        )
    ]  # fmt: skip


_SIGNATURES: dict[str, list[object]] = {
    "nfs4_set_client_name": [ctypes.c_char_p],
    "nfs_set_auth": [ctypes.c_void_p], "nfs_set_version": [ctypes.c_int], "nfs_set_timeout": [ctypes.c_int],
    "nfs_set_dircache": [ctypes.c_int], "nfs_set_autoreconnect": [ctypes.c_int],
    "nfs_mount": [ctypes.c_char_p, ctypes.c_char_p], "nfs_umask": [ctypes.c_uint16],
    "nfs_stat64": [ctypes.c_char_p, ctypes.POINTER(_Stat)], "nfs_lstat64": [ctypes.c_char_p, ctypes.POINTER(_Stat)],
    "nfs_fstat64": [ctypes.c_void_p, ctypes.POINTER(_Stat)],
    "nfs_opendir": [ctypes.c_char_p, _pointer], "nfs_closedir": [ctypes.c_void_p],
    "nfs_open2": [ctypes.c_char_p, ctypes.c_int, ctypes.c_int, _pointer],
    "nfs_creat": [ctypes.c_char_p, ctypes.c_int, _pointer],
    "nfs_close": [ctypes.c_void_p],
    "nfs_pread": [ctypes.c_void_p, _u64, _u64, ctypes.c_char_p],
    "nfs_pwrite": [ctypes.c_void_p, _u64, _u64, ctypes.c_char_p],
    "nfs_lockf": [ctypes.c_void_p, ctypes.c_int, _u64],
    "nfs_fsync": [ctypes.c_void_p], "nfs_ftruncate": [ctypes.c_void_p, _u64],
    "nfs_mkdir2": [ctypes.c_char_p, ctypes.c_int], "nfs_rmdir": [ctypes.c_char_p], "nfs_unlink": [ctypes.c_char_p],
    "nfs_mknod": [ctypes.c_char_p, ctypes.c_int, ctypes.c_int],
    "nfs_rename": [ctypes.c_char_p, ctypes.c_char_p], "nfs_link": [ctypes.c_char_p, ctypes.c_char_p],
    "nfs_symlink": [ctypes.c_char_p, ctypes.c_char_p], "nfs_readlink": [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int],
    "nfs_chmod": [ctypes.c_char_p, ctypes.c_int], "nfs_chown": [ctypes.c_char_p, ctypes.c_int, ctypes.c_int],
    "nfs_fchown": [ctypes.c_void_p, ctypes.c_int, ctypes.c_int],
    "nfs_truncate": [ctypes.c_char_p, _u64], "nfs_access": [ctypes.c_char_p, ctypes.c_int],
    "nfs_statvfs64": [ctypes.c_char_p, ctypes.POINTER(_Statvfs)],
}  # fmt: skip


def _load() -> ctypes.CDLL:
    for name in NAMES:
        with contextlib.suppress(OSError):
            lib = ctypes.CDLL(name)
            break
    else:
        raise OSError(f"needs {' or '.join(NAMES)} (scripts/setup --test)")
    for name, arguments in _SIGNATURES.items():
        getattr(lib, name).argtypes = [ctypes.c_void_p, *arguments]
    lib.nfs_init_context.restype = ctypes.c_void_p
    lib.nfs_parse_url_incomplete.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
    lib.nfs_parse_url_incomplete.restype = ctypes.c_void_p
    lib.nfs_destroy_url.argtypes = lib.nfs_destroy_context.argtypes = [ctypes.c_void_p]
    lib.nfs_get_error.argtypes = [ctypes.c_void_p]
    lib.nfs_get_error.restype = ctypes.c_char_p
    lib.nfs_readdir.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    lib.nfs_readdir.restype = ctypes.POINTER(_Dirent)
    lib.nfs_get_fh.argtypes = lib.nfs_get_rootfh.argtypes = [ctypes.c_void_p]
    lib.nfs_get_fh.restype = lib.nfs_get_rootfh.restype = ctypes.POINTER(_Handle)
    lib.libnfs_authunix_create.argtypes = [
        ctypes.c_char_p, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_uint32, ctypes.POINTER(ctypes.c_uint32),
    ]  # fmt: skip
    lib.libnfs_authunix_create.restype = ctypes.c_void_p
    return lib


class Info(NamedTuple):
    """What stat(2) tells over NFS."""

    mode: int
    uid: int
    gid: int
    size: int
    nlink: int
    ino: int
    mtime_ns: int


class File:
    """An open file; read and write at an offset."""

    def __init__(self, client: "Client", handle: ctypes.c_void_p) -> None:
        self._client = client
        self._handle = handle

    def pread(self, count: int = 65536, offset: int = 0) -> bytes:
        buffer = ctypes.create_string_buffer(count)
        got = self._client.call("nfs_pread", self._handle, offset, count, buffer)
        return buffer.raw[:got]

    def pwrite(self, data: bytes, offset: int = 0) -> int:
        return self._client.call("nfs_pwrite", self._handle, offset, len(data), data)

    def fsync(self) -> None:
        self._client.call("nfs_fsync", self._handle)

    def lock(self) -> None:
        """Lock the first byte for writing, by version 4."""
        self._client.call("nfs_lockf", self._handle, 0, 1)  # NFS4_F_LOCK

    def truncate(self, size: int) -> None:
        self._client.call("nfs_ftruncate", self._handle, size)

    def chown(self, uid: int, gid: int) -> None:
        self._client.call("nfs_fchown", self._handle, uid, gid)

    def stat(self) -> Info:
        buffer = _Stat()
        self._client.call("nfs_fstat64", self._handle, ctypes.byref(buffer))
        return _info(buffer)

    @property
    def handle(self) -> bytes:
        """The bytes of the NFS file handle."""
        found = self._client.lib.nfs_get_fh(self._handle).contents
        return ctypes.string_at(found.val, found.len)

    def close(self) -> None:
        self._client.call("nfs_close", self._handle)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class Client:
    """One mounted export, as one caller.

    Args:
        export: its pseudo path.
        version: 3 or 4 (4.0).
        uid, gid, groups: what is sent as AUTH_SYS.
        port: of the server, for NFS and MOUNT alike where `mount_port` is not given; 0 asks rpcbind (v3).
        reconnect: how often to connect again; -1 for ever.

    Raises:
        OSError: with the server's errno; its text is libnfs's.
    """

    def __init__(
        self,
        export: str,
        *,
        version: int,
        port: int,
        uid: int = 0,
        gid: int | None = None,
        groups: Iterable[int] = (),
        mount_port: int | None = None,
        host: str = "127.0.0.1",
        reconnect: int = 0,
        timeout_ms: int = TIMEOUT_MS,
    ) -> None:
        self.lib = _load()
        self._version = version
        self._nfs: int | None = self.lib.nfs_init_context()
        query = f"?version={version}"
        if port:
            query += f"&nfsport={port}&mountport={port if mount_port is None else mount_port}"
        url = self.lib.nfs_parse_url_incomplete(self._nfs, f"nfs://{host}/{query}".encode())
        self.lib.nfs_destroy_url(url)
        self.lib.nfs_set_version(self._nfs, version)
        extra = list(groups)
        array = (ctypes.c_uint32 * len(extra))(*extra)
        auth = self.lib.libnfs_authunix_create(b"test", uid, uid if gid is None else gid, len(extra), array)
        self.lib.nfs_set_auth(self._nfs, auth)
        self.lib.nfs_set_timeout(self._nfs, timeout_ms)
        self.lib.nfs_set_dircache(self._nfs, 0)
        self.lib.nfs_set_autoreconnect(self._nfs, reconnect)
        self.lib.nfs_umask(self._nfs, 0o022)
        # NFSv4 servers refuse one client under two identities.
        self.lib.nfs4_set_client_name(self._nfs, f"test-{os.getpid()}-{next(_clients)}".encode())
        try:
            self.call("nfs_mount", host.encode(), os.fsencode(export))
        except OSError:
            self.close()
            raise

    def call(self, name: str, *arguments: object) -> int:
        done = int(getattr(self.lib, name)(self._nfs, *arguments))
        if done < 0:
            text = (self.lib.nfs_get_error(self._nfs) or b"").decode(errors="replace")
            raise OSError(-done, f"{name}: {text or os.strerror(-done)}")
        return done

    def close(self) -> None:
        if self._nfs is not None:
            self.lib.nfs_destroy_context(self._nfs)
            self._nfs = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # -- by path, from the root of the export ------------------------------------------------------

    def lstat(self, path: str) -> Info:
        buffer = _Stat()
        self.call("nfs_lstat64", os.fsencode(path), ctypes.byref(buffer))
        return _info(buffer)

    def stat(self, path: str) -> Info:
        buffer = _Stat()
        self.call("nfs_stat64", os.fsencode(path), ctypes.byref(buffer))
        return _info(buffer)

    def scandir(self, path: str = "/") -> dict[str, Info]:
        """Name -> attributes as the listing itself gives them, without "." and ".."."""
        directory = ctypes.c_void_p()
        self.call("nfs_opendir", os.fsencode(path), ctypes.byref(directory))
        found = {}
        while entry := self.lib.nfs_readdir(self._nfs, directory):
            e = entry.contents
            mtime = int(e.mtime.sec) * 10**9 + int(e.mtime.usec) * 1000
            found[os.fsdecode(e.name)] = Info(e.mode, e.uid, e.gid, e.size, e.nlink, e.inode, mtime)
        self.lib.nfs_closedir(self._nfs, directory)
        return {name: info for name, info in found.items() if name not in (".", "..")}

    def listdir(self, path: str = "/") -> list[str]:
        return sorted(self.scandir(path))

    def open(self, path: str, flags: int = os.O_RDONLY, mode: int = 0o666) -> File:
        handle = ctypes.c_void_p()
        self.call("nfs_open2", os.fsencode(path), flags, mode, ctypes.byref(handle))
        return File(self, handle)

    def creat(self, path: str, mode: int = 0o666) -> File:
        handle = ctypes.c_void_p()
        self.call("nfs_creat", os.fsencode(path), mode, ctypes.byref(handle))
        return File(self, handle)

    def read(self, path: str) -> bytes:
        with self.open(path) as file:
            return file.pread()

    def write(self, path: str, data: bytes, flags: int = os.O_CREAT | os.O_TRUNC, mode: int = 0o666) -> None:
        with self.open(path, os.O_WRONLY | flags, mode) as file:
            file.pwrite(data)

    def mkdir(self, path: str, mode: int = 0o777) -> None:
        self.call("nfs_mkdir2", os.fsencode(path), mode)

    def mkfifo(self, path: str, mode: int = 0o666) -> None:
        self.call("nfs_mknod", os.fsencode(path), stat.S_IFIFO | mode, 0)

    def rmdir(self, path: str) -> None:
        self.call("nfs_rmdir", os.fsencode(path))

    def unlink(self, path: str) -> None:
        self.call("nfs_unlink", os.fsencode(path))

    def rename(self, old: str, new: str) -> None:
        self.call("nfs_rename", os.fsencode(old), os.fsencode(new))

    def link(self, old: str, new: str) -> None:
        self.call("nfs_link", os.fsencode(old), os.fsencode(new))

    def symlink(self, target: str, path: str) -> None:
        self.call("nfs_symlink", os.fsencode(target), os.fsencode(path))

    def readlink(self, path: str) -> str:
        buffer = ctypes.create_string_buffer(4096)
        self.call("nfs_readlink", os.fsencode(path), buffer, len(buffer))
        return os.fsdecode(buffer.value)

    def chmod(self, path: str, mode: int) -> None:
        self.call("nfs_chmod", os.fsencode(path), mode)

    def chown(self, path: str, uid: int, gid: int) -> None:
        """By version 4, a file alone, which is opened for writing as libnfs 13 does by itself.

        libnfs 14 changes the owner of the directory that it is in.
        """
        if self._version == 3:
            self.call("nfs_chown", os.fsencode(path), uid, gid)
        else:
            with self.open(path, os.O_WRONLY) as file:
                file.chown(uid, gid)

    def truncate(self, path: str, size: int) -> None:
        self.call("nfs_truncate", os.fsencode(path), size)

    def access(self, path: str, mode: int) -> bool:
        try:
            self.call("nfs_access", os.fsencode(path), mode)
        except OSError as exc:
            if exc.errno == errno.EACCES:
                return False
            raise
        return True

    def statvfs(self, path: str = "/") -> tuple[int, int]:
        """(blocks, bytes in a block)."""
        buffer = _Statvfs()
        self.call("nfs_statvfs64", os.fsencode(path), ctypes.byref(buffer))
        return int(buffer.blocks), int(buffer.frsize)

    @property
    def root_handle(self) -> bytes:
        """The bytes of the file handle of the export's root."""
        found = self.lib.nfs_get_rootfh(self._nfs).contents
        return ctypes.string_at(found.val, found.len)


def _info(s: _Stat) -> Info:
    return Info(s.mode, s.uid, s.gid, s.size, s.nlink, s.ino, s.mtime * 10**9 + s.mtime_nsec)
