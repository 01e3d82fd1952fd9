"""Asks a view about an object and everything above it."""

import os
from functools import partial

from . import linux
from .caller import Caller
from .nodes import Nodes, Object
from .policy import Attrs
from .view import View

INSIDER = Caller(0, 0, frozenset({0}))
"""The daemon itself, looking through its own mount. It is told by identity (`is`), not by its ids."""


def credentials(who: Caller) -> linux.Credentials:
    """What system calls for `who` (server ids) run as."""
    return linux.Credentials(who.uid, who.gid, tuple(sorted(who.groups - {who.gid})))


def _accessible(fd: int, who: Caller, mode: int) -> bool:
    linux.assume(credentials(who))
    return linux.may_access(fd, mode)


def attrs_of(name: bytes, info: os.stat_result, fd: int) -> Attrs:
    """What a policy may know of the object that `fd` (O_PATH) refers to; valid as long as `fd` is."""
    return Attrs(
        name.decode("utf-8", "surrogateescape"),
        info.st_mode,
        info.st_uid,
        info.st_gid,
        info.st_size,
        info.st_nlink,
        info.st_mtime_ns,
        partial(_accessible, fd),
    )


class Door:
    """Visibility by handle: of the object itself and of the directories above, as they are at this moment."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes

    def visible(self, view: View, who: Caller, obj: Object, info: os.stat_result) -> bool:
        """May `who` see `obj`, whose present stat is `info`, by at least one of its known names?"""
        nodes = self._nodes
        if not view.hides or who is INSIDER:
            return True
        while obj is not nodes.root:
            fd = nodes.fd(obj)
            above = [parent for parent, name in nodes.places(obj, info) if view.visible(who, attrs_of(name, info, fd))]
            if len(above) != 1:  # hard links, which only files have
                return any(self.visible(view, who, parent, self._stat(parent)) for parent in above)
            obj = above[0]
            info = self._stat(obj)
        return True

    def _stat(self, obj: Object) -> os.stat_result:
        return os.fstat(self._nodes.fd(obj))
