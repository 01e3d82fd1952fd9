"""Finds what a name leads to, for one caller: an object that it sees, or nothing.

A caller must not be able to distinguish a hidden name from an absent one by the time that the answer takes. So both
take the same steps, as far as the real tree lets them. Where the cloak list alone decides, which goes by the stat, an
absent name is checked, too, and the caller's groups are found out even if they do not matter.
"""

import os
import stat
from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

from .. import linux
from . import calls
from .actor import DAEMON
from .nodes import Nodes
from .objects import Object
from .registry import unlist
from .request import Request
from .visibility import is_entry_visible, note_hidden


class Missing(Enum):
    """Why a name leads nowhere for the caller. To return it takes less time than to raise an exception."""

    ABSENT = False
    HIDDEN = True


ABSENT, HIDDEN = Missing  # global names: faster than `Missing.ABSENT`


class Found(NamedTuple):
    """What a name leads to.

    Attributes:
        obj: the object.
        info: its stat.
    """

    obj: Object
    info: linux.Stat


class Finder:
    """Finds what names lead to in one tree.

    Args:
        nodes: the objects.
        on_hidden: is called for each hidden name in a request: with its stat, and the object if it is known.
    """

    def __init__(self, nodes: Nodes, on_hidden: Callable[[linux.Stat, Object | None], None]) -> None:
        self._nodes = nodes
        self._known_mounts = nodes.mounts.by_mount
        self._on_hidden = on_hidden

    def find(self, at: Request, name: bytes) -> Found | Missing:
        """Return what the entry `name` of the directory leads to, which must not take long (`TreeMounts.waits`).

        Raises:
            PermissionError: the caller may not search the directory, or the name leads to an excluded mount.
            TooSoon: it is not known yet whether the name leads to an excluded mount.
            Unstored: it cannot get a number.
        """
        view, who, directory = at.view, at.who, at.obj
        to_search = at.credentials_for(os.X_OK)
        statx = directory.filesystem.timed(calls.statx_if_there, to_search, at.fd, name)
        if statx is not None and statx[1] not in self._known_mounts:
            return self._find_unknown(at, name, to_search)  # perhaps an excluded mount
        info = at.info if statx is None else statx[0]
        obj = self._nodes.descriptors.at_place(directory, name, info)
        cloak = view.sole_cloak
        if view.hides and who is not DAEMON and cloak is not None:
            of_stat = cloak.condition(info.st_mode, info.st_uid, info.st_gid)
            condition = of_stat if statx is not None else cloak.condition_of_absent
            if not condition.admits(who.uid, who.has_group):
                if cloak.depends_on_groups:
                    if condition.in_group is condition.outside:
                        who.has_group(info.st_gid)
                    who.known or who.caller  # noqa: B018 (found out by now, but for what is of its primary group)
                return self._hidden(at, name, info, obj) if statx is not None else ABSENT
            if obj is not None:
                return Found(obj, info)
        elif statx is None:
            return ABSENT
        elif obj is not None:
            if is_entry_visible(view, who, name, info, obj.fd):
                return Found(obj, info)
            return self._hidden(at, name, info, obj, is_noted=True)
        return self._find_unknown(at, name, to_search)

    def _find_unknown(self, at: Request, name: bytes, to_search: linux.Credentials) -> Found | Missing:
        """Find what the kernel may not know yet, or what lies on a mount that is not known yet, by opening it."""
        try:
            fd = self.open(to_search, at.fd, name)
        except FileNotFoundError:
            return ABSENT
        try:
            info = self.check(at, name, fd)
        except PermissionError:
            unlist(at.obj, name)  # an excluded mount covers what was known there
            raise
        return HIDDEN if info is None else Found(self._nodes.registry.resolve(fd, at.obj, name, info), info)

    def open(self, credentials: linux.Credentials, directory: int, name: bytes) -> int:
        """Open (O_PATH) an entry of a directory, as `credentials`; its visibility has yet to be checked (`check`)."""
        fd = self._nodes.descriptors.with_descriptor(calls.find, credentials, directory, name)
        try:
            self._nodes.prefaulter.fetch_attributes(credentials, fd)
        except BaseException:
            calls.close(fd)
            raise
        return fd

    def check(self, at: Request, name: bytes, fd: int) -> linux.Stat | None:
        """Return the stat of the entry `name`, which `fd` refers to; None if the caller may not see it.

        In that case, and on any error, `fd` is closed.
        """
        try:
            info = self._nodes.mounts.stat(fd)
            if is_entry_visible(at.view, at.who, name, info, fd):
                return info
            known = self._nodes.registry.known(fd, at.obj) if stat.S_ISDIR(info.st_mode) and not at.in_thread else None
            self._hidden(at, name, info, known, is_noted=True)
        except BaseException:
            calls.close(fd)
            raise
        calls.close(fd)
        return None

    def _hidden(
        self, at: Request, name: bytes, info: linux.Stat, obj: Object | None, *, is_noted: bool = False
    ) -> Missing:
        if not is_noted:
            note_hidden(at.view, at.who, name, info, -1)
        self._on_hidden(info, obj)
        return HIDDEN
