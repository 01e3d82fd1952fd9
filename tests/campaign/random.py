"""Performs random operations through a mount and behind it, and compares it with a model that shares no code with it.

The model is written from the definition of range-mapping and cloaking alone: what the real tree answers to the identity
of a caller, without what the cloak rule hides. Two users and root change the tree through the mount and behind it, with
and without pauses, and keep files, directories and working directories open. Whenever they pause, every name is looked
up, listed and opened by each of them. After changes through the mount alone the answers must be right at once; after
changes behind it, within the time that is allowed for reports (--patience; what came late is counted). Operations
through the mount must also fail or succeed, and do, what they do on a twin of the tree.

Each seed is a program of its own, on a file system of its own kind and with a policy of its own. A program that shows
a difference is made as short as possible, and reported as a script that runs it again.
"""

import argparse
import contextlib
import ctypes
import errno
import os
import random
import shutil
import stat
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from tests.agents import User
from tests.mount.loopfs import filesystem
from tests.waiting import wait_until

KINDS = ("tmpfs", "ext4", "xfs", "btrfs")
COMMAND = (sys.executable, "-m", "cloakfs_cli.main")

NOBODY = 65534  # Linux's nobody and nogroup
OFFSET = 1000  # with a range_map, the id of a client is that of the server and this
USERS = ((4001, 4001, (4100, 4200)), (4002, 4002, (4100,)))
SUPERUSER = (0, 0, (0,))

NAMES = "abc"
PATHS = [*NAMES, *(f"{x}/{y}" for x in NAMES for y in NAMES), *(f"a/{x}/{y}" for x in NAMES for y in NAMES)]
TARGETS = ("a", "b", "b/c", "c/a", ".", "nowhere")
MODES = (
    0o777, 0o777, 0o755, 0o755, 0o750, 0o700, 0o711, 0o770, 0o775, 0o644, 0o666, 0o600, 0o640, 0o660, 0o444, 0o111, 0,
    0o007, 0o070, 0o4755, 0o2755, 0o6711, 0o2770, 0o1755,
)  # fmt: skip
MASKS = (
    "+077",
    "+077",
    "+077",
    "+007",
    "+007",
    "+070",
    "+005",
    "+050",
    "-077",
    "-007",
    "-070",
    "+700",
    "+400",
    "+100",
    "-400",
    "+044",
    "-011",
)
ACCESS, DEFAULT = "system.posix_acl_access", "system.posix_acl_default"

AT_ONCE = 0.02  # seconds in which attributes that the kernel may keep for an instant are certainly gone

_libc = ctypes.CDLL(None, use_errno=True)


# -- the rules


class Identity(NamedTuple):
    """The caller, in ids of the server."""

    uid: int
    gid: int
    groups: frozenset[int]


class Cloak(NamedTuple):
    """One definition of a cloak_list."""

    by_uid: bool
    shows: bool
    special: int
    group: int
    other: int
    low: int
    high: int


def cloak(text: str) -> Cloak:
    kind, mask, low, high = text.split()
    special, group, other = (int(digit) for digit in mask[1:])
    return Cloak(kind == "uid", mask[0] == "+", special, group, other, int(low), int(high))


@dataclass(frozen=True)
class Policy:
    """What a mount is made with.

    Attributes:
        cloaks: definitions of cloak_list, as text.
        squashes_root: root_squash, which is the default.
        maps: whether clients' ids of users lie `OFFSET` above the server's, and all others are nobody.
        views: whether there is a fixed view for each user.
    """

    cloaks: tuple[str, ...] = ()
    squashes_root: bool = False
    maps: bool = False
    views: bool = False

    @property
    def options(self) -> str:
        words = ["rw"]
        if not self.maps:  # which decides of root, too
            words.append("root_squash" if self.squashes_root else "no_root_squash")
        if self.cloaks:
            words.append(f"cloak_list={' '.join(self.cloaks)}")
        if self.maps:
            words.append(" ".join(["range_map=", *(f"{kind} 5001 5999 map 4001" for kind in ("uid", "gid"))]))
        if self.views:
            items = (f"{uid}:{gid}:{'+'.join(map(str, groups))}" for uid, gid, groups in USERS)
            words.append(f"views={' '.join(items)}")
        return ",".join(words)

    def forward(self, number: int) -> int:
        if self.maps:
            return number - OFFSET if 5001 <= number <= 5999 else NOBODY
        return NOBODY if self.squashes_root and number == 0 else number

    def reverse(self, number: int) -> int:
        if self.maps:
            return number + OFFSET if 4001 <= number <= 4999 else NOBODY
        return number

    def hides(self, who: Identity, info: os.stat_result) -> bool:
        """The algorithm of the paper: the first definition of each kind that selects the object has to show it."""
        for by_uid, number in ((True, info.st_uid), (False, info.st_gid)):
            for text in self.cloaks:
                rule = cloak(text)
                if rule.by_uid == by_uid and rule.low <= number <= rule.high:
                    if not self._shows(rule, who, info):
                        return True
                    break
        return False

    @staticmethod
    def _shows(rule: Cloak, who: Identity, info: os.stat_result) -> bool:
        if who.uid == info.st_uid:
            return True
        mode = info.st_mode
        hit = bool(
            (info.st_gid in who.groups and rule.group & mode >> 3 & 7)
            or rule.other & mode & 7
            or rule.special & mode >> 9 & 7
        )
        return hit == rule.shows

    def shown_mode(self, info: os.stat_result) -> int:
        """Set-id bits are shown where the shown id is the one client id that becomes the owner's."""
        mode = info.st_mode
        if not self._is_exact(info.st_uid):
            mode &= ~stat.S_ISUID
        if not self._is_exact(info.st_gid) and not stat.S_ISDIR(mode):
            mode &= ~stat.S_ISGID
        return mode

    def has_counterpart(self, number: int) -> bool:
        """Whether a client's id is not one of those that become nobody."""
        return number == NOBODY or self.forward(number) != NOBODY

    def _is_exact(self, number: int) -> bool:
        if self.maps:
            return 4001 <= number <= 4999
        return not self.squashes_root or number not in (0, NOBODY)


@dataclass(frozen=True)
class Caller:
    """A process that makes calls on the mount, and the identity with which the same is done on the real tree."""

    name: str
    client: tuple[int, int, tuple[int, ...]]
    who: Identity
    top: str  # where the caller finds the tree, below the mount point


def callers(policy: Policy) -> list[Caller]:
    found = []
    for uid, gid, groups in USERS:
        shift = OFFSET if policy.maps else 0
        client = (uid + shift, gid + shift, tuple(group + shift for group in groups))
        top = f"@{uid}" if policy.views else ""
        found.append(Caller(f"u{uid}", client, Identity(uid, gid, frozenset((gid, *groups))), top))
    if policy.views:  # root looks through the views of others
        return [*found, *(replace(caller, name=f"root@{caller.name}", client=SUPERUSER) for caller in found)]
    uid, gid = policy.forward(0), policy.forward(0)
    return [*found, Caller("root", SUPERUSER, Identity(uid, gid, frozenset((gid,))), "")]


# -- operations, each carried out by a process that has the ids


class Op(NamedTuple):
    """One operation: on `path`, and for some on `other` (a second path, the text of a link, or a name below `path`)."""

    name: str
    path: str
    other: str = ""
    mode: int = 0
    ids: tuple[int, int] = (-1, -1)
    data: bytes = b""


OFTEN = (
    "mkdir", "mkdir", "create", "create", "create", "replace", "write", "append", "mkfifo", "symlink", "link", "link",
    "unlink", "unlink", "unlink", "rmdir", "rename", "rename", "rename", "rename", "chmod", "chmod", "chmod", "chmod",
    "chown", "chown", "truncate", "utime", "touch", "setacl", "setdefault", "delacl",
)  # fmt: skip
ON_KEPT = ("chmod", "write", "truncate", "touch", "mkdir", "create", "unlink", "rmdir")
CREATING = {"mkdir", "mkfifo", "symlink", "create"}
FOLLOWING = {"chmod", "write", "append", "replace", "truncate", "utime", "touch", "setacl", "setdefault", "delacl"}
EXACT = {"chmod", "chown", "utime", "touch", "setacl", "mkdir", "mkfifo", "symlink", "create"}
"""Operations whose errno is compared: others fail for several reasons at once, and kernels differ in the order."""


def perform(top: str, op: Op) -> int:  # noqa: C901, PLR0912  (a table: one case for each operation)
    """Carry it out below `top`; return the errno, 0 if it succeeded."""
    path, other = os.path.join(top, op.path), os.path.join(top, op.other)
    try:
        match op.name:
            case "mkdir":
                os.mkdir(path, op.mode)
            case "mkfifo":
                os.mkfifo(path, op.mode)
            case "symlink":
                os.symlink(op.other, path)
            case "create":
                _write(path, os.O_CREAT | os.O_EXCL, op)
            case "replace":
                _write(path, os.O_CREAT | os.O_TRUNC, op)
            case "write":
                _write(path, 0, op)
            case "append":
                _write(path, os.O_APPEND, op)
            case "link":
                os.link(path, other, follow_symlinks=False)
            case "unlink":
                os.unlink(path)
            case "rmdir":
                os.rmdir(path)
            case "rename":
                _rename(path, other, op.mode)
            case "chmod":
                os.chmod(path, op.mode)
            case "chown":
                os.chown(path, *op.ids, follow_symlinks=False)
            case "truncate":
                os.truncate(path, op.mode)
            case "utime":
                os.utime(path, (5, 5))
            case "touch":
                os.utime(path)
            case "setacl":
                os.setxattr(path, ACCESS, op.data)
            case "setdefault":
                os.setxattr(path, DEFAULT, op.data)
            case "delacl":
                os.removexattr(path, ACCESS)
            case _:
                raise ValueError(op.name)
    except OSError as exc:
        return exc.errno or -1
    return 0


def _write(path: str, flags: int, op: Op) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK | flags, op.mode)
    try:
        os.write(fd, op.data)
    finally:
        os.close(fd)


def _rename(old: str, new: str, flags: int) -> None:
    if _libc.renameat2(-100, os.fsencode(old), -100, os.fsencode(new), ctypes.c_uint(flags)):
        raise OSError(ctypes.get_errno(), "renameat2")


_kept: dict[int, int] = {}  # in the process of a caller: slot -> descriptor
HOW = {
    "file": os.O_RDONLY,
    "writer": os.O_RDWR,
    "path": os.O_PATH | os.O_NOFOLLOW,
    "directory": os.O_RDONLY | os.O_DIRECTORY,
    "cwd": os.O_PATH | os.O_DIRECTORY,
}


def keep(slot: int, path: str, how: str) -> int:
    """Open `path` and keep it; return the errno."""
    try:
        if how in ("file", "writer") and not stat.S_ISREG(os.lstat(path).st_mode):
            return errno.EINVAL
        fd = os.open(path, HOW[how] | os.O_NONBLOCK * (not HOW[how] & os.O_PATH))
        if how == "cwd":
            os.fchdir(fd)
    except OSError as exc:
        return exc.errno or -1
    _kept[slot] = fd
    return 0


def drop(slot: int) -> None:
    os.close(_kept.pop(slot))


def perform_kept(slot: int, op: Op) -> int:
    """Carry out an operation on what is kept, or on a name in it; return the errno."""
    fd = _kept[slot]
    try:
        match op.name:
            case "chmod":
                os.chmod(f"/proc/self/fd/{fd}", op.mode)
            case "write":
                os.pwrite(fd, op.data, 0)
            case "truncate":
                os.truncate(fd, op.mode)
            case "touch":
                os.utime(f"/proc/self/fd/{fd}")
            case "mkdir":
                os.mkdir(op.other, op.mode, dir_fd=fd)
            case "create":
                os.close(os.open(op.other, os.O_WRONLY | os.O_CREAT | os.O_EXCL, op.mode, dir_fd=fd))
            case "unlink":
                os.unlink(op.other, dir_fd=fd)
            case "rmdir":
                os.rmdir(op.other, dir_fd=fd)
            case _:
                raise ValueError(op.name)
    except OSError as exc:
        return exc.errno or -1
    return 0


# -- looking


class Seen(NamedTuple):
    """What one caller finds at one path."""

    error: int
    mode: int = 0
    uid: int = 0
    gid: int = 0
    size: int = 0
    links: int = 0
    times: tuple[int, int] = (0, 0)
    target: str = ""
    acl: bytes = b""
    may: tuple[bool, bool, bool] = (False, False, False)
    listed: tuple[str, ...] | int = 0
    content: bytes | int = 0
    inode: int = 0


def look(top: str, paths: list[str]) -> dict[str, Seen]:
    """Ask everything about each path."""
    return {path: _look_at(os.path.join(top, path) if path else top) for path in paths}


def _look_at(path: str) -> Seen:
    try:
        info = os.lstat(path)
    except OSError as exc:
        return Seen(exc.errno or -1)
    target, acl, may = "", b"", (False, False, False)
    listed: tuple[str, ...] | int = 0
    content: bytes | int = 0
    if stat.S_ISLNK(info.st_mode):
        target = os.readlink(path)
    else:
        with contextlib.suppress(OSError):
            acl = os.getxattr(path, ACCESS)
        may = (os.access(path, os.R_OK), os.access(path, os.W_OK), os.access(path, os.X_OK))
    if stat.S_ISDIR(info.st_mode):
        try:
            listed = tuple(sorted(os.listdir(path)))
        except OSError as exc:
            listed = exc.errno or -1
    elif stat.S_ISREG(info.st_mode):
        try:
            fd = os.open(path, os.O_RDONLY)
        except OSError as exc:
            content = exc.errno or -1
        else:
            content = os.pread(fd, 1000, 0)
            os.close(fd)
    return Seen(
        0, info.st_mode, info.st_uid, info.st_gid, 0 if stat.S_ISDIR(info.st_mode) else info.st_size, info.st_nlink,
        (info.st_mtime_ns, info.st_ctime_ns), target, acl, may, listed, content, info.st_ino,
    )  # fmt: skip


def look_kept(slot: int, how: str) -> tuple[Seen, dict[str, Seen]]:
    """Stat what is kept, and, if it is a directory, each name in it."""
    fd = _kept[slot]
    try:
        info = os.stat("." if how == "cwd" else fd)
    except OSError as exc:
        return Seen(exc.errno or -1), _names_in(fd, how)
    listed: tuple[str, ...] | int = 0
    content: bytes | int = 0
    if how == "directory":
        try:
            os.lseek(fd, 0, os.SEEK_SET)
            listed = tuple(sorted(os.listdir(fd)))
        except OSError as exc:
            listed = exc.errno or -1
    elif how in ("file", "writer"):
        try:
            content = os.pread(fd, 1000, 0)
        except OSError as exc:
            content = exc.errno or -1
    size = 0 if stat.S_ISDIR(info.st_mode) else info.st_size
    seen = Seen(
        0, info.st_mode, info.st_uid, info.st_gid, size, times=(info.st_mtime_ns, 0), listed=listed, content=content
    )
    return seen, _names_in(fd, how)


def _names_in(fd: int, how: str) -> dict[str, Seen]:
    found = {}
    if how in ("directory", "cwd"):
        for name in NAMES:
            try:
                info = os.stat(name, dir_fd=None if how == "cwd" else fd, follow_symlinks=False)
                found[name] = Seen(0, info.st_mode, info.st_uid, info.st_gid)
            except OSError as exc:
                found[name] = Seen(exc.errno or -1)
    return found


def survey(top: str) -> dict[str, os.stat_result]:
    """Return what is there, parents first, for root to call."""
    found = {"": os.lstat(top)}
    for path, directories, files in os.walk(top):
        for name in sorted(directories + files):
            full = os.path.join(path, name)
            found[os.path.relpath(full, top)] = os.lstat(full)
    return dict(sorted(found.items()))


def parts(path: str) -> list[str]:
    """Return the top, and the path of each component."""
    words = path.split("/") if path else []
    return ["/".join(words[:count]) for count in range(len(words) + 1)]


def state(top: str) -> dict[str, tuple[object, ...]]:
    """Return what must be alike in twins."""
    found: dict[str, tuple[object, ...]] = {}
    first: dict[int, str] = {}  # inode -> its first name
    for path, info in survey(top).items():
        full = os.path.join(top, path)
        more: object = os.readlink(full) if stat.S_ISLNK(info.st_mode) else None
        if stat.S_ISREG(info.st_mode):
            with open(full, "rb") as file:
                more = file.read()
        acls = tuple(_xattr(full, name) for name in (ACCESS, DEFAULT)) if not stat.S_ISLNK(info.st_mode) else ()
        mode, name = info.st_mode, first.setdefault(info.st_ino, path)
        found[path] = mode, info.st_uid, info.st_gid, name, more, acls
    return found


def _xattr(path: str, name: str) -> bytes:
    try:
        return os.getxattr(path, name)
    except OSError:
        return b""


def make_twin(source: str, target: str) -> None:
    """Make a copy with owners, modes, ACLs and hard links."""
    shutil.rmtree(target, ignore_errors=True)
    subprocess.run(["cp", "-a", source, target], check=True)


# -- programs


class Step(NamedTuple):
    """A part of a program.

    Attributes:
        what: "through" (the mount), "behind" (it), "keep", "kept" (an operation on it), "drop", or "look".
        by: which caller.
        op: the operation.
        slot: of what is kept.
        how: it is kept.
        as_root: behind the mount, root does it instead of the caller's identity.
    """

    what: str
    by: int = 0
    op: Op | None = None
    slot: int = 0
    how: str = ""
    as_root: bool = False


@dataclass(frozen=True)
class Program:
    """What one seed stands for."""

    kind: str
    policy: Policy
    steps: tuple[Step, ...]


def acl(chance: random.Random, shift: int = 0) -> bytes:
    entries = [(1, chance.randrange(8), 0xFFFFFFFF), (2, chance.randrange(8), chance.choice(USERS)[0] + shift)]
    entries += [(4, chance.randrange(8), 0xFFFFFFFF), (16, chance.randrange(8), 0xFFFFFFFF)]
    entries += [(32, chance.randrange(8), 0xFFFFFFFF)]
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)


def draw_op(chance: random.Random, focus: str, *, shift: int = 0) -> Op:
    """Return a random operation, more often than not on `focus`, in which ids are shifted by so much."""
    path, other = (chance.choice((focus, chance.choice(PATHS))) for _ in range(2))
    name = chance.choice(OFTEN)
    mode = chance.choice(MODES)
    data = b"%06x" % chance.randrange(1 << 24) * chance.randrange(1, 3)
    match name:
        case "symlink":
            return Op(name, path, chance.choice(TARGETS))
        case "link":
            return Op(name, path, other)
        case "rename":
            return Op(name, path, other, mode=chance.choice((0, 0, 0, 1, 2)))
        case "truncate":
            return Op(name, path, mode=chance.randrange(9))
        case "chown":
            uid = chance.choice((-1, 4001, 4002, 0))
            gid = chance.choice((-1, 4001, 4002, 4100, 4200))
            return Op(name, path, ids=(uid + shift if uid > 0 else uid, gid + shift if gid > 0 else gid))
        case "setacl" | "setdefault":
            return Op(name, path, data=acl(chance, shift))
        case "mkdir" | "create" | "mkfifo" | "chmod" | "replace":
            return Op(name, path, mode=mode, data=data)
    return Op(name, path, data=data)


def draw_policy(chance: random.Random) -> Policy:
    cloaks = []
    for _ in range(chance.choice((0, 1, 1, 1, 2, 3))):
        low, high = chance.choice(((4001, 4001), (4002, 4002), (4001, 4999), (0, 4294967294), (0, 0), (4100, 4100)))
        cloaks.append(f"{chance.choice(('uid', 'uid', 'gid'))} {chance.choice(MASKS)} {low} {high}")
    maps = chance.random() < 0.2
    views = not maps and chance.random() < 0.3
    squashes = not maps and not views and chance.random() < 0.3
    return Policy(tuple(cloaks), squashes, maps, views)


def draw(seed: int, kinds: tuple[str, ...], length: int) -> Program:
    """Return the program of a seed."""
    chance = random.Random(seed)
    kind = kinds[seed % len(kinds)]
    policy = draw_policy(chance)
    count = len(callers(policy))
    shift = OFFSET if policy.maps else 0
    steps = draw_beginning(chance)
    slots = 0
    while len(steps) < length:
        sides = chance.choice((("through",), ("through",), ("behind",), ("through", "behind")))
        focus = chance.choice(PATHS)
        if chance.random() < 0.15:
            steps += anew(chance, focus, count, slots)
            slots += 1
        elif chance.random() < 0.5:
            steps.append(Step("through", chance.randrange(count), Op("create", focus, mode=chance.choice(MODES))))
        for _ in range(chance.choice((1, 1, 2, 3, 6))):
            steps.append(draw_step(chance, focus, sides, count, slots, shift))
            slots += steps[-1].what == "keep"
        steps.append(Step("look"))
    return Program(kind, policy, (*steps, Step("look")))


def draw_beginning(chance: random.Random) -> list[Step]:
    """Return what makes the directories."""
    steps: list[Step] = []
    for path in ("a", "b", "a/a"):
        op = Op("mkdir", path, mode=0o777)
        steps += [Step("behind", op=op, as_root=True), Step("behind", op=op._replace(name="chmod"), as_root=True)]
        if chance.random() < 0.7:
            owner = chance.choice(USERS)[0]
            steps.append(Step("behind", op=Op("chown", path, ids=(owner, owner)), as_root=True))
    return steps


def draw_step(chance: random.Random, focus: str, sides: tuple[str, ...], count: int, slots: int, shift: int) -> Step:
    """Return a step near `focus`, by one of `count` callers, of whom `slots` descriptors have been kept."""
    by, draws = chance.randrange(count), chance.random()
    if draws < 0.15:
        path = chance.choice((focus, focus, "", chance.choice(PATHS)))
        return Step("keep", by, Op("", path), slots, chance.choice(list(HOW)))
    if draws < 0.2 and slots:
        return Step("drop", slot=chance.randrange(slots))
    if draws < 0.3 and slots:
        name = chance.choice(ON_KEPT)
        op = Op(name, "", chance.choice(NAMES), chance.choice(MODES), data=b"%06x" % chance.randrange(1 << 24))
        if name == "truncate":
            op = op._replace(mode=op.mode % 9)
        return Step("kept", op=op, slot=chance.randrange(slots))
    if chance.choice(sides) == "through":
        return Step("through", by, draw_op(chance, focus, shift=shift))
    return Step("behind", by, draw_op(chance, focus), as_root=chance.random() < 0.5)


def anew(chance: random.Random, path: str, count: int, slot: int) -> list[Step]:
    """Make something, keep it, look, and let another object have its name, of which not all callers may know."""
    by, other = chance.randrange(count), chance.choice(PATHS)
    make = chance.choice(("create", "create", "mkdir"))
    steps = [Step("through", by, Op(make, path, mode=chance.choice((0o644, 0o666, 0o755, 0o777))))]
    steps += [Step("keep", chance.randrange(count), Op("", path), slot, chance.choice(("path", "file", "directory")))]
    steps += [Step("look")] * chance.randrange(2)
    away = chance.choice((Op("unlink", path), Op("rmdir", path), Op("rename", path, other), Op("rename", other, path)))
    steps += [Step(chance.choice(("through", "behind")), by, away, as_root=chance.random() < 0.3)]
    steps += [Step("look")] * chance.randrange(2)
    again = Op(chance.choice(("create", "mkdir")), path, mode=chance.choice((0o600, 0o700, 0o640, 0o644)))
    return [*steps, Step(chance.choice(("through", "behind", "behind")), by, again), Step("look")]


class Difference(Exception):
    """The mount is not what the model says.

    Attributes:
        reveals: it shows what is hidden or gone, rather than too little.
    """

    def __init__(self, words: str, *, reveals: bool = False) -> None:
        super().__init__(words)
        self.reveals = reveals


@dataclass
class Kept:
    """What a caller keeps, and the object on the real tree (`fd`, of this process)."""

    by: int
    how: str
    fd: int
    inode: int


@dataclass
class Counts:
    """What a campaign has done."""

    programs: int = 0
    operations: int = 0
    comparisons: int = 0
    late: int = 0
    latest: float = 0.0
    by_kind: dict[str, int] = field(default_factory=dict)


class Run:
    """One program in the making.

    Args:
        top: the root of the file system, where the real tree and its twin are.
        point: the mount point.
        policy: see above.
        counts: are added to.
        patience: seconds within which a change behind the mount must be seen.
    """

    def __init__(self, top: str, point: str, policy: Policy, counts: Counts, patience: float) -> None:
        self.real, self.twin, self.point = f"{top}/real", f"{top}/twin", point
        self.policy, self.counts, self.patience = policy, counts, patience
        self.callers = callers(policy)
        self.kept: dict[int, Kept] = {}
        # Where something was changed since reports were waited for: the view through which, or "behind" the mount.
        self.changed: set[str] = set()
        self.is_alike = False  # the twin is
        self.inodes: dict[tuple[str, int], int] = {}  # by view and real inode number
        self.clients = [User(*caller.client) for caller in self.callers]
        self.servers = [User(caller.who.uid, caller.who.gid, caller.who.groups) for caller in self.callers]

    def close(self) -> None:
        for user in (*self.clients, *self.servers):
            user.close()
        for kept in self.kept.values():
            os.close(kept.fd)

    def is_told(self, by: int) -> bool:
        """Whether a caller has to know of all changes without waiting: others were not made since the last wait."""
        return self.changed <= {self.callers[by].top}

    def place(self, by: int) -> str:
        return os.path.join(self.point, self.callers[by].top)

    # -- steps

    def take(self, step: Step) -> None:
        self.counts.operations += step.what != "look"
        match step.what:
            case "through":
                assert step.op
                self.through(step.by, step.op)
            case "behind":
                assert step.op
                self.behind(step)
            case "keep":
                assert step.op
                self.keep(step.slot, step.by, step.op.path, step.how)
            case "drop" if step.slot in self.kept:
                self.drop(step.slot)
            case "kept" if step.slot in self.kept:
                assert step.op
                self.on_kept(step.slot, step.op)
            case "look":
                self.compare()

    def behind(self, step: Step) -> None:
        assert step.op
        self.changed.add("behind")
        for top in (self.real, self.twin) if self.is_alike else (self.real,):
            if step.as_root:
                perform(top, step.op)
            else:
                self.servers[step.by].do(perform, top, step.op)

    def hidden(self, by: int, path: str, infos: dict[str, os.stat_result]) -> str | None:
        """The first component of a path that is hidden; "" for the top is always shown, as that of a mount is."""
        for part in parts(path)[1:]:
            if part in infos and self.policy.hides(self.callers[by].who, infos[part]):
                return part
        return None

    def through(self, by: int, op: Op) -> None:
        infos = survey(self.real)
        paths = [op.path, *([op.other] if op.name in ("link", "rename") else [])]
        by_link = any(
            part in infos and stat.S_ISLNK(infos[part].st_mode)
            for path in paths
            for part in (parts(path) if op.name in FOLLOWING and path == op.path else parts(path)[:-1])
        )
        is_told = self.is_told(by)
        self.changed.add(self.callers[by].top)
        if not is_told or by_link:
            self.is_alike = False
            self.clients[by].do(perform, self.place(by), op)
            return
        if not self.is_alike:
            make_twin(self.real, self.twin)
            self.is_alike = True
        expected, also = self.forbidden(by, op, infos)
        got = self.clients[by].do(perform, self.place(by), op)
        if not expected:
            expected = self.servers[by].do(perform, self.twin, self.in_server_ids(op, infos))
            if op.name not in EXACT and expected:
                also = set(errno.errorcode)
        self.counts.comparisons += 1
        if got != expected and not (expected and got and got in also):
            raise Difference(f"{self.callers[by].name}: {op}: {said(got)}, expected {said(expected)}")
        after = state(self.real), state(self.twin)
        if after[0] != after[1]:
            self.is_alike = False
            raise Difference(f"{self.callers[by].name}: {op}: has done {differing(*after)}")

    def in_server_ids(self, op: Op, infos: dict[str, os.stat_result]) -> Op:
        if op.name == "chmod" and op.path in infos:  # bits that are not shown stay
            info = infos[op.path]
            return op._replace(mode=op.mode | stat.S_IMODE(info.st_mode) & ~self.policy.shown_mode(info))
        if not self.policy.maps:
            return op
        if op.name == "chown":
            uid, gid = (self.policy.forward(number) if number > 0 else number for number in op.ids)
            return op._replace(ids=(uid, gid))
        if op.name in ("setacl", "setdefault"):
            entries = struct.iter_unpack("<HHI", op.data[4:])
            mapped = ((tag, bits, self.policy.forward(number) if tag == 2 else number) for tag, bits, number in entries)
            return op._replace(data=op.data[:4] + b"".join(struct.pack("<HHI", *entry) for entry in mapped))
        return op

    def forbidden(self, by: int, op: Op, infos: dict[str, os.stat_result]) -> tuple[int, set[int]]:
        """The errno that the cloak rule demands, 0 if none; and those that do as well."""
        first = self.hidden(by, op.path, infos)
        if op.name in CREATING or op.name == "replace":
            if first is None:
                return 0, set()
            if first != op.path:
                return errno.ENOENT, {errno.EACCES}
            return errno.EACCES if op.name == "replace" else errno.EEXIST, {errno.EACCES}
        if first is not None:
            return errno.ENOENT, set(errno.errorcode) if op.other else {errno.EACCES}
        if op.name in ("link", "rename") and self.hidden(by, op.other, infos) is not None:
            return errno.EACCES, set(errno.errorcode)
        if (
            op.name == "chown"
            and any(number != -1 and not self.policy.has_counterpart(number) for number in op.ids)
            and op.path in infos
        ):
            return errno.EINVAL, {errno.EPERM, errno.EACCES}
        return 0, set()

    def keep(self, slot: int, by: int, path: str, how: str) -> None:
        self.settle()
        place = self.place(by)
        try:
            fd = os.open(os.path.join(self.real, path), os.O_PATH | os.O_NOFOLLOW)
        except OSError:
            return
        if any(stat.S_ISLNK(info.st_mode) for part, info in survey(self.real).items() if part in parts(path)):
            os.close(fd)
            return
        for other in [other for other, kept in self.kept.items() if how == kept.how == "cwd" and by == kept.by]:
            self.drop(other)  # a process has only one
        if self.clients[by].do(keep, slot, os.path.join(place, path) if path else place, how):
            os.close(fd)
            return
        self.kept[slot] = Kept(by, how, fd, os.stat(fd).st_ino)

    def drop(self, slot: int) -> None:
        kept = self.kept.pop(slot)
        self.clients[kept.by].do(drop, slot)
        os.close(kept.fd)

    def on_kept(self, slot: int, op: Op) -> None:
        kept = self.kept[slot]
        infos = survey(self.real)
        is_directory = stat.S_ISDIR(os.stat(kept.fd).st_mode)
        if (op.name in ("mkdir", "create", "unlink", "rmdir")) != (kept.how in ("directory", "cwd") and is_directory):
            return
        self.is_alike = False
        places = self.shown_places(kept, infos)
        before = [os.path.join(path, op.other) for path in places]
        is_told = self.is_told(kept.by)
        self.changed.add(self.callers[kept.by].top)
        error = self.clients[kept.by].do(perform_kept, slot, op)
        if not is_told or error or not os.stat(kept.fd).st_nlink:
            return
        self.counts.comparisons += 1
        if is_directory:
            if not places:
                raise Difference(f"{self.name(kept)}: {op} in a hidden directory has succeeded")
            takes_name = op.name in ("mkdir", "create", "unlink", "rmdir")  # the others are about the directory itself
            if takes_name and any(self.hidden(kept.by, path, infos) == path for path in before):
                raise Difference(f"{self.name(kept)}: {op} at a hidden name has succeeded")

    def name(self, kept: Kept) -> str:
        return f"{self.callers[kept.by].name}, who keeps a {kept.how}"

    def shown_places(self, kept: Kept, infos: dict[str, os.stat_result]) -> list[str]:
        places = [path for path, info in infos.items() if info.st_ino == kept.inode]
        return [path for path in places if self.hidden(kept.by, path, infos) is None]

    # -- comparing

    def settle(self) -> None:
        if self.changed - {""}:
            time.sleep(AT_ONCE)

    def compare(self) -> None:
        """Have all callers list and stat everything, in an order that changes."""
        was_behind = "behind" in self.changed
        if was_behind:
            self.settle()
        order = list(range(len(self.callers)))
        turn = self.counts.operations % len(order)
        for by in order[turn:] + order[:turn]:
            patience = 0.0 if self.is_told(by) else self.patience
            # What a caller hides through the mount is hidden from all views at once; other changes may show later.
            self.eventually(patience, lambda by=by: self.compare_names(by), hides_at_once=not was_behind)  # type: ignore[misc]
        time.sleep(AT_ONCE)
        for slot in list(self.kept):
            # The event that a file was closed may come late, and names that a caller keeps are invalidated late.
            self.eventually(self.patience, lambda slot=slot: self.compare_kept(slot))  # type: ignore[misc]
        self.changed.clear()

    def eventually(self, patience: float, check: Callable[[], None], *, hides_at_once: bool = False) -> None:
        began = time.monotonic()
        while True:
            now = time.monotonic() - began
            try:
                check()
            except Difference as exc:
                if now >= patience or (hides_at_once and exc.reveals):
                    raise
                time.sleep(0.01)
            else:
                if now > 0.001:
                    self.counts.late += 1
                    self.counts.latest = max(self.counts.latest, now)
                return

    def compare_names(self, by: int) -> None:
        infos = survey(self.real)
        paths = list(infos)
        for path, info in infos.items():
            if stat.S_ISDIR(info.st_mode):
                absent = (os.path.join(path, name) for name in NAMES)
                paths += [name for name in absent if name not in infos]
        bare: dict[str, Seen] = self.servers[by].do(look, self.real, paths)
        seen: dict[str, Seen] = self.clients[by].do(look, self.place(by), paths)
        expected: dict[str, Seen] = {}
        for path in paths:
            there = bare[path]
            above = expected[os.path.dirname(path)] if path else None
            if above is not None and above.error:
                there = Seen(above.error)
            elif path and not there.error and self.hidden(by, path, infos):
                there = Seen(errno.ENOENT)
            elif not there.error:
                there = self.as_shown(by, path, there, infos, seen[path])
            expected[path] = there
            self.counts.comparisons += 3 + (len(NAMES) if isinstance(there.listed, tuple) else 0)
            if seen[path] != there:
                raise Difference(
                    f"{self.callers[by].name} at {path!r}: {differing(seen[path]._asdict(), there._asdict())}",
                    reveals=reveals(seen[path], there),
                )
        self.compare_inodes(by, infos, seen)

    def as_shown(self, by: int, path: str, bare: Seen, infos: dict[str, os.stat_result], seen: Seen) -> Seen:
        info = infos[path]
        listed = bare.listed
        if isinstance(listed, tuple):
            listed = tuple(name for name in listed if self.hidden(by, os.path.join(path, name), infos) is None)
        links = info.st_nlink
        if stat.S_ISDIR(info.st_mode) and self.policy.cloaks:
            links = 1
        names = [name for name, other in infos.items() if other.st_ino == info.st_ino]
        if seen.links == len([name for name in names if self.hidden(by, name, infos) is None]):
            links = seen.links  # names that are hidden need not be counted
        return bare._replace(
            mode=self.policy.shown_mode(info),
            uid=self.policy.reverse(info.st_uid),
            gid=self.policy.reverse(info.st_gid),
            links=links,
            listed=listed,
            acl=seen.acl if self.policy.maps else bare.acl,
            inode=seen.inode,
        )

    def compare_inodes(self, by: int, infos: dict[str, os.stat_result], seen: dict[str, Seen]) -> None:
        """An object has one number in one view, and no other has it at that time."""
        numbers: dict[int, int] = {}
        for path, info in infos.items():
            if not seen[path].error and numbers.setdefault(seen[path].inode, info.st_ino) != info.st_ino:
                raise Difference(f"{self.callers[by].name} at {path!r}: has the inode number of another object")
        if len(set(numbers.values())) != len(numbers):
            raise Difference(f"{self.callers[by].name}: an object has several inode numbers: {numbers}")

    def compare_kept(self, slot: int) -> None:
        kept = self.kept[slot]
        info = os.stat(kept.fd)
        infos = survey(self.real)
        places = self.shown_places(kept, infos)
        has_open = stat.S_ISREG(info.st_mode) and any(
            other.by == kept.by and other.how in ("file", "writer") and other.inode == kept.inode
            for other in self.kept.values()
        )
        seen, names = self.clients[kept.by].do(look_kept, slot, kept.how)
        self.counts.comparisons += 1 + len(names)
        if info.st_nlink == 0 and not has_open:
            return
        self.compare_names_in(kept, places, infos, names)
        if not places and not has_open:
            if seen.error != errno.ESTALE:
                raise Difference(f"{self.name(kept)} of what is hidden: {said(seen.error)}")
            return
        if seen.error == errno.ESTALE and not has_open and not stat.S_ISDIR(info.st_mode):
            return  # it may not have been looked up where it is now: it may be taken for hidden
        listed: tuple[str, ...] | int = 0
        if kept.how == "directory":
            found = (path for path in infos if path and os.path.dirname(path) == places[0])
            listed = tuple(sorted(os.path.basename(p) for p in found if self.hidden(kept.by, p, infos) is None))
        content: bytes | int = 0
        if kept.how in ("file", "writer"):
            with open(f"/proc/self/fd/{kept.fd}", "rb") as file:
                content = file.read(1000)
        size = 0 if stat.S_ISDIR(info.st_mode) else info.st_size
        expected = Seen(
            0, self.policy.shown_mode(info), self.policy.reverse(info.st_uid), self.policy.reverse(info.st_gid), size,
            times=(info.st_mtime_ns, 0), listed=listed, content=content,
        )  # fmt: skip
        if seen != expected:
            raise Difference(f"{self.name(kept)} of {places}: {differing(seen._asdict(), expected._asdict())}")

    def compare_names_in(
        self, kept: Kept, places: list[str], infos: dict[str, os.stat_result], names: dict[str, Seen]
    ) -> None:
        """What is found must be there and shown; whether it can be found depends on rights that are not looked at."""
        for name, seen in names.items():
            path = os.path.join(places[0], name) if places else None
            there = infos.get(path) if path is not None else None
            if not seen.error and (there is None or path is None or self.hidden(kept.by, path, infos) is not None):
                raise Difference(f"{self.name(kept)} of {places}: finds {name!r}, which is hidden or absent")
            is_shown = there is not None and path is not None and self.hidden(kept.by, path, infos) is None
            if is_shown and seen.error not in (0, errno.EACCES):
                raise Difference(f"{self.name(kept)} of {places}: {name!r} is there: {said(seen.error)}")


def reveals(seen: Seen, expected: Seen) -> bool:
    """Whether something is shown that should not be."""
    if expected.error:
        return not seen.error
    if isinstance(seen.listed, tuple):
        return not isinstance(expected.listed, tuple) or not set(seen.listed) <= set(expected.listed)
    return isinstance(seen.content, bytes) and not isinstance(expected.content, bytes)


def said(error: int) -> str:
    return errno.errorcode.get(error, str(error)) if error else "success"


def differing(found: dict[str, Any], expected: dict[str, Any]) -> str:
    keys = [key for key in {**found, **expected} if found.get(key) != expected.get(key)]
    return "; ".join(f"{key}: {found.get(key)!r} instead of {expected.get(key)!r}" for key in keys)


# -- a mount for each program


@contextlib.contextmanager
def serving(top: str, point: str, policy: Policy) -> Iterator[list[str]]:
    """Mount the real tree; what the daemon logged of errors is in the list afterwards."""
    for path in (f"{top}/real", f"{top}/twin"):
        shutil.rmtree(path, ignore_errors=True)
    os.mkdir(f"{top}/real", 0o755)
    os.chmod(f"{top}/real", 0o777)
    complaints: list[str] = []
    log = f"{point}.log"
    subprocess.run([*COMMAND, "mount", f"{top}/real", point, "-o", f"log={log},{policy.options}"], check=True)
    try:
        yield complaints
    finally:
        try:
            umount = [*COMMAND, "umount", point]
            wait_until(lambda: not subprocess.run(umount, capture_output=True, check=False).returncode, 30, every=0.1)
        except AssertionError:
            subprocess.run([*COMMAND, "umount", "--lazy", point], check=False)
            complaints.append("it could not be unmounted")
        with open(log, encoding="utf-8") as file:
            complaints += [line for line in file if "ERROR" in line or "Traceback" in line]
        os.unlink(log)


def run(program: Program, top: str, counts: Counts, patience: float) -> str:
    """Run a program; return the first difference, if there is any."""
    point = tempfile.mkdtemp(prefix="cloakfs-random-")
    os.chmod(point, 0o755)
    found = ""
    try:
        with serving(top, point, program.policy) as complaints:
            it = Run(top, point, program.policy, counts, patience)
            try:
                for number, step in enumerate(program.steps):
                    try:
                        it.take(step)
                    except Difference as exc:
                        found = f"step {number}: {exc}"
                        break
            finally:
                it.close()
        return found or "; ".join(complaints)
    finally:
        os.rmdir(point)


def shorten(program: Program, fails: Callable[[Program], bool], seconds: float) -> Program:
    """Leave out steps for as long as it still fails, for so many seconds at most."""
    until = time.monotonic() + seconds
    size = len(program.steps) // 2
    while size:
        at = 0
        while at < len(program.steps) and time.monotonic() < until:
            shorter = replace(program, steps=program.steps[:at] + program.steps[at + size :])
            if fails(shorter):
                program = shorter
            else:
                at += size
        size //= 2
    return program


def script(program: Program) -> str:
    """Return a program that repeats it: as root, in a clone, with .venv/bin/python."""
    steps = ",\n    ".join(_briefly(step) for step in program.steps)
    return (
        f"from tests.campaign.random import *\n\nreplay(Program({program.kind!r}, {_briefly(program.policy)}, (\n"
        f"    {steps},\n)))\n"
    )


def _briefly(value: object) -> str:
    """Like repr(), without what has its default."""
    if isinstance(value, Step | Op):
        given = {name: it for name, it in value._asdict().items() if it != value._field_defaults.get(name)}
    elif isinstance(value, Policy):
        given = {name: it for name, it in vars(value).items() if it != getattr(Policy, name)}
    else:
        return repr(value)
    return f"{type(value).__name__}({', '.join(f'{name}={_briefly(it)}' for name, it in given.items())})"


def replay(program: Program, patience: float = 3.0) -> None:
    """Run a program once on a file system of its own, in the mount namespace of the caller, and print what it shows."""
    base = tempfile.mkdtemp(prefix="cloakfs-random-")
    os.chmod(base, 0o755)
    try:
        with filesystem(program.kind, base) as top:
            print(run(program, top, Counts(), patience) or "no difference")
    finally:
        shutil.rmtree(base)


def keep_apart() -> None:
    """Go on in a mount namespace of its own, with state files of its own."""
    mark = "CLOAKFS_RANDOM_APART"
    if mark not in os.environ:
        words = ["unshare", "--mount", "--propagation", "private", sys.executable, "-m", __spec__.name, *sys.argv[1:]]
        os.execvpe(words[0], words, {**os.environ, mark: "1"})
    for path in ("/run/cloakfs", "/var/lib/cloakfs"):
        os.makedirs(path, exist_ok=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", path], check=True)


def main() -> int:
    """Run the campaign."""
    parser = argparse.ArgumentParser(prog="scripts/campaign random", description=__doc__)
    parser.add_argument("--comparisons", type=int, default=1_000_000, help="end after so many")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="end earlier, after the program at that time"
    )
    parser.add_argument(
        "--seed", type=int, default=random.randrange(10**6), help="of the first program; the next has the next"
    )
    parser.add_argument("--length", type=int, default=80, help="steps of each program")
    parser.add_argument("--kinds", default=",".join(KINDS), help="of file systems, by seed (default: %(default)s)")
    parser.add_argument(
        "--patience", type=float, default=3.0, help="seconds in which changes behind the mount must show"
    )
    parser.add_argument("--differences", type=int, default=5, help="end after so many")
    parser.add_argument("--shorten", type=float, default=60.0, help="seconds to shorten each program that shows one")
    words = parser.parse_args()
    keep_apart()
    kinds = tuple(words.kinds.split(","))
    counts, seed, found, began = Counts(), words.seed, 0, time.monotonic()
    base = tempfile.mkdtemp(prefix="cloakfs-random-")
    os.chmod(base, 0o755)
    try:
        with contextlib.ExitStack() as stack:
            tops = {kind: stack.enter_context(filesystem(kind, base)) for kind in kinds}

            def difference(program: Program) -> str:
                return run(program, tops[program.kind], counts, words.patience)

            while (
                counts.comparisons < words.comparisons
                and time.monotonic() - began < words.seconds
                and found < words.differences
            ):
                program, before = draw(seed, kinds, words.length), counts.comparisons
                text = difference(program)
                counts.programs += 1
                counts.by_kind[program.kind] = counts.by_kind.get(program.kind, 0) + counts.comparisons - before
                if text:
                    found += 1
                    print(f"seed {seed}, {program.kind}, {program.policy.options}: {text}", flush=True)
                    again = difference(program)
                    if again:
                        program = shorten(program, lambda shorter: bool(difference(shorter)), words.shorten)
                        again = difference(program)
                    print(f"{again or 'not again'}\n{script(program)}", flush=True)
                seed += 1
    finally:
        shutil.rmtree(base)
    print(
        f"{counts.comparisons:,} comparisons, {counts.operations:,} operations, {counts.programs} programs (seeds "
        f"{words.seed} to {seed - 1}, --length {words.length}) in {time.monotonic() - began:.0f} s; "
        f"{found} differences; {counts.late} answers came late, by {counts.latest:.2f} s at most"
    )
    print("  " + ", ".join(f"{kind}: {number:,}" for kind, number in counts.by_kind.items()))
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
