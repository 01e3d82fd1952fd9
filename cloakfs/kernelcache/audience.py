"""Which callers know of an object, and what may be cached for one caller, or for the members of one group.

The kernel's dentries and attributes are shared by all callers of a mount, but it can answer only those that have
reached the object: a caller that never learned a nodeid cannot send a request about it. The *audience* of an object is
all callers that have learned of it, or may have learned of it from the kernel's cache. It only grows. If it is one uid,
and this caller sees the same whatever its groups are, then the kernel may cache that, too: names in a directory for the
audience of the directory, attributes for the audience of the object.

In a local mount, an audience may also be the members of a group. It begins with a directory that a member looks up, and
that the group may search and others may not, if other callers know the directory above. What is below has the same
audience, as long as members alone learn of it. All of them have to see what is cached, whatever their uids are.

An audience grows before the reply that reveals the object: what the kernel has cached for the former audience is
invalidated first. Local root, and a process that is handed a descriptor, a working directory or a mount, do not learn
of an object from the daemon; they get at what is cached for the process that handed it over (docs/design.md). Likewise,
a process that gives up a group keeps its descriptors and its working directory.
"""

import os
import stat

from .. import linux
from ..exportmode import ExportMode
from ..identity import ClientId, ServerId
from ..tree.actor import Actor
from ..tree.nodes import Nodes
from ..tree.objects import ALL_VIEWERS, NO_VIEWER, Object, Stale, Viewer, as_directory, group_of, is_limited, members_of
from ..tree.request import Request
from ..tree.visibility import is_for_group, members_may, uid_may
from ..view import View
from .invalidation import Invalidation, SubtreeInvalidation


class Audiences:
    """The audiences of the objects of one mount. Only the view with number 0 has any; for others they are unknown.

    A viewer is a client uid, `NO_VIEWER` (the daemon itself) or `ALL_VIEWERS` (an upper daemon). Where an audience is
    a group, `viewer_of` says whether a client uid stands for it.

    Args:
        nodes: the objects.
        invalidation: invalidates what the kernel caches.
        mode: how the mount is exported.
        of_groups: whether audiences may be groups.
    """

    def __init__(self, nodes: Nodes, invalidation: Invalidation, mode: ExportMode, *, of_groups: bool = False) -> None:
        self._nodes = nodes
        self._invalidation = invalidation
        self._subtree_check = mode.subtree_check
        self._of_groups = of_groups
        self._policy = 0  # how often there has been another one
        # By directory: what `extend_to_ancestors` has yet to invalidate.
        self._being_extended: dict[Object, list[SubtreeInvalidation]] = {}

    # -- who knows of an object --------------------------------------------------------------------

    def viewer_of(self, obj: Object, viewer: Viewer, who: Actor) -> Viewer:
        """Return as which audience of the object the viewer counts: as its group, if it is a member; else as itself."""
        audience = obj.audience
        if audience < ALL_VIEWERS and viewer >= 0:
            gid = group_of(audience)
            if audience == members_of(gid, self._policy) and who.has_group(gid):
                return audience
        return viewer

    def reset(self) -> None:
        """Note that another policy is in force: the members of a group need not be the same by it."""
        self._policy += 1

    def reveal(self, at: Request, obj: Object, info: linux.Stat) -> None:
        """Note that the viewer is about to learn of an object by its name in the directory that a request names."""
        if obj.audience == NO_VIEWER and not at.number:
            obj.audience = self._first_audience(at, info)
        else:
            self.record(at.number, obj, self.viewer_of(obj, at.viewer, at.who))

    def _first_audience(self, at: Request, info: linux.Stat) -> Viewer:
        """Return the audience with which an object begins that no caller knew of."""
        above, who, view = at.obj.audience, at.who, at.view
        if above < ALL_VIEWERS:
            return self.viewer_of(at.obj, at.viewer, who)
        if not self._of_groups or at.viewer < 0 or view.fixed is not None or view.cloak_by_ids is None:
            return at.viewer
        gid = ServerId(info.st_gid)
        begins_here = above == ALL_VIEWERS and is_for_group(who.uid, info) and who.has_group(gid)
        return members_of(gid, self._policy) if begins_here else at.viewer

    def record(self, number: int, obj: Object, viewer: Viewer) -> SubtreeInvalidation | None:
        """Add `viewer` to the audience of an object: it is about to learn of it, or its request names the nodeid.

        Attributes that were cached for another viewer are invalidated at once; names in a directory, and what is below
        it, a moment later. `is_ready` says whether the viewer has to wait for that.
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

    def record_passing(self, number: int, obj: Object, viewer: Viewer) -> SubtreeInvalidation | None:
        """With subtree_check: add `viewer` to the audience of a directory that it is about to pass.

        Returns:
            what has to be invalidated first, if anything.
        """
        subtree = self.record(number, obj, viewer)
        if subtree is not None or number or not obj.has_names_for_one:
            return subtree
        return self._invalidation.subtrees.get(obj)  # because of a viewer that has just passed

    async def wait_for_subtree(self, obj: Object) -> None:
        """With subtree_check: wait until nothing rests on the former place of `obj`."""
        subtree = self._invalidation.subtrees.get(obj)
        if self._subtree_check and subtree is not None:
            await subtree.done.wait()

    def relocated(self, obj: Object) -> None:
        """With subtree_check: invalidate what rests on the place of an object that was moved.

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

        ".." leads a process that stands in it there, without a request. A caller reaches a directory by its present
        parent only after a request for the parent, so this happens only to directories that were moved.
        """
        return (
            obj.audience != NO_VIEWER
            and obj.parent is not None
            and obj.parent.audience not in (ALL_VIEWERS, obj.audience)
        )

    def is_ready(self, number: int, obj: Object, viewer: Viewer) -> bool:
        """Whether `viewer` may learn of the directory `obj` without waiting for an invalidation.

        If the daemon itself looks it up, no caller learns of it, but the kernel learns where the directory is now, and
        where ".." leads the processes that stand in it.
        """
        if number:
            return True
        knows = viewer == NO_VIEWER or not obj.has_names_for_one or self._is_audience(obj, viewer)
        if self._subtree_check and obj in self._invalidation.subtrees:
            return False
        return knows and obj not in self._being_extended and not self._exceeds_parent(obj)

    @staticmethod
    def _is_audience(obj: Object, viewer: Viewer) -> bool:
        """Whether `viewer` alone is in the audience. (With `ALL_VIEWERS`, something may have to be invalidated yet.)"""
        return viewer == obj.audience != ALL_VIEWERS

    async def make_ready(self, number: int, obj: Object, viewer: Viewer) -> None:
        """Invalidate what has to be invalidated before `viewer` learns of the directory `obj`.

        It must not be called while the kernel holds the lock of that directory for this request.

        Raises:
            Stale: a process holds the lock, so that a name could not be invalidated yet.
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
        if notifier.session < 0 and nodeid in notifier.stalled:
            raise Stale
        as_directory(obj).has_names_for_one = False

    async def extend_to_ancestors(self, number: int, obj: Object) -> None:
        """Enlarge the audiences of the directories above a directory by its own.

        The kernel may hold their locks. So this waits only until no attributes are cached below them: of a name
        that a process has open, the kernel then still knows that it exists, for a moment.
        """
        if self._exceeds_parent(obj):
            subtrees = self._being_extended.setdefault(obj, [])
            above = obj.parent
            while above is not None:
                subtree = self.record(number, above, obj.audience)
                if subtree is not None:
                    subtrees.append(subtree)
                above = above.parent
        # Meanwhile, others may learn of it or move it again.
        while subtrees := [subtree for subtree in self._being_extended.get(obj, ()) if not subtree.done.is_set()]:
            await subtrees[0].done.wait()
        self._being_extended.pop(obj, None)

    def may_list(self, number: int, obj: Object, viewer: Viewer, *, is_directory: bool) -> bool:
        """Whether a listing may show `viewer` more of `obj` than its name.

        It must not enlarge an audience for which something is cached.
        """
        if is_directory and not self.is_ready(number, obj, viewer):
            return False
        if number or viewer == NO_VIEWER or self._is_audience(obj, viewer):
            return True
        return not (obj.has_names_for_one or (obj.cached_for_one and is_limited(obj.audience)))

    # -- what all in it see, whatever else they are -------------------------------------------------

    @staticmethod
    def is_visible_to(view: View, audience: Viewer, uid: ServerId, info: linux.Stat) -> bool:
        """Whether the view shows an entry like this to the whole audience: a group, or all callers with this uid."""
        cloak = view.cloak_by_ids
        if cloak is None or not is_limited(audience):
            return False
        condition = cloak.condition(info.st_mode, info.st_uid, info.st_gid)
        return condition.surely_admits(uid) if audience >= 0 else condition.surely_admits_members(group_of(audience))

    @staticmethod
    def may_search(
        audience: Viewer, uid: ServerId, obj: Object, fd: int, info: linux.Stat, *, has_acl: bool | None = None
    ) -> bool:
        """Whether the whole audience, which is a group or all callers with this uid, may search a directory.

        `has_acl` says whether the directory has an ACL, if that is known.
        """
        if audience >= 0:
            return uid_may(uid, os.X_OK, obj, fd, info)
        return members_may(group_of(audience), os.X_OK, obj, fd, info, has_acl=has_acl)

    def is_still_visible(self, view: View, obj: Object, fd: int, info: linux.Stat) -> bool:
        """Whether what is cached of `obj`, and below it, for its audience alone may still be shown to it."""
        audience = obj.audience
        if not is_limited(audience) and obj.parent is not None:
            audience = obj.parent.audience  # the name is cached for this one
        uid = view.server_uid(ClientId(audience)) if audience >= 0 else ServerId(-1)
        return self.is_visible_to(view, audience, uid, info) and (
            not stat.S_ISDIR(info.st_mode) or self.may_search(audience, uid, obj, fd, info)
        )
