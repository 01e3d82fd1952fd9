"""The guard outlives the daemons of a service: mounts, exports, watches, mounts again, takes down [TK §4.2].

A daemon that dies leaves a mount on which every operation fails at once (ENOTCONN), so that clients get an error and
never hang. The guard unmounts it, mounts again at the same place, and makes the server forget the old mount. File
handles stay valid, since nodeids and generations are kept. In between, nothing is exported, not even the real tree.
"""

import contextlib
import itertools
import json
import logging
import math
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import trio

from ..background import tasks
from ..background.backoff import backoff_seconds
from ..background.forkserver import ForkServer
from ..background.logfile import follow_rotation
from ..config.options import Export
from ..config.render import format_exports, format_options
from ..fuse.detach import KINDS, detach, detach_dead
from ..linux import mountinfo, ownfiles, sockets
from ..messages import shell_word
from ..plugin.loader import is_in_file
from ..state.runtime import Mounted, mounted, mounted_at
from ..tuning import STANDARD, Tuning
from . import knfsd, root, served, stale
from .ending import end, wait_for_end
from .plan import Mount, Plan, PlanChange, compare
from .server import NfsServer, ServerError

log = logging.getLogger(__name__)

VERSION = 1
"""The version of a guard's answers. The orders `status`, `reload` and `down`, and `pid` in the status, never change."""

RUN_DIR_PREFIX = "export-"
"""What comes before the name of a service in the name of its guard's directory."""

_RELOAD_SECONDS = 120.0
_ASK_AGAIN_SECONDS = 0.1
_END_STEPS = ((0, 0.5), (signal.SIGTERM, 2.0), (signal.SIGTERM, 5.0), (signal.SIGKILL, math.inf))
"""How long to wait for a daemon's end: first until its users have finished, then after a request to stop, after an
order to stop at once, and after killing it.

This does not cut off clients, which are cut off before, when the exports end. But the server may keep files open.
"""

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_MOUNTS_AT_ONCE = 4
_MOST_LAYERS = 10  # of mounts at one place


class _NotTakenOver(ServerError):
    """A plan could not be carried out; `left` has a line for each thing that is not as it was before."""

    def __init__(self, why: str, left: Sequence[str] = ()) -> None:
        super().__init__(why)
        self.left = list(left)


class NotMountedYet(ServerError):
    """An entry with `mp` waits for its disk."""


@dataclass(slots=True)
class Watched:
    """A mount, its daemon, and their state."""

    mount: Mount
    pid: int = 0
    since: float = 0.0  # seconds since the epoch
    restarts: int = 0
    problem: str | None = None
    is_awaited: bool = False  # its daemon has just died: clients wait for it to be mounted again
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)


class Guard:
    """The guard of one service.

    Args:
        plan: what to serve.
        reread: reads the configuration again and makes a new plan.
        server: exports the mounts.
        run_dir: the guard's own directory.
        cloakfs: runs the command `cloakfs`, for `cloakfs mount`.
        state_dir: the state directory of the server.
        log: the file to which standard error goes; None in the foreground.
        tuning: times and bounds.
    """

    def __init__(
        self,
        plan: Plan,
        reread: Callable[[], Plan],
        server: NfsServer,
        run_dir: str,
        cloakfs: ForkServer,
        state_dir: str = "",
        log: str | None = None,
        tuning: Tuning = STANDARD,
    ) -> None:
        self._tuning = tuning
        self._log = log
        self._state_dir = state_dir
        self._plan = plan
        self._reread = reread
        self._server = server
        self._run_dir = run_dir
        self._cloakfs = cloakfs
        self._watched: dict[str, Watched] = {}
        self._made_directories: set[str] = set()  # directories
        self._is_record_saved = True
        self._stat_checks = served.StatChecks()
        self._unexported_changes: list[Mount] | None = (
            None  # the mounts renewed since the server was configured last, if the last attempt failed
        )
        self._change = trio.Lock()
        self._end = trio.Event()
        self._server_problem: str | None = None
        self._bound: trio.SocketListener | None = None

    async def run(self, ready: Callable[[], None]) -> None:
        """Serve until an order to stop.

        Raises:
            ServerError: the service could not start, or an order to stop came while it started; nothing is left of it.
            OSError: likewise.
        """
        failure: Exception | None = ServerError("told to stop while it was starting; nothing of it is left")
        try:
            with trio.open_signal_receiver(*_SIGNALS) as signals:
                async with trio.open_nursery() as nursery:
                    self._tasks = tasks.Tasks(nursery)
                    # An order to stop is obeyed from the beginning, and what was mounted until then is unmounted.
                    self._tasks.supervise("handling signals", self._handle_signals, signals)
                    self._tasks.once("waiting for the end", self._cancel_at_end, nursery.cancel_scope)
                    try:
                        async with self._change:
                            await self._begin()
                        self._bound = self._bind()
                        for watched in self._watched.values():
                            self._start_watching(watched)
                        self._tasks.supervise("checking the server", self._check_server)
                        self._tasks.supervise("answering commands", self._listen)
                        ready()
                    except (ServerError, OSError) as exc:
                        failure = exc
                        self._end.set()
                    else:
                        failure = None
        finally:
            with trio.CancelScope(shield=True):
                await self._finish()
        if failure is not None:
            raise failure

    async def _cancel_at_end(self, scope: trio.CancelScope) -> None:
        await self._end.wait()
        scope.cancel()

    async def _begin(self) -> None:
        self._check_free(self._plan.mounts)
        # First of all, so that what a guard leaves that is killed from now on is known.
        self._save_record(self._plan.mounts)
        ownfiles.makedirs(self._plan.root, mode=0o755, exist_ok=True)
        await self._add(self._plan.mounts)
        self._save_record()
        await self._server.start(self._mounts())
        await self._wait_until_served(self._mounts())

    def _check_free(self, mounts: Sequence[Mount]) -> None:
        """Check that no other process serves a mount at the place of one of these.

        Raises:
            ServerError: another process does.
        """
        served_mounts = mounted()
        for mount in mounts:
            path = ownfiles.realpath(mount.path)
            daemon = served_mounts.get(path)
            if daemon is not None and daemon.policy_dir != self._run_dir:
                folder, base = os.path.split(daemon.policy_dir)
                if folder == os.path.dirname(self._run_dir) and base.startswith(
                    RUN_DIR_PREFIX
                ):  # it would mount it again
                    name = base.removeprefix(RUN_DIR_PREFIX)
                    hint = f"use another --root; cloakfs export down --name {name} ends that service"
                    raise ServerError(f"{path} is served already, by service {name} ({hint})")
                hint = f"cloakfs umount {shell_word(path)}"
                raise ServerError(f"{path} is served already, by process {daemon.pid} ({hint})")

    def _save_record(self, more: Iterable[Mount] = ()) -> None:
        """Record what there is to take down, for the command that does so if this guard is killed.

        Args:
            more: what may be there besides what is watched: mounts that are about to be made or unmounted.

        Raises:
            OSError: it cannot be written.
        """
        mounts = [*more, *(watched.mount for watched in self._watched.values())]
        made = {
            *self._made_directories,
            self._plan.root,
            *(mount.path for mount in mounts if not ownfiles.isdir(mount.path)),
        }
        stale.write(self._run_dir, self._plan.server, self._state_dir, mounts, made)

    def _try_to_save_record(self) -> None:
        """Record what there is now; until that succeeds, the record has this and more."""
        self._is_record_saved = False
        with contextlib.suppress(OSError):
            self._save_record()
            self._is_record_saved = True

    async def _finish(self) -> None:
        self._cloakfs.close()
        await tasks.attempt("stopping the server", self._server.stop)
        async with trio.open_nursery() as nursery:
            for watched in self._watched.values():
                nursery.start_soon(tasks.attempt, f"unmounting {watched.mount.path}", self._unmount, watched.mount)
        for path in (*self._made_directories, self._plan.root):
            with contextlib.suppress(OSError):  # others may use it, too
                ownfiles.rmdir(path)

    # -- mounts ------------------------------------------------------------------------------------

    async def _add(self, mounts: Sequence[Mount]) -> None:
        """Make these mounts. Those whose disk is not mounted (`mp`) wait for it.

        Raises:
            ServerError: one of the mounts cannot be made; the others are.
        """
        limit = trio.CapacityLimiter(_MOUNTS_AT_ONCE)
        failures: list[str] = []

        async def add(mount: Mount) -> None:
            async with limit:
                try:
                    self._watched[mount.name] = await self._mount(mount)
                except NotMountedYet as exc:
                    log.warning("%s", exc)
                    self._watched[mount.name] = Watched(mount, problem=str(exc))
                except (ServerError, OSError) as exc:
                    failures.append(str(exc))

        await self._clear_all(mounts)
        async with trio.open_nursery() as nursery:
            for mount in mounts:
                nursery.start_soon(add, mount)
        if failures:
            raise ServerError(failures[0])

    async def _clear_all(self, mounts: Iterable[Mount]) -> None:
        """Unmount what is at the places of these mounts; clients wait until the next `NfsServer.change`.

        That must be all of it at once: when the server learns of one, it learns of what is at the other places.

        Raises:
            ServerError: something else is mounted there.
            OSError: a daemon does not end.
        """
        failures: list[Exception] = []

        async def clear(path: str) -> None:
            try:
                await _clear(path, self._server.hold)
            except (ServerError, OSError) as exc:
                failures.append(exc)

        async with trio.open_nursery() as nursery:
            for mount in mounts:
                nursery.start_soon(clear, mount.path)
        if failures:
            raise failures[0]

    async def _mount(self, mount: Mount) -> Watched:
        if mount.condition is not None:
            place = await trio.to_thread.run_sync(ownfiles.realpath, mount.condition)
            if place not in mountinfo.by_path():
                raise NotMountedYet(f"{mount.path}: waits for something to be mounted on {mount.condition} (mp)")
        self._write_entry(mount)
        await _clear(mount.path, self._server.hold)
        if not ownfiles.isdir(mount.path):
            ownfiles.mkdir(mount.path, 0o755)
            self._made_directories.add(mount.path)
        # This must not be cancelled half-way, because the daemon is an orphan as soon as it has started.
        with trio.CancelScope(shield=True):
            return await self._run_mount(mount)
        raise AssertionError("nothing cancels it")

    async def _run_mount(self, mount: Mount) -> Watched:
        with stale.mounting(self._run_dir) as held:
            arguments = ["mount", mount.source, mount.path, "-o", self._mount_options(mount)]
            arguments += ["--client", mount.client, "--exports", self._entry_file(mount)]
            done = await self._cloakfs.run(arguments, (held,))
        if done.status != 0:
            said = done.said.strip().splitlines()
            raise ServerError(said[-1].removeprefix("cloakfs: ") if said else f"{mount.path}: not mounted")
        daemon = self._daemon(mount)
        if daemon is None:
            raise ServerError(f"{mount.path}: its daemon ended at once")
        return Watched(mount, daemon.pid, time.time())

    def _mount_options(self, mount: Mount) -> str:
        words: list[str] = [self._plan.server]
        if self._plan.server == "knfsd":
            words += ["all_squashed"] * (root.single_identity(mount.options) is not None)
            words += ["subtree_checked"] * root.checks_subtree(mount.options)
        words += ["local_locks"] * self._server.wants_local_locks()
        return ",".join(words)

    @staticmethod
    def _daemon(mount: Mount) -> Mounted | None:
        return mounted_at(ownfiles.realpath(mount.path))

    def _entry_file(self, mount: Mount) -> str:
        return os.path.join(self._run_dir, f"{mount.name}.exports")

    def _write_entry(self, mount: Mount) -> None:
        """Write the file that the daemon reads, now and on a reload: it never reads an entry that was not checked."""
        text = format_exports([Export(mount.source, mount.client, mount.options, mount.location)])
        ownfiles.replace(self._entry_file(mount), text.encode("utf-8", "surrogateescape"))

    async def _unmount(self, mount: Mount) -> None:
        try:
            await _clear(mount.path)
        except (ServerError, OSError) as exc:
            log.error("%s", exc)  # noqa: TRY400  (one line)
        self._remove_files(mount)

    def _remove_files(self, mount: Mount) -> None:
        """Remove what was made for a mount that is unmounted now."""
        with contextlib.suppress(OSError):
            ownfiles.unlink(self._entry_file(mount))
        if mount.path in self._made_directories:
            self._made_directories.discard(mount.path)
            with contextlib.suppress(OSError):
                ownfiles.rmdir(mount.path)

    def _start_watching(self, watched: Watched) -> None:
        self._tasks.once(f"watching {watched.mount.path}", self._watch, watched)

    async def _watch(self, watched: Watched) -> None:
        with watched.scope:
            await tasks.supervise(f"watching {watched.mount.path}", self._remount_on_death, watched)

    async def _remount_on_death(self, watched: Watched) -> None:
        """Mount again whenever the daemon has died, and retry until this succeeds."""
        while True:
            if watched.problem is None:
                await wait_for_end(watched.pid)
                # At once: until then, each request of a client fails, and what it would have written is lost.
                await trio.to_thread.run_sync(detach_dead, watched.mount.path)
                await self._server.hold()
                watched.problem, watched.is_awaited = "its daemon died; it is being mounted again", True
                log.warning("%s: %s", watched.mount.path, watched.problem)
            failures = itertools.count()
            while watched.problem:
                await trio.sleep(backoff_seconds(next(failures)))
                async with self._change:
                    if watched.problem:  # not mounted meanwhile, together with another one
                        await self._mount_again(watched)

    async def _mount_again(self, watched: Watched) -> None:
        """Mount this again, and all others whose daemons have died just now, before the server exports any.

        What clients hold of several mounts, they can claim at once only if all of these are there.
        """
        limit = trio.CapacityLimiter(_MOUNTS_AT_ONCE)
        made: list[Watched] = []

        async def mount(one: Watched) -> None:
            async with limit:
                try:
                    again = await self._mount(one.mount)
                except (ServerError, OSError) as exc:
                    _note_failure(one, exc)
                    return
            one.restarts += one.pid != 0
            one.pid, one.since, one.is_awaited = again.pid, again.since, False
            made.append(one)

        dead = [watched]
        while dead:
            async with trio.open_nursery() as nursery:
                for one in {id(one): one for one in (*dead, *self._awaited())}.values():
                    nursery.start_soon(mount, one)
            dead = self._awaited()  # meanwhile
        mounts = [one.mount for one in made]
        try:
            # While an export has no mount, its clients wait; those of what could not be mounted get an error.
            await self._server.change(self._mounts(*mounts), mounts)
        except ServerError as exc:
            for one in made:
                _note_failure(one, exc)
            return
        for one in made:
            one.problem = None
        try:
            await self._wait_until_served(mounts)
            for again in mounts:
                log.info("%s: served again", again.path)
        except ServerError as exc:
            log.error("%s", exc)  # noqa: TRY400  (one line)

    def _awaited(self) -> list[Watched]:
        return [watched for watched in self._watched.values() if watched.is_awaited]

    def _mounts(self, *more: Mount) -> list[Mount]:
        """Return what to export now: what is there, what clients wait for, and these mounts."""
        return [
            watched.mount
            for watched in self._watched.values()
            if watched.mount in more or not watched.problem or watched.is_awaited
        ]

    async def _check_server(self) -> None:
        while True:
            await trio.sleep(self._tuning.guard_seconds)
            if self._log is not None:
                follow_rotation(self._log)
            async with self._change:
                if not self._is_record_saved:
                    self._try_to_save_record()
                try:
                    if self._unexported_changes is not None:
                        await self._export_current(self._unexported_changes)
                    said = await self._server.repair()
                    if said:
                        log.warning("%s", said)
                    self._server_problem = None
                except ServerError as exc:
                    if str(exc) != self._server_problem:
                        log.error("%s", exc)  # noqa: TRY400  (one line)
                    self._server_problem = str(exc)

    # -- reload ------------------------------------------------------------------------------------

    async def _reload(self) -> dict[str, Any]:
        """Serve what the configuration now says; if anything is wrong with it, change nothing."""
        async with self._change:
            try:
                new = await trio.to_thread.run_sync(self._reread)
            except OSError as exc:
                return {"errors": [f"{exc.filename}: {exc.strerror}"], "status": 1}
            if new.problems:
                return {"errors": [str(problem) for problem in new.problems], "status": 2}
            try:
                with trio.CancelScope(shield=True):  # an order to stop waits until there is one state again
                    changes = await self._take_over(new)
            except _NotTakenOver as exc:
                log.error("reload: %s", exc)  # noqa: TRY400  (one line)
                return {"errors": [str(exc)], "status": 1, "left": exc.left}
            log.info("reloaded")
            return {"errors": [], "warnings": [str(warning) for warning in new.warnings], **changes}

    async def _take_over(self, new: Plan) -> dict[str, list[str]]:
        """Serve another plan. Whatever fails, what was done until then is undone.

        Raises:
            _NotTakenOver: the plan cannot be served; the old one is, except for what the exception names.
        """
        before = {name: (watched, watched.mount) for name, watched in self._watched.items()}
        running = {name for name, watched in self._watched.items() if watched.pid}
        change = compare({name: mount for name, (_, mount) in before.items()}, new.mounts, running)
        read: list[Mount] = []
        try:
            self._check_free(change.added)
        except (ServerError, OSError) as exc:
            raise _NotTakenOver(str(exc)) from exc
        try:
            await self._change_mounts(change)
            await self._export_current(change.renewed)
            await self._wait_until_served([mount for mount in self._mounts() if mount.path in change.changed])
            for mount in change.removed:
                await _clear(mount.path)
            # What was in the file of a plug-in is not there any more to be read again: so this comes last.
            for mount in change.reread:
                await self._reload_daemon(self._watched[mount.name], mount)
                read.append(mount)
        except Exception as exc:
            # After unforeseen exceptions, too: a state in between belongs to no configuration.
            why = str(exc) if isinstance(exc, (ServerError, OSError)) else tasks.cause(exc)
            raise _NotTakenOver(why, await self._roll_back(before, change.added, read)) from exc
        for mount in change.removed:
            self._remove_files(mount)
        for mount in (*change.added, *change.renewed):
            self._start_watching(self._watched[mount.name])
        self._plan = new
        self._try_to_save_record()
        live = {mount.name for mount in (*change.reloaded, *change.reread)}
        return {
            "added": [mount.path for mount in change.added],
            "removed": [mount.path for mount in change.removed],
            "changed": [mount.path for mount in new.mounts if mount.name in live],
            "renewed": [mount.path for mount in change.renewed],
        }

    async def _change_mounts(self, change: PlanChange) -> None:
        """Make, reload and renew mounts, and stop watching those that go. The server learns of it afterwards.

        Raises:
            ServerError: something failed; what was done until then is left as it is.
            OSError: likewise.
        """
        self._save_record(change.added)
        await self._add(change.added)
        for mount in change.reloaded:
            await self._reload_daemon(self._watched[mount.name], mount)
        # The server must not pass several callers on to a mount that takes them for one, or unchecked requests on to
        # one that relies on the check, not even for a moment.
        if change.withdrawn:
            await self._server.change([mount for mount in self._mounts() if mount not in change.withdrawn], [])
        for mount in change.renewed:
            self._watched[mount.name].scope.cancel()
        await self._clear_all(change.renewed)
        for mount in change.renewed:
            await self._renew(mount)
        for mount in change.removed:
            self._watched.pop(mount.name).scope.cancel()

    async def _export_current(self, renewed: Sequence[Mount]) -> None:
        """Have the server export what there is now; if that fails, it is tried again whenever the server is checked."""
        self._unexported_changes = [*(self._unexported_changes or ()), *renewed]
        await self._server.change(self._mounts(), self._unexported_changes)
        self._unexported_changes = None

    async def _roll_back(
        self, before: Mapping[str, tuple[Watched, Mount]], added: Sequence[Mount], read: Sequence[Mount]
    ) -> list[str]:
        """Serve again what was served before; return one line for each thing that is not as it was.

        Args:
            before: what was watched, by name, each with the mount that it was then.
            added: what has come since, as far as it was made.
            read: what has read its plug-in again, and has the same options as before.
        """
        left = [_keeps_plugin(mount) for mount in read]
        again: list[Mount] = []
        touched = [name for name, (watched, _) in before.items() if watched.scope.cancel_called]
        for name, (watched, mount) in before.items():
            if watched.mount != mount:
                left += await self._restore_options(watched, mount)
            self._watched[name] = watched
            if watched.scope.cancel_called:
                self._watched[name], problem = await self._restore_mount(watched, mount)
                if self._watched[name].pid != watched.pid:
                    again.append(mount)
                left += problem
        for mount in added:
            self._watched.pop(mount.name, None)
        try:
            await self._export_current(again)
            await self._wait_until_served([mount for mount in self._mounts() if mount in again])
        except Exception as exc:
            left.append(f"{exc} (it is tried again every {self._tuning.guard_seconds:g} s)")
        for mount in added:
            await self._unmount(mount)
        for name in touched:
            self._start_watching(self._watched[name])
        self._try_to_save_record()
        return left

    async def _restore_mount(self, watched: Watched, mount: Mount) -> tuple[Watched, list[str]]:
        """Return the old mount with a new watcher's scope, made again unless it is still there; and what is wrong."""
        daemon = self._daemon(mount)
        # A daemon that has been unmounted lives on for a while.
        devices = [place.device for place in mountinfo.by_id().values() if place.path == ownfiles.realpath(mount.path)]
        if daemon is not None and daemon.pid == watched.pid and daemon.device in devices[-1:]:
            return replace(watched, scope=trio.CancelScope()), []
        try:
            made = await self._mount(mount)
        except NotMountedYet as exc:
            return replace(watched, pid=0, problem=str(exc), is_awaited=False, scope=trio.CancelScope()), []
        except Exception as exc:
            problem = str(exc)
            return (
                replace(watched, pid=0, problem=problem, is_awaited=False, scope=trio.CancelScope()),
                [f"{mount.path} is not there again yet, and is tried again: {problem}"],
            )
        return (
            replace(watched, pid=made.pid, since=made.since, problem=None, is_awaited=False, scope=trio.CancelScope()),
            [],
        )

    async def _restore_options(self, watched: Watched, before: Mount) -> list[str]:
        """Make a daemon reload its previous options; return a line if they may have changed nevertheless."""
        try:
            await self._reload_daemon(watched, before)
        except Exception as exc:
            watched.mount = before  # when it is mounted again
            with contextlib.suppress(OSError):
                self._write_entry(before)
            return [f"{before.path} may keep the new options until it is mounted again ({exc})"]
        return [_keeps_plugin(before)] if is_in_file(before.options.policy) else []

    async def _reload_daemon(self, old: Watched, mount: Mount) -> None:
        before = self._daemon(mount)
        if before is None:
            raise ServerError(f"{mount.path}: {old.problem or 'its daemon has just died'}; try again")
        if before.unknown:
            raise ServerError(f"{mount.path}: {before.unknown}, or cloakfs export down and up")
        self._write_entry(mount)
        try:
            os.kill(before.pid, signal.SIGHUP)
        except OSError:
            self._write_entry(old.mount)
            raise
        with trio.move_on_after(_RELOAD_SECONDS):
            while True:
                now = self._daemon(mount)
                if now is not None and now.pid == before.pid and now.asked > before.asked:
                    break
                await trio.sleep(0.02)
            if now.failure is None:
                old.mount = mount
                return
            self._write_entry(old.mount)
            raise ServerError(f"{mount.path}: {now.failure}")
        self._write_entry(old.mount)
        raise ServerError(f"{mount.path}: its daemon did not reload within {_RELOAD_SECONDS:g} s")

    async def _renew(self, mount: Mount) -> None:
        """Make a mount in the place of one with other options; `_take_over` starts to watch it.

        Raises:
            ServerError: it cannot be mounted; the old one is gone.
            OSError: likewise.
        """
        try:
            self._watched[mount.name] = await self._mount(mount)
        except NotMountedYet as exc:
            self._watched[mount.name] = Watched(mount, 0, time.time(), problem=str(exc))

    # -- what is served now ------------------------------------------------------------------------

    async def _find_problems(self, mounts: Sequence[Mount]) -> served.ServiceProblems:
        """Ask the server, and what it exports, whether these mounts are served at this moment."""
        silent = await self._stat_checks.find_problems(mount.path for mount in mounts)
        try:
            # Each request for what does not answer would keep one of the server's threads.
            answers = await self._server.find_problems([mount for mount in mounts if mount.path not in silent])
        except (ServerError, OSError) as exc:
            answers = served.ServiceProblems(f"it cannot be asked: {exc}")
        return served.ServiceProblems(answers.server, {**answers.mounts, **silent})

    async def _wait_until_served(self, mounts: Sequence[Mount]) -> None:
        """Return when all these mounts are served.

        Raises:
            ServerError: one of them is not, or not soon enough.
        """
        deadline = trio.current_time() + self._tuning.served_seconds
        while True:
            answers = await self._find_problems(mounts)
            said = [answers.server] if answers.server else [f"{path}: {why}" for path, why in answers.mounts.items()]
            if not said:
                return
            if trio.current_time() > deadline:
                raise ServerError(said[0])
            await trio.sleep(_ASK_AGAIN_SECONDS)

    # -- orders ------------------------------------------------------------------------------------

    async def _handle_signals(self, signals: AsyncIterator[int]) -> None:
        async for number in signals:
            if number == signal.SIGHUP:
                answer = await self._reload()
                for text in answer["errors"]:
                    log.error("not reloaded, the old configuration stays in force: %s", text)
            else:
                self._end.set()

    def _bind(self) -> trio.SocketListener:
        listener = sockets.listen(control_path(self._run_dir), backlog=5)
        return trio.SocketListener(trio.socket.from_stdlib_socket(listener))

    async def _listen(self) -> None:
        """Answer orders, one word per connection, with a line of JSON."""
        listener, self._bound = self._bound or self._bind(), None
        await trio.serve_listeners(self._answer, [listener])

    async def _answer(self, stream: trio.SocketStream) -> None:
        await tasks.attempt("answering a command", self._answer_order, stream)

    async def _answer_order(self, stream: trio.SocketStream) -> None:
        with contextlib.suppress(trio.BrokenResourceError):
            async with stream:
                order = (await stream.receive_some(100)).decode("ascii", "replace").strip()
                match order:
                    case "status":
                        answer = await self.status()
                    case "reload":
                        answer = await self._reload()
                    case "down":
                        answer = {"errors": []}
                    case _:
                        answer = {"errors": [f"{order}: no such command"]}
                await stream.send_all(json.dumps({"version": VERSION, **answer}).encode() + b"\n")
                if order == "down":
                    self._end.set()

    async def status(self) -> dict[str, Any]:
        """Return the state of the server and the mounts, ready for JSON. All of them are asked now."""
        answers = await self._find_problems(
            [watched.mount for watched in self._watched.values() if not watched.problem]
        )
        daemons = await trio.to_thread.run_sync(mounted)
        return {
            "pid": os.getpid(),
            "server": self._plan.server,
            **_problem(answers.server or self._server_problem),
            "mounts": [
                {
                    "path": watched.mount.path,
                    "client": watched.mount.client,
                    "source": watched.mount.source,
                    "views": watched.mount.kind,
                    "options": format_options(watched.mount.options),
                    "pid": watched.pid,
                    "since": watched.since,
                    "restarts": watched.restarts,
                    "locks": _where_locks_hold(watched.mount, daemons),
                    **_problem(watched.problem or answers.mounts.get(watched.mount.path)),
                }
                for watched in sorted(self._watched.values(), key=lambda watched: watched.mount.path)
            ],
            "warnings": [*map(str, self._plan.warnings), *self._server.notes()],
        }


def _problem(problem: str | None) -> dict[str, str | None]:
    """Return what is wrong, ready for JSON: also as `complaint`, which scripts and earlier versions read."""
    return {"problem": problem, "complaint": problem}


def _where_locks_hold(mount: Mount, daemons: Mapping[str, Mounted]) -> str:
    """Return in words where the locks of its clients hold, as its daemon says; "" if there is none."""
    daemon = daemons.get(ownfiles.realpath(mount.path))
    return "" if daemon is None else daemon.locks


def control_path(run_dir: str) -> str:
    """Return the socket on which the guard of the service with this directory takes orders."""
    return os.path.join(run_dir, "control")


def _keeps_plugin(mount: Mount) -> str:
    return f"{mount.path} keeps the plug-in that it has read again"


def _note_failure(watched: Watched, exc: Exception) -> None:
    """Note why this could not be mounted again, and let its clients wait no longer."""
    watched.is_awaited = False
    if str(exc) != watched.problem:
        watched.problem = str(exc)
        log.error("%s", exc)


async def _clear(path: str, hold: Callable[[], Awaitable[None]] | None = None) -> None:
    """Unmount what a daemon or an earlier guard left at `path`, which may not answer.

    Args:
        path: the mount point.
        hold: called when it is unmounted, while its daemon still answers those who have files of it open.

    Raises:
        ServerError: something else is mounted there.
    """
    daemon = mounted_at(path)
    for _ in range(_MOST_LAYERS):
        kind = mountinfo.by_path().get(path)
        if kind is None:
            break
        if kind not in KINDS:
            raise ServerError(f"{path}: another file system ({kind}) is mounted there; umount it, or use --root")
        await trio.to_thread.run_sync(detach, path)
        if hold is not None:
            await hold()
    if daemon is not None:
        await end(daemon.pid, _END_STEPS)


async def take_down(run_dir: str, following: Iterable[Mount] = ()) -> list[Mount]:
    """End what is left of a service whose guard was killed: its exports, then its mounts and their daemons.

    Args:
        run_dir: the guard's directory.
        following: what the kernel's server is going to export next. What it exports already, it goes on exporting, so
            that clients wait for the new mount. Without an export, they would get ESTALE, and give up what they hold.

    Returns:
        those of these mounts that are still exported.

    Raises:
        ServerError: something else is mounted on top of a mount, or it is unknown what there is to end.
    """
    record = stale.read(run_dir)
    await stale.wait_for_mounting(run_dir)
    still_exported: list[Mount] = []
    if record is not None:
        if record.server == "knfsd":
            still_exported = [mount for mount in following if (mount.path, mount.client) in record.exports]
        await stale.end_server(record, [(mount.path, mount.client) for mount in still_exported])
    daemons = {path for path, daemon in mounted().items() if daemon.policy_dir == run_dir}
    for path in sorted(daemons.union(record.paths if record else ())):
        await _clear(path, knfsd.hold if still_exported else None)
    still_exported = await knfsd.export_unmounted(still_exported)
    if record is not None:
        stale.remove_directories(record)
    return still_exported
