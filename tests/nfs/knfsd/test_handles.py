"""File handles: no caller gets further with one than by name, and the owner always reaches the object."""

import errno
import os
import random
import shutil
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.agents import User, names, read, write
from tests.mount.conftest import run
from tests.nfs import nfs3
from tests.nfs.knfsd.fixtures import VERSIONS, NfsHost, Service, Share, drop_caches, exported, nfs_mounted
from tests.waiting import wait_until

ANN, BOB = 1000, 1001
OPTIONS = "rw,no_client_cache,cloak_list = uid +077 1000 1001"


class Site(NamedTuple):
    tree: Share
    places: dict[str, str]
    ann: nfs3.Client
    bob: nfs3.Client

    def root(self) -> bytes:
        return self.ann.mount(self.tree.path)


def prepare(tree: str) -> None:
    """Each has a directory that the other does not see, with more below."""
    for owner in (ANN, BOB):
        path = os.path.join(tree, str(owner))
        for part in ("deep", "er", "still"):
            path = os.path.join(path, part)
        os.makedirs(path)
        Path(path, "file").write_text(f"of {owner}")
        Path(tree, str(owner), "file").write_text(f"of {owner}")
        for at, directories, files in os.walk(os.path.join(tree, str(owner))):
            os.chown(at, owner, owner)
            os.chmod(at, 0o700)
            for name in (*directories, *files):
                os.chown(os.path.join(at, name), owner, owner)
                os.chmod(os.path.join(at, name), 0o700)
    Path(tree, "public").write_text("for all")


@pytest.fixture(scope="module")
def site(service: Service) -> Iterator[Site]:
    with ExitStack() as stack:
        tree = stack.enter_context(exported(service, OPTIONS, prepare))
        places = {version: stack.enter_context(nfs_mounted(tree, version)) for version in VERSIONS}
        clients = [nfs3.Client("127.0.0.1", uid, uid) for uid in (ANN, BOB)]
        for client in clients:
            stack.callback(client.close)
        yield Site(tree, places, *clients)


@pytest.fixture
def one_thread(nfs_host: NfsHost) -> Iterator[None]:
    nfs_host.set_threads(1)
    yield
    nfs_host.set_threads(8)


def everything(client: nfs3.Client, handle: bytes) -> set[int]:
    """The statuses of all that can be asked about a file or directory. (What is neither, the kernel says by itself.)"""
    answers = {
        client.getattr(handle)[0],
        client.access(handle)[0],
        client.read(handle)[0],
        client.write(handle, b"overwritten"),
        client.lookup(handle, "file")[0],
        client.list(handle)[0],
    }
    return answers - {nfs3.ISDIR, nfs3.NOTDIR}


def test_replayed_by_another(site: Site) -> None:
    """At once, and when the kernel has forgotten the file and is asked by the other user first."""
    root = site.root()
    for path in ((str(ANN),), (str(ANN), "file"), (str(ANN), "deep", "er"), (str(ANN), "deep", "er", "still", "file")):
        handle = site.ann.walk(root, *path)
        for _ in range(2):
            assert everything(site.bob, handle) == {nfs3.STALE}, path
            assert site.ann.getattr(handle)[0] == nfs3.OK, path
            drop_caches()
            assert everything(site.bob, handle) == {nfs3.STALE}, path
            assert site.ann.getattr(handle)[1][1] == ANN, path
            drop_caches()
    assert Path(site.tree.real(str(ANN), "file")).read_text() == f"of {ANN}"


def test_reconnected_on_a_thread_that_served_another(site: Site, one_thread: None) -> None:
    """The kernel asks its way up with the identity of the caller that the thread served before."""
    root = site.root()
    handle = site.ann.walk(root, str(ANN), "deep", "er", "still")
    theirs = site.ann.walk(root, str(ANN))
    for _ in range(3):
        assert site.bob.list(root)[1] == sorted([str(BOB), "public"])
        drop_caches()
        assert site.bob.getattr(root)[0] == nfs3.OK
        assert site.ann.list(handle) == (nfs3.OK, ["file"])
        # What the kernel was told on the way is not for Bob, whether it knows the directory again or not.
        assert everything(site.bob, handle) == {nfs3.STALE}
        drop_caches()
        assert site.bob.getattr(root)[0] == nfs3.OK
        assert everything(site.bob, handle) == {nfs3.STALE}
        assert everything(site.bob, theirs) == {nfs3.STALE}
        assert site.ann.walk(handle, "file")


@pytest.mark.parametrize("version", VERSIONS)
def test_a_working_directory_is_reconnected(
    site: Site, version: str, one_thread: None, user: Callable[..., User]
) -> None:
    ann, bob, place = user(ANN), user(BOB), site.places[version]
    mine = os.path.join(place, str(ANN), "deep", "er")
    ann.do(os.chdir, mine)
    for _ in range(3):
        bob.do(names, place)
        drop_caches()
        assert bob.do(names, place) == [str(BOB), "public"]
        assert ann.do(names, ".") == ["still"]
        assert ann.do(read, "still/file") == f"of {ANN}".encode()
        assert bob.error(names, mine) == errno.ENOENT
        assert bob.error(os.stat, os.path.join(mine, "still")) == errno.ENOENT
    ann.do(os.chdir, "/")


def test_guessed(site: Site) -> None:
    """A handle ends with nodeid and generation: neighbours of known ones, and other generations, are refused."""
    root = site.root()
    handle = site.bob.walk(root, "public")
    for _ in range(2):
        random.seed(1)
        for _ in range(300):
            *start, high, low, generation = struct.unpack("<" + "I" * (len(handle) // 4), handle)
            low = random.choice([low, low + random.randint(1, 20), max(low - random.randint(1, 20), 2)])
            high = random.choice([high, high, high ^ 1 << random.randrange(32)])
            generation = random.choice([0, 1, generation, generation + 1, random.getrandbits(32)]) & 0xFFFFFFFF
            made = struct.pack("<" + "I" * (len(handle) // 4), *start, high, low, generation)
            if made != handle:
                assert site.bob.getattr(made)[0] in (nfs3.STALE, nfs3.BADHANDLE), made.hex()
        drop_caches()
    assert site.bob.getattr(handle)[0] == nfs3.OK


def test_of_another_export(site: Site, share: Callable[..., Share]) -> None:
    """The same tree for another client: from one export's handles none of the other's can be made."""
    narrow = share("rw")
    site.tree.service.write(narrow.name, f"{site.tree.source} 127.0.0.0/8(rw,insecure)\n")
    site.tree.service.take_over()
    other = site.bob.mount(f"{site.tree.path}@127.0.0.0_8")
    mine = site.ann.walk(site.root(), str(ANN))
    fsid = len(other) - 0  # a root's handle is nothing but a header and the export's fsid
    made = other[:4] + other[4:fsid] + mine[len(other) :]
    made = made[:3] + mine[3:4] + made[4:]  # the kind of file id
    assert len(made) == len(mine)
    assert made != mine
    for client in (site.ann, site.bob):
        for _ in range(2):
            assert client.getattr(made)[0] == nfs3.STALE
            drop_caches()
    narrow.set("rw")


def test_of_another_view(share: Callable[..., Share]) -> None:
    """Fixed views of one mount: nodeids differ in the view's bits, and generations with them."""

    def prepare_views(tree: str) -> None:
        Path(tree, "secret").write_text("ann's")
        os.chown(Path(tree, "secret"), ANN, ANN)
        os.chmod(Path(tree, "secret"), 0o600)

    tree = share("rw,views = 1000:1000 1001:1001,cloak_list = uid +077 1000 1001", prepare_views)
    ann, bob = (nfs3.Client("127.0.0.1", uid, uid) for uid in (ANN, BOB))
    root = ann.mount(tree.path)
    assert ann.list(root) == (nfs3.OK, [f"@{ANN}"])
    assert bob.list(root) == (nfs3.OK, [f"@{BOB}"])
    secret, bobs = ann.walk(root, f"@{ANN}", "secret"), bob.walk(root, f"@{BOB}")
    words = [list(struct.unpack("<" + "I" * (len(handle) // 4), handle)) for handle in (secret, bobs)]
    made = words[0][:-3] + words[1][-3:-2] + words[0][-2:]  # Bob's view, Ann's file
    crafted = struct.pack(f"<{len(made)}I", *made)
    assert len(crafted) == len(secret) != len(root)
    for _ in range(2):
        assert bob.getattr(crafted)[0] in (nfs3.STALE, nfs3.BADHANDLE)
        assert bob.getattr(secret)[0] != nfs3.OK
        assert ann.read(secret) == (nfs3.OK, b"ann's")
        drop_caches()
    for client in (ann, bob):
        client.close()


@pytest.mark.parametrize("version", VERSIONS)
def test_held_over_everything(site: Site, version: str, user: Callable[..., User]) -> None:
    """A client that holds a file and a directory goes on after a rename elsewhere, forgetting, and a new daemon."""
    ann, place = user(ANN), site.places[version]
    ann.do(os.mkdir, os.path.join(place, str(ANN), f"held-{version}"), 0o700)
    ann.do(Path(place, str(ANN), f"held-{version}", "file").write_text, "held")
    file = ann.do(os.open, os.path.join(place, str(ANN), f"held-{version}", "file"), os.O_RDONLY)
    ann.do(os.chdir, os.path.join(place, str(ANN), f"held-{version}"))
    handle = site.ann.walk(site.root(), str(ANN), f"held-{version}", "file")

    def goes_on() -> None:
        assert ann.do(names, ".") == ["file"]
        assert ann.do(read, "file") == b"held"
        assert ann.do(os.fstat, file).st_size == 4
        assert site.ann.read(handle) == (nfs3.OK, b"held")

    goes_on()
    os.rename(site.tree.real(str(ANN), f"held-{version}"), site.tree.real(str(ANN), "deep", f"moved-{version}"))
    drop_caches()
    goes_on()
    before = site.tree.pid
    os.kill(before, 9)

    def is_served() -> bool:
        with suppress(OSError):
            return ann.do(names, ".") == ["file"]
        return False

    wait_until(is_served, 90)
    assert site.tree.pid != before
    goes_on()
    ann.do(os.close, file)
    ann.do(os.chdir, "/")
    wait_until(lambda: run("export", "status").returncode == 0)  # its threads may be restarted just now


@pytest.mark.parametrize("options", ["rw", "rw,subtree_check", "rw,all_squash,anonuid=1000,anongid=1000"])
def test_what_was_moved_out_of_the_tree(service: Service, options: str, user: Callable[..., User]) -> None:
    """Nothing is hidden. It stays out of reach when kernel and daemon have forgotten it, until it is back."""
    with ExitStack() as stack:
        tree = stack.enter_context(exported(service, options, prepare_open))
        client = nfs3.Client("127.0.0.1", ANN, ANN)
        stack.callback(client.close)
        root = client.mount(tree.path)
        handles = [client.walk(root, *path) for path in (("dir",), ("dir", "sub"), ("dir", "sub", "file"), ("file",))]
        other = client.walk(root, "other")
        people = [user(ANN) for _ in VERSIONS]
        for one, version in zip(people, VERSIONS, strict=True):
            one.do(os.chdir, os.path.join(stack.enter_context(nfs_mounted(tree, version)), "dir"))
            stack.callback(one.do, os.chdir, "/")
            assert one.do(names, ".") == ["sub"]
        outside = f"{tree.source}.outside"
        os.mkdir(outside)
        try:
            for name in ("dir", "file"):
                os.rename(tree.real(name), os.path.join(outside, name))
            for _ in range(2):
                deadline = time.monotonic() + 30
                while any(everything(client, handle) != {nfs3.STALE} for handle in handles):
                    assert time.monotonic() < deadline, [everything(client, handle) for handle in handles]
                for one in people:
                    assert one.error(write, "new", b"x") in (errno.ESTALE, errno.ENOENT)
                assert client.list(other) == (nfs3.OK, [])
                drop_caches()
            assert names(os.path.join(outside, "dir")) == ["sub"]
            assert read(os.path.join(outside, "dir", "sub", "file")) == b"content"
            os.rename(os.path.join(outside, "dir"), tree.real("other", "back"))
            os.rename(os.path.join(outside, "file"), tree.real("file"))
            deadline = time.monotonic() + 30
            while any(client.getattr(handle)[0] != nfs3.OK for handle in handles):
                assert time.monotonic() < deadline, [client.getattr(handle)[0] for handle in handles]
            assert client.list(handles[0]) == (nfs3.OK, ["sub"])
        finally:
            shutil.rmtree(outside)


def prepare_open(tree: str) -> None:
    """All users may do everything."""
    os.makedirs(os.path.join(tree, "dir", "sub"))
    os.mkdir(os.path.join(tree, "other"))
    for name in ("file", "dir/sub/file"):
        Path(tree, name).write_text("content")
        os.chmod(os.path.join(tree, name), 0o666)
    for name in ("dir", "dir/sub", "other"):
        os.chmod(os.path.join(tree, name), 0o777)
