"""What others change on the real tree, behind the mount, as the kernel reports it for whole file systems (fanotify(7)).

Each event is about one object (`Event.target`) and, mostly, one name (`Event.directory`, `Event.name`). These arrive on
ext4, xfs, btrfs, tmpfs and overlayfs with nfs_export=on; "target" alone means that directory and name are not reported:

    what a process did                       events
    chmod, chown, setfacl, setxattr, utimes  ATTRIB: directory, name, target
    the same of a directory                  ATTRIB|ONDIR: itself, ".", itself; also of the root of an export
    only mtime (touch -m)                    MODIFY instead of ATTRIB, for directories too
    only atime (touch -a, reading)           none
    write, truncate, fallocate, reflink      MODIFY: directory, name, target; of O_WRONLY also CLOSE_WRITE
    write through mmap                       none, until the mapping is gone and the file closed: CLOSE_WRITE
    create, mkdir, mknod, symlink            CREATE: directory, name, target
    link                                     ATTRIB: target; then CREATE: directory, new name, target
    unlink                                   ATTRIB: target; then DELETE: directory, name, target
    rmdir                                    DELETE|ONDIR: directory, name, target
    rename, within or between directories    MOVED_FROM, then MOVED_TO: directory, name, target each
    ... over a file                          the two, then ATTRIB: target is what was replaced (there is no DELETE)
    ... over an empty directory              the two, then ATTRIB|ONDIR: what was replaced, ".", itself
    ... of a directory                       the two, with ONDIR; nothing about what is in it
    ... RENAME_EXCHANGE                      the two for each of the two objects
    anything, by another hard link           directory and name are those that were used; the target is the same
    write, chmod by a handle (NFS servers)   directory and name if the kernel's cache has them, or else target alone
    write to a deleted file, or O_TMPFILE    as write; the name is the old one, or one that never existed ("#123")
    subvolume, snapshot: create, delete      as mkdir and rmdir; nothing about what is in it

So the target's attributes have to be assumed changed in any case; with CREATE, DELETE, MOVED_FROM and MOVED_TO, the
name and the directory's own attributes as well; with MODIFY and CLOSE_WRITE, the content. The name is the one at the
time of the change, and need not lead to the target any more.

Events of one process about one name and one target are merged until they are read (CREATE|MODIFY|DELETE), and the
merged event stays in the first one's place, so their order cannot be relied on. Not reported at all: mount(8) on top of
something, what other machines do to a shared file system, and ioctls that bypass the kernel's usual way of changing
files.

Before Linux 5.17 the target is missing from CREATE, DELETE, MOVED_FROM and MOVED_TO. On overlayfs, older kernels (6.1)
leave it out of DELETE, too.
"""

import contextlib
import os
import select
import time
from collections.abc import AsyncGenerator, Callable

import trio

from ..linux import fanotify, mountinfo, ownfiles
from ..linux.fanotify import Event
from .marks import FilesystemMarks

# How many bytes of events are handled in one step, for which all requests wait: some 200 events, in 3 ms.
_BATCH = 16384
_LARGEST = 1024  # more than the size of any event

# The daemon is woken only if nothing was read for this many seconds: its own changes would wake it as well, and
# requests read what is reported, too.
_PAUSE = 0.004

# How often to check for changed mounts that woke no task.
_MOUNTS_SECONDS = 1.0


class Watch:
    """A queue of what other processes change on the file systems that were added.

    It holds as many events as fs.fanotify.max_queued_events says (16384 events, some MB). Further ones are lost, and
    one event says so: its mask is FAN_Q_OVERFLOW, and the rest of it is empty. Changes by this process itself, in any
    thread, take up room until they are read, but are delivered only if `own` is set. Otherwise `on_own` is called with
    those of them that are about a directory itself.

    An event is in the queue before the system call that it is about returns. So while there is nothing to be read,
    everything is as it was when the queue was last read (`is_silent`).

    Raises:
        OSError: no fanotify, or too old a kernel (EINVAL before Linux 5.9), no CAP_SYS_ADMIN (EPERM), or more groups
            than fs.fanotify.max_user_groups (EMFILE).
    """

    is_interrupted = False

    def __init__(self, *, own: bool = False) -> None:
        self._own = -1 if own else os.getpid()
        self.on_own: Callable[[Event], None] | None = None
        self._more = False
        self._rest_until = 0.0
        self._marks = FilesystemMarks()
        self._queue = select.poll()
        self._queue.register(self._marks.fd, select.POLLIN)

    def add(self, fd: int) -> int:
        """Watch the whole file system that `fd` (O_PATH suffices) is on (`FilesystemMarks.add`)."""
        return self._marks.add(fd)

    async def changes(self) -> list[Event]:
        """Return what others changed since the last call; wait until there is something."""
        while True:
            while not self._more and (rest := self._rest_until - time.monotonic()) > 0:
                await trio.sleep(rest)
            await trio.lowlevel.wait_readable(self._marks.fd)
            events = self.read()
            if events:
                return events

    def read(self) -> list[Event]:
        """Return what others changed since the last call, without waiting: at most about 200 events, perhaps none."""
        self._rest_until = time.monotonic() + _PAUSE
        try:
            raw = fanotify.read(self._marks.fd, _BATCH)
        except BlockingIOError:
            self._more = False
            return []
        self._more = len(raw) > _BATCH - _LARGEST
        events = []
        for event in fanotify.parse(raw, self._own):
            if not event.own:
                events.append(event)
            elif self.on_own is not None:
                self.on_own(event)
        return events

    def is_silent(self) -> bool:
        """Whether there is nothing to be read."""
        return not self._queue.poll(0)

    def has_read_all(self) -> bool:
        """Whether the last `read` returned everything that had been reported by then.

        read(2) goes on until the queue is empty, unless the buffer has no room for another event.
        """
        return not self._more

    async def next_step(self) -> bool:
        """Let others go on, before more is read; return whether there is anything to be read by then."""
        await trio.lowlevel.checkpoint()
        return True

    def close(self) -> None:
        """Stop watching; no task may be waiting in `changes`."""
        self._marks.close()


async def mounts_changed() -> AsyncGenerator[None, None]:
    """Yield each time something was mounted or unmounted anywhere, for ever (proc_pid_mounts(5)), and once at first.

    The kernel reports a change once to each open file, to the first task that polls it: trio's epoll does so twice
    before it wakes a task, and a change that came while no task waited would be lost. So that file only wakes the task,
    and another one says whether there was a change; that one is also polled every now and then.
    """
    with (
        contextlib.closing(mountinfo.MountTableChanges()) as changes,
        ownfiles.open(mountinfo.TABLE, "rb") as table,
        select.epoll() as poll,
    ):
        poll.register(table, select.EPOLLPRI)
        yield
        while True:
            while not changes.seen():
                with trio.move_on_after(_MOUNTS_SECONDS):
                    await trio.lowlevel.wait_readable(poll.fileno())
                poll.poll(0)
            yield
