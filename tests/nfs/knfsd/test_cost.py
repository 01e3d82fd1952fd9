"""What `ls -l` of 1,000 files costs through the kernel's server, for a client that has nothing cached."""

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
ROUNDS = 2

# Requests to the daemon for each file: its attributes are read twice, or three times if the machine is busy:
# nothing may be remembered of what some caller may not see. Where that is nothing, no file is asked for by itself.
MOST = 4.1
# The listing takes some 55 requests, and mounting a dozen.
MOST_AT_ALL = 70


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


@pytest.mark.timeout(500)  # a machine may be slow
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
        before = {name: Counter[str]() for name in trees}
        for version in VERSIONS:
            times = {}
            for name, tree in {"bare": direct, **trees}.items():
                best = []
                for _ in range(ROUNDS):
                    drop_caches()
                    # What the client learned is to last as long as the listing; on a slow machine that is over 3 s.
                    with nfs_mounted(tree, version, "nosharecache", "acregmin=60,acdirmin=60") as place:
                        best.append(ann.do(listed, os.path.join(place, below)))
                times[name] = min(best)
                if tree is direct:
                    continue
                now = requests(tree)
                asked = now - before[name]
                before[name] = now
                each = {kind: round(count / ROUNDS) for kind, count in asked.most_common(4)}
                total = round(asked.total() / ROUNDS)
                said = f"v{version}, {name}: {times[name] / times['bare']:.1f} x bare, {total} requests, of them {each}"
                record_property(f"v{version} {name}", said)
                print(f"ls -l of {FILES} files, {said}")
                assert asked["lookup"] + asked["getattr"] <= MOST * FILES * ROUNDS
                # Names and attributes come in large batches.
                assert asked["readdir"] <= FILES * ROUNDS / 15
                if name.endswith("subtree_check"):
                    # The kernel asks for the home once for each request to the server, and for each name that lies
                    # directly in it.
                    is_home = name.startswith("caller") and below == "home/ann"
                    assert asked["getattr"] <= (1.1 * FILES if is_home else 40) * ROUNDS
                    assert asked["lookup"] + asked["getxattr"] <= 20 * ROUNDS
                if name == "all_squash" or (name == "caller view" and not below):
                    assert asked.total() <= MOST_AT_ALL * ROUNDS, asked
    finally:
        sh("exportfs", "-u", f"*:{bare}")
        sh("exportfs", "-f")
        time.sleep(1)
        sh("umount", "-l", bare)
