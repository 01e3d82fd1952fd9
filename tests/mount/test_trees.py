"""Nodeids, inode numbers and file handles are permanent, on every kind of backing file system."""

import contextlib
import errno
import os
import random
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cloakfs import linux
from cloakfs.state.runtime import STATE_DIR, mount_key
from cloakfs.tree.index import Index
from tests.agents import User, read, write
from tests.mount.conftest import Mount, is_mounted, mounted, run
from tests.mount.loopfs import filesystem, has_handles, require_handles
from tests.processes import kill
from tests.waiting import wait_until

KINDS = ["ext4", "xfs", "btrfs", "tmpfs", "overlay-nfs"]
NULL = "no_root_squash"
CLOAKED = "no_root_squash,cloak_list=uid +007 1 9999"


def handle_of(path: str) -> bytes:
    fd = os.open(path, os.O_PATH | os.O_NOFOLLOW)
    try:
        return linux.name_to_handle(fd)[0]
    finally:
        os.close(fd)


def by_handle(mountpoint: str, handle: bytes) -> bytes:
    """What the file that the handle names contains."""
    mount_fd = os.open(mountpoint, os.O_RDONLY)
    try:
        fd = linux.open_by_handle(mount_fd, handle, os.O_RDONLY)
        try:
            return os.read(fd, 100)
        finally:
            os.close(fd)
    finally:
        os.close(mount_fd)


def error_by_handle(mountpoint: str, handle: bytes) -> int:
    try:
        by_handle(mountpoint, handle)
    except OSError as exc:
        return exc.errno or -1
    return 0


def drop_caches() -> None:
    """The kernel forgets every inode that nobody uses: FORGET."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("2\n")


@contextlib.contextmanager
def steady(source: str, base: str) -> Iterator[Callable[..., contextlib.AbstractContextManager[Mount]]]:
    """Mounts and unmounts of one source at one place, whose state is kept until the end."""
    path = os.path.join(base, "mnt")
    os.mkdir(path)
    try:
        yield lambda *arguments: mounted(source, path, *arguments)
    finally:
        state = os.path.join(STATE_DIR, mount_key(source, path))
        subprocess.run(["rm", "-rf", state], check=True)


def populate(top: str) -> list[str]:
    os.makedirs(os.path.join(top, "a", "b"))
    paths = ["file", "a/file", "a/b/file"]
    for path in paths:
        write(os.path.join(top, path), path.encode())
    return paths


@pytest.mark.parametrize("options", [NULL, CLOAKED])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_after_forget_and_restart(kind: str, options: str, base: str) -> None:
    with filesystem(kind, base) as source, steady(source, base) as mount:
        paths = populate(source)
        with mount("-o", options) as m:
            everything = [*paths, "a", "a/b"]
            numbers = {path: os.stat(m.at(path)).st_ino for path in everything}
            handles = {path: handle_of(m.at(path)) for path in everything}
            assert len(set(numbers.values())) == len(everything)
            drop_caches()
            assert {path: by_handle(m.path, handles[path]) for path in paths} == {p: p.encode() for p in paths}
            assert {path: os.stat(m.at(path)).st_ino for path in everything} == numbers
            assert {path: handle_of(m.at(path)) for path in everything} == handles
        with mount("-o", options) as m:
            # First by handle: nobody has looked anything up by name.
            assert by_handle(m.path, handles["a/b/file"]) == b"a/b/file"
            assert by_handle(m.path, handles["file"]) == b"file"
            assert {path: os.stat(m.at(path)).st_ino for path in everything} == numbers
            assert {path: handle_of(m.at(path)) for path in everything} == handles
            assert "cannot decode" not in m.log


@pytest.mark.parametrize("kind", KINDS)
def test_rewound_a_directory_is_listed_as_it_is_now(kind: str, base: str) -> None:
    with filesystem(kind, base) as source, steady(source, base) as mount, mount("-o", CLOAKED) as m:
        opened = os.open(m.path, os.O_RDONLY)
        try:
            for name in ("first", "second"):  # before and after it was read for the first time
                write(os.path.join(source, name), b"x")
                os.lseek(opened, 0, os.SEEK_SET)
                assert name in os.listdir(opened)
        finally:
            os.close(opened)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_after_the_daemon_was_killed(kind: str, base: str) -> None:
    with filesystem(kind, base) as source, steady(source, base) as mount:
        populate(source)
        with mount("-o", CLOAKED) as m:
            handle = handle_of(m.at("a", "b", "file"))
            if kind not in ("ext4", "btrfs"):  # where the index gives numbers: on local mounts, a second later
                wait_until(lambda: is_stored(m, b"file"))
            die(m)
        with mount("-o", CLOAKED) as m:
            assert by_handle(m.path, handle) == b"a/b/file"


def test_a_handle_that_was_not_durable_is_never_another_file(base: str) -> None:
    """The daemon was killed before it made them durable: the numbers are given again, but not as the same handles."""
    with filesystem("xfs", base) as source, steady(source, base) as mount:
        for attempt in range(10):
            with mount("-o", CLOAKED) as m:
                for number in range(20):
                    write(m.at(f"old {attempt} {number}"), b"old")
                handles = [handle_of(m.at(f"old {attempt} {number}")) for number in range(20)]
                die(m)
            with mount("-o", CLOAKED) as m:
                for number in range(20):
                    write(m.at(f"new {attempt} {number}"), b"new")
                found = {content_or_error(m.path, handle) for handle in handles}
            assert found <= {b"old", errno.ESTALE}
            if errno.ESTALE in found:
                return  # else the daemon had just committed all of them
    pytest.fail("the daemon was never killed in time")


def is_stored(m: Mount, name: bytes) -> bool:
    with contextlib.closing(sqlite3.connect(f"file:{index_of(m)}?mode=ro", uri=True)) as db:
        return db.execute("SELECT 1 FROM objects WHERE name = ?", (name,)).fetchone() is not None


def content_or_error(path: str, handle: bytes) -> bytes | int | None:
    try:
        return by_handle(path, handle)
    except OSError as exc:
        return exc.errno


def die(m: Mount) -> None:
    """SIGKILL the daemon, and take its mount off."""
    kill(m.without_reaper())
    run("umount", m.path)


@pytest.mark.parametrize("options", [NULL, CLOAKED])
@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_handle_survives_renames(kind: str, restart: bool, options: str, base: str) -> None:
    with filesystem(kind, base) as source, steady(source, base) as mount, contextlib.ExitStack() as stack:
        populate(source)
        m = stack.enter_context(mount("-o", options))
        through, behind = handle_of(m.at("a", "file")), handle_of(m.at("a", "b", "file"))
        directory = handle_of(m.at("a", "b"))
        os.rename(m.at("a", "file"), m.at("moved"))
        os.rename(m.real("a", "b"), m.real("c"))
        drop_caches()
        if restart:
            stack.close()
            m = stack.enter_context(mount("-o", options))
        assert by_handle(m.path, through) == b"a/file"
        assert by_handle(m.path, behind) == b"a/b/file"
        mount_fd = os.open(m.path, os.O_RDONLY)
        try:
            fd = linux.open_by_handle(mount_fd, directory, os.O_RDONLY | os.O_DIRECTORY)
            assert os.listdir(fd) == ["file"]
            os.close(fd)
        finally:
            os.close(mount_fd)


def test_what_cannot_decode_handles_is_told_and_pays_once(base: str) -> None:
    with filesystem("overlay", base) as source, steady(source, base) as mount:
        require_handles(source)
        populate(source)
        with mount("-o", NULL) as m:
            assert "cannot decode file handles" in m.log
            number, handle = os.stat(m.at("a", "file")).st_ino, handle_of(m.at("a", "file"))
            drop_caches()
            assert by_handle(m.path, handle) == b"a/file"
        with mount("-o", NULL) as m:
            assert os.stat(m.at("a", "file")).st_ino == number
            assert by_handle(m.path, handle) == b"a/file"


def test_what_has_no_handles_is_told(base: str) -> None:
    """Files are the same as long as the kernel remembers them."""
    with filesystem("overlay", base) as source, steady(source, base) as mount:
        if has_handles(source):
            pytest.skip("this kernel has handles, or identifiers, for every file system")
        populate(source)
        with mount("-o", NULL) as m:
            assert "has no file handles" in m.log
            assert "nfs_export=on" in m.log
            with open(m.at("a", "file")) as held:
                number, handle = os.stat(m.at("a", "file")).st_ino, handle_of(m.at("a", "file"))
                os.rename(m.real("a", "file"), m.real("a", "renamed"))
                os.rename(m.at("a", "renamed"), m.at("moved"))
                assert os.stat(m.at("moved")).st_ino == os.fstat(held.fileno()).st_ino == number
                assert by_handle(m.path, handle) == b"a/file"
            assert Path(m.real("moved")).read_bytes() == b"a/file"
        with mount("-o", NULL) as m:
            assert error_by_handle(m.path, handle) == errno.ESTALE
            assert Path(m.at("moved")).read_bytes() == b"a/file"


@pytest.mark.parametrize("kind", KINDS)
def test_the_handle_of_a_deleted_file_is_stale(kind: str, base: str) -> None:
    with filesystem(kind, base) as source, steady(source, base) as mount, contextlib.ExitStack() as stack:
        m = stack.enter_context(mount("-o", NULL))
        write(m.at("first"), b"old")
        real_number = os.stat(m.real("first")).st_ino
        handle, number = handle_of(m.at("first")), os.stat(m.at("first")).st_ino
        os.unlink(m.at("first"))
        drop_caches()
        assert error_by_handle(m.path, handle) == errno.ESTALE
        # ext4 uses the inode number again at once; others may never.
        again = False
        for attempt in range(50):
            write(m.at(f"later-{attempt}"), b"new")
            if os.stat(m.real(f"later-{attempt}")).st_ino == real_number:
                again = True
                assert os.stat(m.at(f"later-{attempt}")).st_ino != number
                assert handle_of(m.at(f"later-{attempt}")) != handle
                break
        assert again or kind != "ext4"
        assert error_by_handle(m.path, handle) == errno.ESTALE
        stack.close()
        m = stack.enter_context(mount("-o", NULL))
        assert error_by_handle(m.path, handle) == errno.ESTALE


def test_generations_cannot_be_guessed(tree: str, mount: Callable[..., Mount]) -> None:
    write(os.path.join(tree, "file"), b"secret")
    m = mount("-o", NULL)
    handle = handle_of(m.at("file"))
    nodeid = os.stat(m.at("file")).st_ino
    # fuse_encode_fh(): nodeid as two words, then the generation.
    words = [int.from_bytes(handle[4 + 4 * i : 8 + 4 * i], "little") for i in range((len(handle) - 4) // 4)]
    assert words[0] << 32 | words[1] == nodeid
    chance = random.Random(7)
    guesses = [0, 1, 2, 2**32 - 1, words[2] ^ 1, *(chance.randrange(2**32) for _ in range(300))]
    for cached in (True, False):
        if not cached:
            drop_caches()
        for guess in guesses:
            forged = handle[:12] + guess.to_bytes(4, "little") + handle[16:]
            assert error_by_handle(m.path, forged) == errno.ESTALE, (cached, guess)
    assert by_handle(m.path, handle) == b"secret"


def test_a_tree_over_several_file_systems(base: str) -> None:
    with contextlib.ExitStack() as stack:
        source = stack.enter_context(filesystem("ext4", base, "root"))
        kinds = ["xfs", "btrfs", "tmpfs", "ext4"]
        for kind in kinds:
            stack.enter_context(filesystem(kind, source, f"on-{kind}", images=base))
            populate(os.path.join(source, f"on-{kind}"))
            os.link(os.path.join(source, f"on-{kind}", "file"), os.path.join(source, f"on-{kind}", "link"))
        mount = stack.enter_context(steady(source, base))
        with mount("-o", CLOAKED) as m:
            seen: dict[int, list[str]] = {}
            for directory, _, files in os.walk(m.path):
                for path in [directory, *(os.path.join(directory, name) for name in files)]:
                    seen.setdefault(os.lstat(path).st_ino, []).append(os.path.basename(path))
            assert len(seen) > 4 * 6
            assert [sorted(names) for names in seen.values() if len(names) > 1] == [["file", "link"]] * len(kinds)
            handles = {kind: handle_of(m.at(f"on-{kind}", "a", "file")) for kind in kinds}
            with pytest.raises(OSError, match="cross-device"):
                os.rename(m.at("on-xfs", "file"), m.at("on-ext4", "x"))
            os.rename(m.at("on-xfs", "a", "file"), m.at("on-xfs", "b"))
        with mount("-o", CLOAKED) as m:
            for kind, handle in handles.items():
                assert by_handle(m.path, handle) == b"a/file", kind


def test_hard_links_are_one_file(tree: str, mount: Callable[..., Mount], user: Callable[..., User]) -> None:
    m = mount("-o", NULL)
    write(m.at("one"), b"x")
    os.link(m.at("one"), m.at("two"))
    first, second = os.stat(m.at("one")), os.stat(m.at("two"))
    assert (first.st_ino, first.st_nlink) == (second.st_ino, 2)
    os.unlink(m.at("one"))
    assert user(0).do(read, m.at("two")) == b"x"
    assert os.stat(m.at("two")).st_nlink == 1


def test_another_tree_at_the_same_place_makes_old_handles_stale(base: str) -> None:
    source = os.path.join(base, "real")
    os.mkdir(source)
    with steady(source, base) as mount:
        write(os.path.join(source, "file"), b"old")
        with mount("-o", NULL) as m:
            handle = handle_of(m.at("file"))
        os.rename(source, f"{source}-before")
        os.mkdir(source)
        write(os.path.join(source, "file"), b"new")
        with mount("-o", NULL) as m:
            assert "is not the directory that it was before" in m.log
            assert error_by_handle(m.path, handle) == errno.ESTALE
            assert read(m.at("file")) == b"new"


def index_of(mount: Mount) -> str:
    return os.path.join(STATE_DIR, mount.key, "nodes.sqlite")


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs", "tmpfs"])
def test_what_was_made_together_is_close_together_in_the_index(kind: str, base: str) -> None:
    """Otherwise, each new object belongs to another page of the database."""
    path = os.path.join(base, "nodes.sqlite")
    with filesystem(kind, base) as source, contextlib.closing(Index(path)) as index:
        inodes = {}
        with index.batch():
            for number in range(1000):
                file = os.path.join(source, str(number))
                write(file, b"")
                inodes[index.object(b"\1\0\0\0" + handle_of(file), 1, b"name")] = os.stat(file).st_ino
        with contextlib.closing(sqlite3.connect(path)) as db:
            sorted_by_key = [inodes[number] for (number,) in db.execute("SELECT number FROM objects ORDER BY key")]
        assert sorted_by_key == sorted(inodes.values())


def test_a_deleted_file_leaves_the_index(tree: str, mount: Callable[..., Mount]) -> None:
    m = mount("-o", NULL)
    places = os.path.join(os.path.dirname(index_of(m)), "places.sqlite")
    path, question = (
        (places, "SELECT name FROM places") if os.path.exists(places) else (index_of(m), "SELECT name FROM objects")
    )

    def known() -> int:
        with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as db:
            return sum(name.isdigit() for (name,) in db.execute(question))

    for number in range(20):
        write(m.at(str(number)), b"")
    wait_until(lambda: known() == 20)
    for number in range(20):
        os.unlink(m.at(str(number)))
    wait_until(lambda: known() == 0)


def test_a_broken_index_is_one_clear_line(tree: str, base: str) -> None:
    with steady(tree, base) as mount:
        with mount("-o", NULL) as m:
            pass
        Path(index_of(m)).write_bytes(b"this is no database" * 100)
        done = run("mount", tree, m.path, "-o", "knfsd", check=False)
        assert done.returncode == 1
        assert "nodes.sqlite" in done.stderr or os.path.dirname(index_of(m)) in done.stderr
        assert " away to start with an empty one" in done.stderr
        assert done.stderr.count("\n") == 1
        assert not is_mounted(m.path)


def stat_often(path: str) -> None:
    for _ in range(20):
        os.stat(path)


def test_an_acl_of_the_same_whole_second_is_in_force(base: str, user: Callable[..., User]) -> None:
    """With inodes of 128 bytes, a ctime has no fraction of a second."""
    with filesystem("ext4", base, mkfs=("-I", "128")) as top, steady(top, base) as mount:
        caller = user(3001)
        with mount("-o", CLOAKED) as m:
            for name in ("first", "second", "third"):  # in case that a machine is so slow that one takes a second
                os.mkdir(os.path.join(top, name))
                write(os.path.join(top, name, "file"), b"content")
                time.sleep(1 - time.time() % 1 + 0.001)  # until a second begins: ctimes are of whole ones
                os.chmod(os.path.join(top, name), 0o755)
                assert os.stat(os.path.join(top, name)).st_ctime_ns % 10**9 == 0
                time.sleep(0.05)  # or the ctime would be too new to be relied on: longer than a tick of the clock
                caller.do(stat_often, m.at(name, "file"))
                subprocess.run(["setfacl", "-m", "u:3001:---", os.path.join(top, name)], check=True)
                # What the kernel remembers has to be forgotten first.
                wait_until(lambda name=name: caller.error(os.stat, m.at(name, "file")) == errno.EACCES)  # type: ignore[misc]
                assert caller.error(read, m.at(name, "file")) == errno.EACCES, name


def work_in(directory: str) -> None:
    """Make a file and remove it, several times: the ctime of the directory never settles meanwhile."""
    for _ in range(20):
        write(os.path.join(directory, "new"), b"x")
        os.unlink(os.path.join(directory, "new"))


def set_acl(*words: str) -> None:
    subprocess.run(["setfacl", *words], check=True)


@pytest.mark.parametrize("where", ["behind the mount", "through it", "where it is mounted once more"])
def test_an_acl_of_a_directory_that_keeps_changing_is_in_force(
    where: str, base: str, user: Callable[..., User]
) -> None:
    """It was seen to have none, and it is not looked at again while no change of it is reported."""
    owner, caller = user(3001), user(3002, 4001)
    with filesystem("tmpfs", base) as top, steady(top, base) as mount, contextlib.ExitStack() as stack:
        shared, twin = os.path.join(top, "group"), os.path.join(top, "twin")
        for path in (shared, twin):
            os.mkdir(path)
        os.chown(shared, 3001, 4001)
        os.chmod(shared, 0o770)
        subprocess.run(["mount", "--bind", shared, twin], check=True)
        stack.callback(subprocess.run, ["umount", twin], check=True)
        with mount("-o", "no_root_squash,cloak_list=uid +077 1 9999") as m:
            for entry in ("u:3002:---", "g::---,g:4002:rwx", "u:3002:r-x"):
                for seen in ("group", "twin"):
                    caller.do(work_in, m.at(seen))
                if where == "through it":
                    owner.do(set_acl, "-m", entry, m.at("group"))
                else:
                    set_acl("-m", entry, shared if where == "behind the mount" else twin)
                for seen in ("group", "twin"):
                    assert caller.error(write, m.at(seen, "new"), b"x") == errno.EACCES, (entry, seen)
                    searched = caller.error(os.lstat, m.at(seen, "absent"))
                    assert searched == (errno.ENOENT if entry == "u:3002:r-x" else errno.EACCES), (entry, seen)
                set_acl("-b", shared)
                os.chmod(shared, 0o770)
