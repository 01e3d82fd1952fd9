"""`cloakfs table`: shows who sees what in a directory, as in Table 2 of Spadavecchia & Zadok (2002)."""

import logging
import stat

import click
from rich.table import Table
from rich.text import Text

from cloakfs.audit import explain as why
from cloakfs.identity import Caller, ServerId
from cloakfs.messages import printable
from cloakfs.state.client import DaemonError
from cloakfs.tree.views import ViewError, user_identity

from .common import console, fail
from .completion import a_directory
from .exits import FAILED, WRONG
from .output import echo_json
from .viewedpath import ViewedPath, parse_caller, parse_client_caller, tree_options, viewed_path


@click.command()
@click.argument("path", shell_complete=a_directory)
@click.option("--as", "client_users", multiple=True, metavar="WHO", help="Add a caller by its client ids; repeatable.")
@click.option("--as-server", "server_users", multiple=True, metavar="WHO", help="Add an identity by its server ids.")
@click.option("--only", is_flag=True, help="Show only the callers given with --as or --as-server, not the owners.")
@tree_options
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object instead of a table.")
def table(
    path: str,
    client_users: tuple[str, ...],
    server_users: tuple[str, ...],
    words: tuple[str, ...],
    exports: str | None,
    client: str | None,
    source: str | None,
    *,
    only: bool,
    as_json: bool,
) -> None:
    """Show what each user sees of each file in the directory PATH.

    The columns are the users who own something there, by their server ids. A: visible and accessible, v: visible
    only, -: hidden.

    Exit status: 0 shown, 1 the question cannot be answered (no such directory), 2 wrong options.
    """
    logging.basicConfig(format="cloakfs: %(message)s")
    viewed = viewed_path(path, words, exports, client, source, follow=True)
    try:
        columns = _columns(viewed, client_users, server_users, only=only)
        rows = why.table(
            viewed.source, viewed.names, viewed.view, list(columns.values()), read_only=viewed.options.read_only
        )
    except OSError as exc:
        fail(f"{viewed.path}: {exc.strerror}", FAILED)
    except DaemonError as exc:
        fail(str(exc), FAILED)
    if as_json:
        _print_json(viewed, columns, rows)
        return
    out = console()
    shown = Table("file", "mode", "owner", "group", *(printable(label) for label in columns))
    for row in rows:
        cells = (Text(cell, {"A": "green", "v": "yellow", "-": "dim"}[cell]) for cell in row.cells)
        shown.add_row(Text(printable(row.name)), stat.filemode(row.mode), str(row.uid), str(row.gid), *cells)
    out.print(Text(printable(f"{viewed.path} (export {viewed.source})")))
    out.print(shown)
    out.print(Text("A visible and accessible, v visible only, - hidden"))


def _columns(
    viewed: ViewedPath, client_users: tuple[str, ...], server_users: tuple[str, ...], *, only: bool
) -> dict[str, Caller | None]:
    columns: dict[str, Caller | None] = {}
    if viewed.view.fixed is not None:
        if client_users or server_users:
            fail("--as: the path leads through a fixed view, which has its own identity", WRONG)
        return {"the view": viewed.view.fixed}
    if client_users and viewed.options.views:
        fail("--as: has no meaning with fixed views; give --as-server WHO, or a path below the mount", WRONG)
    if only and not (client_users or server_users):
        fail("--only: no caller given; add --as or --as-server", WRONG)
    if not only:
        for uid in why.owners(viewed.source, viewed.names):
            label, who = _owner(uid, viewed.options.anongid)
            columns[label] = who
    for text in server_users:
        columns[text] = parse_caller("--as-server", text)
    for text in client_users:
        label = f"{text} (client)" if text in columns else text
        columns[label] = why.identify(viewed.view, parse_client_caller(text), viewed.options.groups).server
    return columns


def _owner(uid: ServerId, nogroup: ServerId) -> tuple[str, Caller]:
    """Return an owner's name and identity; one that the user database does not know has only nobody's group."""
    try:
        identity = user_identity(str(uid))
    except ViewError:
        return str(uid), Caller(uid, nogroup, frozenset({nogroup}))
    return identity.label, identity.caller


def _print_json(viewed: ViewedPath, columns: dict[str, Caller | None], rows: list[why.TableRow]) -> None:
    users = [
        {"name": label}
        if who is None
        else {"name": label, "uid": who.uid, "gid": who.gid, "groups": sorted(who.groups)}
        for label, who in columns.items()
    ]
    files = [
        {
            "name": row.name,
            "mode": f"{stat.S_IMODE(row.mode):04o}",
            "type": why.kind_of(row.mode),
            "uid": row.uid,
            "gid": row.gid,
            "cells": dict(zip(columns, row.cells, strict=True)),
        }
        for row in rows
    ]
    echo_json({"path": viewed.path, "source": viewed.source, "users": users, "files": files})
