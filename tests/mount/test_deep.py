"""Trees that are deeper than any path can lead: they are listed and removed, and keep nobody else from working."""

import contextlib
import errno
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from cloakfs import linux
from cloakfs.tree import calls
from cloakfs.tree.index import Index
from cloakfs.tree.nodes import Nodes
from cloakfs.tuning import Tuning
from tests.agents import User, write
from tests.mount.conftest import Mount, daemons_with, told

MakeMount = Callable[..., Mount]
MakeUser = Callable[..., User]

CLOAKED = "no_root_squash,cloak_list=uid +077 1 9999"
NAME = "d" * 200


def dig(top: str, name: str, depth: int) -> int:
    """Make so many directories in each other, with relative names, a file in the last; return how many there are."""
    os.chdir(top)
    made = 0
    with contextlib.suppress(OSError):
        for _ in range(depth):
            os.mkdir(name)
            os.chdir(name)
            made += 1
    write("file", b"deep")
    return made


def look_around() -> list[str]:
    with open("file", "rb") as file:
        assert file.read() == b"deep"
    return os.listdir(".")


def remove(path: str) -> str:
    return subprocess.run(["rm", "-rf", path], capture_output=True, text=True, check=False, cwd="/").stderr[-300:]


@pytest.mark.parametrize("options", ["rw", CLOAKED])
def test_what_no_path_leads_to_is_listed_and_removed(options: str, tree: str, mount: MakeMount, user: MakeUser) -> None:
    os.chmod(tree, 0o1777)
    m, someone = mount("-o", options), user(2001)
    assert someone.do(dig, m.path, NAME, 30) == 30
    assert someone.do(look_around) == ["file"]
    # Also after it has become another one behind the mount.
    someone.do(os.rename, "file", "other")
    someone.do(os.rename, "other", "file")
    above = someone.do(os.open, "..", os.O_RDONLY)
    assert someone.do(os.listdir, above) == [NAME]
    someone.do(os.rename, f"../{NAME}", "../renamed")
    assert someone.do(look_around) == ["file"]
    assert someone.do(os.listdir, above) == ["renamed"]
    someone.do(os.close, above)
    assert someone.do(remove, m.at(NAME)) == ""
    assert os.listdir(tree) == []


def behind_the_mount(top: str, depth: int) -> int:
    """Open the directory so deep on the real tree."""
    fd = os.open(top, os.O_PATH)
    for _ in range(depth):
        below = os.open(NAME, os.O_PATH, dir_fd=fd)
        os.close(fd)
        fd = below
    return fd


@pytest.mark.parametrize("options", ["rw", CLOAKED])
def test_what_happens_behind_the_mount_where_no_path_leads(
    options: str, tree: str, mount: MakeMount, user: MakeUser
) -> None:
    os.chmod(tree, 0o1777)
    m, someone, other = mount("-o", options), user(2001), user(2002)
    someone.do(dig, m.path, NAME, 30)
    other.do(os.chdir, "/")
    fd = behind_the_mount(tree, 29)
    try:
        os.rename(NAME, "renamed", src_dir_fd=fd, dst_dir_fd=fd)
        told()
        assert someone.do(look_around) == ["file"]
        assert someone.do(os.listdir, "..") == ["renamed"]
        if options == CLOAKED:
            os.chown("renamed", 2003, 2003, dir_fd=fd)
            os.chmod("renamed", 0o700, dir_fd=fd)
            told()
            assert someone.error(look_around) in (errno.ESTALE, errno.ENOENT)
            assert someone.do(os.listdir, "..") == []
            os.chown("renamed", 2001, 2001, dir_fd=fd)
            told()
            assert someone.do(os.listdir, "..") == ["renamed"]
        someone.do(os.chdir, "/")
        assert someone.do(remove, m.at(NAME)) == ""
    finally:
        os.close(fd)


def dig_behind(top: str, uid: int, depth: int) -> None:
    os.chdir(top)
    for _ in range(depth):
        os.mkdir("d")
        os.chown("d", uid, uid)
        os.chdir("d")
    write("file", b"deep")
    os.chown("file", uid, uid)


def go_down(top: str, depth: int) -> None:
    os.chdir(top)
    for _ in range(depth):
        os.chdir("d")


LEVELS = 200


def make_here() -> tuple[int, int]:
    """Errors of mkdir(2) and of making a file."""
    errors = []
    for call in (partial(os.mkdir, "new"), partial(write, "new-file", b"x")):
        try:
            call()
            errors.append(0)
        except OSError as exc:
            errors.append(exc.errno or 0)
    return errors[0], errors[1]


def test_a_tree_does_not_become_deeper_than_it_may(tree: str, mount: MakeMount, user: MakeUser) -> None:
    """What is deeper already is read, written, and removed."""
    digger, someone = user(0), user(2001)
    digger.do(dig_behind, tree, 2001, LEVELS + 400)
    os.chmod(tree, 0o1777)
    with daemons_with(tuning=Tuning(most_levels=LEVELS)):
        m = mount("-o", CLOAKED)
    someone.do(go_down, m.path, LEVELS - 1)
    assert someone.do(make_here) == (0, 0)
    someone.do(os.rmdir, "new")
    someone.do(os.mkdir, m.at("moved"))
    assert someone.error(os.rename, m.at("moved"), "d/moved") == errno.ENAMETOOLONG
    someone.do(os.rename, m.at("moved"), "moved")
    someone.do(os.chdir, "d")
    assert someone.do(make_here) == (errno.ENAMETOOLONG, 0)
    someone.do(write, m.at("file-above"), b"x")
    someone.do(os.rename, m.at("file-above"), "new-file")  # write, then rename: files have no levels
    someone.do(go_down, ".", 400)
    assert someone.do(look_around) == ["file"]
    digger.do(os.chdir, "/")
    someone.do(os.chdir, "/")
    assert someone.do(remove, m.at("d")) == ""
    assert os.listdir(tree) == []


# -- what it takes ---------------------------------------------------------------------------------


@pytest.fixture
def nodes(tree: str, base: str) -> Iterator[Nodes]:
    with (
        contextlib.closing(Index(os.path.join(base, "nodes.sqlite"))) as index,
        contextlib.closing(Nodes(tree, index)) as made,
    ):
        yield made
    subprocess.run(["rm", "-rf", tree], check=True)
    os.mkdir(tree)


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_deep_place_on_a_slow_disk_takes_few_descriptors(nodes: Nodes) -> None:
    """They were as many as there are levels, so that others got EMFILE."""
    at = nodes.root
    for _ in range(1000):
        os.mkdir(b"d", dir_fd=nodes.descriptors.fd(at))
        at = nodes.registry.resolve(os.open(b"d", os.O_PATH, dir_fd=nodes.descriptors.fd(at)), at, b"d")
        at.lookups += 1
    at.filesystem.slow_until = time.monotonic() + 1000
    assert nodes.mounts.waits(at)
    for one in nodes.registry.objects():
        if one is not nodes.root:
            nodes.descriptors.close(one)
    before, most = open_descriptors(), 0
    looked: set[tuple[int, bytes]] = set()
    nodes.descriptors.max_fds = 100
    for part in nodes.prefaulter.parts(at):
        look = nodes.prefaulter.prefault(at, None, part)
        most = max(most, open_descriptors())
        found = look()
        most = max(most, open_descriptors())
        assert not nodes.prefaulter.prefaulted(found)
        looked |= found.inodes.keys()
    assert len(looked) == 1000
    assert most - before < 500


def test_what_the_kernel_forgot_of_a_deep_tree_is_dropped_little_by_little(nodes: Nodes) -> None:
    way = [nodes.root]
    for _ in range(1000):
        os.mkdir(b"d", dir_fd=nodes.descriptors.fd(way[-1]))
        way.append(
            nodes.registry.resolve(os.open(b"d", os.O_PATH, dir_fd=nodes.descriptors.fd(way[-1])), way[-1], b"d")
        )
    way[-1].lookups = 1
    assert nodes.forget(way[-1].number, 1)
    left = len(nodes.registry.objects())
    assert left > 900
    while nodes.registry.drop_unused():
        assert left - len(nodes.registry.objects()) <= 64
        left = len(nodes.registry.objects())
    assert nodes.registry.objects() == [nodes.root]


def test_a_name_that_no_path_tells_is_found_among_few(base: str) -> None:
    os.mkdir(f"{base}/large")
    for number in range(100):
        Path(base, "large", str(number)).mkdir()
    fd = os.open(f"{base}/large", os.O_PATH)
    try:
        inode = os.stat(f"{base}/large/77").st_ino
        assert calls.name_in(linux.ROOT, fd, inode, 100) == b"77"
        assert calls.name_in(linux.ROOT, fd, inode, 0) is None
        assert calls.name_in(linux.ROOT, fd, 1, 100) is None
    finally:
        os.close(fd)
