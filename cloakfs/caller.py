"""Who asks, and as whom it is served."""

from typing import NamedTuple

from .ids import ClientId, ServerId


class ClientCaller(NamedTuple):
    """Who asks, in client ids: uid, primary gid, and all groups (the primary one included)."""

    uid: ClientId
    gid: ClientId
    groups: frozenset[ClientId]


class Caller(NamedTuple):
    """As whom it is served, in server ids: what `Policy.forward` makes of a `ClientCaller`."""

    uid: ServerId
    gid: ServerId
    groups: frozenset[ServerId]
