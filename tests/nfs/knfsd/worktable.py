"""What callers do over NFS, for a table: each work by the owner of a file, by its group, by an ACL, and by others."""

import errno
import os
import stat
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from cloakfs import linux
from cloakfs.linux import When
from tests.agents import User

ANN, BEN, CAROL, DAVE, TEAM = 1001, 1002, 1003, 1004, 1100
"""The owner, somebody of the group, somebody whom the ACL names, and somebody else; and the group."""

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


def set_times(path: str, atime: int | When, mtime: int | When) -> None:
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
    "`touch -a`": lambda path: set_times(path, When.NOW, When.OMIT),
    "`touch -m`": lambda path: set_times(path, When.OMIT, When.NOW),
    "`touch -d`": lambda path: set_times(path, LONG_AGO * 10**9, LONG_AGO * 10**9),
    "`touch -d` (now)": lambda path: set_times(path, _near(), _near()),
    "`chmod`": lambda path: os.chmod(path, 0o666),
    "`chgrp`": lambda path: os.chown(path, -1, os.getgid()),
    "`cp` of 1.25 MiB": copy,
}
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


def make_accounts() -> None:
    """Make the users on the server, unless they are there."""
    subprocess.run(["groupadd", "-g", str(TEAM), "team"], check=False, capture_output=True)
    for name, uid in USERS.items():
        subprocess.run(["groupadd", "-g", str(uid), name], check=False, capture_output=True)
        more = ["-G", "team"] if name in ("ann", "ben") else []
        command = ["useradd", "-M", "-u", str(uid), "-g", str(uid), *more, name]
        subprocess.run(command, check=False, capture_output=True)
