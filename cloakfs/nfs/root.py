"""Decides how the kernel's NFS server maps callers before its own check, which lets root do anything. Pure.

The kernel answers ACCESS, and lets a second user share a file that another has open, without asking cloakfs. To the
kernel, uid 0 is root, whatever cloakfs maps it to. So the server keeps root only if this provably grants nothing more.
"""

from ..config.options import Options
from ..identity import ClientId, ServerId
from ..mapping import DEFAULT_NOBODY, MAX_ID, IdMap, Kind

_ROOT = ClientId(0)


def is_root(options: Options) -> bool:
    """Whether root provably may do, in this export, all that the kernel's check lets root do.

    Only definitions can prove this, because only a plug-in itself knows what it makes of root. In a fixed view, all
    callers have the same identity, so others hold nothing open that root itself could not open.
    """
    if options.views:
        return True
    return not options.has_plugin and _ids(options, "uid").forward(_ROOT) == 0


def single_identity(options: Options) -> tuple[ServerId, ServerId] | None:
    """Return the uid and gid that serve every caller (`all_squash`); None if callers may have different identities."""
    if options.squash != "all" or options.range_map or options.has_plugin or options.views:
        return None
    return options.anonuid, options.anongid


def checks_subtree(options: Options) -> bool:
    """Whether the kernel's server checks, at each request, whether the caller may search the directories above.

    Nothing is gained by it where all callers are one.
    """
    given = [name for name, _ in options.other]
    return "subtree_check" in given and "no_subtree_check" not in given and single_identity(options) is None


def leaves_subtree_check_open(options: Options) -> bool:
    """Whether the entry says neither subtree_check nor no_subtree_check, although the former would gain something."""
    given = {name for name, _ in options.other}
    return not given & {"subtree_check", "no_subtree_check"} and single_identity(options) is None


def words(options: Options) -> list[str]:
    """Return the options of exports(5) for client root. They apply to its group, too, whichever caller claims it.

    If all callers have one identity, the server makes them one caller, for which the kernel may cache what is private.
    """
    identity = single_identity(options)
    if identity is not None:
        return ["all_squash", f"anonuid={identity[0]}", f"anongid={identity[1]}"]
    if is_root(options):
        return ["no_root_squash"]
    return ["root_squash", f"anonuid={stand_in(options, 'uid')}", f"anongid={stand_in(options, 'gid')}"]


def keeps_identity(options: Options) -> bool:
    """Whether the kernel's server serves client root as the identity that the options give it."""
    if is_root(options) or single_identity(options) is not None:
        return True
    if options.has_plugin:
        return False
    uids = _ids(options, "uid")
    return uids.forward(stand_in(options, "uid")) == uids.forward(_ROOT)


def stand_in(options: Options, kind: Kind) -> ClientId:
    """Return the client id that replaces root's: one that maps to the same server id, or otherwise to nobody.

    Where nobody is root on the server, and no other client id maps to root's server id, it is 65534. A client's group 0
    that maps to the server's group 0 is not replaced.
    """
    ids = _ids(options, kind)
    server = ids.forward(_ROOT)
    if kind == "gid" and server == 0 and not options.has_plugin:
        return _ROOT
    # A run of client ids with the same server id begins at 1, at nobody, or where a definition begins or ends. A `map`
    # makes no runs, but may lead to the same server id as another definition.
    defs = [definition for definition in options.range_map if definition.kind == kind]
    borders = {border for d in defs for border in (d.rm_low, d.rm_low + 1, d.rm_high + 1)}
    mapped = {d.rm_low + server - d.server_range(ids.nobody)[0] for d in defs}
    candidates = [
        id_
        for id_ in map(ClientId, (DEFAULT_NOBODY, ids.nobody, 1, *sorted(borders | mapped), MAX_ID))
        if 0 < id_ <= MAX_ID and ids.forward(id_) != 0
    ]
    same = (id_ for id_ in candidates if ids.forward(id_) == server)
    nobody = (id_ for id_ in candidates if ids.counterpart(id_, "forward") is None)
    return next((id_ for among in (same, nobody) for id_ in among), ClientId(DEFAULT_NOBODY))


def _ids(options: Options, kind: Kind) -> IdMap:
    defs = [definition for definition in options.range_map if definition.kind == kind]
    return IdMap(defs, nobody=options.anonuid if kind == "uid" else options.anongid, squash=options.squash)
