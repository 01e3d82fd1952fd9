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
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import trio

from .. import files, tasks
from ..config.options import Export, Options
from ..config.render import format_exports, format_options
from ..linux import mountinfo
from ..logfile import follow_rotation
from ..mounted import Mounted, mounted
from ..pauses import pause
from ..policy import is_in_file
from ..unmount import KINDS, detach
from . import leftover, root
from .ending import end, wait_for_end
from .plan import Mount, Plan
from .server import Server, ServerError

log = logging.getLogger(__name__)

VERSION = 1
"""The version of a guard's answers. The orders `status`, `reload` and `down`, and `pid` in the status, never change."""

_CHECK_SECONDS = 5.0
_RELOAD_SECONDS = 30.0
_END_STEPS = ((0, 0.5), (signal.SIGTERM, 2.0), (signal.SIGTERM, 5.0), (signal.SIGKILL, math.inf))
"""How long to wait for a daemon's end: first until its users have finished, then after a request to stop, after an
order to stop at once, and after killing it.

This does not cut off clients, which are cut off before, when the exports end. But the server may keep files open.
"""

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_MOUNTS_AT_ONCE = 4
_MOST_LAYERS = 10  # of mounts at one place

# The options that a daemon applies on a reload; any other change needs a new mount.
_RELOADABLE = (
    "range_map", "cloak_list", "exempt", "policy", "squash", "anonuid", "anongid", "prefetch", "prefetch_limits",
    "probe_alarm", "probe_delay", "other",
)  # fmt: skip


class NotMountedYet(ServerError):
    """An entry with `mp` waits for its disk."""


@dataclass(slots=True)
class Watched:
    """A mount, its daemon, and their state."""

    mount: Mount
    pid: int = 0
    since: float = 0.0  # seconds since the epoch
    restarts: int = 0
    complaint: str | None = None
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)


class Guard:
    """The guard of one service.

    Args:
        plan: what to serve.
        reread: reads the configuration again and makes a new plan.
        server: exports the mounts.
        run_dir: the guard's own directory.
        mount_command: the command `cloakfs mount`.
        state_dir: the state directory of the server.
        log: the file to which standard error goes; None in the foreground.
    """

    def __init__(
        self,
        plan: Plan,
        reread: Callable[[], Plan],
        server: Server,
        run_dir: str,
        mount_command: Sequence[str],
        state_dir: str = "",
        log: str | None = None,
    ) -> None:
        self._log = log
        self._state_dir = state_dir
        self._plan = plan
        self._reread = reread
        self._server = server
        self._run_dir = run_dir
        self._mount_command = mount_command
        self._watched: dict[str, Watched] = {}
        self._made: set[str] = set()  # directories
        self._change = trio.Lock()
        self._end = trio.Event()
        self._server_complaint: str | None = None
        self._bound: trio.SocketListener | None = None

    async def run(self, ready: Callable[[], None]) -> None:
        """Serve until an order to stop.

        Raises:
            ServerError: the service could not start; nothing is left of it.
        """
        try:
            await self._begin()
            self._bound = self._bind()
            with trio.open_signal_receiver(*_SIGNALS) as signals:
                async with trio.open_nursery() as nursery:
                    self._tasks = tasks.Tasks(nursery)
                    for watched in self._watched.values():
                        self._start_watching(watched)
                    self._tasks.keep("checking the server", self._check_server)
                    self._tasks.keep("answering commands", self._listen)
                    self._tasks.keep("handling signals", self._obey, signals)
                    ready()
                    await self._end.wait()
                    nursery.cancel_scope.cancel()
        finally:
            with trio.CancelScope(shield=True):
                await self._finish()

    async def _begin(self) -> None:
        wanted = {os.path.realpath(mount.path) for mount in self._plan.mounts}
        for path, daemon in mounted().items():
            if daemon.policy_dir == self._run_dir:  # an earlier guard of this service was killed
                await _clear(path)
            elif path in wanted:
                raise ServerError(f"{path} is served already, by process {daemon.pid} (cloakfs umount {path})")
        os.makedirs(self._plan.root, mode=0o755, exist_ok=True)
        await self._add(self._plan.mounts)
        self._write_down()
        await self._server.start(self._mounts())

    def _write_down(self, *before: Mount) -> None:
        """Record what there is to take down, for the command that does so if this guard is killed."""
        mounts = [*before, *(watched.mount for watched in self._watched.values())]
        leftover.write(self._run_dir, self._plan.server, self._state_dir, mounts, self._made)

    async def _finish(self) -> None:
        await tasks.attempt("stopping the server", self._server.stop)
        async with trio.open_nursery() as nursery:
            for watched in self._watched.values():
                nursery.start_soon(tasks.attempt, f"unmounting {watched.mount.path}", self._unmount, watched.mount)
        with contextlib.suppress(OSError):  # others may use it, too
            os.rmdir(self._plan.root)

    # -- mounts ------------------------------------------------------------------------------------

    async def _add(self, mounts: Sequence[Mount]) -> None:
        """Make all of these mounts, or none. Those whose disk is not mounted (`mp`) wait for it.

        Raises:
            ServerError: one of the mounts cannot be made.
        """
        limit = trio.CapacityLimiter(_MOUNTS_AT_ONCE)
        failures: list[str] = []

        async def add(mount: Mount) -> None:
            async with limit:
                try:
                    self._watched[mount.name] = await self._mount(mount)
                except NotMountedYet as exc:
                    log.warning("%s", exc)
                    self._watched[mount.name] = Watched(mount, complaint=str(exc))
                except (ServerError, OSError) as exc:
                    failures.append(str(exc))

        async with trio.open_nursery() as nursery:
            for mount in mounts:
                nursery.start_soon(add, mount)
        if failures:
            for mount in mounts:
                self._watched.pop(mount.name, None)
                await self._unmount(mount)
            raise ServerError(failures[0])

    async def _mount(self, mount: Mount) -> Watched:
        if mount.condition is not None:
            place = await trio.to_thread.run_sync(os.path.realpath, mount.condition)
            if place not in mountinfo.by_path():
                raise NotMountedYet(f"{mount.path}: waits for something to be mounted on {mount.condition} (mp)")
        self._write_entry(mount)
        await _clear(mount.path)
        if not os.path.isdir(mount.path):
            os.mkdir(mount.path, 0o755)
            self._made.add(mount.path)
        # This must not be cancelled half-way, because the daemon is an orphan as soon as it has started.
        with trio.CancelScope(shield=True):
            return await self._run_mount(mount)
        raise AssertionError("nobody cancels it")

    async def _run_mount(self, mount: Mount) -> Watched:
        done = await trio.run_process(
            [*self._mount_command, mount.source, mount.path, "-o", self._mount_options(mount),
             "--client", mount.client, "--exports", self._entry_file(mount)],
            capture_stdout=True, capture_stderr=True, check=False,
        )  # fmt: skip
        if done.returncode:
            said = done.stderr.decode("utf-8", "replace").strip().splitlines()
            raise ServerError(said[-1].removeprefix("cloakfs: ") if said else f"{mount.path}: not mounted")
        daemon = self._daemon(mount)
        if daemon is None:
            raise ServerError(f"{mount.path}: its daemon ended at once")
        return Watched(mount, daemon.pid, time.time())

    def _mount_options(self, mount: Mount) -> str:
        words: list[str] = [self._plan.server]
        if self._plan.server == "knfsd":
            words += ["all_squashed"] * (root.everybody(mount.options) is not None)
            words += ["subtree_checked"] * root.checks_subtree(mount.options)
        return ",".join(words)

    @staticmethod
    def _daemon(mount: Mount) -> Mounted | None:
        return mounted().get(os.path.realpath(mount.path))

    def _entry_file(self, mount: Mount) -> str:
        return os.path.join(self._run_dir, f"{mount.name}.exports")

    def _write_entry(self, mount: Mount) -> None:
        """Write the file that the daemon reads, now and on a reload: it never reads an entry that was not checked."""
        text = format_exports([Export(mount.source, mount.client, mount.options, mount.location)])
        files.replace(self._entry_file(mount), text.encode("utf-8", "surrogateescape"))

    async def _unmount(self, mount: Mount) -> None:
        try:
            await _clear(mount.path)
        except (ServerError, OSError) as exc:
            log.error("%s", exc)  # noqa: TRY400  (one line)
        with contextlib.suppress(OSError):
            os.unlink(self._entry_file(mount))
        if mount.path in self._made:
            self._made.discard(mount.path)
            with contextlib.suppress(OSError):
                os.rmdir(mount.path)

    def _start_watching(self, watched: Watched) -> None:
        self._tasks.once(f"watching {watched.mount.path}", self._watch, watched)

    async def _watch(self, watched: Watched) -> None:
        with watched.scope:
            await tasks.keep(f"watching {watched.mount.path}", self._keep_mounted, watched)

    async def _keep_mounted(self, watched: Watched) -> None:
        """Mount again whenever the daemon has died, and retry until this succeeds."""
        while True:
            path = watched.mount.path
            if watched.complaint is None:
                await wait_for_end(watched.pid)
                watched.complaint = "its daemon died; it is being mounted again"
                log.warning("%s: %s", path, watched.complaint)
            failures = itertools.count()
            while watched.complaint:
                await trio.sleep(pause(next(failures)))
                async with self._change:
                    try:
                        again = await self._mount(watched.mount)
                        await self._server.change(self._mounts(watched.mount), [watched.mount])
                    except ServerError as exc:
                        if str(exc) != watched.complaint:
                            watched.complaint = str(exc)
                            log.error("%s", exc)  # noqa: TRY400  (one line)
                            # While an export has no mount, its clients wait; without the export, they get an error.
                            with contextlib.suppress(ServerError):
                                await self._server.change(self._mounts(), [])
                    else:
                        watched.restarts += watched.pid != 0
                        watched.pid, watched.since, watched.complaint = again.pid, again.since, None
                        log.info("%s: served again", path)

    def _mounts(self, *more: Mount) -> list[Mount]:
        """Return what to export now: the mounts without a complaint, and those in `more`."""
        return [watched.mount for watched in self._watched.values() if watched.mount in more or not watched.complaint]

    async def _check_server(self) -> None:
        while True:
            await trio.sleep(_CHECK_SECONDS)
            if self._log is not None:
                follow_rotation(self._log)
            async with self._change:
                try:
                    said = await self._server.check()
                    if said:
                        log.warning("%s", said)
                    self._server_complaint = None
                except ServerError as exc:
                    if str(exc) != self._server_complaint:
                        log.error("%s", exc)  # noqa: TRY400  (one line)
                    self._server_complaint = str(exc)

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
                told = await self._take_over(new)
            except (ServerError, OSError) as exc:
                log.error("reload: %s", exc)  # noqa: TRY400  (one line)
                return {"errors": [str(exc)], "status": 1}
            self._plan = new
            log.info("reloaded")
            return {"errors": [], "warnings": [str(warning) for warning in new.warnings], **told}

    async def _take_over(self, new: Plan) -> dict[str, list[str]]:
        wanted = {mount.name: mount for mount in new.mounts}
        added = [mount for name, mount in wanted.items() if name not in self._watched]
        removed = [watched for name, watched in self._watched.items() if name not in wanted]
        kept = [(self._watched[name], mount) for name, mount in wanted.items() if name in self._watched]
        live = [(old, mount) for old, mount in kept if old.pid and _differ_live(old.mount, mount)]
        told = {mount.name for _, mount in live}
        renewed = [(old, mount) for old, mount in kept if old.mount != mount and mount.name not in told]
        await self._add(added)  # the steps that may fail come first
        done: list[tuple[Watched, Mount]] = []
        try:
            for old, mount in live:
                before = old.mount
                await self._reload_daemon(old, mount)
                done.append((old, before))
        except (ServerError, OSError) as exc:
            left = await self._take_back(done)
            for mount in added:
                del self._watched[mount.name]
                await self._unmount(mount)
            raise ServerError("; ".join([str(exc), *left])) from exc
        # The server must not pass several callers on to a mount that takes them for one, or unchecked requests on to
        # one that relies on the check, not even for a moment.
        withdrawn = [old.mount for old, mount in renewed if _is_trusted_anew(old.mount, mount)]
        if withdrawn:
            await self._server.change([mount for mount in self._mounts() if mount not in withdrawn], [])
        for old, mount in renewed:
            await self._renew(old, mount)
        for watched in removed:
            watched.scope.cancel()
            del self._watched[watched.mount.name]
        for mount in added:
            self._start_watching(self._watched[mount.name])
        self._write_down(*(watched.mount for watched in removed))
        await self._server.change(self._mounts(), [mount for _, mount in renewed])
        for watched in removed:
            await self._unmount(watched.mount)
        self._write_down()
        return {
            "added": [mount.path for mount in added],
            "removed": [watched.mount.path for watched in removed],
            "changed": [mount.path for _, mount in live],
            "renewed": [mount.path for _, mount in renewed],
        }

    async def _take_back(self, done: Sequence[tuple[Watched, Mount]]) -> list[str]:
        """Make daemons reload their previous options; return one line for each that may have changed nevertheless."""
        left = []
        for watched, before in done:
            try:
                if watched.mount != before:
                    await self._reload_daemon(watched, before)
            except (ServerError, OSError) as exc:
                watched.mount = before  # when it is mounted again
                left.append(f"{before.path} may keep the new options until it is mounted again ({exc})")
                with contextlib.suppress(OSError):
                    self._write_entry(before)
            else:
                if is_in_file(before.options.policy):
                    left.append(f"{before.path} keeps the plug-in that it has read again")
        return left

    async def _reload_daemon(self, old: Watched, mount: Mount) -> None:
        before = self._daemon(mount)
        if before is None:
            raise ServerError(f"{mount.path}: {old.complaint or 'its daemon has just died'}; try again")
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

    async def _renew(self, old: Watched, mount: Mount) -> None:
        """Replace a mount by one with other options; if that fails, the watcher keeps trying."""
        old.scope.cancel()
        await _clear(mount.path)
        try:
            new = await self._mount(mount)
        except (ServerError, OSError) as exc:
            new = Watched(mount, 0, time.time(), complaint=str(exc))
        self._watched[mount.name] = new
        self._start_watching(new)

    # -- orders ------------------------------------------------------------------------------------

    async def _obey(self, signals: AsyncIterator[int]) -> None:
        async for number in signals:
            if number == signal.SIGHUP:
                answer = await self._reload()
                for text in answer["errors"]:
                    log.error("not reloaded, the old configuration stays in force: %s", text)
            else:
                self._end.set()

    def _bind(self) -> trio.SocketListener:
        path = control_path(self._run_dir)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            listener.bind(path)
            listener.listen(5)
            stack.pop_all()
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
                        answer = self.status()
                    case "reload":
                        answer = await self._reload()
                    case "down":
                        answer = {"errors": []}
                    case _:
                        answer = {"errors": [f"{order}: no such command"]}
                await stream.send_all(json.dumps({"version": VERSION, **answer}).encode() + b"\n")
                if order == "down":
                    self._end.set()

    def status(self) -> dict[str, Any]:
        """Return the state of the server and the mounts, ready for JSON."""
        return {
            "pid": os.getpid(),
            "server": self._plan.server,
            "complaint": self._server_complaint,
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
                    "complaint": watched.complaint,
                }
                for watched in sorted(self._watched.values(), key=lambda watched: watched.mount.path)
            ],
            "warnings": [str(warning) for warning in self._plan.warnings],
        }


def control_path(run_dir: str) -> str:
    """Return the socket on which the guard of the service with this directory takes orders."""
    return os.path.join(run_dir, "control")


def _differ_live(old: Mount, new: Mount) -> bool:
    """Whether a reload suffices for the difference, without a new mount. (A plug-in may always have changed.)"""
    return (
        _without(old.options) == _without(new.options)
        and not _is_trusted_anew(old, new)
        and old.condition == new.condition
        and (old != new or new.options.policy is not None)
    )


def _is_trusted_anew(old: Mount, new: Mount) -> bool:
    """Whether the daemon relies on something else that the server does with callers: see `Guard._mount_options`.

    It may make all of them one (`root.everybody`), or another one, or check the directories above (subtree_check).
    """
    before, after = old.options, new.options
    return root.everybody(before) != root.everybody(after) or root.checks_subtree(before) != root.checks_subtree(after)


def _without(options: Options) -> Options:
    plain = Options()
    return replace(options, **{name: getattr(plain, name) for name in _RELOADABLE})


async def _clear(path: str) -> None:
    """Unmount what a daemon or an earlier guard left at `path`, which may not answer.

    Raises:
        ServerError: something else is mounted there.
    """
    daemon = mounted().get(path)
    for _ in range(_MOST_LAYERS):
        kind = mountinfo.by_path().get(path)
        if kind is None:
            break
        if kind not in KINDS:
            raise ServerError(f"{path}: another file system ({kind}) is mounted there; umount it, or use --root")
        await trio.to_thread.run_sync(detach, path)
    if daemon is not None:
        await end(daemon.pid, _END_STEPS)


async def take_down(run_dir: str) -> None:
    """End what is left of a service whose guard was killed: its exports, then its mounts and their daemons.

    Raises:
        ServerError: something else is mounted on top of a mount, or it is unknown what there is to end.
    """
    record = leftover.read(run_dir)
    if record is not None:
        await leftover.end_server(record)
    daemons = {path for path, daemon in mounted().items() if daemon.policy_dir == run_dir}
    for path in sorted(daemons.union(record.paths if record else ())):
        await _clear(path)
    if record is not None:
        leftover.remove_directories(record)
