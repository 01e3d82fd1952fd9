"""The way of one request through the code: how many functions are called, and in how many files."""

import contextlib
import inspect
import os
import stat
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import pyfuse3
import pytest
import trio
import trio.testing
from pyfuse3 import FlagT, InodeT, ModeT

import cloakfs
from cloakfs import linux
from cloakfs.accounts.groups import group_source
from cloakfs.accounts.threadstatus import ThreadStatus
from cloakfs.background.tasks import Tasks
from cloakfs.config.parse import parse_options
from cloakfs.exportmode import LOCAL, ExportMode, Server
from cloakfs.filesystem import Filesystem
from cloakfs.filesystem.reader import Reader
from cloakfs.kernelcache.watch import Watch
from cloakfs.policy import Policy
from cloakfs.tree.index import MEMORY, Index
from cloakfs.tree.nodes import Nodes
from cloakfs.tree.views import Views
from tests.journeys import Journey
from tests.mount.conftest import told
from tests.mount.loopfs import filesystem

OURS = os.path.dirname(cloakfs.__file__) + os.sep
OWNER, STRANGER = 3001, 3002
OPTIONS = parse_options("no_root_squash,cloak_list=uid +077 3000 3999")[0]


class Context:
    """Stands for a request's context."""

    def __init__(self, uid: int) -> None:
        self.uid = self.gid = uid
        self.pid = os.getpid()
        self.umask = 0o022


class Fields:
    """Stands for the fields of a SETATTR that sets the mode."""

    update_mode = True
    update_uid = update_gid = update_size = update_atime = update_mtime = False


class Way:
    """Follows the calls of cloakfs's functions by the task that makes it, and not those by others meanwhile.

    Attributes:
        calls: the file and the name of each function that was called.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self._task = trio.lowlevel.current_task()
        self._begun: set[int] = set()
        self._frames: list[FrameType] = []

    def note(self, frame: FrameType, event: str, _: object) -> None:
        if event != "call" or not frame.f_code.co_filename.startswith(OURS):
            return
        if trio.lowlevel.current_task() is not self._task:
            return
        if frame.f_code.co_flags & (inspect.CO_COROUTINE | inspect.CO_GENERATOR):
            if id(frame) in self._begun:
                return
            self._begun.add(id(frame))
            self._frames.append(frame)  # so that no other one gets its id
        self.calls.append((frame.f_code.co_filename.removeprefix(OURS), frame.f_code.co_qualname))

    def journey(self) -> Journey:
        return Journey.of(file for file, _ in self.calls)


class Scene:
    """A file system without a mount, asked as the kernel asks."""

    def __init__(self, filesystem: Filesystem) -> None:
        self.filesystem = filesystem

    async def measure(self, call: Callable[..., Awaitable[Any]], *args: Any) -> Journey:
        return (await self.follow(call, *args)).journey()

    async def follow(self, call: Callable[..., Awaitable[Any]], *args: Any) -> Way:
        told()  # of what has just changed, more has to be looked at
        way = Way()
        sys.setprofile(way.note)
        try:
            with contextlib.suppress(pyfuse3.FUSEError):
                await call(*args)
        finally:
            sys.setprofile(None)
            linux.act_as_daemon()
        return way

    async def chmod(self, inode: InodeT, mode: int, uid: int) -> Journey:
        attributes = pyfuse3.EntryAttributes()
        attributes.st_mode = ModeT(mode)
        return await self.measure(self.filesystem.setattr, inode, attributes, Fields(), None, Context(uid))

    async def heed(self) -> None:
        """Handle what was reported."""
        self.filesystem.visibility.access_paths.is_up_to_date()

    async def find(self, path: str, uid: int = OWNER) -> InodeT:
        at = InodeT(1)
        for name in path.split("/"):
            at = (await self.filesystem.lookup(at, os.fsencode(name), Context(uid))).st_ino  # type: ignore[arg-type]
        return at


@pytest.fixture
def tree(base: str) -> Iterator[str]:
    """A tree on a file system of its own: changes that others make on the same one would be counted, too."""
    with filesystem("tmpfs", base) as top:
        yield top


class Play(Protocol):
    """Has somebody ask a file system, which is exported as a mode says."""

    def __call__(self, act: Callable[[Scene], Awaitable[None]], mode: ExportMode = LOCAL) -> None: ...


@pytest.fixture
def play(tree: str) -> Iterator[Play]:
    """Has somebody ask a file system whose changes are reported, and that is served without a mount."""
    for name, mode in (("home", stat.S_IFDIR | 0o755), ("home/sub", stat.S_IFDIR | 0o755)):
        os.mkdir(f"{tree}/{name}", mode)
    for name in ("home/file", "home/known", "home/hidden", "home/sub/file"):
        Path(tree, name).write_bytes(b"content")
    for above, directories, files in os.walk(tree):
        for name in (*directories, *files):
            os.chown(f"{above}/{name}", OWNER, OWNER)
    os.chown(f"{tree}/home/hidden", STRANGER + 1, STRANGER + 1)
    os.chmod(f"{tree}/home/hidden", 0o600)

    def run(act: Callable[[Scene], Awaitable[None]], mode: ExportMode = LOCAL) -> None:
        async def main() -> None:
            async with trio.open_nursery() as nursery:
                served.tasks = served.reader.tasks = Tasks(nursery)
                served.tasks.supervise("invalidating", served.cache.invalidation.run)
                await trio.testing.wait_all_tasks_blocked()
                await act(Scene(served))
                nursery.cancel_scope.cancel()

        with (
            contextlib.closing(Index(MEMORY, behind=True)) as index,
            contextlib.closing(Nodes(tree, index)) as nodes,
            contextlib.closing(Watch()) as watch,
        ):
            threads = ThreadStatus()
            views = Views(Policy(OPTIONS), (), frozenset(), index)
            reader = Reader(OPTIONS.prefetch, OPTIONS.prefetch_limits, None)
            served = Filesystem(nodes, views, group_source(None, threads), threads, reader, "/nowhere", mode)
            served.cache.watch(watch)
            trio.run(main)

    yield run
    linux.act_as_daemon()


MOST = {
    "lookup for the first time": Journey(60, 25, 21),
    "lookup of what is known": Journey(29, 17, 3),
    "lookup of an absent name": Journey(30, 19, 8),
    "lookup of a hidden name": Journey(34, 19, 11),
    "getattr": Journey(36, 18, 6),
    "create": Journey(65, 27, 25),
    "rename": Journey(69, 26, 26),
    "chmod": Journey(70, 20, 23),
    "event": Journey(59, 12, 15),
    "read": Journey(8, 5, 1),
    "unlink": Journey(36, 20, 12),
}
"""What each request may take. Lower these when a way gets shorter."""


def test_no_way_gets_longer(tree: str, play: Play) -> None:
    found: dict[str, Journey] = {}

    async def act(s: Scene) -> None:
        fs, ctx = s.filesystem, Context(OWNER)
        home = await s.find("home")
        for name in (b"known", b"absent", b"hidden"):  # after this, who sees files of this mode and owner is known
            await s.measure(fs.lookup, home, name, ctx)
        found["lookup for the first time"] = await s.measure(fs.lookup, home, b"file", ctx)
        found["lookup of what is known"] = await s.measure(fs.lookup, home, b"file", ctx)
        found["lookup of an absent name"] = await s.measure(fs.lookup, home, b"absent", ctx)
        found["lookup of a hidden name"] = await s.measure(fs.lookup, home, b"hidden", ctx)
        for name in (b"new", b"newer"):
            found["create"] = await s.measure(fs.create, home, name, ModeT(stat.S_IFREG | 0o644), FlagT(os.O_RDWR), ctx)
        file = await s.find("home/file")
        found["getattr"] = await s.measure(fs.getattr, file, ctx)
        handle = (await fs.open(file, FlagT(os.O_RDONLY), ctx)).fh  # type: ignore[arg-type]
        for _ in range(2):
            found["read"] = await s.measure(fs.read, handle, 0, 4096)
        await fs.release(handle)
        await s.find("home/file")
        for mode in (0o600, 0o644, 0o600):
            found["chmod"] = await s.chmod(file, mode, OWNER)
            await s.find("home/file")
        await s.heed()
        subprocess.run(["chmod", "600", f"{tree}/home/known"], check=True)
        found["event"] = await s.measure(s.heed)
        found["rename"] = await s.measure(fs.rename, home, b"file", home, b"renamed", FlagT(0), ctx)
        found["unlink"] = await s.measure(fs.unlink, home, b"renamed", ctx)

    play(act)
    assert found.keys() == MOST.keys()
    for name, journey in found.items():
        print(f"{name:26} {journey}")
    longer = [name for name, journey in found.items() if journey.is_longer_than(MOST[name])]
    assert not longer


def test_the_acl_of_the_top_of_an_export_is_known(play: Play) -> None:
    """From Linux 6.2 on, the kernel asks for it at each request of an NFS client."""
    ways: list[Way] = []

    async def act(s: Scene) -> None:
        top, ctx = InodeT(1), Context(0)
        await s.measure(s.filesystem.getattr, top, ctx)
        ways.extend([await s.follow(s.filesystem.getxattr, top, b"system.posix_acl_access", ctx) for _ in range(3)])

    play(act, ExportMode(Server.KNFSD, subtree_check=True))
    assert "tree/calls.py" in dict(ways[0].calls)
    for way in ways[1:]:
        assert "tree/calls.py" not in dict(way.calls)
        assert not way.journey().is_longer_than(Journey(18, 11, 6))


OF_A_HIDDEN_NAME = {
    "_answer_of_statx": "the kernel has told what is there",
    "Finder._hidden": "",
    "note_hidden": "whoever traces the mount is told why",
    "Core._note_hidden_name": "it is counted",
}
"""What is called for a hidden name and not for an absent one: as often whatever is hidden, and wherever."""


@pytest.mark.parametrize("is_known", [False, True], ids=["unknown", "known"])
@pytest.mark.parametrize("mode", [0o600, 0o640, 0o660])
def test_a_hidden_name_takes_the_same_steps_as_an_absent_one(mode: int, is_known: bool, tree: str, play: Play) -> None:
    """Whether or not it depends on the caller's groups, and whether or not somebody else has looked it up."""
    ways: dict[bytes, list[str]] = {}
    os.chmod(f"{tree}/home/hidden", mode)

    async def act(s: Scene) -> None:
        home = await s.find("home")
        if is_known:
            await s.find("home/hidden", STRANGER + 1)
        for _ in range(2):  # at first, it is found out who sees files of this mode and owner
            for name in (b"absent", b"hidden"):
                way = await s.follow(s.filesystem.lookup, home, name, Context(OWNER))
                ways[name] = [function for _, function in way.calls]

    play(act)
    assert [name for name in ways[b"hidden"] if name not in OF_A_HIDDEN_NAME] == ways[b"absent"]
    assert sorted(set(ways[b"hidden"]) - set(ways[b"absent"])) == sorted(OF_A_HIDDEN_NAME)
