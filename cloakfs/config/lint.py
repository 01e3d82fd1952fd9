"""Warns of options that probably do not do what their author wants, and says what becomes of unnamed ids."""

import contextlib
from collections.abc import Iterable, Sequence
from ipaddress import ip_network

from .. import cloak, mapping
from ..identity import ClientId, ServerId
from ..mapping import IdMap, Kind, RangeDef
from .draft import Draft
from .errors import ExportsError, ExportsWarning, Location, Remark, shown
from .options import Export, Options


def refuse_contradictions(draft: Draft, client: str = "") -> None:
    """Refuse options that make no sense together, or for this client.

    Raises:
        ExportsError: the ids that range_map would map are the server's own already.
    """
    flavors = dict(draft.other.values()).get("sec") or ""
    kerberos = [f"sec={flavor}" for flavor in flavors.split(":") if flavor.startswith("krb5")]
    if client.startswith("gss/"):
        kerberos.append(f"client {client}")
    moved = [where for definition, where in draft.range_map if not _stays(definition)]
    if kerberos and moved:
        raise ExportsError(
            moved[0],
            f"range_map maps the ids of a client, but with {kerberos[0]} a caller has the id that the server itself "
            "gives to the name, and mapping it once more hides everything",
            "no range_map with Kerberos, or sec=sys",
        )


def _stays(definition: RangeDef) -> bool:
    """Whether no id becomes that of another user of the server."""
    if definition.action == "map":
        return int(definition.lc_low) == int(definition.rm_low)
    return definition.lc_low == mapping.NOBODY


def warnings_about(draft: Draft) -> list[ExportsWarning]:
    """Return the warnings that only the combination of options reveals.

    [SZ] does not mention overlaps. The first definition wins, so warn of what that means for the others.
    """
    nobody: dict[Kind, ServerId] = {"uid": draft.options.anonuid, "gid": draft.options.anongid}
    # Equal definitions may be in several places; object identity tells them apart.
    places = {id(definition): where for definition, where in (*draft.range_map, *draft.cloak_list)}
    found = []
    for kind in mapping.KINDS:
        found += _mapped_ids(draft, kind, nobody[kind], places)
    found += _claimed_gids(draft, places)
    selections = [definition for definition, _ in draft.cloak_list]
    for hidden, first in cloak.shadowed(selections, nobody_uid=nobody["uid"], nobody_gid=nobody["gid"]):
        message = (
            f"'{hidden}' never selects a file, because '{first}' at {places[id(first)]}"
            " comes before it: the first definition wins"
        )
        found.append(ExportsWarning(places[id(hidden)], message))
    if "refer" in dict(draft.other.values()):
        message = "only NFSv4 knows refer: a client of NFSv3 is served this directory itself (serve NFSv4 alone)"
        found.append(ExportsWarning(draft.places["refer"], message))
    if draft.options.probe_delay and draft.options.probe_alarm is None:
        found.append(
            ExportsWarning(draft.places["probe_delay"], "probe_delay has no effect, because probe_alarm is off")
        )
    return found + _exempt(draft, nobody["uid"])


def _exempt(draft: Draft, nobody: ServerId) -> list[ExportsWarning]:
    """Return warnings of an exemption that has no effect, or that all callers have who become nobody."""
    found = []
    exempt = draft.options.exempt
    if exempt and not draft.cloak_list and not draft.options.may_hide:
        message = "exempt has no effect, because there is no cloak_list"
        found.append(ExportsWarning(draft.places["exempt"], message))
    if nobody in exempt:
        message = f"server uid {nobody} is nobody: nothing is hidden from any caller who becomes nobody"
        found.append(ExportsWarning(draft.places["exempt"], message))
    return found


def _mapped_ids(draft: Draft, kind: Kind, nobody: ServerId, places: dict[int, Location]) -> list[ExportsWarning]:
    """Return warnings of how the definitions of one kind affect each other, squash options, nobody and root."""
    defs = _definitions(draft, kind)
    if not defs:
        return []
    found = []
    squash = [name for name in draft.places if name.endswith("_squash")] if mapping.is_closed(defs) else []
    for option in squash:
        message = f"{option} has no effect on {kind}s, because range_map maps {kind}s"
        found.append(ExportsWarning(draft.places[option], message))
    for later, earlier, direction, completely in mapping.shadowed(defs, nobody):
        ids = "client ids" if direction == "forward" else "server ids"
        taken = "all" if completely else "some"
        message = (
            f"'{later}' loses {taken} of its {ids} ({direction} mapping) to '{earlier}'"
            f" at {places[id(earlier)]}: the first definition wins"
        )
        found.append(ExportsWarning(places[id(later)], message))
    table = IdMap(defs, nobody=nobody)
    shown_as_root = table.reverse_definition_of(nobody)
    if shown_as_root and table.reverse(nobody) == 0:
        message = (
            f"'{shown_as_root}' shows what belongs to server {kind} {nobody} (nobody) to clients as {kind} 0 (root)"
        )
        where = next(place for definition, place in draft.range_map if definition == shown_as_root)  # it wins
        found.append(ExportsWarning(where, message))
    if kind == "uid":
        found += [
            ExportsWarning(places[id(d)], f"'{d}' makes a user who is not root on a client root on the server")
            for d in defs
            if _makes_root(d, nobody)
        ]
    return found


def _claimed_gids(draft: Draft, places: dict[int, Location]) -> list[ExportsWarning]:
    """Return a warning if a client's users are mapped, but its groups are not."""
    uids, gids = _definitions(draft, "uid"), _definitions(draft, "gid")
    if not mapping.is_closed(uids) or mapping.is_closed(gids) or draft.all_squash or draft.options.views:
        return []
    table = IdMap(gids)
    if not any(table.counterpart(gid, "forward") for gid in map(ClientId, (1, *(d.rm_high + 1 for d in gids)))):
        return []
    message = (
        "uids are mapped but gids are not: whatever gid a client claims counts as the server's;"
        " map gids, too, or add gid 0 -1 squash -2"
    )
    return [ExportsWarning(places[id(uids[0])], message)]


def _definitions(draft: Draft, kind: Kind) -> list[RangeDef]:
    return [definition for definition, _ in draft.range_map if definition.kind == kind]


def _makes_root(definition: RangeDef, nobody: ServerId) -> bool:
    """Whether it maps a client id that is not root's to root."""
    low, _ = definition.server_range(nobody)
    return low == 0 and (definition.rm_high if definition.action == "squash" else definition.rm_low) != 0


def conflicts(entries: Sequence[Export]) -> list[Remark]:
    """Return what the kernel's server would confuse: exports with the same identity, or below another one's root.

    In exports(5), the clients of one path share its fsid. Here each of them gets a mount, which needs its own.
    """
    found = []
    first: dict[str, Export] = {}
    for entry in entries:
        fsid = fsid_of(entry.options)
        if fsid is None:
            continue
        other = first.setdefault(fsid, entry)
        if other is not entry:
            text = f"fsid={fsid} is that of {other.path} for {other.client}, too ({other.location})"
            found.append(Remark(entry.location, f"{text}: give each its own, or none"))
        elif fsid == ROOT_FSID and len(entries) > 1:
            beside = next(one for one in entries if one is not entry)
            found.append(Remark(entry.location, beside_root(f"{beside.path} for {beside.client}")))
    return found


ROOT_FSID = "0"
"""The fsid of the root of NFSv4's exports (exports(5))."""

_SEPARATORS = dict.fromkeys(map(ord, ":.-"))


def fsid_of(options: Options) -> str | None:
    """Return the fsid of an entry in its one way to be written; None if it has none."""
    fsid = dict(options.other).get("fsid")
    return None if fsid is None else same_fsid(fsid)


def same_fsid(fsid: str) -> str:
    """Return the one way to write this fsid; that of the root is `ROOT_FSID`.

    The server ignores what separates the digits of a UUID, and their case (nfs-utils, `get_uuid`).
    """
    return ROOT_FSID if fsid == "root" else fsid.translate(_SEPARATORS).lower()


def beside_root(other: str) -> str:
    """Return why an entry must not be the root of NFSv4's exports, when there is another export."""
    return (
        f"fsid=0 makes this the root of all NFSv4 exports, and {other} could no longer be mounted over NFSv4; "
        "leave fsid out"
    )


def repeats(entries: Iterable[Export]) -> list[ExportsError]:
    """Return an error for each entry that repeats path and client of another file."""
    found = []
    first: dict[tuple[str, str], Export] = {}
    for entry in entries:
        other = first.setdefault(key_of(entry), entry)
        if other.location.file != entry.location.file:
            found.append(exported_already(entry, other))
    return found


def exported_already(entry: Export, other: Export) -> ExportsError:
    """Return the error for an entry that repeats another one."""
    spelled = "" if entry.client == other.client else f" as {other.client}"
    problem = f"{shown(entry.path)} is exported to {entry.client} already, at {other.location}{spelled}"
    expected = "each client once for a path, so that one of the two is to be removed"
    return ExportsError(entry.location, problem, expected)


def key_of(entry: Export) -> tuple[str, str]:
    """Return what makes an entry another one: the path and the client, however they are written."""
    client = entry.client if entry.client.startswith("@") else entry.client.lower()  # the case of a netgroup matters
    with contextlib.suppress(ValueError):  # neither an address nor a network
        client = str(ip_network(client, strict=False))
    return "/".join([part for part in entry.path.split("/") if part not in ("", ".")]), client


def describe_kinds(options: Options) -> str:
    """Return what becomes of ids that no definition names: for each kind, whether it is open or closed."""
    said = []
    for kind in mapping.KINDS:
        defs = [definition for definition in options.range_map if definition.kind == kind]
        if mapping.is_closed(defs):
            said.append(f"{kind}s are closed: an id in no definition is nobody")
        else:
            becomes = {
                "root": "stays as it is, but root is nobody (root_squash)",
                "none": "stays as it is (no_root_squash)",
                "all": "is nobody (all_squash)",
            }[options.squash]
            said.append(f"{kind}s are open: {'an id in no definition' if defs else 'every id'} {becomes}")
    return "; ".join(said)
