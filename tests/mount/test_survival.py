"""Events that must neither end the daemon nor make its clients wait for ever."""

import contextlib
import errno
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from cloakfs import linux
from cloakfs.mount.start import MAKE_ROOM
from cloakfs.state.runtime import STATE_DIR, mount_key
from cloakfs.state.versions import VersionError
from cloakfs.tree.index import Index, Unstored
from tests.agents import User, names, read, write
from tests.mount import alterations
from tests.mount.conftest import Mount, daemons_with, is_mounted, mounted, run
from tests.mount.loopfs import attached, filesystem, require_disk, require_handles
from tests.mount.test_limits import base_dir, dig
from tests.mount.test_trees import by_handle, drop_caches, handle_of, steady
from tests.waiting import wait_until

NULL = "no_root_squash"
CLOAKED = "no_root_squash,cloak_list=uid +077 1 9999"
MNT_FORCE = 1

MakeMount = Callable[..., Mount]
MakeUser = Callable[..., User]


def plugin(base: str, code: str) -> str:
    Path(base, "plug.py").write_text(f"import errno, os, time\nfrom cloakfs.policy import Policy\n{code}")
    return f"{base}/plug.py:P"


def answer(client: User, seconds: float = 60) -> object:
    """Return the result of the call that `client` has started, or what it raised; it must not take long."""
    try:
        return client.answer_within(seconds)
    except OSError as exc:
        return exc


@contextlib.contextmanager
def aborted_at_last(mount: Mount) -> Iterator[None]:
    """Whatever happens, nobody is left waiting for a daemon that does not answer."""
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            linux.umount(mount.path, MNT_FORCE)


# -- a daemon that is killed while it looks through its own mount ----------------------------------

SLOW = """
class P(Policy):
    def show(self, attrs):
        if attrs.name == "private" and os.path.exists({flag!r}):
            open({flag!r} + "-seen", "w").close()
            time.sleep(1000)
        return super().show(attrs)
"""


def test_sigkill_while_the_daemon_asks_itself(base: str, tree: str, mount: MakeMount, user: MakeUser) -> None:
    """It looks a refused directory up again, as a client of itself, and is killed over the answer."""
    flag = os.path.join(base, "flag")
    m = mount("--policy", plugin(base, SLOW.format(flag=flag)), "-o", CLOAKED)
    owner, other, third = user(2001), user(2002), user(2003)
    with aborted_at_last(m):
        owner.do(os.mkdir, m.at("private"), 0o700)
        owner.do(os.stat, m.at("private"))
        Path(flag).touch()
        other.start(os.stat, m.at("private"))
        wait_until(lambda: os.path.exists(f"{flag}-seen"))
        third.start(os.stat, m.path)
        os.kill(m.pid, signal.SIGKILL)
        dead = (errno.ENOTCONN, errno.ECONNABORTED)
        assert getattr(answer(third), "errno", 0) in dead
        assert getattr(answer(other), "errno", 0) in (errno.ENOENT, *dead)


# -- special files ---------------------------------------------------------------------------------

RACE = """
class P(Policy):
    def visible(self, caller, attrs):
        # Between the kernel's look at the name and its making: as if somebody behind the mount was faster.
        if attrs.name == "late" and not os.path.lexists({path!r}):
            os.umask(0)
            {make}
        return True
"""


@pytest.mark.parametrize("make", ["os.mkfifo({0!r}, 0o666)", "os.symlink('elsewhere', {0!r})", "os.mkdir({0!r})"])
def test_what_comes_into_being_during_a_create(
    make: str, base: str, tree: str, mount: MakeMount, user: MakeUser
) -> None:
    path = os.path.join(tree, "late")
    m = mount("--policy", plugin(base, RACE.format(path=path, make=make.format(path))), "-o", NULL)
    someone, other = user(2001), user(2002)
    with aborted_at_last(m):
        someone.start(write, m.at("late"), b"x")
        wait_until(lambda: os.path.lexists(path))
        other.start(os.stat, m.path)
        assert isinstance(answer(other), os.stat_result), "one client has all others wait"
        if "mkfifo" in make:
            fd = os.open(m.at("late"), os.O_RDONLY | os.O_NONBLOCK)  # lets the writer, who rightly waits, go on
            assert answer(someone) is None
            assert os.read(fd, 10) == b"x"
            os.close(fd)
        elif "symlink" in make:
            assert answer(someone) is None
            assert read(os.path.join(tree, "elsewhere")) == b"x"
        else:
            error = answer(someone)
            assert isinstance(error, IsADirectoryError)


# -- a daemon that ends by itself ------------------------------------------------------------------


def test_a_daemon_that_cannot_go_on_takes_its_mount_along(
    base: str, tree: str, mount: MakeMount, user: MakeUser
) -> None:
    with daemons_with(alterations.end_at_statfs):
        m = mount("-o", NULL)
    m.expect_errors = True
    someone, other = user(2001), user(2002)
    with aborted_at_last(m):
        fd = other.do(os.open, m.at("file"), os.O_CREAT | os.O_RDWR)
        pid = m.pid
        someone.start(os.statvfs, m.path)
        assert isinstance(answer(someone), OSError)
        wait_until(lambda: not os.path.exists(f"/proc/{pid}"))
        assert not is_mounted(m.path)
        other.start(os.write, fd, b"late")
        assert getattr(answer(other), "errno", 0) in (errno.ENOTCONN, errno.ECONNABORTED)
    assert "SystemExit: the end" in m.log


# -- errors that FUSE has no word for --------------------------------------------------------------


# Errors of this kind come out of real file systems (ENOTSUPP of NFS is one), but the kernel takes no such reply.
@pytest.mark.parametrize("code", [-5, 512, 524, 1000, 2**31])
def test_an_error_that_is_none(code: int, base: str, tree: str, mount: MakeMount, user: MakeUser) -> None:
    with daemons_with(partial(alterations.fail_at_readlink, OSError, code, "strange")):
        m = mount("-o", NULL)
    someone = user(2001)
    with aborted_at_last(m):
        someone.do(os.symlink, "target", m.at("link"))
        someone.start(os.readlink, m.at("link"))
        error = answer(someone)
        assert isinstance(error, OSError)
        assert error.errno == errno.EIO
        assert someone.do(names, m.path) == ["link"]


def test_clients_cannot_fill_the_log(base: str, tree: str, mount: MakeMount, user: MakeUser) -> None:
    with daemons_with(partial(alterations.fail_at_readlink, LookupError, "strange")):
        m = mount("-o", NULL)
    m.expect_errors = True
    someone = user(2001)
    someone.do(os.symlink, "target", m.at("link"))
    for _ in range(50):
        assert someone.error(os.readlink, m.at("link")) == errno.EIO
    assert m.log.count("Traceback") == m.log.count("LookupError: strange") == 1


# -- the index -------------------------------------------------------------------------------------


def make_many(directory: str, most: int) -> tuple[int, int]:
    """Make files until an error: (how many, errno)."""
    for number in range(most):
        try:
            os.close(os.open(os.path.join(directory, f"{number:06}-{'x' * 100}"), os.O_CREAT | os.O_WRONLY))
        except OSError as exc:
            return number, exc.errno or -1
    return most, 0


def test_no_room_to_begin_with(base: str, tree: str) -> None:
    """Nobody is told to move an index away that has nothing wrong with it."""
    path = base_dir(base)
    state = os.path.join(STATE_DIR, mount_key(tree, path))
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, state)
        stack.enter_context(attached("tmpfs", state, "-t", "tmpfs", "-o", "size=64k"))
        with contextlib.suppress(OSError):
            write(os.path.join(state, "filler"), bytes(1 << 20))
        with mounted(tree, path, "-o", NULL) as m:
            os.mkdir(m.at("directory"))
            assert "full" in m.log
        done = run("mount", tree, path, "-o", "knfsd", check=False)
        assert done.returncode == 1
        assert state in done.stderr
        assert "full" in done.stderr
        assert MAKE_ROOM in done.stderr
        assert " away" not in done.stderr
        assert done.stderr.count("\n") == 1
        assert not is_mounted(path)


def make_read_only(index: str) -> None:
    subprocess.run(["mount", "-o", "remount,ro", os.path.dirname(index)], check=True)


def make_a_directory(index: str) -> None:
    os.unlink(index)
    os.mkdir(index)


def make_a_fifo(index: str) -> None:
    os.unlink(index)
    os.mkfifo(index)


def give_away(index: str) -> None:
    os.chown(index, 2001, 0)


def open_to_all(index: str) -> None:
    os.chmod(index, 0o666)


@pytest.mark.parametrize(
    ("change", "said", "way_out"),
    [
        (make_read_only, "Read-only file system", "has to be writable"),
        (make_a_directory, "Is a directory", " away"),
        (make_a_fifo, "not a regular file", " away"),
        (give_away, "uid 2001 or others may write to it", " away"),
        (open_to_all, "uid 0 or others may write to it", " away"),
    ],
)
def test_an_index_that_cannot_be_used(
    base: str, tree: str, change: Callable[[str], None], said: str, way_out: str
) -> None:
    """The message names the index, not the tree, and does not demand room where there is some."""
    path = base_dir(base)
    state = os.path.join(STATE_DIR, mount_key(tree, path))
    index = os.path.join(state, "nodes.sqlite")
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, state)
        stack.enter_context(attached("tmpfs", state, "-t", "tmpfs"))
        with mounted(tree, path, "-o", NULL):
            pass
        change(index)
        with mounted(tree, path, "-o", NULL) as m:
            os.mkdir(m.at("directory"))
            assert f"{index}: {said}" in numbers_of(m)
            assert way_out in m.log
            assert MAKE_ROOM not in m.log
        done = run("mount", tree, path, "-o", "knfsd", check=False)
        assert done.returncode == 1
        assert done.stderr.startswith(f"cloakfs: {index}: {said}")
        assert way_out in done.stderr
        assert done.stderr.count("\n") == 1


@pytest.mark.timeout(120)
@contextlib.contextmanager
def small_state(base: str, tree: str) -> Iterator[tuple[str, str]]:
    """A mount point whose state is on a file system of its own with little room: (mount point, state)."""
    path = base_dir(base)
    state = os.path.join(STATE_DIR, mount_key(tree, path))
    try:
        with attached("tmpfs", state, "-t", "tmpfs", "-o", "size=300k"):
            yield path, state
    finally:
        shutil.rmtree(state)


def has_room_again(state: str) -> None:
    subprocess.run(["mount", "-o", "remount,size=100m", state], check=True)


def numbers_of(mount: Mount) -> str:
    """What `status` says is wrong with the numbers of the mount."""
    (told,) = json.loads(run("status", "--json", mount.path).stdout)
    return str(told["numbers"])


def test_a_local_mount_goes_on_without_room_for_its_index(base: str, user: MakeUser) -> None:
    someone = user(2001)
    with filesystem("xfs", base) as tree, small_state(base, tree) as (path, state):
        with mounted(tree, path, "-o", NULL) as m:
            assert numbers_of(m) == ""
            assert someone.do(make_many, m.path, 5000) == (5000, 0)
            wait_until(lambda: "database or disk is full" in numbers_of(m))
            assert m.log.count("are in memory alone") == 1
            assert "in memory" in run("status", m.path).stdout
            numbers = {name: os.stat(m.at(name)).st_ino for name in os.listdir(tree)}
            assert len(set(numbers.values())) == 5000
            handles = {name: handle_of(m.at(name)) for name in list(numbers)[::500]}
            for name in list(numbers)[:1000]:
                if name not in handles:
                    someone.do(os.unlink, m.at(name))
            someone.do(os.rename, m.at(next(iter(handles))), m.at("renamed"))
            drop_caches()  # what the kernel has forgotten is found by number
            for handle in handles.values():
                assert by_handle(m.path, handle) == b""
            has_room_again(state)
            wait_until(lambda: numbers_of(m) == "")
            assert "numbers can be stored again" in m.log
        with mounted(tree, path, "-o", NULL) as m:
            for name in set(os.listdir(tree)) & set(numbers):
                assert os.stat(m.at(name)).st_ino == numbers[name]


def test_an_exported_mount_makes_nothing_that_cannot_get_a_number(base: str) -> None:
    """ENOSPC rather than EIO; what has a number can still be used, renamed and removed; no number is told in vain."""
    numbers: dict[str, int] = {}
    with filesystem("xfs", base) as tree, small_state(base, tree) as (path, state):
        with daemons_with(alterations.never_merge_the_index), mounted(tree, path, "-o", f"{NULL},knfsd") as m:
            os.mkdir(m.at("behind"))
            made, code = make_many(m.path, 5000)
            assert code == errno.ENOSPC
            assert made > 10
            with contextlib.suppress(OSError):  # what is left may do for a smaller change
                write(os.path.join(state, "filler"), bytes(1 << 20))
            some = sorted(os.listdir(tree))
            assert len(some) == made + 1
            for make in (os.mkdir, os.mkfifo, partial(os.symlink, "target"), partial(os.mknod, mode=0o600)):
                with pytest.raises(OSError, match="No space left"):
                    make(m.at("new"))
            assert sorted(os.listdir(tree)) == some
            wait_until(lambda: "cannot be stored" in numbers_of(m))
            make_many(os.path.join(tree, "behind"), 500)
            drop_caches()
            with contextlib.suppress(OSError):
                os.listdir(m.at("behind"))
            assert len(os.listdir(m.at("behind"))) == 500
            refused = set()
            for name in [*some, *(f"behind/{name}" for name in os.listdir(m.at("behind")))]:
                try:
                    numbers[name] = os.stat(m.at(name)).st_ino
                except OSError as exc:
                    refused.add(exc.errno)
            assert refused == {errno.ENOSPC}
            assert set(some) <= set(numbers)
            assert len(numbers) < 400
            some.remove("behind")
            os.rename(m.at(some[0]), m.at("renamed"))
            numbers["renamed"] = numbers.pop(some[0])
            os.link(m.at("renamed"), m.at("linked"))
            for name in some[1 : made // 2]:
                os.unlink(m.at(name))
                del numbers[name]
            os.kill(m.pid, signal.SIGKILL)
        has_room_again(state)
        with mounted(tree, path, "-o", f"{NULL},knfsd") as m:
            assert {name: os.stat(m.at(name)).st_ino for name in numbers} == numbers
            assert len(os.listdir(m.at("behind"))) == 500
            os.mkdir(m.at("new"))
            assert os.stat(m.at("new")).st_ino not in numbers.values()


def is_logged(m: Mount, text: str) -> bool:
    return text in m.log


def test_numbers_that_are_computed_need_no_room(base: str, tree: str, user: MakeUser) -> None:
    """Neither to be given, nor to be found again; only files have to be searched for."""
    require_disk(tree, "numbers are not computed on a tmpfs")
    with small_state(base, tree) as (path, state):
        for options in (NULL, f"{NULL},knfsd"):
            shutil.rmtree(tree)
            os.mkdir(tree)
            with mounted(tree, path, "-o", options) as m:
                write(os.path.join(state, "filler"), b"")
                with contextlib.suppress(OSError):
                    write(os.path.join(state, "filler"), bytes(1 << 20))
                assert make_many(m.path, 5000) == (5000, 0)
                handles = {name: handle_of(m.at(name)) for name in os.listdir(tree)[::500]}
                wait_until(partial(is_logged, m, "files will be searched for"))
                assert numbers_of(m) == ""
                drop_caches()
                assert {by_handle(m.path, handle) for handle in handles.values()} == {b""}
                os.kill(m.pid, signal.SIGKILL)
            os.unlink(os.path.join(state, "filler"))
            with mounted(tree, path, "-o", options) as m:
                assert {name: handle_of(m.at(name)) for name in handles} == handles
                assert {by_handle(m.path, handle) for handle in handles.values()} == {b""}


def damage(path: str) -> None:
    """Write over a page of a table or index, but not over the first pages, so that the database can still be opened."""
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    with open(path, "r+b") as file:
        file.seek(-8192, os.SEEK_END)
        file.write(b"\xff" * 8192)


def test_a_damaged_index_is_found_when_it_is_mounted(base: str, tree: str) -> None:
    path = base_dir(base)
    database = os.path.join(STATE_DIR, mount_key(tree, path), "nodes.sqlite")
    with mounted(tree, path, "-o", NULL) as m:
        assert make_many(m.path, 1000) == (1000, 0)
    damage(database)
    before = Path(database).read_bytes()
    refused = run("mount", tree, path, "-o", f"{NULL},knfsd", check=False)
    assert refused.returncode == 1
    assert "is damaged" in refused.stderr
    assert f"move {os.path.dirname(database)} away" in refused.stderr
    assert refused.stderr.count("\n") == 1
    with mounted(tree, path, "-o", NULL) as m:
        assert len({os.stat(m.at(name)).st_ino for name in os.listdir(m.path)}) == 1000
        assert "is damaged" in numbers_of(m)
        assert "in memory" in m.log
    assert Path(database).read_bytes() == before
    shutil.rmtree(os.path.dirname(database))


@pytest.mark.parametrize("behind", [False, True])
def test_an_index_that_turns_out_to_be_damaged_is_given_up(base: str, behind: bool) -> None:
    path = os.path.join(base, "nodes.sqlite")
    with contextlib.closing(Index(path)) as index:
        for number in range(1000):
            index.object(b"%d" % number * 10, 1, b"name")
        view = index.view("ann")
    with contextlib.closing(Index(path, behind=behind)) as index:
        damage_for(index, path)
        last = index.last
        if not behind:
            with pytest.raises(Unstored) as failed:
                find_all(index)
            assert failed.value.errno == errno.EIO
            return
        find_all(index)
        assert index.trouble is not None
        given = {index.object(b"%d" % number * 10, 1, b"name") for number in range(2000)}
        assert min(given) > last
        assert len(given) == 2000
        assert index.view("ann") == view
        while index.commit():
            pass
        assert all(index.find(number) for number in given)


_PAGE = 4096


def damaged(content: bytes, rng: random.Random) -> bytes:
    """The content of a database with a page that another one has taken the place of, or some bytes that are wrong."""
    page, other = (rng.randrange(len(content) // _PAGE) * _PAGE for _ in range(2))
    there, found = content[page : page + _PAGE], content[other : other + _PAGE]
    changed = bytearray(content)
    match rng.randrange(4):
        case 0:
            changed[page : page + _PAGE], changed[other : other + _PAGE] = found, there
        case 1:
            changed[page : page + _PAGE] = found
        case 2:
            changed[page + rng.randrange(_PAGE)] ^= 1 << rng.randrange(8)
        case _:
            at = page + rng.randrange(_PAGE - 32)
            changed[at : at + 32] = rng.randbytes(32)
    return bytes(changed)


def test_no_damage_gives_one_object_the_number_of_another(base: str) -> None:
    """What SQLite's check of the structure does not find: an index of a table that does not agree with the table."""
    path = os.path.join(base, "nodes.sqlite")
    rng = random.Random(7)
    handles = [rng.randbytes(24) for _ in range(1000)]
    with contextlib.closing(Index(path)) as index:
        given = {handle: index.object(handle, 1, b"name") for handle in handles}
        views = {label: index.view(label) for label in ("ann", "ben")}
    owner = {number: handle for handle, number in given.items()}
    content = Path(path).read_bytes()
    opened = 0
    for case in range(100):
        for left in ("-wal", "-shm"):
            Path(path + left).unlink(missing_ok=True)
        Path(path).write_bytes(damaged(content, rng))
        try:
            index = Index(path, behind=bool(case % 2))
        except (sqlite3.Error, VersionError):
            continue
        opened += 1
        seen: dict[int, bytes] = {}
        with contextlib.closing(index):
            for handle in [*handles, *(rng.randbytes(24) for _ in range(50))]:
                with contextlib.suppress(Unstored):
                    number = index.object(handle, 1, b"name")
                    assert seen.setdefault(number, handle) == handle, case
                    assert owner.get(number, handle) == handle, case
            with contextlib.suppress(Unstored):
                assert index.view("carl") not in views.values(), case
    assert opened > 10


def damage_for(index: Index, path: str) -> None:
    """Damage the file of an index in use, which has no pages of it in memory."""
    index.checkpoint()
    index._db.execute("PRAGMA shrink_memory")
    with open(path, "r+b") as file:
        file.seek(8192)
        file.write(b"\xff" * (os.stat(path).st_size - 8192))


def find_all(index: Index) -> None:
    for number in range(1, index.last + 1):
        index.find(number)


def test_a_number_is_given_once_also_when_it_could_not_be_stored(base: str) -> None:
    with attached("tmpfs", os.path.join(base, "state"), "-t", "tmpfs", "-o", "size=300k") as state:
        index = Index(os.path.join(state, "nodes.sqlite"))
        given: dict[int, bytes] = {}
        failed = 0
        for listing in range(100):
            try:
                with index.batch():
                    for number in range(100):
                        handle = f"{listing} {number}".encode() * 10
                        with contextlib.suppress(Unstored):  # raised again at the end
                            assert given.setdefault(index.object(handle, 1, b"name"), handle) == handle
            except Unstored as exc:
                failed += 1
                for number in exc.numbers:  # void: nobody was told
                    assert index.find(number) is None
                    del given[number]
        index.close()
        assert 0 < failed < 100


def test_what_is_not_committed_yet_is_known_all_the_same(base: str) -> None:
    path = os.path.join(base, "nodes.sqlite")
    with contextlib.closing(Index(path, behind=True)) as index, contextlib.closing(sqlite3.connect(path)) as other:

        def stored() -> int:
            return int(other.execute("SELECT count(*) FROM objects").fetchone()[0])

        number = index.object(b"handle", 1, b"name")
        assert stored() == 0
        assert index.find(number) == (b"handle", 1, b"name")
        assert index.object(b"handle", 1, b"name") == number
        index.commit()
        assert stored() == 1
        index.object(b"another", 1, b"name")
        index.view("alice")  # numbers of views are durable before they are given, and with them whatever is not yet
        assert stored() == 2


def test_what_was_just_made_is_stored_unless_it_is_removed_at_once(base: str) -> None:
    path = os.path.join(base, "nodes.sqlite")
    with contextlib.closing(Index(path, behind=True)) as index, contextlib.closing(sqlite3.connect(path)) as other:

        def stored() -> list[tuple[int, bytes]]:
            return other.execute("SELECT number, name FROM objects ORDER BY number").fetchall()

        first, second = index.made(b"first", 1, b"a"), index.made(b"second", 1, b"b")
        assert first is not None
        assert second is not None
        index.remove(first)
        index.commit()
        assert stored() == [(second, b"b")]
        third = index.made(b"third", 1, b"c")
        assert third is not None
        assert third > second > first
        assert index.find(third) == (b"third", 1, b"c")
        assert index.object(b"third", 1, b"c") == third
        fourth = index.made(b"fourth", 1, b"d")
        assert fourth is not None
        index.moved(fourth, 1, b"e")
        again = index.made(b"second", 1, b"f")  # the handle of something that was removed behind the mount
        index.commit()
        assert stored() == [(third, b"c"), (fourth, b"e"), (again, b"f")]
        last = index.made(b"last", 1, b"h")
        assert last is not None
        index.remove(last)
    with contextlib.closing(Index(path)) as index:
        assert index.made(b"fifth", 1, b"g") is None  # has to be durable first
        assert index.object(b"fifth", 1, b"g") > last  # which was given, though never stored


def test_what_cannot_be_committed_is_in_memory_until_it_can_be(base: str) -> None:
    with attached("tmpfs", os.path.join(base, "state"), "-t", "tmpfs", "-o", "size=300k") as state:
        path = os.path.join(state, "nodes.sqlite")
        with contextlib.closing(Index(path, behind=True)) as index:
            handles = [b"%d" % number * 10 for number in range(5000)]
            numbers = [index.object(handle, 1, b"name") for handle in handles]
            with pytest.raises(Unstored) as failed:
                index.commit()
            assert failed.value.errno == errno.ENOSPC
            assert index.trouble is not None
            view, place = index.view("ann"), index.filesystem("key")
            assert [index.object(handle, 1, b"name") for handle in handles] == numbers
            assert index.find(numbers[-1]) == (handles[-1], 1, b"name")
            index.moved(numbers[0], 2, b"moved")
            assert index.find(numbers[0]) == (handles[0], 2, b"moved")
            has_room_again(state)
            while index.commit():
                pass
            assert index.trouble is None
        with contextlib.closing(Index(path)) as index:
            assert [index.object(handle, 1, b"name") for handle in handles[1:]] == numbers[1:]
            assert index.find(numbers[0]) == (handles[0], 2, b"moved")
            assert (index.view("ann"), index.filesystem("key"), index.view_label(view)) == (view, place, "ann")


# -- places ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "options"), [("ext4", NULL), ("ext4", CLOAKED), ("overlay", NULL)])
def test_a_handle_1500_levels_down_after_a_restart(kind: str, options: str, base: str, user: MakeUser) -> None:
    """Deeper than Python recurses, and without having everybody else wait for long."""
    deepest = os.path.join(*["d"] * 1500)
    with filesystem(kind, base) as source, steady(source, base) as mount:
        require_handles(source)
        user(2001).do(dig, source, "d", 1500)
        with mount("-o", options) as m, user(2001) as someone:
            someone.do(os.chdir, m.path)
            start = time.monotonic()
            someone.do(os.chdir, deepest)
            by_name = time.monotonic() - start
            someone.do(write, "file", b"deep")
            handle = someone.do(handle_of, "file")
        with mount("-o", options) as m:
            start = time.monotonic()
            assert by_handle(m.path, handle) == b"deep"
            # In the time of some system calls for each level, as by name, and not for each pair of levels.
            assert time.monotonic() - start < 2 + 3 * by_name


def test_two_directories_that_change_places(tree: str, base: str, user: MakeUser) -> None:
    """What was above is now below, and the daemon sees only one half of it."""
    with steady(tree, base) as mount, mount("-o", NULL) as m, aborted_at_last(m):
        someone, other = user(2001), user(2002)
        someone.do(os.makedirs, m.at("a", "b"))
        someone.do(os.chdir, m.at("a", "b"))
        os.rename(m.real("a", "b"), m.real("b"))
        os.rename(m.real("a"), m.real("b", "a"))
        # The kernel, which still has a above b, does not like what it is told.
        assert someone.error(os.stat, "a") in (0, errno.ELOOP)
        os.chmod(m.real("b"), 0)
        someone.start(os.stat, "a")
        assert isinstance(answer(someone), PermissionError)
        other.start(os.listdir, m.path)
        assert answer(other) == ["b"]
