"""What the kernel may remember, and for how long.

The kernel's dentries and attributes are shared by all callers of a mount. So in a caller view it may remember only
what every caller would be told: of an object that all see alike, below directories that all see and may search.
In a fixed view there is but one identity, and everything may be remembered, absent names, too, behind a gate that is
not: the name of the view, the kernel's own check of its top directory, or else the first level of names.
"""

import os
import stat

from .. import linux
from ..caller import Caller
from ..tree import calls
from ..tree.door import attrs_of, credentials, everybody_may, sees, subject
from ..tree.locate import is_settled
from ..tree.nodes import Nodes
from ..tree.objects import Object
from ..view import View
from .entered import Entered
from .forget import ABSENT_SECONDS, Forgetting

LONG_SECONDS = 3600.0
"""How long the kernel remembers what it is told to forget when it changes, also behind the mount (fanotify(7))."""

SHORT_SECONDS = 1.0
"""How long it remembers where changes behind the mount are not told: so long may they go unnoticed."""

BRIEF_SECONDS = 0.002
"""How long it remembers attributes of anything else: the system call that asked for them may ask again."""


def may_search(who: Caller, obj: Object, fd: int, info: linux.Stat) -> bool:
    """May this identity search the directory? Of what is far, only if everybody may."""
    if everybody_may(os.X_OK, obj, fd, info):
        return True
    if obj.filesystem.remote:
        return False  # only a thread may ask
    return calls.access(credentials(who), fd, os.X_OK)


class Remembering:
    """Decides for one mount what may be remembered how long.

    Args:
        nodes: the objects.
        forgetting: what is to be forgotten is not relied on.
        exported: a server of the kernel exports the mount: requests come by handle, without any LOOKUP.
        gated: the kernel itself keeps everybody else out of fixed views.
        forgetful: directories change with every answer (`no_client_cache`).
    """

    def __init__(self, nodes: Nodes, forgetting: Forgetting, *, exported: bool, gated: bool, forgetful: bool) -> None:
        self._nodes = nodes
        self._forgetting = forgetting
        self._forgetter = forgetting.forgetter
        self._brief = 0.0 if exported or forgetful else BRIEF_SECONDS
        self._exported = exported
        self._gated = gated
        self._forgetful = forgetful
        self._sets: dict[frozenset[int], frozenset[int]] = {}  # one of each, for `Object.kept`

    # -- for how long ------------------------------------------------------------------------------

    def of_name(self, at: Entered, obj: Object, name: bytes, fd: int, info: linux.Stat) -> tuple[float, float]:
        """How long to remember that `obj` is called `name` in a directory, and its attributes, in seconds.

        Only for an answer to somebody who is not the daemon itself.
        """
        view, parent = at.view, at.obj
        if self._forgetter.is_late(self._nodes.nodeid(at.number, parent)):
            return 0.0, 0.0
        if view.fixed is None:
            if not self.same_for_all(view, name, info, fd) or not self.is_public(at.number, view, parent):
                return 0.0, self._brief
        elif not self._is_steady(view) or (parent is self._nodes.root and not self._gated):
            return 0.0, self._brief
        elif not (at.has_searched or may_search(view.fixed, parent, at.fd, at.info)):
            return 0.0, 0.0  # a listing tells names, no more
        seconds = self._seconds(obj)
        self._keep(at.number, parent)
        self._keep(at.number, obj)
        return seconds, self._of_attributes(view, obj, info, seconds)

    def of_absence(self, number: int, view: View, parent: Object, name: bytes) -> float:
        """How long to remember that `name` leads nowhere in `parent`.

        Never in a caller view: names that are hidden from some may not be remembered, and how long it takes to be told
        of a name would tell which ones are.
        """
        if view.fixed is None or not self._is_steady(view) or (parent is self._nodes.root and not self._gated):
            return 0.0
        if self._forgetter.is_late(self._nodes.nodeid(number, parent)):
            return 0.0
        self._keep(number, parent)
        if parent is self._nodes.root and not self._forgetting.note_absence(number, name):
            return 0.0
        return min(ABSENT_SECONDS, self._seconds(parent))

    def of_object(self, number: int, view: View, obj: Object, fd: int, info: linux.Stat) -> float:
        """How long to remember the attributes of an object that was asked about by its nodeid."""
        if obj is self._nodes.root:
            if view.below is not None or (view.fixed is not None and not self._gated):
                return 0.0
        elif view.fixed is None:
            if not self.same_for_all(view, obj.name, info, fd) or not self._is_public_place(number, view, obj, info):
                return self._brief
        elif not self._is_steady(view) or not sees(view, subject(view.fixed), obj.name, info, fd):
            return self._brief  # a change that is just being answered may have hidden it
        if obj.parent is not None and self._forgetter.is_late(self._nodes.nodeid(number, obj.parent)):
            return 0.0
        self._keep(number, obj)
        return self._of_attributes(view, obj, info, self._seconds(obj))

    def _of_attributes(self, view: View, obj: Object, info: linux.Stat, seconds: float) -> float:
        is_directory = stat.S_ISDIR(info.st_mode)
        if is_directory and self._forgetful:
            return 0.0
        if view.fixed is not None:
            # Handles pass by the gate; who uses one has to be asked for.
            return 0.0 if self._exported else seconds
        # Of a hard link, another name may be hidden, and be the one that is left.
        if info.st_nlink > 1 and not is_directory:
            return self._brief
        if self._exported and not view.is_shown_alike(info.st_uid, info.st_gid):
            return 0.0
        return seconds

    def _seconds(self, obj: Object) -> float:
        return LONG_SECONDS if obj.filesystem.watched else SHORT_SECONDS

    def keeps_content(self, number: int, obj: Object, info: linux.Stat) -> bool:
        """May the kernel go on with the pages that it has of a file which is being opened?

        If nothing tells of a change since the last time, as NFS clients have it (close-to-open).
        """
        stamp = (number, info.st_mtime_ns, info.st_ctime_ns, info.st_size)
        same = obj.content == stamp
        obj.content = stamp if is_settled(info) and obj.filesystem.has_posix_rules else None
        return same

    # -- what everybody would be told --------------------------------------------------------------

    def _is_steady(self, view: View) -> bool:
        """Does a fixed view change only when the tree, or its identity, does?"""
        return view.below is None and view.shows_by_mapping and (view.cloak is not None or not view.hides)

    def same_for_all(self, view: View, name: bytes, info: linux.Stat, fd: int) -> bool:
        """Is everybody shown the same of what `fd` refers to, and is called `name`?"""
        if view.cloak is not None and view.forwards_by_mapping and view.below is None:
            return view.cloak.same_for_all(info.st_mode, info.st_uid, info.st_gid)
        return view.same_for_all(attrs_of(name, info, fd))

    def same_by_name(self, view: View, obj: Object) -> bool:
        """Does the name that an object has got change nothing for anybody?"""
        if view.cloak is not None:
            return True
        fd = self._nodes.fd(obj)
        return self.same_for_all(view, obj.name, obj.filesystem.stat(fd), fd)

    def is_public(self, number: int, view: View, obj: Object) -> bool:
        """Does everybody see this directory and all above it, and may search them?

        Then each of them has to be kept: what is remembered below is forgotten when that is not so any more. So is
        this answer, so that each directory is looked at but once, however deep the tree is.
        """
        nodes = self._nodes
        above: list[Object] = []
        while not (number in obj.public and self.is_known_to_all(number, obj)):
            above.append(obj)
            if obj.barrier is not None and self._is_stopped(view, obj):
                for directory in above:
                    directory.barrier = obj.barrier
                return False
            fd = nodes.fd(obj)
            info = obj.filesystem.stat(fd)
            if not self._lets_all_through(view, obj, fd, info):
                for directory in above:
                    directory.barrier = obj
                return False
            if obj is nodes.root:
                break
            parent = obj.parent
            if parent is None:
                return False
            if obj.checked != info.st_ctime_ns and not nodes.is_child(obj, parent):
                return False
            obj = parent
        is_told = True  # of those above
        for directory in reversed(above):
            self._keep(number, directory)
            is_told = is_told and directory.filesystem.watched
            if is_told and number not in directory.public:
                public = directory.public | {number}
                directory.public = self._sets.setdefault(public, public)
        return True

    def _lets_all_through(self, view: View, obj: Object, fd: int, info: linux.Stat) -> bool:
        if not everybody_may(os.X_OK, obj, fd, info):
            return False
        return obj is self._nodes.root or self.same_for_all(view, obj.name, info, fd)

    def _is_stopped(self, view: View, obj: Object) -> bool:
        """Is not everybody let through where that was so the last time? It is one look, however deep the tree is."""
        barrier, obj.barrier = obj.barrier, None
        at: Object | None = obj
        while at is not None and at is not barrier:
            at = at.parent
        if at is None:
            return False
        fd = self._nodes.fd(at)
        if self._lets_all_through(view, at, fd, at.filesystem.stat(fd)):
            return False
        obj.barrier = barrier
        return True

    def _is_public_place(self, number: int, view: View, obj: Object, info: linux.Stat) -> bool:
        if info.st_nlink > 1 and not stat.S_ISDIR(info.st_mode):
            return False
        places = list(self._nodes.places(obj, info))
        return len(places) == 1 and self.is_public(number, view, places[0][0])

    # -- what is remembered ------------------------------------------------------------------------

    def is_known_to_all(self, number: int, obj: Object) -> bool:
        """Does the kernel remember it, so that nobody needs to be asked who may know of it?"""
        is_kept = number in obj.kept and obj.era == self._forgetting.era and obj.filesystem.watched
        return is_kept and not (self._forgetting.below and self._forgetting.is_being_forgotten(obj))

    def _keep(self, number: int, obj: Object) -> None:
        if obj.era != self._forgetting.era:
            self._forgetting.forget_era(obj, by_name=self._forgetter.session < 0)
            obj.era = self._forgetting.era
        if number not in obj.kept:
            kept = obj.kept | {number}
            obj.kept = self._sets.setdefault(kept, kept)
            self._nodes.hold(obj, obj.kept)
