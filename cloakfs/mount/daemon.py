"""The life of one mount: start, serve, reload, stop."""

import contextlib
import errno
import faulthandler
import logging
import os
import resource
import select
import signal
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TextIO

import pyfuse3
import trio

from .. import linux
from ..accounts.groups import group_source
from ..accounts.threadstatus import ThreadStatus
from ..background.logfile import follow_rotation
from ..background.systemd import Supervisor
from ..background.tasks import Tasks
from ..config.options import Options
from ..filesystem import Filesystem
from ..filesystem.figures import figures, refused
from ..filesystem.reader import Reader
from ..fuse import attach, compatibility, connection, loop
from ..fuse.attach import Attached, MountError, MountOptions
from ..kernelcache.policy import SHORT_SECONDS
from ..kernelcache.watch import Watch
from ..linux import mountinfo, ownfiles
from ..messages import shell_word
from ..plugin.loader import PolicyError, is_in_file, load_policy
from ..reasons import who_checks
from ..stacking.lower import find_lower
from ..state import persistent
from ..state.client import socket_of
from ..state.runtime import STATE_DIR, PublishedState, all_mounted, mount_key
from ..state.versions import VersionError
from ..tree.index import MEMORY, Index, Unstored
from ..tree.nodes import Nodes
from ..tree.views import ViewError, Views
from ..tuning import STANDARD, Tuning
from . import gctuning
from .control import Control
from .reaper import ENDED, FAILED, READY, Again, Reaper
from .reread import as_json, read_apart

log = logging.getLogger(__name__)

FIXED_BY_THE_MOUNT = {
    "read_only": "ro or rw",
    "groups": "groups",
    "views": "views",
    "view_access": "view_access",
    "no_client_cache": "no_client_cache",
}
"""Fields of `Options` that a reload cannot change, with the option to name; a reload applies all other fields."""

# A daemon of a local mount that is killed loses the nodeids of this many seconds.
_COMMIT_SECONDS = 1.0

# Clients cannot have this many descriptors, because each request that waits needs some.
_SPARE_DESCRIPTORS = 2 * loop.MOST_PENDING


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of one mount.

    Attributes:
        source: absolute path of the real tree.
        target: absolute path of the mount point.
        options: the options of the export.
        mount_options: the options of mount(8).
        policy_dir: the directory that a relative `policy=` file is relative to.
        reread: reads the options again from their origin, for SIGHUP, in another process (so it can be pickled); None
            if they cannot be read again (a plug-in is still read again).
        again: how to mount again if the daemon dies; None if that is not wanted.
        log: the file to which standard error goes; None in the foreground.
        supervised: systemd may have started the daemon, and wants to be told how it is (sd_notify(3)).
        tuning: times and bounds.
    """

    source: str
    target: str
    options: Options
    mount_options: MountOptions
    policy_dir: str = "."
    reread: Callable[[], Options] | None = None
    again: Again | None = None
    log: str | None = None
    supervised: bool = False
    tuning: Tuning = STANDARD


def serve(settings: Settings, ready: Callable[[], None]) -> None:
    """Mount and serve until somebody unmounts or a signal asks to stop.

    Args:
        settings: what to mount, and where.
        ready: called once the mount answers.

    Raises:
        MountError: the mount could not be made.
    """
    compatibility.check()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    supervisor = Supervisor(listens=settings.supervised)
    key = mount_key(settings.source, settings.target)
    state = os.path.join(STATE_DIR, key)
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, _lock(settings, key, state))
        index, nodes, views = _open(settings, state, most, stack)
        _warn_of_handles(nodes)
        threads = ThreadStatus()
        filesystem = _filesystem(settings, nodes, views, threads, stack, most)
        _watch(filesystem)
        reaper = _reaper(settings, key)
        if reaper is not None:
            stack.callback(reaper.close)
        _write_record(settings, state)
        attached, published, control = _attach(settings, key, state, filesystem, index, reaper, stack)
        stack.enter_context(_late_answers_untold(attached.session))
        abort = _open_abort(attached, stack)
        published.lacking(_lacking(attached.device))
        _give_up_privileges()
        report = reaper.report if reaper is not None else lambda _: None
        try:
            _run(
                MountDaemon(
                    settings, filesystem, index, published, control, attached, ready, report, supervisor, threads
                )
            )
            report(ENDED)
        finally:
            supervisor.stopping()
            report(FAILED)  # unless it has ended
            if abort is not None:
                connection.abort(abort)  # a thread may still hold the session, and wait in the kernel
            # The session is closed first, because the last one to release a mount with a block device waits for an
            # answer of the session.
            pyfuse3.close(unmount=False)
            attached.detach_dead()
    log.info("%s: unmounted", settings.target)


def _lock(settings: Settings, key: str, state: str) -> int:
    """Return the locked directory of the mount's state, which one daemon at a time may have.

    Raises:
        MountError: another daemon has it, or it cannot be made.
    """
    try:
        lock = persistent.lock(key)
    except OSError as exc:
        raise MountError(f"{exc.filename}: {exc.strerror}; {_way_out(exc, state)}") from exc
    if lock is None:
        raise MountError(_served_already(settings))
    return lock


def _open(settings: Settings, state: str, most: int, stack: contextlib.ExitStack) -> tuple[Index, Nodes, Views]:
    """Return the numbers, the objects and the views of a mount, in a process that can have `most` descriptors.

    Raises:
        MountError: one of them cannot be used.
    """
    lower = find_lower(settings.source)
    if lower is not None:
        stack.callback(lower.close)
    with _as_mount_errors(settings, state):
        policy = load_policy(settings.options.policy, settings.options, settings.policy_dir)
        index = _index(settings, os.path.join(state, persistent.INDEX))
        stack.callback(index.close)
        nodes = _nodes(settings, index, min(most // 4, 4096))
        stack.callback(nodes.close)
        views = Views(
            policy,
            settings.options.views,
            frozenset(settings.options.view_access),
            index,
            for_all=settings.mount_options.export.ganesha,
            checked=settings.mount_options.default_permissions,
            lower=lower,
        )
    return index, nodes, views


@contextlib.contextmanager
def _as_mount_errors(settings: Settings, state: str) -> Iterator[None]:
    """Raise what is wrong with the policy, the views, the tree or the state as a MountError with the way out."""
    try:
        yield
    except (PolicyError, VersionError, ViewError) as exc:
        raise MountError(str(exc)) from exc
    except sqlite3.Error as exc:
        raise MountError(f"{state}: {exc}; {_way_out(exc, state)}") from exc
    except Unstored as exc:
        raise MountError(f"{exc.filename}: {exc.strerror}; {_way_out(exc, state)}") from exc
    except OSError as exc:
        raise MountError(f"{settings.source}: {exc.strerror}") from exc


def _filesystem(
    settings: Settings, nodes: Nodes, views: Views, threads: ThreadStatus, stack: contextlib.ExitStack, most: int
) -> Filesystem:
    """Return the operations of a mount, in a process that can have `most` descriptors.

    Raises:
        MountError: the source of callers' groups does not go with the server, or the file of `record=` is not written.
    """
    filesystem = Filesystem(
        nodes,
        views,
        group_source(_groups_of(settings), threads, settings.tuning),
        threads,
        Reader(settings.options.prefetch, settings.options.prefetch_limits, _record(settings, stack)),
        settings.target,
        replace(settings.mount_options.export, no_client_cache=settings.options.no_client_cache),
        default_permissions=settings.mount_options.default_permissions,
        xattrs=settings.mount_options.xattrs,
        max_open=most - min(most // 4, _SPARE_DESCRIPTORS),
        tuning=settings.tuning,
    )
    filesystem.probing.use(settings.options)
    return filesystem


def _reaper(settings: Settings, key: str) -> Reaper | None:
    """Return the process that unmounts the mount when its daemon dies; None if the mount has to stay then."""
    # Once such a mount is gone, a server would export what lies below it; where that is the tree itself, everybody
    # would see all of it.
    must_stay = settings.mount_options.export.is_exported or _lies_over_the_tree(settings)
    if not must_stay:
        return Reaper(key, settings.target, settings.again)
    if settings.again is not None:
        log.warning(
            "%s: restart has no effect: the guard of an export mounts again, and a mount over its own source "
            "stays dead, since everybody would see all of the tree in between",
            settings.target,
        )
    return None


def _write_record(settings: Settings, state: str) -> None:
    """Write down which mount the state belongs to.

    Raises:
        MountError: it cannot be written, and a server exports the mount.
    """
    try:
        persistent.write_record(settings.source, settings.target, exported=settings.mount_options.export.is_exported)
    except OSError as exc:
        if settings.mount_options.export.is_exported:
            raise MountError(f"{exc.filename or state}: {exc.strerror}") from exc
        log.warning("%s: %s; cloakfs prune will not know what this state is of", state, exc.strerror)


def _attach(
    settings: Settings,
    key: str,
    state: str,
    filesystem: Filesystem,
    index: Index,
    reaper: Reaper | None,
    stack: contextlib.ExitStack,
) -> tuple[Attached, PublishedState, Control]:
    """Mount, and return the mount, what it publishes and what it answers. If anything fails, nothing stays mounted.

    Raises:
        MountError: the mount could not be made.
    """
    attached = attach.attach(
        settings.source,
        settings.target,
        settings.mount_options,
        read_only=settings.options.read_only,
        image=os.path.join(state, persistent.IMAGE),
    )
    try:
        _refuse_to_serve_itself(settings)
        filesystem.nodes.mounts.served_at(attached.device)
        pyfuse3.init(filesystem, f"/dev/fd/{attached.session}", {"fsname=cloakfs"})
        filesystem.cache.attach(attached.session)
        published, control = _published(settings, key, attached, filesystem, index)
        try:
            stack.enter_context(published)
            stack.enter_context(control)
        except OSError as exc:
            raise MountError(f"{exc.filename or socket_of(key)}: {exc.strerror}") from exc
        if reaper is not None:
            reaper.assign(attached)
    except BaseException:
        attached.detach()
        raise
    return attached, published, control


def _published(
    settings: Settings, key: str, attached: Attached, filesystem: Filesystem, index: Index
) -> tuple[PublishedState, Control]:
    """Return what others can know of the mount: what it publishes, and what it answers."""
    published = PublishedState(
        key,
        settings.source,
        settings.target,
        as_json(settings.options),
        settings.policy_dir,
        attached.device,
        settings.mount_options.given,
    )
    control = Control(
        key,
        published,
        _groups_of(settings),
        filesystem.views,
        filesystem.upper,
        filesystem.tracers,
        partial(figures, filesystem, index),
        filesystem.probing.events,
        xattrs=settings.mount_options.xattrs,
    )
    return published, control


def _open_abort(attached: Attached, stack: contextlib.ExitStack) -> int | None:
    """Return the descriptor by which the session can be ended; None if the kernel does not offer it."""
    try:
        abort = connection.open_abort(attached.device)
    except OSError:
        return None
    stack.callback(os.close, abort)
    return abort


def _give_up_privileges() -> None:
    """Give up those of root with which every caller could do what only root may.

    Every caller could exceed quotas, use reserved blocks, access `trusted.` names and give programs capabilities.
    (setfsuid(2) takes away others, but not these.)
    """
    given_up = 1 << linux.CAP_SYS_ADMIN | 1 << linux.CAP_SYS_RESOURCE | 1 << linux.CAP_SETFCAP
    linux.set_effective_capabilities(linux.effective_capabilities() & ~given_up)


def _run(daemon: "MountDaemon") -> None:
    """Serve until the end.

    Raises:
        MountError: the mount turned out to be useless before it was reported ready.
    """
    try:
        trio.run(daemon.run)
    except BaseExceptionGroup as group:
        refused = group.subgroup(MountError)
        if refused is None:
            raise
        raise _only_one(refused) from None


def _only_one(group: BaseExceptionGroup[MountError]) -> MountError:
    exc = group.exceptions[0]
    return _only_one(exc) if isinstance(exc, BaseExceptionGroup) else exc


def _index(settings: Settings, path: str) -> Index:
    """Return where numbers are kept. For a mount that nothing exports, that is in memory if the file cannot be used.

    Raises:
        MountError: the file of an exported mount cannot be used.
        VersionError: its version is unknown.
    """
    try:
        return Index(path, behind=not settings.mount_options.export.is_exported)
    except (OSError, sqlite3.Error) as exc:
        trouble = f"{path}: {exc.strerror if isinstance(exc, OSError) else exc}"
        way_out = _way_out(exc, os.path.dirname(path))
        if settings.mount_options.export.is_exported:
            raise MountError(f"{trouble}; {way_out}") from exc
        log.warning(
            "%s; inode numbers and file handles are in memory, and others from the next mount on (%s)",
            trouble,
            way_out,
        )
        return Index(MEMORY, behind=True, trouble=trouble)


def _nodes(settings: Settings, index: Index, max_fds: int) -> Nodes:
    """Return the objects of the tree.

    Raises:
        MountError: the tree cannot be mounted over.
        OSError: the tree cannot be opened.
    """
    covered = _covers_its_source(settings)
    try:
        return Nodes(settings.source, index, max_fds, covered=covered, tuning=settings.tuning)
    except OSError as exc:
        if covered and exc.errno in (errno.ENOSYS, errno.EINVAL):
            raise MountError(
                f"{settings.target}: cannot be mounted over its own source here (open_tree(2): {exc.strerror}); "
                "this needs Linux 5.2 or later, and mounts that are not unbindable"
            ) from exc
        raise


def _covers_its_source(settings: Settings) -> bool:
    return f"{settings.source}/".startswith(f"{settings.target}/")


def _lies_over_the_tree(settings: Settings) -> bool:
    """Whether unmounting uncovers the tree itself at the mount point. (It may be bind-mounted there, too.)"""
    return _covers_its_source(settings) or ownfiles.samefile(settings.source, settings.target)


def _served_already(settings: Settings) -> str:
    """Return why there can be no second mount of the same tree at the same mount point."""
    pair = settings.source, settings.target
    daemon = next((mount for mount in all_mounted() if (mount.source, mount.target) == pair), None)
    places = {
        place.path for place in mountinfo.by_id().values() if daemon is not None and place.device == daemon.device
    }
    if daemon is None or settings.target in places:
        way_out = f"cloakfs umount {shell_word(settings.target)}"
        return f"{settings.target}: {settings.source} is mounted there already ({way_out})"
    if places:
        return (
            f"{settings.target}: the daemon of an earlier mount (process {daemon.pid}) still serves "
            f"{', '.join(sorted(places))}; unmount that first"
        )
    return (
        f"{settings.target}: the daemon of an earlier mount (process {daemon.pid}) still serves processes that have "
        f"files open in it; try again when they have ended, or end the daemon (kill {daemon.pid}, twice)"
    )


def _watch(filesystem: Filesystem) -> None:
    """Have changes behind the mount reported, if the kernel supports that."""
    try:
        # With several views, a change made through one of them is behind the mount for the others.
        watch = Watch(own=filesystem.views.top)
    except OSError as exc:
        log.warning(
            "fanotify cannot be used (%s): changes behind the mount are seen within %g s",
            exc.strerror,
            SHORT_SECONDS,
        )
        return
    filesystem.cache.watch(watch)


def _record(settings: Settings, stack: contextlib.ExitStack) -> TextIO | None:
    """Return the file in which READs are recorded (`-o record=FILE`).

    Raises:
        MountError: the file cannot be written.
    """
    if settings.mount_options.record is None:
        return None
    try:
        fd = ownfiles.open_fd(
            settings.mount_options.record, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600
        )
    except OSError as exc:
        raise MountError(f"record={settings.mount_options.record}: {exc.strerror}") from exc
    return stack.enter_context(ownfiles.open(fd, "w", encoding="ascii"))


def _groups_of(settings: Settings) -> str | None:
    """Return where callers' groups come from; /proc does not show them for threads of the kernel's NFS server.

    Raises:
        MountError: the options ask to read them from there nevertheless.
    """
    words = settings.options.groups
    if settings.mount_options.export.knfsd and words == "proc":
        raise MountError("groups=proc: the kernel's NFS server shows no groups; use groups=database, none or gids")
    return "database" if settings.mount_options.export.knfsd and words is None else words


@contextlib.contextmanager
def _late_answers_untold(session: int) -> Iterator[None]:
    """Keep pyfuse3 from logging errors about replies that came after the end of the session.

    When the last user is gone, the kernel does not wait for requests that this user did not wait for (RELEASE). It no
    longer knows such a request when the reply comes.
    """
    ended = select.poll()
    ended.register(session, 0)  # for POLLERR alone

    def is_worth_telling(record: logging.LogRecord) -> bool:
        if "fuse_reply" not in record.msg or record.args != (os.strerror(errno.ENOENT),):
            return True
        # The kernel forgets the requests a moment before it reports the end of the session, so wait for that. It never
        # forgets a request while the session goes on, so this wait does not happen repeatedly.
        return not ended.poll(100)

    pyfuse3_log = logging.getLogger("pyfuse3")
    pyfuse3_log.addFilter(is_worth_telling)
    try:
        yield
    finally:
        pyfuse3_log.removeFilter(is_worth_telling)


def _lacking(device: str) -> list[str]:
    """Let the kernel send as many requests as the daemon can share out among callers; return what cannot be done."""
    try:
        connection.limit_background(device, loop.MOST_BACKGROUND, loop.MOST_BACKGROUND * 3 // 4)
    except OSError as exc:
        problem = (
            f"the kernel sends only 12 requests at a time for which no process waits ({exc.strerror}): one user's "
            "reads of a file system that hangs can stop everybody's reads; write "
            f"{loop.MOST_BACKGROUND} to /sys/fs/fuse/connections/{device.partition(':')[2]}/max_background"
        )
        log.warning("%s", problem)
        return [problem]
    return []


def _refuse_to_serve_itself(settings: Settings) -> None:
    """Refuse a mount that also appears inside the source, as it may where the tree is a shared bind mount.

    Raises:
        MountError: the new mount is visible below the source.
    """
    places = [(place.device, place.path) for place in mountinfo.by_id().values()]
    device = next((device for device, path in reversed(places) if path == settings.target), None)
    inside = settings.source.rstrip("/") + "/"
    for other, path in places:
        if other == device and path != settings.target and path.startswith(inside):
            raise MountError(
                f"{settings.target}: also appears as {path}, inside {settings.source}, where the daemon would wait "
                "for itself; mount it elsewhere"
            )


_WAYS_OUT = {
    errno.ENOSPC: "make room on its file system",
    errno.EDQUOT: "make room on its file system",
    errno.EROFS: "its file system has to be writable (mount -o remount,rw)",
    errno.EAGAIN: "another program has locked it (fuser)",
    errno.ENOMEM: "the machine has too little memory",
    errno.EMFILE: "the limit of open files is too low (ulimit -n)",
    errno.ENFILE: "the limit of open files is too low (sysctl fs.file-max)",
}


def _way_out(exc: OSError | sqlite3.Error, state: str) -> str:
    """Say what to do about the state of a mount that cannot be used. Only what is damaged has to be given up."""
    code = exc.errno if isinstance(exc, OSError) else Unstored(exc, "").errno
    return _WAYS_OUT.get(code or 0, f"move {state} away to start with an empty one (old file handles become stale)")


def _warn_of_handles(nodes: Nodes) -> None:
    for filesystem in nodes.mounts.filesystems:
        if not filesystem.has_handles:
            log.warning(
                "%s (%s) has no file handles: nodeids last only as long as the kernel remembers a file, "
                "and each known file costs a descriptor (overlayfs: mount it with nfs_export=on,index=on)",
                filesystem.path,
                filesystem.kind,
            )
        elif not filesystem.decodable:
            log.warning(
                "%s (%s) cannot decode file handles: an old handle works again only once its path has been looked up "
                "(overlayfs: mount it with nfs_export=on,index=on)",
                filesystem.path,
                filesystem.kind,
            )


class MountDaemon:
    """Serves one mount until it is unmounted, or a signal ends it."""

    def __init__(
        self,
        settings: Settings,
        filesystem: Filesystem,
        index: Index,
        published: PublishedState,
        control: Control,
        attached: Attached,
        ready: Callable[[], None],
        report: Callable[[str], None],
        supervisor: Supervisor,
        threads: ThreadStatus,
    ) -> None:
        self._supervisor = supervisor
        self._threads = threads
        self._report = report
        self._settings = settings
        self._filesystem = filesystem
        self._index = index
        self._ready = ready
        self._published = published
        self._control = control
        self._tuning = settings.tuning
        self._asked_to_stop = False
        self._reload_wanted = trio.Event()
        self._attached = attached

    async def run(self) -> None:
        """Answer requests until the end, with all background tasks beside.

        Raises:
            MountError: the mount does not answer.
        """
        async with trio.open_nursery() as nursery:
            filesystem = self._filesystem
            tasks = filesystem.tasks = filesystem.relookup.tasks = filesystem.reader.tasks = Tasks(nursery)
            # A further signal while the daemon ends must not keep it from cleaning up.
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
            with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals:
                tasks.supervise("handling signals", self._obey, signals, tasks)
                tasks.supervise("reloading", self._reload_when_wanted)
                nursery.start_soon(self._report_ready)  # not a kept task: a mount that fails here was not made
                tasks.supervise("regular maintenance", self._keep_house)
                tasks.supervise("making nodeids durable", self._keep_index)
                cache, views = filesystem.cache, filesystem.views
                tasks.supervise(
                    "watching the user database", views.follow_user_database, cache.reset, self._tuning.view_seconds
                )
                cache.run(tasks)
                tasks.supervise("dropping what the kernel forgot", filesystem.references.run)
                tasks.supervise("recalling delegations", filesystem.recalls.run)
                tasks.supervise("counting probes", filesystem.probing.run)
                tasks.supervise("answering commands", self._control.serve, tasks)
                if self._supervisor.watchdog_seconds is not None:
                    tasks.supervise(
                        "showing systemd that it answers", self._show_life, self._supervisor.watchdog_seconds
                    )
                await self._answer_requests()
                nursery.cancel_scope.cancel()

    async def _answer_requests(self) -> None:
        try:
            await loop.serve(stock=self._tuning.stock_loop)
        except* ConnectionAbortedError:
            # The session ended while a request was being read. The kernel then returns ECONNABORTED, but pyfuse3 treats
            # only ENODEV as the end. There is nobody left to answer.
            log.debug("%s: the session ended in the middle of a request", self._settings.target)

    async def _report_ready(self) -> None:
        await trio.to_thread.run_sync(linux.apart, self._filesystem.self_probe.check, abandon_on_cancel=True)
        self._publish_rules()
        log.info("%s: serving %s", self._settings.target, self._settings.source)
        log.info("%s: access is %s", self._settings.target, self._access())
        self._log_exempt(self._settings.options)
        restarts = self._settings.mount_options.restarts
        if restarts:
            log.warning("%s: mounted again, as its daemon had died (restart %d)", self._settings.target, restarts)
        self._report(READY)  # first: whoever sees the mount may rely on its being mounted again
        self._ready()
        self._supervisor.ready(f"serving {self._settings.source} at {self._settings.target}")

    async def _show_life(self, seconds: float) -> None:
        """Tell systemd, as often as it wants to know, that a request was answered. A loop that hangs tells nothing.

        Nobody can be asked where something else is mounted on top. Then it is enough that this runs.
        """
        while True:
            if self._attached.is_on_top():
                await trio.to_thread.run_sync(linux.apart, self._filesystem.self_probe.ping, abandon_on_cancel=True)
            self._supervisor.alive()
            await trio.sleep(seconds)

    async def _keep_index(self) -> None:
        while True:
            await trio.sleep(_COMMIT_SECONDS)
            with contextlib.suppress(Unstored):  # it is logged, and raised again when a number is needed
                while self._index.commit():
                    await trio.sleep(0)

    async def _keep_house(self) -> None:
        gctuning.freeze_survivors()
        requests, answered, trouble = self._filesystem.requests, -1, ""
        while True:
            await trio.sleep(self._tuning.housekeeping_seconds)
            before, answered = answered, sum(requests.counts().values())
            if before == answered and not requests.waiting.total + requests.writes.total:
                gctuning.collect_if_due()
            nodes = self._filesystem.nodes
            for _ in nodes.descriptors.close_idle():
                await trio.sleep(0)
            if self._settings.log is not None:
                follow_rotation(self._settings.log)
            look = nodes.sweeper.sweep()
            nodes.sweeper.swept(await trio.to_thread.run_sync(look, abandon_on_cancel=True))
            self._index.tidy()
            self._published.work(
                self._filesystem.requests.counts(), self._filesystem.reader.state(), refused(self._filesystem)
            )
            self._publish_rules()
            try:
                await trio.to_thread.run_sync(self._index.checkpoint)
                trouble = ""
            except sqlite3.Error as exc:
                if trouble != str(exc):  # not every few seconds
                    trouble = str(exc)
                    log.warning("the log of the index cannot be merged, and grows until it can be: %s", trouble)

    async def _obey(self, signals: AsyncIterator[int], tasks: Tasks) -> None:
        async for number in signals:
            if number == signal.SIGHUP:
                self._reload_wanted.set()
            elif self._asked_to_stop:
                log.info("%s: asked to stop again; ending at once", self._settings.target)
                pyfuse3.terminate()
            else:
                self._asked_to_stop = True
                self._report(ENDED)
                self._supervisor.stopping()
                log.info("%s: asked to stop", self._settings.target)
                tasks.supervise("stopping", self._stop)

    async def _reload_when_wanted(self) -> None:
        while True:
            await self._reload_wanted.wait()
            self._reload_wanted = trio.Event()
            self._supervisor.reloading()
            status = "the reload failed; see the log"
            try:
                status = await self._reload()
            finally:
                self._supervisor.ready(status)

    async def _stop(self) -> None:
        if self._attached.has_ended():
            return  # somebody else has unmounted it already
        # This runs in a thread, because the kernel may first have to write back pages through this very loop.
        await trio.to_thread.run_sync(linux.apart, self._attached.detach)
        await trio.sleep(self._tuning.stop_seconds)
        log.warning("%s: still in use after %g s", self._settings.target, self._tuning.stop_seconds)
        pyfuse3.terminate()

    async def _reload(self) -> str:
        """Apply changed options and a changed plug-in: all changes or, if anything is wrong, none.

        Others are served while the options are read, which takes long if there are many definitions.

        Returns:
            one line that says which.
        """
        reread = self._settings.reread
        if reread is None and not is_in_file(self._settings.options.policy):
            log.warning("%s: nothing to reload: the options came from the command line", self._settings.target)
            return "nothing to reload: the options came from the command line"
        try:
            if reread is not None:
                options, published = await trio.to_thread.run_sync(
                    linux.apart, read_apart, reread, abandon_on_cancel=True
                )
            else:
                options = self._settings.options
                published = as_json(options)
            self._refuse_what_takes_a_new_mount(options)
            linux.act_as_daemon()  # a plug-in's code runs
            policy = load_policy(options.policy, options, self._settings.policy_dir)
        except (MountError, PolicyError, OSError, RuntimeError) as exc:
            log.error("not reloaded, the old configuration stays in force: %s", exc)  # noqa: TRY400  (one line)
            self._published.not_reloaded(str(exc))
            return f"not reloaded, the old configuration stays in force: {exc}"
        await self._filesystem.views.use(policy)
        self._filesystem.reader.use(options.prefetch, options.prefetch_limits)
        self._filesystem.probing.use(options)
        self._filesystem.cache.reset()
        log.info("%s: reloaded", self._settings.target)
        self._log_exempt(options)
        self._published.reloaded(published)
        self._publish_rules()
        return f"reloaded; serving {self._settings.source} at {self._settings.target}"

    def _publish_rules(self) -> None:
        remembered = [asdict(fact) for fact in self._filesystem.cache.report()]
        self._published.rules(remembered, self._access(), self._numbers())

    def _numbers(self) -> str:
        """Return what is wrong with the numbers of objects; "" if nothing is."""
        trouble = self._index.trouble
        if trouble is None:
            return ""
        if self._settings.mount_options.export.is_exported:
            return f"cannot be stored, so that nothing can be made or looked up for the first time ({trouble})"
        return f"in memory, and lost when the daemon ends ({trouble})"

    def _access(self) -> str:
        words = self._settings.mount_options
        return who_checks(
            self._filesystem.views.any(),
            self._settings.options.groups,
            by_kernel=words.default_permissions,
            exported=words.export.is_exported,
            has_unseen=self._threads.has_unseen,
        )

    def _log_exempt(self, options: Options) -> None:
        if options.exempt:
            uids = ", ".join(map(str, options.exempt))
            log.warning("%s: nothing is hidden from server uid %s (exempt)", self._settings.target, uids)

    def _refuse_what_takes_a_new_mount(self, options: Options) -> None:
        """Refuse a reload that needs a new mount, so that half of a change is never in force.

        Raises:
            MountError: an option has changed that a running daemon cannot change.
        """
        now, target = self._settings.options, self._settings.target
        changed = [word for name, word in FIXED_BY_THE_MOUNT.items() if getattr(options, name) != getattr(now, name)]
        if changed:
            way_out = f"cloakfs umount {shell_word(target)}, and mount it again"
            raise MountError(f"{', '.join(changed)}: only a new mount can change this ({way_out})")
