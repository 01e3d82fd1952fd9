"""What a tree consists of: its objects, counted by everything on which access to them depends. Pure.

Two files in directories that are alike, and that are alike themselves, are exposed alike. So a survey of a large tree
is small: it grows with the number of different owners, groups, modes and ACLs, not with the number of files.
"""

import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ..identity import ServerId

READ, WRITE, EXECUTE = 4, 2, 1


class AccessAttrs(NamedTuple):
    """All that decides who may access an object.

    Attributes:
        mode: type and permission bits.
        uid: the owner.
        gid: the group.
        acl: its POSIX ACL, as the extended attribute; empty if it has none.
    """

    mode: int
    uid: ServerId
    gid: ServerId
    acl: bytes

    @property
    def is_directory(self) -> bool:
        """Whether it is a directory."""
        return stat.S_ISDIR(self.mode)

    @property
    def is_file(self) -> bool:
        """Whether it is a regular file."""
        return stat.S_ISREG(self.mode)


@dataclass(frozen=True, slots=True)
class Grants:
    """What the kernel grants on objects of one kind: 4 read, 2 write, 1 execute or search.

    Attributes:
        users: by uid, for users whose groups play no part: root, the owner, and those whom the ACL names.
        groups: for other users in one of these groups. Of several groups, each grants what it grants (acl(5)).
        others: for all other users.
    """

    users: Mapping[ServerId, int]
    groups: Mapping[ServerId, int]
    others: int

    def to(self, uid: ServerId, groups: frozenset[ServerId]) -> int:
        """Return what is granted to a caller."""
        if uid in self.users:
            return self.users[uid]
        own = self.groups.keys() & groups
        if not own:
            return self.others
        granted = 0
        for gid in own:
            granted |= self.groups[gid]
        return granted


class Ancestry(NamedTuple):
    """The kinds of a directory and of all above it: the number of its parent's ancestry, and that of its own kind."""

    parent: int
    kind: int


NO_ANCESTRY = -1
"""In place of the number of an ancestry, for the root of the tree."""


class BucketKey(NamedTuple):
    """Where objects of one kind are.

    Attributes:
        area: the name of the directory at the top of the tree that they are in, or are; "" for the root itself and
            for other objects beside these directories.
        ancestry: the number of the ancestry of the directory that they are in.
        kind: the number of their kind.
    """

    area: str
    ancestry: int
    kind: int


@dataclass(slots=True)
class Bucket:
    """The objects of one kind in one place; a hard link counts once for each of its names.

    Attributes:
        names: how many there are.
        size: the bytes in them, if they are regular files.
        example: the path of the largest one, from the root of the tree.
    """

    names: int = 0
    size: int = 0
    example: str = ""
    largest: int = -1


@dataclass(slots=True)
class Survey:
    """The objects of a tree.

    Attributes:
        source: the root of the tree.
        kinds: all kinds, by number.
        grants: what the kernel grants on them, by the same number.
        ancestries: those of all directories, by number; the first one is that of the root.
        found: what is where.
        names: how many names there are in the directories that were looked into.
        examined: how many of them were looked at; fewer, if a sample was asked for.
        left_out: paths that could not be examined, or that no caller is led to, and why; at most `MOST_LEFT_OUT`.
        missing: how many those are in all.
        failed: how many of them could not be examined.
        by_mode_alone: whether mode bits and ACLs decide about access everywhere. A network file system decides itself.
    """

    source: str
    kinds: list[AccessAttrs] = field(default_factory=list)
    grants: list[Grants] = field(default_factory=list)
    ancestries: list[Ancestry] = field(default_factory=list)
    found: dict[BucketKey, Bucket] = field(default_factory=dict)
    names: int = 0
    examined: int = 0
    left_out: list[tuple[str, str]] = field(default_factory=list)
    missing: int = 0
    failed: int = 0
    by_mode_alone: bool = True

    @property
    def is_sample(self) -> bool:
        """Whether only a part of the names was looked at."""
        return self.examined + self.missing < self.names

    def uids(self) -> set[ServerId]:
        """Return the uids that make a difference anywhere: root, owners, and users whom ACLs name."""
        return {ServerId(0)}.union(*(grants.users for grants in self.grants))

    def gids(self) -> set[ServerId]:
        """Return the gids that make a difference anywhere."""
        return set[ServerId]().union(
            *({kind.gid, *of.groups} for kind, of in zip(self.kinds, self.grants, strict=True))
        )


MOST_LEFT_OUT = 100
