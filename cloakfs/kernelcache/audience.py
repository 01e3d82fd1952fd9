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
from ..tree.objects import ALL_VIEWERS, NO_VIEWER, Object, Stale, as_directory
from ..tree.visibility import uid_may
from ..view import View
from .invalidation import Invalidation, SubtreeInvalidation


class Audiences:
    """The audiences of the objects of one mount. Only the view with number 0 has any; for others they are unknown.

    Whoever is told is given by a client uid, or by `NO_VIEWER` (the daemon itself) or `ALL_VIEWERS` (a daemon above).

    Args:
        nodes: the objects.
        invalidation: makes the kernel forget.
        mode: how the mount is exported.
    """

    def __init__(self, nodes: Nodes, invalidation: Invalidation, mode: ExportMode) -> None:
        self._nodes = nodes
        self._invalidation = invalidation
        self._subtree_check = mode.subtree_check
        # By directory: what `extend_to_ancestors` has yet to invalidate.
        self._being_extended: dict[Object, list[SubtreeInvalidation]] = {}

    # -- who was told ------------------------------------------------------------------------------

    def record(self, number: int, obj: Object, viewer: int) -> SubtreeInvalidation | None:
        """Note that `viewer` is about to be told of the object, or evidently was, since it asks by nodeid.

        Attributes that were remembered for others are forgotten at once; names in a directory, and what is below it,
        a moment later. Where nobody may be told before that, `is_ready` says so.
        """
        audience = obj.audience
        if viewer in (audience, NO_VIEWER) or audience == ALL_VIEWERS or number:
            return None
        if audience == NO_VIEWER:
            obj.audience = viewer
            return None
        obj.audience = ALL_VIEWERS
        if obj.proof is not None:
            self._invalidation.invalidate_listing(obj)
        if obj.cached_for_one:
            self._invalidation.invalidate_attributes(obj)
        return self._invalidation.invalidate_subtree(obj) if obj.has_names_for_one else None

    def record_passing(self, number: int, obj: Object, viewer: int) -> SubtreeInvalidation | None:
        """Where the kernel checks the directories above: note that `viewer` is about to be let through a directory.

        Returns what has to be forgotten first, if anything.
        """
        subtree = self.record(number, obj, viewer)
        if subtree is not None or number or not obj.has_names_for_one:
            return subtree
        return self._invalidation.subtrees.get(obj)  # because of whoever was let through just before

    async def wait_for_subtree(self, obj: Object) -> None:
        """Where the kernel checks the directories above: wait until nothing rests on the former place of `obj`."""
        subtree = self._invalidation.subtrees.get(obj)
        if self._subtree_check and subtree is not None:
            await subtree.done.wait()

    def relocated(self, obj: Object) -> None:
        """Where the kernel checks the directories above: forget what rests on the place of an object that was moved.

        The kernel may learn of its new place at any time, or never.
        """
        if obj.audience == ALL_VIEWERS:
            return  # nothing rests on it
        obj.relocated = True
        if obj.cached_for_one:
            self._invalidation.invalidate_attributes(obj)
        self._invalidation.invalidate_subtree(obj)

    def _exceeds_parent(self, obj: Object) -> bool:
        """Whether a directory has an audience that the directory above does not have.

        ".." leads whoever stands in it there, and does not ask the daemon. Nobody gets a directory as its present
        parent has it without asking for the parent, so this happens only to directories that were moved.
        """
        return (
            obj.audience != NO_VIEWER
            and obj.parent is not None
            and obj.parent.audience not in (ALL_VIEWERS, obj.audience)
        )

    def is_ready(self, number: int, obj: Object, viewer: int) -> bool:
        """Whether `viewer` may be told of the directory `obj` without waiting for anything to be forgotten.

        If the daemon itself looks it up, nobody is told, but the kernel learns where the directory is now, and where
        ".." leads those who stand in it.
        """
        if number:
            return True
        is_told = viewer == NO_VIEWER or not obj.has_names_for_one or self._is_audience(obj, viewer)
        if self._subtree_check and obj in self._invalidation.subtrees:
            return False
        return is_told and obj not in self._being_extended and not self._exceeds_parent(obj)

    @staticmethod
    def _is_audience(obj: Object, viewer: int) -> bool:
        """Whether `viewer` alone is in the audience. (With `ALL_VIEWERS`, something may have to be invalidated yet.)"""
        return viewer == obj.audience != ALL_VIEWERS

    async def make_ready(self, number: int, obj: Object, viewer: int) -> None:
        """Forget what has to be forgotten before `viewer` is told of the directory `obj`.

        It must not be called while the kernel holds the lock of that directory for this request.

        Raises:
            Stale: somebody keeps the lock, so that the kernel could not be made to forget a name yet.
        """
        await self.extend_to_ancestors(number, obj)
        if self._subtree_check and (subtree := self._invalidation.subtrees.get(obj)) is not None:
            await self._invalidation.invalidated(subtree)
        if self.is_ready(number, obj, viewer):
            return
        self.record(number, obj, ALL_VIEWERS)
        await self._invalidation.invalidate_subtree(obj).done.wait()
        notifier, nodeid = self._invalidation.notifier, self._nodes.nodeid(number, obj)
        invalidated = notifier.pending_names(nodeid)
        if invalidated is not None:
            await invalidated.wait()
        if notifier.session < 0 and notifier.is_stalled(nodeid):
            raise Stale
        as_directory(obj).has_names_for_one = False

    async def extend_to_ancestors(self, number: int, obj: Object) -> None:
        """Enlarge the audiences of the directories above a directory by its own.

        The kernel may hold their locks. So this waits only until no attributes are remembered below them: of a name
        that somebody has open, the kernel then still knows that it exists, for a moment.
        """
        if self._exceeds_parent(obj):
            subtrees = self._being_extended.setdefault(obj, [])
            above = obj.parent
            while above is not None:
                subtree = self.record(number, above, obj.audience)
                if subtree is not None:
                    subtrees.append(subtree)
                above = above.parent
        # Meanwhile, others may be told or move it again.
        while subtrees := [subtree for subtree in self._being_extended.get(obj, ()) if not subtree.done.is_set()]:
            await subtrees[0].done.wait()
        self._being_extended.pop(obj, None)

    def may_list(self, number: int, obj: Object, viewer: int, *, is_directory: bool) -> bool:
        """Whether a listing may tell `viewer` more of `obj` than its name.

        It must not enlarge an audience for which something is remembered.
        """
        if is_directory and not self.is_ready(number, obj, viewer):
            return False
        if number or viewer == NO_VIEWER or self._is_audience(obj, viewer):
            return True
        return not (obj.has_names_for_one or (obj.cached_for_one and obj.audience >= 0))

    # -- what it is told whatever its groups -------------------------------------------------------

    @staticmethod
    def is_visible_to_uid(view: View, uid: ServerId, info: linux.Stat) -> bool:
        """Whether the view shows an entry like this to everybody with this uid, whatever its groups."""
        cloak = view.cloak
        if cloak is None or not view.forwards_by_mapping or view.below is not None:
            return False
        return cloak.condition(info.st_mode, info.st_uid, info.st_gid).surely_admits(uid)

    def is_still_visible(self, view: View, obj: Object, fd: int, info: linux.Stat) -> bool:
        """Whether what is remembered of `obj`, and below it, for an audience of one may still be told to it."""
        audience = obj.audience
        if audience < 0 and obj.parent is not None:
            audience = obj.parent.audience  # the name is remembered for this one
        if audience < 0:
            return False
        uid = view.server_uid(ClientId(audience))
        return self.is_visible_to_uid(view, uid, info) and (
            not stat.S_ISDIR(info.st_mode) or uid_may(uid, os.X_OK, obj, fd, info)
        )
