"""Asks a view whether a caller may see an object and every directory above it."""

import contextlib
import errno
import stat
import sys
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from functools import lru_cache, partial
from typing import Any, Literal

from .. import linux
from ..caller import Caller
from ..cloak import CloakList
from ..ids import ClientId, ServerId
from ..policy import Attrs
from ..view import View
from . import calls
from .locate import is_settled
from .nodes import Nodes
from .notes import noting
from .objects import Directory, Object
from .passages import Far, Passage, Passages

# How many identities are cached. There must be a limit, because clients choose theirs.
_MOST_IDENTITIES = 1024


def credentials(who: Caller, lacks: int = 0) -> linux.Credentials:
    """Return the credentials with which system calls for `who` (server ids) run.

    If it is root, `lacks` is a bit mask of the capabilities that it does not have.
    """
    made = _credentials(who) if len(who.groups) <= linux.FEW_GROUPS else _long_credentials(who)
    return made._replace(lacks=lacks) if lacks and who.uid == 0 else made


def _make_credentials(who: Caller) -> linux.Credentials:
    return linux.Credentials(who.uid, who.gid, tuple(sorted(who.groups - {who.gid})))


_credentials = lru_cache(_MOST_IDENTITIES)(_make_credentials)
_long_credentials = lru_cache(linux.MOST_LONG)(_make_credentials)


def with_group(groups: frozenset[ClientId], gid: ClientId) -> frozenset[ClientId]:
    """Return `groups` with `gid` added. Long sets are cached, since copying and hashing them takes long."""
    if gid in groups:
        return groups
    return groups | {gid} if len(groups) <= linux.FEW_GROUPS else _with_group(groups, gid)


@lru_cache(linux.MOST_LONG)
def _with_group(groups: frozenset[ClientId], gid: ClientId) -> frozenset[ClientId]:
    return groups | {gid}


class Actor:
    """The caller that a request is served as, in server ids. Its groups, which are not cheap, are looked up on demand.

    Args:
        uid: the caller's uid.
        gid: its primary group.
        find: returns the whole caller; called at most once, while the request is being served.
        args: what `find` is called with.
    """

    __slots__ = ("_args", "_caller", "_find", "gid", "uid")

    lacks = 0
    """If it is root: the capabilities that it does not have, as a bit mask."""

    def __init__(self, uid: ServerId, gid: ServerId, find: Callable[..., Caller], *args: Any) -> None:
        self.uid = uid
        self.gid = gid
        self._find = find
        self._args = args
        self._caller: Caller | None = None

    @property
    def caller(self) -> Caller:
        """The caller with all its groups, as policies need it."""
        if self._caller is None:
            self._caller = self._find(*self._args)
        return self._caller

    def has_group(self, gid: ServerId) -> bool:
        """Whether this is one of the caller's groups."""
        return gid == self.gid or gid in self.caller.groups

    @property
    def credentials(self) -> linux.Credentials:
        """The credentials with which system calls for this caller are made."""
        return credentials(self.caller, self.lacks)

    def found(self) -> "Actor":
        """Return the same, with everything looked up: a thread must not do that."""
        who, lacks = self.caller, self.lacks
        return RootActor(who.uid, who.gid, lambda: lacks, lambda: who) if lacks else actor(who)


class RootActor(Actor):
    """A caller that is served as uid 0, with the capabilities that it has, and no more. They are looked up on demand.

    Args:
        uid, gid, find, args: as for any `Actor`.
        find_lacks: returns the capabilities that it does not have.
    """

    __slots__ = ("_find_lacks", "_lacks")

    def __init__(
        self, uid: ServerId, gid: ServerId, find_lacks: Callable[[], int], find: Callable[..., Caller], *args: Any
    ) -> None:
        super().__init__(uid, gid, find, *args)
        self._find_lacks = find_lacks
        self._lacks = -1

    @property
    def lacks(self) -> int:  # type: ignore[override]
        """The capabilities that it does not have, as a bit mask."""
        if self._lacks < 0:
            self._lacks = self._find_lacks()
        return self._lacks


def actor(who: Caller) -> Actor:
    """Return the actor for a caller that is already known. If it is root, it has all capabilities."""
    return _actor(who) if len(who.groups) <= linux.FEW_GROUPS else _make_actor(who)


def _make_actor(who: Caller) -> Actor:
    return Actor(who.uid, who.gid, lambda: who)


_actor = lru_cache(_MOST_IDENTITIES)(_make_actor)


class _Daemon(Actor):
    __slots__ = ()

    @property
    def credentials(self) -> linux.Credentials:
        return linux.ROOT  # in a mount below, this is more than a caller's root (`above`)

    def found(self) -> Actor:
        return self


_ROOT = Caller(ServerId(0), ServerId(0), frozenset({ServerId(0)}))

DAEMON = _Daemon(_ROOT.uid, _ROOT.gid, lambda: _ROOT)
"""The daemon itself, looking through its own mount, or one above. It is recognized by identity (`is`), not by ids."""


def _accessible(fd: int, lacks: int, who: Caller, mode: int) -> bool:
    with calls.as_others():  # a plug-in asks, and continues
        return calls.access(credentials(who, lacks), fd, mode)


def attrs_of(name: bytes, info: linux.Stat, fd: int, lacks: int = 0) -> Attrs:
    """Return what a policy may know of the object that `fd` (O_PATH) refers to; valid while `fd` is open.

    `lacks` is what root does not have if it asks whether it may access the object.
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


def sees(view: View, who: Actor, name: bytes, info: linux.Stat, fd: int) -> bool:
    """Whether `who` may see the entry `name`, to which `fd` refers, of a directory that it sees."""
    if not view.hides or who is DAEMON:
        return True
    if view.below is not None and view.below.has(info) and not view.below.shows(who, fd, info):
        return _note_hidden_below(view.below.path, name)
    return _judged(view, who, name, info, fd) or note_hidden(view, who, name, info, fd)


def note_hidden(
    view: View, who: Actor, name: bytes, info: linux.Stat, fd: int, obj: Object | None = None
) -> Literal[False]:
    """Note for those who trace that this mount's own policy hides the object; return False."""
    if (notes := noting.get()) is not None:
        notes.add_hidden(view, who.caller, name, attrs_of(name, info, fd), obj)
    return False


def _note_hidden_below(mount: str, name: bytes, obj: Object | None = None) -> Literal[False]:
    """Note for those who trace that the mount below hides the object; return False."""
    if (notes := noting.get()) is not None:
        notes.add_hidden_below(mount, name, obj)
    return False


def _judged(view: View, who: Actor, name: bytes, info: linux.Stat, fd: int) -> bool:
    """Do the same for this mount's own policy alone."""
    if not view.judges:
        return True
    cloak = view.cloak
    if cloak is None:
        return view.visible(who.caller, attrs_of(name, info, fd, who.lacks))
    return cloak.condition(info.st_mode, info.st_uid, info.st_gid).admits(who.uid, who.has_group)


def sees_made(view: View, who: Actor, name: bytes, mode: int, uid: ServerId, gid: ServerId) -> bool:
    """Whether `who` would see, by this mount's own policy, what it is about to make with this mode, owner and group."""
    cloak = view.cloak
    if cloak is None:
        return view.visible(who.caller, _attrs_of_new(name, mode, uid, gid))
    return cloak.condition(mode, uid, gid).admits(who.uid, who.has_group)


def note_unmade(view: View, who: Actor, name: bytes, mode: int, uid: ServerId, gid: ServerId) -> None:
    """Note for those who trace that `sees_made` has answered no, and that nothing is made therefore."""
    if (notes := noting.get()) is not None:
        notes.add_hidden(view, who.caller, name, _attrs_of_new(name, mode, uid, gid))


def _attrs_of_new(name: bytes, mode: int, uid: ServerId, gid: ServerId) -> Attrs:
    return Attrs(name.decode("utf-8", "surrogateescape"), mode, uid, gid)


def everybody_may(bits: int, obj: Object, fd: int, info: linux.Stat, *, has_acl: bool | None = None) -> bool:
    """Whether every caller has permission `bits` (4 read, 1 search) on what `fd` refers to. False when in doubt.

    `has_acl` says whether it has an ACL, if that is known.
    """
    wanted = bits * 0o111
    return (
        info.st_mode & wanted == wanted
        and obj.filesystem.has_posix_rules
        and (has_no_acl(obj, fd, info) if has_acl is None else not has_acl)
    )


def may_with_any_groups(uid: ServerId, bits: int, obj: Object, fd: int, info: linux.Stat) -> bool:
    """Whether callers with this uid have permission `bits` on it, whatever their groups. False when in doubt."""
    if uid == info.st_uid:
        return obj.filesystem.has_posix_rules and info.st_mode >> 6 & bits == bits
    return everybody_may(bits, obj, fd, info)


def surely_may(who: Actor, bits: int, obj: Object, fd: int, info: linux.Stat, *, has_acl: bool | None = None) -> bool:
    """Whether `who` has permission `bits` on it, judged without its supplementary groups. False when in doubt.

    `has_acl` says whether it has an ACL, if that is known. For the owner, an ACL says the same as the mode does; for
    everybody else it may say anything (acl(5)).
    """
    if not obj.filesystem.has_posix_rules:
        return False
    if who.uid == info.st_uid:
        return info.st_mode >> 6 & bits == bits
    wanted = bits * (0o010 if who.gid == info.st_gid else 0o011)
    return info.st_mode & wanted == wanted and (has_no_acl(obj, fd, info) if has_acl is None else not has_acl)


def has_no_acl(obj: Object, fd: int, info: linux.Stat) -> bool:
    """Whether there is no ACL on what `fd` refers to; it is looked for unless that is known. False when in doubt."""
    cached = obj.descriptor
    if cached is not None and cached.no_acl_at == info.st_ctime_ns:
        return True
    try:
        calls.peek_xattr(linux.ANYBODY, fd, "system.posix_acl_access")
    except OSError as exc:
        if exc.errno not in (errno.ENODATA, errno.EOPNOTSUPP):
            return False
        if cached is not None and is_settled(info):
            cached.no_acl_at = info.st_ctime_ns
        if isinstance(obj, Directory):
            obj.no_acl_since = obj.trusted
        return True
    return False  # the ACL is not worth evaluating


class Sight(Enum):
    """What a look at an object found: whether the caller may see it, and then whether it surely has no ACL."""

    HIDDEN = 0
    SEEN = 1
    SEEN_WITHOUT_ACL = 2


_HIDDEN, _SEEN, _SEEN_WITHOUT_ACL = Sight  # by these names they are found in no time


class Door:
    """Decides visibility by handle: of the object itself and of the directories above, as they are at this moment.

    Args:
        nodes: the objects.
        at_once: how many directories may be looked at without giving time to others.
    """

    def __init__(self, nodes: Nodes, at_once: int = sys.maxsize) -> None:
        self._nodes = nodes
        self._at_once = at_once
        self.passages = Passages(nodes, at_once)

    def visible(
        self, view: View, who: Actor, obj: Object, info: linux.Stat, known: Mapping[Object, bool] | None = None
    ) -> bool:
        """Whether `who` may see `obj`, whose present stat is `info`, by at least one of its known names.

        `known` says of directories above whether they were found visible while the same request was being served.

        Raises:
            Far: there are too many directories above to look at all of them at once (`approach`).
        """
        return self.look(view, who, obj, info, known) is not _HIDDEN

    def look(
        self, view: View, who: Actor, obj: Object, info: linux.Stat, known: Mapping[Object, bool] | None = None
    ) -> Sight:
        """Return what `visible` says, with what became known of the object on the way."""
        nodes = self._nodes
        steps = 0
        if not view.hides or who is DAEMON:
            return _SEEN
        cloak = view.cloak
        asked = obj
        is_known = True  # whether a passage may be known
        to_ask = view.below
        while True:
            below = to_ask if to_ask is not None and to_ask.has(info) else None
            if below is not None and not below.shows(who, nodes.fd(obj), info):
                return _HIDDEN
            to_ask = to_ask if below is None else None  # the mount below has judged everything above as well
            if obj is nodes.root or not (to_ask or view.judges):
                return _SEEN
            if known is not None and obj in known:
                return _SEEN if known[obj] else _HIDDEN
            if (
                to_ask is None
                and cloak is not None
                and is_known
                and isinstance(obj, Directory)
                and stat.S_ISDIR(info.st_mode)
            ):
                passage = self._passage_to(cloak, obj, known)
                if passage is not None:
                    sight = self._through(passage, who, obj)
                    return _SEEN if sight is _SEEN_WITHOUT_ACL and obj is not asked else sight
                is_known = False
            steps += 1
            # What the mount below said, and what a thread found (`Locator.recall`), is known for this moment alone.
            if steps > self._at_once and view.below is None and not obj.filesystem.by_threads:
                raise Far
            above = self._seen_in(view, who, obj, info)
            if len(above) != 1:  # hard links, which only files have, or no way that `who` sees
                return self._sees_any(view, who, above, known)
            obj = above[0]
            info = self._stat(obj)

    def _sees_any(
        self, view: View, who: Actor, directories: list[Object], known: Mapping[Object, bool] | None
    ) -> Sight:
        is_seen = any(self.visible(view, who, it, self._stat(it), known) for it in directories)
        return _SEEN if is_seen else _HIDDEN

    @staticmethod
    def _through(passage: Passage, who: Actor, directory: Directory) -> Sight:
        """Return what a way that is known says of the directory to which it leads."""
        if not passage.admits(who):
            return _HIDDEN
        # It had no ACL then, and no change has been reported since.
        return _SEEN_WITHOUT_ACL if directory.no_acl_since == directory.trusted else _SEEN

    def _seen_in(self, view: View, who: Actor, obj: Object, info: linux.Stat) -> list[Object]:
        """Return the directories in which `who` may see the object, by the name that it has there."""
        nodes, parent = self._nodes, obj.parent
        fd = nodes.fd(obj)
        if (
            parent is not None
            and (obj.rare is None or not obj.others)
            and (
                obj.checked == info.st_ctime_ns
                # A cloak list ignores names, so for a directory that keeps changing the name is not verified.
                or (view.cloak is not None and stat.S_ISDIR(info.st_mode) and nodes.is_child(obj, parent))
            )
        ):
            return [parent] if _judged(view, who, obj.name, info, fd) else []
        return [parent for parent, name in nodes.places(obj, info) if _judged(view, who, name, info, fd)]

    def _passage_to(
        self, cloak: CloakList, directory: Directory, known: Mapping[Object, bool] | None
    ) -> Passage | None:
        try:
            return self.passages.to(cloak, directory)
        except Far:
            if known is None:
                raise
            return None  # the next one that is known is not far

    def approach(self, obj: Object, known: dict[Object, bool]) -> Iterator[Object]:
        """Yield directories above `obj`, from the root on, so that each is near to the next, and the last to `obj`.

        Whoever iterates asks `visible` about each, with `known`, and enters the answer there.
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
        return obj.filesystem.stat(self._nodes.fd(obj))

    def note_hidden(self, view: View, who: Actor, obj: Object) -> None:
        """Note for those who trace what made `visible` answer that `who` may not see `obj`: it or what is above it."""
        if (notes := noting.get()) is not None:
            notes.hidden.clear()  # `obj` may have been judged by its name before
            with contextlib.suppress(OSError):  # it is gone by now
                self._note_hidden(view, who, obj)

    def _note_hidden(self, view: View, who: Actor, obj: Object) -> None:
        at: Object | None = obj
        to_ask = view.below
        while at is not None and at is not self._nodes.root:
            fd = self._nodes.fd(at)
            info = self._stat(at)
            if to_ask is not None and to_ask.has(info):
                if not to_ask.shows(who, fd, info):
                    _note_hidden_below(to_ask.path, at.name, at)
                    return
                to_ask = None
            if not _judged(view, who, at.name, info, fd):
                note_hidden(view, who, at.name, info, fd, at)
                return
            at = at.parent
