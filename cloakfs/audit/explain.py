"""Explains what a caller sees: each step from its ids and a path to the answer, for `cloakfs explain` and `table`.

Each step asks the same view that a mount would ask, so the explanation cannot disagree with the mount. This needs root,
because it asks the kernel for the permissions of other users.
"""

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import trio

from ..accounts.groups import group_source
from ..cloak import Verdict
from ..identity import Caller, ClientCaller, ClientId, ServerId
from ..linux import ROOT
from ..reasons import forward_rule, lower_rule, plugin_rule, reason_of
from ..stacking.answers import AnsweredActor, query
from ..tree import calls
from ..tree.actor import actor, credentials
from ..tree.visibility import attrs_of
from ..view import View

READ, WRITE, EXECUTE = 4, 2, 1


class MappedId(NamedTuple):
    """An id on both sides (None: it has no counterpart there) and the rule that maps it."""

    client: ClientId | None
    server: ServerId | None
    rule: str


@dataclass(frozen=True, slots=True)
class Identification:
    """How a caller becomes an identity on the server.

    Attributes:
        server: the identity; None if a plug-in failed to return one, so that the caller sees nothing.
        uid: the caller's uid.
        gid: its primary gid.
        groups: its supplementary gids; those without a server id are dropped.
        source: where supplementary groups come from, as in the option `groups=`.
    """

    server: Caller | None
    uid: MappedId
    gid: MappedId
    groups: tuple[MappedId, ...]
    source: str


def identify(view: View, caller: ClientCaller, groups: str | None) -> Identification:
    """Return the identity that a request is served as.

    Args:
        view: a caller view.
        caller: the caller; its groups are those that the option `groups=proc` would find.
        groups: the option `groups=` of the export.
    """
    source = None if groups in (None, "proc") else group_source(groups)
    supplementary = caller.groups if source is None else source.of_request(0)
    policy = view.policy
    server = view.identify(ClientCaller(caller.uid, caller.gid, supplementary | {caller.gid}))
    if server is None:
        failed = "the plug-in failed"
        return Identification(
            None, MappedId(caller.uid, None, failed), MappedId(caller.gid, None, failed), (), groups or "proc"
        )
    mapped = []
    if policy.forwards_by_mapping:
        for gid in sorted(supplementary - {caller.gid}):
            known = policy.ids["gid"].groups([gid])
            mapped.append(MappedId(gid, next(iter(known), None), forward_rule(policy, "gid", gid)))
    else:
        mapped += [MappedId(None, gid, plugin_rule(policy)) for gid in sorted(server.groups - {server.gid})]
    more = frozenset[ServerId]() if source is None else trio.run(source.of_user, server.uid)
    mapped += [MappedId(None, gid, "the server's user database") for gid in sorted(more - server.groups)]
    return Identification(
        server._replace(groups=server.groups | more),
        MappedId(caller.uid, server.uid, forward_rule(policy, "uid", caller.uid)),
        MappedId(caller.gid, server.gid, forward_rule(policy, "gid", caller.gid)),
        tuple(mapped),
        groups or "proc",
    )


def as_given(server: Caller) -> Identification:
    """Return the identification of a caller that is given by server ids."""
    rule = "named by server ids"
    return Identification(
        server,
        MappedId(None, server.uid, rule),
        MappedId(None, server.gid, rule),
        tuple(MappedId(None, gid, rule) for gid in sorted(server.groups - {server.gid})),
        rule,
    )


@dataclass(frozen=True, slots=True)
class PathComponent:
    """One component of a path, from the point of view of one identity.

    Attributes:
        name: "" for the root of the export.
        mode: type and permission bits on the server.
        uid: the owner on the server.
        gid: the group on the server.
        shown: (mode, uid, gid) as shown to the client; None if a plug-in failed to return them.
        verdicts: the verdicts of the cloak_list definitions that select it, as if its owner were another user.
        visible: whether this component is visible, regardless of those above.
        reason: the reason, in words.
        permissions: what the kernel grants on the server (4 read, 2 write, 1 execute or search).
    """

    name: str
    mode: int
    uid: ServerId
    gid: ServerId
    shown: tuple[int, ClientId, ClientId] | None
    verdicts: tuple[Verdict, ...]
    visible: bool
    reason: str
    permissions: int


def judge(view: View, caller: Caller, name: str, fd: int, *, is_root: bool = False) -> PathComponent:
    """Judge the object that `fd` (O_PATH) refers to from the point of view of `caller` (server ids)."""
    info = calls.fstat(fd)
    attrs = attrs_of(os.fsencode(name), info, fd)
    shown = view.show(attrs)
    policy = view.policy
    verdicts = policy.cloak.judge(attrs.mode, attrs.uid, attrs.gid, caller.uid, caller.groups)
    lower = view.lower if view.lower is not None and view.lower.contains(info) else None
    is_shown_by_lower = lower is None or lower.is_visible_to(
        AnsweredActor(actor(caller), query(lower, credentials(caller), [fd])), fd, info
    )
    visible = shown is not None and is_shown_by_lower and (is_root or view.visible(caller, attrs))
    reason = reason_of(policy, caller, attrs, verdicts, is_root=is_root, is_shown=shown is not None)
    if lower is not None and not is_shown_by_lower:
        reason = lower_rule(lower.path)
    identity = credentials(caller)
    with calls.as_others():
        permissions = sum(mode for mode in (READ, WRITE, EXECUTE) if calls.access(identity, fd, mode))
    return PathComponent(
        name,
        attrs.mode,
        attrs.uid,
        attrs.gid,
        None if shown is None else shown[:3],
        tuple(verdicts),
        visible,
        reason,
        permissions,
    )


def walk(source: str, names: list[str], view: View, caller: Caller) -> list[PathComponent]:
    """Judge the root of the export at `source`, and each component of a path below it, for `caller` (server ids).

    Symbolic links are not followed.

    Raises:
        OSError: there is no such path.
    """
    fd = calls.find_top(source)
    try:
        steps = [judge(view, caller, "", fd, is_root=True)]
        for name in names:
            child = calls.find(ROOT, fd, name)
            calls.close(fd)
            fd = child
            steps.append(judge(view, caller, name, fd))
        return steps
    finally:
        calls.close(fd)


def visible(steps: list[PathComponent]) -> bool:
    """Whether the end of a walk is visible. Everything below a hidden object is hidden."""
    return all(step.visible for step in steps)


def permissions(steps: list[PathComponent], *, read_only: bool) -> int:
    """Return what the kernel grants at the end of a walk (4 read, 2 write, 1 execute), hidden or not.

    It grants nothing if a directory above may not be searched, and no writing in a read-only export.
    """
    if not all(step.permissions & EXECUTE for step in steps[:-1]):
        return 0
    return steps[-1].permissions & ~WRITE if read_only else steps[-1].permissions


def cell(steps: list[PathComponent], *, read_only: bool) -> str:
    """Return "A" for visible and accessible in some way, "v" for visible only, "-" for neither [SZ Table 2]."""
    if not visible(steps):
        return "-"
    return "A" if permissions(steps, read_only=read_only) else "v"


class TableRow(NamedTuple):
    """A file of a table: its attributes on the server, and for each caller "A", "v" or "-"."""

    name: str
    mode: int
    uid: ServerId
    gid: ServerId
    cells: tuple[str, ...]


def table(
    source: str, names: list[str], view: View, callers: list[Caller | None], *, read_only: bool
) -> list[TableRow]:
    """Return what each of the callers (server ids; None sees nothing) can do with each file of a directory.

    Raises:
        OSError: there is no such directory.
    """
    to_directory = [None if caller is None else walk(source, names, view, caller) for caller in callers]
    rows = []
    for name, fd in _entries(source, names):
        info = calls.fstat(fd)
        cells = [
            "-"
            if caller is None or steps is None
            else cell([*steps, judge(view, caller, name, fd)], read_only=read_only)
            for caller, steps in zip(callers, to_directory, strict=True)
        ]
        rows.append(TableRow(name, info.st_mode, info.st_uid, info.st_gid, tuple(cells)))
    return sorted(rows)


def owners(source: str, names: list[str]) -> list[ServerId]:
    """Return the uids that own something in a directory, sorted.

    Raises:
        OSError: there is no such directory.
    """
    return sorted({calls.fstat(fd).st_uid for _, fd in _entries(source, names)})


def _entries(source: str, names: list[str]) -> Iterator[tuple[str, int]]:
    """Yield the names in a directory, each with a descriptor (O_PATH) that stays open until the next one."""
    fd = calls.find_top(source)
    try:
        for name in names:
            child = calls.find(ROOT, fd, name)
            calls.close(fd)
            fd = child
        directory = calls.open(ROOT, fd, os.O_RDONLY | os.O_DIRECTORY)
    finally:
        calls.close(fd)
    try:
        while batch := calls.getdents(ROOT, directory):
            for entry, _, _ in batch:
                if entry in (b".", b".."):
                    continue
                try:
                    fd = calls.find(ROOT, directory, entry)
                except FileNotFoundError:
                    continue  # just deleted
                try:
                    yield os.fsdecode(entry), fd
                finally:
                    calls.close(fd)
    finally:
        calls.close(directory)


def kind_of(mode: int) -> str:
    """Return the type of a file in words."""
    kinds = {
        stat.S_IFREG: "file",
        stat.S_IFDIR: "directory",
        stat.S_IFLNK: "symbolic link",
        stat.S_IFIFO: "fifo",
        stat.S_IFSOCK: "socket",
        stat.S_IFCHR: "character device",
        stat.S_IFBLK: "block device",
    }
    return kinds[stat.S_IFMT(mode)]
