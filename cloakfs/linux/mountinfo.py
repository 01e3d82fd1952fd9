"""The mount table, as this process sees it.

The table is read as bytes: users choose the names of mount points, types (`fusermount3 -o subtype=…`) and sources
freely, and nothing they write may prevent the rest from being read. (The reaper uses this module, so it
imports next to nothing.)
"""

import os
import re
import select
from collections.abc import Collection
from typing import NamedTuple

from . import ownfiles

TABLE = "/proc/self/mountinfo"

_escape = re.compile(rb"\\([0-7]{3})")
_special = re.compile(rb"[ \t\n\\]")
_mounter = re.compile(rb"(?:^|,)user_id=(\d{1,10})(?:,|$)")


class Place(NamedTuple):
    """One mount.

    Attributes:
        path: the mount point; bytes that are not UTF-8 are decoded as `os.fsdecode` does.
        kind: the type of the file system, likewise.
        parent: id of the mount that the mount point lies on.
        device: st_dev, as `major:minor`.
        mounter: for FUSE file systems, uid of the user who mounted it and is responsible for it; 0 for all others.
        words: the options of this mount (`ro`, `nosuid`, …, separated by commas).
    """

    path: str
    kind: str
    parent: int
    device: str
    mounter: int
    words: str


def by_id() -> dict[int, Place]:
    """Return all mounts by mount id, in the order of mounting."""
    with ownfiles.open(TABLE, "rb") as file:
        return parse(file.read())


def inside(directory: str, kinds: Collection[str] = ()) -> tuple[dict[int, Place], int]:
    """Return the mounts inside a directory by mount id, and how many there are anywhere of some kinds.

    It does not look closely at the others, as there may be many.
    """
    beginning = directory.rstrip("/") + "/"
    escaped = b" " + _special.sub(lambda byte: b"\\%03o" % ord(byte[0]), os.fsencode(beginning))
    with ownfiles.open(TABLE, "rb") as file:
        table = file.read()
    found = parse(b"\n".join(line for line in table.split(b"\n") if escaped in line))
    of_kinds = sum(table.count(b" - %b " % os.fsencode(kind)) for kind in kinds)
    return {number: place for number, place in found.items() if place.path.startswith(beginning)}, of_kinds


def parse(table: bytes) -> dict[int, Place]:
    """Parse a table in the format of proc_pid_mountinfo(5); malformed lines are left out."""
    places = {}
    for line in table.split(b"\n"):
        # Split at blanks alone: other white space (form feeds, say) stands for itself.
        fields, _, rest = line.partition(b" - ")
        words, more = fields.split(b" "), rest.split(b" ")
        if len(words) < 6 or not (words[0].isdigit() and words[1].isdigit()):
            continue
        text = unescaped if b"\\" in line else os.fsdecode
        kind = text(more[0])
        found = _mounter.search(more[-1]) if kind.startswith("fuse") else None
        mounter = int(found[1]) if found else 0
        path, device, how = text(words[4]), text(words[2]), text(words[5])
        places[int(words[0])] = Place(path, kind, int(words[1]), device, mounter, how)
    return places


def devices_without_option(*beginnings: bytes) -> set[int]:
    """Return the st_dev of all mounted file systems that have no option which begins like one of these."""
    known, found = set(), set()
    with ownfiles.open(TABLE, "rb") as file:
        for line in file:
            fields = line.split()
            major, _, minor = fields[2].partition(b":")
            device = os.makedev(int(major), int(minor))
            known.add(device)
            if any(word.startswith(beginnings) for word in fields[-1].split(b",")):
                found.add(device)
    return known - found


def unescaped(field: bytes) -> str:
    """Decode a field of this table, or of one like it.

    Blanks, tabs, line feeds and backslashes are octal escapes; other bytes stand for themselves.
    """
    return os.fsdecode(_escape.sub(lambda escape: bytes([int(escape[1], 8) & 0xFF]), field))


def id_of(fd: int, pid: int | None = None) -> int:
    """Return the id of the mount by which `fd`, of process `pid` if given, was reached, without a request to it."""
    with ownfiles.open(f"/proc/{pid or 'self'}/fdinfo/{fd}") as info:
        return next(int(line.split()[1]) for line in info if line.startswith("mnt_id:"))


def by_path() -> dict[str, str]:
    """Return mount point -> type of the last file system mounted there."""
    return {place.path: place.kind for place in by_id().values()}


class MountTableChanges:
    """Whether something was mounted or unmounted since the last call, found out without waiting."""

    def __init__(self) -> None:
        self._table = ownfiles.open(TABLE, "rb")
        self._poll = select.poll()
        self._poll.register(self._table, select.POLLPRI)

    def seen(self) -> bool:
        """Whether there was a change."""
        return bool(self._poll.poll(0))

    def table(self) -> dict[int, Place]:
        """Return id of the mount -> its place, even if no further descriptor can be opened."""
        self._table.seek(0)
        return parse(self._table.read())

    def close(self) -> None:
        """Close the table."""
        self._table.close()
