"""`cloakfs explain`: explains why a caller sees a path, or does not."""

import logging
import stat
import sys
from typing import Any

import click
from rich.table import Table
from rich.text import Text

from cloakfs.audit import explain as why
from cloakfs.identity import Caller
from cloakfs.messages import printable
from cloakfs.reasons import reverse_rule
from cloakfs.state.client import DaemonError

from .common import console, fail
from .completion import a_file
from .exits import FAILED, NEGATIVE, WRONG
from .output import echo_json
from .viewedpath import ViewedPath, parse_caller, parse_client_caller, tree_options, viewed_path


@click.command()
@click.argument("path", shell_complete=a_file)
@click.option("--as", "client_user", metavar="WHO", help="The caller as its machine sends it: USER or UID:GID[:GID,…].")
@click.option("--as-server", "server_user", metavar="WHO", help="An identity on the server, which is not mapped.")
@tree_options
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object instead of tables.")
def explain(
    path: str,
    client_user: str | None,
    server_user: str | None,
    words: tuple[str, ...],
    exports: str | None,
    client: str | None,
    source: str | None,
    *,
    as_json: bool,
) -> None:
    """Explain what a caller sees of PATH, and why.

    PATH is below a mount, whose options then apply, or in the real tree. WHO is a user in this machine's user
    database, or ids.

    Exit status: 0 visible, 3 hidden, 1 the question cannot be answered (no such path), 2 wrong options.
    """
    logging.basicConfig(format="cloakfs: %(message)s")
    viewed = viewed_path(path, words, exports, client, source)
    try:
        who, admitted = _identify(viewed, client_user, server_user)
        steps = why.walk(viewed.source, viewed.names, viewed.view, who.server) if who.server is not None else []
    except OSError as exc:
        fail(f"{viewed.path}: {exc.strerror}", FAILED)
    except DaemonError as exc:
        fail(str(exc), FAILED)
    is_visible = bool(steps) and admitted and why.visible(steps)
    report = _report(viewed, who, steps, admitted=admitted, is_visible=is_visible)
    if as_json:
        echo_json(report)
    else:
        _print(report)
    sys.exit(0 if is_visible else NEGATIVE)


def _identify(viewed: ViewedPath, client_user: str | None, server_user: str | None) -> tuple[why.Identification, bool]:
    """Return the identification of the caller, and whether a fixed view lets it in."""
    fixed = viewed.view.fixed
    if fixed is not None:
        if server_user:
            fail("--as-server: the path leads through a fixed view, which has its own identity", WRONG)
        entering = parse_client_caller(client_user) if client_user else None
        return why.as_given(fixed), entering is None or viewed.view.admits(entering.uid)
    if bool(client_user) == bool(server_user):
        fail("no caller given; give either --as WHO (client ids) or --as-server WHO (server ids)", WRONG)
    if server_user:
        return why.as_given(parse_caller("--as-server", server_user)), True
    if viewed.options.views:
        fail("--as: has no meaning with fixed views; give --as-server WHO, or a path below the mount", WRONG)
    return why.identify(viewed.view, parse_client_caller(client_user or ""), viewed.options.groups), True


def _mapped(entry: why.MappedId) -> dict[str, Any]:
    return {"client": entry.client, "server": entry.server, "rule": entry.rule}


def _report(
    viewed: ViewedPath, who: why.Identification, steps: list[why.PathComponent], *, admitted: bool, is_visible: bool
) -> dict[str, Any]:
    """Return the whole report, as --json prints it."""
    paths = ["/" + "/".join(viewed.names[:count]) for count in range(len(steps))]
    granted = why.permissions(steps, read_only=viewed.options.read_only) if steps else 0
    file = None
    if steps:
        last = steps[-1]
        shown_mode, shown_uid, shown_gid = last.shown or (None, None, None)
        policy = viewed.view.policy
        file = {
            "type": why.kind_of(last.mode),
            "mode": {"server": _octal(last.mode), "client": None if shown_mode is None else _octal(shown_mode)},
            "uid": {"client": shown_uid, "server": last.uid, "rule": reverse_rule(policy, "uid", last.uid)},
            "gid": {"client": shown_gid, "server": last.gid, "rule": reverse_rule(policy, "gid", last.gid)},
        }
    hidden_at = None
    if not admitted:
        hidden_at = "the entrance of the fixed view"
    elif not is_visible:
        hidden_at = next((path for path, step in zip(paths, steps, strict=True) if not step.visible), "/")
    return {
        "path": viewed.path,
        "source": viewed.source,
        "caller": {
            "uid": _mapped(who.uid),
            "gid": _mapped(who.gid),
            "groups": [_mapped(group) for group in who.groups],
            "groups_from": who.source,
            "admitted": admitted,
        },
        "file": file,
        "steps": [_step(path, step, who.server) for path, step in zip(paths, steps, strict=True)],
        "visible": is_visible,
        "hidden_at": hidden_at,
        "accessible": {
            "read": is_visible and bool(granted & why.READ),
            "write": is_visible and bool(granted & why.WRITE),
            "execute": is_visible and bool(granted & why.EXECUTE),
        },
        "read_only": viewed.options.read_only,
    }


def _octal(mode: int) -> str:
    return f"{stat.S_IMODE(mode):04o}"


def _step(path: str, step: why.PathComponent, caller: Caller | None) -> dict[str, Any]:
    return {
        "path": path,
        "mode": stat.filemode(step.mode),
        "uid": step.uid,
        "gid": step.gid,
        "owner": caller is not None and caller.uid == step.uid,
        "visible": step.visible,
        "reason": step.reason,
        "verdicts": [
            {
                "definition": str(verdict.definition),
                "hit_group": verdict.hit_group,
                "hit_other": verdict.hit_other,
                "hit_special": verdict.hit_special,
                "visible": verdict.visible,
            }
            for verdict in step.verdicts
        ],
        "permissions": {
            "read": bool(step.permissions & why.READ),
            "write": bool(step.permissions & why.WRITE),
            "execute": bool(step.permissions & why.EXECUTE),
        },
    }


def _print(report: dict[str, Any]) -> None:
    out = console()
    caller, file = report["caller"], report["file"]
    callers = Table("caller", "client id", "server id", "rule", title_justify="left")
    for what in ("uid", "gid"):
        _ids(callers, what, caller[what])
    for group in caller["groups"]:
        _ids(callers, "group", group, nothing="dropped")
    out.print(Text(printable(f"{report['path']} (export {report['source']})")))
    out.print(callers)
    if caller["uid"]["client"] is not None:
        sources = {"proc": "as given", "none": "none", "database": "the server's user database"}
        source = sources.get(caller["groups_from"], "the same for every caller")
        out.print(Text(f"Supplementary groups: {source} (groups={caller['groups_from']})."))
    if file:
        table = Table(file["type"], "client", "server", "rule")
        for what, name in (("uid", "owner"), ("gid", "group")):
            _ids(table, name, file[what], nothing="?")
        table.add_row("mode", file["mode"]["client"] or "?", file["mode"]["server"], "")
        out.print(table)
    steps = Table()
    for name in ("path", "mode", "owner", "group", "visible", "permissions", "why"):
        steps.add_column(name, overflow="fold", no_wrap=name in ("mode", "visible"))  # nothing is truncated
    for step in report["steps"]:
        granted = "".join(
            letter if step["permissions"][name] else "-"
            for letter, name in (("r", "read"), ("w", "write"), ("x", "execute"))
        )
        steps.add_row(
            Text(printable(step["path"])),
            step["mode"],
            str(step["uid"]),
            str(step["gid"]),
            Text("yes", "green") if step["visible"] else Text("no", "red"),
            granted,
            Text(printable(step["reason"])),
        )
    if report["steps"]:
        out.print(steps)
    out.print(Text(printable(_conclusion(report))))


def _ids(table: Table, what: str, mapped: dict[str, Any], nothing: str = "-") -> None:
    client = "-" if mapped["client"] is None else str(mapped["client"])
    server = nothing if mapped["server"] is None else str(mapped["server"])
    table.add_row(what, client, server, Text(printable(mapped["rule"])))


def _conclusion(report: dict[str, Any]) -> str:
    if not report["visible"]:
        return f"Hidden, at {report['hidden_at']}."
    granted = [name for name, yes in report["accessible"].items() if yes]
    text = f"Visible; accessible to {', '.join(granted)}." if granted else "Visible; not accessible."
    return text + (" The export is read-only." if report["read_only"] else "")
