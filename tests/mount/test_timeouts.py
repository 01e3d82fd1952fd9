"""What the kernel may cache, against what each class of callers would be shown of the real tree.

There is no mount here: the decision is asked for itself, while another process changes the tree.
"""

import contextlib
import gc
import os
import random
import stat
import weakref
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio

from cloakfs import linux
from cloakfs.config.parse import parse_options
from cloakfs.exportmode import LOCAL, ExportMode, Server
from cloakfs.identity import Caller
from cloakfs.kernelcache import invalidation, timeouts
from cloakfs.kernelcache.cache import KernelCache
from cloakfs.kernelcache.cachepolicy import ABSENT_SECONDS, BRIEF_SECONDS, LONG_SECONDS, SHORT_SECONDS, MountTraits
from cloakfs.kernelcache.watch import Watch
from cloakfs.policy import Attrs, Policy
from cloakfs.tree import calls
from cloakfs.tree.actor import actor
from cloakfs.tree.index import Index
from cloakfs.tree.nodes import Nodes
from cloakfs.tree.objects import ALL_VIEWERS, NO_VIEWER, Object, Stale, Viewer, as_directory
from cloakfs.tree.request import Request
from cloakfs.tree.views import Views
from cloakfs.tree.visibility import Visibility
from cloakfs.tuning import STANDARD, Tuning
from cloakfs.view import View
from tests.agents import User, write
from tests.mount.conftest import told

OWNER, OTHER, GROUP, STRANGER = 4002, 4001, 7001, 9000
CLIENT_OF = {OWNER: Viewer(6002), OTHER: Viewer(6001)}
OPTIONS = parse_options(
    "no_root_squash,range_map=uid 0 map 0 uid 6001 6002 map 4001,"
    "cloak_list=uid +007 4001 gid -020 7001 uid +075 4002 9999"
)[0]
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


class NeverStalled(set[int]):
    """No directory is ever stalled."""

    def add(self, directory: int) -> None:
        """Leave it out."""


@contextlib.contextmanager
def as_itself() -> Iterator[None]:
    """A thread goes on acting as the caller of its last call."""
    try:
        yield
    finally:
        linux.act_as_daemon()


class Scene:
    """A tree that another process changes, and what is known of it."""

    def __init__(
        self, top: str, nodes: Nodes, index: Index, watch: Watch | None, user: User, mode: ExportMode, tuning: Tuning
    ) -> None:
        self.top = top
        self.nodes = nodes
        self.visibility = Visibility(nodes)
        self.access_paths = self.visibility.access_paths
        self.cache = KernelCache(
            nodes, Views(CLOAKED, (), frozenset(), index), self.access_paths, MountTraits(mode=mode), tuning=tuning
        )
        self.invalidation, self.notifier = self.cache.invalidation, self.cache.invalidation.notifier
        if watch is not None:
            self.cache.watch(watch)
        self.user = user
        self._choice = random.Random(1)
        for directory in ("a", "a/b", "a/b/hidden", "a/c", "d", "d/e", "d/e/f", "d/e/f/g"):
            os.mkdir(f"{top}/{directory}", 0o755)
            for name in ("file", "hidden-file"):
                Path(f"{top}/{directory}/{name}").touch(0o644)
                os.chown(f"{top}/{directory}/{name}", OTHER, GROUP)

    def catch_up(self) -> None:
        """Have all changes reported."""
        while not self.access_paths.is_up_to_date():
            pass

    async def settle(self) -> None:
        """Have all changes reported, and all names invalidated that have to be."""
        self.catch_up()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.invalidation.run)
            while not self.notifier.is_idle():
                await trio.sleep(0)
            nursery.cancel_scope.cancel()

    def look_up(self, path: str) -> Object:
        """Find an object as the kernel does, name by name."""
        at = self.nodes.root
        for name in Path(path).relative_to(self.top).parts:
            fd = os.open(name, os.O_PATH | os.O_NOFOLLOW, dir_fd=self.nodes.descriptors.fd(at))
            found = self.nodes.registry.resolve(fd, at, os.fsencode(name))
            if not found.lookups:
                found.lookups += 1
            at = found
        return at

    def paths(self) -> list[str]:
        return [f"{above}/{name}" for above, names, files in os.walk(self.top) for name in (*names, *files)]

    def change(self, number: int) -> None:
        choice, do = self._choice, self.user.do
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

    def enter(self, view: View, obj: Object, uid: int, *, has_searched: bool = False) -> Request:
        fd = self.nodes.descriptors.fd(obj)
        viewer = CLIENT_OF.get(uid, uid)
        self.cache.note_viewer(0, obj, viewer)
        return Request(0, view, actor(who(uid)), obj, fd, os.stat(fd), viewer, has_searched=has_searched)

    def of_name(self, view: View, path: str, uid: int = STRANGER, **how: bool) -> tuple[float, float]:
        return self.of_entry(view, self.look_up(os.path.dirname(path)), self.look_up(path), uid, **how)

    def of_entry(self, view: View, parent: Object, obj: Object, uid: int, **how: bool) -> tuple[float, float]:
        at = self.enter(view, parent, uid, **how)
        fd = self.nodes.descriptors.fd(obj)
        self.cache.note_viewer(0, obj, at.viewer)
        with as_itself():
            return self.cache.entry(at, obj.name, obj, fd, os.stat(fd))

    def of_object(self, view: View, path: str, uid: int = STRANGER) -> float:
        return self.of_known(view, self.look_up(path), uid)

    def of_known(self, view: View, obj: Object, uid: int = STRANGER) -> float:
        at = self.enter(view, obj, uid)
        with as_itself():
            return self.cache.attributes(at, at.info)

    def of_negative(self, view: View, path: str, viewer: int = STRANGER) -> float:
        above, name = os.path.split(path)
        parent = self.look_up(above)
        fd = self.nodes.descriptors.fd(parent)
        at = Request(0, view, actor(who(OWNER)), parent, fd, os.stat(fd), viewer)
        return self.cache.negative(at, os.fsencode(name), lambda: None, is_hidden=False)

    def cache_private_file(self) -> View:
        """Have `a/file` cached for OWNER alone, in the view that is returned."""
        for path, mode in (("a", 0o700), ("a/file", 0o600)):
            os.chown(f"{self.top}/{path}", OWNER, OWNER)
            os.chmod(f"{self.top}/{path}", mode)
        self.catch_up()
        view = View(CLOAKED)
        assert self.of_name(view, f"{self.top}/a/file", OWNER) == (LONG_SECONDS, LONG_SECONDS)
        return view


MakeScene = Callable[..., Scene]

EXPORTED, SQUASHED = ExportMode(Server.KNFSD), ExportMode(Server.KNFSD, all_squash=True)
CHECKED = ExportMode(Server.KNFSD, subtree_check=True)
GATED = ExportMode(kernel_gate=True)


@pytest.fixture
def scene(tree: str, index: Index, user: Callable[..., User]) -> Iterator[MakeScene]:
    """Makes the scene, of a mount that is exported like this."""
    os.chmod(tree, 0o755)
    with contextlib.closing(Nodes(tree, index)) as nodes, contextlib.closing(Watch()) as watch:
        if nodes.root.filesystem.kind not in ("ext4", "xfs", "btrfs", "tmpfs"):
            pytest.skip(f"changes on {nodes.root.filesystem.kind} are not told")

        def make(mode: ExportMode = LOCAL, *, is_told: bool = True, tuning: Tuning = STANDARD) -> Scene:
            return Scene(tree, nodes, index, watch if is_told else None, user(0), mode, tuning)

        yield make


# -- caller views ----------------------------------------------------------------------------------


def classes(info: os.stat_result) -> list[Caller]:
    """The owner, a member of the group, and any other caller."""
    return [who(info.st_uid), who(STRANGER, info.st_gid), who(STRANGER)]


def is_same_for_all(policy: Policy, path: str) -> bool:
    info = os.stat(path)
    attrs = Attrs(os.path.basename(path), info.st_mode, info.st_uid, info.st_gid)
    return len({policy.visible(caller, attrs) for caller in classes(info)}) == 1


def is_public(policy: Policy, top: str, directory: str) -> bool:
    """Whether all callers see this directory and all above it, and may search them."""
    if os.stat(directory).st_mode & 0o111 != 0o111:
        return False
    return directory == top or (
        is_same_for_all(policy, directory) and is_public(policy, top, os.path.dirname(directory))
    )


@pytest.mark.parametrize("exported", [False, True])
@pytest.mark.parametrize("policy", [CLOAKED, Promising(OPTIONS)], ids=["cloak_list", "plug-in"])
def test_a_caller_view_caches_exactly_what_all_callers_would_be_shown(
    policy: Policy, exported: bool, scene: MakeScene
) -> None:
    async def main() -> None:
        s = scene(EXPORTED if exported else LOCAL)
        view = View(policy)
        brief = 0.0 if exported else BRIEF_SECONDS
        stranger = actor(who(STRANGER))
        answers = []

        def is_told(path: str) -> bool:
            return is_same_for_all(policy, path) and is_public(policy, s.top, os.path.dirname(path))

        for number in range(0, 90, 3):
            for change in range(3):
                s.change(number + change)
            if number % 10 == 0:
                told()  # a change within the last tick of the clock is nothing to rely on
            await s.settle()
            # Asked by nodeid, of what may have been moved since it was looked up.
            for obj in s.nodes.registry.objects():
                fd = s.nodes.descriptors.fd(obj)
                path, info = os.readlink(f"/proc/self/fd/{fd}"), os.stat(fd)
                if obj is not s.nodes.root and s.visibility.is_visible(view, stranger, obj, info):
                    assert s.of_known(view, obj) <= brief or is_told(path), path
            for path in s.paths():
                info = os.stat(path)
                seconds = LONG_SECONDS if is_told(path) else 0.0
                is_one = stat.S_ISDIR(info.st_mode) or info.st_nlink == 1
                of_attributes = seconds if seconds and is_one else brief
                assert s.of_name(view, path) == (seconds, of_attributes), path
                assert s.of_object(view, path) == of_attributes, path
                assert s.of_negative(view, path) == 0.0  # would it were absent
                answers.append(seconds > 0)
            assert s.of_object(view, s.top) == LONG_SECONDS
        assert 0.1 < sum(answers) / len(answers) < 0.9

    trio.run(main)


def test_views_that_a_reload_has_replaced_are_let_go(scene: MakeScene) -> None:
    """Their policies may have a hundred thousand definitions."""
    s = scene()
    view = s.cache_private_file()
    gone = weakref.ref(view)
    del view
    s.cache.reset()
    gc.collect()
    assert gone() is None


def test_where_nothing_is_hidden_names_are_absent_for_all_who_may_search(scene: MakeScene) -> None:
    async def main() -> None:
        s = scene()
        view = View(Policy())
        for above, mode in (("d", 0o751), ("d/e", 0o776)):
            os.chmod(f"{s.top}/{above}", mode)
        s.catch_up()
        expected = {"": ABSENT_SECONDS, "a": ABSENT_SECONDS, "d": ABSENT_SECONDS, "d/e": 0.0, "d/e/f": 0.0}
        assert {above: s.of_negative(view, f"{s.top}/{above}/absent") for above in expected} == expected
        assert s.of_negative(View(Policy(), lower=LOWER), f"{s.top}/a/absent") == 0.0
        assert s.of_negative(View(CLOAKED), f"{s.top}/a/absent") == 0.0

    trio.run(main)


class Lower:
    """A lower mount that has nothing of what is asked about."""

    def contains(self, _: os.stat_result) -> bool:
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
    "lower": View(CLOAKED, lower=LOWER),
    "promises below": View(Promising(OPTIONS), lower=LOWER),
    "fixed hides by name": View(ByName(OPTIONS), who(OWNER)),
    "fixed shows": View(Showing(OPTIONS), who(OWNER)),
    "fixed below": View(CLOAKED, who(OWNER), lower=LOWER),
    "fixed below without a cloak_list": View(Policy(), who(OWNER), lower=LOWER),
}


@pytest.mark.parametrize("what", NOT_TO_BE_RELIED_ON)
def test_what_may_change_with_the_caller_is_not_cached(what: str, scene: MakeScene) -> None:
    async def main() -> None:
        s = scene(GATED)
        view = NOT_TO_BE_RELIED_ON[what]
        s.catch_up()
        for path in (f"{s.top}/a", f"{s.top}/a/file"):
            assert s.of_name(view, path) == (0.0, BRIEF_SECONDS)
            assert s.of_object(view, path) == BRIEF_SECONDS
            assert s.of_negative(view, path) == 0.0
        assert s.of_object(view, s.top) == (0.0 if view.lower else LONG_SECONDS)

    trio.run(main)


# -- one caller ------------------------------------------------------------------------------------


def has_one_name(path: str) -> bool:
    info = os.stat(path)
    return stat.S_ISDIR(info.st_mode) or info.st_nlink == 1


def surely_sees(uid: int, top: str, path: str) -> bool:
    """Whether this caller sees the object and all above it, both in the group of each and outside of it."""
    if path == top:
        return True
    info = os.stat(path)
    attrs = Attrs(os.path.basename(path), info.st_mode, info.st_uid, info.st_gid)
    return all(CLOAKED.visible(who(uid, *groups), attrs) for groups in ((), (info.st_gid,))) and surely_sees(
        uid, top, os.path.dirname(path)
    )


def surely_may_search(uid: int, directory: str) -> bool:
    """Whether this caller may search the directory, both in its group and outside of it."""
    info = os.stat(directory)
    wanted = 0o100 if info.st_uid == uid else 0o111
    return info.st_mode & wanted == wanted


KINDS_OF_MOUNT = {
    "plain": LOCAL,
    "exported": EXPORTED,
    "all_squash": SQUASHED,
    "subtree_check": CHECKED,
    "no_client_cache": ExportMode(no_client_cache=True),
    "unwatched": LOCAL,
}


@pytest.mark.parametrize("kind", KINDS_OF_MOUNT)
def test_a_caller_view_caches_for_one_caller_exactly_what_it_would_be_shown_whatever_its_groups(
    kind: str, scene: MakeScene
) -> None:
    """The tree changes unreported between the rounds. So what was cached must not be relied on in the next one."""
    is_for_one = kind in ("plain", "all_squash", "no_client_cache", "subtree_check")
    is_checked = kind == "subtree_check"  # then it must be certain that no other caller passes the directory above
    most = SHORT_SECONDS if kind == "unwatched" else LONG_SECONDS

    async def main() -> None:
        s = scene(KINDS_OF_MOUNT[kind], is_told=kind != "unwatched")
        view = View(CLOAKED)
        choice = random.Random(1)
        stalled: set[int] = set()
        s.notifier.stalled = stalled
        s.notifier.is_pending = lambda *_: False  # type: ignore[method-assign]  # no thread invalidates here
        os.link(f"{s.top}/a/file", f"{s.top}/d/e/link")
        answers: set[tuple[bool, float, float]] = set()

        def is_told(path: str) -> bool:
            return is_same_for_all(CLOAKED, path) and is_public(CLOAKED, s.top, os.path.dirname(path))

        def of_brief(obj: Object) -> float:
            if kind not in ("plain", "unwatched"):
                return 0.0
            above = [obj.parent, *(parent for parent, _ in obj.others)]
            while any(above):
                if any(parent is not None and s.nodes.nodeid(0, parent) in stalled for parent in above):
                    return 0.0
                above = [parent.parent for parent in above if parent is not None]
            return BRIEF_SECONDS

        def of_attributes(path: str, seconds: float) -> float:
            if kind == "no_client_cache" and os.path.isdir(path):
                return 0.0
            return seconds if has_one_name(path) else of_brief(s.look_up(path))

        def of_name(path: str, uid: int) -> tuple[float, float]:
            above, viewer = os.path.dirname(path), CLIENT_OF[uid]
            parent, obj = s.look_up(above), s.look_up(path)
            if s.nodes.nodeid(0, parent) in stalled:
                return 0.0, 0.0
            if is_told(path) and not obj.has_names_for_one:
                return most, of_attributes(path, most)
            if not is_for_one or not surely_sees(uid, s.top, path):
                return 0.0, of_brief(obj)
            if is_checked and (parent.audience not in (NO_VIEWER, viewer) or parent.relocated or obj.relocated):
                return 0.0, of_brief(obj)
            is_name_for_one = parent.audience in (NO_VIEWER, viewer) and surely_may_search(uid, above)
            return LONG_SECONDS * is_name_for_one, of_attributes(
                path, LONG_SECONDS if obj.audience in (NO_VIEWER, viewer) else of_brief(obj)
            )

        def of_object(path: str, uid: int) -> float:
            obj = s.look_up(path)
            if is_told(path) and has_one_name(path) and not (is_checked and obj.has_names_for_one):
                seconds = most
            elif is_checked and (
                obj.parent is None or obj.parent.audience != CLIENT_OF[uid] or obj.parent.relocated or obj.relocated
            ):
                return of_brief(obj)
            elif is_for_one and obj.audience in (NO_VIEWER, CLIENT_OF[uid]) and surely_sees(uid, s.top, path):
                seconds = LONG_SECONDS
            else:
                return of_brief(obj)
            assert obj.parent is not None
            is_stalled = s.nodes.nodeid(0, obj.parent) in stalled
            return 0.0 if is_stalled and has_one_name(path) else of_attributes(path, seconds)

        for _ in range(40):
            paths = s.paths()
            os.chmod(s.top, choice.choice((0o755, 0o755, 0o700)))
            for path in paths:
                os.chown(path, choice.choice((0, OWNER, OWNER, OTHER)), choice.choice((0, GROUP)))
                os.chmod(path, choice.choice((0o755, 0o755, 0o750, 0o700, 0o711, 0o600)))
            s.cache.reset()
            for obj in map(s.look_up, paths):
                obj.audience = choice.choice((NO_VIEWER, NO_VIEWER, CLIENT_OF[OWNER], CLIENT_OF[OTHER], ALL_VIEWERS))
                as_directory(obj).has_names_for_one = obj.audience != NO_VIEWER and choice.random() < 0.2
                obj.relocated = is_checked and choice.random() < 0.1
            stalled.clear()
            stalled.update(s.nodes.nodeid(0, s.look_up(path)) for path in choice.sample(paths, 2))
            for path in choice.choices(paths, k=30):
                uid = choice.choice((OWNER, OWNER, OTHER))
                if choice.random() < 0.5:
                    expected = of_name(path, uid)
                    assert s.of_name(view, path, uid) == expected, path
                else:
                    expected = 0.0, of_object(path, uid)
                    assert s.of_object(view, path, uid) == expected[1], path
                answers.add((is_told(path), *expected))
                obj = s.look_up(path)
                if max(expected) == LONG_SECONDS:
                    assert s.cache.is_known_to(0, obj) or not is_told(path) or obj.has_names_for_one, path
                    is_for = s.cache.is_known_to(0, obj) or obj.audience == CLIENT_OF[uid]
                    assert s.cache.is_known_to(0, obj, CLIENT_OF[uid]) is is_for, path
            for path in filter(has_one_name, paths):
                obj = s.look_up(path)
                assert is_told(path) or not s.cache.is_known_to(0, obj), path
                for uid, viewer in CLIENT_OF.items():
                    assert surely_sees(uid, s.top, path) or not s.cache.is_known_to(0, obj, viewer), path
        assert ((False, LONG_SECONDS, LONG_SECONDS) in answers) is is_for_one
        assert (True, most, most) in answers

    trio.run(main)


def cached(s: Scene, view: View, path: str) -> bool:
    """Whether the kernel caches the attributes when the owner looks at it, by name and then by its nodeid."""
    return max(s.of_name(view, path, OWNER)[1], s.of_object(view, path, OWNER)) == LONG_SECONDS


@pytest.mark.parametrize("moved", ["d/e/f/file", "d/e/f", "d/e/f/g"])
@pytest.mark.parametrize("is_lost_first", [False, True])
def test_where_the_kernel_checks_what_is_above_nothing_rests_on_the_place_of_what_was_moved(
    moved: str, is_lost_first: bool, scene: MakeScene
) -> None:
    """The kernel may go on to let others through at the old place."""

    async def main() -> None:
        s = scene(CHECKED)
        view = View(CLOAKED)
        close(s)
        file = moved if moved.endswith("file") else f"{moved}/file"
        if moved != "d/e/f/g":  # of which only the daemon itself was told
            assert cached(s, view, f"{s.top}/{file}")
        obj = s.look_up(f"{s.top}/{moved}")
        if is_lost_first:
            s.nodes.registry.displace(obj)
        os.rename(f"{s.top}/{moved}", f"{s.top}/a/b/moved")
        file = file.replace(moved, "a/b/moved")
        assert s.look_up(f"{s.top}/a/b/moved") is obj
        assert not cached(s, view, f"{s.top}/{file}")
        assert cached(s, view, f"{s.top}/a/b/file")
        s.nodes.forget(s.nodes.nodeid(0, s.look_up(f"{s.top}/{file}")), 1)

    trio.run(main)


@pytest.mark.parametrize("is_by_name", [False, True])
def test_where_the_kernel_checks_what_is_above_all_below_is_invalidated_before_others_pass(
    is_by_name: bool, scene: MakeScene
) -> None:
    async def main() -> None:
        s = scene(CHECKED)
        view = View(CLOAKED)
        close(s)
        for path in ("d", "d/e", "d/e/f", "d/e/f/file"):
            seconds = s.of_name(view, f"{s.top}/{path}", OWNER)[1] if is_by_name else 0.0
            assert max(seconds, s.of_object(view, f"{s.top}/{path}", OWNER)) == LONG_SECONDS * (path != "d")
        directory, file = s.look_up(f"{s.top}/d"), s.look_up(f"{s.top}/d/e/f/file")
        assert not s.of_object(view, f"{s.top}/d", OWNER)  # so that each caller that passes needs a request
        assert s.cache.note_viewer(0, directory, CLIENT_OF[OWNER]) is None
        assert s.cache.is_known_to(0, file, CLIENT_OF[OWNER])
        assert s.cache.note_viewer(0, directory, CLIENT_OF[OTHER]) is not None
        assert directory not in s.invalidation.subtrees
        assert not s.cache.is_known_to(0, file, CLIENT_OF[OWNER])
        assert not cached(s, view, f"{s.top}/d/e/f/file")  # a request of the other may be past that already

    trio.run(main)


def close(s: Scene, choice: random.Random | None = None) -> None:
    """Have everything belong to OWNER alone, apart from some of what is further down."""
    for path in s.paths():
        is_open = choice is not None and os.path.dirname(path) != s.top and choice.random() < 0.3
        os.chown(path, OWNER, OWNER)
        os.chmod(path, 0o755 if is_open else 0o700)
    s.catch_up()


def inside(path: str, directory: str) -> bool:
    return f"{path}/".startswith(f"{directory}/")


@pytest.mark.parametrize("is_through_the_mount", [False, True])
def test_a_change_makes_the_kernel_invalidate_exactly_what_one_caller_would_not_be_shown_any_more(
    is_through_the_mount: bool, scene: MakeScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that a process changes behind the mount is invalidated in any case."""

    async def main() -> None:
        s = scene()
        view = View(CLOAKED)
        choice = random.Random(1)
        costs = set()
        s.notifier.stalled = NeverStalled()  # as a busy machine may make it
        monkeypatch.setattr(s.notifier, "is_pending", lambda *_: False)  # likewise
        async with trio.open_nursery() as nursery:
            nursery.start_soon(s.invalidation.run)
            for _ in range(60):
                close(s, choice)
                s.cache.reset()
                paths = s.paths()
                for obj in map(s.look_up, paths):
                    obj.audience = choice.choice((NO_VIEWER, NO_VIEWER, NO_VIEWER, ALL_VIEWERS))
                    as_directory(obj).has_names_for_one = False
                cached = {path for path in paths if max(s.of_name(view, path, OWNER)) == LONG_SECONDS}
                told = sorted(cached)
                changed = choice.choice([p for p in told if is_through_the_mount or os.path.isdir(p)])
                do = (lambda call, *args: call(*args)) if is_through_the_mount else s.user.do
                do(os.chown, changed, choice.choice((0, OWNER, OTHER)), choice.choice((0, GROUP)))
                do(os.chmod, changed, choice.choice((0o755, 0o750, 0o711, 0o700, 0o600)))
                if is_through_the_mount:
                    await s.cache.changed(0, view, s.look_up(changed))
                else:
                    s.catch_up()
                may_enter = not os.path.isdir(changed) or surely_may_search(OWNER, changed)
                if not surely_sees(OWNER, s.top, changed) or not may_enter:
                    lost = {path for path in cached if inside(path, changed)}
                    costs.add(len(lost))
                    cached -= lost
                assert {path for path in told if s.look_up(path).cached_in} == cached, changed
            nursery.cancel_scope.cancel()
        assert len(costs) > 2

    trio.run(main)


WAYS = {
    "all callers'": (0, 0o755, STRANGER, 0),
    "one caller's": (OWNER, 0o700, OWNER, 1),
    "no caller's": (0, 0o700, STRANGER, 1),
}


@pytest.mark.parametrize("ask", [Scene.of_name, Scene.of_object])
@pytest.mark.parametrize("whose", WAYS)
def test_the_way_to_a_directory_is_looked_at_once_however_deep(
    whose: str, ask: Callable[..., object], scene: MakeScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it ended at a directory that does not let all callers through, this one is looked at again."""
    owner, mode, uid, looks_again = WAYS[whose]
    looks: list[int] = []

    def look(fd: int) -> linux.Stat:
        looks.append(fd)
        return linux.fstat(fd)

    async def main() -> None:
        s = scene()
        for path in (f"{s.top}/d", f"{s.top}/d/e", f"{s.top}/d/e/f", f"{s.top}/d/e/f/g"):
            os.chown(path, owner, owner)
            os.chmod(path, mode if path == f"{s.top}/d" else 0o755)
        s.catch_up()
        paths = f"{s.top}/d/e/f/g/file", f"{s.top}/d/e/f/g/hidden-file", f"{s.top}/d/e/f/g/file"
        for path in paths:
            s.look_up(path)
        s.enter(View(CLOAKED), s.look_up(f"{s.top}/d/e/f/g"), uid)
        monkeypatch.setattr(s.nodes.root.filesystem, "stat", look)
        for number, path in enumerate(paths):
            del looks[:]
            ask(s, View(CLOAKED), path, uid)
            assert number == 0 or len(looks) == looks_again

    trio.run(main)


@pytest.mark.parametrize("whose", ["one caller's", "no caller's"])
def test_where_not_all_callers_got_through_is_known_below_it_too(
    whose: str, scene: MakeScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each further directory on the way down learns it from the one above."""
    owner, mode, uid, _ = WAYS[whose]
    looks: list[int] = []

    def look(fd: int) -> linux.Stat:
        looks.append(fd)
        return linux.fstat(fd)

    async def main() -> None:
        s = scene()
        os.chown(f"{s.top}/d", owner, owner)
        os.chmod(f"{s.top}/d", mode)
        s.catch_up()
        paths = [f"{s.top}/{above}/file" for above in ("d/e", "d/e/f", "d/e/f/g", "d/e/f/g", "d/e/f/g")]
        for path in paths:
            s.enter(View(CLOAKED), s.look_up(os.path.dirname(path)), uid)
        s.of_name(View(CLOAKED), paths[0], uid)
        monkeypatch.setattr(s.nodes.root.filesystem, "stat", look)
        counts = []
        for path in paths:
            del looks[:]
            s.of_name(View(CLOAKED), path, uid)
            counts.append(len(looks))
        assert counts[-1] == counts[-2] == counts[0]

    trio.run(main)


def test_what_is_moved_to_where_all_callers_get_through_is_cached_for_all(scene: MakeScene) -> None:
    async def main() -> None:
        s = scene()
        os.chmod(f"{s.top}/d", 0o700)
        s.catch_up()

        def is_for_all(path: str) -> bool:
            s.of_name(View(CLOAKED), path)
            return s.cache.is_known_to(0, s.look_up(path))

        for _ in range(2):  # the second time, it is known where not all callers get through
            assert not is_for_all(f"{s.top}/d/e/f/file")
        os.rename(f"{s.top}/d/e", f"{s.top}/a/e")
        assert is_for_all(f"{s.top}/a/e/f/file")
        os.rename(f"{s.top}/a/e", f"{s.top}/d/e")
        s.cache.reset()
        assert not is_for_all(f"{s.top}/d/e/f/file")

    trio.run(main)


def test_a_hard_link_that_was_asked_for_by_nodeid_is_not_taken_to_be_known_to_all(scene: MakeScene) -> None:
    """Another name may be hidden, and be the one that is left. Of the name itself, when it was told, it is known."""

    async def main() -> None:
        s = scene()
        path = f"{s.top}/a/file"
        os.link(path, f"{s.top}/d/link")
        s.catch_up()
        assert s.of_object(View(CLOAKED), path) == BRIEF_SECONDS
        assert not s.cache.is_known_to(0, s.look_up(path))
        assert s.of_name(View(CLOAKED), path) == (LONG_SECONDS, BRIEF_SECONDS)
        assert s.cache.is_known_to(0, s.look_up(path))

    trio.run(main)


@pytest.mark.parametrize("session", [-1, 0])
def test_names_of_an_earlier_epoch_are_invalidated_before_anything_is_cached_anew(
    session: int, scene: MakeScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless the kernel was made to look up every name once more. The pass may not have come to the object yet."""
    names: list[bytes] = []
    attributes: list[int] = []

    async def main() -> None:
        s = scene()
        s.catch_up()
        path, notifier = f"{s.top}/a/b/file", s.notifier
        s.of_name(View(CLOAKED), path)
        monkeypatch.setattr(notifier, "increment_epoch", lambda: session >= 0)
        monkeypatch.setattr(notifier, "invalidate_entry", lambda parent, name, nodeid: names.append(name))
        monkeypatch.setattr(notifier, "invalidate_attributes", lambda nodeid, parent: attributes.append(nodeid))
        notifier.session = session
        s.cache.reset()
        for _ in range(2):
            assert s.of_name(View(CLOAKED), path)[0] == LONG_SECONDS
        assert names == ([b"a", b"b", b"file"] if session < 0 else [])
        of = [s.nodes.nodeid(0, s.look_up(known)) for known in (s.top, f"{s.top}/a", f"{s.top}/a/b", path)]
        assert attributes == of

    trio.run(main)


@pytest.mark.parametrize("uid", [OWNER, STRANGER])
def test_a_directory_is_not_looked_for_again_where_it_was_until_it_changes(
    uid: int, scene: MakeScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_for: list[Object] = []

    async def main() -> None:
        s = scene()
        view, path = View(CLOAKED), f"{s.top}/d/e/file"
        if uid == OWNER:
            close(s)
        told()
        for directory in (f"{s.top}/d", f"{s.top}/d/e"):
            s.of_object(view, directory, uid)
        is_child = s.nodes.locator.is_child

        def look_for(obj: Object, parent: Object) -> bool:
            looked_for.append(obj)
            return is_child(obj, parent)

        monkeypatch.setattr(s.nodes.locator, "is_child", look_for)
        monkeypatch.setattr(s.notifier, "is_pending", lambda *_: False)  # no thread invalidates here
        s.cache.reset()
        assert s.of_name(view, path, uid)[0] == LONG_SECONDS
        assert not looked_for
        os.chmod(f"{s.top}/d/e", 0o500 if uid == OWNER else 0o711)
        s.cache.reset()
        assert s.of_name(view, path, uid)[0] == LONG_SECONDS
        assert looked_for == [s.look_up(f"{s.top}/d/e")]

    trio.run(main)


def test_nothing_rests_on_a_directory_of_which_it_could_not_be_noted(
    scene: MakeScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is found out of a way is noted from the top down, so that a failure leaves nothing without what is above."""

    async def main() -> None:
        s = scene()
        s.catch_up()
        above = s.look_up(f"{s.top}/d")
        hold = s.nodes.registry.hold

        def fail(obj: Object, numbers: frozenset[int]) -> None:
            if obj is above:
                raise MemoryError
            hold(obj, numbers)

        with monkeypatch.context() as patched:
            patched.setattr(s.nodes.registry, "hold", fail)
            with pytest.raises(MemoryError):
                s.of_name(View(CLOAKED), f"{s.top}/d/e/f/file")
        for path in (f"{s.top}/d/e", f"{s.top}/d/e/f"):
            assert not s.cache.is_known_to(0, s.look_up(path))
            assert not s.look_up(path).public_in

    trio.run(main)


def test_what_all_callers_were_shown_is_invalidated_although_one_caller_may_be_shown_more(scene: MakeScene) -> None:
    async def main() -> None:
        s = scene()
        view = View(CLOAKED)
        os.chown(f"{s.top}/d", OWNER, OWNER)
        os.chown(f"{s.top}/d/hidden-file", OWNER, OWNER)
        os.chmod(f"{s.top}/d/hidden-file", 0o600)
        s.catch_up()
        for path in (f"{s.top}/d/file", f"{s.top}/d/hidden-file"):
            assert s.of_name(view, path, OWNER) == (LONG_SECONDS, LONG_SECONDS)
        file = s.look_up(f"{s.top}/d/file")
        assert s.cache.is_known_to(0, file)
        s.user.do(os.chmod, f"{s.top}/d", 0o700)
        s.catch_up()
        assert not s.cache.is_known_to(0, file)

    trio.run(main)


def test_what_all_callers_were_shown_by_the_kernel_is_not_cached_for_one_caller_later(scene: MakeScene) -> None:
    async def main() -> None:
        s = scene()
        s.catch_up()
        assert s.of_name(View(CLOAKED), f"{s.top}/a/b", OWNER) == (LONG_SECONDS, LONG_SECONDS)
        close(s)
        assert s.of_name(View(CLOAKED), f"{s.top}/a/b/file", OWNER) == (0.0, LONG_SECONDS)
        assert s.of_object(View(CLOAKED), f"{s.top}/a/b", OWNER) == BRIEF_SECONDS

    trio.run(main)


def test_nothing_is_cached_for_one_caller_below_what_may_change_unreported(scene: MakeScene) -> None:
    async def main() -> None:
        s = scene()
        close(s)
        above = s.look_up(f"{s.top}/d")
        above.filesystem = replace(above.filesystem, watched=False)  # as if another file system were mounted on d/e
        assert s.of_name(View(CLOAKED), f"{s.top}/d/e/file", OWNER) == (0.0, BRIEF_SECONDS)
        assert s.of_name(View(CLOAKED), f"{s.top}/a/b/file", OWNER) == (LONG_SECONDS, LONG_SECONDS)

    trio.run(main)


@pytest.mark.parametrize("uid", [OWNER, STRANGER])
def test_nothing_is_cached_of_what_has_left_the_tree(uid: int, base: str, scene: MakeScene) -> None:
    """Nor of what is in it, although it is still in its own directory."""

    async def main() -> None:
        s = scene()
        view = View(CLOAKED)
        if uid == OWNER:
            close(s)
        for path in ("d/e", "a/file"):
            outer, inner = (s.look_up(f"{s.top}/{path}"), s.look_up(f"{s.top}/d/e/f/file"))
            directory = inner.parent
            assert directory is not None
            for obj in (outer, directory, inner):
                s.enter(view, obj, uid)
            told()
            os.rename(f"{s.top}/{path}", f"{base}/outside{len(path)}")
            if path == "d/e":
                assert s.of_known(view, inner, uid) == BRIEF_SECONDS
                assert s.of_entry(view, directory, inner, uid) == (0.0, BRIEF_SECONDS)
            assert s.of_known(view, outer, uid) == BRIEF_SECONDS
            if path == "d/e":
                assert s.of_known(view, inner, uid) == BRIEF_SECONDS
                os.rename(f"{base}/outside{len(path)}", f"{s.top}/{path}")

    trio.run(main)


# -- what others are told --------------------------------------------------------------------------


async def admitted(s: Scene, number: int, obj: Object, viewer: int) -> None:
    """Wait until this caller may learn of a directory."""
    pending = s.cache.admit(number, obj, viewer)
    if pending is not None:
        await pending


async def is_done(s: Scene, tasks: str, call: Callable[[], Awaitable[None]], *, expected: bool = True) -> bool:
    """Whether this call returns while nothing is invalidated in the background, only names are, or all is.

    `expected` says how long to wait for it: a busy machine may take long.
    """
    done = trio.Event()

    async def do() -> None:
        await call()
        done.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(do)
        if tasks != "nothing":
            nursery.start_soon(s.notifier.run if tasks == "names" else s.invalidation.run)
        with trio.move_on_after(10 if expected else 0.2):
            await done.wait()
        nursery.cancel_scope.cancel()
    return done.is_set()


@pytest.mark.parametrize(
    ("at_once", "tasks", "is_told"),
    [(64, "nothing", False), (1, "names", False), (64, "names", True), (1, "all", True)],
)
def test_others_learn_of_a_directory_when_what_is_in_it_is_invalidated(
    at_once: int, tasks: str, is_told: bool, scene: MakeScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, other = CLIENT_OF[OWNER], CLIENT_OF[OTHER]

    async def main() -> None:
        s = scene(tuning=Tuning(names_at_once=at_once))
        close(s)
        directory = s.look_up(f"{s.top}/d")
        for path in s.paths():
            s.of_name(View(CLOAKED), path, OWNER)
        assert s.cache.admit(0, directory, owner) is None
        assert s.cache.admit(0, directory, other) is not None
        assert not s.cache.may_list(0, directory, other, is_directory=False)
        s.notifier.stalled = NeverStalled()  # as a busy machine may make it
        assert await is_done(s, tasks, lambda: admitted(s, 0, directory, other), expected=is_told) is is_told
        assert (s.cache.admit(0, directory, other) is None) is is_told
        known = [path for path in s.paths() if s.cache.is_known_to(0, s.look_up(path), owner)]
        assert f"{s.top}/a/b/file" in known
        assert not [path for path in known if path.startswith(f"{s.top}/d/")]  # it is not relied on any more
        cached = [path for path in s.paths() if s.look_up(path).cached_in]
        assert not (is_told and [path for path in cached if path.startswith(f"{s.top}/d/")])
        assert s.of_name(View(CLOAKED), f"{s.top}/d/file", OWNER)[0] == 0.0  # from the beginning on

    trio.run(main)


def test_others_learn_of_a_file_when_its_attributes_are_invalidated(
    scene: MakeScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    invalidated: list[int] = []

    async def main() -> None:
        s = scene()
        close(s)
        known, unknown = s.look_up(f"{s.top}/d/file"), s.look_up(f"{s.top}/d/hidden-file")
        assert s.of_name(View(CLOAKED), f"{s.top}/d/file", OWNER) == (LONG_SECONDS, LONG_SECONDS)
        monkeypatch.setattr(s.notifier, "invalidate_attributes", lambda nodeid, _: invalidated.append(nodeid))
        for uid in (OWNER, OTHER, STRANGER):
            for obj in (known, unknown):
                s.cache.note_viewer(0, obj, CLIENT_OF.get(uid, uid))
        assert invalidated == [s.nodes.nodeid(0, known)]

    trio.run(main)


@pytest.mark.parametrize("session", [-1, 0])
def test_others_are_not_admitted_while_a_process_holds_the_lock(
    session: int, scene: MakeScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless the kernel can be made to look up every name."""

    async def main() -> None:
        s = scene()
        close(s)
        directory = s.look_up(f"{s.top}/d")
        s.of_name(View(CLOAKED), f"{s.top}/d/file", OWNER)
        s.notifier.stalled = {s.nodes.nodeid(0, directory)}
        monkeypatch.setattr(s.notifier, "pending_names", lambda _: None)  # as long as that is so
        s.notifier.session = session
        is_refused = pytest.RaisesGroup(Stale) if session < 0 else contextlib.nullcontext()
        with is_refused:
            await is_done(s, "all", lambda: admitted(s, 0, directory, CLIENT_OF[OTHER]))
        assert (s.cache.admit(0, directory, CLIENT_OF[OTHER]) is None) is (session >= 0)

    trio.run(main)


@pytest.mark.parametrize(
    ("path", "at_once", "tasks", "is_told"),
    [
        ("d/e/f", 64, "nothing", True),
        ("d/e/f", 1, "nothing", False),
        ("d/e/f", 1, "names", False),
        ("d/e/f", 1, "all", True),
        ("d/e", 1, "all", True),
    ],
)
def test_a_directory_that_was_moved_has_what_is_beside_it_invalidated(
    path: str, at_once: int, tasks: str, is_told: bool, scene: MakeScene
) -> None:
    """Those who knew it get at the directories above, by "..", without a request."""
    owner, other = CLIENT_OF[OWNER], CLIENT_OF[OTHER]

    async def main() -> None:
        s = scene(tuning=Tuning(names_at_once=at_once))
        close(s)
        for known in s.paths():
            if not inside(known, f"{s.top}/{path}"):
                s.of_name(View(CLOAKED), known, OWNER)
        moved, within = s.look_up(f"{s.top}/{path}"), s.look_up(f"{s.top}/d/e/f/g")
        above = [s.look_up(f"{s.top}/{name}") for name in ("d/e", "d") if name != path]
        moved.audience = within.audience = other
        assert moved.children is not None
        for inner in moved.children.values():
            inner.audience = other
        for viewer in owner, other:
            assert s.cache.admit(0, moved, viewer) is not None
        assert s.cache.admit(1, moved, owner) is None  # another view
        await admitted(s, 1, moved, owner)
        await admitted(s, 0, within, other)  # it was not moved itself
        assert {directory.audience for directory in above} == {owner}
        assert await is_done(s, tasks, lambda: admitted(s, 0, moved, other), expected=is_told) is is_told
        assert moved.audience == other
        assert {directory.audience for directory in above} == {ALL_VIEWERS}
        assert (s.cache.admit(0, moved, other) is None) is is_told  # nor is any request answered sooner meanwhile
        still_known = [at for at in s.paths() if s.cache.is_known_to(0, s.look_up(at), owner)]
        assert f"{s.top}/a/b/file" in still_known
        assert not [at for at in still_known if at.startswith(f"{s.top}/d/")]  # it is not relied on any more
        cached = [at for at in s.paths() if s.look_up(at).cached_in]
        assert not (is_told and [at for at in cached if at.startswith(f"{s.top}/d/")])

    trio.run(main)


# -- fixed views -----------------------------------------------------------------------------------


def may_search(caller: Caller, path: str) -> bool:
    info = os.stat(path)
    place = 6 if info.st_uid == caller.uid else 3 if info.st_gid in caller.groups else 0
    return bool(info.st_mode >> place & os.X_OK)


@pytest.mark.parametrize("exported", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("policy", [CLOAKED, Policy()], ids=["cloak_list", "hides nothing"])
def test_a_fixed_view_caches_what_its_identity_finds(
    policy: Policy, gated: bool, exported: bool, scene: MakeScene
) -> None:
    async def main() -> None:
        s = scene(ExportMode(Server.KNFSD if exported else Server.NONE, kernel_gate=gated))
        me = who(OWNER, GROUP)
        view = View(policy, me)
        brief = 0.0 if exported else BRIEF_SECONDS
        of_attributes = 0.0 if exported else LONG_SECONDS
        assert s.of_object(view, s.top) == (of_attributes if gated else 0.0)
        os.chown(f"{s.top}/d/e", OWNER, OWNER)
        os.chmod(f"{s.top}/d/e", 0o700)
        for number in range(0, 30, 3):
            for change in range(3):
                s.change(number + change)
            await s.settle()
            for path in s.paths():
                above = os.path.dirname(path)
                name, info = os.path.basename(path), os.stat(path)
                is_seen = policy.visible(me, Attrs(name, info.st_mode, info.st_uid, info.st_gid))
                assert s.of_object(view, path) == (of_attributes if is_seen else brief), path
                if above == s.top and not gated:
                    assert s.of_name(view, path, has_searched=True) == (0.0, brief), path
                    assert s.of_negative(view, path) == 0.0, path
                    continue
                may = may_search(me, above)
                assert s.of_name(view, path) == ((LONG_SECONDS, of_attributes) if may else (0.0, 0.0)), path
                assert s.of_name(view, path, has_searched=True) == (LONG_SECONDS, of_attributes), path
                assert s.of_negative(view, path) == ABSENT_SECONDS, path

    trio.run(main)


# -- for how long ----------------------------------------------------------------------------------

FIXED = View(CLOAKED, who(OWNER))


def test_what_changes_unreported_is_cached_for_a_second(scene: MakeScene) -> None:
    async def main() -> None:
        s = scene(GATED, is_told=False)
        told()
        for view in (View(CLOAKED), FIXED):
            assert s.of_name(view, f"{s.top}/a/file") == (SHORT_SECONDS, SHORT_SECONDS)
            assert s.of_object(view, f"{s.top}/a") == SHORT_SECONDS
            assert not s.cache.is_known_to(0, s.look_up(f"{s.top}/a"))  # it may have changed by now
        assert s.of_negative(FIXED, f"{s.top}/a/absent") == SHORT_SECONDS

    trio.run(main)


def test_a_fixed_view_knows_a_directory_in_which_a_name_is_cached(scene: MakeScene) -> None:
    """Although its own name is asked for each time, it need not be found out again who may know of it."""

    async def main() -> None:
        s = scene()
        s.catch_up()
        directory = s.look_up(f"{s.top}/a")
        assert s.of_name(FIXED, f"{s.top}/a", has_searched=True) == (0.0, BRIEF_SECONDS)
        assert not s.cache.is_known_to(0, directory)
        assert s.of_name(FIXED, f"{s.top}/a/file") == (LONG_SECONDS, LONG_SECONDS)
        assert s.cache.is_known_to(0, directory)
        s.user.do(os.chmod, f"{s.top}/a", 0o700)
        s.catch_up()
        assert not s.cache.is_known_to(0, directory)

    trio.run(main)


def test_no_client_cache_keeps_no_attributes_of_directories(scene: MakeScene) -> None:
    async def main() -> None:
        s = scene(replace(GATED, no_client_cache=True))
        s.catch_up()
        for view in (View(CLOAKED), FIXED):
            assert s.of_name(view, f"{s.top}/a/b") == (LONG_SECONDS, 0.0)
            assert s.of_name(view, f"{s.top}/a/file") == (LONG_SECONDS, LONG_SECONDS)
            assert s.of_object(view, s.top) == 0.0
        assert s.of_name(View(ByName()), f"{s.top}/a/file") == (0.0, 0.0)

    trio.run(main)


@pytest.mark.parametrize(
    ("policy", "name", "is_remembered"),
    [
        (CLOAKED, "a/new", True),
        (CLOAKED, "a/hidden", True),
        (Promising(OPTIONS), "a/new", True),
        (Promising(OPTIONS), "a/hidden", False),
        (CLOAKED, "d/new", False),
    ],
)
def test_what_is_moved_is_invalidated_unless_all_callers_learn_of_it_there(
    policy: Policy, name: str, is_remembered: bool, scene: MakeScene
) -> None:
    async def main() -> None:
        s = scene()
        os.chmod(f"{s.top}/d", 0o700)
        s.catch_up()
        view = View(policy)
        assert s.of_name(view, f"{s.top}/a/file") == (LONG_SECONDS, LONG_SECONDS)
        os.rename(f"{s.top}/a/file", f"{s.top}/{name}")
        obj = s.look_up(f"{s.top}/{name}")
        assert obj.parent is not None
        await s.cache.moved(0, view, obj, s.look_up(f"{s.top}/a"), obj.parent)
        assert s.cache.is_known_to(0, obj) is is_remembered

    trio.run(main)


def test_nothing_private_is_cached_of_what_is_moved_again_before_its_name_is_invalidated(scene: MakeScene) -> None:
    """The kernel moves the name once more, and so it need not learn of the one in between."""

    async def main() -> None:
        s = scene()
        view = s.cache_private_file()
        for old, new in (("a/file", "d/once"), ("d/once", "d/twice")):
            os.rename(f"{s.top}/{old}", f"{s.top}/{new}")
            obj, before = s.look_up(f"{s.top}/{new}"), s.look_up(os.path.dirname(f"{s.top}/{old}"))
            assert obj.parent is not None
            await s.cache.moved(0, view, obj, before, obj.parent)  # no thread works, as if a process held the lock
        assert s.of_object(view, f"{s.top}/d/twice", OWNER) == 0.0

    trio.run(main)


def test_what_one_caller_moves_from_one_public_directory_into_another_remains_cached_for_it(
    scene: MakeScene,
) -> None:
    async def main() -> None:
        s = scene()
        view = View(CLOAKED)
        os.chown(f"{s.top}/a/file", OWNER, OWNER)
        os.chmod(f"{s.top}/a/file", 0o600)
        s.catch_up()
        s.look_up(f"{s.top}/a").audience = ALL_VIEWERS  # so that the name is not cached for one caller
        assert s.of_name(view, f"{s.top}/a/file", OWNER)[1] == LONG_SECONDS
        assert s.of_name(view, f"{s.top}/d/file", OWNER) == (LONG_SECONDS, LONG_SECONDS)
        os.rename(f"{s.top}/a/file", f"{s.top}/d/new")
        obj = s.look_up(f"{s.top}/d/new")
        assert obj.parent is not None
        await s.cache.moved(0, view, obj, s.look_up(f"{s.top}/a"), obj.parent)
        assert s.cache.is_known_to(0, obj, CLIENT_OF[OWNER])
        assert not s.cache.is_known_to(0, obj, CLIENT_OF[OTHER])

    trio.run(main)


@pytest.mark.parametrize(
    ("mode", "viewer", "seconds"),
    [
        (LOCAL, STRANGER, LONG_SECONDS),
        (EXPORTED, STRANGER, 0.0),
        (SQUASHED, STRANGER, LONG_SECONDS),  # no other caller is shown anything
        (SQUASHED, 0, LONG_SECONDS),
        (SQUASHED, NO_VIEWER, 0.0),  # local root
    ],
)
def test_owners_that_are_not_shown_alike_are_not_cached_in_exports_to_several_callers(
    mode: ExportMode, viewer: int, seconds: float, scene: MakeScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CLIENT_OF, STRANGER, viewer)

    async def main() -> None:
        view = View(Policy(parse_options("root_squash,cloak_list=uid +000 1")[0]))
        s = scene(mode)
        os.chown(f"{s.top}/a", 65534, 65534)  # of whom root becomes one
        os.chown(f"{s.top}/d", OWNER, OWNER)
        s.catch_up()
        assert s.of_name(view, f"{s.top}/a") == (LONG_SECONDS, seconds)
        assert s.of_name(view, f"{s.top}/d") == (LONG_SECONDS, LONG_SECONDS)

    trio.run(main)


def test_root_is_one_caller_like_any_other(scene: MakeScene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CLIENT_OF, OWNER, Viewer(0))

    async def main() -> None:
        s = scene()
        close(s)
        for path in (f"{s.top}/d/e", f"{s.top}/d/file"):
            assert s.of_name(View(CLOAKED), path, OWNER) == (LONG_SECONDS, LONG_SECONDS)
            assert s.of_object(View(CLOAKED), path, OWNER) == LONG_SECONDS

    trio.run(main)


def test_the_root_is_visible_to_all_whatever_its_owner_and_mode(scene: MakeScene) -> None:
    async def main() -> None:
        s = scene()
        os.chown(s.top, 0, GROUP)
        os.chmod(s.top, 0o775)  # the cloak_list would hide this from the group
        s.catch_up()
        assert not is_same_for_all(CLOAKED, s.top)
        assert s.of_name(View(CLOAKED), f"{s.top}/d") == (LONG_SECONDS, LONG_SECONDS)

    trio.run(main)


def test_what_the_daemon_itself_is_shown_is_cached_for_no_caller(
    scene: MakeScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CLIENT_OF, OWNER, NO_VIEWER)

    async def main() -> None:
        s = scene()
        close(s)
        for path in (f"{s.top}/d", f"{s.top}/d/file"):
            assert s.of_name(View(CLOAKED), path, OWNER) == (0.0, BRIEF_SECONDS)
            assert s.of_object(View(CLOAKED), path, OWNER) == BRIEF_SECONDS
            assert not s.look_up(path).cached_in

    trio.run(main)


@pytest.mark.parametrize("mode", [0o755, 0o700])
def test_whether_a_directory_may_be_searched_is_asked_only_where_that_takes_no_time(
    mode: int, scene: MakeScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    s = scene()
    os.chmod(f"{s.top}/a", mode)
    os.chown(f"{s.top}/a", OWNER, OWNER)
    obj = s.look_up(f"{s.top}/a")
    fd, is_for_all, access = s.nodes.descriptors.fd(obj), mode == 0o755, calls.access
    asked: list[tuple[Any, ...]] = []

    def counted(*of: Any) -> bool:
        asked.append(of)
        return access(*of)

    monkeypatch.setattr(calls, "access", counted)
    with as_itself():
        assert timeouts.may_search(who(OWNER), obj, fd, os.stat(fd))
        assert timeouts.may_search(who(OTHER), obj, fd, os.stat(fd)) is is_for_all
    assert len(asked) == (0 if is_for_all else 2)
    obj.filesystem = replace(obj.filesystem, kind="nfs4")  # where only a thread may ask
    assert obj.filesystem.remote
    assert not timeouts.may_search(who(OWNER), obj, fd, os.stat(fd))
    assert len(asked) == (0 if is_for_all else 2)


def test_nothing_is_cached_in_a_directory_whose_lock_is_held(scene: MakeScene) -> None:
    async def main() -> None:
        s = scene(GATED)
        s.catch_up()
        stalled = s.nodes.nodeid(0, s.look_up(f"{s.top}/a"))
        s.notifier.stalled = {stalled}
        for view in (View(CLOAKED), FIXED):
            assert s.of_name(view, f"{s.top}/a/file") == (0.0, 0.0)
            assert s.of_object(view, f"{s.top}/a/file") == 0.0
            assert s.of_name(view, f"{s.top}/d/file") == (LONG_SECONDS, LONG_SECONDS)
            assert s.of_object(view, f"{s.top}/d/file") == LONG_SECONDS
        assert s.of_negative(FIXED, f"{s.top}/a/absent") == 0.0
        assert s.of_negative(FIXED, f"{s.top}/d/absent") == ABSENT_SECONDS

    trio.run(main)


def test_attributes_are_not_even_cached_briefly_below_a_name_that_is_pending(scene: MakeScene) -> None:
    """The name leads others to where it has been moved; for an instant, they would see it without a request."""

    async def main() -> None:
        s = scene()
        for path in ("a", "a/b"):
            os.chown(f"{s.top}/{path}", OWNER, OWNER)
            os.chmod(f"{s.top}/{path}", 0o700)
        await s.settle()
        view, inside, beside = View(CLOAKED), f"{s.top}/a/b/file", f"{s.top}/a/c/file"
        assert s.of_name(view, f"{s.top}/a/b", OWNER)[0] == LONG_SECONDS
        for path in (inside, beside):
            assert s.of_object(view, path, OTHER) == BRIEF_SECONDS
        s.invalidation.invalidate(s.look_up(f"{s.top}/a/b"))  # no thread does it, as if a process held the lock
        assert s.of_object(view, inside, OTHER) == 0.0
        assert s.of_name(view, inside, OTHER) == (0.0, 0.0)
        assert s.of_object(view, beside, OTHER) == BRIEF_SECONDS

    trio.run(main)


def test_nothing_private_is_cached_while_its_name_is_pending(scene: MakeScene) -> None:
    """For so long, the name leads others to the object, and the kernel would show them its attributes."""

    async def main() -> None:
        s = scene()
        os.chown(f"{s.top}/a/file", OWNER, OWNER)
        os.chmod(f"{s.top}/a/file", 0o600)
        s.catch_up()
        view = View(CLOAKED)
        assert s.of_name(view, f"{s.top}/a/file", OWNER)[1] == LONG_SECONDS
        assert s.of_object(view, f"{s.top}/a/file", OWNER) == LONG_SECONDS
        s.invalidation.invalidate(s.look_up(f"{s.top}/a/file"))  # no thread does it, as if a process held the lock
        assert s.of_object(view, f"{s.top}/a/file", OWNER) == 0.0

    trio.run(main)


@pytest.mark.parametrize("is_much", [False, True])
def test_nothing_private_is_cached_below_a_name_that_is_pending(is_much: bool, scene: MakeScene) -> None:
    """If there is much below, the name itself is invalidated last."""

    async def main() -> None:
        s = scene(tuning=replace(STANDARD, names_at_once=0) if is_much else STANDARD)
        view = s.cache_private_file()
        s.invalidation.invalidate(s.look_up(f"{s.top}/a"))
        s.invalidation.invalidate(s.look_up(f"{s.top}/a/file"))
        names = s.notifier
        assert names.is_pending(s.nodes.nodeid(0, s.nodes.root), b"a")
        assert (b"a" in next(iter(names._deferred.values()), ())) == is_much
        assert max(s.of_name(view, f"{s.top}/a/file", OWNER)) <= BRIEF_SECONDS

    trio.run(main)


def test_absent_names_are_invalidated_with_a_directory_of_which_nothing_else_is_cached(scene: MakeScene) -> None:
    async def main() -> None:
        s = scene(GATED)
        s.catch_up()
        directory = s.look_up(f"{s.top}/a/b")
        assert s.of_negative(FIXED, f"{s.top}/a/b/absent") == ABSENT_SECONDS
        assert s.cache.is_known_to(0, directory)
        s.user.do(os.chmod, f"{s.top}/a/b", 0o600)
        s.catch_up()
        assert not s.cache.is_known_to(0, directory)

    trio.run(main)


def test_no_more_absent_names_at_the_top_than_can_be_noted(scene: MakeScene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invalidation, "_MOST_ABSENT", 2)

    async def main() -> None:
        s = scene(GATED)
        s.catch_up()
        answers = [s.of_negative(FIXED, f"{s.top}/absent{number}") for number in range(3)]
        assert answers == [ABSENT_SECONDS, ABSENT_SECONDS, 0.0]
        assert s.of_negative(FIXED, f"{s.top}/a/absent") == ABSENT_SECONDS
        assert s.of_negative(FIXED, f"{s.top}/other", OTHER) == ABSENT_SECONDS  # one of the former is invalidated
        top = s.nodes.nodeid(0, s.nodes.root)
        assert [s.notifier.is_pending(top, b"absent%d" % number) for number in range(2)] == [
            True,
            False,
        ]

    trio.run(main)


# -- contents --------------------------------------------------------------------------------------


def test_pages_are_used_again_only_if_nothing_shows_a_change(scene: MakeScene) -> None:
    s = scene()
    path = f"{s.top}/a/file"
    obj = s.look_up(path)

    def keeps(number: int = 0) -> bool:
        return s.cache.opening(replace(s.enter(View(CLOAKED), obj, STRANGER), number=number))

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
