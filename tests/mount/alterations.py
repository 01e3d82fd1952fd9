"""How daemons and commands are altered by the tests in this folder (`tests.altered`).

This imports as little as it can: a daemon that is altered imports it, too.
"""

import errno
import importlib
import json
import logging
import math
import os
import resource
import select
import signal
import struct
import threading
import time
from collections.abc import Callable, Collection, Set
from functools import partial
from types import SimpleNamespace
from typing import Any, NoReturn, Self

import pyfuse3
import trio

from cloakfs import linux
from cloakfs.accounts import groups
from cloakfs.background.systemd import Supervisor
from cloakfs.cloak import CloakDef, CloakList, Condition
from cloakfs.filesystem import attributes, core, directories
from cloakfs.filesystem.locks import LockOperations
from cloakfs.filesystem.operation import operation
from cloakfs.fuse import compatibility, loop
from cloakfs.kernelcache import changes, invalidation, notifier, timeouts
from cloakfs.kernelcache.watch import Watch
from cloakfs.linux import dirtypages, fanotify, ownfiles, process
from cloakfs.mapping import RangeDef
from cloakfs.mount import control, daemon, reaper, reload
from cloakfs.state import client, persistent, runtime
from cloakfs.tree import calls, filesystems, index, locate
from cloakfs.tree.treewalk import FoundName, TreeWalk
from cloakfs.view import View
from tests.altered import replace
from tests.waiting import let_expire, wait_in_loop, wait_until


def _wait_for(path: str) -> None:
    wait_until(lambda: os.path.exists(path), math.inf)


def _append(path: str, text: str) -> None:
    with open(path, "a", encoding="utf-8") as file:
        print(text, file=file)


def limit_descriptors(most: int) -> None:
    """Limit the descriptors of the process (RLIMIT_NOFILE)."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


# -- where things are ------------------------------------------------------------------------------


def keep_state_in(path: str) -> None:
    for module in (runtime, reaper, persistent, daemon):
        replace(module, "STATE_DIR", path)


def log_to_syslog_at(path: str) -> None:
    replace(importlib.import_module("cloakfs_cli.background"), "SYSLOG_SOCKET", path)


# -- what is noted ---------------------------------------------------------------------------------


def note_xattrs_read(path: str) -> None:
    """Append to a file the name of each extended attribute that is read for a client."""

    def noting(read: Callable[..., Any], who: linux.Credentials, fd: int, name: bytes | str) -> Any:
        if isinstance(name, bytes):  # not what the daemon reads on its own behalf
            _append(path, os.fsdecode(name))
        return read(who, fd, name)

    for name in ("peek_xattr", "getxattr"):
        replace(calls, name, partial(noting, getattr(calls, name)))


def note_xattrs_listed(path: str) -> None:
    """Append to a file a line for each time that the extended attributes of a file are listed for a client."""
    listxattr = calls.listxattr

    def noted(who: linux.Credentials, fd: int) -> Any:
        _append(path, "list")
        return listxattr(who, fd)

    replace(calls, "listxattr", noted)


def count_places(path: str) -> None:
    """Append to a file, for each batch of events, how many there were and how many objects were looked for."""
    place_of, handle_events = locate.Locator.place_of, changes.Changes._handle_events
    searched: list[int] = []

    def counted(*args: Any) -> Any:
        searched.append(1)
        return place_of(*args)

    def handle(self: changes.Changes, events: list[fanotify.Event]) -> None:
        searched.clear()
        handle_events(self, events)
        _append(path, f"{len(events)} {len(searched)}")

    replace(locate.Locator, "place_of", counted)
    replace(changes.Changes, "_handle_events", handle)


def count_checks(path: str) -> None:
    """Append to a file, for each name that may be cached, how many directories were checked."""
    may: Callable[..., bool] = vars(timeouts)["world_may"]
    of_name = timeouts.Timeouts.of_name
    looks: list[int] = []

    def look(*args: Any) -> bool:
        looks.append(1)
        return may(*args)

    def counted(*args: Any) -> Any:
        looks.clear()
        answer = of_name(*args)
        _append(path, str(len(looks)))
        return answer

    replace(timeouts, "world_may", look)
    replace(timeouts.Timeouts, "of_name", counted)


def log_names_invalidated() -> None:
    invalidate_entry = pyfuse3.invalidate_entry

    def noted(parent: pyfuse3.InodeT, name: bytes, *args: Any) -> None:
        logging.getLogger("cloakfs").warning("NAME %s", name.decode())
        invalidate_entry(parent, name, *args)

    replace(pyfuse3, "invalidate_entry", noted)


def log_waiting_threads() -> None:
    """Log when the threads that invalidate names have waited for a lock for so long that another begins."""
    start_more = notifier.Notifier._start_more

    def noted(self: notifier.Notifier) -> None:
        before = self._threads
        start_more(self)
        if 0 < before < self._threads:
            logging.getLogger("cloakfs").warning("A THREAD WAITS")

    replace(notifier.Notifier, "_start_more", noted)


def report_when_traced(pipe: int) -> None:
    """Close a pipe once the daemon keeps records for the command."""
    query = client.Conversation.query

    def queried(self: client.Conversation, request: dict[str, Any]) -> Any:
        answer = query(self, request)
        if request.get("method") == "trace":
            os.close(pipe)
        return answer

    replace(client.Conversation, "query", queried)


class _Measured(trio.abc.Instrument):
    """Measures the longest turn of the loop, in seconds of its processor time, and counts the definitions made."""

    def __init__(self, path: str) -> None:
        self.longest, self.made, self._began = 0.0, 0, time.thread_time()
        self._path = path

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self._began = time.thread_time()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        self.longest = max(self.longest, time.thread_time() - self._began)
        if task.name == "reloading":
            with open(self._path, "w", encoding="ascii") as file:
                print(self.longest, self.made, file=file)


def measure_reloads(path: str) -> None:
    """Write to a file, after each reload, what `_Measured` has found since the daemon was ready."""
    measured = _Measured(path)
    keep = reload.Reloader.run

    def counted(check: Callable[[Any], None]) -> Callable[[Any], None]:
        def count(definition: Any) -> None:
            measured.made += 1
            check(definition)

        return count

    async def keep_reloading(self: reload.Reloader) -> None:
        trio.lowlevel.add_instrument(measured)
        await trio.sleep(0)
        measured.longest, measured.made = 0.0, 0
        await keep(self)

    for kind in (RangeDef, CloakDef):
        replace(kind, "__post_init__", counted(kind.__post_init__))
    replace(reload.Reloader, "run", keep_reloading)


class _Looked(trio.abc.Instrument):
    """Counts how many views were looked at in one turn of the loop, at most."""

    def __init__(self, path: str) -> None:
        self.looked = self._longest = 0
        self._path = path

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.looked = 0

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        if self.looked > self._longest:
            self._longest = self.looked
            with open(self._path, "w", encoding="ascii") as file:
                print(self._longest, file=file)


def count_flushes(path: str) -> None:
    """Append a line to a file for each FLUSH."""
    needs = LockOperations.needs_flush

    def counted(self: LockOperations, *args: Any) -> bool:
        linux.act_as_daemon()
        _append(path, "flush")
        return needs(self, *args)

    replace(LockOperations, "needs_flush", counted)


def count_views_checked(path: str) -> None:
    """Write to a file how many views were looked at in one turn of the loop, at most."""
    looked = _Looked(path)
    admits, run = View.admits, daemon.MountDaemon.run

    def counted(self: View, uid: Any) -> bool:
        looked.looked += 1
        return admits(self, uid)

    async def run_counted(self: daemon.MountDaemon) -> None:
        trio.lowlevel.add_instrument(looked)
        await run(self)

    replace(View, "admits", counted)
    replace(daemon.MountDaemon, "run", run_counted)


# -- what takes long -------------------------------------------------------------------------------


def make_late(flag: str) -> None:
    """When the file `flag` exists, remove it; then wait until it exists again before anything is made."""
    do = core.Core._do

    async def late(self: core.Core, at: Any, call: Callable[..., Any], *args: Any) -> Any:
        if "create" in call.__qualname__ and os.path.exists(flag):
            os.unlink(flag)
            await wait_in_loop(lambda: os.path.exists(flag), math.inf, every=0.01)
        return await do(self, at, call, *args)

    replace(core.Core, "_do", late)


def find_slowly(late: bytes, flag: str) -> None:
    """Have a slow disk, which finds this name only when `flag` exists; `flag` + ".asked" shows that it waits."""
    prepare, find = filesystems.MountedFilesystem.__post_init__, core.Core._open_and_query

    def slow(self: filesystems.MountedFilesystem, below_remote: bool) -> None:
        prepare(self, below_remote)
        self.in_memory, self.slow_until = False, float("inf")

    def find_late(self: core.Core, at: Any, name: bytes) -> Any:
        found = find(self, at, name)
        if name == late:
            linux.act_as_daemon()
            os.close(os.open(f"{flag}.asked", os.O_CREAT))
            _wait_for(flag)
        return found

    replace(filesystems.MountedFilesystem, "__post_init__", slow)
    replace(core.Core, "_open_and_query", find_late)


def close_slowly(begun: str, go: str) -> None:
    """Close the first file of more than a MiB only when `go` exists; `begun` shows that it waits."""
    close = calls.close

    def slow(fd: int) -> None:
        if os.fstat(fd).st_size > 1 << 20 and not os.path.exists(begun):
            os.close(os.open(begun, os.O_WRONLY | os.O_CREAT, 0o666))
            _wait_for(go)
        close(fd)

    replace(calls, "close", slow)


def never_invalidate(name: bytes) -> None:
    """Have the kernel drop all names but one, of which it takes for ever."""
    invalidate_names = notifier.invalidate_names

    def invalidate_others(parent: int, batch: Any, session: int) -> None:
        if name in batch.names:
            threading.Event().wait()
        invalidate_names(parent, batch, session)

    replace(notifier, "invalidate_names", invalidate_others)


def invalidate_slowly(name: bytes, begun: str | None = None) -> None:
    """Have the kernel take long to drop names in directories that have this one; make the file `begun` first."""
    invalidate_names = notifier.invalidate_names

    def slowly(parent: int, batch: Any, session: int) -> None:
        if name in batch.names:
            if begun is not None:
                linux.act_as_daemon()
                os.close(os.open(begun, os.O_WRONLY | os.O_CREAT, 0o666))
            time.sleep(0.3)
        invalidate_names(parent, batch, session)

    replace(notifier, "invalidate_names", slowly)


def never_invalidate_subtrees() -> None:
    """Of what is below a directory, invalidate nothing but what is invalidated at once."""

    async def never(_: invalidation.Invalidation) -> None:
        await trio.sleep_forever()

    replace(invalidation.Invalidation, "_invalidate_subtrees", never)


def query_database_slowly(uid: int, flag: str) -> None:
    """While the file `flag` exists, the user database does not answer for the groups of this user."""
    at_once = groups.database_groups

    def slowly(user: Any) -> Any:
        linux.act_as_daemon()  # a thread begins with the credentials that the loop had last
        if user == uid and os.path.exists(flag):
            os.close(os.open(f"{flag}.asked", os.O_WRONLY | os.O_CREAT, 0o666))
            wait_until(lambda: not os.path.exists(flag), math.inf)
        return at_once(user)

    replace(groups, "database_groups", slowly)


def note_umount_in_vain(flag: str) -> None:
    """Make the file `flag` when umount(2) was tried in vain."""
    at_once = linux.umount

    def tried(*args: Any) -> None:
        try:
            at_once(*args)
        except OSError:
            os.close(os.open(flag, os.O_WRONLY | os.O_CREAT, 0o666))
            raise

    replace(linux, "umount", tried)


# -- what fails ------------------------------------------------------------------------------------


def watch_nothing() -> None:
    """Have a file system whose changes are not reported."""

    def add(*_: object) -> NoReturn:
        raise OSError(errno.EOPNOTSUPP, "not here")

    replace(Watch, "add", add)


def lose_renames() -> None:
    """Have the queue of fanotify(7) overflow at each rename."""
    read = Watch.read

    def read_or_lose(self: Watch) -> list[fanotify.Event]:
        events = read(self)
        if any(event.mask & (fanotify.FAN_MOVED_FROM | fanotify.FAN_MOVED_TO) for event in events):
            return [fanotify.Event(fanotify.FAN_Q_OVERFLOW, 0, b"", b"", b"", False)]
        return events

    replace(Watch, "read", read_or_lose)


def never_merge_the_index() -> None:
    """Do not make room in the log of the index."""
    replace(index.Index, "checkpoint", lambda self: None)


def die_when_ready(flag: str) -> None:
    """Die as soon as the mount is reported ready, unless the file `flag` exists, which it makes."""
    report = Supervisor.ready

    def ready(self: Supervisor, status: str) -> None:
        if not os.path.exists(flag):
            os.close(os.open(flag, os.O_CREAT))
            os.kill(os.getpid(), signal.SIGKILL)
        report(self, status)

    replace(Supervisor, "ready", ready)


def fail_on_flag(flag: str) -> None:
    """Run out of memory when the file `flag` exists."""
    real = loop.serve

    async def serve(*, stock: bool = False) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: real(stock=stock))
            await wait_in_loop(lambda: os.path.exists(flag), math.inf, every=0.05)
            raise MemoryError

    replace(loop, "serve", serve)


def kill_before_read(flag: str) -> None:
    """When the session is readable, and before it is read, end the process whose id is in the file `flag`."""
    wait_readable = loop.Workers.wait_readable

    async def wait(self: loop.Workers, fd: int) -> None:
        await wait_readable(self, fd)
        if os.path.exists(flag):
            with open(flag, encoding="ascii") as file:
                pid = int(file.read())
            os.unlink(flag)
            doomed = os.pidfd_open(pid)
            os.kill(pid, signal.SIGKILL)
            select.select([doomed], [], [])
            os.close(doomed)

    replace(loop.Workers, "wait_readable", wait)


def end_at_statfs() -> None:
    async def statfs(*_: object) -> NoReturn:
        raise SystemExit("the end")

    replace(attributes.AttributeOperations, "statfs", statfs)


def fail_at_readlink(error: type[Exception], *arguments: object) -> None:
    """Raise an error where a bug in an operation would: below its boundary, above the system calls."""

    async def readlink(self: Any, inode: pyfuse3.InodeT, ctx: pyfuse3.RequestContext) -> bytes:
        raise error(*arguments)

    replace(attributes.AttributeOperations, "readlink", operation(readlink))


def fail_to_name_callers() -> None:
    """Have no name of the command that makes a request."""

    def command_of(tid: int) -> NoReturn:
        raise ZeroDivisionError

    replace(process, "command_of", command_of)


# -- other kernels, other libraries, other versions ------------------------------------------------


def be_before_linux_6_16() -> None:
    """Have a kernel to which each name has to be sent: what it does not know, it refuses like this one."""
    replace(notifier, "_INC_EPOCH", struct.pack("=IiQ", 16, 9999, 0))


def hide_readers() -> None:
    """Have a pyfuse3 of which nobody knows how to find the caller of a listing."""
    replace(directories, "requester", lambda token: SimpleNamespace(uid=0, gid=0, pid=1, umask=0))


def shrink_entries() -> None:
    """Have a pyfuse3 whose attributes are smaller than is known."""
    small = type("Entry", (), {"__slots__": ("st_ino",)})
    defaults = compatibility.check.__defaults__
    assert defaults is not None
    replace(compatibility.check, "__defaults__", (pyfuse3.ReaddirToken, small, *defaults[2:]))


def speak_another_protocol() -> None:
    version = client.VERSION + 1
    for module in (client, control):
        replace(module, "VERSION", version)


def publish_otherwise() -> None:
    """Publish what a later version may: in a form of its own, but for what never changes."""

    def write(state: runtime.PublishedState) -> None:
        now = state._now
        sure = {"version": 7, "pid": now.pid, "source": now.source, "target": now.target, "device": now.device}
        ownfiles.replace(state._path, json.dumps({**sure, "options": {"of": "another kind"}}).encode(), mode=0o600)

    replace(runtime.PublishedState, "_write", write)


# -- broken rules ----------------------------------------------------------------------------------


def show_set_id_bits() -> None:
    """Show set-id bits as they are, which 0.1.0 did."""
    replace(View, "shown_mode", lambda self, mode, *ids: mode)


def hide_nothing() -> None:
    for owner, names in (
        (CloakList, ("visible", "same_for_all")),
        (Condition, ("admits", "surely_admits", "surely_admits_members")),
    ):
        for name in names:
            replace(owner, name, lambda *_: True)


def answer_always(owner: object, name: str, answer: object) -> None:
    """Have a rule always come to the same answer."""
    replace(owner, name, lambda *_, **__: answer)


def do_nothing(owner: object, name: str) -> None:
    """Have a coroutine function do nothing."""

    async def nothing(*_: object, **__: object) -> None:
        pass

    replace(owner, name, nothing)


# -- races -----------------------------------------------------------------------------------------


def hide(tree: str) -> None:
    """What was "x" is "away", if there was any, and "x" is what was "secret"."""
    if os.path.lexists(f"{tree}/x"):
        os.rename(f"{tree}/x", f"{tree}/away")
    os.rename(f"{tree}/secret", f"{tree}/x")


def replace_by_secret(tree: str) -> None:
    os.rename(f"{tree}/secret", f"{tree}/x")


def remove(tree: str) -> None:
    os.unlink(f"{tree}/x")


def note_move(tree: str) -> None:
    os.mkdir(f"{tree}/moved")


def race(
    tree: str, change: Callable[[str], object], names: Collection[str], done: str, *, first: bool, creates: bool
) -> None:
    """Make a change of the tree once, when the daemon makes one of the named calls with the name "x" or "y".

    Args:
        tree: the real tree.
        change: what is done there.
        names: of functions of `os`, or "renameat2".
        done: a file that is made then.
        first: whether the call is made before the change, and not after it.
        creates: whether it has to be a call with O_CREAT.
    """
    is_done = False

    def raced(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal is_done
        if is_done or not {b"x", b"y"} & set(args) or (creates and not args[1] & os.O_CREAT):
            return call(*args, **kwargs)
        is_done = True
        before = linux.credentials._thread.credentials
        result = call(*args, **kwargs) if first else None
        linux.act_as_daemon()
        change(tree)
        os.close(os.open(done, os.O_WRONLY | os.O_CREAT))
        if before is not None:
            linux.credentials.assume(before)
        return result if first else call(*args, **kwargs)

    def bound(call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: raced(call, *args, **kwargs)

    for name in names:
        owner: Any = linux if name == "renameat2" else os
        replace(owner, name, bound(getattr(owner, name)))


# -- writing to a disk -----------------------------------------------------------------------------


def no_room_for_dirty_pages() -> None:
    """Have the daemon believe that the kernel would have whoever writes wait."""
    replace(dirtypages.DirtyPages, "room", lambda _: 0)


def writes_wait_in_the_loop() -> None:
    """Have each write in the session loop wait for 10 ms, as a throttled disk may."""
    write = calls.pwrite

    def waiting(*args: Any) -> int:
        if threading.current_thread() is threading.main_thread():
            let_expire(0.01)
        return write(*args)

    replace(calls, "pwrite", waiting)


def allocate_slowly(begun: str, go: str) -> None:
    """Have fallocate(2) begin, and wait until a file appears."""

    def waiting(*_: Any) -> None:
        _append(begun, "")
        _wait_for(go)

    replace(calls, "fallocate", waiting)


def walk_slowly() -> None:
    """Have the search for files take a while for each directory, as in a large tree."""
    before = calls.entries

    def entries(credentials: linux.Credentials, fd: int) -> calls.Entries:
        let_expire(0.05)
        return before(credentials, fd)

    replace(calls, "entries", entries)


class _Unreadable:
    """The entries of a directory on a block that cannot be read."""

    def __init__(self, entries: calls.Entries) -> None:
        self.close = entries.close

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> NoReturn:
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def cannot_read_bad() -> None:
    """Have the search for files fail to read directories called `bad`."""
    before = calls.entries

    def entries(credentials: linux.Credentials, fd: int) -> Any:
        found = before(credentials, fd)
        return _Unreadable(found) if calls.path_of(fd).endswith(b"/bad") else found

    replace(calls, "entries", entries)


def never_walk() -> None:
    """Have the search for files find nothing."""

    def step(self: TreeWalk, sought: Set[int], seconds: float) -> tuple[list[FoundName], bool]:
        return [], False

    replace(TreeWalk, "step", step)


def begin_to_walk_late() -> None:
    """Have the search for files wait for three seconds before it begins, as for a disk."""
    before, has_waited = TreeWalk.step, threading.Event()

    def step(self: TreeWalk, sought: Set[int], seconds: float) -> tuple[list[FoundName], bool]:
        if not has_waited.is_set():
            has_waited.set()
            let_expire(3)
        return before(self, sought, seconds)

    replace(TreeWalk, "step", step)
