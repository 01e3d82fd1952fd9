"""The items of `views=`, which say which identities get a fixed view. Only this module parses their text."""

import re
from dataclasses import dataclass

from ..identity import ServerId
from ..mapping import MAX_ID
from .values import ID, are_ids, is_id

EXPECTED_VIEW = "a user name, uid, uid:gid, uid:gid:gid+gid or low-high"

_RANGE = re.compile(rf"({ID})-({ID})")
_IDS = re.compile(rf"({ID}):({ID})(?::({ID}(?:\+{ID})*))?")
_USER = re.compile(r"[A-Za-z_][A-Za-z0-9_.@-]*\$?")


@dataclass(frozen=True, slots=True)
class User:
    """An account of the server's user database, by name or by uid; the database supplies its groups."""

    name: str

    @property
    def label(self) -> str:
        """The name by which clients know the view."""
        return self.name

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Ids:
    """An identity by its server ids, which needs no account; groups are the supplementary ones."""

    uid: ServerId
    gid: ServerId
    groups: tuple[ServerId, ...] = ()

    @property
    def label(self) -> str:
        """The name by which clients know the view."""
        return str(self.uid)

    def __str__(self) -> str:
        more = ":" + "+".join(map(str, self.groups)) if self.groups else ""
        return f"{self.uid}:{self.gid}{more}"


@dataclass(frozen=True, slots=True)
class Range:
    """The accounts with uids from low to high; each has a view of its own, made when it is first looked up."""

    low: ServerId
    high: ServerId

    def __contains__(self, uid: ServerId) -> bool:
        return self.low <= uid <= self.high

    def __str__(self) -> str:
        return f"{self.low}-{self.high}"


ViewItem = User | Ids | Range


def parse_view(text: str) -> ViewItem | None:
    """Return the item with this text; None if the text is no item."""
    ends = _RANGE.fullmatch(text)
    if ends:
        low, high = ServerId(int(ends[1])), ServerId(int(ends[2]))
        return Range(low, high) if low <= high <= MAX_ID else None
    ids = _IDS.fullmatch(text)
    if ids and are_ids(text):
        groups = tuple(ServerId(int(gid)) for gid in (ids[3] or "").split("+") if gid)
        return Ids(ServerId(int(ids[1])), ServerId(int(ids[2])), groups)
    return User(text) if _USER.fullmatch(text) or is_id(text) else None
