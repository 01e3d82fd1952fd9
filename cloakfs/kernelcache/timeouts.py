"""The timeouts of a reply: which row of the table (`cachepolicy`) it falls under.

The rows depend on two questions. Would all callers be shown the same of an object, and may they search the directories
above it? Or does only one caller know of it, and sees it whatever its groups are?
"""

import os
import stat
from collections.abc import Callable
from dataclasses import replace

from .. import linux
from ..identity import Caller
from ..monitoring import Counters
from ..tree import calls
from ..tree.actor import DAEMON, actor, credentials
from ..tree.filesystems import MountedFilesystem
from ..tree.locate import is_settled
from ..tree.nodes import Nodes
from ..tree.objects import ALL_VIEWERS, NO_VIEWER, Directory, Object, Viewer, as_directory
from ..tree.request import Request
from ..tree.visibility import attrs_of, is_entry_visible, world_may
from ..view import View
from .audience import Audiences
from .cachepolicy import BRIEF_SECONDS, CacheCase, MountTraits, RuleTimeouts, evaluate, tree_mount
from .invalidation import Invalidation

# If more directories above would have to be checked, nothing is cached.
_MAX_ANCESTORS = 64

# For how many views and file systems the evaluated table is stored.
_MOST_EVALUATED = 1000


def may_search(caller: Caller, obj: Object, fd: int, info: linux.Stat) -> bool:
    """Whether all callers with this identity may search the directory. (Not every root has root's capabilities.)

    A remote directory counts only if all may search it.
    """
    if world_may(os.X_OK, obj, fd, info):
        return True
    if obj.filesystem.remote:
        return False  # access(2) would block the loop
    return calls.access(credentials(caller, linux.FILE_CAPABILITIES), fd, os.X_OK)


class Timeouts:
    """Decides what the kernel may cache of one mount, and for how long.

    Args:
        nodes: the objects.
        invalidation: knows what has yet to be forgotten, and is not relied on.
        audiences: knows which callers know of an object.
        traits: what the table of rules depends on, beside view and file system.
        counters: count how many replies may be cached.

    Attributes:
        of_complete_directory: returns the timeout of a negative dentry in a complete directory.
        on_entry: is called with a request about a complete directory of a group, and the stat of an entry in the reply.
    """

    def __init__(
        self,
        nodes: Nodes,
        invalidation: Invalidation,
        audiences: Audiences,
        traits: MountTraits,
        counters: Counters,
    ) -> None:
        self._nodes = nodes
        self._invalidation = invalidation
        self._audiences = audiences
        self._notifier = invalidation.notifier
        self._counters = counters
        self._traits = traits
        self.of_complete_directory: Callable[[Request, bytes], float] = lambda at, name: 0.0
        self.on_entry: Callable[[Request, linux.Stat], None] = lambda at, info: None
        self._passes_handles = traits.mode.passes_handles
        self._subtree_check = traits.mode.subtree_check
        self._rules: dict[tuple[View, MountedFilesystem, bool], RuleTimeouts] = {}  # with whether changes are reported
        self._sets: dict[frozenset[int], frozenset[int]] = {}  # one instance of each, for `Object.cached_in`

    # -- the answers -------------------------------------------------------------------------------

    def entry(self, at: Request, name: bytes, obj: Object, fd: int, info: linux.Stat) -> tuple[float, float]:
        """Return the timeouts of the name and of the attributes of `obj`, called `name` in a directory, in seconds.

        Args:
            at: the request, which names the directory.
            name: the name there.
            obj: what it leads to. The viewer is about to learn of it.
            fd: refers (O_PATH) to it.
            info: its stat.
        """
        is_plain = not (at.number or at.obj.audience < ALL_VIEWERS or stat.S_ISDIR(info.st_mode))
        if is_plain and obj.audience == NO_VIEWER:
            obj.audience = at.viewer  # as `reveal` does it, without a call
        elif obj.audience not in (ALL_VIEWERS, at.viewer):
            self._audiences.reveal(at, obj, info)
        if at.obj.proof is not None and at.obj.proof.audience < 0:
            self.on_entry(at, info)
        if at.who is DAEMON:
            return 0.0, 0.0
        seconds = self.of_name(at, obj, name, fd, info)
        self._counters.names[seconds[0] > BRIEF_SECONDS] += 1
        self._counters.attributes[seconds[1] > BRIEF_SECONDS] += 1
        return seconds

    def attributes(self, at: Request, info: linux.Stat) -> float:
        """Return the timeout of the attributes of an object that a request names by its nodeid, in seconds.

        Args:
            at: the request; what it says of the object may be outdated by now.
            info: the present stat of the object.
        """
        if at.who is DAEMON:
            return 0.0
        seconds = self.of_object(at, info)
        self._counters.attributes[seconds > BRIEF_SECONDS] += 1
        return seconds

    def negative(self, at: Request, name: bytes, handle_of: Callable[[], bytes | None], *, is_hidden: bool) -> float:
        """Return the timeout of a negative dentry, in seconds.

        Args:
            at: the request, which names the directory.
            name: the name.
            handle_of: returns the file handle of what is hidden, as objects have it; None if whatever becomes of the
                name is reported. It may raise an OSError. It is called for absent names as well, to take as long.
            is_hidden: whether something has that name which is hidden.
        """
        directory = at.obj
        seconds = self.of_negative(at.number, at.view, directory, name, at.viewer)
        if directory.proof is not None:
            if is_hidden:
                self._invalidation.invalidate_listing(directory)
            elif not seconds:
                seconds = self.of_complete_directory(at, name)
        if seconds and at.view.hides and directory.filesystem.watched:
            # This has to be invalidated when the hidden file becomes visible.
            note_hidden = self._invalidation.note_hidden
            try:
                handle = handle_of()
            except OSError:
                seconds = 0.0 if is_hidden else seconds
            else:
                if handle is not None and not note_hidden(at.number, directory, name, at.viewer, handle):
                    seconds = 0.0
        self._counters.names[seconds > BRIEF_SECONDS] += 1
        return seconds

    def acl(self, at: Request, *, may_be_cached: bool) -> None:
        """Have the kernel cache the ACL that it reads, or that there is none, only if it caches the attributes.

        Then it drops both when the attributes are invalidated. Otherwise it would show the ACL to all callers that have
        the object open, until it reads the attributes again. An ACL that is invalidated while the kernel reads it is
        not cached (__get_acl in fs/posix_acl.c). A kernel that does not check permissions was not meant to cache ACLs,
        but from Linux 6.2 on it does (CVE-2026-68149), until 6.6.148, 6.12.101, 6.18.42 and 7.1.6.
        """
        if at.who is DAEMON or not may_be_cached or self.of_object(at, at.info) <= BRIEF_SECONDS:
            self._notifier.invalidate_acl(self._nodes.nodeid(at.number, at.obj))

    def opening(self, at: Request) -> bool:
        """Whether the kernel may go on using the pages that it has of a file which is being opened.

        It may if nothing shows a change since the last time, as NFS clients do it (close-to-open).
        """
        obj, info = at.obj, at.info
        stamp = (at.number, info.st_mtime_ns, info.st_ctime_ns, info.st_size)
        rare, may_be_cached = obj.rare or obj.rarely(), self.rules_for(at.view, obj.filesystem).content
        same = rare.content == stamp
        if not (same and may_be_cached):  # otherwise, it had settled when it was noted
            rare.content = stamp if may_be_cached and is_settled(info) else None
        return same

    # -- for how long ------------------------------------------------------------------------------

    def rules_for(self, view: View, filesystem: MountedFilesystem) -> RuleTimeouts:
        """Return what the table of rules says about a view of what is on a file system."""
        key = (view, filesystem, filesystem.watched)
        found = self._rules.get(key)
        if found is None:
            if len(self._rules) >= _MOST_EVALUATED:
                self._rules.clear()
            traits = replace(self._traits, fixed=view.fixed is not None)
            mounted = tree_mount(filesystem, self._nodes.mounts.filesystems)
            found = self._rules[key] = evaluate(CacheCase(traits, view, mounted))
        return found

    def clear(self) -> None:
        """Let go of views that may not be in force any more, whose policies may be large."""
        self._rules.clear()

    def _brief(self, number: int, obj: Object, rules: RuleTimeouts) -> float:
        """Return the timeout of attributes that not all callers may know, for the system call that needs them.

        By a name that is pending, other callers could get at them in that time without a LOOKUP.
        """
        seconds = rules.briefly
        if seconds and not self._notifier.is_idle() and self._has_pending_name(number, obj):
            return 0.0
        return seconds

    def _has_pending_name(self, number: int, obj: Object) -> bool:
        """Whether a name of the object, or of a directory above, is pending, or its directory is stalled."""
        nodes, notifier = self._nodes, self._notifier
        above = self._invalidation.names_of(obj)
        for _ in range(_MAX_ANCESTORS):
            for parent, name in above:
                nodeid = nodes.nodeid(number, parent)
                if nodeid in notifier.stalled or notifier.is_pending(nodeid, name):
                    return True
            above = [(parent.parent, parent.name) for parent, _ in above if parent.parent is not None]
            if not above:
                return False
        return True

    def _is_stalled(self, number: int, directory: Object) -> bool:
        return self._nodes.nodeid(number, directory) in self._notifier.stalled

    def of_name(self, at: Request, obj: Object, name: bytes, fd: int, info: linux.Stat) -> tuple[float, float]:
        """Return the timeouts of the name and of the attributes of `obj`, called `name` in a directory, in seconds.

        It must not be called for a reply to the daemon itself.
        """
        view, parent = at.view, at.obj
        if (self._notifier.stalled and self._is_stalled(at.number, parent)) or info.st_nlink == 0:
            return 0.0, 0.0
        place = parent.filesystem
        rules = self._rules.get((view, place, place.watched)) or self.rules_for(view, place)  # mostly without a call
        if view.fixed is None:
            is_public = (
                rules.names > 0
                and at.info.st_mode & stat.S_IXOTH > 0  # the cheapest check, and false in most homes
                and self.same_for_all(view, name, info, fd)
                and self.is_public(at.number, view, parent)
            )
            if not is_public or obj.has_names_for_one:
                return self._of_private_name(at, obj, info, rules)
            seconds = rules.names  # `is_public` has noted that the directory is cached
        else:
            seconds = rules.names_at_top if parent is self._nodes.root else rules.names
            if not seconds:
                return 0.0, self._brief(at.number, obj, rules)
            if not ((at.has_searched and view.fixed.uid) or may_search(view.fixed, parent, at.fd, at.info)):
                return 0.0, 0.0  # a listing shows names and no more
            self._note_cached(at.number, parent)
        if obj.filesystem is not parent.filesystem:  # something is mounted there
            rules = self.rules_for(view, obj.filesystem)
            seconds = min(seconds, rules.lasting)
        self._note_cached(at.number, obj)
        obj.audience = ALL_VIEWERS  # the cached name shows it to all callers, without a request
        return seconds, self._of_attributes(at, obj, info, rules, rules.attributes)

    def _of_private_name(self, at: Request, obj: Object, info: linux.Stat, rules: RuleTimeouts) -> tuple[float, float]:
        """Return both timeouts for a name in a caller view that not all callers may know.

        A directory in which names are cached for its audience is treated like this, too: a cached name of it would let
        all callers in. They are invalidated when another caller looks it up (`Audiences.make_ready`).
        """
        parent, audiences = at.obj, self._audiences
        viewer = at.viewer if obj.audience >= ALL_VIEWERS else audiences.viewer_of(obj, at.viewer, at.who)
        if (
            not (rules.attributes_for_one if viewer >= 0 else rules.attributes_for_members)
            or not audiences.is_visible_to(at.view, viewer, at.who.uid, info)
            or not self.is_reached_by(viewer, at, parent)
            or not self._is_for_viewer_only(at, parent, obj)
        ):
            return 0.0, self._brief(at.number, obj, rules)
        theirs, seconds = self.rules_for(at.view, obj.filesystem), 0.0
        if parent.audience == viewer and audiences.may_search(
            viewer, at.who.uid, parent, at.fd, at.info, has_acl=at.has_acl
        ):
            seconds = min(rules.names_for_one if viewer >= 0 else rules.names_for_members, theirs.lasting)
            as_directory(parent).has_names_for_one = True  # `is_reached_by` has noted that it is cached
            self._note_cached(at.number, obj, cached_for_one=True)
        return seconds, self._of_private_attributes(viewer, at, obj, info, theirs)

    def of_negative(self, number: int, view: View, parent: Object, name: bytes, viewer: Viewer) -> float:
        """Return the timeout of a negative dentry `name` in `parent`, whatever is known of its other entries.

        In a caller view that hides anything, it is 0: names that are hidden from some must not be cached, and the time
        of a reply would reveal which ones these are. In one that hides nothing, negative dentries are cached where all
        callers may search.
        """
        top = self._nodes.root
        place = parent.filesystem
        rules = self._rules.get((view, place, place.watched)) or self.rules_for(view, place)  # mostly without a call
        seconds = rules.negative_at_top if parent is top else rules.negative
        if not seconds or (view.fixed is None and not self.is_public(number, view, parent)):
            return 0.0
        if self._notifier.stalled and self._is_stalled(number, parent):
            return 0.0
        self._note_cached(number, parent)
        if parent is top and not self._invalidation.note_negative(number, parent, name, viewer):
            return 0.0
        return seconds

    def of_object(self, at: Request, info: linux.Stat) -> float:
        """Return the timeout of the attributes of an object that a request names by its nodeid.

        It is 0 for an object without a name: no event would cause the invalidation when something else gets the name.

        Args:
            at: the request; what it says of the object may be outdated by now.
            info: its present stat.
        """
        number, view, obj, fd = at.number, at.view, at.obj, at.fd
        place = obj.filesystem
        rules = self._rules.get((view, place, place.watched)) or self.rules_for(view, place)  # mostly without a call
        seconds = rules.attributes
        if info.st_nlink == 0:
            return self._brief(number, obj, rules)
        if obj is self._nodes.root:
            seconds = rules.attributes_of_top
            if not seconds:
                return 0.0
        elif view.fixed is None:
            is_public = (
                seconds > 0
                and self.same_for_all(view, obj.name, info, fd)
                and self._is_public_place(number, view, obj, info)
            )
            if not is_public or (self._subtree_check and obj.has_names_for_one):
                return self._of_private_object(at, info, rules)
        elif not view.is_steady or not is_entry_visible(view, actor(view.fixed), obj.name, info, fd):
            return self._brief(number, obj, rules)  # a change that is just being answered may have hidden it
        if self._notifier.stalled and obj.parent is not None and self._is_stalled(number, obj.parent):
            return 0.0
        self._note_cached(number, obj)
        if self._subtree_check:
            obj.audience = ALL_VIEWERS  # the kernel lets others pass it without a request
        return self._of_attributes(at, obj, info, rules, seconds)

    def _of_private_object(self, at: Request, info: linux.Stat, rules: RuleTimeouts) -> float:
        obj = at.obj
        viewer = at.viewer if obj.audience >= ALL_VIEWERS else self._audiences.viewer_of(obj, at.viewer, at.who)
        if (
            obj.audience != viewer
            or not (rules.attributes_for_one if viewer >= 0 else rules.attributes_for_members)
            or not self._audiences.is_visible_to(at.view, viewer, at.who.uid, info)
        ):
            return self._brief(at.number, obj, rules)
        if obj.parent is not None and info.st_nlink == 1 and self.is_known_to(at.number, obj, viewer):
            # Where it is was found when this was cached, which would have been invalidated if it had moved.
            places: list[tuple[Object, bytes]] = [(obj.parent, obj.name)]
        else:
            places = list(self._nodes.locator.places(obj, info))
        if (
            len(places) != 1
            or not self.is_reached_by(viewer, at, places[0][0])
            or not self._is_for_viewer_only(at, places[0][0], obj)
        ):
            return self._brief(at.number, obj, rules)
        parent, name = self._nodes.nodeid(at.number, places[0][0]), places[0][1]
        if parent in self._notifier.stalled or self._notifier.is_pending(parent, name):
            return 0.0  # a caller that must not know the name could get at them by it
        return self._of_private_attributes(viewer, at, obj, info, rules)

    def _of_private_attributes(
        self, viewer: Viewer, at: Request, obj: Object, info: linux.Stat, rules: RuleTimeouts
    ) -> float:
        """Return the timeout of attributes that the viewer surely may know, wherever the object is found."""
        is_directory = stat.S_ISDIR(info.st_mode)
        if is_directory and not rules.of_directories:
            return 0.0
        if obj.audience != viewer or (info.st_nlink > 1 and not is_directory):
            return self._brief(at.number, obj, rules)
        seconds = rules.attributes_for_one if viewer >= 0 else rules.attributes_for_members
        if not seconds:  # something is mounted there whose changes are not reported
            return self._brief(at.number, obj, rules)
        self._note_cached(at.number, obj, cached_for_one=True)
        return seconds

    def _of_attributes(self, at: Request, obj: Object, info: linux.Stat, rules: RuleTimeouts, seconds: float) -> float:
        view = at.view
        is_directory = stat.S_ISDIR(info.st_mode)
        if is_directory and not rules.of_directories:
            return 0.0
        if view.fixed is not None:
            return seconds
        # Another name of a hard link may be hidden, and be the one that is left.
        if info.st_nlink > 1 and not is_directory:
            return self._brief(at.number, obj, rules)
        is_alike = at.viewer >= 0 and not self._passes_handles  # there is but one caller to show it to
        if not is_alike and not view.is_shown_alike(info.st_uid, info.st_gid):
            return 0.0
        return seconds or self._brief(at.number, obj, rules)

    # -- what one caller, or a group, would be shown -----------------------------------------------

    def is_reached_by(self, viewer: Viewer, at: Request, directory: Object) -> bool:
        """Whether all of an audience see this directory and all above it, and none of their names is pending.

        Where the kernel has cached something of a directory for this audience alone, this was proven then, and the
        cached entry would have been invalidated if it had changed.

        Args:
            viewer: the uid of the request, whatever its groups are, or one of its groups, whoever is in it.
            at: the request.
            directory: of any audience.
        """
        nodes, number, notifier = self._nodes, at.number, self._notifier
        here, is_proven = directory, False
        for _ in range(_MAX_ANCESTORS):
            if here is nodes.root:
                break
            is_proven = is_proven or self.is_known_to(number, here, viewer)
            if is_proven and notifier.is_idle():
                break
            parent = here.parent
            if not is_proven:
                fd = nodes.descriptors.fd(here)
                info = here.filesystem.stat(fd)
                if not here.filesystem.watched or not self._audiences.is_visible_to(at.view, viewer, at.who.uid, info):
                    return False
                if parent is None or (here.checked != info.st_ctime_ns and not nodes.locator.is_child(here, parent)):
                    return False
            # By a pending name, a caller that must not know it could get at what is below: after a rename, also by one
            # that leads to what all callers may know.
            if parent is None or notifier.is_pending(nodes.nodeid(number, parent), here.name):
                return False
            here = parent
        else:
            return False
        if directory.audience == viewer:
            self._note_cached(number, directory, cached_for_one=True)
        return True

    def _is_for_viewer_only(self, at: Request, parent: Object, obj: Object) -> bool:
        """Whether the kernel lets only the viewer get at `obj` in the directory `parent`, even by handle.

        With subtree_check, the kernel sends a request, as the caller, for each directory above that is not cached.
        Attributes of a directory are cached only if no other caller knows of its parent, so that a request is sent each
        time for the uppermost directory of which only this caller knows. Before the daemon lets another caller pass
        there, everything below is invalidated.
        """
        if not self._subtree_check:
            return True
        if parent.audience != at.viewer or parent.relocated or obj.relocated:
            return False
        as_directory(parent).has_names_for_one = True
        return True

    # -- what all callers would be shown -----------------------------------------------------------

    def same_for_all(self, view: View, name: bytes, info: linux.Stat, fd: int) -> bool:
        """Whether all callers are shown the same of the entry `name`, which `fd` refers to."""
        if view.cloak_by_ids is not None:  # `CloakList.same_for_all`, without a call
            return view.cloak_by_ids.condition(info.st_mode, info.st_uid, info.st_gid).admits_all
        return view.same_for_all(attrs_of(name, info, fd))

    def same_by_name(self, view: View, obj: Object) -> bool:
        """Whether the present name of an object changes nothing for any caller."""
        if view.cloak is not None:
            return True
        fd = self._nodes.descriptors.fd(obj)
        return self.same_for_all(view, obj.name, obj.filesystem.stat(fd), fd)

    def is_public(self, number: int, view: View, obj: Object) -> bool:
        """Whether all callers see this directory and all above it, and may search them.

        If so, each of them is noted as cached: what is cached below is invalidated when this is no longer so. The
        result is noted as well, so that each directory is checked only once, however deep the tree is.
        """
        nodes = self._nodes
        above: list[Directory] = []
        while not (number in obj.public_in and self.is_known_to(number, obj)):
            if len(above) >= _MAX_ANCESTORS:
                return False
            here = as_directory(obj)
            above.append(here)
            if here.blocking_ancestor is not None and self._is_still_blocked(view, here):
                for directory in above:
                    directory.blocking_ancestor = here.blocking_ancestor
                return False
            fd = nodes.descriptors.fd(here)
            info = here.filesystem.stat(fd)
            if not self._lets_all_through(view, here, fd, info):
                for directory in above:
                    directory.blocking_ancestor = here
                return False
            if here is nodes.root:
                break
            parent = here.parent
            if parent is None:
                return False
            if here.checked != info.st_ctime_ns and not nodes.locator.is_child(here, parent):
                return False
            obj = parent
        for directory in reversed(above):
            self._note_cached(number, directory)
            public = directory.public_in | {number}
            directory.public_in = self._sets.setdefault(public, public)
        return True

    def _lets_all_through(self, view: View, obj: Object, fd: int, info: linux.Stat) -> bool:
        if not world_may(os.X_OK, obj, fd, info):
            return False
        return obj is self._nodes.root or self.same_for_all(view, obj.name, info, fd)

    def _is_still_blocked(self, view: View, obj: Directory) -> bool:
        """Whether the directory that not all callers could search last time still blocks the way.

        This takes one look, however deep the tree is.
        """
        blocking_ancestor, obj.blocking_ancestor = obj.blocking_ancestor, None
        at: Object | None = obj
        while at is not None and at is not blocking_ancestor:
            at = at.parent
        if at is None:
            return False
        fd = self._nodes.descriptors.fd(at)
        if self._lets_all_through(view, at, fd, at.filesystem.stat(fd)):
            return False
        obj.blocking_ancestor = blocking_ancestor
        return True

    def _is_public_place(self, number: int, view: View, obj: Object, info: linux.Stat) -> bool:
        if info.st_nlink > 1 and not stat.S_ISDIR(info.st_mode):
            return False
        places = list(self._nodes.locator.places(obj, info))
        return len(places) == 1 and self.is_public(number, view, places[0][0])

    # -- what is cached ----------------------------------------------------------------------------

    def is_known_to(self, number: int, obj: Object, viewer: Viewer = NO_VIEWER) -> bool:
        """Whether the kernel may answer this caller about the object from its cache.

        Without `viewer`: whether it may answer all callers, so that it need not be checked who may know of it.
        """
        if number not in obj.cached_in or (obj.cached_for_one and obj.audience != viewer):
            return False
        invalidation = self._invalidation
        if obj.cache_epoch != invalidation.epoch or not obj.filesystem.watched:
            return False
        return not (invalidation.subtrees and invalidation.is_being_invalidated(obj))

    def _note_cached(self, number: int, obj: Object, *, cached_for_one: bool = False) -> None:
        """Note that the kernel has cached something of the object, for all callers or for its audience alone."""
        if obj.cache_epoch != self._invalidation.epoch:
            self._invalidation.invalidate_earlier_epochs(obj, by_name=self._notifier.session < 0)
            obj.cache_epoch = self._invalidation.epoch
        if number not in obj.cached_in or obj.cached_for_one:  # what rests on its being public still does
            obj.cached_for_one = cached_for_one
        if number not in obj.cached_in:
            views = obj.cached_in | {number}
            obj.cached_in = self._sets.setdefault(views, views)
            self._nodes.registry.hold(obj, obj.cached_in)
