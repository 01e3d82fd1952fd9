"""`cloakfs mount`: makes a mount, and returns when it answers."""

import errno
import logging
import os
import stat
import sys
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import click

from cloakfs.config import files
from cloakfs.config.errors import ExportsError
from cloakfs.config.options import Options
from cloakfs.config.parse import parse_options
from cloakfs.config.render import format_options
from cloakfs.fuse.attach import MountError, MountOptions, split_mount_options
from cloakfs.fuse.detach import KINDS, detach_dead
from cloakfs.linux import mountinfo
from cloakfs.messages import printable, shell_word
from cloakfs.mount.daemon import serve
from cloakfs.mount.reaper import RestartPlan
from cloakfs.mount.settings import Settings
from cloakfs.state.runtime import RUN_DIR, dead, mount_key

from .background import SYSLOG, in_background, in_foreground, record_inherited
from .common import OWN_COMMAND, entry_for, fail, note, tuning, working_directory
from .completion import a_directory, a_file
from .exits import FAILED, WRONG
from .remount import remount


@click.command()
@click.argument("source", shell_complete=a_directory)
@click.argument("mountpoint", shell_complete=a_directory)
@click.option(
    "-o", "words", multiple=True, metavar="OPTIONS", help="Options of exports.d and mount(8), separated by commas."
)
@click.option(
    "--exports",
    metavar="FILE",
    shell_complete=a_file,
    help="Take the options from the entry for SOURCE in this exports.d file, or in a folder of them.",
)
@click.option("--client", metavar="CLIENT", help="With --exports: the entry for this client, if there are several.")
@click.option("--view", "views", multiple=True, metavar="VIEW", help="A fixed view: USER, UID:GID[:GID,…] or LOW-HIGH.")
@click.option(
    "--policy",
    metavar="FILE.py:CLASS",
    shell_complete=a_file,
    help="A plug-in policy, from a file or an installed module.",
)
@click.option("--groups", metavar="SOURCE", help="Callers' groups: proc, database, none, or gids (1001:1002).")
@click.option("-f", "--foreground", is_flag=True, help="Stay in the foreground, and log to the terminal.")
@click.option(
    "-d", "--debug", is_flag=True, help="Log each request that is answered, too, and other debugging messages."
)
def mount(
    source: str,
    mountpoint: str,
    words: tuple[str, ...],
    exports: str | None,
    client: str | None,
    views: tuple[str, ...],
    policy: str | None,
    groups: str | None,
    *,
    foreground: bool,
    debug: bool,
) -> None:
    """Mount SOURCE at MOUNTPOINT, so that each caller sees its own view of it.

    Returns when the mount answers. Exit status: 0 mounted, 1 it cannot be mounted, 2 wrong options.
    """
    if os.geteuid() != 0:
        fail("only root can mount: the daemon acts as every caller", FAILED)
    mount_options, text = split_mount_options(",".join(words))
    if mount_options.remount:
        remount(mountpoint, mount_options)
        return
    exports = _one_of("exports", exports, mount_options.exports)
    client = _one_of("client", client, mount_options.client)
    if client is not None and exports is None:
        fail("--client chooses an entry of an exports.d file, and needs --exports FILE", WRONG)
    if mount_options.passthrough not in ("auto", "off"):
        fail(f"-o passthrough={mount_options.passthrough}: expected passthrough=auto or passthrough=off", WRONG)
    source, mountpoint = _places(source, mountpoint)
    given = _given(views, policy, groups)
    reader = _Reader(text, exports, source, client, read_only="ro" in mount_options.given, given=given)
    options = _read_options(reader)
    _require_condition(options, source)
    _warn(mount_options)
    if exports:
        exports = os.path.abspath(exports)  # the daemon, which reads it again, works in another directory
    if mount_options.record:
        mount_options = replace(mount_options, record=os.path.abspath(mount_options.record))
    log_path = _log_path(mount_options.log) or os.path.join(RUN_DIR, f"{mount_key(source, mountpoint)}.log")
    restart_plan = None
    if mount_options.restart and not foreground:  # in the foreground, the end is seen by the one who started it
        named = {"exports": exports, "client": client, "policy": policy, "groups": groups}
        command = _same_command(source, mountpoint, mount_options, named, views, debug=debug)
        restart_plan = RestartPlan(command, working_directory(), log_path, mount_options.restarts)
    settings = Settings(
        source,
        mountpoint,
        options,
        mount_options,
        policy_dir=files.policy_dir(exports) if exports else working_directory(),
        reread=replace(reader, exports=exports).read if exports else None,
        restart_plan=restart_plan,
        log=None if foreground else log_path,
        supervised=foreground,
        tuning=tuning(),
    )
    level = logging.DEBUG if debug else logging.INFO
    work = partial(serve, settings)
    if foreground:
        in_foreground(work, level)
    in_background(work, level, log_path, syslog=mount_options.log == SYSLOG)


def _places(source: str, mountpoint: str) -> tuple[str, str]:
    """Return both as real paths; end the command if they cannot be those of a mount."""
    _take_off_dead(mountpoint)
    for path in (source, mountpoint):
        _require_directory(path)
    source, mountpoint = os.path.realpath(source), os.path.realpath(mountpoint)
    if mountpoint.startswith(source.rstrip("/") + "/"):
        fail(f"{mountpoint}: inside {source}, where the daemon would wait for itself; mount it elsewhere", FAILED)
    return source, mountpoint


def _require_condition(options: Options, source: str) -> None:
    """End the command if the mount is to wait for another one (`mp`) that is not there."""
    place = options.condition(source)
    if place is not None and os.path.realpath(place) not in mountinfo.by_path():
        fail(f"{place}: nothing is mounted there, and the mount is to wait for that (mp); mount it first", FAILED)


def _warn(mount_options: MountOptions) -> None:
    """Name options of mount(8) that have no effect."""
    if untouched := [word for word in mount_options.given if word in ("noatime", "nodiratime")]:
        note(f"warning: {untouched[0]} has no effect here: reading changes the real tree's times as its own mount says")
    if mount_options.dev_refused:
        click.echo("cloakfs: warning: dev has no effect without default_permissions", err=True)


def _log_path(log: str | None) -> str | None:
    """Return the file that `-o log=` names, if any; end the command if it is none."""
    if log is None or log == SYSLOG:
        return None
    if not os.path.isabs(log):
        fail(f"-o log={log}: expected {SYSLOG}, or a file with its whole path", WRONG)
    return log


def _same_command(
    source: str,
    mountpoint: str,
    mount_options: MountOptions,
    named: dict[str, str | None],
    views: tuple[str, ...],
    *,
    debug: bool,
) -> tuple[str, ...]:
    """Return the command that makes the same mount once more.

    Args:
        source: the real path of the tree.
        mountpoint: the real path of the mount point.
        mount_options: what `-o` said.
        named: the options of the command line that have a value, by name.
        views: the values of `--view`.
        debug: whether there was `--debug`.
    """
    own_words = [word for word in mount_options.given if not word.startswith(("restarted=", "exports=", "client="))]
    command = [*OWN_COMMAND, "mount", source, mountpoint, "-o", ",".join(own_words)]
    command += [f"--{name}={value}" for name, value in named.items() if value is not None]
    command += [f"--view={view}" for view in views]
    if debug:
        command.append("--debug")
    return tuple(command)


@dataclass(frozen=True)
class _Reader:
    """Reads the options of a mount, also once more in another process."""

    text: str
    exports: str | None
    source: str
    client: str | None
    read_only: bool
    given: dict[str, Any]

    def read(self) -> Options:
        """Return the options; warnings go to standard error.

        Raises:
            ExportsError: the text is wrong.
            MountError: there is no such entry, or several.
            OSError: the file cannot be read.
        """
        if self.exports is None:
            options, warnings = parse_options(self.text)
        else:
            # mount(8) always passes one of these two. The file decides, but fstab can make the mount read-only.
            left = [word for word in map(str.strip, self.text.split(",")) if word not in ("", "ro", "rw")]
            if left:
                raise MountError(f"-o {','.join(left)}: with --exports, options come from the file alone")
            entries, warnings = files.read(self.exports)
            options = entry_for(entries, self.exports, self.source, self.client)
            if self.read_only:
                options = replace(options, read_only=True)
        for warning in warnings:
            click.echo(printable(f"cloakfs: {warning}"), err=True)
        return replace(options, **self.given)


def _read_options(reader: _Reader) -> Options:
    """Return the options of the mount, or end the command."""
    try:
        return reader.read()
    except (ExportsError, MountError) as exc:
        fail(str(exc), WRONG)
    except OSError as exc:
        fail(f"{reader.exports}: {exc.strerror}", FAILED)


def _one_of(name: str, option: str | None, word: str | None) -> str | None:
    """Return the value of a command line option that `-o` has, too; end the command if they contradict each other."""
    if None not in (option, word) and option != word:
        fail(f"--{name} {option} and -o {name}={word}: give one of them", WRONG)
    return word if option is None else option


def _given(views: tuple[str, ...], policy: str | None, groups: str | None) -> dict[str, Any]:
    """Return the options that have command line options of their own; end the command if exports.d rejects them."""
    given: dict[str, Any] = {}
    if views:
        # On the command line, a view may contain commas; in exports.d they separate options.
        items = tuple(view.replace(",", "+") for view in views)
        given["views"] = _read("view", f"views = {' '.join(items)}").views
        if tuple(map(str, given["views"])) != items:
            fail(f"--view {items}: not a single value", WRONG)
    if policy:
        given["policy"] = _read("policy", format_options(Options(policy=policy))).policy
    if groups:
        given["groups"] = _read("groups", format_options(Options(groups=groups))).groups
    return given


def _read(option: str, text: str) -> Options:
    try:
        return parse_options(text)[0]
    except ExportsError as exc:
        fail(f"--{option}: {exc.message}", WRONG)


def _take_off_dead(mountpoint: str) -> None:
    """Unmount cloakfs mounts there whose daemon has died; they would stay below the new mount permanently."""
    path = os.path.realpath(mountpoint)
    if mountinfo.by_path().get(path) not in KINDS:
        return
    while any(place.path == path for place in dead()):
        if not detach_dead(path):
            return  # something else is on top, or a mount that is just starting
        click.echo(printable(f"cloakfs: {path}: unmounted a mount whose daemon had died"), err=True)


def _require_directory(path: str) -> None:
    try:
        if not stat.S_ISDIR(os.stat(path).st_mode):
            fail(f"{path}: not a directory", FAILED)
    except OSError as exc:
        if exc.errno == errno.ENOTCONN:
            lexical = os.path.abspath(path)
            dead_mount = max((p.path for p in dead() if f"{lexical}/".startswith(f"{p.path}/")), key=len, default=path)
            fail(
                f"{path}: a mount whose daemon has died is still there (cloakfs umount {shell_word(dead_mount)})",
                FAILED,
            )
        fail(f"{path}: {exc.strerror}", FAILED)


_HELPER = """\
Usage: mount.fuse.cloakfs SOURCE MOUNTPOINT [-sfnv] [-t TYPE] [-N NAMESPACE] [-o OPTIONS]

mount(8) runs this for the type fuse.cloakfs, if /sbin has a link to it. It does the same as cloakfs mount.

Options:
  -o OPTIONS  Options of exports.d and mount(8), separated by commas; exports=FILE and client=CLIENT, as the options of
              cloakfs mount; remount,ro and remount,rw.
  -f          Mount nothing.
  -h, --help  Show this message and exit.

The other options are accepted because mount(8) passes them, and have no effect."""


def mount_helper() -> None:
    """Run as `mount.fuse.cloakfs`, the way mount(8) calls it (`_HELPER`)."""
    record_inherited()
    arguments = sys.argv[1:]
    if {"-h", "--help"}.intersection(arguments):
        click.echo(_HELPER)
        return
    passed = []
    while arguments:
        argument = arguments.pop(0)
        if argument == "-f":
            return
        if argument in ("-t", "-N"):
            arguments[:1] = []
        elif argument == "-o":
            passed += ["-o", *arguments[:1]]
            arguments[:1] = []
        elif not argument.startswith("-"):
            passed.append(argument)
    mount.main(passed, prog_name="mount.fuse.cloakfs")
