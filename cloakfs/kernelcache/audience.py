"""Who was told of an object, and what may be remembered for a caller that alone was told.

The kernel's dentries and attributes are shared by all callers of a mount, but it can answer only those who have reached
the object: who was never told its nodeid has nothing to ask about. The *audience* of an object is everybody who was
told, or may have been told by something that the kernel remembers. It only grows. If it is one uid, and this caller is
told the same whatever its groups are, then the kernel may remember that, too: names in a directory for the audience of
the directory, attributes for the audience of the object.

An audience grows before the answer that tells: what the kernel remembers for the former audience is forgotten first.
Local root and whoever is handed a descriptor, a working directory or a mount are not told by the daemon; they get at
what is remembered for the one who handed it over (docs/limits.md).
"""

import os
import stat

from .. import linux
from ..exportmode import ExportMode
from ..identity import ClientId, ServerId
from ..tree.nodes import Nodes
from ..tree.objects import ALL, NOBODY, Object, Stale, as_directory
from ..tree.visibility import uid_may
from ..view import View
from .invalidation import Below, Invalidation


class Audiences:
    """The audiences of the objects of one mount. Only the view with number 0 has any; for others they are unknown.

    Whoever is told is given by a client uid, or by `NOBODY` (the daemon itself) or `ALL` (a daemon above).

    Args:
        nodes: the objects.
        invalidation: makes the kernel forget.
        mode: how the mount is exported.
    """

    def __init__(self, nodes: Nodes, invalidation: Invalidation, mode: ExportMode) -> None:
        self._nodes = nodes
        self._invalidation = invalidation
        self._checks_above = mode.subtree_check
        self._being_carried: dict[Object, list[Below]] = {}  # directories, with what `carry` has yet to forget

    # -- who was told ------------------------------------------------------------------------------

    def tell(self, number: int, obj: Object, viewer: int) -> Below | None:
        """Note that `viewer` is about to be told of the object, or evidently was, since it asks by nodeid.

        Attributes that were remembered for others are forgotten at once; names in a directory, and what is below it,
        a moment later. Where nobody may be told before that, `is_ready` says so.
        """
        audience = obj.audience
        if viewer in (audience, NOBODY) or audience == ALL or number:
            return None
        if audience == NOBODY:
            obj.audience = viewer
            return None
        obj.audience = ALL
        if obj.listing is not None:
            self._invalidation.forget_listing(obj)
        if obj.private:
            self._invalidation.forget_attributes(obj)
        return self._invalidation.forget_below(obj) if obj.remembers_names else None

    def tell_passer(self, number: int, obj: Object, viewer: int) -> Below | None:
        """Where the kernel checks the directories above: note that `viewer` is about to be let through a directory.

        Returns what has to be forgotten first, if anything.
        """
        below = self.tell(number, obj, viewer)
        if below is not None or number or not obj.remembers_names:
            return below
        return self._invalidation.below.get(obj)  # because of whoever was let through just before

    async def settle(self, obj: Object) -> None:
        """Where the kernel checks the directories above: wait until nothing rests on the former place of `obj`."""
        below = self._invalidation.below.get(obj)
        if self._checks_above and below is not None:
            await below.done.wait()

    def strayed(self, obj: Object) -> None:
        """Where the kernel checks the directories above: forget what rests on the place of an object that was moved.

        The kernel may learn of its new place at any time, or never.
        """
        if obj.audience == ALL:
            return  # nothing rests on it
        obj.strayed = True
        if obj.private:
            self._invalidation.forget_attributes(obj)
        self._invalidation.forget_below(obj)

    def _carries(self, obj: Object) -> bool:
        """Whether a directory has an audience that the directory above does not have.

        ".." leads whoever stands in it there, and does not ask the daemon. Nobody gets a directory as its present
        parent has it without asking for the parent, so this happens only to directories that were moved.
        """
        return obj.audience != NOBODY and obj.parent is not None and obj.parent.audience not in (ALL, obj.audience)

    def is_ready(self, number: int, obj: Object, viewer: int) -> bool:
        """Whether `viewer` may be told of the directory `obj` without waiting for anything to be forgotten.

        If the daemon itself looks it up, nobody is told, but the kernel learns where the directory is now, and where
        ".." leads those who stand in it.
        """
        if number:
            return True
        is_told = viewer == NOBODY or not obj.remembers_names or self._is_audience(obj, viewer)
        if self._checks_above and obj in self._invalidation.below:
            return False
        return is_told and obj not in self._being_carried and not self._carries(obj)

    @staticmethod
    def _is_audience(obj: Object, viewer: int) -> bool:
        """Whether `viewer` alone was told of the object. (`ALL` says that something may have to be forgotten yet.)"""
        return viewer == obj.audience != ALL

    async def make_ready(self, number: int, obj: Object, viewer: int) -> None:
        """Forget what has to be forgotten before `viewer` is told of the directory `obj`.

        It must not be called while the kernel holds the lock of that directory for this request.

        Raises:
            Stale: somebody keeps the lock, so that the kernel could not be made to forget a name yet.
        """
        await self.carry(number, obj)
        if self._checks_above and (below := self._invalidation.below.get(obj)) is not None:
            await self._invalidation.forgotten(below)
        if self.is_ready(number, obj, viewer):
            return
        self.tell(number, obj, ALL)
        await self._invalidation.forget_below(obj).done.wait()
        notifier, nodeid = self._invalidation.notifier, self._nodes.nodeid(number, obj)
        forgotten = notifier.names_so_far(nodeid)
        if forgotten is not None:
            await forgotten.wait()
        if notifier.session < 0 and notifier.is_late(nodeid):
            raise Stale
        as_directory(obj).remembers_names = False

    async def carry(self, number: int, obj: Object) -> None:
        """Enlarge the audiences of the directories above a directory by its own.

        The kernel may hold their locks. So this waits only until no attributes are remembered below them: of a name
        that somebody has open, the kernel then still knows that it exists, for a moment.
        """
        if self._carries(obj):
            belows = self._being_carried.setdefault(obj, [])
            above = obj.parent
            while above is not None:
                below = self.tell(number, above, obj.audience)
                if below is not None:
                    belows.append(below)
                above = above.parent
        # Meanwhile, others may be told or move it again.
        while belows := [below for below in self._being_carried.get(obj, ()) if not below.done.is_set()]:
            await belows[0].done.wait()
        self._being_carried.pop(obj, None)

    def may_list(self, number: int, obj: Object, viewer: int, *, is_directory: bool) -> bool:
        """Whether a listing may tell `viewer` more of `obj` than its name.

        It must not enlarge an audience for which something is remembered.
        """
        if is_directory and not self.is_ready(number, obj, viewer):
            return False
        if number or viewer == NOBODY or self._is_audience(obj, viewer):
            return True
        return not (obj.remembers_names or (obj.private and obj.audience >= 0))

    # -- what it is told whatever its groups -------------------------------------------------------

    @staticmethod
    def sees(view: View, uid: ServerId, info: linux.Stat) -> bool:
        """Whether the view shows an entry like this to everybody with this uid, whatever its groups."""
        cloak = view.cloak
        if cloak is None or not view.forwards_by_mapping or view.below is not None:
            return False
        return cloak.condition(info.st_mode, info.st_uid, info.st_gid).surely_admits(uid)

    def still_holds(self, view: View, obj: Object, fd: int, info: linux.Stat) -> bool:
        """Whether what is remembered of `obj`, and below it, for an audience of one may still be told to it."""
        audience = obj.audience
        if audience < 0 and obj.parent is not None:
            audience = obj.parent.audience  # the name is remembered for this one
        if audience < 0:
            return False
        uid = view.server_uid(ClientId(audience))
        return self.sees(view, uid, info) and (not stat.S_ISDIR(info.st_mode) or uid_may(uid, os.X_OK, obj, fd, info))
