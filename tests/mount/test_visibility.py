"""An object deep in the tree costs no more than one at the top, and any change above it is seen at once."""

import contextlib
import errno
import itertools
import os
import random
import stat
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cloakfs import linux
from cloakfs.config.parse import parse_options
from cloakfs.identity import Caller
from cloakfs.kernelcache.cache import KernelCache
from cloakfs.kernelcache.cachepolicy import MountTraits
from cloakfs.kernelcache.watch import Watch
from cloakfs.policy import Attrs, Policy
from cloakfs.tree import calls
from cloakfs.tree.actor import DAEMON, Actor, actor
from cloakfs.tree.index import Index
from cloakfs.tree.locate import is_settled
from cloakfs.tree.nodes import Nodes
from cloakfs.tree.objects import Object, as_directory
from cloakfs.tree.views import Views
from cloakfs.tree.visibility import (
    AT_ONCE,
    TooManyAncestors,
    Visibility,
    VisibilityResult,
    is_entry_visible,
    may_without_groups,
)
from cloakfs.view import View
from tests.agents import User
from tests.mount.conftest import Mount
from tests.mount.loopfs import filesystem, require
from tests.waiting import wait_until

KINDS = ["ext4", "xfs", "btrfs", "tmpfs"]
CLOAK = "uid +007 1 9999"
OWNER, OTHER, GROUP = 4002, 4001, 7001


POLICY = Policy(parse_options(f"cloak_list={CLOAK}")[0])


def sees(path: str, uid: int, groups: frozenset[int]) -> bool:
    """May this caller see what is there, on the real tree?"""
    info = os.stat(path)
    return POLICY.cloak.visible(info.st_mode, info.st_uid, info.st_gid, uid, groups)


# -- whatever is changed is seen at once -----------------------------------------------------------


class Tree:
    """Directories in each other, and one aside that its owner alone sees, to move some of them to."""

    def __init__(self, top: str, depth: int) -> None:
        self.top = top
        self.paths = [f"{top}/0"]
        for level in range(1, depth):
            self.paths.append(f"{self.paths[-1]}/{level}")
        self.aside = f"{top}/aside"
        for path in (*self.paths, self.aside):
            os.mkdir(path)
            os.chmod(path, 0o755)
            os.chown(path, OWNER, OWNER)
        os.chmod(self.aside, 0o700)
        self.moved: int | None = None

    def change(self, choice: random.Random, call: Callable[..., object], top: str) -> None:
        """Change one of the directories, reached through `top`, by `call`(function, arguments)."""
        level = choice.randrange(len(self.paths))
        path = self.paths[level].replace(self.top, top, 1)
        match choice.randrange(5):
            case 0:
                call(os.chmod, path, choice.choice((0o755, 0o700, 0o750)))
            case 1 | 2 if top == self.top:
                call(os.chown, path, choice.choice((OWNER, OTHER)), choice.choice((OWNER, GROUP)))
            case 3 if self.moved is None:
                self.move(call, level, self.paths[level], f"{self.aside}/{level}", top)
                self.moved = level
            case 4 if self.moved is not None:
                level, self.moved = self.moved, None
                old = self.paths[level]
                back = f"{self.paths[level - 1]}/{level}" if level else f"{self.top}/0"
                self.move(call, level, old, back, top)
            case _:
                call(os.chmod, path, 0o755)

    def move(self, call: Callable[..., object], level: int, old: str, new: str, top: str) -> None:
        call(os.rename, old.replace(self.top, top, 1), new.replace(self.top, top, 1))
        self.paths[level:] = [path.replace(old, new, 1) for path in self.paths[level:]]

    def is_seen(self, uid: int, groups: frozenset[int]) -> bool:
        above = [self.aside] if self.moved is not None else []
        return all(sees(path, uid, groups) for path in (*above, *self.paths))


def open_file(directory: int) -> None:
    """The kernel always sends a request for this, whatever it caches."""
    os.close(os.open("file", os.O_RDONLY, dir_fd=directory))


@pytest.mark.parametrize("kind", KINDS)
def test_no_answer_is_outdated(kind: str, base: str, user: Callable[..., User], mount: Callable[..., Mount]) -> None:
    require(kind)
    with filesystem(kind, base) as top:
        os.chmod(top, 0o755)
        os.mkdir(f"{top}/private", 0o700)
        os.chown(f"{top}/private", OTHER, OTHER)
        tree = Tree(f"{top}/private", 8)
        Path(tree.paths[-1], "file").touch(0o600)
        os.chown(f"{tree.paths[-1]}/file", OTHER, OTHER)
        m = mount("-o", f"no_root_squash,cloak_list={CLOAK}", source=top)
        root, looker = user(0), user(OTHER, OTHER, [GROUP])
        fd = looker.do(os.open, m.at("private", *map(str, range(8))), os.O_PATH)
        choice = random.Random(kind)
        answers = []
        for _ in range(400):
            through = choice.random() < 0.3 and tree.moved is None
            if through:
                with contextlib.suppress(FileNotFoundError):  # root does not see all, either
                    tree.change(choice, root.do, m.at("private"))
            else:
                tree.change(choice, lambda call, *arguments: call(*arguments), tree.top)
            found = looker.error(open_file, fd)
            seen = tree.is_seen(OTHER, frozenset({OTHER, GROUP}))
            assert found == (0 if seen else errno.ESTALE), (seen, tree.paths)
            answers.append(seen)
            if choice.random() < 0.1:  # from where all is seen
                for path in reversed(tree.paths):
                    os.chmod(path, 0o755)
        assert 100 < sum(answers) < 300
        looker.do(os.close, fd)


# -- what it costs ---------------------------------------------------------------------------------


@pytest.fixture
def tree(base: str) -> Iterator[str]:
    """The root of a tree on a file system of its own: all changes on that are reported, whoever makes them."""
    with filesystem("tmpfs", base) as top:
        path = os.path.join(top, "real")
        os.mkdir(path)
        yield path


@pytest.fixture
def make_visibility(nodes: Nodes, index: Index) -> Iterator[Callable[..., Visibility]]:
    """Makes checkers to which what this process does is reported, and others."""
    with contextlib.ExitStack() as stack:

        def make(*words: int) -> Visibility:
            made = Visibility(nodes, *words)
            cache = KernelCache(nodes, Views(POLICY, (), frozenset(), index), made.access_paths, MountTraits())
            cache.watch(stack.enter_context(contextlib.closing(Watch())))
            return made

        yield make


@pytest.fixture
def visibility(make_visibility: Callable[..., Visibility]) -> Visibility:
    return make_visibility()


def go_down(visibility: Visibility, nodes: Nodes, depth: int, *, reported: bool = True) -> list[Object]:
    """Make so many directories in each other, for their owner alone, look each up, and process the reports of that."""
    way = [nodes.root]
    for level in range(depth):
        name, above = b"%d" % level, nodes.descriptors.fd(way[-1])
        os.mkdir(name, 0o700, dir_fd=above)
        os.chown(name, OWNER, OWNER, dir_fd=above)
        obj = nodes.registry.resolve(os.open(name, os.O_PATH, dir_fd=above), way[-1], name)
        obj.lookups += 1
        way.append(obj)
    while reported and not visibility.access_paths.is_up_to_date():
        pass
    return way


class Checks:
    """Counts the system calls on the real tree: for stats, for places of directories, and for names."""

    def __init__(self, visibility: Visibility, nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
        self._visibility = visibility
        self._nodes = nodes
        self._view = View(POLICY)
        self._counts = Counter[str]()
        for where, name in (
            (os, "stat"), (os, "fstat"), (linux, "fstat"), (calls, "fstat"), (nodes.root.filesystem, "stat"),
            (calls, "statx"), (calls, "path_of"),
        ):  # fmt: skip
            kind = {"statx": "places", "path_of": "names"}.get(name, "stats")
            monkeypatch.setattr(where, name, self._counted(kind, getattr(where, name)))

    def _counted(self, kind: str, call: Callable[..., object]) -> Callable[..., object]:
        def counted(*args: Any, **kwargs: Any) -> object:
            self._counts[kind] += 1
            return call(*args, **kwargs)

        return counted

    def of(self, uid: int, obj: Object, *, seen: bool) -> int:
        return self.all_of(self._view, uid, obj, seen=seen)["stats"]

    def all_of(self, view: View, uid: int, obj: Object, *, seen: bool) -> Counter[str]:
        info = os.fstat(self._nodes.descriptors.fd(obj))
        self._counts.clear()
        assert self._visibility.is_visible(view, actor(Caller(uid, uid, frozenset({uid}))), obj, info) is seen
        return self._counts.copy()


def test_checks_do_not_grow_with_depth(visibility: Visibility, nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    way = go_down(visibility, nodes, 300)
    checks = Checks(visibility, nodes, monkeypatch)
    assert checks.of(OWNER, way[-1], seen=True) >= 300
    near = checks.of(OWNER, way[10], seen=True)
    assert checks.of(OWNER, way[-1], seen=True) <= near <= 4
    # What one has found out, others need not.
    assert checks.of(OTHER, way[-1], seen=False) <= 4
    for uid in range(20_000, 22_000):
        assert checks.of(uid, way[-1], seen=False) <= 4
    assert checks.of(OWNER, way[-1], seen=True) <= 4


def test_a_change_costs_one_check(visibility: Visibility, nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    way = go_down(visibility, nodes, 300)
    checks = Checks(visibility, nodes, monkeypatch)
    checks.of(OWNER, way[-1], seen=True)
    for level in (1, 5, 299):
        path = f"/proc/self/fd/{nodes.descriptors.fd(way[level])}"
        os.chown(path, OTHER, OTHER)
        assert checks.of(OWNER, way[-1], seen=False) <= 6
        os.chown(path, OWNER, OWNER)
        assert checks.of(OWNER, way[-1], seen=True) <= 6


def test_a_directory_that_keeps_changing_is_asked_for_its_acl_once(
    visibility: Visibility, nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While no change of the directory itself is reported, it has none, whatever its ctime says."""
    way = go_down(visibility, nodes, 2)
    directory, who = way[-1], actor(Caller(OTHER, GROUP, frozenset({GROUP})))
    path = f"/proc/self/fd/{nodes.descriptors.fd(directory)}"
    os.chown(way_to := f"/proc/self/fd/{nodes.descriptors.fd(way[1])}", OWNER, GROUP)
    os.chmod(way_to, 0o755)
    os.chown(path, OWNER, GROUP)
    os.chmod(path, 0o775)
    peeks: list[str] = []
    peek = calls.peek_xattr

    def counted(who: linux.Credentials, fd: int, name: str) -> bytes:
        peeks.append(name)
        return peek(who, fd, name)

    monkeypatch.setattr(calls, "peek_xattr", counted)

    def may_search() -> bool:
        os.close(os.open(f"{path}/new", os.O_CREAT))
        os.unlink(f"{path}/new")
        info = os.fstat(nodes.descriptors.fd(directory))
        result = visibility.check(View(POLICY), who, directory, info)
        assert result is not VisibilityResult.HIDDEN
        has_acl = False if result is VisibilityResult.VISIBLE_WITHOUT_ACL else None
        return may_without_groups(who, os.X_OK, directory, nodes.descriptors.fd(directory), info, has_acl=has_acl)

    assert [may_search() for _ in range(10)] == [True] * 10
    assert len(peeks) == 1
    subprocess.run(["setfacl", "-m", f"u:{OTHER}:---", path], check=True, pass_fds=[nodes.descriptors.fd(directory)])
    assert not may_search()
    subprocess.run(["setfacl", "-b", path], check=True, pass_fds=[nodes.descriptors.fd(directory)])
    assert [may_search() for _ in range(10)] == [True] * 10
    assert len(peeks) == 3


def test_what_is_lost_is_checked_again(visibility: Visibility, nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    way = go_down(visibility, nodes, 20)
    checks = Checks(visibility, nodes, monkeypatch)
    checks.of(OWNER, way[-1], seen=True)
    queue = int(Path("/proc/sys/fs/fanotify/max_queued_events").read_text())
    os.chown(f"/proc/self/fd/{nodes.descriptors.fd(way[3])}", OTHER, OTHER)
    for number in range(queue):
        Path(f"/proc/self/fd/{nodes.descriptors.fd(nodes.root)}/{number}").touch()
    os.chown(f"/proc/self/fd/{nodes.descriptors.fd(way[3])}", OWNER, OWNER)
    os.chown(f"/proc/self/fd/{nodes.descriptors.fd(way[4])}", OTHER, OTHER)  # this is not reported
    checks.of(OWNER, way[-1], seen=False)  # while there are more events to process
    while not visibility.access_paths.is_up_to_date():
        pass
    checks.of(OWNER, way[-1], seen=False)
    assert checks.of(OWNER, way[-1], seen=False) < 20
    os.chown(f"/proc/self/fd/{nodes.descriptors.fd(way[4])}", OWNER, OWNER)
    assert checks.of(OWNER, way[-1], seen=True)


def test_a_directory_that_stays_as_it_is_costs_one_check(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where changes are not reported, its ctime says whether it still is where it was, and as a cloak list has to know.

    After a change, a policy that goes by names has to know the present one, and a cloak list only the place.
    """
    visibility = Visibility(nodes)
    way = go_down(visibility, nodes, 20, reported=False)
    wait_until(lambda: all(is_settled(os.fstat(nodes.descriptors.fd(obj))) for obj in way))
    checks = Checks(visibility, nodes, monkeypatch)
    assert checks.all_of(View(POLICY), OWNER, way[-1], seen=True) == {"stats": 20, "places": 20}
    by_name = checks.all_of(View(ByName(POLICY.options)), OWNER, way[-1], seen=True)
    assert by_name["names"] == 20
    for view in (View(POLICY), View(ByName(POLICY.options))):
        assert checks.all_of(view, OWNER, way[-1], seen=True) == {"stats": 20}
    for obj in way[1:]:
        os.chmod(f"/proc/self/fd/{nodes.descriptors.fd(obj)}", 0o710)
    assert checks.all_of(View(POLICY), OWNER, way[-1], seen=True) == {"stats": 20, "places": 20}


def test_no_tree_is_too_deep_for_a_policy_that_goes_by_names(nodes: Nodes) -> None:
    visibility, depth = Visibility(nodes), 600
    assert depth * 2 > sys.getrecursionlimit()
    *_, deep = go_down(visibility, nodes, depth, reported=False)
    view, info = View(ByName(POLICY.options)), os.fstat(nodes.descriptors.fd(deep))
    assert visibility.is_visible(view, actor(Caller(OWNER, OWNER, frozenset({OWNER}))), deep, info)


@pytest.mark.parametrize("hidden", [None, 1, 150, 299, 300])
@pytest.mark.parametrize("is_told", [True, False])
def test_a_long_way_takes_many_short_steps(
    is_told: bool,
    hidden: int | None,
    make_visibility: Callable[..., Visibility],
    nodes: Nodes,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    visibility = make_visibility(AT_ONCE)
    way = go_down(visibility, nodes, 300)
    if not is_told:
        visibility.access_paths.is_up_to_date = lambda: False
    if hidden is not None:
        os.chown(f"/proc/self/fd/{nodes.descriptors.fd(way[hidden])}", OTHER, OTHER)
    checks: list[int] = []
    stat_of = calls.fstat

    def counted_stat(fd: int) -> os.stat_result:
        checks.append(fd)
        return stat_of(fd)

    monkeypatch.setattr(calls, "fstat", counted_stat)
    monkeypatch.setattr(nodes.root.filesystem, "stat", calls.fstat)
    visible, most = visibility.is_visible, 0

    def counted(*args: Any) -> bool:
        nonlocal most
        checks.clear()
        try:
            return visible(*args)
        finally:
            most = max(most, len(checks))

    monkeypatch.setattr(visibility, "is_visible", counted)
    who = Caller(OWNER, OWNER, frozenset({OWNER}))
    assert in_steps(visibility, nodes, View(POLICY), who, way[-1]) is (hidden is None)
    assert most <= 2 * AT_ONCE + 8


def test_what_changes_elsewhere_costs_nothing(
    visibility: Visibility, nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    way = go_down(visibility, nodes, 300)
    os.mkdir("aside", dir_fd=nodes.descriptors.fd(nodes.root))
    aside = nodes.registry.resolve(
        os.open("aside", os.O_PATH, dir_fd=nodes.descriptors.fd(nodes.root)), nodes.root, b"aside"
    )
    assert visibility.access_paths.to(POLICY.cloak, way[-1])
    assert visibility.access_paths.to(POLICY.cloak, as_directory(aside))
    monkeypatch.setattr(visibility.access_paths, "_find", lambda *_: pytest.fail("put together again"))
    for mode in (0o700, 0o755) * 10:
        os.chmod("aside", mode, dir_fd=nodes.descriptors.fd(nodes.root))
        assert visibility.access_paths.to(POLICY.cloak, way[-1])
    # So does what changes below.
    os.chmod(f"/proc/self/fd/{nodes.descriptors.fd(way[-1])}", 0o755)
    assert visibility.access_paths.to(POLICY.cloak, way[-2])
    os.chmod(f"/proc/self/fd/{nodes.descriptors.fd(way[5])}", 0o755)
    with pytest.raises(pytest.fail.Exception):
        visibility.access_paths.to(POLICY.cloak, way[-2])


def test_a_path_that_cannot_be_known_is_tried_once(visibility: Visibility, nodes: Nodes) -> None:
    *_, deep = go_down(visibility, nodes, 20)
    queried: list[Object] = []

    def is_up_to_date() -> bool:
        queried.append(deep)
        return False

    visibility.access_paths.is_up_to_date = is_up_to_date
    assert visibility.is_visible(
        View(POLICY), actor(Caller(OWNER, OWNER, frozenset())), deep, os.fstat(nodes.descriptors.fd(deep))
    )
    assert len(queried) == 1


def test_what_the_mount_below_shows_it_shows_with_all_above(
    tree: str, nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    visibility = Visibility(nodes)
    *_, deep = go_down(visibility, nodes, 20, reported=False)
    number = os.fstat(nodes.descriptors.fd(deep)).st_ino
    queried: list[int] = []

    def is_visible_to(who: Actor, fd: int, info: os.stat_result) -> bool:
        queried.append(info.st_ino)
        return True

    lower: Any = Lower(tree)
    lower.is_visible_to = is_visible_to
    checks = Checks(visibility, nodes, monkeypatch)
    for policy in (POLICY, ByName(POLICY.options)):
        checks.all_of(View(policy, lower=lower), OWNER, deep, seen=True)
        assert queried == [number]
        queried.clear()
    assert not checks.all_of(View(Policy(), lower=lower), OWNER, deep, seen=True)
    assert queried == [number]


class Promising(Policy):
    """A policy that promises to hide nothing, so that it need not be called."""

    def __init__(self) -> None:
        super().__init__()
        self.hides = False

    def visible(self, caller: Caller, attrs: Attrs) -> bool:
        raise AssertionError


def test_groups_are_not_looked_up_where_they_do_not_matter(tree: str, nodes: Nodes) -> None:
    def find() -> Caller:
        raise AssertionError

    lower: Any = Lower(tree)
    lower.is_visible_to = lambda *_: True
    visibility = Visibility(nodes)
    *_, deep = go_down(visibility, nodes, 3, reported=False)
    fd = nodes.descriptors.fd(deep)
    info = os.fstat(fd)
    for policy in (POLICY, Policy(), Promising()):
        for view in (View(policy), View(policy, lower=lower)):
            who = Actor(OWNER, OWNER, find)
            assert is_entry_visible(view, who, deep.name, info, fd)
            assert visibility.is_visible(view, who, deep, info)


# -- what it answers -------------------------------------------------------------------------------

MASKS = Policy(parse_options("cloak_list=uid +007 1 4001 gid -020 7001 uid +075 4002 9999")[0])
CALLERS = [
    Caller(uid, gid, frozenset({gid, *groups}))
    for uid, gid, groups in ((OWNER, OWNER, ()), (OTHER, OTHER, ()), (OTHER + 1000, OTHER, (GROUP,)), (9000, GROUP, ()))
]


class ByName(Policy):
    """A policy that has to be called for every name, since it hides some."""

    def visible(self, caller: Caller, attrs: Attrs) -> bool:
        return not attrs.name.startswith("hidden") and super().visible(caller, attrs)


class ByAccess(ByName):
    """A policy that also checks access with the kernel, for a member of the group who owns nothing."""

    def visible(self, caller: Caller, attrs: Attrs) -> bool:
        member = Caller(9999, attrs.gid, frozenset({attrs.gid}))
        assert attrs.accessible(member, os.R_OK) is bool(attrs.mode & stat.S_IRGRP)
        return super().visible(caller, attrs)


class Lower:
    """What the daemon of a cloakfs lower mount says: it has all directories, and some files."""

    policy = Policy(parse_options("cloak_list=gid -055 7001 uid +005 0")[0])

    def __init__(self, top: str) -> None:
        self.path = self._top = top
        self._seen: dict[int, set[int]] = {}

    def contains(self, info: os.stat_result) -> bool:
        return stat.S_ISDIR(info.st_mode) or info.st_ino // 3 % 2 > 0  # (tmpfs counts, and each third is a directory)

    def is_visible_to(self, who: Actor, fd: int, info: os.stat_result) -> bool:
        assert os.fstat(fd).st_ino == info.st_ino
        if who.uid not in self._seen:
            self._seen[who.uid] = seen_by_a_walk(self._top, who.caller, View(self.policy))
        return info.st_ino in self._seen[who.uid]

    def changed(self) -> None:
        self._seen.clear()


def is_seen_there(entry: os.DirEntry[str], who: Caller, policy: Policy) -> bool:
    """May this caller see it, in a directory that it sees, as far as the policy goes?"""
    info = os.stat(entry.path)
    is_hidden = isinstance(policy, ByName) and entry.name.startswith("hidden")
    return not is_hidden and policy.cloak.visible(info.st_mode, info.st_uid, info.st_gid, who.uid, who.groups)


def seen_by_a_walk(top: str, who: Caller, view: View) -> set[int]:
    """The inodes that this caller may see by one of their names at least: top, and what is below."""
    seen = {os.stat(top).st_ino}
    for entry in os.scandir(top):
        is_below = view.lower is not None and view.lower.contains(os.stat(entry.path))
        if is_seen_there(entry, who, view.policy) and (not is_below or is_seen_there(entry, who, Lower.policy)):
            seen |= seen_by_a_walk(entry.path, who, view) if entry.is_dir() else {entry.inode()}
    return seen


class Changing:
    """A tree that changes, whose objects are known by all their names."""

    def __init__(self, top: str, nodes: Nodes) -> None:
        self.top = top
        self.nodes = nodes
        self.known: dict[int, Object] = {os.stat(top).st_ino: nodes.root}
        self._choice = random.Random(1)
        for directory in ("a", "a/b", "a/b/hidden", "a/c", "d", "d/e", "d/e/f", "d/e/f/g"):
            os.mkdir(f"{top}/{directory}")
            self._look_up(f"{top}/{directory}")
            for name in ("file", "hidden-file"):
                path = f"{top}/{directory}/{name}"
                Path(path).touch()
                self._look_up(path)

    def _look_up(self, path: str) -> None:
        above, name = os.path.split(path)
        parent = self.known[os.stat(above).st_ino]
        obj = self.nodes.registry.resolve(os.open(path, os.O_PATH), parent, os.fsencode(name))
        obj.lookups += 1
        self.known[os.stat(path).st_ino] = obj

    def change(self, number: int) -> None:
        choice = self._choice
        walk = list(os.walk(self.top))
        directories = [above for above, _, _ in walk]
        files = [f"{above}/{name}" for above, _, names in walk for name in names]
        file = choice.choice(files)
        path = choice.choice((choice.choice(directories[1:]), file))
        above = choice.choice((choice.choice(directories), os.path.dirname(path)))
        to = f"{above}/{choice.choice(('', 'hidden'))}{number}"
        match choice.randrange(6):
            case 0 | 1:
                os.chmod(path, choice.choice((0o755, 0o705, 0o750, 0o700)))
            case 2 | 3:
                os.chown(path, choice.choice((0, OWNER, OTHER)), choice.choice((0, OWNER, GROUP)))
            case 4 if not to.startswith(f"{path}/"):
                os.rename(path, to)
                if os.path.isfile(to):
                    self._look_up(to)
            case 5 if os.stat(file).st_nlink > 2:
                os.unlink(file)
            case 5:
                os.link(file, to)
                self._look_up(to)


def in_steps(visibility: Visibility, nodes: Nodes, view: View, who: Caller, obj: Object) -> bool:
    """What `Visibility.is_visible` returns if it may check few directories at once."""
    known: dict[Object, bool] = {}
    for _ in range(20):
        with contextlib.suppress(TooManyAncestors):
            return visibility.is_visible(view, actor(who), obj, os.fstat(nodes.descriptors.fd(obj)), known or None)
        for one in visibility.approach(obj, known):
            known[one] = visibility.is_visible(view, actor(who), one, os.fstat(nodes.descriptors.fd(one)), known)
    raise AssertionError("it is never near")


@pytest.mark.parametrize("at_once", [2, sys.maxsize])
def test_the_answer_is_that_of_a_walk(
    at_once: int, tree: str, make_visibility: Callable[..., Visibility], nodes: Nodes
) -> None:
    """Told of changes or not, at once or in steps, of a directory or a file with several names, by mask or by name."""
    lower: Any = Lower(tree)
    views = [View(MASKS), View(ByName(MASKS.options)), View(MASKS, lower=lower), View(Policy(), lower=lower)]
    views.append(View(Lower.policy))
    unreported, visibility = Visibility(nodes, at_once), make_visibility(at_once)
    changing = Changing(tree, nodes)
    answers = []
    for number in range(100):
        changing.change(number)
        lower.changed()
        for who, view in itertools.product(CALLERS, views):
            seen = seen_by_a_walk(tree, who, view)
            for ino, obj in changing.known.items():
                info = os.fstat(nodes.descriptors.fd(obj))
                for checked_by in (visibility, unreported):
                    if at_once < sys.maxsize:
                        answer = in_steps(checked_by, nodes, view, who, obj)
                    else:
                        answer = checked_by.is_visible(view, actor(who), obj, info)
                    assert answer is (ino in seen), (number, who, views.index(view), checked_by is visibility, obj.name)
                    answers.append(answer)
    assert 0.2 < sum(answers) / len(answers) < 0.8


def test_what_is_seen_in_a_directory_is_said_by_the_policy_and_the_mount_below(tree: str, nodes: Nodes) -> None:
    lower: Any = Lower(tree)
    views = [View(MASKS), View(ByName(MASKS.options)), View(MASKS, lower=lower), View(Policy(), lower=lower)]
    changing = Changing(tree, nodes)
    for number in range(100):
        changing.change(number)
    for who, view, above in itertools.product(CALLERS, views, [above for above, _, _ in os.walk(tree)]):
        for entry in os.scandir(above):
            info = os.stat(entry.path)
            fd = nodes.descriptors.fd(changing.known[info.st_ino])
            is_shown = view.lower is None or not lower.contains(info) or lower.is_visible_to(actor(who), fd, info)
            answer = is_entry_visible(view, actor(who), os.fsencode(entry.name), info, fd)
            assert answer is (is_shown and is_seen_there(entry, who, view.policy)), (who, views.index(view), entry)


def test_a_policy_asks_the_kernel_about_what_it_judges(tree: str, nodes: Nodes) -> None:
    visibility, changing = Visibility(nodes), Changing(tree, nodes)
    for number in range(100):
        changing.change(number)
    for who, obj in itertools.product(CALLERS, changing.known.values()):
        info = os.fstat(nodes.descriptors.fd(obj))
        by_name, by_access = (
            visibility.is_visible(View(policy(MASKS.options)), actor(who), obj, info) for policy in (ByName, ByAccess)
        )
        assert by_name is by_access


def test_what_has_left_the_tree_is_seen_by_no_caller(tree: str, visibility: Visibility, nodes: Nodes) -> None:
    changing, outside = Changing(tree, nodes), os.path.dirname(tree)
    ids = {path: os.stat(path).st_ino for path in (f"{tree}/d/e", f"{tree}/d/e/f/g", f"{tree}/d/e/f/file")}
    owner = actor(Caller(0, 0, frozenset({0})))
    for _ in range(2):
        for path, to, seen in (
            (tree, tree, True),
            (f"{tree}/d", f"{outside}/d", False),
            (f"{outside}/d", f"{tree}/d", True),
        ):
            os.rename(path, to)
            for number, view, checked_by in itertools.product(
                ids.values(), [View(MASKS), View(ByName(MASKS.options))], [visibility, Visibility(nodes)] * 2
            ):
                obj = changing.known[number]
                assert checked_by.is_visible(view, owner, obj, os.fstat(nodes.descriptors.fd(obj))) is seen, (
                    to,
                    obj.name,
                )


def test_the_daemon_itself_sees_all(tree: str, visibility: Visibility, nodes: Nodes) -> None:
    """Unlike a caller with its ids."""
    changing = Changing(tree, nodes)
    os.chown(f"{tree}/a", OTHER, OTHER)
    os.chmod(f"{tree}/a", 0o700)
    info = os.stat(f"{tree}/a")
    obj = changing.known[info.st_ino]
    lower: Any = Lower(tree)
    lower.is_visible_to = lambda *_: False
    for view in (View(MASKS), View(MASKS, lower=lower)):
        for who in (DAEMON, actor(DAEMON.caller)):
            is_insider = who is DAEMON
            assert visibility.is_visible(view, who, obj, info) is is_insider
            assert is_entry_visible(view, who, b"a", info, nodes.descriptors.fd(obj)) is is_insider


def test_nothing_is_cached_while_not_all_is_reported(tree: str, visibility: Visibility, nodes: Nodes) -> None:
    assert not Visibility(nodes).access_paths.is_up_to_date()
    *_, deep = go_down(visibility, nodes, 3)
    view, who = View(POLICY), actor(Caller(OWNER, OWNER, frozenset({OWNER})))
    assert visibility.is_visible(view, who, deep, os.fstat(nodes.descriptors.fd(deep)))
    visibility.access_paths.is_up_to_date = lambda: False
    os.chown(f"{tree}/0", OTHER, OTHER)
    assert not visibility.is_visible(view, who, deep, os.fstat(nodes.descriptors.fd(deep)))


def test_no_path_leads_through_what_is_nowhere_or_not_reported(visibility: Visibility, nodes: Nodes) -> None:
    way = go_down(visibility, nodes, 4)
    filesystem = way[2].filesystem
    assert visibility.access_paths.to(POLICY.cloak, way[-1])
    for other in (replace(filesystem, watched=False), replace(filesystem, kind="nfs4")):
        way[2].filesystem = other
        visibility.access_paths.changed(way[2])
        assert visibility.access_paths.to(POLICY.cloak, way[-1]) is None
    way[2].filesystem = filesystem
    assert visibility.access_paths.to(POLICY.cloak, way[-1])
    nodes.registry.displace(way[2])
    visibility.access_paths.changed(way[2])
    assert visibility.access_paths.to(POLICY.cloak, way[-1]) is None


def test_the_lower_mount_is_queried_before_a_cached_path_is_used(
    tree: str, visibility: Visibility, nodes: Nodes
) -> None:
    """The object lies on a file system that is mounted inside of the lower mount."""
    *_, deep = go_down(visibility, nodes, 3)
    lower: Any = Lower(tree)
    lower.has = lambda info: info.st_ino == os.stat(f"{tree}/0").st_ino
    lower.is_visible_to = lambda *_: False
    who, info = actor(Caller(OWNER, OWNER, frozenset({OWNER}))), os.fstat(nodes.descriptors.fd(deep))
    assert visibility.is_visible(View(POLICY), who, deep, info)
    assert not visibility.is_visible(View(POLICY, lower=lower), who, deep, info)
