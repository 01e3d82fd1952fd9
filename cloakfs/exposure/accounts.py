"""What the server's user database says of those who make a difference in a tree."""

import grp
import os
import pwd
from collections.abc import Iterable

from ..ids import ServerId
from .identities import Accounts


def accounts_of(uids: Iterable[ServerId], gids: Iterable[ServerId]) -> Accounts:
    """Return the accounts that have one of these uids, or are in one of these groups."""
    group_names: dict[ServerId, str] = {}
    found: dict[ServerId, pwd.struct_passwd] = {}
    wanted = set(gids)
    for uid in uids:
        try:
            found[uid] = pwd.getpwuid(uid)
        except KeyError:
            continue
    for gid in wanted:
        try:
            group = grp.getgrgid(gid)
        except KeyError:
            continue
        group_names[gid] = group.gr_name
        for name in group.gr_mem:
            try:
                entry = pwd.getpwnam(name)
            except KeyError:
                continue
            found.setdefault(ServerId(entry.pw_uid), entry)
    for entry in pwd.getpwall():
        if entry.pw_gid in wanted:
            found.setdefault(ServerId(entry.pw_uid), entry)
    return Accounts(
        {uid: frozenset(map(ServerId, os.getgrouplist(of.pw_name, of.pw_gid))) for uid, of in found.items()},
        {uid: of.pw_name for uid, of in found.items()},
        group_names,
    )
