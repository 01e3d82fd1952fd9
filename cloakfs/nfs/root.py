"""What the kernel's NFS server makes of a client's root before its own check, which lets root do anything. Pure.

The kernel answers ACCESS, and lets a second user share a file that somebody holds open, without asking cloakfs; and to
it, uid 0 is root, whoever cloakfs makes of it. So root comes as root only if it is proven that this grants nothing.
"""

from ..config.options import Options
from ..ids import ClientId
from ..mapping import DEFAULT_NOBODY, MAX_ID, IdMap, Kind

_ROOT = ClientId(0)


def is_root(options: Options) -> bool:
    """Is it proven that what root may do in the kernel's check, it may do here?

    By definitions alone: what a plug-in makes of root, only the plug-in knows. In a fixed view everybody is the one
    identity: there is nothing that others hold open, and root could not.
    """
    if options.views:
        return True
    return options.policy is None and _ids(options, "uid").forward(_ROOT) == 0


def words(options: Options) -> list[str]:
    """The options of exports(5) for client root; its group goes the same way, whoever claims to be in it."""
    if is_root(options):
        return ["no_root_squash"]
    return ["root_squash", f"anonuid={stand_in(options, 'uid')}", f"anongid={stand_in(options, 'gid')}"]


def keeps_identity(options: Options) -> bool:
    """Is client root served over the kernel's server as what the options make of it? See `stand_in`."""
    if is_root(options):
        return True
    if options.policy is not None:
        return False
    uids = _ids(options, "uid")
    return uids.forward(stand_in(options, "uid")) == uids.forward(_ROOT)


def stand_in(options: Options, kind: Kind) -> ClientId:
    """The client id that root's is replaced by: one that is the same here, or else a stranger's.

    A group that is root's here, too, stays what it is.
    """
    ids = _ids(options, kind)
    server = ids.forward(_ROOT)
    if kind == "gid" and server == 0 and options.policy is None:
        return _ROOT
    # A run of client ids with one server id begins at 1, at nobody, or where a definition begins or ends. A map makes
    # no runs, but may hit the same server id as another definition.
    defs = [definition for definition in options.range_map if definition.kind == kind]
    borders = {border for d in defs for border in (d.rm_low, d.rm_low + 1, d.rm_high + 1)}
    mapped = {d.rm_low + server - d.server_range(ids.nobody)[0] for d in defs}
    candidates = [
        id_
        for id_ in map(ClientId, (DEFAULT_NOBODY, ids.nobody, 1, *sorted(borders | mapped), MAX_ID))
        if 0 < id_ <= MAX_ID and ids.forward(id_) != 0
    ]
    alike = (id_ for id_ in candidates if ids.forward(id_) == server)
    nobody = (id_ for id_ in candidates if ids.counterpart(id_, "forward") is None)
    return next((id_ for among in (alike, nobody) for id_ in among), ClientId(DEFAULT_NOBODY))


def _ids(options: Options, kind: Kind) -> IdMap:
    defs = [definition for definition in options.range_map if definition.kind == kind]
    return IdMap(defs, nobody=options.anonuid if kind == "uid" else options.anongid, squash=options.squash)
