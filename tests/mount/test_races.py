"""Changes on the real tree at exactly the wrong moment, and what clients get then.

The moment is between two system calls of the daemon: a plug-in policy, which runs inside it, has one of them followed
or preceded by the change.
"""

import contextlib
import errno
import fcntl
import mmap
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from cloakfs import linux
from tests.agents import User, read, write
from tests.mount import alterations
from tests.mount.conftest import Mount, daemons_with, told
from tests.mount.test_patched_pyfuse3 import with_patch
from tests.waiting import wait_until

USER, OTHER = 3001, 3002
CLOAKED = "no_root_squash,cloak_list=uid +077 3000 3999"

MakeMount = Callable[..., Mount]
MakeUser = Callable[..., User]

Racing = Callable[..., Mount]


@pytest.fixture
def racing(base: str, mount: MakeMount) -> Iterator[Racing]:
    """Makes mounts whose daemon finds the tree changed before, or after, its first call of these (`alterations.race`).

    At the end, it is checked that this has happened; or that it has not, if it was not to happen (`happens`).
    """
    made: list[tuple[str, bool]] = []

    def make(
        options: str,
        tree: str,
        change: Callable[[str], object],
        *,
        before: tuple[str, ...] = (),
        after: tuple[str, ...] = (),
        creates: bool = False,
        happens: bool = True,
    ) -> Mount:
        done = os.path.join(base, "done")
        calls = before or after
        race = partial(alterations.race, tree, change, calls, done, first=bool(after), creates=creates)
        made.append((done, happens))
        with daemons_with(race):
            return mount("-o", options)

    yield make
    for done, happens in made:
        assert os.path.exists(done) is happens


def put(path: str, data: bytes, uid: int, mode: int) -> None:
    write(path, data)
    os.chown(path, uid, uid)
    os.chmod(path, mode)


@pytest.fixture
def secret(tree: str) -> str:
    put(os.path.join(tree, "secret"), b"secret", OTHER, 0o600)
    return tree


# -- what was made is what one gets ----------------------------------------------------------------


def create(path: str) -> tuple[os.stat_result, bytes]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        return os.fstat(fd), os.pread(fd, 100, 0)
    finally:
        os.close(fd)


def test_create_answers_with_what_was_created(secret: str, racing: Racing, user: MakeUser) -> None:
    m = racing(CLOAKED, secret, alterations.hide, after=("open",), creates=True)
    assert user(OTHER).do(read, m.at("secret")) == b"secret"  # the kernel has its content now
    client = user(USER)
    info, content = client.do(create, m.at("x"))
    assert (info.st_uid, info.st_size, content) == (USER, 0, b"")
    assert os.stat(m.real("away")).st_uid == USER
    assert client.error(os.stat, m.at("x")) == errno.ENOENT
    assert read(m.real("x")) == b"secret"


MAKES: dict[str, tuple[str, Callable[[str], None]]] = {
    "mkdir": ("mkdir", os.mkdir),
    "mknod": ("mknod", os.mkfifo),
    "symlink": ("symlink", lambda path: os.symlink("target", path)),
}


@pytest.mark.parametrize("how", MAKES)
def test_what_takes_the_place_of_what_was_made_is_not_told(how: str, tree: str, racing: Racing, user: MakeUser) -> None:
    call, make = MAKES[how]
    make(os.path.join(tree, "secret"))
    os.chown(os.path.join(tree, "secret"), OTHER, OTHER, follow_symlinks=False)
    if how != "symlink":
        os.chmod(os.path.join(tree, "secret"), 0o700)
    cloak = "no_root_squash,cloak_list=uid +000 3000 3999"  # symbolic links, too
    m = racing(cloak, tree, alterations.hide, after=(call,))
    client = user(USER)
    assert client.error(*([os.symlink, "target"] if how == "symlink" else [make]), m.at("x")) == errno.ENOENT
    assert client.error(os.lstat, m.at("x")) == errno.ENOENT
    assert os.lstat(m.real("x")).st_uid == OTHER
    assert os.lstat(m.real("away")).st_uid == USER


def test_link_answers_with_what_was_linked(secret: str, racing: Racing, user: MakeUser) -> None:
    m = racing(CLOAKED, secret, alterations.hide, after=("link",))
    client = user(USER)
    client.do(write, m.at("mine"), b"mine")
    client.do(os.link, m.at("mine"), m.at("x"))
    assert client.error(os.stat, m.at("x")) == errno.ENOENT
    assert client.do(read, m.at("mine")) == read(m.real("away")) == b"mine"
    assert read(m.real("x")) == b"secret"


# -- nothing hidden is replaced or removed ---------------------------------------------------------

AT_USE = ("rename", "unlink", "rmdir", "renameat2")


@pytest.mark.parametrize("replaces", [False, True])
def test_rename_does_not_replace_what_is_hidden_since_an_instant(
    replaces: bool, secret: str, racing: Racing, user: MakeUser
) -> None:
    m = racing(CLOAKED, secret, alterations.hide, before=AT_USE)
    client = user(USER)
    client.do(write, m.at("y"), b"mine")
    if replaces:
        put(m.real("x"), b"seen", OTHER, 0o644)
    assert client.error(os.rename, m.at("y"), m.at("x")) == errno.EACCES
    assert client.do(read, m.at("y")) == b"mine"
    assert read(m.real("x")) == b"secret"
    assert sorted(os.listdir(secret)) == ["away"] * replaces + ["x", "y"]


def test_rename_replaces_what_has_just_appeared_to_everybody(secret: str, racing: Racing, user: MakeUser) -> None:
    os.chmod(os.path.join(secret, "secret"), 0o644)
    m = racing(CLOAKED, secret, alterations.hide, before=AT_USE)
    client = user(USER)
    client.do(write, m.at("y"), b"mine")
    client.do(os.rename, m.at("y"), m.at("x"))
    assert client.do(os.listdir, m.path) == os.listdir(secret) == ["x"]
    assert client.do(read, m.at("x")) == read(m.real("x")) == b"mine"


def test_rename_finds_its_target_gone(secret: str, racing: Racing, user: MakeUser) -> None:
    m = racing(CLOAKED, secret, alterations.remove, before=AT_USE)
    client = user(USER)
    client.do(write, m.at("y"), b"mine")
    put(m.real("x"), b"seen", OTHER, 0o644)
    client.do(os.rename, m.at("y"), m.at("x"))
    assert client.do(read, m.at("x")) == b"mine"
    assert sorted(os.listdir(secret)) == ["secret", "x"]


@pytest.mark.parametrize("sticky", [False, True])
def test_rename_in_a_hiding_view_does_what_rename_does(
    sticky: bool, tree: str, mount: MakeMount, user: MakeUser
) -> None:
    for name, mode in (("from", 0o1777 if sticky else 0o777), ("to", 0o777)):
        os.mkdir(os.path.join(tree, name))
        os.chmod(os.path.join(tree, name), mode)
    m = mount("-o", CLOAKED)
    client = user(USER)
    for directory in ("from", "to"):
        put(m.real("to", "x"), b"seen", OTHER, 0o644)
        client.do(write, m.at(directory, "y"), directory.encode())
        held = os.open(m.at("to", "x"), os.O_RDONLY)
        client.do(os.rename, m.at(directory, "y"), m.at("to", "x"))
        assert read(m.at("to", "x")) == directory.encode()
        assert os.pread(held, 10, 0) == b"seen"
        os.close(held)
        assert (os.listdir(m.real("from")), os.listdir(m.real("to"))) == ([], ["x"])
    client.do(os.link, m.at("to", "x"), m.at("to", "same"))
    client.do(os.rename, m.at("to", "x"), m.at("to", "same"))
    assert sorted(os.listdir(m.real("to"))) == ["same", "x"]
    for name in ("empty", "full", "full/inside", "other"):
        client.do(os.mkdir, m.at(name))
    client.do(write, m.at("file"), b"")
    assert client.error(os.rename, m.at("file"), m.at("empty")) == errno.EISDIR
    assert client.error(os.rename, m.at("empty"), m.at("file")) == errno.ENOTDIR
    assert client.error(os.rename, m.at("other"), m.at("full")) == errno.ENOTEMPTY
    assert client.error(os.rename, m.at("full"), m.at("full", "inside", "deeper")) == errno.EINVAL
    client.do(os.rename, m.at("full"), m.at("empty"))
    assert os.listdir(m.real("empty")) == ["inside"]


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_what_is_hidden_since_an_instant_is_not_removed(kind: str, tree: str, racing: Racing, user: MakeUser) -> None:
    m = racing(CLOAKED, tree, alterations.hide, before=AT_USE)
    client = user(USER)
    if kind == "file":
        put(m.real("secret"), b"secret", OTHER, 0o600)
        client.do(write, m.at("x"), b"mine")
    else:
        os.mkdir(m.real("secret"), 0o700)
        os.chown(m.real("secret"), OTHER, OTHER)
        client.do(os.mkdir, m.at("x"))
    assert client.error(os.unlink if kind == "file" else os.rmdir, m.at("x")) == errno.ENOENT
    assert os.stat(m.real("x")).st_uid == OTHER
    assert sorted(os.listdir(tree)) == ["away", "x"]


@pytest.fixture
def own(tree: str) -> str:
    """A directory of the user's, with what is hidden from the user, and "x"."""
    own = os.path.join(tree, "own")
    os.mkdir(own)
    os.chown(own, USER, USER)
    os.chmod(own, 0o700)
    put(os.path.join(own, "secret"), b"secret", OTHER, 0o600)
    put(os.path.join(own, "x"), b"mine", USER, 0o600)
    return own


@pytest.mark.parametrize("mode", [0o720, 0o702])
def test_where_others_may_change_names_what_is_hidden_since_an_instant_is_not_removed(
    mode: int, own: str, racing: Racing, user: MakeUser
) -> None:
    os.chmod(own, mode)
    m = racing(CLOAKED, own, alterations.hide, before=AT_USE)
    assert user(USER).error(os.unlink, m.at("own", "x")) == errno.ENOENT
    assert read(m.real("own", "x")) == b"secret"
    assert sorted(os.listdir(own)) == ["away", "x"]


@pytest.mark.parametrize("mode", [0o755, 0o720])
def test_where_nobody_else_may_change_names_a_file_is_removed_without_moving_it_aside(
    mode: int, own: str, racing: Racing, user: MakeUser
) -> None:
    os.chmod(own, mode)
    m = racing(CLOAKED, own, alterations.note_move, before=("renameat2",), happens=mode != 0o755)
    client = user(USER)
    assert client.error(os.unlink, m.at("own", "secret")) == errno.ENOENT
    client.do(os.unlink, m.at("own", "x"))
    assert sorted(os.listdir(own)) == (["secret"] if mode == 0o755 else ["moved", "secret"])


def test_a_second_name_of_a_removed_file_stays(own: str, mount: MakeMount, user: MakeUser) -> None:
    m = mount("-o", CLOAKED)
    client = user(USER)
    client.do(os.link, m.at("own", "x"), m.at("own", "y"))
    client.do(os.unlink, m.at("own", "x"))
    assert client.do(os.stat, m.at("own", "y")).st_nlink == 1
    assert client.error(os.stat, m.at("own", "x")) == errno.ENOENT


def test_removing_in_a_hiding_view_does_what_it_says(tree: str, mount: MakeMount, user: MakeUser) -> None:
    m = mount("-o", CLOAKED)
    client = user(USER)
    os.mkdir(m.real("full"))
    os.chown(m.real("full"), USER, USER)
    put(m.real("full", "hidden"), b"", OTHER, 0o600)
    assert client.do(os.listdir, m.at("full")) == []
    assert client.error(os.rmdir, m.at("full")) == errno.ENOTEMPTY
    os.unlink(m.real("full", "hidden"))
    client.do(os.rmdir, m.at("full"))
    client.do(write, m.at("file"), b"")
    assert client.error(os.rmdir, m.at("file")) == errno.ENOTDIR
    client.do(os.mkdir, m.at("directory"))
    assert client.error(os.unlink, m.at("directory")) == errno.EISDIR
    os.chmod(tree, 0o755)
    assert client.error(os.unlink, m.at("file")) == errno.EACCES
    os.chmod(tree, 0o777)
    client.do(os.unlink, m.at("file"))
    client.do(write, m.at("n" * 255), b"")
    client.do(os.unlink, m.at("n" * 255))
    assert os.listdir(tree) == ["directory"]


# -- nothing hidden is exchanged -------------------------------------------------------------------


def exchange(one: str, two: str) -> None:
    linux.renameat2(-100, os.fsencode(one), -100, os.fsencode(two), linux.RENAME_EXCHANGE)


@pytest.mark.parametrize("is_source", [False, True])
@pytest.mark.parametrize("kind", ["file", "directory"])
def test_what_is_hidden_since_an_instant_is_not_exchanged(
    kind: str, is_source: bool, tree: str, racing: Racing, user: MakeUser
) -> None:
    m = racing(CLOAKED, tree, alterations.hide, before=("renameat2",))
    client = user(USER)
    if kind == "file":
        put(m.real("secret"), b"secret", OTHER, 0o600)
        client.do(write, m.at("x"), b"mine")
    else:
        os.mkdir(m.real("secret"), 0o700)
        os.chown(m.real("secret"), OTHER, OTHER)
        client.do(os.mkdir, m.at("x"))
    hidden = os.stat(m.real("secret")).st_ino
    client.do(write, m.at("y"), b"other")
    names_ = (m.at("x"), m.at("y")) if is_source else (m.at("y"), m.at("x"))
    assert client.error(exchange, *names_) == errno.ENOENT
    assert os.stat(m.real("x")).st_ino == hidden
    assert read(m.real("y")) == b"other"
    assert sorted(os.listdir(tree)) == ["away", "x", "y"]


def test_rename_does_not_move_what_is_hidden_since_an_instant(secret: str, racing: Racing, user: MakeUser) -> None:
    m = racing(CLOAKED, secret, alterations.hide, before=("renameat2",))
    client = user(USER)
    client.do(write, m.at("x"), b"mine")
    client.do(write, m.at("y"), b"other")
    assert client.error(os.rename, m.at("x"), m.at("y")) == errno.ENOENT
    assert read(m.real("x")) == b"secret"
    assert read(m.real("y")) == b"other"


@pytest.mark.parametrize("is_source", [False, True])
def test_what_takes_the_place_of_what_was_exchanged_stays_there(
    is_source: bool, secret: str, racing: Racing, user: MakeUser
) -> None:
    m = racing(CLOAKED, secret, alterations.replace_by_secret, after=("renameat2",))
    client = user(USER)
    client.do(write, m.at("x"), b"mine")
    client.do(write, m.at("y"), b"other")
    client.do(exchange, *((m.at("x"), m.at("y")) if is_source else (m.at("y"), m.at("x"))))
    assert read(m.real("x")) == b"secret"
    assert read(m.real("y")) == b"mine"
    assert sorted(os.listdir(secret)) == ["x", "y"]


TRIES = int(os.environ.get("CLOAKFS_TRIES", "500"))
"""How often. One try in 50 failed when nobody looked at what was exchanged."""


def swap_in(tree: str, name: str, other: str, times: int) -> int:
    """Again and again, put a hidden file in the place of `name`; return how often it did not stay there.

    What is put back at once counts as staying. Otherwise it is now called `other`.
    """
    taken = 0
    path, its_path, hidden, fresh = (os.path.join(tree, it) for it in (name, other, "hidden", "fresh"))
    for number in range(times):
        put(hidden, b"hidden", OTHER, 0o600)
        inode = os.stat(hidden).st_ino
        put(fresh, b"fresh", USER, 0o644)
        os.rename(hidden, path)
        time.sleep(0.0005)
        with contextlib.suppress(AssertionError):
            wait_until(lambda inode=inode: os.stat(path).st_ino == inode, 1, every=0.0005)  # type: ignore[misc]
        os.rename(fresh, path)
        time.sleep(0.0001 * (number % 7))  # so that it comes at another moment each time
        if os.stat(its_path).st_uid == OTHER:
            taken += 1
            put(fresh, b"fresh", USER, 0o644)
            os.rename(fresh, its_path)
    return taken


def exchange_until(one: str, two: str, flag: str) -> tuple[int, int]:
    """Exchange the two names until a file called `flag` exists; return how often that was done, and refused."""
    done = refused = 0
    while not os.path.exists(flag):
        try:
            exchange(one, two)
            done += 1
        except OSError:
            refused += 1
    return done, refused


@pytest.mark.parametrize("is_source", [False, True])
def test_many_exchanges_take_hardly_any_hidden_file_away(
    is_source: bool, tree: str, base: str, mount: MakeMount, user: MakeUser
) -> None:
    m = mount("-o", CLOAKED)
    client = user(USER)
    for name in ("x", "y"):
        client.do(write, m.at(name), b"mine")
    client.start(exchange_until, *((m.at("x"), m.at("y")) if is_source else (m.at("y"), m.at("x"))), f"{base}/stop")
    taken = swap_in(tree, "x", "y", TRIES)
    write(f"{base}/stop", b"")
    done, refused = client.answer_within(30)
    # Another change just before and one just after an exchange escape notice, which a busy machine makes likelier.
    assert taken < TRIES / 100, f"{taken} of {TRIES} ({done} exchanges, {refused} refused)"
    assert done > TRIES / 50
    assert refused > TRIES / 50


# -- descriptors -----------------------------------------------------------------------------------


def keep_open(path: str, flags: int) -> int:
    return os.open(path, flags, 0o644)


def test_a_descriptor_from_create_outlives_the_hiding_of_its_file(tree: str, mount: MakeMount, user: MakeUser) -> None:
    m = mount("-o", CLOAKED)
    client = user(USER)
    fd = client.do(keep_open, m.at("x"), os.O_RDWR | os.O_CREAT)
    client.do(os.write, fd, b"content")
    os.chown(m.real("x"), OTHER, OTHER)
    os.chmod(m.real("x"), 0o600)
    told()
    assert client.error(os.stat, m.at("x")) == errno.ENOENT
    assert client.do(os.fstat, fd).st_size == 7
    assert client.do(os.pread, fd, 100, 0) == b"content"


def set_position_by(fd: int) -> None:
    """O_APPEND no more."""
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_APPEND)


def write_to_mapping(fd: int) -> None:
    with mmap.mmap(fd, 0) as memory:
        memory[:3] = b"map"
        memory.flush()


@pytest.mark.parametrize("creates", [False, True])
def test_what_is_written_at_a_place_goes_there_though_opened_to_append(
    creates: bool, tree: str, mount: MakeMount, user: MakeUser
) -> None:
    """By the daemon; where the kernel writes by itself, it goes on appending (test_passthrough)."""
    m = mount("-o", f"{CLOAKED},passthrough=off")
    client = user(USER)
    flags = os.O_RDWR | os.O_APPEND
    if not creates:
        client.do(write, m.at("x"), b"")
    fd = client.do(keep_open, m.at("x"), flags | os.O_CREAT * creates)
    client.do(os.write, fd, b"0123456789")
    client.do(os.write, fd, b"0123456789")
    client.do(write_to_mapping, fd)
    assert read(m.real("x")) == b"map34567890123456789"
    client.do(set_position_by, fd)
    client.do(os.pwrite, fd, b"here", 10)
    assert read(m.real("x")) == b"map3456789here456789"


def test_appending_in_several_views_and_behind_them_loses_nothing(tree: str, mount: MakeMount, user: MakeUser) -> None:
    put(os.path.join(tree, "log"), b"", USER, 0o666)
    m = mount("-o", f"views={USER}:{USER} {OTHER}:{OTHER}")
    users = [(user(uid), m.at(f"@{uid}", "log")) for uid in (USER, OTHER)] + [(user(OTHER), m.real("log"))]
    fds = [client.do(keep_open, path, os.O_RDWR | os.O_APPEND) for client, path in users]
    expected = b""
    for number in range(30):
        for (client, _), fd in zip(users, fds, strict=True):
            line = f"{number} by {fd}\n".encode() * (number + 1)
            assert client.do(os.write, fd, line) == len(line)
            expected += line
    assert read(m.real("log")) == expected
    for uid in (USER, OTHER):
        assert read(m.at(f"@{uid}", "log")) == expected


_LINE = 64  # bytes, of which no page begins within one: the kernel may send a write to two pages as two requests


def _line(name: str, number: int) -> str:
    return f"{name} {number}".ljust(_LINE - 1) + "\n"


def _append_lines(path: str, flags: int, name: str, seconds: float) -> int:
    """Append numbered lines for so long; return how many."""
    fd = os.open(path, flags | os.O_APPEND)
    until, number = time.monotonic() + seconds, 0
    while time.monotonic() < until:
        os.write(fd, _line(name, number).encode())
        number += 1
    os.close(fd)
    return number


def _look(path: str, seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        os.stat(path)


@pytest.mark.parametrize("flags", [os.O_WRONLY, pytest.param(os.O_RDWR, marks=with_patch)])
def test_looking_at_a_file_that_grows_on_both_sides_loses_nothing(
    flags: int, tree: str, mount: MakeMount, user: MakeUser
) -> None:
    """The kernel ignores a size in an answer that has crossed a write, so the daemon may not rely on its knowing it."""
    put(os.path.join(tree, "log"), b"", USER, 0o666)
    m = mount("-o", f"{CLOAKED},passthrough=off")
    lookers = [user(OTHER) for _ in range(3)]
    for looker in lookers:
        looker.start(_look, m.at("log"), 2)
    appending = {"inside": (user(USER), m.at("log")), "behind": (user(OTHER), m.real("log"))}
    for name, (client, path) in appending.items():
        client.start(_append_lines, path, flags, name, 2)
    counts = {name: client.answer_within(30) for name, (client, _) in appending.items()}
    assert all(looker.finish_within(30) for looker in lookers)
    expected = [_line(name, number) for name, count in counts.items() for number in range(count)]
    assert sorted(read(m.real("log")).decode().splitlines(keepends=True)) == sorted(expected)


def test_a_file_that_may_only_be_appended_to(tree: str, mount: MakeMount, user: MakeUser) -> None:
    m = mount("-o", CLOAKED)
    client = user(USER)
    client.do(write, m.at("x"), b"1")
    if subprocess.run(["chattr", "+a", m.real("x")], check=False, capture_output=True).returncode:
        pytest.skip("this file system, or machine, has no chattr +a")
    try:
        client.do(write, m.at("x"), b"2", os.O_APPEND)
        assert client.error(write, m.at("x"), b"3", 0) == errno.EPERM
        assert read(m.real("x")) == b"12"
    finally:
        with contextlib.suppress(OSError):
            subprocess.run(["chattr", "-a", m.real("x")], check=True)
