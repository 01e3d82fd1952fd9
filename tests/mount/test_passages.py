"""What lies deep down costs no more than what lies at the top, and whatever is changed above it is seen at once."""

import contextlib
import errno
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cloakfs import linux
from cloakfs.caller import Caller
from cloakfs.config.parse import parse_options
from cloakfs.filesystem.kernelcache import KernelCache
from cloakfs.policy import Policy
from cloakfs.tree import calls
from cloakfs.tree.door import Door, subject
from cloakfs.tree.index import Index
from cloakfs.tree.nodes import Nodes
from cloakfs.tree.objects import Object
from cloakfs.view import View
from cloakfs.views import Views
from cloakfs.watch import Watch
from tests.agents import User
from tests.mount.conftest import Mount
from tests.mount.loopfs import filesystem, require

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
    """Directories in each other, and one aside that nobody but its owner sees, to move some of them to."""

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


@pytest.mark.parametrize("kind", KINDS)
def test_no_answer_is_outdated(kind: str, base: str, user: Callable[..., User], mount: Callable[..., Mount]) -> None:
    require(kind)
    with filesystem(kind, base) as top:
        os.chmod(top, 0o755)
        # What not everybody sees, the kernel does not remember.
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
            found = looker.error(os.stat, "file", dir_fd=fd)
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
def index(base: str) -> Iterator[Index]:
    with contextlib.closing(Index(os.path.join(base, "nodes.sqlite"))) as index:
        yield index


@pytest.fixture
def nodes(tree: str, index: Index) -> Iterator[Nodes]:
    with contextlib.closing(Nodes(tree, index)) as made:
        if made.root.filesystem.kind not in KINDS:
            pytest.skip(f"changes on {made.root.filesystem.kind} are not told")
        yield made


@pytest.fixture
def door(nodes: Nodes, index: Index) -> Iterator[Door]:
    """Is told of what this process does, and others."""
    door = Door(nodes)
    cache = KernelCache(nodes, Views(POLICY, (), frozenset(), index), door.passages)
    with contextlib.closing(Watch()) as watch:
        cache.watch(watch)
        yield door


def go_down(door: Door, nodes: Nodes, depth: int) -> list[Object]:
    """Make so many directories in each other, for nobody but their owner, look each up, and heed that all."""
    way = [nodes.root]
    for level in range(depth):
        name, above = b"%d" % level, nodes.fd(way[-1])
        os.mkdir(name, 0o700, dir_fd=above)
        os.chown(name, OWNER, OWNER, dir_fd=above)
        obj = nodes.resolve(os.open(name, os.O_PATH, dir_fd=above), way[-1], name)
        obj.lookups += 1
        way.append(obj)
    while not door.passages.is_up_to_date():
        pass
    return way


class Looks:
    """Counts how often the real tree is looked at."""

    def __init__(self, door: Door, nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
        self._door = door
        self._nodes = nodes
        self._view = View(POLICY)
        self._count = 0
        for module, name in ((os, "stat"), (os, "fstat"), (linux, "fstat"), (calls, "fstat")):
            monkeypatch.setattr(module, name, self._counted(getattr(module, name)))

    def _counted(self, call: Callable[..., os.stat_result]) -> Callable[..., os.stat_result]:
        def counted(*args: Any, **kwargs: Any) -> os.stat_result:
            self._count += 1
            return call(*args, **kwargs)

        return counted

    def of(self, uid: int, obj: Object, *, seen: bool) -> int:
        info = os.fstat(self._nodes.fd(obj))
        self._count = 0
        assert self._door.visible(self._view, subject(Caller(uid, uid, frozenset({uid}))), obj, info) is seen
        return self._count


def test_looks_do_not_grow_with_depth(door: Door, nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    way = go_down(door, nodes, 300)
    looks = Looks(door, nodes, monkeypatch)
    assert looks.of(OWNER, way[-1], seen=True) >= 300
    near = looks.of(OWNER, way[10], seen=True)
    assert looks.of(OWNER, way[-1], seen=True) <= near <= 4
    # What one has found out, others need not.
    assert looks.of(OTHER, way[-1], seen=False) <= 4
    for uid in range(20_000, 22_000):
        assert looks.of(uid, way[-1], seen=False) <= 4
    assert looks.of(OWNER, way[-1], seen=True) <= 4


def test_a_change_costs_one_look(door: Door, nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    way = go_down(door, nodes, 300)
    looks = Looks(door, nodes, monkeypatch)
    looks.of(OWNER, way[-1], seen=True)
    for level in (1, 5, 299):
        path = f"/proc/self/fd/{nodes.fd(way[level])}"
        os.chown(path, OTHER, OTHER)
        assert looks.of(OWNER, way[-1], seen=False) <= 6
        os.chown(path, OWNER, OWNER)
        assert looks.of(OWNER, way[-1], seen=True) <= 6


def test_what_is_lost_is_looked_at_again(door: Door, nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    way = go_down(door, nodes, 20)
    looks = Looks(door, nodes, monkeypatch)
    looks.of(OWNER, way[-1], seen=True)
    queue = int(Path("/proc/sys/fs/fanotify/max_queued_events").read_text())
    os.chown(f"/proc/self/fd/{nodes.fd(way[3])}", OTHER, OTHER)
    for number in range(queue):
        Path(f"/proc/self/fd/{nodes.fd(nodes.root)}/{number}").touch()
    os.chown(f"/proc/self/fd/{nodes.fd(way[3])}", OWNER, OWNER)
    os.chown(f"/proc/self/fd/{nodes.fd(way[4])}", OTHER, OTHER)  # this is not told
    looks.of(OWNER, way[-1], seen=False)  # while there is more to be heeded
    while not door.passages.is_up_to_date():
        pass
    looks.of(OWNER, way[-1], seen=False)
    assert looks.of(OWNER, way[-1], seen=False) < 20
    os.chown(f"/proc/self/fd/{nodes.fd(way[4])}", OWNER, OWNER)
    assert looks.of(OWNER, way[-1], seen=True)
