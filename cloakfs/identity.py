"""Who makes a request, and as whom it is served: ids of the client's world, and ids of the server's.

A type checker keeps the two apart; at run time both are integers. Only `mapping` translates an id of one realm into one
of the other. Ids from outside get their type where they enter: from a request, from the text of the configuration, from
the real tree.
"""

from typing import NamedTuple, NewType

ClientId = NewType("ClientId", int)
"""A uid or gid as clients know it: in a request, and in the attributes that are shown."""

ServerId = NewType("ServerId", int)
"""A uid or gid of the server: on disk, and in system calls."""


class ClientCaller(NamedTuple):
    """The caller in client ids: uid, primary gid, and all groups (including the primary one)."""

    uid: ClientId
    gid: ClientId
    groups: frozenset[ClientId]


class Caller(NamedTuple):
    """The identity that it is served as, in server ids: what `Policy.forward` makes of a `ClientCaller`."""

    uid: ServerId
    gid: ServerId
    groups: frozenset[ServerId]
