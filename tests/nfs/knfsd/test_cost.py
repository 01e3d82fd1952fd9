"""What `ls -l` of 1,000 files costs through the kernel's server, for a client that has nothing cached.

The client mounts anew for each listing, with `nosharecache`, so that it has nothing. The server has been asked for the
same before. It is *warm* if its kernel still has what it may remember, and *cold* if that was dropped. (The guest is
client and server at once, so that only dropping drops it for both.)
"""

import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.agents import User
from tests.nfs.knfsd.fixtures import VERSIONS, Share, drop_caches, nfs_mounted, requests, sh

FILES = 1000
ANN = 1000
ROUNDS = {False: 3, True: 1}  # by whether the server is cold

# Requests to the daemon for each file: its attributes are read twice, or three times if the machine is busy:
# nothing may be remembered of what some caller may not see. Where that is nothing, no file is asked for by itself.
MOST = 4.1
# The listing alone takes some 50, and each directory on the way to it a few more.
MOST_AT_ALL = 65


def prepare_public(tree: str) -> None:
    for number in range(FILES):
        Path(tree, f"file-{number:04}").touch()


def prepare_below(tree: str) -> None:
    """The same in a directory below her home."""
    prepare_home(tree)
    home = Path(tree, "home", "ann")
    work = home / "work"
    work.mkdir()
    for path in home.iterdir():
        if path != work:
            path.rename(work / path.name)
    os.chown(work, ANN, ANN)


def prepare_home(tree: str) -> None:
    """The same files in ann's home, for her alone, and that of somebody else beside it."""
    for name, uid in (("ann", ANN), ("ben", ANN + 1)):
        home = Path(tree, "home", name)
        home.mkdir(parents=True)
        prepare_public(str(home))
        for path in (home, *home.iterdir()):
            os.chown(path, uid, uid)
            path.chmod(0o700 if path == home else 0o600)


def listed(place: str) -> float:
    """Do what `ls -l` does; how long it took."""
    began = time.monotonic()
    with os.scandir(place) as entries:
        found = [entry.stat(follow_symlinks=False).st_mode for entry in entries]
    took = time.monotonic() - began
    assert len(found) == FILES
    return took


def check(name: str, below: str, asked: Counter[str]) -> None:
    """Check the number of requests of one listing."""
    assert asked["lookup"] + asked["getattr"] <= MOST * FILES
    # Names and attributes come in large batches.
    assert asked["readdir"] <= FILES / 15
    if name.endswith("subtree_check"):
        # The kernel asks for the home once for each request to the server, and for each name that lies directly in it.
        is_home = name.startswith("caller") and below == "home/ann"
        assert asked["getattr"] <= (1.1 * FILES if is_home else 40)
        assert asked["lookup"] + asked["getxattr"] <= 20
    if name == "all_squash" or (name == "caller view" and not below):
        assert asked.total() <= MOST_AT_ALL, asked


@pytest.mark.timeout(900)  # a machine may be slow
@pytest.mark.parametrize(
    ("prepare", "below"),
    [(prepare_public, ""), (prepare_home, "home/ann"), (prepare_below, "home/ann/work")],
    ids=["public", "home", "below"],
)
def test_ls_l_of_a_thousand_files(
    prepare: Callable[[str], None],
    below: str,
    share: Callable[..., Share],
    user: Callable[..., User],
    record_property: Callable[[str, object], None],
) -> None:
    trees = {
        "caller view": share(f"rw,cloak_list = uid +077 {ANN} 6000", prepare),
        "fixed view": share(f"rw,views = {ANN}:{ANN}", prepare),
        "caller view, subtree_check": share(f"rw,subtree_check,cloak_list = uid +077 {ANN} 6000", prepare),
        "fixed view, subtree_check": share(f"rw,subtree_check,views = {ANN}:{ANN}", prepare),
        "all_squash": share(f"rw,all_squash,anonuid={ANN},anongid={ANN},cloak_list = uid +077 {ANN} 6000", prepare),
    }
    bare = "/srv/bare"
    os.makedirs(bare, exist_ok=True)
    sh("mount", "-t", "tmpfs", "bare", bare)
    prepare(bare)
    sh("exportfs", "-o", "rw,insecure,fsid=4711", f"*:{bare}")
    try:
        direct = Share(trees["fixed view"].service, "bare", bare, bare)
        ann = user(ANN)
        for version in VERSIONS:
            for is_cold in (False, True):
                times, asked = {}, {}
                for name, tree in {"bare": direct, **trees}.items():
                    best, counts = [], []
                    for _ in range(1 + ROUNDS[is_cold]):
                        if is_cold:
                            drop_caches()
                        # What the client learned is to last as long as the listing; on a slow machine that is over 3 s.
                        with nfs_mounted(tree, version, "nosharecache", "acregmin=60,acdirmin=60") as place:
                            before = Counter() if tree is direct else requests(tree)
                            best.append(ann.do(listed, os.path.join(place, below)))
                            counts.append(Counter() if tree is direct else requests(tree) - before)
                    times[name], asked[name] = min(best[1:]), counts[-1]
                for name, now in asked.items():
                    if name == "bare":
                        continue
                    state = "cold" if is_cold else "warm"
                    ratio = times[name] / times["bare"]
                    what = f"v{version}, server {state}, {name}"
                    said = f"{ratio:.1f} x bare, {now.total()} requests: {dict(now)}"
                    record_property(what, said)
                    print(f"ls -l of {FILES} files, {what}: {said}")
                    check(name, below, now)
    finally:
        sh("exportfs", "-u", f"*:{bare}")
        sh("exportfs", "-f")
        time.sleep(1)
        sh("umount", "-l", bare)
