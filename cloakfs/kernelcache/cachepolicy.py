"""What the kernel may cache of a mount, for how long, and why not for longer: one table for all mounts.

The kernel's dentries and attributes are shared by all callers of a mount. So in a caller view, it may cache only what
is the same for every caller: an object that all see alike, below directories that all see and may search; or else an
object that only one caller knows of, since no other caller can send a request about it. In a fixed view there is only
one identity. So everything may be cached, even absent names, behind a gate that is not cached: the name of the view,
the kernel's own check of its top directory, or else the first level of names.

`RULES` is the table. It is evaluated once for each view on each file system of the tree (`evaluate`). For each reply,
it then only has to be found out which row the object falls under (`timeouts`). `facts` says the same in words, for
`cloakfs status`. Beside the table, nothing is cached of an object without a name, nor of a name, or below a name, whose
invalidation is pending (`notifier`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple, Protocol

from ..exportmode import LOCAL, ExportMode
from ..view import View

LONG_SECONDS = 3600.0
"""The timeout of what is invalidated when it changes, even behind the mount (fanotify(7))."""

SHORT_SECONDS = 1.0
"""The timeout of what may change behind the mount unreported: for this long, changes may go unnoticed."""

BRIEF_SECONDS = 0.002
"""The timeout of attributes of anything else, because a system call may need them more than once."""

ABSENT_SECONDS = 10.0
"""The timeout of negative dentries, where there are any.

It is not longer because, when a server changes a hidden file by handle (its mode, for example), the kernel may not
report the name, and before Linux 5.17 nor the file (`invalidation`).
"""

# More file systems than these are not named, but counted.
_MOST_NAMED = 3


# -- what the table depends on ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MountTraits:
    """What the table depends on that is the same for the whole mount, as long as it lasts.

    Attributes:
        fixed: whether its views are fixed; otherwise each caller has a view of its own.
        several: whether they are `@NAME` directories.
        mode: how it is exported.
        xattrs: whether there are extended attributes.
        acls: whether the kernel is offered POSIX ACLs, to check them itself.
        keeps_listings: whether pyfuse3 can have the kernel cache the entries of a directory.
        process_groups: whether callers have the groups of their processes.
    """

    fixed: bool = False
    several: bool = False
    mode: ExportMode = LOCAL
    xattrs: bool = True
    acls: bool = False
    keeps_listings: bool = False
    process_groups: bool = False

    @property
    def knows_members(self) -> bool:
        """Whether it is known of each request which groups its process has. Of a server's requests, it is not."""
        return self.process_groups and not self.mode.is_exported


class FilesystemTraits(Protocol):
    """What the table depends on of a mounted file system of the tree."""

    kind: str
    path: str
    watched: bool
    has_posix_rules: bool


@dataclass(frozen=True, slots=True)
class TreeMount:
    """A mounted file system that belongs to the tree.

    Attributes:
        path: where it is mounted.
        kind: its type.
        watched: whether changes behind the mount are reported, on it and on all above it.
        has_posix_rules: whether mode bits and POSIX ACLs alone decide who may do what.
        watched_above: whether changes are reported on all above it.
        posix_above: whether mode bits and POSIX ACLs alone decide on all above it.
    """

    path: str
    kind: str
    watched: bool = True
    has_posix_rules: bool = True
    watched_above: bool = True
    posix_above: bool = True


def tree_mount(mounted: FilesystemTraits, filesystems: Sequence[FilesystemTraits]) -> TreeMount:
    """Return what the table depends on of a file system of a tree.

    Args:
        mounted: the file system.
        filesystems: all of the tree, the one of its root first.
    """
    root = filesystems[0]
    above = [it for it in filesystems if it is root or mounted.path.startswith(f"{it.path}/")]
    is_root = mounted is root
    return TreeMount(
        mounted.path,
        mounted.kind,
        mounted.watched,
        mounted.has_posix_rules,
        watched_above=is_root or all(it.watched for it in above),
        posix_above=is_root or all(it.has_posix_rules for it in above),
    )


class CacheCase(NamedTuple):
    """What the table is evaluated for: a view of a mount, on a file system of the tree."""

    traits: MountTraits
    view: View
    mounted: TreeMount


# -- the columns of the table ----------------------------------------------------------------------


class CacheKind(Enum):
    """What the kernel may cache. The values are what users read."""

    NAMES = "names"
    ATTRIBUTES = "attributes"
    ABSENT = "absent names"
    CONTENT = "content"
    LISTINGS = "listings"
    ACLS = "POSIX ACLs"
    XATTRS = "extended attributes"


class CacheScope(Enum):
    """Of which objects. Under which row an object falls is found out for each answer.

    Attributes:
        ALL: in a caller view, of what all callers see alike and can reach; in a fixed view, of all that it shows.
        ONE: of what only one caller knows of, and sees whatever its groups are.
        MEMBERS: of what only members of one group know of, who all see it.
        COMPLETE: in directories that only one caller, or one group, knows of, and that show all their entries to it.
        TOP: of the root of the tree, or in it.
        VIEWS: of the directories `@NAME`.
        DIRECTORIES: of any directory, whatever is said in other rows.
        ELSE: of anything else.
    """

    ALL = "all"
    ONE = "one"
    MEMBERS = "members"
    COMPLETE = "complete"
    TOP = "top"
    VIEWS = "views"
    DIRECTORIES = "directories"
    ELSE = "else"


class CacheLimit(NamedTuple):
    """What keeps it from being longer, or from holding for all objects ("" if nothing does).

    `hint` says which options would change that ("" if there are none).
    """

    reason: str = ""
    hint: str = ""


class Rule(NamedTuple):
    """A row of the table. Of several about the same, the first one counts.

    Attributes:
        what: what is cached.
        of: of which objects.
        when: in which cases there is this rule.
        seconds: for how long, unless a change is reported earlier; 0 means not at all, None without a limit.
        why: why not for longer.
    """

    what: CacheKind
    of: CacheScope
    when: Callable[[CacheCase], bool]
    seconds: Callable[[CacheCase], float | None]
    why: Callable[[CacheCase], CacheLimit]


# -- for how long ----------------------------------------------------------------------------------


def _never(_: CacheCase) -> float:
    return 0.0


def _no_limit(_: CacheCase) -> None:
    return None


def _lasting(case: CacheCase) -> float:
    return LONG_SECONDS if case.mounted.watched else SHORT_SECONDS


def _briefly(case: CacheCase) -> float:
    return 0.0 if case.traits.mode.knfsd or case.traits.mode.no_client_cache else BRIEF_SECONDS


def _negative_seconds(case: CacheCase) -> float:
    return min(ABSENT_SECONDS, _lasting(case))


def _with_attributes(case: CacheCase) -> float:
    """ACLs: for as long as any attributes, but those of the top."""
    attributes = (rule for rule in _holding(case, CacheKind.ATTRIBUTES) if rule.of is not CacheScope.TOP)
    longest = max(rule.seconds(case) or 0.0 for rule in attributes)
    return longest if longest > BRIEF_SECONDS else 0.0


# -- when ------------------------------------------------------------------------------------------


def _always(_: CacheCase) -> bool:
    return True


def _fixed(case: CacheCase) -> bool:
    """Whether what the identity of a fixed view is shown changes only with the tree."""
    return case.traits.fixed and case.view.is_steady


def _unsteady(case: CacheCase) -> bool:
    """Whether what the identity of a fixed view is shown may change at any time."""
    return case.traits.fixed and not case.view.is_steady


def _per_caller(case: CacheCase) -> bool:
    return not case.traits.fixed


def _by_cloak(case: CacheCase) -> bool:
    """Whether a caller sees what the cloak_list says, and each of its ids is mapped by itself."""
    return _per_caller(case) and case.view.cloak_by_ids is not None


def _by_plugin(case: CacheCase) -> bool:
    """Whether a plug-in says what it shows to all callers."""
    return _per_caller(case) and case.view.says_same_for_all and not _by_cloak(case)


def _tells_what_all_see(case: CacheCase) -> bool:
    return _by_cloak(case) or _by_plugin(case)


def _posix(case: CacheCase) -> bool:
    """Whether mode bits and ACLs alone say which directories all callers can search."""
    return case.mounted.has_posix_rules and case.mounted.posix_above


def _for_all(case: CacheCase) -> bool:
    return _tells_what_all_see(case) and _posix(case)


def _for_one(case: CacheCase) -> bool:
    """Whether each request about an object that only one caller knows of comes from this caller."""
    mode = case.traits.mode
    return _by_cloak(case) and (mode.subtree_check or not mode.passes_handles) and case.mounted.watched


def _for_members(case: CacheCase) -> bool:
    """Whether each request about an object that only members of a group know of comes from a member."""
    return _for_one(case) and case.traits.knows_members


def _complete(case: CacheCase) -> bool:
    """Whether a listing may prove that nothing in a directory is hidden from its only reader."""
    return _by_cloak(case) and not case.traits.mode.knfsd and case.mounted.watched


def _lists(case: CacheCase) -> bool:
    return _complete(case) and case.traits.keeps_listings and not case.traits.mode.no_client_cache


def _shown_alike(case: CacheCase) -> bool:
    """Whether all callers can be shown the same owner. (The kernel's server has each shown its own id.)"""
    return not case.traits.mode.passes_handles or (case.view.forwards_by_mapping and case.view.shows_by_mapping)


def _guarded(case: CacheCase) -> bool:
    """Whether the daemon alone keeps other callers out of a fixed view, at the first level of names."""
    return case.traits.fixed and not (case.traits.several or case.traits.mode.gated)


def _by_handle(case: CacheCase) -> bool:
    """Whether other callers may enter a fixed view by handle, so that each needs a request."""
    return case.traits.fixed and case.traits.mode.knfsd and not case.traits.mode.subtree_check


def _guarded_top(case: CacheCase) -> bool:
    """Whether each caller that reads the attributes of the top of a fixed view needs a request."""
    mode = case.traits.mode
    return case.traits.fixed and not mode.gated if mode.knfsd else _guarded(case)


def _top_alone(case: CacheCase) -> bool:
    """Whether nothing but the top is known to be shown to all alike."""
    if case.view.lower is not None or case.traits.mode.no_client_cache:
        return False
    if case.traits.fixed:
        return _unsteady(case) and not _guarded_top(case) and not _by_handle(case)
    return _shown_alike(case) and not _for_all(case)


# -- why not for longer ----------------------------------------------------------------------------


def _because(reason: str, hint: str = "") -> Callable[[CacheCase], CacheLimit]:
    return lambda _: CacheLimit(reason, hint)


def _unreported(case: CacheCase) -> CacheLimit:
    """Why changes on the file system go unnoticed for a moment."""
    if case.mounted.watched:
        return CacheLimit()
    if not case.mounted.watched_above:
        return CacheLimit("changes on a file system above are not reported")
    is_overlay = case.mounted.kind == "overlay"
    hint = "mount the overlay with nfs_export=on,index=on" if is_overlay else ""
    return CacheLimit(f"changes on {case.mounted.kind} are not reported", hint)


def _unnamed(case: CacheCase) -> CacheLimit:
    if case.mounted.watched:
        return CacheLimit("a change made by a file handle may be reported without a name")
    return _unreported(case)


_LOWER_MOUNT = CacheLimit("the lower mount reports no changes")
_BY_MORE = CacheLimit("who sees what does not follow from ids and modes alone")


def _may_change(case: CacheCase) -> CacheLimit:
    if case.view.lower is not None:
        return _LOWER_MOUNT
    if not case.view.policy.is_plugin:
        return _BY_MORE
    return CacheLimit("the plug-in may change its mind at any time")


def _enters(case: CacheCase) -> CacheLimit:
    if case.view.entrants:
        return CacheLimit("view_access lets others enter, too", "default_permissions without view_access")
    return CacheLimit("the daemon checks there who may enter", "default_permissions")


def _enters_by_handle(case: CacheCase) -> CacheLimit:
    if case.traits.mode.knfsd:
        return CacheLimit("the daemon checks there each time whose handle it is")
    return _enters(case)


def _views(case: CacheCase) -> str:
    return "a view for each user with views=" if case.view.is_steady else ""


def _differs(case: CacheCase) -> CacheLimit:
    """Why callers may be shown different things in a caller view."""
    mode = case.traits.mode
    if case.view.lower is not None:
        return _LOWER_MOUNT
    if not _tells_what_all_see(case):
        if not case.view.policy.is_plugin:
            return _BY_MORE
        return CacheLimit("the plug-in does not say what it shows to all", "give it a method same_for_all")
    if not _posix(case):
        decider = "a file system above" if case.mounted.has_posix_rules else case.mounted.kind
        return CacheLimit(f"{decider} may grant access by rules of its own", _views(case))
    if mode.knfsd and mode.all_squash:
        return CacheLimit("what depends on groups is asked for each time")
    if mode.knfsd and mode.subtree_check:
        return CacheLimit("other callers may get to know it, or it depends on groups")
    if mode.knfsd:
        hint = "subtree_check, or all_squash without range_map" if _by_cloak(case) else ""
        return CacheLimit("a client may send one user's handle for another", hint)
    return CacheLimit("the kernel would give every caller the same answer", _views(case))


def _may_be_hidden(case: CacheCase) -> CacheLimit:
    if case.view.hides and case.view.lower is None:
        return CacheLimit("the time of an answer must not tell hidden from absent names", _views(case))
    return _differs(case)


def _checked(case: CacheCase) -> CacheLimit:
    """Why listings need requests."""
    if _complete(case) and not case.traits.keeps_listings:
        return CacheLimit("pyfuse3 has no way to allow it", "the patches in contrib/pyfuse3")
    return CacheLimit("the daemon checks each time who sees what")


def _may_not_show(case: CacheCase) -> CacheLimit:
    return CacheLimit(f"{case.mounted.kind} need not show every change in the times of a file")


def _no_need(case: CacheCase) -> CacheLimit:
    return CacheLimit("FUSE caches none", "" if case.traits.mode.knfsd else "noxattr, if nobody needs any")


_JUST_NOW = _because("each answer shows a directory as changed just now", "mount without no_client_cache")
_NFS_HANDLES = _because("NFS clients send handles, so the daemon checks each time whose they are", "subtree_check")
_KEPT_OPEN = _because("nfs-ganesha keeps files open, so the daemon checks permission for each READ")
_LONGEST = _because("")


# -- the table -------------------------------------------------------------------------------------

RULES: tuple[Rule, ...] = (
    # In a fixed view.
    Rule(CacheKind.NAMES, CacheScope.ALL, _fixed, _lasting, _unreported),
    Rule(
        CacheKind.NAMES,
        CacheScope.VIEWS,
        lambda case: _fixed(case) and case.traits.several,
        _never,
        _because("the daemon checks each time who may enter"),
    ),
    Rule(CacheKind.NAMES, CacheScope.TOP, lambda case: _fixed(case) and _guarded(case), _never, _enters),
    Rule(CacheKind.NAMES, CacheScope.ELSE, _unsteady, _never, _may_change),
    Rule(CacheKind.ATTRIBUTES, CacheScope.ALL, lambda case: _fixed(case) and _by_handle(case), _never, _NFS_HANDLES),
    Rule(
        CacheKind.ATTRIBUTES,
        CacheScope.TOP,
        lambda case: _fixed(case) and _guarded_top(case) and not _by_handle(case),
        _never,
        _enters_by_handle,
    ),
    Rule(
        CacheKind.ATTRIBUTES, CacheScope.TOP, lambda case: _unsteady(case) and _top_alone(case), _lasting, _unreported
    ),
    Rule(CacheKind.ATTRIBUTES, CacheScope.ALL, _fixed, _lasting, _unreported),
    Rule(CacheKind.ATTRIBUTES, CacheScope.ELSE, _unsteady, _briefly, _may_change),
    Rule(CacheKind.ABSENT, CacheScope.ALL, _fixed, _negative_seconds, _unnamed),
    Rule(CacheKind.ABSENT, CacheScope.TOP, lambda case: _fixed(case) and _guarded(case), _never, _enters),
    Rule(CacheKind.ABSENT, CacheScope.ELSE, _unsteady, _never, _may_change),
    # In a view for each caller.
    Rule(CacheKind.NAMES, CacheScope.ALL, _for_all, _lasting, _unreported),
    Rule(
        CacheKind.NAMES,
        CacheScope.ONE,
        lambda case: _for_one(case) and case.mounted.has_posix_rules,
        _lasting,
        _LONGEST,
    ),
    Rule(
        CacheKind.NAMES,
        CacheScope.MEMBERS,
        lambda case: _for_members(case) and case.mounted.has_posix_rules,
        _lasting,
        _LONGEST,
    ),
    Rule(CacheKind.NAMES, CacheScope.ELSE, _per_caller, _never, _differs),
    Rule(
        CacheKind.ATTRIBUTES, CacheScope.TOP, lambda case: _per_caller(case) and _top_alone(case), _lasting, _unreported
    ),
    Rule(
        CacheKind.ATTRIBUTES, CacheScope.ALL, lambda case: _for_all(case) and _shown_alike(case), _lasting, _unreported
    ),
    Rule(CacheKind.ATTRIBUTES, CacheScope.ONE, _for_one, _lasting, _LONGEST),
    Rule(CacheKind.ATTRIBUTES, CacheScope.MEMBERS, _for_members, _lasting, _LONGEST),
    Rule(CacheKind.ATTRIBUTES, CacheScope.ELSE, _per_caller, _briefly, _differs),
    Rule(
        CacheKind.ABSENT,
        CacheScope.COMPLETE,
        lambda case: _complete(case) and case.mounted.has_posix_rules,
        _negative_seconds,
        _unnamed,
    ),
    Rule(
        CacheKind.ABSENT,
        CacheScope.ALL,
        lambda case: _for_all(case) and not case.view.hides,
        _negative_seconds,
        _unnamed,
    ),
    Rule(
        CacheKind.ABSENT,
        CacheScope.TOP,
        lambda case: _per_caller(case) and _posix(case) and not _tells_what_all_see(case) and not case.view.hides,
        _negative_seconds,
        _unnamed,
    ),
    Rule(CacheKind.ABSENT, CacheScope.ELSE, _per_caller, _never, _may_be_hidden),
    # In either.
    Rule(
        CacheKind.ATTRIBUTES,
        CacheScope.DIRECTORIES,
        lambda case: case.traits.mode.no_client_cache and not (_unsteady(case) or _by_handle(case)),
        _never,
        _JUST_NOW,
    ),
    Rule(
        CacheKind.CONTENT,
        CacheScope.ALL,
        lambda case: case.mounted.has_posix_rules and not case.traits.mode.ganesha,
        _no_limit,
        _LONGEST,
    ),
    Rule(CacheKind.CONTENT, CacheScope.ELSE, lambda case: case.traits.mode.ganesha, _never, _KEPT_OPEN),
    Rule(CacheKind.CONTENT, CacheScope.ELSE, lambda case: not case.mounted.has_posix_rules, _never, _may_not_show),
    Rule(CacheKind.LISTINGS, CacheScope.COMPLETE, _lists, _no_limit, _LONGEST),
    Rule(CacheKind.LISTINGS, CacheScope.ELSE, lambda case: case.traits.mode.no_client_cache, _never, _JUST_NOW),
    Rule(CacheKind.LISTINGS, CacheScope.ELSE, _always, _never, _checked),
    Rule(
        CacheKind.ACLS,
        CacheScope.ALL,
        lambda case: case.traits.acls and _with_attributes(case) > 0,
        _with_attributes,
        _LONGEST,
    ),
    Rule(
        CacheKind.ACLS,
        CacheScope.ELSE,
        lambda case: case.traits.acls and not _with_attributes(case),
        _never,
        _because("the kernel drops them with the attributes"),
    ),
    Rule(
        CacheKind.XATTRS,
        CacheScope.ALL,
        lambda case: not case.traits.xattrs,
        _no_limit,
        _because("there are none (noxattr), and the kernel requests none"),
    ),
    Rule(CacheKind.XATTRS, CacheScope.ELSE, lambda case: case.traits.xattrs, _never, _no_need),
)
"""What is cached of which objects, in the order in which `cloakfs status` prints it."""


def _holding(case: CacheCase, what: CacheKind) -> list[Rule]:
    """Return the rows about this that count in a case, in the order of the table."""
    found: dict[CacheScope, Rule] = {}
    for rule in RULES:
        if rule.what is what and rule.of not in found and rule.when(case):
            found[rule.of] = rule
    return [*found.values()]


# -- evaluated, for the replies --------------------------------------------------------------------


class RuleTimeouts(NamedTuple):
    """The table in one case: for how many seconds; 0 means not at all.

    Attributes:
        lasting: the longest that may be, on this file system.
        briefly: attributes of anything else.
        names, names_for_one, names_for_members, names_at_top: names of what the rows `ALL`, `ONE`, `MEMBERS` and `TOP`
            are about.
        attributes, attributes_for_one, attributes_for_members, attributes_of_top: attributes of what these rows are
            about.
        of_directories: whether attributes of directories may be cached at all.
        negative, negative_at_top, negative_if_complete: absent names; of the rows `ALL`, `TOP` and `COMPLETE`.
        listings: whether entries of complete directories may be cached.
        content: whether pages may, of files that are the same when they are opened again.
    """

    lasting: float
    briefly: float
    names: float
    names_for_one: float
    names_for_members: float
    names_at_top: float
    attributes: float
    attributes_for_one: float
    attributes_for_members: float
    attributes_of_top: float
    of_directories: bool
    negative: float
    negative_at_top: float
    negative_if_complete: float
    listings: bool
    content: bool


def evaluate(case: CacheCase) -> RuleTimeouts:
    """Return what the table says in a case."""
    rows = {what: {rule.of: rule.seconds(case) for rule in _holding(case, what)} for what in CacheKind}

    def of(what: CacheKind, *which: CacheScope) -> float:
        return next((rows[what][one] or 0.0 for one in which if one in rows[what]), 0.0)

    return RuleTimeouts(
        lasting=_lasting(case),
        briefly=_briefly(case),
        names=of(CacheKind.NAMES, CacheScope.ALL),
        names_for_one=of(CacheKind.NAMES, CacheScope.ONE),
        names_for_members=of(CacheKind.NAMES, CacheScope.MEMBERS),
        names_at_top=of(CacheKind.NAMES, CacheScope.TOP, CacheScope.ALL),
        attributes=of(CacheKind.ATTRIBUTES, CacheScope.ALL),
        attributes_for_one=of(CacheKind.ATTRIBUTES, CacheScope.ONE),
        attributes_for_members=of(CacheKind.ATTRIBUTES, CacheScope.MEMBERS),
        attributes_of_top=of(CacheKind.ATTRIBUTES, CacheScope.TOP, CacheScope.ALL),
        of_directories=CacheScope.DIRECTORIES not in rows[CacheKind.ATTRIBUTES],
        negative=of(CacheKind.ABSENT, CacheScope.ALL),
        negative_at_top=of(CacheKind.ABSENT, CacheScope.TOP, CacheScope.ALL),
        negative_if_complete=of(CacheKind.ABSENT, CacheScope.COMPLETE),
        listings=CacheScope.COMPLETE in rows[CacheKind.LISTINGS],
        content=CacheScope.ALL in rows[CacheKind.CONTENT],
    )


# -- in words, for people --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fact:
    """How long the kernel may cache something: a line of `cloakfs status`.

    Attributes:
        what: names, attributes, absent names, listings, content, POSIX ACLs or extended attributes.
        of: of which objects; "" means of all.
        seconds: for how long, unless a change is reported earlier; 0 means not at all, None without a limit.
        reason: what keeps it from being longer, or from holding for all objects; "" where nothing does.
        hint: which options would change that; "" if there are none.
        where: the file systems inside the tree that this is about; "" means that on which the tree lies, and all
            others of which nothing else is said.
    """

    what: str
    of: str
    seconds: float | None
    reason: str = ""
    hint: str = ""
    where: str = ""


_ONE = "in directories known to one caller only"
_SHOWN = "and that show all their entries to it"
_COMPLETE = f"{_ONE}, {_SHOWN}"

_WORDS: Mapping[tuple[CacheKind, CacheScope], str] = {
    (CacheKind.NAMES, CacheScope.ONE): _ONE,
    (CacheKind.NAMES, CacheScope.MEMBERS): "in directories known to members of one group only",
    (CacheKind.NAMES, CacheScope.TOP): "at the top",
    (CacheKind.NAMES, CacheScope.VIEWS): "of views (@NAME)",
    (CacheKind.ATTRIBUTES, CacheScope.ONE): "of what is known to one caller only",
    (CacheKind.ATTRIBUTES, CacheScope.MEMBERS): "of what is known to members of one group only",
    (CacheKind.ATTRIBUTES, CacheScope.TOP): "of the top",
    (CacheKind.ATTRIBUTES, CacheScope.DIRECTORIES): "of directories",
    (CacheKind.ABSENT, CacheScope.COMPLETE): _COMPLETE,
    (CacheKind.ABSENT, CacheScope.TOP): "at the top",
    (CacheKind.CONTENT, CacheScope.ALL): "of files that are the same when they are opened again",
    (CacheKind.LISTINGS, CacheScope.COMPLETE): _COMPLETE,
    (CacheKind.ACLS, CacheScope.ALL): "of objects whose attributes are cached",
}


def _words(case: CacheCase, rule: Rule, others: Sequence[Rule]) -> str:
    """Return of which objects a row is, beside other rows about the same."""
    words = _WORDS.get((rule.what, rule.of), "")
    if rule.of is CacheScope.ELSE:
        longer = [other.of for other in others if other.seconds(case) != 0.0]
        if longer:
            words = "of anything else"
        if rule.what is CacheKind.ATTRIBUTES and (CacheScope.ALL in longer or CacheScope.ONE in longer):
            words += ", and of files with several hard links"
        if rule.what is CacheKind.XATTRS and case.traits.acls:
            words = "other than POSIX ACLs"
    elif _per_caller(case):
        words = _words_per_caller(case, rule) or words
        if rule.what is CacheKind.ATTRIBUTES and case.traits.mode.passes_handles:
            if rule.of is CacheScope.ONE:
                words = _ONE
            elif rule.of is not CacheScope.DIRECTORIES:
                words += ", if only one client id stands for the owner, and for the group"
    return words


def _words_per_caller(case: CacheCase, rule: Rule) -> str:
    """Return of which objects a row is, if other words have to say that for a caller view."""
    what = rule.what
    if rule.of is CacheScope.COMPLETE and what is CacheKind.ABSENT and _for_members(case):
        return f"in directories known to one caller, or one group, only, {_SHOWN}"
    if rule.of is not CacheScope.ALL or what not in (CacheKind.NAMES, CacheKind.ATTRIBUTES, CacheKind.ABSENT):
        return ""
    if what is not CacheKind.ABSENT and _by_plugin(case):
        return "of what the plug-in shows to all (same_for_all), and all can reach"
    if what is not CacheKind.ABSENT and case.view.hides:
        return "of what all callers see and can reach"
    return "in directories that all callers can reach"


def facts(traits: MountTraits, view: View, tree: Sequence[TreeMount]) -> list[Fact]:
    """Return what the kernel may cache of a mount.

    Args:
        traits: what was decided when it was made.
        view: any of its views; the policy is the same in all.
        tree: the file systems of the tree, the one of its root first.
    """
    found = list(_on(CacheCase(traits, view, tree[0])))
    alike: dict[tuple[Fact, ...], list[TreeMount]] = {}
    for mounted in tree[1:]:
        others = tuple(fact for fact in _on(CacheCase(traits, view, mounted), is_inside=True) if fact not in found)
        if others:
            alike.setdefault(others, []).append(mounted)
    for others, there in alike.items():
        found += [replace(fact, where=_named(there)) for fact in others]
    return found


def _on(case: CacheCase, *, is_inside: bool = False) -> Iterator[Fact]:
    """Return what is said of a file system, which may be one inside the tree."""
    for what in CacheKind:
        rules = _holding(case, what)
        for rule in rules:
            if not (is_inside and rule.of in (CacheScope.TOP, CacheScope.VIEWS)):
                others = [other for other in rules if other is not rule]
                yield Fact(what.value, _words(case, rule, others), rule.seconds(case), *rule.why(case))


def _named(there: Sequence[TreeMount]) -> str:
    names = [f"{mounted.path} ({mounted.kind})" for mounted in there[:_MOST_NAMED]]
    more = len(there) - len(names)
    return ", ".join(names) + (f" and {more} more" if more else "")
