"""`cloakfs export`: serve exports.d entries to other machines with an NFS server."""

import contextlib
import json
import logging
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn, TextIO, cast

import click
import trio
from rich.table import Table

from cloakfs.audit.precheck import aliases, precheck
from cloakfs.background.forkserver import ForkServer
from cloakfs.config.errors import Location, Remark
from cloakfs.config.files import files_of, read_all
from cloakfs.config.options import Export
from cloakfs.exportmode import Server
from cloakfs.fuse.compatibility import offers_locks
from cloakfs.fuse.detach import KINDS
from cloakfs.linux import mountinfo, ownfiles, process
from cloakfs.messages import printable
from cloakfs.nfs import ganesha, heads, knfsd, services, stale
from cloakfs.nfs.ganesha_server import GaneshaServer, exports_of
from cloakfs.nfs.guard import VERSION, Guard, control_path, take_down
from cloakfs.nfs.hosts import unresolved
from cloakfs.nfs.plan import Mount, Plan, ServerKind, absolute, hints, mount_name, plan
from cloakfs.nfs.server import NfsServer, ServerError
from cloakfs.reasons import who_locks
from cloakfs.state import handlekey
from cloakfs.state.runtime import STATE_DIR, mounted
from cloakfs.state.versions import is_known, version_problem
from cloakfs.tree.views import accounts_of

from .background import in_background, in_foreground, open_for_us
from .common import FORKED, console, fail, note, tuning
from .completion import a_directory, a_file
from .exits import FAILED, NEGATIVE, WRONG
from .output import echo_json

DEFAULT_PATH = "/etc/cloakfs/exports.d"
DEFAULT_ROOT = "/srv/cloakfs"

_ANSWER_SECONDS = 120.0
_LOCK_SECONDS = 5.0
_PAUSE_SECONDS = 0.05

_INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _Interrupted(BaseException):
    """A signal has come that asks this command to end."""


@dataclass(frozen=True, slots=True)
class _Service:
    """The service that the options of `plan` and `up` describe."""

    paths: tuple[str, ...]
    server: ServerKind
    root: str
    protocols: tuple[int, ...]
    port: int
    bind: str | None
    name: str

    def plan(self) -> Plan:
        """Read the files, and plan the service.

        Raises:
            OSError: a file cannot be read.
        """
        if self.server == "knfsd":
            exported = self._exported()
            own = [path for path, _ in exported]
            made = _read_plan(self.paths, self.server, self.root, exported)
            return replace(
                made,
                # exportfs is not asked while there are problems: it might misread an option.
                problems=made.problems
                or (*knfsd.conflicts_with_others(made, own), *knfsd.unknown_options(made.mounts)),
                warnings=(*made.warnings, *knfsd.remarks(made, own)),
            )
        # nfs-ganesha drops an export for a host that cannot be found whenever it reads its configuration.
        return _read_plan(self.paths, self.server, self.root, ())

    def _exported(self) -> Collection[tuple[str, str]]:
        """Return the mount points that this service exports now, or its guard has left, each with its client."""
        try:
            record = stale.read(services.run_dir(self.name))
        except ServerError:  # of another version; `up` refuses because of it
            return ()
        return () if record is None else record.exports

    @property
    def state_dir(self) -> str:
        return os.path.join(STATE_DIR, f"export-{self.name}")

    @property
    def ids(self) -> str:
        return os.path.join(self.state_dir, "exports.json")

    def make_server(self, still_exported: Sequence[Mount]) -> NfsServer:
        if self.server == "knfsd":
            return knfsd.Knfsd(self.protocols, still_exported)
        server = ganesha.Ganesha(self.state_dir, port=self.port, bind_addr=self.bind, protocols=self.protocols)
        return GaneshaServer(server, self.ids)

    def where_locks_hold(self) -> str:
        """Return in words where the locks of clients will hold."""
        kind = Server.KNFSD if self.server == "knfsd" else Server.GANESHA
        local = self.make_server(()).wants_local_locks()
        return who_locks(offers_locks and not local, kind, local=local)

    def config(self, made: Plan) -> str:
        """Return the text of the server's configuration.

        Raises:
            ServerError: the configuration cannot express something.
        """
        if self.server == "knfsd":
            return knfsd.render(made.mounts)
        exports = exports_of(made.mounts, self.ids, store=False)
        return ganesha.render(
            exports,
            state_dir=self.state_dir,
            port=self.port,
            bind_addr=self.bind,
            protocols=self.protocols,
            release=ganesha.installed_release(),
        )


@click.group()
def export() -> None:
    """Serve the entries of exports.d files over NFS, with a mount for each client specification."""


def _service_options(command: Callable[..., None]) -> Callable[..., None]:
    argument = click.argument("paths", nargs=-1, metavar="[PATH]...", shell_complete=a_file)
    return argument(_server_options(command))


def _server_options(command: Callable[..., None]) -> Callable[..., None]:
    options = (
        click.option("--server", type=click.Choice(["knfsd", "ganesha"]), default="knfsd", show_default=True,
                     help="The kernel's server (a view per caller), or nfs-ganesha (fixed views)."),
        click.option("--root", metavar="DIR", default=DEFAULT_ROOT, show_default=True,
                     shell_complete=a_directory, help="The directory of the mounts."),
        click.option("--protocols", metavar="LIST", default="4", show_default=True,
                     help="NFS versions, 4 or 3,4, for a server that is not running yet; 3 needs rpcbind."),
        click.option("--port", type=click.IntRange(1, 65535), default=2049, show_default=True,
                     help="The TCP port of nfs-ganesha."),
        click.option("--bind", metavar="ADDRESS", help="The only address on which nfs-ganesha listens."),
    )  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return _name_option(command)


def _service(given: dict[str, Any]) -> _Service:
    protocols = given["protocols"]
    if protocols not in ("4", "3,4"):
        fail(f"--protocols {protocols}: expected 4 or 3,4", WRONG)
    paths = tuple(os.path.abspath(path) for path in given["paths"] or (DEFAULT_PATH,))
    return _Service(
        paths,
        cast("ServerKind", given["server"]),
        os.path.realpath(given["root"]),
        tuple(int(version) for version in protocols.split(",")),
        given["port"],
        given["bind"],
        given["name"],
    )


def _name_option(command: Callable[..., None]) -> Callable[..., None]:
    return click.option(
        "--name", metavar="NAME", default="default", show_default=True, help="The name of the service."
    )(command)


def _read_plan(paths: tuple[str, ...], server: ServerKind, root: str, exported: Collection[tuple[str, str]]) -> Plan:
    """Read the files, and plan what is to be served.

    Args:
        paths: the files and folders.
        server: the server that is to serve them.
        root: the directory of the mounts.
        exported: mount points, each with its client, that stay exported although the host may be unknown at present:
            a name server that does not answer must not keep an administrator from revoking another export.

    Raises:
        OSError: a file cannot be read.
    """
    files: dict[str, None] = {}  # a file may be given, and its folder as well
    entries: list[Export] = []
    problems: list[Remark] = []
    warnings: list[Remark] = []
    for path in paths:
        of_path = files_of(path)
        if not of_path:
            problems.append(Remark(Location(path, 1, 1), "no *.exports files in this folder"))
        files |= dict.fromkeys(of_path)
    for file in files:
        found, said, errors = read_all(file)
        entries += [absolute(entry) for entry in found]
        problems += [Remark(error.location, error.message) for error in errors]
        warnings += [Remark(warning.location, warning.message) for warning in said]
    problems += precheck(entries)
    stays = [(os.path.join(root, mount_name(entry.path, entry.client)), entry.client) in exported for entry in entries]
    problems += unresolved(entry for entry, is_kept in zip(entries, stays, strict=True) if not is_kept)
    warnings += aliases(entries)
    warnings += unresolved(entry for entry, is_kept in zip(entries, stays, strict=True) if is_kept)
    return plan(entries, server, root, problems, warnings, accounts_of)


@export.command("plan")
@_service_options
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object instead.")
def plan_command(*, as_json: bool, **given: Any) -> None:
    """Show what `up` would do with exports.d files (or folders of *.exports files), and all errors, warnings and hints.

    Exit status: 0 all entries can be served, 1 a file cannot be read, 2 an entry cannot be served.
    """
    service = _service(given)
    try:
        made = service.plan()
        config = service.config(made)
    except OSError as exc:
        fail(f"{exc.filename}: {exc.strerror}", FAILED)
    except ServerError as exc:
        fail(str(exc), WRONG)
    if as_json:
        echo_json(
            {
                "server": made.server,
                "mounts": [
                    {"path": m.path, "client": m.client, "source": m.source, "views": m.kind} for m in made.mounts
                ],
                "configuration": config,
                "locks": service.where_locks_hold(),
                "problems": [str(problem) for problem in made.problems],
                "warnings": [str(warning) for warning in made.warnings],
                "hints": [str(hint) for hint in hints(made)],
            }
        )
    else:
        _print_table([(m.path, m.client, m.source, m.kind) for m in made.mounts])
        if not made.problems:
            click.echo(f"\n# configuration of {made.server}\n{printable_lines(config)}", nl=False)
            click.echo(f"\n# locks of clients\n{service.where_locks_hold()}")
        _print_remarks(made)
        for hint in hints(made):
            click.echo(printable(f"{hint.location}: hint: {hint.message}"), err=True)
    sys.exit(WRONG if made.problems else 0)


def printable_lines(text: str) -> str:
    """Return text as `printable` does, but keep the ends of its lines."""
    return "".join(f"{printable(line)}\n" for line in text.splitlines())


def _print_table(rows: Sequence[tuple[str, ...]], *more: str) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("mount", "client", "tree", "views", *more):
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*map(printable, row))
    console().print(table)


def _print_remarks(made: Plan) -> None:
    for warning in made.warnings:
        click.echo(printable(f"{warning.location}: warning: {warning.message}"), err=True)
    for problem in made.problems:
        click.echo(printable(f"{problem.location}: error: {problem.message}"), err=True)


@export.command()
@_service_options
@click.option("-f", "--foreground", is_flag=True, help="Stay in the foreground, and log to the terminal; for systemd.")
def up(*, foreground: bool, **given: Any) -> None:
    """Mount and export the entries of exports.d files (or folders of *.exports files), and keep them served.

    Returns when the server answers and serves all of it. The log is /run/cloakfs/export-NAME.log.

    Exit status: 0 everything is served, 1 it cannot be served, 2 the files or options are wrong, 129, 130 or 143
    interrupted. If the status is not 0, nothing is served or mounted.
    """
    if os.geteuid() != 0:
        fail("only root can mount and export", FAILED)
    service = _service(given)
    name = service.name
    run_dir = _run_dir(name)
    lock = _lock(run_dir, name)
    try:
        made = service.plan()
    except OSError as exc:
        fail(f"{exc.filename}: {exc.strerror}", FAILED)
    _print_remarks(made)
    if made.problems:
        sys.exit(WRONG)
    if not made.mounts:
        fail(f"{' '.join(service.paths)}: no entries", WRONG)
    still_exported = _take_over(run_dir, made)

    def work(ready: Callable[[], None]) -> None:
        try:
            _serve(service, made, still_exported, run_dir, None if foreground else f"{run_dir}.log", ready)
        finally:
            shutil.rmtree(run_dir, ignore_errors=True)
            os.close(lock)

    if foreground:
        in_foreground(work, logging.INFO)
    ended, alive = os.pipe()  # is at its end when all other processes of this service have ended
    starting = os.fork()
    if starting:  # so that this process can show what is served now
        os.close(alive)
        code = _wait_for_start(starting, ended, run_dir)
        if code == 0:
            _show(_order(name, "status"), with_warnings=False)
        sys.exit(code)
    in_background(work, logging.INFO, f"{run_dir}.log")


def _wait_for_start(starting: int, ended: int, run_dir: str) -> int:
    """Return the exit status of the process that starts a guard; when interrupted, stop the guard, and clear away.

    What a guard leaves that was killed while it started is cleared away, too.
    """

    def interrupt(number: int, frame: object) -> NoReturn:
        raise _Interrupted(number)

    for number in _INTERRUPTS:
        signal.signal(number, interrupt)
    code = 1
    interrupted = None
    try:
        _, status = os.waitpid(starting, 0)
        code = os.waitstatus_to_exitcode(status)
        if code == 0:
            return 0
    except _Interrupted as exc:
        interrupted = exc.args[0]
    finally:
        for number in _INTERRUPTS:
            signal.signal(number, signal.SIG_IGN if interrupted else signal.SIG_DFL)
    if interrupted:
        note("interrupted; unmounting what has been mounted so far")
        with contextlib.suppress(ProcessLookupError):
            os.kill(starting, signal.SIGTERM)  # nothing reads any more that the guard is ready
        with contextlib.suppress(ChildProcessError):
            os.waitpid(starting, 0)
    _stop_starting(ended, run_dir)
    return 128 + interrupted if interrupted else max(code, 1)


def _stop_starting(ended: int, run_dir: str) -> None:
    """Stop a guard that is just starting, and clear away what is left of it; the command ends if that cannot be done.

    Args:
        ended: a pipe that is at its end when the guard has ended.
        run_dir: the guard's directory.
    """
    at_end = select.poll()
    at_end.register(ended, select.POLLIN)
    deadline = time.monotonic() + _ANSWER_SECONDS
    signalled = 0
    while not at_end.poll(1000 * _PAUSE_SECONDS):
        with contextlib.suppress(ServerError):
            left = stale.read(run_dir)
            if left is not None and left.is_watched and left.pid != signalled:
                signalled = left.pid
                with contextlib.suppress(ProcessLookupError):
                    os.kill(left.pid, signal.SIGTERM)
        if time.monotonic() > deadline:
            fail(f"the guard has not ended after {_ANSWER_SECONDS:g} s; see {run_dir}.log", FAILED)
    if os.path.isdir(run_dir):  # it was killed
        _take_down(run_dir)


def _take_over(run_dir: str, made: Plan) -> list[Mount]:
    """Unmount what a guard that was killed has left; the command ends if that cannot be done.

    Returns:
        the mounts of the plan that are still exported, so that their clients wait for them.
    """
    try:
        still_exported = trio.run(take_down, run_dir, made.mounts if made.server == "knfsd" else ())
    except ServerError as exc:
        fail(str(exc), FAILED)
    if not still_exported:  # or else the record is still needed
        shutil.rmtree(run_dir, ignore_errors=True)
    os.makedirs(run_dir, 0o700, exist_ok=True)
    return still_exported


def _take_down(run_dir: str) -> None:
    """Take down what a guard that was killed has left; the command ends if that cannot be done."""
    try:
        trio.run(take_down, run_dir)
    except ServerError as exc:
        fail(str(exc), FAILED)
    shutil.rmtree(run_dir, ignore_errors=True)


def _lock(run_dir: str, name: str, seconds: float = 0) -> int:
    """Lock the name of the service until the process and its children have ended; wait for that at most so long."""
    lock = open_for_us(f"{run_dir}.lock", os.O_RDWR)
    deadline = time.monotonic() + seconds
    while not ownfiles.lock(lock):
        if time.monotonic() >= deadline:
            fail(
                f"service {name} is up already, or is just starting or stopping "
                f"(cloakfs export status, reload or down; --name for another)",
                FAILED,
            )
        time.sleep(_PAUSE_SECONDS)
    return lock


def _serve(
    service: _Service,
    made: Plan,
    still_exported: Sequence[Mount],
    run_dir: str,
    log: str | None,
    ready: Callable[[], None],
) -> None:
    cloakfs = ForkServer(FORKED)
    guard = Guard(
        made, service.plan, service.make_server(still_exported), run_dir, cloakfs, service.state_dir, log, tuning()
    )
    try:
        trio.run(guard.run, ready)
    except OSError as exc:
        raise ServerError(f"{exc.filename or made.root}: {exc.strerror}") from exc


def _run_dir(name: str) -> str:
    if not name.replace("-", "").replace("_", "").isalnum():
        fail(f"--name {name}: expected letters, digits, - and _", WRONG)
    return services.run_dir(name)


def _order(name: str, order: str) -> dict[str, Any]:
    """Return the answer of a service's guard; the command ends if there is none, or its version is not known."""
    answer = _answer(name, order)
    version = answer.pop("version", None)
    if not is_known(version, VERSION):
        who = f"service {name}: its guard (process {answer.get('pid')})"
        hint = f"use the cloakfs that runs it, or end it (kill {answer.get('pid')}), which unmounts everything"
        fail(version_problem(who, version, VERSION, hint), FAILED)
    return answer


def _answer(name: str, order: str) -> dict[str, Any]:
    try:
        return services.send_order(_run_dir(name), order, _ANSWER_SECONDS)
    except (FileNotFoundError, ConnectionRefusedError):
        left = _left(name)
        if left is None:
            fail(f"service {name} is not up (cloakfs export up)", FAILED)
        if left.is_watched:
            fail(f"service {name} is just starting or stopping (cloakfs export down --name {name} stops it)", FAILED)
        fail(
            f"service {name}: its guard (process {left.pid}) was killed; without a guard, these may still be served: "
            f"{', '.join(left.paths)} (cloakfs export up takes over, down ends it)",
            FAILED,
        )
    except (OSError, TypeError, ValueError) as exc:
        fail(f"service {name} does not answer: {exc}; see {_run_dir(name)}.log", FAILED)


def _left(name: str) -> stale.ServiceRecord | None:
    """Return the record of this service's guard; the command ends if its version is not known."""
    try:
        return stale.read(_run_dir(name))
    except ServerError as exc:
        fail(f"service {name}: {exc}", FAILED)


@export.command()
@_name_option
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object instead of a table.")
def status(name: str, *, as_json: bool) -> None:
    """Ask the server and the mounts, and show what is exported to whom as which views, and whether it is served.

    Exit status: 0 everything is served, 1 something is not, or the service is not up.
    """
    answer = _order(name, "status")
    if as_json:
        echo_json(answer)
    else:
        _show(answer, with_warnings=True)
    sys.exit(any(services.problem_of(state) for state in (answer, *answer["mounts"])))


def _show(answer: dict[str, Any], *, with_warnings: bool) -> None:
    rows = []
    for mount in answer["mounts"]:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(mount["since"]))
        state = services.problem_of(mount) or f"since {since}"
        if mount["restarts"]:
            state += f", daemon replaced {mount['restarts']}×"
        rows.append((mount["path"], mount["client"], mount["source"], mount["views"], state))
    _print_table(rows, "state")
    click.echo(printable(f"{answer['server']}: {services.problem_of(answer) or 'answers'}"))
    by_place: dict[str, list[str]] = {}
    for mount in answer["mounts"]:
        if mount.get("locks"):  # a guard of 0.1.0 does not know
            by_place.setdefault(mount["locks"], []).append(mount["path"])
    for where, paths in by_place.items():
        which = f"{', '.join(paths)}: " if len(by_place) > 1 else ""
        click.echo(printable(f"locks: {which}{where}"))
    if with_warnings:
        for warning in answer["warnings"]:
            click.echo(printable(f"warning: {warning}"), err=True)


@export.command("key")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object instead of text.")
def key_command(*, as_json: bool) -> None:
    """Make the key of file handles, /etc/cloakfs/key, unless there is one, and show its fingerprint.

    With the key and the same configuration, clients' file handles outlive the loss of /var/lib/cloakfs, and are the
    same on each machine that serves the tree. Copy the file there, keep a copy, and keep it secret: whoever has it can
    forge file handles. Mounts that exist keep the handles that their clients have.

    Exit status: 0 there is a key, 1 it cannot be made or used.
    """
    if os.geteuid() != 0:
        fail("only root may use the key of file handles", FAILED)
    try:
        key = handlekey.read()
        made = key is None
        if key is None:
            try:
                key = handlekey.make()
            except FileExistsError:  # another process was faster
                made, key = False, handlekey.read()
        if key is None:
            fail(f"{handlekey.PATH}: something is in its place that leads nowhere; remove it", FAILED)
    except OSError as exc:
        fail(f"{exc.filename or handlekey.PATH}: {exc.strerror}", FAILED)
    if as_json:
        echo_json({"path": handlekey.PATH, "made": made, "fingerprint": key.fingerprint, "mounts": len(key.secrets)})
    else:
        click.echo(f"{handlekey.PATH}: {'made, ' if made else ''}fingerprint {key.fingerprint}")


@export.command("same-as")
@click.argument("file", required=False, type=click.File(encoding="utf-8"), shell_complete=a_file)
@click.option(
    "--exports",
    "paths",
    multiple=True,
    metavar="PATH",
    shell_complete=a_file,
    help="A file or folder as for `up`; may be given several times.",
)
@_server_options
@click.option("--json", "as_json", is_flag=True, help="Print the differences as a JSON list.")
def same_as(*, file: TextIO | None, as_json: bool, **given: Any) -> None:
    """Say what differs between this machine and another one that is to serve the same clients.

    Without FILE, print the description of this machine: `cloakfs export same-as >head-a.json`. On the other one,
    `cloakfs export same-as head-a.json` prints what differs: the entries, the trees, what the user database says of
    their users, and the fingerprint of the key of file handles. A client that goes from one to the other then sees the
    same files, by the same handles.

    Exit status: 0 nothing differs, 1 something cannot be read, 2 an entry cannot be served, 3 something differs.
    """
    if os.geteuid() != 0:
        fail("only root may compare machines", FAILED)
    service = _service(given)
    try:
        made = service.plan()
        if made.problems:
            _print_remarks(made)
            sys.exit(WRONG)
        here = heads.describe(made)
        if file is None:
            echo_json(here)
            return
        there = heads.require_description(json.load(file), file.name)
    except OSError as exc:
        fail(f"{exc.filename}: {exc.strerror}", FAILED)
    except (ValueError, ServerError) as exc:
        fail(str(exc) if isinstance(exc, ServerError) else f"{file and file.name}: is not JSON", FAILED)
    found = sorted(heads.differences(here, there))
    if as_json:
        echo_json(found)
    else:
        for line in found:
            click.echo(printable(line))
    sys.exit(NEGATIVE if found else 0)


@export.command()
@_name_option
def reload(name: str) -> None:
    """Read the files again and apply what has changed; all other mounts are left alone.

    Exit status: 0 reloaded, 1 the service is not up or cannot apply the changes, 2 the files are wrong. If the status
    is not 0, everything is served as before, except for what is named.
    """
    _order(name, "status")  # this makes sure that the answer will be understood
    answer = _order(name, "reload")
    for warning in answer.get("warnings", ()):
        click.echo(printable(f"warning: {warning}"), err=True)
    if answer["errors"]:
        for error in answer["errors"]:
            click.echo(printable(f"cloakfs: {error}"), err=True)
        for line in answer.get("left", ()):
            click.echo(printable(f"cloakfs: not as before: {line}"), err=True)
        others = "everything else is" if answer.get("left") else "everything is"
        fail(f"not reloaded, the old configuration stays in force, and {others} served as before", answer["status"])
    for what in ("added", "changed", "renewed", "removed"):
        for path in answer[what]:
            click.echo(printable(f"{what} {path}"))


@export.command()
@_name_option
def down(name: str) -> None:
    """Stop exporting, and unmount, also what is just starting or was left by an `up` that was killed.

    Clients lose access to files that they have open after ten seconds.

    Exit status: 0 everything is unmounted, 1 the service was not up, or something is left.
    """
    run_dir = _run_dir(name)
    left = None
    with contextlib.suppress(ServerError):  # its version is not known, but its guard may live and answer
        left = stale.read(run_dir)
    takes_orders = left is None and (os.path.exists(control_path(run_dir)) or not _has_mounts(run_dir))
    if takes_orders:
        _remove_empty(run_dir)
        guard = process.held(_order(name, "status")["pid"])
        _order(name, "down")
    else:
        # The signal is obeyed at any time, also while the guard starts and takes no orders yet.
        guard = process.held(left.pid) if left is not None and left.is_watched else None
        if guard is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(guard, signal.SIGTERM)
    if guard is not None and not process.ends(guard, _ANSWER_SECONDS):
        fail(f"service {name} has not ended after {_ANSWER_SECONDS:g} s; see {run_dir}.log", FAILED)
    lock = _lock(run_dir, name, _LOCK_SECONDS)
    if os.path.isdir(run_dir) and not takes_orders:
        _take_down(run_dir)
        click.echo(f"cloakfs: the guard of service {name} had been killed; what it had left is now unmounted", err=True)
    os.unlink(f"{run_dir}.lock")
    os.close(lock)
    if left is not None and (still := [path for path in left.paths if mountinfo.by_path().get(path) in KINDS]):
        fail(f"{', '.join(still)}: still mounted; see {run_dir}.log", FAILED)


def _remove_empty(run_dir: str) -> None:
    """Remove the directory of a guard that was killed before it did anything."""
    with contextlib.suppress(OSError), open(f"{run_dir}.lock", "rb") as lock:
        if ownfiles.lock(lock.fileno()):
            shutil.rmtree(run_dir)


def _has_mounts(run_dir: str) -> bool:
    """Whether there are mounts of a service, though it has left no record of them."""
    return any(daemon.policy_dir == run_dir for daemon in mounted().values())
