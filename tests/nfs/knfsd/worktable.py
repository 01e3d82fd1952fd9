"""What callers do over NFS, for a table: each work by the owner of a file, by its group, by an ACL, and by others."""

import errno
import fcntl
import itertools
import os
import stat
import struct
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from cloakfs import linux
from cloakfs.linux import SpecialTime
from tests.agents import User

ANN, BEN, CAROL, DAVE, TEAM = 1001, 1002, 1003, 1004, 1100
"""The owner, a member of the group, a user whom the ACL names, and another user; and the group."""

USERS = {"ann": ANN, "ben": BEN, "carol": CAROL, "dave": DAVE}
LONG_AGO = 10**9
CONTENT = b"content of ann\n"
MUCH = 5 << 18
"""NFSv4.2 COPY of more than 1 MiB is left to a thread of the server."""


class Caller(NamedTuple):
    """Who works: the name of the account on the server, and whether the team's group is sent."""

    user: str
    in_team: bool = False

    @property
    def uid(self) -> int:
        return USERS[self.user]


CALLERS = {
    "owner": Caller("ann", in_team=True),
    "group": Caller("ben", in_team=True),
    "ACL": Caller("carol"),
    "other": Caller("dave"),
}


def _echo(path: str) -> None:
    with open(path, "w") as file:
        file.write("new\n")


def _append(path: str) -> None:
    with open(path, "a") as file:
        file.write("more\n")


def _write_into(path: str) -> None:
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, b"CON")
    finally:
        os.close(fd)


def _replace(path: str) -> None:
    """As `sed -i` does."""
    with open(f"{path}.new", "w") as new, open(path) as old:
        new.write(old.read().upper())
    os.rename(f"{path}.new", path)


def set_times(path: str, atime: int | SpecialTime, mtime: int | SpecialTime) -> None:
    """See utimensat(2); times in nanoseconds."""
    fd = os.open(path, os.O_PATH)
    try:
        linux.utimens(fd, atime, mtime)
    finally:
        os.close(fd)


def _near() -> int:
    return time.time_ns() - 300_000_000


def copy(path: str, anew: bool = True) -> None:
    """As `cp` does, which leaves it to the server where that can do it; or onto what is there."""
    with open(path, "rb") as source, open(f"{path}.copy", "wb" if anew else "rb+") as target:
        while os.copy_file_range(source.fileno(), target.fileno(), 1 << 30):
            pass
    with open(path, "rb") as source, open(f"{path}.copy", "rb") as target:
        assert source.read() == target.read(), "the copy differs"


WORKS: dict[str, Callable[[str], None]] = {
    "append": _append,
    "write over": _write_into,
    "`>`, `cp` onto": _echo,
    "truncate, shorter": lambda path: os.truncate(path, 3),
    "truncate, longer": lambda path: os.truncate(path, 3000),
    "`sed -i`": _replace,
    "`touch`": os.utime,
    "`touch -a`": lambda path: set_times(path, SpecialTime.NOW, SpecialTime.OMIT),
    "`touch -m`": lambda path: set_times(path, SpecialTime.OMIT, SpecialTime.NOW),
    "`touch -d`": lambda path: set_times(path, LONG_AGO * 10**9, LONG_AGO * 10**9),
    "`touch -d` (now)": lambda path: set_times(path, _near(), _near()),
    "`chmod`": lambda path: os.chmod(path, 0o666),
    "`chgrp`": lambda path: os.chown(path, -1, os.getgid()),
    "`cp` of 1.25 MiB": copy,
}
CHGRP = "`chgrp`"
COPY = "`cp` of 1.25 MiB"
_CHANGE_TIMES = {work for work in WORKS if work.startswith("`touch")}


def perform(work: str, path: str) -> None:
    """Do a work (for a `User`, which can be sent the names of functions only)."""
    WORKS[work](path)


def _file_name(work: str) -> str:
    return "".join(letter for letter in work if letter.isalnum())


def set_acl(path: str) -> None:
    """Let the owner, the group and Carol read and write, and others read."""
    entries = [(1, 6, -1), (2, 6, CAROL), (4, 6, -1), (16, 6, -1), (32, 4, -1)]
    acl = struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *entry) for entry in entries)
    os.setxattr(path, "system.posix_acl_access", acl)


def prepare(directory: str, caller: Caller) -> None:
    """Make a file for each work, and for a copy one that no more callers can see than must."""
    os.makedirs(directory)
    os.chmod(directory, 0o777)
    for work in WORKS:
        path = os.path.join(directory, _file_name(work))
        with open(path, "wb") as file:
            file.write(os.urandom(MUCH) if work == COPY else CONTENT)
        os.chown(path, ANN, TEAM)
        os.chmod(path, 0o664)
        if work != COPY:
            set_acl(path)
        elif caller.in_team:
            os.chmod(path, 0o600 if caller.uid == ANN else 0o660)
        os.utime(path, (LONG_AGO + 100, LONG_AGO + 100))


@dataclass(frozen=True)
class Outcome:
    """What came of a work: the error, and then what the file is on the server, in server ids."""

    error: str
    size: int
    mode: int
    owner: tuple[int, int]
    changed: tuple[bool, bool]  # atime, mtime
    acl: bytes

    def __str__(self) -> str:
        times = "".join(letter for letter, is_new in zip("am", self.changed, strict=True) if is_new)
        return f"{self.error} {self.size} {stat.filemode(self.mode)} {self.owner} {times}"


def _error(exc: Exception) -> str:
    return errno.errorcode[exc.errno] if isinstance(exc, OSError) and exc.errno else repr(exc)


def outcomes(worker: User, seen: str, real: str) -> Iterator[tuple[str, Outcome]]:
    """Do each work below `seen`, and look at what it made of the real file."""
    for work in WORKS:
        try:
            worker.do(perform, work, os.path.join(seen, _file_name(work)))
            error = "ok"
        except Exception as exc:
            error = _error(exc)
        path = os.path.join(real, _file_name(work))
        info = os.stat(path)
        try:
            acl = os.getxattr(path, "system.posix_acl_access")
        except OSError:
            acl = b""
        # Reading changes atime, sooner or later.
        atime = info.st_atime != LONG_AGO + 100 and work in _CHANGE_TIMES
        changed = atime, info.st_mtime != LONG_AGO + 100
        yield work, Outcome(error, info.st_size, info.st_mode, (info.st_uid, info.st_gid), changed, acl)


Table = dict[tuple[str, str], Outcome]
"""What came of a work by a caller."""


FULL = "CLOAKFS_NFS_TABLE"
"""A variable of the environment: with "full", all cells are tried, and not only a sample."""


def is_full() -> bool:
    """Whether all cells are to be tried."""
    return os.environ.get(FULL) == "full"


class Row(NamedTuple):
    """One comparison, as the report of a test carries it."""

    server: str
    version: str
    entry: str
    work: str
    caller: str
    outcome: str
    bare: str
    is_same: bool


HELD = ("its daemon dies", "a `reload` renews the mount", "`down` and `up`")
"""What happens to a mount of which clients hold files open, and locked."""

NOT_LOCKED = "{}; the file is not locked"

DELEGATED = {
    "content": "a delegated file gets other content",
    "mode": "a delegated file gets another mode",
    "removed": "a delegated file is removed",
}
"""What happens behind the mount to a file of which a client holds a delegation."""


class Holding:
    """A file that a caller holds open, for writing if it may write; and locked, unless told otherwise."""

    def __init__(self, who: User, version: str, caller: str, path: str, real: str, *, lock: bool = True) -> None:
        self.version, self.caller, self.path = version, caller, path
        self._who, self._real = who, real
        self._writes = caller != "other"
        self._fd = who.do(os.open, path, os.O_RDWR if self._writes else os.O_RDONLY)
        if lock:
            who.do(fcntl.lockf, self._fd, fcntl.LOCK_EX if self._writes else fcntl.LOCK_SH)

    def outcome(self) -> str:
        """Write and read; return "ok", or the first error."""
        wanted = b"after" if self._writes else b"." * 5
        try:
            if self._writes:
                self._who.do(os.pwrite, self._fd, wanted, 10)
                self._who.do(os.fsync, self._fd)
                if Path(self._real).read_bytes()[10:15] != wanted:
                    return "lost"
            self._who.do(os.posix_fadvise, self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
            if self._who.do(os.pread, self._fd, 5, 10) != wanted:
                return "other content"
            if self._writes:
                self._who.do(os.pwrite, self._fd, b"." * 5, 10)
                self._who.do(os.fsync, self._fd)
        except OSError as exc:
            return _error(exc)
        return "ok"

    def close(self) -> None:
        self._who.error(os.close, self._fd)
        self._who.close()


RESULTS = "work table"
"""The property of a test's report that lists the rows."""


def compared(server: str, version: str, entry: str, found: Table, expected: Table) -> list[Row]:
    """Compare what came of the works through an entry with what came of them through the bare export."""
    return [
        Row(
            server, version, entry, work, caller, outcome.error, expected[work, caller].error,
            outcome == expected[work, caller],
        )
        for (work, caller), outcome in found.items()
    ]  # fmt: skip


def differences(found: Table, expected: Table) -> str:
    """Return what a person has to know of the comparisons that failed."""
    return "\n".join(
        f"{work} by {caller}: {outcome}, bare: {expected[work, caller]}"
        for (work, caller), outcome in found.items()
        if outcome != expected[work, caller]
    )


VERSIONS = ("3", "4.0", "4.2")
CLOAK = "cloak_list = uid +077 0 -1"
OFFSET = 10000
MAP = f"range_map = uid {OFFSET + 1000} {OFFSET + 1999} map 1000 gid {OFFSET + 1000} {OFFSET + 1999} map 1000"


def squash(caller: Caller) -> str:
    return f"all_squash,anonuid={caller.uid},anongid={TEAM if caller.in_team else caller.uid}"


def squash_range(caller: Caller) -> str:
    """A range in which the caller's client ids are not the first, under which the server shows them to others."""
    ids = f"{OFFSET + 1000} {OFFSET + 1999} squash {caller.uid}"
    return f"range_map = uid {ids} gid {ids}"


@dataclass(frozen=True)
class Entry:
    """An entry, and the options of the bare export that it is compared with."""

    options: str
    bare: str = "root_squash,sync"
    only: str = ""  # the caller, if it is for one

    @property
    def offset(self) -> int:
        """What is added to a server id to get the id on the client."""
        return OFFSET if "range_map" in self.options else 0

    @property
    def callers(self) -> dict[str, Caller]:
        return {name: caller for name, caller in CALLERS.items() if self.only in ("", name)}


def check(entry: Entry, found: Table, expected: Table) -> None:
    """Check that everything by all callers of an entry came out as it is expected to."""
    assert found.items() <= expected.items(), differences(found, expected)
    assert len(found) == len(WORKS) * len(entry.callers)


def check_rows(rows: list[Row], record: Callable[[str, object], None]) -> None:
    """Record comparisons for the report, and check that all came out the same."""
    record(RESULTS, rows)
    assert [row for row in rows if not row.is_same] == []


Cells = list[tuple[str, str]]
"""Names of entries, each with a version of the protocol."""


def chosen(entries: dict[str, Entry], sample: Cells) -> tuple[Cells, dict[str, Entry]]:
    """Return what is tried, all cells or a sample, and the entries that belong to that."""
    cells = list(itertools.product(entries, VERSIONS)) if is_full() else sample
    return cells, {name: entry for name, entry in entries.items() if name in dict(cells)}


def prepare_all(tree: str, versions: Iterable[str], callers: dict[str, Caller]) -> None:
    """Make the files of these callers, for each version of the protocol."""
    for version, (label, caller) in itertools.product(versions, callers.items()):
        prepare(f"{tree}/{version}/{label}", caller)


def make_shared_file(path: str, content: str) -> None:
    """Make a file that its owner, the team, and one more by ACL may write, and all others read."""
    Path(path).write_text(content)
    os.chown(path, ANN, TEAM)
    os.chmod(path, 0o664)
    set_acl(path)


def start(label: str) -> User:
    """Start the process of a caller."""
    caller = CALLERS[label]
    return User(caller.uid, caller.uid, [TEAM] if caller.in_team else [])


def all_works(
    places: dict[str, str], real: str, user: Callable[..., User], offset: int = 0, in_team: Iterable[str] = ()
) -> Table:
    """Have callers do all works, each below its place, and look at what came of it below `real`.

    Args:
        places: the directories of their files, as they see them, by the name of the caller.
        real: the directory on the server in which these directories are.
        user: makes a process with a uid, a gid and groups.
        offset: what is added to their ids on the server to get those on the client.
        in_team: who is in the team's group here, though it is not elsewhere.
    """
    table = {}
    for name, place in places.items():
        caller = CALLERS[name]
        groups = [offset + TEAM] if caller.in_team or name in in_team else []
        worker = user(offset + caller.uid, offset + caller.uid, groups)
        for work, outcome in outcomes(worker, place, os.path.join(real, name)):
            table[work, name] = outcome
        worker.close()
    return table


def make_accounts() -> None:
    """Make the users on the server, unless they are there."""
    subprocess.run(["groupadd", "-g", str(TEAM), "team"], check=False, capture_output=True)
    for name, uid in USERS.items():
        subprocess.run(["groupadd", "-g", str(uid), name], check=False, capture_output=True)
        more = ["-G", "team"] if name in ("ann", "ben") else []
        command = ["useradd", "-M", "-u", str(uid), "-g", str(uid), *more, name]
        subprocess.run(command, check=False, capture_output=True)
