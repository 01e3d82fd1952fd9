"""What the server's user database says of those who make a difference in a tree."""

from collections.abc import Iterable

from ..identity import ServerId
from ..linux import userdatabase
from .identities import Accounts


def accounts_of(uids: Iterable[ServerId], gids: Iterable[ServerId]) -> Accounts:
    """Return the accounts that have one of these uids, or are in one of these groups."""
    group_names: dict[ServerId, str] = {}
    found: dict[ServerId, userdatabase.struct_passwd] = {}
    wanted = set(gids)
    for uid in uids:
        try:
            found[uid] = userdatabase.getpwuid(uid)
        except KeyError:
            continue
    for gid in wanted:
        try:
            group = userdatabase.getgrgid(gid)
        except KeyError:
            continue
        group_names[gid] = group.gr_name
        for name in group.gr_mem:
            try:
                entry = userdatabase.getpwnam(name)
            except KeyError:
                continue
            found.setdefault(ServerId(entry.pw_uid), entry)
    for entry in userdatabase.getpwall():
        if entry.pw_gid in wanted:
            found.setdefault(ServerId(entry.pw_uid), entry)
    return Accounts(
        {uid: frozenset(map(ServerId, userdatabase.getgrouplist(of.pw_name, of.pw_gid))) for uid, of in found.items()},
        {uid: of.pw_name for uid, of in found.items()},
        group_names,
    )
