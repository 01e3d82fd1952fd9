"""What is mounted where, as this process sees it.

The table is read as bytes: users name mount points, types (`fusermount3 -o subtype=…`) and sources as they like, and
nothing they write may keep anybody from reading the rest. (The clean-up process has this module, so it imports next to
nothing.)
"""

import os
import re
import select
from typing import NamedTuple

TABLE = "/proc/self/mountinfo"

_escape = re.compile(rb"\\([0-7]{3})")
_mounter = re.compile(rb"(?:^|,)user_id=(\d{1,10})(?:,|$)")


class Place(NamedTuple):
    """Something that is mounted.

    Attributes:
        path: the mount point; bytes that are no UTF-8 as `os.fsdecode` has them.
        kind: the type of the file system, likewise.
        parent: id of the mount that the mount point lies on.
        device: st_dev, as `major:minor`.
        mounter: uid of who mounted it and answers for it, of FUSE file systems; 0 of all others.
        words: how it may be used here (`ro`, `nosuid`, …, with commas).
    """

    path: str
    kind: str
    parent: int
    device: str
    mounter: int
    words: str


def by_id() -> dict[int, Place]:
    """What is mounted by mount id, in the order of mounting."""
    with open(TABLE, "rb") as file:
        return parse(file.read())


def parse(table: bytes) -> dict[int, Place]:
    """A table as proc_pid_mountinfo(5) has it; what is no line of one is left out."""
    places = {}
    for line in table.split(b"\n"):
        # At blanks alone: other white space (form feeds, say) stands for itself.
        fields, _, rest = line.partition(b" - ")
        words, more = fields.split(b" "), rest.split(b" ")
        if len(words) < 6 or not (words[0].isdigit() and words[1].isdigit()):
            continue
        kind = _text(more[0])
        found = _mounter.search(more[-1]) if kind.startswith("fuse") else None
        mounter = int(found[1]) if found else 0
        path, device, how = _text(words[4]), _text(words[2]), _text(words[5])
        places[int(words[0])] = Place(path, kind, int(words[1]), device, mounter, how)
    return places


def _text(field: bytes) -> str:
    """Blanks, tabs, line feeds and backslashes are octal escapes, all other bytes are themselves."""
    return os.fsdecode(_escape.sub(lambda escape: bytes([int(escape[1], 8) & 0xFF]), field))


def id_of(fd: int) -> int:
    """The id of the mount that what `fd` refers to was reached by; nobody is asked."""
    with open(f"/proc/self/fdinfo/{fd}") as info:
        return next(int(line.split()[1]) for line in info if line.startswith("mnt_id:"))


def by_path() -> dict[str, str]:
    """Mount point -> type of what is mounted there last."""
    return {place.path: place.kind for place in by_id().values()}


class Changes:
    """Tells without waiting whether something was mounted or unmounted since it was asked last."""

    def __init__(self) -> None:
        self._table = open(TABLE, "rb")  # noqa: SIM115  (kept for as long as somebody wants to know)
        self._poll = select.poll()
        self._poll.register(self._table, select.POLLPRI)

    def seen(self) -> bool:
        """Was there anything?"""
        return bool(self._poll.poll(0))

    def table(self) -> dict[int, Place]:
        """`by_id`, also if there is no descriptor to be had."""
        self._table.seek(0)
        return parse(self._table.read())

    def close(self) -> None:
        """Nobody wants to know any more."""
        self._table.close()
