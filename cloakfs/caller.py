"""The caller of a request, and the identity that serves it."""

from typing import NamedTuple

from .ids import ClientId, ServerId


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
