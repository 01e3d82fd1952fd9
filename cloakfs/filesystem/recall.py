"""Has the kernel's NFS server recall delegations of files that have changed behind the mount.

A client that holds an NFSv4 delegation of a file serves it from its own cache (RFC 7530 §10.4). The server recalls the
delegation before the file changes, as far as changes are made through the mount: a delegation is a lease on the inode
(fs/locks.c), which an open for writing breaks before it reaches the daemon. Changes behind the mount are unknown to the
kernel. So the daemon itself makes such an open, and refuses it if it arrives.

The server would recall a delegation before the file changes; the daemon can do so only afterwards. A client that gets
the new change attribute (RFC 8881 §5.8.1.4: here, the ctime) while it still holds the delegation, for example when it
returns it, keeps the old content (Linux: nfs_update_inode), and takes it for the new one from then on. So the ctime in
answers moves on, by a nanosecond each time, as long as a delegation has not been returned, and once after that.

With a delegation for writing (Linux 6.6 and later), a client locks the file without telling the server, so that its
locks would exclude nobody on the real tree or in another mount. To recall it when somebody else locks would be too
late. The server grants none while anybody else has the file open for writing (`nfsd4_check_conflicting_opens`), so the
daemon has it open, too, through its own mount, for as long as the server has.

On a file system that reports no changes, a delegation for reading would never be recalled: two clients of two servers
of one CephFS would each go on with its own pages, even under a lock. So the daemon keeps those away, too.
"""

import contextlib
import errno
import logging
import os
import struct
from collections.abc import Callable, Collection
from functools import partial

import trio

from .. import linux
from ..background.tasks import Tasks
from ..linux import ownfiles
from ..tree.nodes import Nodes
from ..tree.objects import Object
from .handles import OpenFiles
from .selfprobe import SelfProbe

log = logging.getLogger(__name__)

_INTERVAL_SECONDS = 0.1
"""How long to wait before the next files: some change all the time.

After a recall, knfsd grants no new delegation of the file for at least half a minute."""

_MOST_OPENING = 8
"""How many threads open files to prevent delegations, each for as long as the daemon takes to answer some requests."""

_QUICK_SECONDS = 3.0
_SLOW_INTERVAL_SECONDS = 1.0
"""How long to wait between attempts when delegations have not been returned for longer: the client may be gone."""

# The type, the upper and the lower half of the nodeid, and the generation (fs/fuse/inode.c: fuse_encode_fh).
_FUSE_HANDLE = struct.Struct("=iIII")
_FILEID_FUSE_WITHOUT_PARENT = 0x81

OWN = (1 << 64) - 1
"""The file handle (`fh`) of whatever the daemon itself has open in its own mount, for writing."""


def handle_of(nodeid: int, generation: int) -> bytes:
    """Return the file handle that the kernel gives an object, as `linux.name_to_handle` does."""
    return _FUSE_HANDLE.pack(_FILEID_FUSE_WITHOUT_PARENT, nodeid >> 32, nodeid & 0xFFFFFFFF, generation)


class Recalls:
    """Recalls delegations of files.

    Only a file that is open in the mount can have one, since the server keeps it open as long as there is a delegation.

    Args:
        nodes: the objects.
        files: knows which of them are open.
        probe: makes requests to the daemon's own mount.
        invalidate_attributes: has the kernel drop the attributes of an object from its cache.
    """

    def __init__(
        self, nodes: Nodes, files: OpenFiles, probe: SelfProbe, invalidate_attributes: Callable[[Object], None]
    ) -> None:
        self._nodes = nodes
        self._files = files
        self._probe = probe
        self._invalidate_attributes = invalidate_attributes
        self._recalled: dict[Object, float] = {}  # what was not returned at the last attempt, and since when
        self._wanted: dict[Object, None] = {}
        self._in_progress: set[Object] = set()
        self._is_wanted = trio.Event()
        self._has_failed = False
        self._opening: set[int] = set()  # threads that open a file to keep it open
        self._warned = {errno.ETXTBSY}  # of which errors not to warn (again): nobody writes to a running program
        self._limiter = trio.CapacityLimiter(_MOST_OPENING)
        self.own: dict[int, int] = {}  # by descriptor of a client's open file: that of the daemon's own

    def changed(self, obj: Object | None) -> None:
        """Have delegations of an object recalled soon; with None, those of all objects."""
        if obj is None:
            self._wanted.update((file.obj, None) for file in self._files.by_fd.values() if not file.is_directory)
        elif obj.open_files:
            self._wanted[obj] = None
        if self._wanted:
            self._is_wanted.set()

    async def run(self) -> None:
        """Recall delegations of what has changed, for ever."""
        while True:
            if not self._recalled:
                await self._is_wanted.wait()
            wanted, self._wanted = self._wanted, {}
            self._is_wanted = trio.Event()
            objects = {handle: obj for obj in (*self._recalled, *wanted) for handle in self._handles(obj)}
            self._in_progress = set(objects.values())
            try:
                delegated = await trio.to_thread.run_sync(self._recall, objects, abandon_on_cancel=True)
            except OSError as exc:
                self._cannot(exc)
                delegated = set()
            self._note({objects[handle] for handle in delegated})
            self._in_progress = set()
            with trio.move_on_after(self._interval()):
                await trio.sleep(_INTERVAL_SECONDS)
                await self._is_wanted.wait()

    async def are_returned(self, obj: Object) -> bool:
        """Whether no client has a delegation of a file that it should have returned, since the file has changed."""
        if obj not in self._wanted and obj not in self._in_progress and obj not in self._recalled:
            return True
        try:
            return not await trio.to_thread.run_sync(self._recall, self._handles(obj), abandon_on_cancel=True)
        except OSError as exc:
            self._cannot(exc)
            return True

    def _recall(self, handles: Collection[bytes]) -> set[bytes]:
        """In a thread: have the kernel recall leases on files of the daemon's own mount.

        Opening a file for writing does so (fcntl(2), F_SETLEASE). Where there is no lease, the open gets as far as the
        daemon, which refuses it (`refuses`). So nothing changes, and nothing is waited for but answers of the daemon.

        Args:
            handles: file handles of the files (`linux.name_to_handle`), of which those that the kernel knows count.

        Returns:
            those of files on which there are leases that have not been given back yet.

        Raises:
            OSError: EROFS: the kernel cannot be made to; or the mount does not answer.
        """
        found = set()
        with self._probe.marked(), contextlib.ExitStack() as stack:  # descriptors would keep the session from ending
            top = self._probe.mountpoint
            if ownfiles.statvfs(top).f_flag & os.ST_RDONLY:
                with ownfiles.raised(linux.CAP_SYS_ADMIN):
                    copy = linux.clone_writable(top)
                stack.callback(os.close, copy)
                top = f"/proc/self/fd/{copy}"
            directory = ownfiles.open_fd(top, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            stack.callback(os.close, directory)
            for handle in handles:
                if _has_lease(directory, handle):
                    found.add(handle)
        return found

    def refuses(self, pid: int, flags: int) -> bool:
        """Whether an open(2) by this thread with these flags was made to recall a delegation."""
        return flags & os.O_ACCMODE != os.O_RDONLY and pid in self._probe.threads

    async def prevent(self, fh: int, nodeid: int, generation: int) -> None:
        """See that the server grants no delegation of a file from now on, until it closes what it has open as `fh`.

        Raises:
            OSError: ETIMEDOUT, of which the server makes NFS4ERR_DELAY: a client has another delegation of it still.
        """
        handle = handle_of(nodeid, generation)
        try:
            own = await trio.to_thread.run_sync(
                self._open_for_writing, handle, abandon_on_cancel=True, limiter=self._limiter
            )
        except BlockingIOError:
            raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT)) from None
        except OSError as exc:
            self.cannot_prevent(exc.errno or 0, exc.strerror or str(exc))
        else:
            self.own[fh] = own

    def cannot_prevent(self, code: int, why: str) -> None:
        """Warn that the server may grant delegations; once for each code."""
        if code not in self._warned:
            self._warned.add(code)
            log.warning(
                "delegations cannot be prevented (%s), so that locks of NFSv4 clients may exclude nobody else, and "
                "they may go on with old content: turn delegations off (sysctl fs.leases-enable=0)",
                why,
            )

    def _open_for_writing(self, handle: bytes) -> int:
        """In a thread: open a file of the daemon's own mount for writing.

        It is opened in a detached copy of the mount, so that nobody who unmounts that finds it busy.

        Raises:
            OSError: EWOULDBLOCK: there is a delegation already, which is now recalled; or it cannot be opened.
        """
        with self._probe.marked() as me, contextlib.ExitStack() as stack:
            with ownfiles.raised(linux.CAP_SYS_ADMIN):
                copy = linux.clone_writable(self._probe.mountpoint)
            stack.callback(os.close, copy)
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
            directory = ownfiles.open_fd(f"/proc/self/fd/{copy}", flags)
            stack.callback(os.close, directory)
            self._opening.add(me)
            stack.callback(self._opening.discard, me)
            return ownfiles.open_by_handle(directory, handle, os.O_WRONLY | os.O_NONBLOCK)

    def is_own(self, pid: int) -> bool:
        """Whether an open(2) by this thread is one by which the daemon prevents a delegation."""
        return pid in self._opening

    def closed(self, fh: int, tasks: Tasks) -> None:
        """Close what the daemon has open because of `fh`."""
        if (fd := self.own.pop(fh, -1)) >= 0:
            close = partial(trio.to_thread.run_sync, abandon_on_cancel=True)
            tasks.once("closing a file of the own mount", close, os.close, fd)

    def _note(self, delegated: Collection[Object]) -> None:
        """Note of which objects there are delegations that have been recalled, and are not returned yet."""
        before, now = self._recalled, trio.current_time()
        self._recalled = {obj: before.get(obj, now) for obj in delegated}
        for obj in {**before, **self._recalled}:
            obj.rarely().ctime_ahead += 1
            self._invalidate_attributes(obj)
        if self._recalled:
            log.debug("delegations of %d files that have changed are not returned yet", len(self._recalled))

    def _interval(self) -> float:
        quick_since = trio.current_time() - _QUICK_SECONDS
        if not self._recalled or any(since > quick_since for since in self._recalled.values()):
            return _INTERVAL_SECONDS
        return _SLOW_INTERVAL_SECONDS

    def _cannot(self, exc: OSError) -> None:
        if not self._has_failed:
            self._has_failed = True
            log.warning(
                "delegations cannot be recalled (%s), so that NFSv4 clients may go on with old content: turn "
                "delegations off (sysctl fs.leases-enable=0), or mount anew while they are on",
                exc.strerror,
            )

    def _handles(self, obj: Object) -> set[bytes]:
        """Return the handles of an object in the views in which it is open."""
        opened = (self._files.by_fd[fd] for fd in obj.open_files)
        nodeids = {self._nodes.nodeid(file.number, obj) for file in opened if not file.is_directory}
        return {handle_of(nodeid, self._nodes.generation(nodeid, obj)) for nodeid in nodeids}


def _has_lease(top: int, handle: bytes) -> bool:
    try:
        fd = ownfiles.open_by_handle(top, handle, os.O_WRONLY | os.O_NONBLOCK)
    except BlockingIOError:
        return True
    except OSError as exc:
        if exc.errno == errno.EROFS:
            raise
        return False  # EPERM of `Recalls.refuses`, or ESTALE: the kernel has forgotten the file
    os.close(fd)
    return False
