"""Who asks."""

from typing import NamedTuple


class Caller(NamedTuple):
    """One identity: uid, primary gid, and all groups (the primary one included).

    Ids are the client's before `Policy.forward`, the server's after it.
    """

    uid: int
    gid: int
    groups: frozenset[int]
