"""Plans how to serve exports.d entries with an NFS server: the mounts, and the objections to them. Pure.

Every entry and client specification gets a mount of its own, since each may map and cloak differently. All mounts are
below the same root, so that the path that a client mounts follows from the entry: `/home` exported to `10.1.0.0/16` is
`ROOT/home@10.1.0.0_16`; exported to all clients (`*`), it is `ROOT/home`.

`compare` says which mounts another plan adds, removes, reloads or renews if it takes the place of the present one.
"""

import os
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from ipaddress import IPv4Network, IPv6Network, ip_network
from itertools import combinations
from typing import Literal

from ..config.errors import Location, Remark
from ..config.lint import conflicts, repeats
from ..config.options import CONDITIONS, RELOADABLE, Export, Options
from ..config.values import host_of
from ..config.viewitems import Ids, Range, User, ViewItem
from . import root

ServerKind = Literal["knfsd", "ganesha"]

# Options that concern only the kernel's server, or that nfs-ganesha follows anyway.
_KNOWN_TO_GANESHA = frozenset({"sec", "insecure", "sync", "no_subtree_check", "no_wdelay", "mp", "mountpoint"})

_WILDCARD = re.compile(r"\*|\?|\[[^]]*\]")

# Texts that both exportfs(8) and exports(5) read as one value.
_UNQUOTED_VALUE = re.compile(r"[^\s,()\"#\\\x00-\x1f\x7f]+")


@dataclass(frozen=True, slots=True)
class Mount:
    """One mount to make and to export.

    Attributes:
        name: the name of its directory below the root; unique among the mounts.
        path: the mount point.
        source: the real tree.
        client: who may mount it, as in exports(5).
        view: which of several fixed views this is; nfs-ganesha needs a mount for each.
        options: the options of the mount.
        location: the place of the entry.
    """

    name: str
    path: str
    source: str
    client: str
    view: str
    options: Options
    location: Location = field(compare=False)

    @property
    def condition(self) -> str | None:
        """Where something must be mounted for this to be exported; None if the entry has no such option."""
        return self.options.condition(self.source)

    @property
    def kind(self) -> str:
        """Whose views it shows: `per caller`, or `fixed` with the identities or views."""
        alike = root.single_identity(self.options)
        match len(self.options.views):
            case 0 if alike is not None:
                return f"fixed: {alike[0]}:{alike[1]}"
            case 0:
                return "per caller"
            case 1 if not isinstance(self.options.views[0], Range):
                return f"fixed: {self.options.views[0]}"
            case _:
                return "fixed: " + " ".join(f"@{item}" for item in self.options.views)


@dataclass(frozen=True, slots=True)
class Plan:
    """The result of `plan`; it must not be carried out while there are problems."""

    server: ServerKind
    root: str
    mounts: tuple[Mount, ...]
    problems: tuple[Remark, ...]
    warnings: tuple[Remark, ...]


def plan(
    entries: Iterable[Export],
    server: ServerKind,
    root: str,
    problems: Iterable[Remark] = (),
    warnings: Iterable[Remark] = (),
    identities: Callable[[ViewItem], Iterable[User | Ids]] = lambda item: [] if isinstance(item, Range) else [item],
) -> Plan:
    """Return what to mount below `root` (absolute) for these entries, and the objections to it.

    Args:
        entries: the entries of exports.d, with absolute paths of plug-ins.
        server: the server that is to serve them.
        root: absolute path of the directory in which the mounts lie.
        problems: problems that are already known.
        warnings: warnings that are already known.
        identities: returns the single identities that an item of `views=` stands for.
    """
    mounts: list[Mount] = []
    problems, warnings, entries = list(problems), list(warnings), list(entries)
    if server == "knfsd":  # nfs-ganesha gets no fsid
        problems += conflicts(entries)
    again = {error.location: error.message for error in repeats(entries)}
    for entry in entries:
        said = [again[entry.location]] if entry.location in again else _refusals(entry, server)
        if said:
            problems += [Remark(entry.location, text) for text in said]
            continue
        warnings += [Remark(entry.location, text) for text in _warnings(entry, server)]
        views = [("", _for_knfsd(entry.options))] if server == "knfsd" else _by_view(entry.options, identities)
        name = mount_name(entry.path, entry.client)
        mounts += [
            Mount(at := f"{name}+{view}" if view else name, os.path.join(root, at), entry.path, entry.client, view,
                  of_view, entry.location)
            for view, of_view in views
        ]  # fmt: skip
    problems += _collisions(mounts)
    warnings += _overlaps(mounts)
    return Plan(server, root, tuple(mounts), tuple(problems), tuple(warnings))


def hints(made: Plan) -> list[Remark]:
    """Return a hint for each mount whose entry does not say whether the kernel's server is to check the subtree."""
    return [
        Remark(
            mount.location,
            "without subtree_check, the kernel caches nothing that only some callers may see: listing a home takes "
            "some ten times as long. With it, a file that is renamed to another directory can become stale for a "
            "client that has it open. Give subtree_check or no_subtree_check (docs/nfs.md)",
        )
        for mount in made.mounts
        if made.server == "knfsd" and root.leaves_subtree_check_open(mount.options)
    ]


def absolute(entry: Export) -> Export:
    """Return the entry with an absolute path of its plug-in, so that it no longer depends on the entry's file."""
    file, colon, name = (entry.options.policy or "").rpartition(":")
    if not colon or not file.endswith(".py"):
        return entry
    file = os.path.join(os.path.dirname(os.path.abspath(entry.location.file)), file)
    return replace(entry, options=replace(entry.options, policy=f"{file}:{name}"))


def mount_name(path: str, client: str) -> str:
    """Return the name of the directory that `client` mounts for `path`. It is short, and need not be unique."""
    tree = "-".join([part for part in path.split("/") if part not in ("", ".")]) or "root"
    name = tree if client == "*" else f"{tree}@{client.removeprefix('@').replace('*', 'any')}"
    return re.sub(r"[^A-Za-z0-9._+@-]", "_", name)


def _collisions(mounts: Iterable[Mount]) -> list[Remark]:
    """Return a problem for each mount that would be made at the same place as an earlier one, and so be lost."""
    said = []
    names: dict[str, Mount] = {}
    for mount in mounts:
        other = names.setdefault(mount.name, mount)
        if other is not mount:
            one, two = _described(mount), f"{_described(other)} ({other.location})"
            said.append(
                Remark(
                    mount.location,
                    f"{one} and {two} would both be {mount.path}; give one of the trees another name, for "
                    "example by a bind mount",
                )
            )
    return said


def _described(mount: Mount) -> str:
    return f"{mount.source} for {mount.client}" + (f", view {mount.view}," if mount.view else "")


def _refusals(entry: Export, server: ServerKind) -> list[str]:
    """Return why an entry cannot be served, regardless of the other entries."""
    options = entry.options
    said = [
        _refusal_of_ganesha(options) if server == "ganesha" else _refusal_of_knfsd(options),
        _two_of_one_name(options),
    ]
    if server == "knfsd":
        if ":" in entry.client and not _network(entry.client):
            said.append(f"{entry.client}: the kernel's server cannot be given a client with a colon (exportfs(8))")
        said += [
            f"{name}={value!r}: a value with a comma, white space, a quote, a parenthesis or the like would be read as "
            "more than one option (exports(5) knows no way to quote it)"
            for name, value in options.other
            if value is not None and name not in CONDITIONS and not _UNQUOTED_VALUE.fullmatch(value)
        ]
    return [text for text in said if text]


def _two_of_one_name(options: Options) -> str | None:
    """Return why two views cannot be distinguished: clients know a view only by its user name or uid."""
    labels: dict[str, User | Ids] = {}
    for item in options.views:
        if not isinstance(item, Range) and (other := labels.setdefault(item.label, item)) != item:
            return f"views {other} and {item} would both be @{item.label}; give each an entry of its own"
    return None


def _is_fixed(options: Options) -> bool:
    return bool(options.views) or options.squash == "all"


def _refusal_of_ganesha(options: Options) -> str | None:
    if not _is_fixed(options):
        return (
            "nfs-ganesha looks files up as root and shares its cache among all users, so it cannot give every caller a "
            "view of its own; use --server knfsd, or fixed views: views = USER ..., or all_squash,anonuid=,anongid="
        )
    return None


def _by_view(options: Options, identities: Callable[[ViewItem], Iterable[User | Ids]]) -> list[tuple[str, Options]]:
    """Return the name and the options of each fixed view; a single view has no name."""
    if not options.views:
        # `all_squash,anonuid=,anongid=` is how exports(5) says that all callers are one identity.
        return [("", replace(options, views=(Ids(options.anonuid, options.anongid),)))]
    # An account may be in a range, and also be named.
    items = list(dict.fromkeys(identity for item in options.views for identity in identities(item)))
    if len(options.views) == 1 and items == list(options.views):
        return [("", options)]
    return [(item.label, replace(options, views=(item,))) for item in items]


def _refusal_of_knfsd(options: Options) -> str | None:
    if options.groups == "proc":
        return "groups=proc: threads of the kernel's NFS server show no groups; use groups=database, none or gids"
    return None


def _for_knfsd(options: Options) -> Options:
    if options.groups is None and not options.views:
        return replace(options, groups="database")
    return options


def _warnings(entry: Export, server: ServerKind) -> list[str]:
    options = entry.options
    said = []
    if server == "knfsd" and not _is_fixed(options) and options.may_hide and not _has_one_user(options):
        if not options.no_client_cache:
            said.append(
                "a client with several users keeps one cache for all of them, and shows one user's names to another; "
                "add no_client_cache, have each user mount with nosharecache, or use a fixed view per client"
            )
        else:
            said.append(
                "no_client_cache does not separate users who use one mount at the very same moment (docs/nfs.md), nor "
                "while NFSv4 delegations are on (sysctl fs.leases-enable=0 turns them off); a mount per user with "
                "nosharecache, or a fixed view per client, does"
            )
    if options.exempt:
        said.append(f"nothing is hidden from server uid {', '.join(map(str, options.exempt))} (exempt)")
    if server == "knfsd" and not root.keeps_identity(options):
        said.append(
            f"the kernel lets a client's root do anything with files that others hold open, and cloakfs cannot know "
            f"whether {options.policy} does, too; client uid {root.stand_in(options, 'uid')} is used in place of root"
            if options.has_plugin
            else "the kernel lets a client's root do anything with files that others hold open; root is therefore "
            "nobody, unless range_map maps another client id to the same identity"
        )
    if server == "knfsd" and options.views:
        said.append(
            "the kernel checks the caller's own id, so that only root and a view's own identity can use the view, and "
            "a client shows all of its users the views that one of them has listed; all_squash,anonuid=,anongid= or "
            "--server ganesha serves every caller"
        )
    if server == "ganesha":
        if any(isinstance(item, Range) for item in options.views):
            said.append(
                "a range of views becomes one export for each of its accounts that exists now; reload to add new ones"
            )
        not_passed_on = [name for name, _ in options.other if name not in _KNOWN_TO_GANESHA]
        if not_passed_on:
            said.append(f"not passed on to nfs-ganesha: {', '.join(not_passed_on)}")
    return said


def _has_one_user(options: Options) -> bool:
    """Whether all client uids that range_map maps become the same server uid."""
    uids = [definition for definition in options.range_map if definition.kind == "uid"]
    single = all(definition.action == "squash" or definition.rm_low == definition.rm_high for definition in uids)
    return single and len({definition.lc_low for definition in uids}) == 1


def _overlaps(mounts: Sequence[Mount]) -> list[Remark]:
    """Return warnings of exports of one tree among which a client can choose, as it matches several specifications."""
    of_tree: dict[str, list[int]] = {}
    for at, mount in enumerate(mounts):
        of_tree.setdefault(os.path.normpath(mount.source), []).append(at)
    said = []
    pairs: list[tuple[int, int]] = []
    for same in of_tree.values():
        if len(same) > 1:
            pairs += _overlapping(mounts, same)
    for later_at, earlier_at in sorted(pairs):
        later, earlier = mounts[later_at], mounts[earlier_at]
        narrow, wide = (later, earlier) if _includes(earlier.client, later.client) else (earlier, later)
        said.append(
            Remark(
                later.location,
                f"clients that match {narrow.client} may also mount {wide.path}, which is for {wide.client}, "
                f"instead of {narrow.path}: unlike in exports(5), each client specification is a directory of its own",
            )
        )
    return said


def _overlapping(mounts: Sequence[Mount], chosen: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the pairs of these mounts, the later one first, for whose clients there may be a host that matches both.

    Thousands of networks, or of hosts, take no longer than to sort them: there may be an entry for each department.
    """
    patterns: set[int] = set()
    hosts: dict[str, list[int]] = {}
    networks: list[tuple[int, int, int, int]] = []  # the version of IP, the first address, the last one, and the mount
    for at in chosen:
        client = mounts[at].client
        if (network := _network(client)) is not None:
            networks.append((network.version, int(network[0]), -int(network[-1]), at))
        elif _WILDCARD.search(client):
            patterns.add(at)
        elif (host := host_of(client)) is not None:
            hosts.setdefault(host.lower(), []).append(at)
    pairs = [(pattern, other) for pattern in patterns for other in chosen if other not in patterns or other < pattern]
    pairs = [pair for pair in pairs if _may_overlap(*(mounts[at].client for at in pair))]
    pairs += (pair for same in hosts.values() for pair in combinations(same, 2))
    around: list[tuple[int, int, int, int]] = []
    for inner in sorted(networks):  # of two networks that overlap, one is within the other, and comes later here
        while around and (around[-1][0] != inner[0] or -around[-1][2] < inner[1]):
            around.pop()
        pairs += ((outer[3], inner[3]) for outer in around)
        around.append(inner)
    for one, other in pairs:
        if mounts[one].client != mounts[other].client:  # views of one entry are meant for the same clients
            yield max(one, other), min(one, other)


def _may_overlap(pattern: str, other: str) -> bool:
    if _includes(pattern, other) or _includes(other, pattern):
        return True
    return bool(_WILDCARD.search(other)) and _begin_and_end_alike(pattern.lower(), other.lower())


def _includes(pattern: str, client: str) -> bool:
    """Whether a host name is one that a wildcard matches; the wildcard `*` also matches everything else."""
    if pattern == "*":
        return True
    host = host_of(client)
    return host is not None and fnmatchcase(host.lower(), pattern.lower().replace("[^", "[!"))


def _begin_and_end_alike(one: str, other: str) -> bool:
    """Whether there may be a host that matches both wildcards."""
    (begin, end), (other_begin, other_end) = (
        (re.split(_WILDCARD, client)[0], re.split(_WILDCARD, client)[-1]) for client in (one, other)
    )
    begins = begin.startswith(other_begin) or other_begin.startswith(begin)
    return begins and (end.endswith(other_end) or other_end.endswith(end))


def _network(client: str) -> IPv4Network | IPv6Network | None:
    try:
        return ip_network(client, strict=False)
    except ValueError:
        return None


@dataclass(frozen=True, slots=True)
class PlanChange:
    """How the mounts of one plan become those of another. Mounts that stay as they are do not appear.

    Attributes:
        added: mounts that are new.
        removed: mounts that go, as they were.
        reloaded: mounts whose daemons can apply their new options.
        reread: mounts with the same options, whose daemons read a plug-in again, because its file may have changed.
        renewed: mounts that are made anew, with the new options.
        withdrawn: those of `renewed`, as they were, that must not be exported while they are replaced: the daemon
            relies on something that the server does with callers, and that will change.
    """

    added: tuple[Mount, ...]
    removed: tuple[Mount, ...]
    reloaded: tuple[Mount, ...]
    reread: tuple[Mount, ...]
    renewed: tuple[Mount, ...]
    withdrawn: tuple[Mount, ...]

    @property
    def changed(self) -> frozenset[str]:
        """The paths of all mounts that are new, or that change."""
        return frozenset(mount.path for mount in (*self.added, *self.reloaded, *self.reread, *self.renewed))


def compare(old: Mapping[str, Mount], new: Iterable[Mount], running: Container[str]) -> PlanChange:
    """Return what becomes of the mounts `old`, by name, if `new` take their place.

    Args:
        old: the mounts that are served.
        new: the mounts that are wanted, each with a name of its own.
        running: the names of those of `old` whose daemon runs, and can reload.
    """
    wanted = {mount.name: mount for mount in new}
    common = [(old[name], mount) for name, mount in wanted.items() if name in old]
    live = [(before, mount) for before, mount in common if before.name in running and _suffices_reload(before, mount)]
    reloadable = {mount.name for _, mount in live}
    renewed = [(before, mount) for before, mount in common if before != mount and mount.name not in reloadable]
    return PlanChange(
        added=tuple(mount for name, mount in wanted.items() if name not in old),
        removed=tuple(before for name, before in old.items() if name not in wanted),
        reloaded=tuple(mount for before, mount in live if before != mount),
        reread=tuple(mount for before, mount in live if before == mount and mount.options.has_plugin),
        renewed=tuple(mount for _, mount in renewed),
        withdrawn=tuple(before for before, mount in renewed if _changes_server_checks(before, mount)),
    )


def _suffices_reload(old: Mount, new: Mount) -> bool:
    """Whether a reload suffices for the difference, without a new mount."""
    return (
        _without_reloadable(old.options) == _without_reloadable(new.options)
        and not _changes_server_checks(old, new)
        and old.condition == new.condition
    )


def _changes_server_checks(old: Mount, new: Mount) -> bool:
    """Whether the daemon relies on other checks of the server, of which `Guard._mount_options` informs it.

    The server may make all callers one (`root.single_identity`), or check the directories above (`subtree_check`).
    """
    before, after = old.options, new.options
    return any(of(before) != of(after) for of in (root.single_identity, root.checks_subtree))


def _without_reloadable(options: Options) -> Options:
    plain = Options()
    return replace(options, **{name: getattr(plain, name) for name in RELOADABLE})
