"""What the kernel may remember of a mount, and what keeps it from remembering more: `remember` in words, for people.

`remember` decides about each answer; this module says what its decisions amount to in a mount with given options.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ..exportmode import LOCAL, ExportMode
from ..policy import is_built_in
from ..tree.filesystems import Filesystem
from ..view import View
from .forget import ABSENT_SECONDS
from .remember import BRIEF_SECONDS, LONG_SECONDS, SHORT_SECONDS

# More file systems than these are not named, but counted.
_MOST_NAMED = 3

_ELSE = "of anything else"
_ALL_SHOWN = "in directories that only one caller was told of, and that show all their entries to it"


@dataclass(frozen=True, slots=True)
class Fact:
    """How long the kernel remembers something.

    Attributes:
        what: names, attributes, absent names, listings, content, POSIX ACLs or extended attributes.
        of: of which objects; "" means of all.
        seconds: for how long, unless a change is reported earlier; 0 means not at all, None without a limit.
        reason: what keeps it from being longer, or from holding for all objects; "" where nothing does.
        way_out: which options would change that; "" if there are none.
        where: the file systems inside the tree that this is about; "" means that on which the tree lies, and all
            others of which nothing else is said.
    """

    what: str
    of: str
    seconds: float | None
    reason: str = ""
    way_out: str = ""
    where: str = ""


@dataclass(frozen=True, slots=True)
class Terms:
    """What decides about a mount for as long as it is there.

    Attributes:
        fixed: whether its views are fixed; otherwise each caller has a view of its own.
        several: whether they are `@NAME` directories.
        mode: how it is exported.
        xattrs: whether there are extended attributes.
        acls: whether the kernel is offered POSIX ACLs, to check them itself.
        keeps_listings: whether pyfuse3 can tell the kernel to keep the entries of a directory.
    """

    fixed: bool = False
    several: bool = False
    mode: ExportMode = LOCAL
    xattrs: bool = True
    acls: bool = False
    keeps_listings: bool = False


@dataclass(frozen=True, slots=True)
class TreeMount:
    """A mounted file system that belongs to the tree.

    Attributes:
        path: where it is mounted.
        kind: its type.
        watched: whether changes behind the mount are reported, on it and on all above it.
        has_posix_rules: whether mode bits and POSIX ACLs alone decide who may do what.
        watched_above: whether they are reported on all above it.
        posix_above: the same of `has_posix_rules`.
    """

    path: str
    kind: str
    watched: bool = True
    has_posix_rules: bool = True
    watched_above: bool = True
    posix_above: bool = True


def tree_mounts(filesystems: Sequence[Filesystem]) -> list[TreeMount]:
    """Return what matters here of the file systems of a tree, the one of its root first."""
    root = filesystems[0]
    # What lies on these, or below them.
    unwatched = tuple(f"{other.path}/" for other in filesystems[1:] if not other.watched)
    not_posix = tuple(f"{other.path}/" for other in filesystems[1:] if not other.has_posix_rules)
    return [
        TreeMount(
            it.path,
            it.kind,
            it.watched,
            it.has_posix_rules,
            watched_above=it is root or (root.watched and not it.path.startswith(unwatched)),
            posix_above=it is root or (root.has_posix_rules and not it.path.startswith(not_posix)),
        )
        for it in filesystems
    ]


def facts(terms: Terms, view: View, tree: Sequence[TreeMount]) -> list[Fact]:
    """Return what the kernel remembers of a mount.

    Args:
        terms: what was decided when it was made.
        view: any of its views; the policy is the same in all.
        tree: the file systems of the tree, the one of its root first.
    """
    found = list(_on(terms, view, tree[0]))
    alike: dict[tuple[Fact, ...], list[TreeMount]] = {}
    for mounted in tree[1:]:
        others = tuple(fact for fact in _on(terms, view, mounted) if fact not in found)
        if others:
            alike.setdefault(others, []).append(mounted)
    for others, there in alike.items():
        found += [replace(fact, where=_named(there)) for fact in others]
    return [*found, *_everywhere(terms, found)]


def _named(there: Sequence[TreeMount]) -> str:
    names = [f"{mounted.path} ({mounted.kind})" for mounted in there[:_MOST_NAMED]]
    more = len(there) - len(names)
    return ", ".join(names) + (f" and {more} more" if more else "")


def _on(terms: Terms, view: View, mounted: TreeMount) -> Iterator[Fact]:
    """Return what depends on the file system."""
    yield from _fixed(terms, view, mounted) if terms.fixed else _per_caller(terms, view, mounted)
    if terms.mode.ganesha:
        yield Fact("content", "", 0, "nfs-ganesha keeps files open, so the daemon checks permission for each READ")
    elif mounted.has_posix_rules:
        yield Fact("content", "of files that are the same when they are opened again", None)
    else:
        yield Fact("content", "", 0, f"{mounted.kind} need not show every change in the times of a file")
    yield from _listings(terms, view, mounted)


def _everywhere(terms: Terms, found: Sequence[Fact]) -> Iterator[Fact]:
    """Return what is the same on all file systems."""
    if not terms.xattrs:
        yield Fact("extended attributes", "", None, "there are none (noxattr), and the kernel does not ask")
        return
    if terms.acls:
        longest = max(fact.seconds or 0 for fact in found if fact.what == "attributes")
        if longest > BRIEF_SECONDS:
            yield Fact("POSIX ACLs", "of objects whose attributes are remembered", longest)
        else:
            yield Fact("POSIX ACLs", "", 0, "the kernel forgets them with the attributes")
    way_out = "" if terms.mode.knfsd else "noxattr, if nobody needs any"
    yield Fact("extended attributes", "other than POSIX ACLs" if terms.acls else "", 0, "FUSE caches none", way_out)


def _listings(terms: Terms, view: View, mounted: TreeMount) -> Iterator[Fact]:
    reason, way_out = "the daemon checks each time who sees what", ""
    if terms.mode.no_client_cache:
        reason, way_out = "each answer shows a directory as changed just now", "mount without no_client_cache"
    elif not terms.fixed and _proves_listings(terms, view, mounted):
        if terms.keeps_listings:
            yield Fact("listings", _ALL_SHOWN, None)
            yield Fact("listings", _ELSE, 0, reason)
            return
        reason, way_out = "pyfuse3 has no way to allow it", "the patches in contrib/pyfuse3"
    yield Fact("listings", "", 0, reason, way_out)


def _by_cloak(view: View) -> bool:
    return view.cloak is not None and view.forwards_by_mapping and view.below is None


def _proves_listings(terms: Terms, view: View, mounted: TreeMount) -> bool:
    """Whether a listing may show that nothing in a directory is hidden from its only reader."""
    return _by_cloak(view) and not terms.mode.knfsd and mounted.watched


def _unreported(mounted: TreeMount) -> tuple[str, str]:
    """Return why changes on the file system go unnoticed for a moment, and the way out."""
    if mounted.watched:
        return "", ""
    if not mounted.watched_above:
        return "changes on a file system above are not reported", ""
    way_out = "mount the overlay with nfs_export=on,index=on" if mounted.kind == "overlay" else ""
    return f"changes on {mounted.kind} are not reported", way_out


def _seconds(mounted: TreeMount) -> float:
    return LONG_SECONDS if mounted.watched else SHORT_SECONDS


def _absent(mounted: TreeMount, of: str) -> Fact:
    if mounted.watched:
        return Fact("absent names", of, ABSENT_SECONDS, "a change made by file handle need not report the name")
    return Fact("absent names", of, min(ABSENT_SECONDS, SHORT_SECONDS), *_unreported(mounted))


def _brief(terms: Terms) -> float:
    return 0.0 if terms.mode.knfsd or terms.mode.no_client_cache else BRIEF_SECONDS


def _of_directories(terms: Terms) -> Iterator[Fact]:
    if terms.mode.no_client_cache:
        reason = "each answer shows a directory as changed just now"
        yield Fact("attributes", "of directories", 0, reason, "mount without no_client_cache")


# -- a fixed view ----------------------------------------------------------------------------------


def _fixed(terms: Terms, view: View, mounted: TreeMount) -> Iterator[Fact]:
    if not view.is_steady:
        below = view.below is not None
        reason = "the mount below reports no changes" if below else "the plug-in may change its mind at any time"
        yield Fact("names", "", 0, reason)
        yield Fact("attributes", "", _brief(terms), reason)
        yield Fact("absent names", "", 0, reason)
        return
    seconds, unreported = _seconds(mounted), _unreported(mounted)
    yield Fact("names", "", seconds, *unreported)
    if terms.several:
        yield Fact("names", "of views (@NAME)", 0, "the daemon checks each time who may enter")
    elif not terms.mode.gated:
        entered = (
            ("view_access lets others enter, too", "default_permissions without view_access")
            if view.entrants
            else ("the daemon checks there who may enter", "default_permissions")
        )
        yield Fact("names", "at the top", 0, *entered)
    if terms.mode.knfsd and not terms.mode.subtree_check:
        reason = "NFS clients send handles, so the daemon checks each time whose they are"
        yield Fact("attributes", "", 0, reason, "subtree_check")
    else:
        if terms.mode.knfsd and not terms.mode.gated:
            yield Fact("attributes", "of the top", 0, "the daemon checks there each time whose handle it is")
        yield Fact("attributes", "", seconds, *unreported)
        yield from _of_directories(terms)
    yield _absent(mounted, "")
    if not (terms.several or terms.mode.gated):
        yield Fact("absent names", "at the top", 0, *entered)


# -- a view for each caller ------------------------------------------------------------------------


def _per_caller(terms: Terms, view: View, mounted: TreeMount) -> Iterator[Fact]:
    by_cloak = _by_cloak(view)
    by_plugin = not by_cloak and view.below is None and not is_built_in(view.policy, "same_for_all")
    posix = mounted.has_posix_rules and mounted.posix_above
    passes_handles = terms.mode.passes_handles
    to_all = (by_cloak or by_plugin) and posix
    to_one = by_cloak and (terms.mode.subtree_check or not passes_handles) and mounted.watched
    told_to_one = "in directories that only one caller was told of"
    seconds, unreported = _seconds(mounted), _unreported(mounted)
    if by_plugin:
        alike = "of what the plug-in shows to all (same_for_all), and all can reach"
    else:
        alike = "of what all callers see and can reach" if view.hides else "in directories that all callers can reach"
    limit = _limit(terms, view, mounted, by_cloak=by_cloak, by_plugin=by_plugin)

    # names
    if to_all:
        yield Fact("names", alike, seconds, *unreported)
    if to_one and mounted.has_posix_rules:
        yield Fact("names", told_to_one, seconds)
    yield Fact("names", _ELSE if to_all or (to_one and mounted.has_posix_rules) else "", 0, *limit)

    # attributes
    shown_alike = not passes_handles or (view.forwards_by_mapping and view.shows_by_mapping)
    if to_all and shown_alike:
        owned = ", if only one client id stands for the owner, and for the group" if passes_handles else ""
        yield Fact("attributes", alike + owned, seconds, *unreported)
    if to_one:
        yield Fact("attributes", told_to_one if passes_handles else "of what only one caller was told of", seconds)
    anything_else = f"{_ELSE}, and of files with several hard links"
    yield Fact("attributes", anything_else if (to_all and shown_alike) or to_one else "", _brief(terms), *limit)
    yield from _of_directories(terms)

    # absent names
    to_reader = _proves_listings(terms, view, mounted) and mounted.has_posix_rules
    if to_reader:
        yield _absent(mounted, _ALL_SHOWN)
    if view.hides:
        reason = limit[0] if view.below is not None else "the time of an answer must not tell hidden from absent names"
        yield Fact("absent names", _ELSE if to_reader else "", 0, reason, _views(view))
    elif not posix:
        yield Fact("absent names", _ELSE if to_reader else "", 0, *limit)
    else:
        everywhere = by_cloak or by_plugin  # or else nothing but the top is known to be shown to all
        yield _absent(mounted, "in directories that all callers can reach" if everywhere else "at the top")
        yield Fact("absent names", _ELSE, 0, *limit)


def _limit(terms: Terms, view: View, mounted: TreeMount, *, by_cloak: bool, by_plugin: bool) -> tuple[str, str]:
    """Return what keeps the kernel from remembering the rest, and the way out."""
    if view.below is not None:
        return "the mount below reports no changes", ""
    if not (by_cloak or by_plugin):
        return "the plug-in does not say what it shows to all", "give it a method same_for_all"
    if not (mounted.has_posix_rules and mounted.posix_above):
        decider = "a file system above" if mounted.has_posix_rules else mounted.kind
        return f"{decider} may grant access by rules of its own", _views(view)
    if terms.mode.knfsd and terms.mode.all_squash:
        return "what depends on groups is asked for each time", ""
    if terms.mode.knfsd and terms.mode.subtree_check:
        return "others may be told of it, or it depends on groups", ""
    if terms.mode.knfsd:
        way_out = "subtree_check, or all_squash without range_map" if by_cloak else ""
        return "a client may send one user's handle for another", way_out
    return "the kernel would give every caller the same answer", _views(view)


def _views(view: View) -> str:
    return "a view for each user with views=" if view.is_steady else ""
