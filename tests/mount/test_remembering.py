"""What the kernel may remember, against what each class of callers would be told of the real tree.

There is no mount here: the decision is asked for itself, while another process changes the tree.
"""

import contextlib
import os
import random
import stat
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio

from cloakfs import linux
from cloakfs.caller import Caller
from cloakfs.config.parse import parse_options
from cloakfs.filesystem import forget
from cloakfs.filesystem.entered import Entered
from cloakfs.filesystem.forget import ABSENT_SECONDS
from cloakfs.filesystem.kernelcache import KernelCache
from cloakfs.filesystem.remember import BRIEF_SECONDS, LONG_SECONDS, SHORT_SECONDS
from cloakfs.policy import Attrs, Policy
from cloakfs.tree.door import Door, subject
from cloakfs.tree.index import Index
from cloakfs.tree.nodes import Nodes
from cloakfs.tree.objects import Object
from cloakfs.view import View
from cloakfs.views import Views
from cloakfs.watch import Watch
from tests.agents import User, write
from tests.mount.conftest import told

OWNER, OTHER, GROUP, STRANGER = 4002, 4001, 7001, 9000
OPTIONS = parse_options("no_root_squash,cloak_list=uid +007 4001 gid -020 7001 uid +075 4002 9999")[0]
CLOAKED = Policy(OPTIONS)


class ByName(Policy):
    """Some names are their owner's alone."""

    def visible(self, caller: Caller, attrs: Attrs) -> bool:
        return not attrs.name.startswith("hidden") or caller.uid == attrs.uid


class Promising(ByName):
    """Says of which names that is not so."""

    def same_for_all(self, attrs: Attrs) -> bool:
        return not attrs.name.startswith("hidden")


def who(uid: int, *groups: int) -> Caller:
    return Caller(uid, uid, frozenset({uid, *groups}))


@contextlib.contextmanager
def as_itself() -> Iterator[None]:
    """A thread goes on acting as whoever it made its last call for."""
    try:
        yield
    finally:
        linux.act_as_daemon()


class Scene:
    """A tree that another process changes, and what is known of it."""

    def __init__(self, top: str, nodes: Nodes, index: Index, watch: Watch | None, user: User, **how: bool) -> None:
        self.top = top
        self.nodes = nodes
        self.door = Door(nodes)
        self.passages = self.door.passages
        self.cache = KernelCache(nodes, Views(CLOAKED, (), frozenset(), index), self.passages, **how)
        if watch is not None:
            self.cache.watch(watch)
        self._user = user
        self._choice = random.Random(1)
        for directory in ("a", "a/b", "a/b/hidden", "a/c", "d", "d/e", "d/e/f", "d/e/f/g"):
            os.mkdir(f"{top}/{directory}", 0o755)
            for name in ("file", "hidden-file"):
                Path(f"{top}/{directory}/{name}").touch(0o644)
                os.chown(f"{top}/{directory}/{name}", OTHER, GROUP)

    def catch_up(self) -> None:
        """Have all changes reported."""
        while not self.passages.is_up_to_date():
            pass

    def look_up(self, path: str) -> Object:
        """Find an object as the kernel does, name by name."""
        at = self.nodes.root
        for name in Path(path).relative_to(self.top).parts:
            fd = os.open(name, os.O_PATH | os.O_NOFOLLOW, dir_fd=self.nodes.fd(at))
            found = self.nodes.resolve(fd, at, os.fsencode(name))
            if not found.lookups:
                found.lookups += 1
            at = found
        return at

    def paths(self) -> list[str]:
        return [f"{above}/{name}" for above, names, files in os.walk(self.top) for name in (*names, *files)]

    def change(self, number: int) -> None:
        choice, do = self._choice, self._user.do
        paths = self.paths()
        path = choice.choice(paths)
        directories = [self.top, *(path for path in paths if os.path.isdir(path))]
        files = [path for path in paths if os.path.isfile(path)]
        to = f"{choice.choice(directories)}/{choice.choice(('', 'hidden'))}{number}"
        match choice.randrange(7):
            case 0 | 1 | 2:
                do(os.chmod, path, choice.choice((0o755, 0o755, 0o705, 0o750)))
            case 3 | 4:
                do(os.chown, path, choice.choice((0, OWNER, OTHER)), choice.choice((0, OWNER, GROUP)))
            case 5 if not to.startswith(f"{path}/"):
                do(os.rename, path, to)
            case 6 if os.stat(path := choice.choice(files)).st_nlink > 2:
                do(os.unlink, path)
            case 6:
                do(os.link, path, to)

    def of_name(self, view: View, path: str, **how: Any) -> tuple[float, float]:
        above, name = os.path.split(path)
        parent, obj = self.look_up(above), self.look_up(path)
        fd_of = self.nodes.fd
        info = os.stat(fd_of(parent))
        at = Entered(0, view, subject(who(STRANGER)), parent, fd_of(parent), info, hearer=STRANGER, **how)
        with as_itself():
            return self.cache.of_name(at, obj, os.fsencode(name), fd_of(obj), os.stat(fd_of(obj)))

    def of_object(self, view: View, path: str) -> float:
        return self.of_known(view, self.look_up(path))

    def of_known(self, view: View, obj: Object) -> float:
        fd = self.nodes.fd(obj)
        info = os.stat(fd)
        with as_itself():
            return self.cache.of_object(Entered(0, view, subject(who(STRANGER)), obj, fd, info, hearer=STRANGER), info)

    def of_absence(self, view: View, path: str) -> float:
        above, name = os.path.split(path)
        return self.cache.of_absence(0, view, self.look_up(above), os.fsencode(name))


MakeScene = Callable[..., Scene]


@pytest.fixture
def index(base: str) -> Iterator[Index]:
    with contextlib.closing(Index(os.path.join(base, "nodes.sqlite"))) as index:
        yield index


@pytest.fixture
def scene(tree: str, index: Index, user: Callable[..., User]) -> Iterator[MakeScene]:
    """Makes the scene: scene(exported=True)."""
    os.chmod(tree, 0o755)
    with contextlib.closing(Nodes(tree, index)) as nodes, contextlib.closing(Watch()) as watch:
        if nodes.root.filesystem.kind not in ("ext4", "xfs", "btrfs", "tmpfs"):
            pytest.skip(f"changes on {nodes.root.filesystem.kind} are not told")

        def make(*, is_told: bool = True, **how: bool) -> Scene:
            return Scene(tree, nodes, index, watch if is_told else None, user(0), **how)

        yield make


# -- caller views ----------------------------------------------------------------------------------


def classes(info: os.stat_result) -> list[Caller]:
    """The owner, a member of the group, and anybody else."""
    return [who(info.st_uid), who(STRANGER, info.st_gid), who(STRANGER)]


def is_same_for_all(policy: Policy, path: str) -> bool:
    info = os.stat(path)
    attrs = Attrs(os.path.basename(path), info.st_mode, info.st_uid, info.st_gid)
    return len({policy.visible(caller, attrs) for caller in classes(info)}) == 1


def is_public(policy: Policy, top: str, directory: str) -> bool:
    """Whether everybody sees this directory and all above it, and may search them."""
    if os.stat(directory).st_mode & 0o111 != 0o111:
        return False
    return directory == top or (
        is_same_for_all(policy, directory) and is_public(policy, top, os.path.dirname(directory))
    )


@pytest.mark.parametrize("exported", [False, True])
@pytest.mark.parametrize("policy", [CLOAKED, Promising(OPTIONS)], ids=["cloak_list", "plug-in"])
def test_a_caller_view_remembers_exactly_what_everybody_would_be_told(
    policy: Policy, exported: bool, scene: MakeScene
) -> None:
    async def main() -> None:
        s = scene(exported=exported)
        view = View(policy)
        brief = 0.0 if exported else BRIEF_SECONDS
        stranger = subject(who(STRANGER))
        answers = []

        def is_told(path: str) -> bool:
            return is_same_for_all(policy, path) and is_public(policy, s.top, os.path.dirname(path))

        for number in range(0, 90, 3):
            for change in range(3):
                s.change(number + change)
            if number % 10 == 0:
                told()  # a change within the last tick of the clock is nothing to rely on
            s.catch_up()
            # Asked by nodeid, of what may have been moved since it was looked up.
            for obj in s.nodes.objects():
                fd = s.nodes.fd(obj)
                path, info = os.readlink(f"/proc/self/fd/{fd}"), os.stat(fd)
                if obj is not s.nodes.root and s.door.visible(view, stranger, obj, info):
                    assert s.of_known(view, obj) <= brief or is_told(path), path
            for path in s.paths():
                info = os.stat(path)
                seconds = LONG_SECONDS if is_told(path) else 0.0
                is_one = stat.S_ISDIR(info.st_mode) or info.st_nlink == 1
                of_attributes = seconds if seconds and is_one else brief
                assert s.of_name(view, path) == (seconds, of_attributes), path
                assert s.of_object(view, path) == of_attributes, path
                assert s.of_absence(view, path) == 0.0  # would it were absent
                answers.append(seconds > 0)
            assert s.of_object(view, s.top) == LONG_SECONDS
        assert 0.1 < sum(answers) / len(answers) < 0.9

    trio.run(main)


class Lower:
    """A mount below that has nothing of what is asked about."""

    def has(self, _: os.stat_result) -> bool:
        return False


class Forwarding(Policy):
    def forward(self, caller: Any) -> Caller:
        return super().forward(caller)


class Showing(Policy):
    def show(self, attrs: Attrs) -> Attrs:
        return attrs


LOWER: Any = Lower()
NOT_TO_BE_RELIED_ON = {
    "hides by name": View(ByName(OPTIONS)),
    "forwards": View(Forwarding(OPTIONS)),
    "shows": View(Showing(OPTIONS)),
    "below": View(CLOAKED, below=LOWER),
    "promises below": View(Promising(OPTIONS), below=LOWER),
    "fixed hides by name": View(ByName(OPTIONS), who(OWNER)),
    "fixed shows": View(Showing(OPTIONS), who(OWNER)),
    "fixed below": View(CLOAKED, who(OWNER), below=LOWER),
    "fixed below without a cloak_list": View(Policy(), who(OWNER), below=LOWER),
}


@pytest.mark.parametrize("what", NOT_TO_BE_RELIED_ON)
def test_what_may_change_with_whoever_asks_is_not_remembered(what: str, scene: MakeScene) -> None:
    async def main() -> None:
        s = scene(gated=True)
        view = NOT_TO_BE_RELIED_ON[what]
        s.catch_up()
        for path in (f"{s.top}/a", f"{s.top}/a/file"):
            assert s.of_name(view, path) == (0.0, BRIEF_SECONDS)
            assert s.of_object(view, path) == BRIEF_SECONDS
            assert s.of_absence(view, path) == 0.0
        assert s.of_object(view, s.top) == (0.0 if view.below else LONG_SECONDS)

    trio.run(main)


# -- fixed views -----------------------------------------------------------------------------------


def may_search(caller: Caller, path: str) -> bool:
    info = os.stat(path)
    place = 6 if info.st_uid == caller.uid else 3 if info.st_gid in caller.groups else 0
    return bool(info.st_mode >> place & os.X_OK)


@pytest.mark.parametrize("exported", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("policy", [CLOAKED, Policy()], ids=["cloak_list", "hides nothing"])
def test_a_fixed_view_remembers_what_its_identity_finds(
    policy: Policy, gated: bool, exported: bool, scene: MakeScene
) -> None:
    async def main() -> None:
        s = scene(gated=gated, exported=exported)
        me = who(OWNER, GROUP)
        view = View(policy, me)
        brief = 0.0 if exported else BRIEF_SECONDS
        of_attributes = 0.0 if exported else LONG_SECONDS
        assert s.of_object(view, s.top) == (of_attributes if gated else 0.0)
        for number in range(0, 30, 3):
            for change in range(3):
                s.change(number + change)
            s.catch_up()
            for path in s.paths():
                above = os.path.dirname(path)
                name, info = os.path.basename(path), os.stat(path)
                is_seen = policy.visible(me, Attrs(name, info.st_mode, info.st_uid, info.st_gid))
                assert s.of_object(view, path) == (of_attributes if is_seen else brief), path
                if above == s.top and not gated:
                    assert s.of_name(view, path, has_searched=True) == (0.0, brief), path
                    assert s.of_absence(view, path) == 0.0, path
                    continue
                may = may_search(me, above)
                assert s.of_name(view, path) == ((LONG_SECONDS, of_attributes) if may else (0.0, 0.0)), path
                assert s.of_name(view, path, has_searched=True) == (LONG_SECONDS, of_attributes), path
                assert s.of_absence(view, path) == ABSENT_SECONDS, path

    trio.run(main)


# -- for how long ----------------------------------------------------------------------------------

FIXED = View(CLOAKED, who(OWNER))


def test_what_changes_untold_is_remembered_for_a_second(scene: MakeScene) -> None:
    async def main() -> None:
        s = scene(is_told=False, gated=True)
        told()
        for view in (View(CLOAKED), FIXED):
            assert s.of_name(view, f"{s.top}/a/file") == (SHORT_SECONDS, SHORT_SECONDS)
            assert s.of_object(view, f"{s.top}/a") == SHORT_SECONDS
        assert s.of_absence(FIXED, f"{s.top}/a/absent") == SHORT_SECONDS

    trio.run(main)


def test_no_client_cache_keeps_no_attributes_of_directories(scene: MakeScene) -> None:
    async def main() -> None:
        s = scene(gated=True, forgetful=True)
        s.catch_up()
        for view in (View(CLOAKED), FIXED):
            assert s.of_name(view, f"{s.top}/a/b") == (LONG_SECONDS, 0.0)
            assert s.of_name(view, f"{s.top}/a/file") == (LONG_SECONDS, LONG_SECONDS)
            assert s.of_object(view, s.top) == 0.0
        assert s.of_name(View(ByName()), f"{s.top}/a/file") == (0.0, 0.0)

    trio.run(main)


@pytest.mark.parametrize("exported", [False, True])
def test_owners_that_are_not_shown_alike_are_not_remembered_in_exports(exported: bool, scene: MakeScene) -> None:
    async def main() -> None:
        view = View(Policy(parse_options("root_squash,cloak_list=uid +000 1")[0]))
        s = scene(exported=exported)
        os.chown(f"{s.top}/a", 65534, 65534)  # of whom root becomes one
        os.chown(f"{s.top}/d", OWNER, OWNER)
        s.catch_up()
        assert s.of_name(view, f"{s.top}/a") == (LONG_SECONDS, 0.0 if exported else LONG_SECONDS)
        assert s.of_name(view, f"{s.top}/d") == (LONG_SECONDS, LONG_SECONDS)

    trio.run(main)


def test_nothing_is_remembered_in_a_directory_whose_lock_is_kept(scene: MakeScene) -> None:
    async def main() -> None:
        s = scene(gated=True)
        s.catch_up()
        late = s.nodes.nodeid(0, s.look_up(f"{s.top}/a"))
        s.cache.forgetter.is_late = lambda parent: parent == late  # type: ignore[method-assign]
        for view in (View(CLOAKED), FIXED):
            assert s.of_name(view, f"{s.top}/a/file") == (0.0, 0.0)
            assert s.of_object(view, f"{s.top}/a/file") == 0.0
            assert s.of_name(view, f"{s.top}/d/file") == (LONG_SECONDS, LONG_SECONDS)
            assert s.of_object(view, f"{s.top}/d/file") == LONG_SECONDS
        assert s.of_absence(FIXED, f"{s.top}/a/absent") == 0.0
        assert s.of_absence(FIXED, f"{s.top}/d/absent") == ABSENT_SECONDS

    trio.run(main)


def test_no_more_absent_names_at_the_top_than_can_be_noted(scene: MakeScene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forget, "_MOST_ABSENT", 2)

    async def main() -> None:
        s = scene(gated=True)
        s.catch_up()
        answers = [s.of_absence(FIXED, f"{s.top}/absent{number}") for number in range(3)]
        assert answers == [ABSENT_SECONDS, ABSENT_SECONDS, 0.0]
        assert s.of_absence(FIXED, f"{s.top}/a/absent") == ABSENT_SECONDS

    trio.run(main)


# -- contents --------------------------------------------------------------------------------------


def test_pages_are_used_again_only_if_nothing_shows_a_change(scene: MakeScene) -> None:
    s = scene()
    path = f"{s.top}/a/file"
    obj = s.look_up(path)

    def keeps(number: int = 0) -> bool:
        return s.cache.keeps_content(number, obj, os.stat(path))

    write(path, b"content")
    assert [keeps(), keeps()] == [False, False]  # it may still change without a new ctime
    told()
    assert [keeps(), keeps(), keeps(1), keeps(0), keeps()] == [False, True, False, False, True]
    for call, *args in ((write, path, b"CONTENT"), (os.chmod, path, 0o600), (os.truncate, path, 3)):
        call(*args)
        told()
        assert [keeps(), keeps()] == [False, True]
    obj.filesystem = replace(obj.filesystem, kind="vfat")  # its ctime does not show every change
    assert [keeps(), keeps()] == [True, False]
