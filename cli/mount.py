"""`cloakfs mount`: put a mount in place and return when it answers."""

import logging
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import NoReturn

import click

from cloakfs.daemon import RUN_DIR, Settings, mount_key, serve
from cloakfs.exports import ExportsError, ExportsWarning, Options, parse, parse_options
from cloakfs.mountpoint import MountError, split_words

from .common import fail


@click.command()
@click.argument("source")
@click.argument("mountpoint")
@click.option("-o", "words", multiple=True, metavar="OPTIONS", help="Words of exports.d and of mount(8), with commas.")
@click.option("--exports", metavar="FILE", help="Take the options from the entry for SOURCE in this exports.d file.")
@click.option("--client", metavar="CLIENT", help="With --exports: the entry for this client, if there are several.")
@click.option("--view", "views", multiple=True, metavar="VIEW", help="A fixed view: USER, UID:GID[:GID,…] or LOW-HIGH.")
@click.option("--policy", metavar="FILE.py:CLASS", help="A plug-in policy, from a file or an installed module.")
@click.option("--groups", metavar="SOURCE", help="Callers' groups: proc, database, none, or gids (1001:1002).")
@click.option("-f", "--foreground", is_flag=True, help="Stay, and log to the terminal.")
@click.option("-d", "--debug", is_flag=True, help="Log more.")
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

    Returns when the mount answers. Exit status: 0 mounted, 1 cannot be mounted, 2 wrong options.
    """
    if os.geteuid() != 0:
        fail("only root can mount: the daemon acts for every caller", 1)
    for path in (source, mountpoint):
        if not os.path.isdir(path):
            fail(f"{path}: not a directory", 1)
    source, mountpoint = os.path.realpath(source), os.path.realpath(mountpoint)
    mount_words, text = split_words(",".join(words))
    extra = {"views": views, "policy": policy, "groups": groups}
    given = {name: value for name, value in extra.items() if value}

    def read_options() -> Options:
        if exports is None:
            options, warnings = parse_options(text)
        else:
            if text.strip():
                raise MountError(f"-o {text.strip()}: with --exports, options come from the file alone")
            options, warnings = _from_file(exports, source, client)
        for warning in warnings:
            click.echo(f"cloakfs: warning: {warning}", err=True)
        return replace(options, **given)  # type: ignore[arg-type]

    try:
        options = read_options()
    except (ExportsError, MountError) as exc:
        fail(str(exc), 2)
    except OSError as exc:
        fail(f"{exports}: {exc.strerror}", 1)
    settings = Settings(
        source,
        mountpoint,
        options,
        mount_words,
        policy_dir=os.path.dirname(os.path.abspath(exports)) if exports else os.getcwd(),
        reread=read_options if exports else None,
    )
    level = logging.DEBUG if debug else logging.INFO
    if foreground:
        logging.basicConfig(level=level, format="cloakfs: %(message)s", stream=sys.stderr)
        _serve(settings, lambda: None)
    _in_background(settings, level)


def _from_file(path: str, source: str, client: str | None) -> tuple[Options, list[ExportsWarning]]:
    with open(path, encoding="utf-8", errors="surrogateescape") as file:
        entries, warnings = parse(file.read(), path)
    matching = [e for e in entries if os.path.realpath(e.path) == source and client in (None, e.client)]
    if not matching:
        raise MountError(f"{path}: no entry for {source}" + (f" and client {client}" if client else ""))
    if len(matching) > 1:
        clients = ", ".join(entry.client for entry in matching)
        raise MountError(f"{path}: several entries for {source}; choose one with --client ({clients})")
    return matching[0].options, warnings


def _serve(settings: Settings, ready: Callable[[], None]) -> NoReturn:
    try:
        serve(settings, ready)
    except MountError as exc:
        fail(str(exc), 1)
    sys.exit(0)


def _in_background(settings: Settings, level: int) -> NoReturn:
    """Fork; the parent stays until the mount answers or the daemon says why it cannot."""
    os.makedirs(RUN_DIR, mode=0o755, exist_ok=True)
    log_path = os.path.join(RUN_DIR, f"{mount_key(settings.source, settings.target)}.log")
    reader, writer = os.pipe()
    if os.fork():
        os.close(writer)
        with open(reader, encoding="utf-8", errors="replace") as answer:
            said = answer.read()
        if said == "ready":
            sys.exit(0)
        fail(said or f"the daemon died; see {log_path}", 1)
    os.close(reader)
    os.setsid()
    os.chdir("/")
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    null = os.open(os.devnull, os.O_RDWR)
    log_fd = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(null, 0)
    os.dup2(log_fd, 1)
    os.dup2(log_fd, 2)
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True)

    def ready() -> None:
        os.write(writer, b"ready")
        os.close(writer)

    try:
        serve(settings, ready)
    except MountError as exc:
        os.write(writer, str(exc).encode("utf-8", "replace"))
        os._exit(1)
    except BaseException:
        logging.getLogger("cloakfs").exception("the daemon failed")
        os._exit(1)
    os._exit(0)


def mount_helper() -> None:
    """`mount.fuse.cloakfs`, as mount(8) calls it: SOURCE MOUNTPOINT [-sfnv] [-t TYPE] [-o OPTIONS]."""
    arguments = sys.argv[1:]
    kept = []
    while arguments:
        argument = arguments.pop(0)
        if argument in ("-t", "-N"):
            arguments[:1] = []
        elif argument == "-o":
            kept += ["-o", arguments.pop(0)]
        elif not argument.startswith("-"):
            kept.append(argument)
    mount.main(kept, prog_name="mount.fuse.cloakfs")
