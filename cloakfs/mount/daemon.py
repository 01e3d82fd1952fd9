"""The daemon of one mount: it starts, serves, and stops.

`start` has the steps of the start, `reload` what SIGHUP does, `housekeeping` the regular work, and `publication` what
other processes can find out.
"""

import contextlib
import faulthandler
import logging
import os
import resource
import signal
from collections.abc import AsyncIterator, Callable

import pyfuse3
import trio

from .. import linux
from ..accounts.threadstatus import ThreadStatus
from ..background.systemd import Supervisor
from ..background.tasks import Tasks
from ..filesystem import Filesystem
from ..fuse import compatibility, connection, loop
from ..fuse.attach import Attached, MountError
from ..linux import filelocks
from ..state.runtime import STATE_DIR, mount_key
from . import start, watching
from .control import Control
from .housekeeping import Housekeeping
from .publication import Publisher
from .reaper import ENDED, FAILED, READY
from .reload import Reloader, log_exempt
from .settings import Settings

log = logging.getLogger(__name__)

STILL_IN_USE = "still in use"
"""What the log says of a mount that is cut off because it did not end in time."""

_READ_AHEAD_KIB = 1024  # as much as one request reads at most


def serve(settings: Settings, ready: Callable[[], None]) -> None:
    """Mount and serve until the mount is unmounted, or a signal ends this.

    Args:
        settings: what to mount, and where.
        ready: called once the mount answers.

    Raises:
        MountError: the mount could not be made.
    """
    compatibility.check()
    filelocks.allow_interrupts()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    supervisor = Supervisor(listens=settings.supervised)
    key = mount_key(settings.source, settings.target)
    state = os.path.join(STATE_DIR, key)
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, start.lock_state(settings, key, state))
        index, nodes, views = start.open_tree(settings, state, most, stack)
        start.warn_of_handles(nodes)
        threads = ThreadStatus()
        filesystem = start.make_filesystem(settings, nodes, views, threads, stack, most)
        watching.announce(filesystem, stack)
        watching.watch_changes(filesystem)
        reaper = start.start_reaper(settings, key)
        if reaper is not None:
            stack.callback(reaper.close)
        start.write_record(settings, state)
        attached, published, control = start.attach_filesystem(settings, key, state, filesystem, index, reaper, stack)
        stack.enter_context(start.late_answers_unlogged(attached.session))
        abort = start.open_abort(attached, stack)
        published.lacking(start.raise_limits(attached.device))
        start.give_up_privileges()
        publisher = Publisher(settings, filesystem, index, published, threads)
        reloader = Reloader(settings, filesystem, published, publisher, supervisor)
        housekeeping = Housekeeping(settings, filesystem, index, publisher)
        report = reaper.report if reaper is not None else lambda _: None
        daemon = MountDaemon(
            settings, filesystem, control, attached, reloader, housekeeping, publisher, supervisor, ready, report
        )
        try:
            _run(daemon)
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


class MountDaemon:
    """Serves one mount until it is unmounted, or a signal ends it.

    Args:
        settings: of the mount.
        filesystem: its operations.
        control: its control socket.
        attached: the mount itself.
        reloader: reloads its options.
        housekeeping: the regular work.
        publisher: publishes facts about the mount.
        supervisor: notifies systemd.
        ready: called once the mount answers.
        report: reports to the reaper.
    """

    def __init__(
        self,
        settings: Settings,
        filesystem: Filesystem,
        control: Control,
        attached: Attached,
        reloader: Reloader,
        housekeeping: Housekeeping,
        publisher: Publisher,
        supervisor: Supervisor,
        ready: Callable[[], None],
        report: Callable[[str], None],
    ) -> None:
        self._settings = settings
        self._filesystem = filesystem
        self._control = control
        self._attached = attached
        self._reloader = reloader
        self._housekeeping = housekeeping
        self._publisher = publisher
        self._supervisor = supervisor
        self._ready = ready
        self._report = report
        self._is_stopping = False

    async def run(self) -> None:
        """Answer requests until the end, with all background tasks beside.

        Raises:
            MountError: the mount does not answer.
        """
        async with trio.open_nursery() as nursery:
            filesystem, tuning = self._filesystem, self._settings.tuning
            tasks = filesystem.tasks = filesystem.relookup.tasks = filesystem.reader.tasks = Tasks(nursery)
            # A further signal while the daemon ends must not keep it from cleaning up.
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
            with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals:
                tasks.supervise("handling signals", self._handle_signals, signals, tasks)
                tasks.supervise("reloading", self._reloader.run)
                nursery.start_soon(self._report_ready)  # not supervised: a mount that fails here was not made
                tasks.supervise("regular maintenance", self._housekeeping.run)
                tasks.supervise("making nodeids durable", self._housekeeping.each_second)
                cache, views = filesystem.cache, filesystem.views
                tasks.supervise(
                    "watching the user database", views.follow_user_database, cache.reset, tuning.view_seconds
                )
                cache.run(tasks)
                tasks.supervise("dropping what the kernel forgot", filesystem.references.run)
                tasks.supervise("recalling delegations", filesystem.recalls.run)
                tasks.supervise("counting probes", filesystem.probing.run)
                tasks.supervise("searching for files", filesystem.search.run)
                tasks.supervise("answering commands", self._control.serve, tasks)
                if (seconds := self._supervisor.watchdog_seconds) is not None:
                    tasks.supervise("showing systemd that it answers", self._feed_watchdog, seconds)
                await self._answer_requests()
                nursery.cancel_scope.cancel()

    async def _answer_requests(self) -> None:
        try:
            await loop.serve(stock=self._settings.tuning.stock_loop)
        except* ConnectionAbortedError:
            # The session ended while a request was being read. The kernel then returns ECONNABORTED, but pyfuse3 treats
            # only ENODEV as the end. No process waits for an answer any more.
            log.debug("%s: the session ended in the middle of a request", self._settings.target)

    async def _report_ready(self) -> None:
        settings = self._settings
        await trio.to_thread.run_sync(linux.apart, self._filesystem.self_probe.check, abandon_on_cancel=True)
        if settings.mount_options.export_mode.is_exported:
            self._read_further_ahead()
        self._publisher.rules()
        log.info("%s: serving %s", settings.target, settings.source)
        log.info("%s: access is %s", settings.target, self._publisher.access())
        log_exempt(settings.target, settings.options)
        restarts = settings.mount_options.restarts
        if restarts:
            log.warning("%s: mounted again, as its daemon had died (restart %d)", settings.target, restarts)
        self._report(READY)  # first: who sees the mount may rely on its being mounted again
        self._ready()
        self._supervisor.ready(f"serving {settings.source} at {settings.target}")

    def _read_further_ahead(self) -> None:
        """Have the kernel read more ahead: a server reads in pieces, and waits for each that is not there."""
        try:
            connection.set_read_ahead(self._attached.device, _READ_AHEAD_KIB)
        except OSError as exc:
            log.info("%s: the kernel reads no more than 128 KiB ahead (%s)", self._settings.target, exc)

    async def _feed_watchdog(self, seconds: float) -> None:
        """Notify systemd, as often as it expects that, that a request was answered; a loop that hangs does not.

        Where something else is mounted on top, no request reaches the mount. Then it is enough that this runs.
        """
        while True:
            if self._attached.is_on_top():
                await trio.to_thread.run_sync(linux.apart, self._filesystem.self_probe.ping, abandon_on_cancel=True)
            self._supervisor.alive()
            await trio.sleep(seconds)

    # -- stopping ----------------------------------------------------------------------------------

    async def _handle_signals(self, signals: AsyncIterator[int], tasks: Tasks) -> None:
        async for number in signals:
            if number == signal.SIGHUP:
                self._reloader.request()
            elif self._is_stopping:
                log.info("%s: asked to stop again; ending at once", self._settings.target)
                pyfuse3.terminate()
            else:
                self._is_stopping = True
                self._report(ENDED)
                self._supervisor.stopping()
                log.info("%s: asked to stop", self._settings.target)
                tasks.supervise("stopping", self._stop)

    async def _stop(self) -> None:
        if self._attached.has_ended():
            return  # it was unmounted otherwise
        # This runs in a thread, because the kernel may first have to write back pages through this very loop.
        await trio.to_thread.run_sync(linux.apart, self._attached.detach)
        seconds = self._settings.tuning.stop_seconds
        await trio.sleep(seconds)
        log.warning("%s: %s after %g s", self._settings.target, STILL_IN_USE, seconds)
        pyfuse3.terminate()
