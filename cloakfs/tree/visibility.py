"""Whether a caller may see an object: its view decides about the object and every directory above it.

To find out whether a caller may see an object deep in the tree, every directory above it has to be checked. Where the
kernel reports each change before the system call that makes it returns (fanotify(7)), once is enough: while nothing is
reported, everything is as it was.

Two things are cached. Neither depends on the caller, so that no user can displace what others need by making requests
as many callers. For a directory: who may see it, and that it is in its place, until a change of this directory is
reported. For the path to it: who may see all directories on it, until a change of any of them is reported. To find out
whether one was takes no system call.
"""

import contextlib
import errno
import stat
import sys
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from functools import partial
from typing import Literal

from .. import linux
from ..cloak import CloakList
from ..identity import Caller, ServerId
from ..policy import Attrs
from ..view import View
from . import calls
from .accesspath import AccessPath
from .actor import DAEMON, Actor, credentials
from .locate import is_settled
from .nodes import Nodes
from .notes import noting
from .objects import NEVER, Directory, Object

AT_ONCE = 128
"""How many directories are checked without giving time to other requests, which takes about a millisecond."""

# Checking a directory takes as long as making this many access paths.
_PATHS_PER_CHECK = 16


class TooManyAncestors(Exception):
    """There are too many directories above to check all of them at once."""


class AccessPaths:
    """The access paths of one tree.

    Args:
        nodes: the objects.
        at_once: how many directories may be checked without giving time to other requests.

    Attributes:
        changes: how many changes of directories above others were reported.
        is_up_to_date: returns whether every change made until now has been reported to this object (`changed`,
            `invalidate`). It is called only where the answer is needed.
    """

    def __init__(self, nodes: Nodes, at_once: int = sys.maxsize) -> None:
        self._nodes = nodes
        self._at_once = at_once
        self._registry = nodes.registry
        self._cloak: CloakList | None = None
        self._beginning = AccessPath(None, None)
        self.changes = 0
        self.is_up_to_date: Callable[[], bool] = lambda: False

    def changed(self, directory: Object) -> None:
        """Note that the directory's place, or who may see it, has changed, or its ACL."""
        if isinstance(directory, Directory):
            directory.verified_epoch = -1
            directory.no_acl_since = NEVER
            access_path = directory.access_path
            if access_path is not None:
                access_path.is_void = True
                self.changes += access_path.is_used

    def invalidate(self) -> None:
        """Drop all that is cached, since it is not known what has changed."""
        self._registry.epoch += 1
        self._beginning.is_void = True
        self._beginning = AccessPath(None, None)
        self.changes += 1

    def to(self, cloak: CloakList, directory: Directory) -> AccessPath | None:
        """Return the path to `directory`; None if it must be checked each time, or a place on it has to be found first.

        Raises:
            TooManyAncestors: there is much to check. Some of it has been checked now, and need not be again.
        """
        if not directory.filesystem.watched or not self.is_up_to_date():
            return None
        if cloak is not self._cloak:
            self._cloak = cloak
            self.invalidate()
        access_path = directory.access_path
        if (
            access_path is not None
            and directory.verified_epoch == self._registry.epoch
            and not access_path.is_void
            and (access_path.seen == self.changes or access_path.holds(self.changes))
        ):
            return access_path
        return self._find(cloak, directory)

    def _find(self, cloak: CloakList, directory: Directory) -> AccessPath | None:
        root, epoch, changes = self._nodes.root, self._registry.epoch, self.changes
        access_path = self._beginning
        unverified: list[Directory] = []
        at: Directory | None = directory
        while at is not root:
            if at is None:
                return None
            known = at.access_path
            if known is not None and known.seen == changes and not known.is_void and at.verified_epoch == epoch:
                access_path = known
                break
            unverified.append(at)
            at = at.parent
        checks = paths = 0
        for at in reversed(unverified):
            if checks + paths // _PATHS_PER_CHECK >= self._at_once:
                raise TooManyAncestors
            if at.verified_epoch != epoch:
                checks += 1
                if not self._verify(cloak, at):
                    return None
            known = at.access_path
            if known is None or not known.is_like(access_path, at.condition):
                if known is not None:
                    known.is_void = True
                    self.changes += known.is_used
                at.access_path = known = AccessPath(access_path, at.condition)
                paths += 1
            known.is_void = False
            known.seen = changes
            access_path = known
        return access_path

    def _verify(self, cloak: CloakList, directory: Directory) -> bool:
        """Find out who may see this directory; False if that must not be cached, or its place is not known."""
        nodes, parent = self._nodes, directory.parent
        if parent is None or not (directory.filesystem.watched and directory.filesystem.has_posix_rules):
            return False
        info = calls.fstat(nodes.descriptors.fd(directory))
        if directory.checked != info.st_ctime_ns and not nodes.locator.is_child(directory, parent):
            return False
        condition = cloak.condition(info.st_mode, info.st_uid, info.st_gid)
        directory.condition = None if condition.admits_all else condition
        directory.verified_epoch = self._registry.epoch
        return True


def _accessible(fd: int, lacks: int, caller: Caller, mode: int) -> bool:
    with calls.as_others():  # a plug-in calls this, and continues
        return calls.access(credentials(caller, lacks), fd, mode)


def attrs_of(name: bytes, info: linux.Stat, fd: int, lacks: int = 0) -> Attrs:
    """Return what a policy may know of the object that `fd` (O_PATH) refers to; valid while `fd` is open.

    `lacks`: for root, the capabilities that it does not have, which count where the policy asks about access.
    """
    return Attrs(
        name.decode("utf-8", "surrogateescape"),
        info.st_mode,
        info.st_uid,
        info.st_gid,
        info.st_size,
        info.st_nlink,
        info.st_mtime_ns,
        partial(_accessible, fd, lacks),
    )


def is_entry_visible(view: View, who: Actor, name: bytes, info: linux.Stat, fd: int) -> bool:
    """Whether `who` may see the entry `name`, to which `fd` refers, of a directory that it sees."""
    if not view.hides or who is DAEMON:
        return True
    if view.lower is not None and view.lower.contains(info) and not view.lower.is_visible_to(who, fd, info):
        return _note_hidden_by_lower(view.lower.path, name)
    return _policy_shows(view, who, name, info, fd) or note_hidden(view, who, name, info, fd)


def note_hidden(
    view: View, who: Actor, name: bytes, info: linux.Stat, fd: int, obj: Object | None = None
) -> Literal[False]:
    """Note, for a trace, that this mount's own policy hides the object; return False."""
    if (notes := noting.get()) is not None:
        notes.add_hidden(view, who.caller, name, attrs_of(name, info, fd), obj)
    return False


def _note_hidden_by_lower(mount: str, name: bytes, obj: Object | None = None) -> Literal[False]:
    """Note, for a trace, that the lower mount hides the object; return False."""
    if (notes := noting.get()) is not None:
        notes.add_hidden_by_lower(mount, name, obj)
    return False


def _policy_shows(view: View, who: Actor, name: bytes, info: linux.Stat, fd: int) -> bool:
    """Whether this mount's own policy shows `who` the entry `name`, to which `fd` refers."""
    if not view.policy_hides:
        return True
    cloak = view.cloak
    if cloak is None:
        return view.visible(who.caller, attrs_of(name, info, fd, who.lacks))
    return cloak.condition(info.st_mode, info.st_uid, info.st_gid).admits(who.uid, who.has_group)


def is_new_entry_visible(view: View, who: Actor, name: bytes, mode: int, uid: ServerId, gid: ServerId) -> bool:
    """Whether `who` would see, by this mount's own policy, what it is about to make with this mode, owner and group."""
    cloak = view.cloak
    if cloak is None:
        return view.visible(who.caller, _attrs_of_new(name, mode, uid, gid))
    return cloak.condition(mode, uid, gid).admits(who.uid, who.has_group)


def note_not_made(view: View, who: Actor, name: bytes, mode: int, uid: ServerId, gid: ServerId) -> None:
    """Note, for a trace, that nothing is made because the caller would not see it (`is_new_entry_visible`)."""
    if (notes := noting.get()) is not None:
        notes.add_hidden(view, who.caller, name, _attrs_of_new(name, mode, uid, gid))


def _attrs_of_new(name: bytes, mode: int, uid: ServerId, gid: ServerId) -> Attrs:
    return Attrs(name.decode("utf-8", "surrogateescape"), mode, uid, gid)


def world_may(bits: int, obj: Object, fd: int, info: linux.Stat, *, has_acl: bool | None = None) -> bool:
    """Whether all callers have permission `bits` (4 read, 1 search) on what `fd` refers to. False when in doubt.

    `has_acl` says whether it has an ACL, if that is known.
    """
    wanted = bits * 0o111
    return (
        info.st_mode & wanted == wanted
        and obj.filesystem.has_posix_rules
        and (has_no_acl(obj, fd, info) if has_acl is None else not has_acl)
    )


def uid_may(uid: ServerId, bits: int, obj: Object, fd: int, info: linux.Stat) -> bool:
    """Whether callers with this uid have permission `bits` on it, whatever their groups. False when in doubt."""
    if uid == info.st_uid:
        return obj.filesystem.has_posix_rules and info.st_mode >> 6 & bits == bits
    return world_may(bits, obj, fd, info)


def is_for_group(uid: ServerId, info: linux.Stat) -> bool:
    """Whether a directory is the group's rather than its owner's, which has this uid or not, judged by its mode.

    The group may search it and others may not. A home is not one, although it may have a group that does: its owner
    comes first, and the group may not write.
    """
    mode = info.st_mode
    is_closed = mode & (stat.S_IXGRP | stat.S_IXOTH) == stat.S_IXGRP
    return stat.S_ISDIR(mode) and is_closed and (mode & stat.S_IWGRP > 0 or uid != info.st_uid)


def members_may(
    gid: ServerId, bits: int, obj: Object, fd: int, info: linux.Stat, *, has_acl: bool | None = None
) -> bool:
    """Whether callers with this group have permission `bits` on it, whatever their uids. False when in doubt.

    The owner may be one of them, and is judged by its own bits. `has_acl` says whether it has an ACL, if that is known.
    """
    wanted = bits * (0o110 if gid == info.st_gid else 0o111)
    if info.st_mode & wanted != wanted or not obj.filesystem.has_posix_rules:
        return False
    return has_no_acl(obj, fd, info) if has_acl is None else not has_acl


def may_without_groups(
    who: Actor, bits: int, obj: Object, fd: int, info: linux.Stat, *, has_acl: bool | None = None
) -> bool:
    """Whether `who` has permission `bits` on it, whatever its supplementary groups. False when in doubt.

    `has_acl` says whether it has an ACL, if that is known. For the owner, an ACL says the same as the mode does. For
    other callers, it may say anything (acl(5)).
    """
    if not obj.filesystem.has_posix_rules:
        return False
    if who.uid == info.st_uid:
        return info.st_mode >> 6 & bits == bits
    wanted = bits * (0o010 if who.gid == info.st_gid else 0o011)
    return info.st_mode & wanted == wanted and (has_no_acl(obj, fd, info) if has_acl is None else not has_acl)


def has_no_acl(obj: Object, fd: int, info: linux.Stat) -> bool:
    """Whether there is no ACL on what `fd` refers to; it is read unless that is known. False when in doubt."""
    cached = obj.descriptor
    if cached is not None and cached.no_acl_at == info.st_ctime_ns:
        return True
    try:
        calls.peek_xattr(linux.ANY_CREDENTIALS, fd, "system.posix_acl_access")
    except OSError as exc:
        if exc.errno not in (errno.ENODATA, errno.EOPNOTSUPP):
            return False
        if cached is not None and is_settled(info):
            cached.no_acl_at = info.st_ctime_ns
        if isinstance(obj, Directory):
            obj.no_acl_since = obj.verified_epoch
        return True
    return False  # the ACL is not worth evaluating


class VisibilityResult(Enum):
    """The result of a check: whether the caller may see the object, and if so, whether it surely has no ACL."""

    HIDDEN = 0
    VISIBLE = 1
    VISIBLE_WITHOUT_ACL = 2


_HIDDEN, _VISIBLE, _VISIBLE_WITHOUT_ACL = VisibilityResult  # global names: faster than `VisibilityResult.HIDDEN`


class Visibility:
    """Decides visibility by handle: of the object itself and of the directories above, as they are at this moment.

    Args:
        nodes: the objects.
        at_once: how many directories may be checked without giving time to other requests.
    """

    def __init__(self, nodes: Nodes, at_once: int = sys.maxsize) -> None:
        self._nodes = nodes
        self._at_once = at_once
        self.access_paths = AccessPaths(nodes, at_once)

    def is_visible(
        self, view: View, who: Actor, obj: Object, info: linux.Stat, known: Mapping[Object, bool] | None = None
    ) -> bool:
        """Whether `who` may see `obj`, whose present stat is `info`, by at least one of its known names.

        `known` says of directories above whether they were found visible while the same request was being served.

        Raises:
            TooManyAncestors: there are too many directories above to check all of them at once (`approach`).
        """
        return self.check(view, who, obj, info, known) is not _HIDDEN

    def check(
        self, view: View, who: Actor, obj: Object, info: linux.Stat, known: Mapping[Object, bool] | None = None
    ) -> VisibilityResult:
        """Return what `is_visible` does, with the same arguments, and what became known of the object's ACL.

        Raises:
            TooManyAncestors: there are too many directories above to check all of them at once (`approach`).
        """
        nodes = self._nodes
        steps = 0
        if not view.hides or who is DAEMON:
            return _VISIBLE
        cloak = view.cloak
        checked = obj
        is_known = True  # whether an access path may be known
        to_query = view.lower
        while True:
            lower = to_query if to_query is not None and to_query.contains(info) else None
            if lower is not None and not lower.is_visible_to(who, nodes.descriptors.fd(obj), info):
                return _HIDDEN
            to_query = to_query if lower is None else None  # the lower mount has checked all directories above, too
            if obj is nodes.root or not (to_query or view.policy_hides):
                return _VISIBLE
            if known is not None and obj in known:
                return _VISIBLE if known[obj] else _HIDDEN
            if (
                to_query is None
                and cloak is not None
                and is_known
                and isinstance(obj, Directory)
                and stat.S_ISDIR(info.st_mode)
            ):
                access_path = self._access_path_to(cloak, obj, known)
                if access_path is not None:
                    result = self._result_by_path(access_path, who, obj)
                    return _VISIBLE if result is _VISIBLE_WITHOUT_ACL and obj is not checked else result
                is_known = False
            steps += 1
            # What the lower mount answered, and what a thread has prefaulted, is valid for this request alone.
            if steps > self._at_once and view.lower is None and not obj.filesystem.by_threads:
                raise TooManyAncestors
            above = self._visible_in(view, who, obj, info)
            if len(above) != 1:  # hard links, which only files have, or no place in which `who` sees it
                return self._is_any_visible(view, who, above, known)
            obj = above[0]
            info = self._stat(obj)

    def _is_any_visible(
        self, view: View, who: Actor, directories: list[Object], known: Mapping[Object, bool] | None
    ) -> VisibilityResult:
        is_visible = any(self.is_visible(view, who, it, self._stat(it), known) for it in directories)
        return _VISIBLE if is_visible else _HIDDEN

    @staticmethod
    def _result_by_path(access_path: AccessPath, who: Actor, directory: Directory) -> VisibilityResult:
        """Return what the access path to a directory says of the directory."""
        if not access_path.admits(who):
            return _HIDDEN
        # It had no ACL then, and no change has been reported since.
        return _VISIBLE_WITHOUT_ACL if directory.no_acl_since == directory.verified_epoch else _VISIBLE

    def _visible_in(self, view: View, who: Actor, obj: Object, info: linux.Stat) -> list[Object]:
        """Return the directories in which `who` may see the object, by the name that it has in them."""
        nodes, parent = self._nodes, obj.parent
        fd = nodes.descriptors.fd(obj)
        if (
            parent is not None
            and (obj.rare is None or not obj.others)
            and (
                obj.checked == info.st_ctime_ns
                # A cloak list ignores names, so for a directory that changes again and again the name is not verified.
                or (view.cloak is not None and stat.S_ISDIR(info.st_mode) and nodes.locator.is_child(obj, parent))
            )
        ):
            return [parent] if _policy_shows(view, who, obj.name, info, fd) else []
        return [parent for parent, name in nodes.locator.places(obj, info) if _policy_shows(view, who, name, info, fd)]

    def _access_path_to(
        self, cloak: CloakList, directory: Directory, known: Mapping[Object, bool] | None
    ) -> AccessPath | None:
        try:
            return self.access_paths.to(cloak, directory)
        except TooManyAncestors:
            if known is None:
                raise
            return None  # the next one that is known is not far

    def approach(self, obj: Object, known: dict[Object, bool]) -> Iterator[Object]:
        """Yield directories above `obj`, from the root on, so that each is near to the next, and the last to `obj`.

        The caller of this calls `is_visible` for each, with `known`, and enters the result into `known`.
        """
        apart = self._at_once // 2  # further ones may turn up in between
        for parent in [obj.parent, *(parent for parent, _ in obj.others)]:
            above: list[Object] = []
            at: Object | None = parent
            while at is not None and at is not self._nodes.root:
                above.append(at)
                at = at.parent
            way = above[apart::apart][::-1]
            for number, one in enumerate(way):
                if one not in known:
                    yield one
                if not known[one]:
                    known.update(dict.fromkeys(way[number:], False))
                    break

    def _stat(self, obj: Object) -> linux.Stat:
        return obj.filesystem.stat(self._nodes.descriptors.fd(obj))

    def note_hidden(self, view: View, who: Actor, obj: Object) -> None:
        """Note, for a trace, which object hides `obj` from `who`: itself, or a directory above it."""
        if (notes := noting.get()) is not None:
            notes.hidden.clear()  # `obj` may have been judged by its name before
            with contextlib.suppress(OSError):  # it is gone by now
                self._note_hidden(view, who, obj)

    def _note_hidden(self, view: View, who: Actor, obj: Object) -> None:
        at: Object | None = obj
        to_query = view.lower
        while at is not None and at is not self._nodes.root:
            fd = self._nodes.descriptors.fd(at)
            info = self._stat(at)
            if to_query is not None and to_query.contains(info):
                if not to_query.is_visible_to(who, fd, info):
                    _note_hidden_by_lower(to_query.path, at.name, at)
                    return
                to_query = None
            if not _policy_shows(view, who, at.name, info, fd):
                note_hidden(view, who, at.name, info, fd, at)
                return
            at = at.parent
