"""Events that must neither end the daemon nor make its clients wait for ever."""

import contextlib
import errno
import os
import shutil
import signal
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cloakfs import linux
from cloakfs.mounted import STATE_DIR, mount_key
from cloakfs.tree.index import Index
from tests.agents import User, names, read, write
from tests.mount.conftest import Mount, is_mounted, mounted, run
from tests.mount.loopfs import attached, filesystem, require_disk, require_handles
from tests.mount.test_limits import base_dir, dig
from tests.mount.test_robustness import wait_until
from tests.mount.test_trees import by_handle, drop_caches, handle_of, steady

NULL = "no_root_squash"
CLOAKED = "no_root_squash,cloak_list=uid +077 1 9999"
MNT_FORCE = 1

MakeMount = Callable[..., Mount]
MakeUser = Callable[..., User]


def plugin(base: str, code: str) -> str:
    Path(base, "plug.py").write_text(f"import errno, os, time\nfrom cloakfs.policy import Policy\n{code}")
    return f"{base}/plug.py:P"


def answer(client: User, seconds: float = 60) -> object:
    """What the call that `client` was sent on came to, an exception or a result; it must not take long."""
    assert client._pipe.poll(seconds), "a client hangs"
    return client._pipe.recv()[1]


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
        other._pipe.send((os.stat, (m.at("private"),), {}))
        wait_until(lambda: os.path.exists(f"{flag}-seen"))
        third._pipe.send((os.stat, (m.path,), {}))
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
        someone._pipe.send((write, (m.at("late"), b"x"), {}))
        wait_until(lambda: os.path.lexists(path))
        other._pipe.send((os.stat, (m.path,), {}))
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

FATAL = """
from cloakfs.filesystem.attributes import Attributes

class P(Policy):
    pass

async def statfs(self, ctx):
    raise SystemExit("the end")

Attributes.statfs = statfs
"""


def test_a_daemon_that_cannot_go_on_takes_its_mount_along(
    base: str, tree: str, mount: MakeMount, user: MakeUser
) -> None:
    m = mount("--policy", plugin(base, FATAL), "-o", NULL)
    m.expect_errors = True
    someone, other = user(2001), user(2002)
    with aborted_at_last(m):
        fd = other.do(os.open, m.at("file"), os.O_CREAT | os.O_RDWR)
        pid = m.pid
        someone._pipe.send((os.statvfs, (m.path,), {}))
        assert isinstance(answer(someone), OSError)
        wait_until(lambda: not os.path.exists(f"/proc/{pid}"))
        assert not is_mounted(m.path)
        other._pipe.send((os.write, (fd, b"late"), {}))
        assert getattr(answer(other), "errno", 0) in (errno.ENOTCONN, errno.ECONNABORTED)
    assert "SystemExit: the end" in m.log


# -- errors that FUSE has no word for --------------------------------------------------------------

STRANGE = """
from cloakfs.filesystem.attributes import Attributes
from cloakfs.filesystem.request import answers

class P(Policy):
    pass

# Errors of this kind come out of real file systems (ENOTSUPP of NFS is one), but the kernel takes no such reply.
async def readlink(self, inode, ctx):
    raise OSError({code}, "strange")

Attributes.readlink = answers(readlink)
"""


@pytest.mark.parametrize("code", [-5, 512, 524, 1000, 2**31])
def test_an_error_that_is_none(code: int, base: str, tree: str, mount: MakeMount, user: MakeUser) -> None:
    m = mount("--policy", plugin(base, STRANGE.format(code=code)), "-o", NULL)
    someone = user(2001)
    with aborted_at_last(m):
        someone.do(os.symlink, "target", m.at("link"))
        someone._pipe.send((os.readlink, (m.at("link"),), {}))
        error = answer(someone)
        assert isinstance(error, OSError)
        assert error.errno == errno.EIO
        assert someone.do(names, m.path) == ["link"]


def test_clients_cannot_fill_the_log(base: str, tree: str, mount: MakeMount, user: MakeUser) -> None:
    code = STRANGE.format(code=5).replace("OSError(5,", "LookupError(")
    m = mount("--policy", plugin(base, code), "-o", NULL)
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
        done = run("mount", tree, path, check=False)
        assert done.returncode == 1
        assert state in done.stderr
        assert "full" in done.stderr
        assert "make room" in done.stderr
        assert "move it away" not in done.stderr
        assert done.stderr.count("\n") == 1
        assert not is_mounted(path)


@pytest.mark.timeout(120)
def test_no_room_for_the_index(base: str, tree: str, user: MakeUser) -> None:
    # Another tmpfs could come in its place and get its number.
    require_disk(tree, "of a tmpfs, deleted files stay in the index until the next boot")
    path = base_dir(base)
    state = os.path.join(STATE_DIR, mount_key(tree, path))
    someone = user(2001)
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, state)
        stack.enter_context(attached("tmpfs", state, "-t", "tmpfs", "-o", "size=300k"))
        m = stack.enter_context(mounted(tree, path, "-o", NULL))
        m.expect_errors = True
        made, code = someone.do(make_many, m.path, 5000)
        assert code in (errno.EIO, errno.ENOSPC)
        assert made > 10
        pid = m.pid
        # What was deleted cannot be taken out of the index, either.
        filler = os.open(os.path.join(state, "filler"), os.O_CREAT | os.O_WRONLY)
        stack.callback(os.close, filler)
        for name in (name for name in os.listdir(tree) if int(name[:6]) < made):
            with contextlib.suppress(OSError):
                os.write(filler, bytes(1 << 20))
            someone.do(os.unlink, m.at(name))
        drop_caches()
        wait_until(lambda: "deleted files stay in it" in m.log)
        os.kill(pid, 0)
        os.mkdir(os.path.join(tree, "many"), 0o777)
        os.chmod(os.path.join(tree, "many"), 0o777)
        make_many(os.path.join(tree, "many"), 3000)
        someone.error(os.listdir, m.at("many"))
        # Room again: nothing needs to be mounted anew, and no number was given twice.
        subprocess.run(["mount", "-o", "remount,size=100m", state], check=True)
        listed = someone.do(os.listdir, m.at("many"))
        assert len(listed) == 3000
        numbers = {name: someone.do(os.stat, m.at("many", name)).st_ino for name in listed}
        assert len(set(numbers.values())) == 3000
        for name in listed[::100]:
            assert os.stat(m.at("many", name)).st_ino == numbers[name]
        assert m.pid == pid


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
                        assert given.setdefault(index.object(handle, 1, b"name"), handle) == handle
            except sqlite3.Error:
                failed += 1
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


def test_after_a_failed_commit_numbers_are_durable_before_they_are_given(base: str) -> None:
    with attached("tmpfs", os.path.join(base, "state"), "-t", "tmpfs", "-o", "size=300k") as state:
        index = Index(os.path.join(state, "nodes.sqlite"), behind=True)
        for number in range(5000):
            index.object(b"%d" % number * 10, 1, b"name")
        with pytest.raises(sqlite3.Error):
            index.commit()
        with pytest.raises(sqlite3.Error):
            fill(index)
        index.close()


def fill(index: Index) -> None:
    for number in range(10000):
        index.object(b"new %d" % number * 10, 1, b"name")


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
        someone._pipe.send((os.stat, ("a",), {}))
        assert isinstance(answer(someone), PermissionError)
        other._pipe.send((os.listdir, (m.path,), {}))
        assert answer(other) == ["b"]
