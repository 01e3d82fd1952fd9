"""What pyfuse3 does not offer: who reads a directory, entries without a nodeid, and which times are to be the present.

With the patches in contrib/pyfuse3, pyfuse3 offers the former two, as `ReaddirToken.ctx` and `EntryAttributes.nodeid`.
Where these exist, they are used. Otherwise, both are found in the memory of pyfuse3's objects, right after what every
object of CPython begins with: libfuse's request in a `ReaddirToken`, and the nodeid in an `EntryAttributes`. This is
true of pyfuse3 3.4.0 to 3.5.0. It is checked before anything is mounted (`check`) and, for the request, by the first
listing (`SelfProbe.check`).

In a SETATTR, the kernel says whether a time is one that the caller chose, or the present, for which it sends a time as
well. pyfuse3 gives that time to the handler, but stores the flags in an object (`_Container`) that only its own
coroutine knows.
"""

import ctypes
import gc
from collections.abc import Callable
from operator import attrgetter
from typing import Any, Protocol, cast

import pyfuse3
import trio
from pyfuse3 import EntryAttributes, FileHandleT, FileInfo, InodeT, ReaddirToken, RequestContext

from .. import linux
from .attach import MountError
from .loop import working

_WHERE = object.__basicsize__
_TOKEN_SIZE = _WHERE + 3 * ctypes.sizeof(ctypes.c_void_p) + ctypes.sizeof(ctypes.c_size_t)
_UNUSUAL = InodeT(0x123456789A)  # no other field of an entry has such a value


class _FuseContext(ctypes.Structure):
    _fields_ = (
        ("uid", ctypes.c_uint),
        ("gid", ctypes.c_uint),
        ("pid", ctypes.c_int),
        ("umask", ctypes.c_uint),
    )


_libfuse = ctypes.CDLL(pyfuse3.__file__)  # and with it the libfuse that it uses
_libfuse.fuse_req_ctx.restype = ctypes.POINTER(_FuseContext)
_libfuse.fuse_req_ctx.argtypes = (ctypes.c_void_p,)


def _from_request(token: ReaddirToken) -> RequestContext:
    request = ctypes.c_void_p.from_address(id(token) + _WHERE)
    return _libfuse.fuse_req_ctx(request).contents  # type: ignore[no-any-return]


requester: Callable[[ReaddirToken], RequestContext] = (
    attrgetter("ctx") if hasattr(ReaddirToken, "ctx") else _from_request
)
"""Returns who reads a directory: one that a user opened and another user inherited must be filtered for the latter."""


keeps_listings = hasattr(FileInfo, "cache_readdir")
"""Whether the kernel can be told to cache the entries of a directory (only with the patch)."""


class FileLock(Protocol):
    """A lock of fcntl(2): `pyfuse3.FileLock` of the patched pyfuse3.

    Attributes:
        type: F_RDLCK, F_WRLCK or F_UNLCK.
        start: the first byte.
        len: the number of bytes; 0 for all up to the end, wherever that will be.
        pid: the process that has the lock, or wants it.
    """

    type: int
    start: int
    len: int
    pid: int


class LockWait(Protocol):
    """What a request that waits for a lock has: `pyfuse3.LockWait` of the patched pyfuse3."""

    def on_interrupt(self, callback: Callable[[], object]) -> None:
        """Have this called once the waiting process is interrupted; at once, if it has been."""


offers_locks = hasattr(pyfuse3, "FileLock")
"""Whether the daemon can have locks for its clients on the real files (only with the patch)."""


offers_noflush = hasattr(FileInfo, "noflush") and linux.kernel_version() >= (5, 16)  # FOPEN_NOFLUSH
"""Whether an OPEN can be answered so that no FLUSH follows (only with the patch, but for its earlier versions)."""


def without_flush(opened: FileInfo) -> FileInfo:
    """Return the answer to an OPEN after which the kernel sends no FLUSH, if pyfuse3 is patched."""
    if offers_noflush:
        cast(Any, opened).noflush = True
    return opened


_pyfuse3: Any = pyfuse3  # only a patched one has these
_offers_backing = hasattr(pyfuse3, "open_backing")


def passes_through() -> bool:
    """Whether the kernel can read and write files by itself; known once it has connected."""
    return _offers_backing and bool(_pyfuse3.offers_passthrough())


def why_no_passthrough() -> str:
    """Return in words why `passes_through` says no."""
    return "the kernel does not offer it (Linux 6.9)" if _offers_backing else "the released pyfuse3 does not offer it"


def open_backing(fd: int) -> int:
    """Hand a file to the kernel, to be read and written by itself; return the id for `with_backing`.

    Raises:
        OSError: ELOOP: its file system is stacked on another one; EPERM: no CAP_SYS_ADMIN.
    """
    return int(_pyfuse3.open_backing(fd))


def close_backing(backing: int) -> None:
    """Take the id back, with which no more files are opened."""
    _pyfuse3.close_backing(backing)


def with_backing(opened: FileInfo, backing: int) -> FileInfo:
    """Return the answer to an OPEN or CREATE after which the kernel reads and writes the file by itself."""
    cast(Any, opened).backing_id = backing
    opened.keep_cache = False
    return opened


def opened(fh: int, *, keep_cache: bool) -> FileHandleT:
    """Return the answer to an OPENDIR after which the kernel caches the entries, and uses those that it has."""
    info: Any = FileInfo(fh=FileHandleT(fh), keep_cache=keep_cache)
    info.cache_readdir = True
    return cast(FileHandleT, info)  # which the patch allows


def _nodeid_of(entry: object) -> ctypes.c_uint64:
    return ctypes.c_uint64.from_address(id(entry) + _WHERE)


_offers_nodeid = hasattr(EntryAttributes, "nodeid")
_name_only = EntryAttributes()
_entry: Any = _name_only  # only a patched one has a `nodeid`, and to wrap each number of a listing would cost calls
_nodeid = _nodeid_of(_entry)


UNKNOWN_INODE = 0xFFFFFFFF
"""The inode number of an entry that has none (FUSE_UNKNOWN_INO in lib/fuse.c of libfuse)."""


def name_only(ino: int, kind: int) -> EntryAttributes:
    """Return an entry with this inode number and type (DT_…), valid until the next call.

    It has no nodeid, so that the kernel takes nothing but the name, and holds no reference (fs/fuse/readdir.c).
    """
    _entry.st_ino = ino
    _entry.st_mode = kind << 12
    if _offers_nodeid:
        _entry.nodeid = 0
    else:
        _nodeid.value = 0
    return _name_only


def is_name_only(entry: EntryAttributes) -> bool:
    """Whether this is what `name_only` has returned."""
    return entry is _name_only


# fuse_set_attr of struct fuse_lowlevel_ops: FUSE_SET_ATTR_ATIME_NOW and FUSE_SET_ATTR_MTIME_NOW.
_ATIME_NOW, _MTIME_NOW = 1 << 7, 1 << 8

_Container: Any = getattr(pyfuse3, "_Container", None)
_CONTAINER_WORDS = 0 if _Container is None else (_Container.__basicsize__ - _WHERE) // ctypes.sizeof(ctypes.c_uint64)
_FLAGS_AFTER_INODE = 3  # words: after the inode come the parent and the request


async def to_the_present(inode: InodeT) -> tuple[bool, bool]:
    """Return whether atime, and mtime, are to become the present; to be awaited by the handler of a SETATTR.

    Where that cannot be found out (in pyfuse3's own loop), the answer is no, for which the caller needs more rights.

    Args:
        inode: what the SETATTR is about.
    """
    await trio.lowlevel.cancel_shielded_checkpoint()  # a coroutine says what it awaits only once that has yielded
    container = _container_of(working.session)
    flags = 0 if container is None else _flags_in(container, inode)
    return bool(flags & _ATIME_NOW), bool(flags & _MTIME_NOW)


def _container_of(coroutine: object) -> object | None:
    """Return the object in which a coroutine of pyfuse3, or one that it awaits, holds the flags of a request."""
    for known in gc.get_referents(coroutine):
        if type(known) is _Container:
            return cast(object, known)
        if type(known).__module__.startswith(("pyfuse3", "_cython_")):  # its coroutines, and their variables
            container = _container_of(known)
            if container is not None:
                return container
    return None


def _flags_in(container: object, inode: InodeT) -> int:
    """Return the flags of a SETATTR. In the container, zeros come before the inode, and the flags after it."""
    words = (ctypes.c_uint64 * _CONTAINER_WORDS).from_address(id(container) + _WHERE)
    at = next((at for at, word in enumerate(words) if word), 0)
    if words[at] != inode or at + _FLAGS_AFTER_INODE >= _CONTAINER_WORDS:
        return 0
    return ctypes.c_int.from_buffer(words, (at + _FLAGS_AFTER_INODE) * ctypes.sizeof(ctypes.c_uint64)).value


def unsupported(problem: str) -> MountError:
    """Return the message for the user if this version of pyfuse3 is none of those that cloakfs can use."""
    return MountError(
        f"pyfuse3 {pyfuse3.__version__} ({pyfuse3.__file__}): {problem}, because its objects are laid out differently "
        "from the versions that cloakfs knows; install one of these (pip install 'pyfuse3>=3.4,<3.6')"
    )


def check(
    token_type: type = ReaddirToken, entry_type: type = EntryAttributes, container_type: type | None = _Container
) -> None:
    """Check, before anything is mounted, that what is needed is in the expected place.

    Raises:
        MountError: it is not.
    """
    if not hasattr(token_type, "ctx") and token_type.__basicsize__ != _TOKEN_SIZE:
        raise unsupported("the caller of a listing could not be found out")
    if not hasattr(entry_type, "nodeid"):
        entry = entry_type()
        entry.st_ino = _UNUSUAL
        if entry_type.__basicsize__ < _WHERE + ctypes.sizeof(ctypes.c_uint64) or _nodeid_of(entry).value != _UNUSUAL:
            raise unsupported("a listing could not leave out nodeids")
    if container_type is None:
        raise unsupported("times that are set to the present would be taken for times of the caller's choice")
