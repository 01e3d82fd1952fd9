"""Derives what a mount must answer from the rules alone, as an independent second opinion.

It imports nothing of cloakfs. Definitions are applied by a linear scan, and what a caller may not see is found by
walking the model tree name by name. The functions with a `Look` run inside a process that has the caller's server
identity, on the model tree, so that the kernel itself decides what that identity may search.
"""

import contextlib
import ctypes
import errno
import os
import stat
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

Kind = Literal["uid", "gid"]

with open("/proc/sys/fs/protected_symlinks", encoding="ascii") as _setting:
    PROTECTED_SYMLINKS = _setting.read().strip() != "0"
"""Whether links of other users are not followed in sticky directories that all users may write to (proc_sys_fs(5)).

FUSE's kernel does so nevertheless, because without default_permissions it does not know which directories are sticky.
"""

NOBODY = 65534
MAX_ID = 2**32 - 2


@dataclass(frozen=True)
class Map:
    """(uid|gid) low high (map|squash) server"""

    kind: Kind
    low: int
    high: int
    action: Literal["map", "squash"]
    server: int

    def __str__(self) -> str:
        return f"{self.kind} {self.low} {self.high} {self.action} {self.server}"


@dataclass(frozen=True)
class Cloak:
    """(uid|gid) mask low high"""

    kind: Kind
    mask: str
    low: int
    high: int

    def __str__(self) -> str:
        return f"{self.kind} {self.mask} {self.low} {self.high}"


class Who(NamedTuple):
    """An identity; `groups` has the primary one, too."""

    uid: int
    gid: int
    groups: frozenset[int]


@dataclass(frozen=True)
class Rules:
    """One export: what is mapped (nothing: the identity, no_root_squash), what is cloaked, and from whom nothing is.

    With `checked`, the kernel checks permissions, too.
    """

    maps: tuple[Map, ...] = ()
    cloaks: tuple[Cloak, ...] = ()
    exempt: tuple[int, ...] = ()
    checked: bool = False

    @property
    def options(self) -> str:
        """As the mount command wants it."""
        words = ["rw", "suid", "no_root_squash", *["default_permissions"] * self.checked]
        if self.maps:
            words.append("range_map=" + " ".join(map(str, self.maps)))
        if self.cloaks:
            words.append("cloak_list=" + " ".join(map(str, self.cloaks)))
        if self.exempt:
            words.append("exempt=" + " ".join(map(str, self.exempt)))
        return ",".join(words)

    # -- ids

    def server(self, kind: Kind, client: int) -> int | None:
        """The server id; None: nobody."""
        defs = [d for d in self.maps if d.kind == kind]
        if not defs:
            return client
        for d in defs:
            if d.low <= client <= d.high:
                return d.server + (client - d.low if d.action == "map" else 0)
        return None

    def client(self, kind: Kind, server: int) -> int:
        defs = [d for d in self.maps if d.kind == kind]
        if not defs:
            return server
        for d in defs:
            if d.action == "squash" and server == d.server:
                return d.low
            if d.action == "map" and d.server <= server <= d.server + d.high - d.low:
                return d.low + server - d.server
        return NOBODY

    def who(self, uid: int, gid: int, groups: tuple[int, ...]) -> Who:
        """The server's identity of a caller; groups that map to nobody are dropped."""
        server_uid, server_gid = self.server("uid", uid), self.server("gid", gid)
        primary = NOBODY if server_gid is None else server_gid
        more = {g for g in (self.server("gid", g) for g in groups if g != gid) if g is not None}
        return Who(NOBODY if server_uid is None else server_uid, primary, frozenset(more | {primary}))

    def is_one(self, kind: Kind, server: int) -> bool:
        """Is there one client id, the one that is shown, which is this server id?"""
        defs = [d for d in self.maps if d.kind == kind]
        here = [d for d in defs if d.server <= server <= d.server + (d.high - d.low if d.action == "map" else 0)]
        one = len(here) == 1 and (here[0].action == "map" or here[0].low == here[0].high)
        return not defs or (one and self.server(kind, self.client(kind, server)) == server)

    def hidden_bits(self, info: os.stat_result) -> int:
        """Set-id bits that are not shown, since on a client they would mean something else."""
        hidden = 0 if self.is_one("uid", info.st_uid) else stat.S_ISUID
        if not stat.S_ISDIR(info.st_mode) and not self.is_one("gid", info.st_gid):
            hidden |= stat.S_ISGID
        return info.st_mode & hidden

    # -- cloaking

    def shows(self, who: Who, info: os.stat_result) -> bool:
        """visible(file, caller, mask) of every definition that selects the file; the first of each kind does."""
        if who.uid == info.st_uid or who.uid in self.exempt:
            return True
        for kind, file_id in (("uid", info.st_uid), ("gid", info.st_gid)):
            for d in self.cloaks:
                if d.kind == kind and d.low <= file_id <= d.high:
                    sign, special, group, other = d.mask[0], int(d.mask[1]), int(d.mask[2]), int(d.mask[3])
                    hit = (
                        (info.st_gid in who.groups and group & info.st_mode >> 3 & 7)
                        or other & info.st_mode & 7
                        or special & info.st_mode >> 9 & 7
                    )
                    if bool(hit) != (sign == "+"):
                        return False
                    break
        return True


class Hidden(Exception):
    """The path leads to, or through, something that this caller may not know of."""

    def __init__(self, last: bool, parent: str) -> None:
        super().__init__(last, parent)
        self.last = last  # it is the last component itself
        self.parent = parent


class Protected(Exception):
    """The path leads through a symbolic link that the server's kernel does not follow: see `PROTECTED_SYMLINKS`."""


class Place(NamedTuple):
    """Where a path leads: a real directory, a name in it, and what is there."""

    parent: str
    name: str
    info: os.stat_result | None

    @property
    def path(self) -> str:
        return os.path.join(self.parent, self.name) if self.name else self.parent


@dataclass(frozen=True)
class Look:
    """How one caller looks at the tree whose root, which may be hidden like anything in it, is `root`."""

    rules: Rules
    who: Who
    root: str

    def walk(self, path: str, *, follow: bool) -> Place:
        """Where `path` (relative to the root) leads.

        Raises:
            Hidden: something on the way, or at the end, is hidden.
            OSError: the path leads nowhere, or the caller may not go there.
            Protected: it follows a link that others than the client's kernel do not follow.
        """
        top = os.lstat(self.root)
        if not self.rules.shows(self.who, top):
            raise Hidden(last=False, parent=self.root)
        info: os.stat_result | None = top
        parent, name = self.root, ""
        todo = _parts(path)
        links = 0
        while todo:
            if info is None or stat.S_ISLNK(info.st_mode):
                raise FileNotFoundError(errno.ENOENT, "on the way")
            if not stat.S_ISDIR(info.st_mode):
                raise NotADirectoryError(errno.ENOTDIR, "on the way")
            parent = os.path.join(parent, name) if name else parent
            name = todo.pop(0)
            info = _lstat(os.path.join(parent, name))
            if info is None:
                continue
            if not self.rules.shows(self.who, info):
                raise Hidden(not todo, parent)
            if stat.S_ISLNK(info.st_mode) and (todo or follow):
                links += 1
                if links > 40:
                    raise OSError(errno.ELOOP, "loop")
                if PROTECTED_SYMLINKS and self._is_protected(os.lstat(parent), info):
                    raise Protected
                todo = _parts(os.readlink(os.path.join(parent, name))) + todo
                name, info = "", os.lstat(parent)
        return Place(parent, name, info)

    def _is_protected(self, directory: os.stat_result, link: os.stat_result) -> bool:
        in_tmp = directory.st_mode & (stat.S_ISVTX | stat.S_IWOTH) == stat.S_ISVTX | stat.S_IWOTH
        return in_tmp and link.st_uid not in (self.who.uid, directory.st_uid)


Verdict = tuple[int, frozenset[int]]
"""What the rules demand: an errno, or 0 for what the server's kernel says; and errnos that do as well, if it fails.

An operation that fails for several reasons may name another one through a mount, where the client's kernel looks at
types, sticky bits and names before the server's kernel looks at permissions.
"""


@dataclass(frozen=True)
class Request:
    """One operation; `other` is the second path, or the text of a symbolic link."""

    name: str
    path: str
    other: str = ""
    mode: int = 0
    flags: int = 0
    ids: tuple[int, int] = (-1, -1)
    value: bytes = b""


CREATING = {"mkdir", "mkfifo", "symlink"}
NOT_FOLLOWING = {"lchown", "readlink", "lstat"}


def judge(look: Look, request: Request, *, unmapped: bool = False) -> Verdict:
    """What the rules say about a request; the process that calls this is the caller's on the model tree.

    Args:
        look: the caller.
        request: what it asks for.
        unmapped: the request names an id that has no counterpart on the server.
    """
    name = request.name
    if name in CREATING:
        return _error(look, request.path, follow=False, hidden=errno.EEXIST), frozenset()
    if name == "open" and request.flags & os.O_CREAT:
        exclusive = bool(request.flags & os.O_EXCL)
        follow = not exclusive and not request.flags & os.O_NOFOLLOW
        hidden = errno.EEXIST if exclusive else errno.EACCES
        # Of a symbolic link in a sticky directory the server's kernel says EACCES (fs.protected_*), and FUSE's does not
        # know that the directory is sticky.
        also = frozenset() if exclusive or follow else frozenset({errno.ELOOP})
        return _error(look, request.path, follow=follow, hidden=hidden), also
    if name in ("unlink", "rmdir"):
        return _error(look, request.path, follow=False), _removal_errors(look, request.path, name == "rmdir")
    if name == "link":
        return _link(look, request.path, request.other)
    if name == "rename":
        return _rename(look, request)
    follow = name not in NOT_FOLLOWING and not (name == "open" and request.flags & os.O_NOFOLLOW)
    error = _error(look, request.path, follow=follow)
    if unmapped and not error and _exists(look, request.path, follow=follow):
        # Whether the object takes ACLs at all, and from this caller, the client's kernel may see first.
        return errno.EINVAL, frozenset({errno.EPERM, errno.EACCES, errno.EOPNOTSUPP} if name == "setxattr" else ())
    return error, frozenset()


def _error(look: Look, path: str, *, follow: bool, hidden: int = errno.ENOENT) -> int:
    """ENOENT if the path leads through something hidden, `hidden` if it leads to it, else 0."""
    try:
        look.walk(path, follow=follow)
    except Hidden as exc:
        return hidden if exc.last else errno.ENOENT
    except OSError:
        return 0  # the server's kernel says the same
    return 0


def _lookup_error(look: Look, path: str, *, absent: int = errno.ENOENT) -> int:
    """Why a lookup of the path fails, if it does; `absent` is for an absent or hidden last component."""
    try:
        place = look.walk(path, follow=False)
    except Hidden as exc:
        return absent if exc.last else errno.ENOENT
    except OSError as exc:
        return exc.errno or -1
    return 0 if place.info is not None else absent


def _exists(look: Look, path: str, *, follow: bool) -> bool:
    try:
        return look.walk(path, follow=follow).info is not None
    except OSError:
        return False


def _visible(look: Look, path: str) -> Place | None:
    """What the caller finds at the path, if it is there, visible and may be reached."""
    try:
        place = look.walk(path, follow=False)
    except (Hidden, OSError):
        return None
    return place if place.info is not None else None


def _is_stuck(look: Look, place: Place) -> bool:
    """Does a sticky directory keep the caller from removing this?"""
    directory = os.lstat(place.parent)
    assert place.info is not None
    mine = look.who.uid in (0, directory.st_uid, place.info.st_uid)
    return bool(directory.st_mode & stat.S_ISVTX) and not mine


def _removal_errors(look: Look, path: str, directory: bool) -> frozenset[int]:
    place = _visible(look, path)
    if place is None or place.info is None:
        return frozenset()
    errors = set()
    if _is_stuck(look, place):
        errors.add(errno.EPERM)
    if stat.S_ISDIR(place.info.st_mode) != directory:
        errors.add(errno.ENOTDIR if directory else errno.EISDIR)
    return frozenset(errors)


def _link(look: Look, old: str, new: str) -> Verdict:
    also = {_lookup_error(look, old), _lookup_error(look, new, absent=0)}
    source = _visible(look, old)
    if source is not None and source.info is not None and look.who.uid not in (0, source.info.st_uid):
        also.add(errno.EPERM)  # fs.protected_hardlinks
    if source is not None and source.info is not None and stat.S_ISDIR(source.info.st_mode):
        also.add(errno.EPERM)
    error = _error(look, old, follow=False)
    if not error and source is not None:
        error = _error(look, new, follow=False, hidden=errno.EEXIST)
    return error, frozenset(also - {0})


def _rename(look: Look, request: Request) -> Verdict:
    old, new = request.path, request.other
    no_replace, exchange = bool(request.flags & 1), bool(request.flags & 2)
    also = {_lookup_error(look, old), _lookup_error(look, new, absent=0)}
    source, target = _visible(look, old), _visible(look, new)
    for place in (source, target):
        if place is not None and _is_stuck(look, place):
            also.add(errno.EPERM)
    if source is not None and source.info is not None and stat.S_ISDIR(source.info.st_mode):
        if f"{new}/".startswith(f"{old}/"):
            also.add(errno.EINVAL)
        if target is not None and target.info is not None and not stat.S_ISDIR(target.info.st_mode) and not exchange:
            also.add(errno.ENOTDIR)
    elif target is not None and target.info is not None and stat.S_ISDIR(target.info.st_mode) and not exchange:
        also.add(errno.EISDIR)
    error = _error(look, old, follow=False)
    if not error and source is not None:
        last = errno.EEXIST if no_replace else errno.ENOENT if exchange else errno.EACCES
        error = _error(look, new, follow=False, hidden=last)
    elif not error and _error(look, os.path.dirname(new), follow=True):
        also.add(errno.ENOENT)
    return error, frozenset(also - {0})


def _lstat(path: str) -> os.stat_result | None:
    """Return what is there; None if nothing is."""
    try:
        return os.lstat(path)
    except FileNotFoundError:
        return None


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part not in ("", ".")]


def perform(root: str, request: Request) -> object:  # noqa: C901, PLR0912  (a table: one case for each operation)
    """Carry a request out below `root`; the result is what has to be the same on both trees."""
    path = os.path.join(root, request.path)
    match request.name:
        case "mkdir":
            os.mkdir(path, request.mode)
        case "mkfifo":
            os.mkfifo(path, request.mode)
        case "symlink":
            os.symlink(request.other, path)
        case "link":
            os.link(path, os.path.join(root, request.other), follow_symlinks=False)
        case "unlink":
            os.unlink(path)
        case "rmdir":
            os.rmdir(path)
        case "rename":
            _renameat2(path, os.path.join(root, request.other), request.flags)
        case "chmod":
            os.chmod(path, request.mode)
        case "chown":
            os.chown(path, *request.ids)
        case "lchown":
            os.lchown(path, *request.ids)
        case "truncate":
            os.truncate(path, request.mode)
        case "touch":
            os.utime(path)
        case "utime":
            os.utime(path, (1, 1))
        case "lstat":
            os.lstat(path)
        case "readlink":
            return os.readlink(path)
        case "list":
            os.listdir(path)
        case "access":
            os.stat(path)
            return [os.access(path, mode) for mode in (os.R_OK, os.W_OK, os.X_OK)]
        case "setxattr":
            os.setxattr(path, request.other, request.value)
        case "removexattr":
            os.removexattr(path, request.other)
        case "open":
            return _open(path, request)
        case _:
            raise ValueError(request.name)
    return None


def _open(path: str, request: Request) -> object:
    fd = os.open(path, request.flags | os.O_NONBLOCK, request.mode)
    try:
        if request.flags & os.O_ACCMODE and os.write(fd, request.value) != len(request.value):
            raise ValueError("short write")
        if request.flags & os.O_ACCMODE != os.O_WRONLY and stat.S_ISREG(os.fstat(fd).st_mode):
            return os.pread(fd, 1000, 0)
        return None
    finally:
        os.close(fd)


_libc = ctypes.CDLL(None, use_errno=True)


def _renameat2(old: str, new: str, flags: int) -> None:
    if _libc.renameat2(-100, os.fsencode(old), -100, os.fsencode(new), ctypes.c_uint(flags)):
        raise OSError(ctypes.get_errno(), "renameat2")


Outcome = tuple[int, object]
"""errno (0: it worked) and result."""


def outcome(root: str, request: Request) -> Outcome:
    """As `perform`, with an error as its errno."""
    try:
        return 0, perform(root, request)
    except OSError as exc:
        return exc.errno or -1, None


def keeping_hidden_bits(rules: Rules, root: str, request: Request, also: int = 0) -> Request:
    """What a chmod comes to: bits that are not shown stay, and of these as well, if they are set."""
    if request.name == "chmod":
        with contextlib.suppress(OSError):
            info = os.stat(os.path.join(root, request.path))
            return replace(request, mode=request.mode | rules.hidden_bits(info) | info.st_mode & also)
    return request


def on_model(look: Look, request: Request, *, unmapped: bool) -> tuple[Outcome, frozenset[int]]:
    """What must come of a request, and the errnos that do as well; carried out on the model unless the rules forbid it.

    The process that calls this is the caller's.
    """
    error, also = judge(look, request, unmapped=unmapped)
    if error == errno.EEXIST and look.rules.checked:
        # What is hidden is absent for the client's kernel, which then looks at the directory's permissions first.
        new = request.other if request.name in ("link", "rename") else request.path
        if not os.access(os.path.dirname(os.path.join(look.root, new)), os.W_OK):
            also |= {errno.EACCES}
    if not error:
        request = keeping_hidden_bits(look.rules, look.root, request)
    return ((error, None) if error else outcome(look.root, request)), also


class Seen(NamedTuple):
    """What a caller finds at one path: the attributes that must agree, or the errno."""

    error: int
    mode: int = 0
    uid: int = 0
    gid: int = 0
    size: int = 0
    nlink: int = 0
    target: str = ""
    acl: bytes = b""


class Listed(NamedTuple):
    error: int
    names: frozenset[str] = frozenset()


Entry = tuple[Seen, Listed | None]
Survey = dict[str, Entry]
"""Relative path -> what lstat says, and for directories what a listing says."""


def everything(root: str) -> list[str]:
    """All relative paths below `root`, parents first; for root to call."""
    found = []
    for path, directories, files in os.walk(root):
        found += [os.path.relpath(os.path.join(path, name), root) for name in directories + files]
    return sorted(found)


def acl_of(path: str) -> bytes:
    try:
        return os.getxattr(path, "system.posix_acl_access", follow_symlinks=False)
    except OSError as exc:
        if exc.errno in (errno.ENODATA, errno.EOPNOTSUPP):
            return b""
        raise


def survey(root: str, paths: list[str]) -> Survey:
    """What the process that calls this finds at each path, and listed in "" and each directory."""
    found: Survey = {}
    for path in ["", *paths]:
        full = os.path.join(root, path) if path else root
        try:
            info = os.lstat(full)
        except OSError as exc:
            found[path] = Seen(exc.errno or -1), None
            continue
        is_link, is_directory = stat.S_ISLNK(info.st_mode), stat.S_ISDIR(info.st_mode)
        seen = Seen(
            0, info.st_mode, info.st_uid, info.st_gid, 0 if is_directory else info.st_size, info.st_nlink,
            os.readlink(full) if is_link else "", b"" if is_link else acl_of(full),
        )  # fmt: skip
        found[path] = seen, _listing(full) if is_directory else None
    return found


def _listing(path: str) -> Listed:
    try:
        return Listed(0, frozenset(os.listdir(path)))
    except OSError as exc:
        return Listed(exc.errno or -1)


def expected(look: Look, paths: list[str], infos: dict[str, os.stat_result]) -> Survey:
    """What a mount must show this caller: its own survey of the model without what is hidden, in client ids.

    Args:
        look: the caller, whose process calls this.
        paths: everything in the model tree, parents first.
        infos: lstat of each, by root.
    """
    plain = survey(look.root, paths)
    shown: Survey = {}
    for path in ["", *paths]:
        seen, listed = plain[path]
        parent = os.path.dirname(path)
        info = infos[path] if path else os.lstat(look.root)
        if path and shown[parent][0].error:
            seen, listed = shown[parent][0], None
        elif not seen.error and not look.rules.shows(look.who, info):
            seen, listed = Seen(errno.ENOENT), None
        elif not seen.error:
            one_link = bool(look.rules.cloaks) and stat.S_ISDIR(seen.mode)
            seen = seen._replace(
                mode=seen.mode & ~look.rules.hidden_bits(info),
                uid=look.rules.client("uid", seen.uid),
                gid=look.rules.client("gid", seen.gid),
                nlink=1 if one_link else seen.nlink,
            )
        if listed is not None and not listed.error:
            listed = Listed(
                0,
                frozenset(
                    name
                    for name in listed.names
                    if look.rules.shows(look.who, infos[os.path.join(path, name) if path else name])
                ),
            )
        shown[path] = seen, listed
    return shown
