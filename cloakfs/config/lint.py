"""Warns of options that probably do not do what their author wants, and says what becomes of unnamed ids."""

from .. import cloak, mapping
from ..ids import ClientId, ServerId
from ..mapping import DEFAULT_NOBODY, IdMap, Kind, RangeDef
from .draft import Draft
from .errors import ExportsWarning, Location
from .options import Options


def warnings_about(draft: Draft) -> list[ExportsWarning]:
    """Return the warnings that only the combination of options reveals.

    [SZ] does not mention overlaps. The first definition wins, so warn of what that means for the others.
    """
    nobody = {kind: draft.ids.get(f"anon{kind}", DEFAULT_NOBODY) for kind in mapping.KINDS}
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
    if draft.probe_delay and draft.probe_delay_at is not None and draft.probe_alarm is None:
        found.append(ExportsWarning(draft.probe_delay_at, "probe_delay has no effect, because probe_alarm is off"))
    return found + _exempt(draft, nobody["uid"])


def _exempt(draft: Draft, nobody: ServerId) -> list[ExportsWarning]:
    """Return warnings of an exemption that has no effect, or that everybody has who becomes nobody."""
    found = []
    if draft.exempt and not draft.cloak_list and draft.policy is None:
        found.append(ExportsWarning(draft.exempt[0][1], "exempt has no effect, because there is no cloak_list"))
    found += [
        ExportsWarning(where, f"server uid {uid} is nobody: nothing is hidden from any caller who becomes nobody")
        for uid, where in draft.exempt
        if uid == nobody
    ]
    return found


def _mapped_ids(draft: Draft, kind: Kind, nobody: ServerId, places: dict[int, Location]) -> list[ExportsWarning]:
    """Return warnings of how the definitions of one kind affect each other, squash options, nobody and root."""
    defs = _definitions(draft, kind)
    if not defs:
        return []
    found = []
    for option, where in draft.squash_options.items() if mapping.is_closed(defs) else ():
        message = f"{option} has no effect on {kind}s, because range_map maps {kind}s"
        found.append(ExportsWarning(where, message))
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
        found.append(ExportsWarning(places[id(shown_as_root)], message))
    if kind == "uid":
        found += [
            ExportsWarning(places[id(d)], f"'{d}' makes somebody who is not root on a client root on the server")
            for d in defs
            if _makes_root(d, nobody)
        ]
    return found


def _claimed_gids(draft: Draft, places: dict[int, Location]) -> list[ExportsWarning]:
    """Return a warning if a client's users are mapped, but its groups are not."""
    uids, gids = _definitions(draft, "uid"), _definitions(draft, "gid")
    if not mapping.is_closed(uids) or mapping.is_closed(gids) or draft.all_squash or draft.views:
        return []
    if not any(IdMap(gids).counterpart(gid, "forward") for gid in map(ClientId, (1, *(d.rm_high + 1 for d in gids)))):
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
