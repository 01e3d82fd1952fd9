"""Exports with subtree_check: what is private is cached for its owner, and no other user gets at it by a handle.

The kernel checks all directories above at each request, as the caller. It asks the daemon about the uppermost one of
which only the owner was told, so that the daemon refuses others there, whatever the kernel has cached below.
"""

import errno
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.agents import User, read
from tests.mount import conftest
from tests.nfs import nfs3
from tests.nfs.knfsd.fixtures import VERSIONS, NfsHost, Share, drop_caches, requests, sh
from tests.nfs.knfsd.test_all_squash import look
from tests.nfs.knfsd.test_handles import everything
from tests.waiting import wait_until

ANN, BOB, GROUP = 1000, 1001, 1600
CLOAK = "cloak_list = uid +077 1 6000"
CHECKED = f"rw,subtree_check,{CLOAK}"
# A client may claim any groups for its users.
CLAIMS = {"no group": (BOB, ()), "the owner's groups": (ANN, (ANN, GROUP, 0))}

KERNEL = tuple(int(number) for number in os.uname().release.split(".")[:2])

MakeShare = Callable[..., Share]
MakeUser = Callable[..., User]
MountNfs = Callable[..., str]


def fill(tree: str) -> None:
    """A home for each, for its owner alone, with a letter at the top and further down; and a place for all."""
    for name, uid in (("ann", ANN), ("bob", BOB)):
        deep = Path(tree, "home", name, "deep", "er")
        deep.mkdir(parents=True)
        home = deep.parent.parent
        for path in (home / "letter", deep / "letter"):
            path.write_text(name)
            path.chmod(0o600)
        # Nothing but the home itself keeps others out.
        for path, mode in ((deep, 0o755), (deep.parent, 0o755), (home, 0o700)):
            path.chmod(mode)
        for at, directories, files in os.walk(home):
            for each in (at, *(os.path.join(at, other) for other in (*directories, *files))):
                os.chown(each, uid, uid)
    public = Path(tree, "public")
    public.mkdir()
    public.chmod(0o777)


def test_directories_look_changed_in_each_answer(share: MakeShare) -> None:
    """With no_client_cache, also where the answer would be the same as before."""
    tree = share(f"{CHECKED},no_client_cache", fill)
    with closing(nfs3.Client("127.0.0.1", ANN, ANN)) as ann:
        root = ann.mount(tree.path)
        for path in (("home", "ann"), ("home", "ann", "deep")):
            handle = ann.walk(root, *path)
            assert len({ann.changed(handle) for _ in range(8)}) == 8


class Site(NamedTuple):
    tree: Share
    root: bytes
    ann: nfs3.Client
    bob: nfs3.Client

    def requests_for(self, handle: bytes) -> int:
        """How many requests for attributes it takes the owner to get them by a handle."""
        before = requests(self.tree)
        assert self.ann.getattr(handle)[0] == nfs3.OK
        counts = requests(self.tree) - before
        return counts["getattr"] + counts["lookup"]

    def remember(self, *path: str) -> bytes:
        """Have the kernel remember what is at a path in the owner's home: its handle."""
        handle = self.ann.walk(self.root, "home", "ann", *path)
        began = time.monotonic()
        while self.requests_for(handle) != 1:  # for the home
            assert time.monotonic() - began < 20  # on a busy machine, something may have to be forgotten first
        return handle


@pytest.fixture
def site(share: MakeShare) -> Iterator[Site]:
    with ExitStack() as stack:
        tree = share(CHECKED, fill)
        ann, bob = (nfs3.Client("127.0.0.1", uid, uid) for uid in (ANN, BOB))
        stack.callback(ann.close)
        stack.callback(bob.close)
        yield Site(tree, ann.mount(tree.path), ann, bob)


DEEP = ("deep", "er", "letter")
PATHS = ((), ("letter",), ("deep",), ("deep", "er"), DEEP)


@pytest.mark.parametrize("claims", CLAIMS)
def test_replayed_by_another(claims: str, site: Site) -> None:
    gid, groups = CLAIMS[claims]
    bob = nfs3.Client("127.0.0.1", BOB, gid, groups)
    for path in PATHS:
        handle = site.remember(*path)
        for _ in range(2):
            assert everything(bob, handle) == {nfs3.STALE}, path
            assert site.ann.getattr(handle)[1][1] == ANN, path
            drop_caches()
            assert everything(bob, handle) == {nfs3.STALE}, path
            assert site.ann.getattr(handle)[1][1] == ANN, path
    bob.close()


@pytest.mark.parametrize("version", VERSIONS)
def test_on_a_client_that_both_use(version: str, share: MakeShare, mount_nfs: MountNfs, user: MakeUser) -> None:
    tree = share(f"{CHECKED},no_client_cache", fill)
    at = mount_nfs(tree, version, "noac")
    ann, bob = user(ANN), user(BOB)
    for path in ("home/ann/deep/er/letter", "home/ann/deep", "home/ann/letter"):
        for _ in range(3):
            assert ann.do(os.stat, f"{at}/{path}").st_uid == ANN
            assert bob.error(os.stat, f"{at}/{path}") in (errno.ENOENT, errno.EACCES, errno.ESTALE), path
    assert ann.do(read, f"{at}/home/ann/letter") == b"ann"


@pytest.mark.parametrize("version", VERSIONS)
def test_it_is_remembered_for_the_owner(version: str, share: MakeShare, mount_nfs: MountNfs, user: MakeUser) -> None:
    tree = share(CHECKED, fill)
    at = mount_nfs(tree, version, "noac")  # so the client asks for the attributes each time
    ann = user(ANN)
    ann.do(look, f"{at}/home/ann/deep/er/letter")
    before = requests(tree)
    ann.do(look, f"{at}/home/ann/deep/er/letter")
    counts = requests(tree) - before
    # The server asks for the home alone, each time that it looks at anything in it.
    assert counts["lookup"] <= 5, counts
    # Later kernels ask for the ACL of the top each time.
    assert counts["getxattr"] <= (5 if KERNEL < (6, 2) else 250), counts


@pytest.mark.parametrize("is_through_the_mount", [False, True])
def test_a_home_that_is_opened_for_all(
    is_through_the_mount: bool, site: Site, mount_nfs: MountNfs, user: MakeUser
) -> None:
    """What is below it and remains hidden is forgotten before any other user gets through."""
    at = mount_nfs(site.tree, "3", "noac")
    handles = {path: site.remember(*path) for path in PATHS}
    if is_through_the_mount:
        user(ANN).do(os.chmod, f"{at}/home/ann", 0o755)
    else:
        os.chmod(site.tree.real("home/ann"), 0o755)
    for path, handle in handles.items():
        status, _ = site.bob.getattr(handle)
        assert status == (nfs3.STALE if path in (("letter",), DEEP) else nfs3.OK), path
        assert site.ann.getattr(handle)[0] == nfs3.OK
    assert site.bob.lookup(handles["deep", "er"], "letter")[0] in (nfs3.NOENT, nfs3.STALE)
    assert site.requests_for(handles[DEEP]) > 1
    for path, handle in handles.items():
        assert (site.bob.getattr(handle)[0] == nfs3.OK) is (path not in (("letter",), DEEP)), path
    os.chmod(site.tree.real("home/ann", *DEEP), 0o644)
    assert site.bob.getattr(handles[DEEP])[0] == nfs3.OK


def test_moved_to_where_all_can_go(site: Site) -> None:
    handle, directory = site.remember(*DEEP), site.remember("deep")
    os.rename(site.tree.real("home/ann/deep"), site.tree.real("public/deep"))
    assert site.bob.getattr(handle)[0] == nfs3.STALE
    assert site.bob.walk(site.root, "public", "deep", "er")
    assert site.bob.getattr(directory)[0] == nfs3.OK
    for _ in range(2):
        assert site.bob.getattr(handle)[0] == nfs3.STALE
        assert site.ann.walk(site.root, "public", *DEEP)
        assert site.ann.getattr(handle)[0] == nfs3.OK


def test_moved_away_from_where_all_can_go(site: Site) -> None:
    """The kernel does not learn of a move behind the mount, and goes on to let all users through at the old place."""
    os.rename(site.tree.real("home/ann/deep"), site.tree.real("public/deep"))
    handle = site.ann.walk(site.root, "public", *DEEP)
    home = site.ann.walk(site.root, "home", "ann")
    assert site.ann.getattr(home)[0] == nfs3.OK
    os.rename(site.tree.real("public/deep"), site.tree.real("home/ann/deep"))
    for _ in range(3):
        conftest.told()
        for _ in range(3):
            assert site.ann.getattr(handle)[0] == nfs3.OK
        assert site.bob.getattr(handle)[0] == nfs3.STALE


def test_with_another_name_for_a_while(site: Site) -> None:
    """The kernel may keep the other name longer than the real tree, and lets all users through there."""
    handle = site.remember(*DEEP)
    os.link(site.tree.real("home/ann", *DEEP), site.tree.real("public/link"))
    assert site.ann.walk(site.root, "public", "link")
    assert site.bob.getattr(handle)[0] == nfs3.STALE
    os.unlink(site.tree.real("public/link"))
    for _ in range(3):
        assert site.ann.walk(site.root, "home", "ann", *DEEP) == handle
        for _ in range(3):
            assert site.ann.getattr(handle)[0] == nfs3.OK
        assert site.bob.getattr(handle)[0] == nfs3.STALE
        conftest.told()


def test_reconnected_on_a_thread_that_served_another(site: Site, nfs_host: NfsHost) -> None:
    handle = site.remember("deep", "er")
    nfs_host.set_threads(1)
    try:
        for _ in range(3):
            drop_caches()
            assert site.bob.getattr(site.root)[0] == nfs3.OK
            assert site.ann.list(handle) == (nfs3.OK, ["letter"])
            assert everything(site.bob, handle) == {nfs3.STALE}
            drop_caches()
            assert everything(site.bob, handle) == {nfs3.STALE}
            assert site.ann.walk(handle, "letter")
    finally:
        nfs_host.set_threads(8)


def test_it_is_remembered_again_for_a_client_that_goes_on_by_handle(site: Site) -> None:
    handle = site.remember(*DEEP)
    drop_caches()
    for _ in range(3):
        site.ann.getattr(handle)
    assert site.requests_for(handle) <= 2
    assert site.bob.getattr(handle)[0] == nfs3.STALE


@pytest.mark.parametrize("views", [f"{ANN}:{ANN}", f"{ANN}:{ANN} {BOB}:{BOB}"])
def test_a_fixed_view(views: str, share: MakeShare) -> None:
    """Only users who may enter a view get past its top directory."""
    tree = share(f"rw,subtree_check,views = {views},{CLOAK}", fill)
    ann, bob, carol, root = (nfs3.Client("127.0.0.1", uid, uid) for uid in (ANN, BOB, BOB + 1, 0))
    top = ann.mount(tree.path)
    if " " in views:
        top = ann.walk(top, f"@{ANN}")
    handles = [
        top,
        *(ann.walk(top, *path) for path in (("public",), ("home", "ann", "letter"), ("home", "ann", *DEEP))),
    ]
    for handle in handles:
        for client in (ann, root):
            assert client.getattr(handle)[0] == nfs3.OK
        before = requests(tree)
        assert ann.getattr(handle)[0] == nfs3.OK
        assert (requests(tree) - before)["getattr"] == (2 if " " in views else 0)  # for the top, and the list of views
        for _ in range(2):
            for client in (bob, carol):
                if handle != top:
                    assert everything(client, handle) <= {nfs3.STALE, nfs3.ACCES}
                elif " " in views:
                    assert client.getattr(handle)[0] in (nfs3.STALE, nfs3.ACCES)
                else:  # its attributes are no secret, and the kernel itself says who may do what
                    assert client.access(handle)[1] == 0
                    assert client.lookup(handle, "public")[0] == client.list(handle)[0] == nfs3.ACCES
            drop_caches()
    for client in (ann, bob, carol, root):
        client.close()


def test_a_reload_turns_it_on_and_off(site: Site) -> None:
    handle = site.remember(*DEEP)
    for options, is_checked in ((f"rw,{CLOAK}", False), (CHECKED, True)):
        result = site.tree.set(options)
        assert result["renewed"] == [site.tree.path]
        began = time.monotonic()
        while site.ann.getattr(handle)[0] != nfs3.OK:
            assert time.monotonic() - began < 30
        for _ in range(3):
            site.ann.getattr(handle)
        assert site.bob.getattr(handle)[0] == nfs3.STALE
        before = requests(site.tree)
        site.ann.getattr(handle)
        assert sum((requests(site.tree) - before).values()) >= 1
        line = next(
            line for line in Path("/var/lib/nfs/etab").read_text().splitlines() if line.startswith(site.tree.path)
        )
        assert ("no_subtree_check" not in line) is is_checked


def _acl(path: str) -> str:
    return subprocess.run(["getfacl", "-cnp", path], capture_output=True, text=True, check=True).stdout


def test_the_acl_of_the_top(share: MakeShare, mount_nfs: MountNfs, user: MakeUser) -> None:
    """Clients see it as it is on the tree, also when it is set or removed behind the mount."""
    tree = share(CHECKED, fill)
    at, ann = mount_nfs(tree, "3", "noac"), user(ANN)
    plain = ann.do(_acl, at)
    assert "user:" not in plain.replace("user::", "")
    for _ in range(3):
        assert ann.do(_acl, at) == plain
        assert ann.do(read, f"{at}/home/ann/letter") == b"ann"
    sh("setfacl", "-m", f"u:{BOB}:rwx", tree.real())
    wait_until(lambda: f"user:{BOB}:rwx" in ann.do(_acl, at))
    sh("setfacl", "-b", tree.real())
    wait_until(lambda: ann.do(_acl, at) == plain)
