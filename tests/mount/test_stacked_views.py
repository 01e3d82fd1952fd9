"""What is seen and done through two mounts of cloakfs, one over the other, is what both of them allow.

Whoever looks through the upper one must see what its identity there, a real user, sees in the lower one, as far as the
upper one's own rules go; and what is changed must be changed on the real tree as that user would have changed it.
"""

import contextlib
import errno
import os
import random
import stat
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from cloakfs.config.parse import parse_options
from cloakfs.fuse.attach import split_mount_options
from cloakfs.identity import Caller
from cloakfs.plugin.loader import load_policy
from cloakfs.policy import Attrs
from cloakfs.tree.views import ViewIdentity, resolve
from cloakfs.view import View
from tests.agents import User, names, read, write

from .conftest import mounted
from .fuseconnections import nobody_waits_for_ever

UIDS = (0, 2000, 2001, 2002, 3000, 65534)
CALLERS = (
    Caller(0, 0, frozenset({0})),
    Caller(2000, 2000, frozenset({2000, 2001})),
    Caller(2001, 2001, frozenset({2001})),
    Caller(2002, 2000, frozenset({2000, 2002})),
    Caller(3000, 3000, frozenset({3000})),
)
MODES = (0o777, 0o755, 0o750, 0o700, 0o711, 0o070, 0o007, 0o444, 0o640, 0o600, 0o4755, 0o1777, 0o2775)

SWAPPED = (
    "range_map=uid 0 map 0 uid 2000 map 2001 uid 2001 map 2000 uid 2002 map 2002 gid 0 map 0 gid 2000 2009 map 2000"
)

PLUG_IN = """
class HidesEverySecond:
    def visible(self, caller, attrs):
        return len(attrs.name) % 2 == 1 or caller.uid == attrs.uid
"""

BELOW = (
    "cloak_list=uid +007 0 70000",
    "no_root_squash,cloak_list=uid +077 0 2000 gid -010 2000 2009",
    f"{SWAPPED},cloak_list=uid +055 2000 2009",
    "all_squash,anonuid=2001,anongid=2001,cloak_list=uid +004 0 -1",
    "views=2001:2001:2000,view_access=2000 2002,cloak_list=uid +007 0 -1",
    "policy={base}/plug.py:HidesEverySecond",
    "no_root_squash,cloak_list=uid +007 2000 2001,default_permissions",
)
ABOVE = (
    "cloak_list=uid +005 2000 2001",
    SWAPPED,
    f"{SWAPPED},cloak_list=gid +050 2000 2009",
    "no_root_squash",
    "views=2002:2002:2000",
    "policy={base}/plug.py:HidesEverySecond",
    "no_root_squash",
)
PAIRS = list(zip(BELOW, ABOVE, strict=True))


@pytest.fixture(autouse=True)
def _released(base: str) -> Iterator[None]:
    with nobody_waits_for_ever(base, 250.0):
        yield


class Side(NamedTuple):
    """One of the mounts: its options, and what it makes of its callers and of attributes."""

    options: str
    view: View

    def served_as(self, caller: Caller) -> Caller | None:
        """The identity behind it; None for whom it does not let in."""
        return self.view.identify(caller) if self.view.admits(caller.uid) else None


def side(base: str, text: str) -> Side:
    text = text.format(base=base)
    words, rest = split_mount_options(text)
    options = parse_options(rest)[0]
    policy = load_policy(options.policy, options)
    items = [resolve(item) for item in options.views]
    fixed = items[0].caller if items and isinstance(items[0], ViewIdentity) else None
    entrants = frozenset(options.view_access)
    return Side(f"rw,suid,{text}", View(policy, fixed, entrants, checked=words.default_permissions))


def attributes(path: str) -> Attrs:
    info = os.lstat(path)
    return Attrs(os.path.basename(path), info.st_mode, info.st_uid, info.st_gid, info.st_size, info.st_nlink)


def shown(side: Side, attrs: Attrs) -> Attrs:
    mode, uid, gid, _ = side.view.show(attrs) or pytest.fail("not shown")
    return replace(attrs, mode=mode, uid=uid, gid=gid)


def is_directory(path: str) -> bool:
    return stat.S_ISDIR(os.lstat(path).st_mode)


def plant(top: str, chance: random.Random, *, open_ones: float = 0.0) -> list[str]:
    """A tree of all kinds of files, owned by all kinds of users; the paths in it. A share is open to everybody."""
    os.mkdir(top)
    os.chmod(top, 0o777)
    paths = [""]
    for number in range(11):
        above = chance.choice([path for path in paths if is_directory(os.path.join(top, path))])
        path = os.path.join(above, chance.choice("abc") * chance.randint(1, 2) + str(number))
        at = os.path.join(top, path)
        if number < 4 or chance.random() < 0.4:
            os.mkdir(at)
        elif chance.random() < 0.2:
            os.symlink(f"nowhere{number}", at)
        else:
            Path(at).write_text(path)
        os.chown(at, chance.choice(UIDS), chance.choice(UIDS), follow_symlinks=False)
        if not os.path.islink(at):
            os.chmod(at, 0o777 if chance.random() < open_ones else chance.choice(MODES))
        paths.append(path)
    return paths


@contextlib.contextmanager
def stacked(base: str, tree: str, below: Side, above: Side) -> Iterator[tuple[str, str]]:
    """The mount points of two mounts, one over the other."""
    lower, upper = f"{tree}-lower", f"{tree}-upper"
    os.mkdir(lower)
    os.mkdir(upper)
    with mounted(tree, lower, "-o", below.options), mounted(lower, upper, "-o", above.options):
        yield lower, upper


def look(top: str, paths: list[str]) -> dict[str, Any]:
    """What one user is told of each path: attributes, and what is in it."""
    return {path: _look(os.path.join(top, path)) for path in paths}


def _look(path: str) -> Any:
    try:
        info = os.lstat(path)
    except OSError as exc:
        return exc.errno
    try:
        look_into = names if stat.S_ISDIR(info.st_mode) else os.readlink if stat.S_ISLNK(info.st_mode) else read
        inside: Any = look_into(path)
    except OSError as exc:
        inside = exc.errno
    # Of directories that may hide something, the number of links is not told.
    links = 1 if stat.S_ISDIR(info.st_mode) else info.st_nlink
    size = 0 if stat.S_ISDIR(info.st_mode) else info.st_size
    access = tuple(os.access(path, mode) for mode in (os.R_OK, os.W_OK, os.X_OK))
    return [info.st_mode, info.st_uid, info.st_gid, links, size, access, inside]


def composed(above: Side, who: Caller, told: dict[str, Any], as_shown: dict[str, Attrs]) -> dict[str, Any]:
    """What the upper mount is to tell if the lower one tells `told` to `who`."""

    def ruled_out(path: str) -> bool:
        return path != "" and not above.view.visible(who, as_shown[path])

    def answer(path: str) -> Any:
        parts = path.split("/") if path else []
        for count in range(len(parts)):
            at = "/".join(parts[: count + 1])
            if isinstance(told[at], int):
                return told[at]
            if ruled_out(at):
                return errno.ENOENT
        if isinstance(told[path], int):
            return told[path]
        *_, links, size, access, inside = told[path]
        seen = shown(above, as_shown[path])
        if isinstance(inside, list):
            inside = [name for name in inside if not ruled_out(os.path.join(path, name))]
        return [seen.mode, seen.uid, seen.gid, links, size, access, inside]

    return {path: answer(path) for path in told}


@pytest.mark.parametrize(("below", "above"), PAIRS, ids=map(str, range(len(PAIRS))))
def test_what_both_show_is_seen(base: str, user: Callable[..., User], below: str, above: str) -> None:
    Path(base, "plug.py").write_text(PLUG_IN)
    lower_side, upper_side = side(base, below), side(base, above)
    tree = os.path.join(base, "real")
    paths = plant(tree, random.Random(below + above))
    as_shown = {path: shown(lower_side, attributes(os.path.join(tree, path))) for path in paths}
    with stacked(base, tree, lower_side, upper_side) as (lower, upper):
        for caller in CALLERS:
            who = upper_side.served_as(caller)
            seen = user(*caller).do(look, upper, paths)
            if who is None:
                assert {path: what for path, what in seen.items() if not isinstance(what, int)} == {}
                continue
            told = user(*who).do(look, lower, paths)
            wanted = composed(upper_side, who, told, as_shown)
            assert {path: what for path, what in seen.items() if what != wanted[path]} == {}, {
                path: what for path, what in wanted.items() if what != seen[path]
            }


def everything(top: str) -> dict[str, tuple[Any, ...]]:
    """The whole of a real tree."""
    found = {}
    for above, directories, files in os.walk(top):
        for name in directories + files:
            path = os.path.join(above, name)
            info = os.lstat(path)
            content = Path(path).read_bytes() if stat.S_ISREG(info.st_mode) else b""
            found[os.path.relpath(path, top)] = info.st_mode, info.st_uid, info.st_gid, info.st_nlink, content
    return found


NEW = ("new", "newer", "newest")


class Step(NamedTuple):
    """Something that a caller does: what, with what in it, and what else it takes."""

    what: str
    path: str
    other: str
    mode: int
    uid: int
    gid: int


STEPS = (
    *("make", "make", "mkdir", "mkdir", "symlink", "link"),
    *("write", "append", "truncate", "chmod", "chown"),
    *("rename", "rename", "unlink", "rmdir"),
)


def a_step(chance: random.Random, paths: list[str]) -> Step:
    what = chance.choice(STEPS)
    somewhere = [os.path.join(os.path.dirname(chance.choice(paths)), chance.choice(NEW)) for _ in range(2)]
    new = what in ("make", "mkdir", "symlink")
    path = somewhere[0] if new and chance.random() < 0.8 else chance.choice(paths[1:])
    other = somewhere[1] if chance.random() < 0.6 else chance.choice(paths[1:])
    return Step(what, path, other, chance.choice(MODES) & 0o777, chance.choice(UIDS), chance.choice(UIDS))


def act(top: str, step: Step) -> int:  # noqa: C901, PLR0912  (a table: one case for each step)
    """The errno of doing it."""
    path, other = os.path.join(top, step.path), os.path.join(top, step.other)
    try:
        match step.what:
            case "make":
                write(path, b"new", os.O_CREAT | os.O_EXCL, step.mode)
            case "write":
                write(path, b"written", os.O_CREAT | os.O_TRUNC, step.mode)
            case "append":
                write(path, b"more", os.O_APPEND)
            case "mkdir":
                os.mkdir(path, step.mode)
            case "symlink":
                os.symlink("nowhere", path)
            case "chmod":
                os.chmod(path, step.mode)
            case "chown":
                os.chown(path, step.uid, step.gid)
            case "rename":
                os.rename(path, other)
            case "link":
                os.link(path, other)
            case "unlink":
                os.unlink(path)
            case "rmdir":
                os.rmdir(path)
            case "truncate":
                os.truncate(path, 1)
    except OSError as exc:
        return exc.errno or -1
    return 0


def as_below(above: Side, step: Step) -> Step | None:
    """The same, as the identity behind the caller has to say it; None if that has no such ids."""
    if step.what != "chown":
        return step
    uid, gid = above.view.server_id("uid", step.uid), above.view.server_id("gid", step.gid)
    return None if uid is None or gid is None else step._replace(uid=uid, gid=gid)


@pytest.mark.parametrize(("below", "above"), PAIRS, ids=map(str, range(len(PAIRS))))
def test_what_is_done_is_done_as_the_identity_behind(
    base: str, user: Callable[..., User], below: str, above: str
) -> None:
    Path(base, "plug.py").write_text(PLUG_IN)
    lower_side, upper_side = side(base, below), side(base, above)
    chance = random.Random(below + above)
    tree, twin, alone = (os.path.join(base, name) for name in ("real", "twin", "alone"))
    paths = plant(tree, chance, open_ones=0.7)
    subprocess.run(["cp", "-a", tree, twin], check=True)
    assert everything(tree) == everything(twin)
    os.mkdir(alone)
    paths += [os.path.join(path, name) for path in paths if is_directory(os.path.join(tree, path)) for name in NEW]
    done = 0
    with (
        stacked(base, tree, lower_side, upper_side) as (_, upper),
        mounted(twin, alone, "-o", lower_side.options),
    ):
        behind = [(caller, upper_side.served_as(caller)) for caller in CALLERS]
        pairs = [(user(*caller), user(*who)) for caller, who in behind if who is not None]
        for _ in range(50):
            caller, who = chance.choice(pairs)
            step = a_step(chance, paths)
            before = everything(tree)
            failure = caller.do(act, upper, step)
            below_step = as_below(upper_side, step)
            if failure and (upper_side.view.policy_hides or below_step is None):
                assert everything(tree) == before, step  # nothing was harmed
                continue
            assert below_step is not None
            expected = who.do(act, alone, below_step)
            # Where the kernel checks, too, it finds another reason first.
            assert expected == failure or (expected and failure and lower_side.view.checked), (step, who.uid)
            assert everything(tree) == everything(twin), step
            if not failure:
                done += 1
                if step.what in ("make", "mkdir", "symlink"):
                    caller.do(os.lstat, os.path.join(upper, step.path))  # its maker finds it again
    assert done
