"""What was moved out of the tree cannot be used through the mount any more, even where nothing is hidden.

Whoever stands in a directory, has a descriptor of it, or a file handle, gets ESTALE, for it and for everything below.
What is moved within the tree stays usable, and what is moved back in becomes usable again.
"""

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from cloakfs import linux
from tests.agents import User, read, write
from tests.mount import alterations
from tests.mount.conftest import Mount, daemons_with, told
from tests.mount.test_trees import drop_caches, handle_of, steady
from tests.waiting import wait_until

MakeMount = Callable[..., Mount]
MakeUser = Callable[..., User]

ANN, BEN = 4001, 4002
NULL = "no_root_squash"
VIEWS = f"no_root_squash,views={ANN}:{ANN} {BEN}:{BEN}"
CLOAKED = "no_root_squash,cloak_list=uid +007 1 9999"
OPTIONS = [NULL, f"{NULL},all_squash,anonuid={ANN},anongid={ANN}", CLOAKED]


def put(top: str) -> None:
    os.makedirs(f"{top}/dir/sub/deep")
    os.mkdir(f"{top}/other")
    for name in ("file", "dir/file", "dir/sub/file", "dir/sub/deep/file"):
        write(f"{top}/{name}", name.encode())
        os.chmod(f"{top}/{name}", 0o666)
    for name in ("dir", "dir/sub", "dir/sub/deep", "other"):
        os.chmod(f"{top}/{name}", 0o777)


@dataclass
class Place:
    """`source` is served; `outside` is on the same file system, and is not."""

    source: str
    outside: str


@pytest.fixture
def place(base: str) -> Place:
    source, outside = os.path.join(base, "inside"), os.path.join(base, "outside")
    os.mkdir(source)
    os.mkdir(outside)
    os.chmod(outside, 0o777)
    put(source)
    return Place(source, outside)


# -- what users try: functions of their processes --------------------------------------------------


def create(path: str, dir_fd: int | None = None) -> None:
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666, dir_fd=dir_fd))


def slurp(path: str, dir_fd: int | None = None) -> bytes:
    fd = os.open(path, os.O_RDONLY, dir_fd=dir_fd)
    try:
        return os.read(fd, 100)
    finally:
        os.close(fd)


def reopen(fd: int) -> bytes:
    return slurp(f"/proc/self/fd/{fd}")


def error_of(someone: User, call: Callable[..., object], *args: object) -> int:
    try:
        someone.do(call, *args)
    except OSError as exc:
        return exc.errno or -1
    return 0


CALLS: list[tuple[Callable[..., object], tuple[object, ...]]] = [
    (os.stat, (".",)),
    (os.listdir, (".",)),
    (slurp, ("file",)),
    (os.stat, ("sub",)),
    (os.listdir, ("sub",)),
    (slurp, ("sub/deep/file",)),
    (create, ("made",)),
    (os.mkdir, ("made.d",)),
    (os.rename, ("file", "renamed")),
    (os.link, ("file", "linked")),
    (os.symlink, ("file", "symlink")),
    (os.unlink, ("file",)),
    (os.chmod, (".", 0o700)),
    (os.listxattr, (".",)),
]


def refused(someone: User) -> None:
    """Nothing works in the working directory, and a name in it, too, is refused: it leads nowhere, or is stale."""
    for call, args in CALLS:
        assert error_of(someone, call, *args) in (errno.ESTALE, errno.ENOENT), (call, args)
    assert error_of(someone, os.stat, ".") == errno.ESTALE


def works(someone: User) -> None:
    assert someone.do(slurp, "file") == b"dir/file"
    assert someone.do(slurp, "sub/deep/file") == b"dir/sub/deep/file"
    assert "sub" in someone.do(os.listdir, ".")
    someone.do(create, "made")
    someone.do(os.unlink, "made")


def untouched(top: str) -> None:
    assert sorted(os.listdir(top)) == ["file", "sub"]
    assert os.stat(top).st_mode & 0o777 == 0o777


@pytest.mark.parametrize("options", OPTIONS)
def test_a_working_directory(options: str, place: Place, mount: MakeMount, user: MakeUser) -> None:
    m = mount("-o", options, source=place.source)
    someone, below, another = user(ANN), user(BEN), user(BEN)
    someone.do(os.chdir, m.at("dir"))
    below.do(os.chdir, m.at("dir/sub/deep"))
    another.do(os.chdir, m.at("other"))
    works(someone)
    os.rename(f"{place.source}/dir", f"{place.outside}/dir")
    told()
    refused(someone)
    assert error_of(below, os.stat, ".") == errno.ESTALE
    assert error_of(below, create, "made") == errno.ESTALE
    assert error_of(below, slurp, "file") in (errno.ESTALE, errno.ENOENT)
    untouched(f"{place.outside}/dir")
    another.do(create, "made")  # all else works as before
    assert another.do(slurp, "../file") == b"file"
    os.rename(f"{place.outside}/dir", f"{place.source}/other/back")
    told()
    works(someone)
    assert below.do(slurp, "file") == b"dir/sub/deep/file"


def test_descriptors(place: Place, mount: MakeMount, user: MakeUser) -> None:
    m = mount("-o", NULL, source=place.source)
    someone = user(ANN)
    path = someone.do(os.open, m.at("dir"), os.O_PATH)
    opened = someone.do(os.open, m.at("dir"), os.O_RDONLY)
    below = someone.do(os.open, m.at("dir/sub"), os.O_PATH)
    file = someone.do(os.open, m.at("dir/file"), os.O_PATH)
    content = someone.do(os.open, m.at("dir/sub/file"), os.O_RDWR)
    assert someone.do(slurp, "file", path) == b"dir/file"
    os.rename(f"{place.source}/dir", f"{place.outside}/dir")
    told()
    for fd in (path, opened, below, file):
        assert error_of(someone, os.stat, fd) == errno.ESTALE
    for fd in (path, opened, below):
        assert error_of(someone, slurp, "file", fd) in (errno.ESTALE, errno.ENOENT)
        assert error_of(someone, create, "made", fd) == errno.ESTALE
    assert error_of(someone, os.listdir, opened) == errno.ESTALE
    assert error_of(someone, reopen, file) == errno.ESTALE
    untouched(f"{place.outside}/dir")
    # An open file stays readable and writable. It cannot be opened anew.
    assert someone.do(os.pread, content, 100, 0) == b"dir/sub/file"
    assert someone.do(os.pwrite, content, b"DIR", 0) == 3
    assert someone.do(os.fstat, content).st_size == len("dir/sub/file")
    assert read(f"{place.outside}/dir/sub/file") == b"DIR/sub/file"
    assert error_of(someone, reopen, content) == errno.ESTALE
    os.rename(f"{place.outside}/dir", f"{place.source}/dir")
    told()
    assert someone.do(slurp, "file", path) == b"dir/file"
    assert someone.do(reopen, file) == b"dir/file"


def test_a_file(place: Place, mount: MakeMount, user: MakeUser) -> None:
    m = mount("-o", NULL, source=place.source)
    someone = user(ANN)
    held = someone.do(os.open, m.at("dir/file"), os.O_PATH)
    os.rename(f"{place.source}/dir/file", f"{place.source}/other/elsewhere")  # a directory that nobody has looked at
    told()
    assert someone.do(reopen, held) == b"dir/file"
    os.rename(f"{place.source}/other/elsewhere", f"{place.source}/dir/sub/deep/file")
    told()
    assert someone.do(reopen, held) == b"dir/file"
    os.rename(f"{place.source}/dir/sub/deep/file", f"{place.outside}/file")
    told()
    assert error_of(someone, os.stat, held) == errno.ESTALE
    assert error_of(someone, reopen, held) == errno.ESTALE
    assert error_of(someone, os.chmod, f"/proc/self/fd/{held}", 0o600) == errno.ESTALE
    os.rename(f"{place.outside}/file", f"{place.source}/other/file")
    told()
    assert someone.do(reopen, held) == b"dir/file"
    os.rename(f"{place.source}/other/file", f"{place.outside}/file")
    os.rename(f"{place.outside}", f"{place.source}/dir/sub/from outside")  # it comes back with its directory
    told()
    assert someone.do(reopen, held) == b"dir/file"


def test_a_hard_link_that_is_left_in_the_tree(place: Place, mount: MakeMount, user: MakeUser) -> None:
    os.link(f"{place.source}/dir/file", f"{place.source}/other/link")
    m = mount("-o", NULL, source=place.source)
    someone = user(ANN)
    someone.do(os.stat, m.at("other/link"))
    held = someone.do(os.open, m.at("dir/file"), os.O_PATH)
    os.rename(f"{place.source}/dir", f"{place.outside}/dir")
    told()
    assert someone.do(reopen, held) == b"dir/file"
    os.rename(f"{place.source}/other/link", f"{place.outside}/link")
    told()
    assert error_of(someone, reopen, held) == errno.ESTALE


def test_an_exchange_takes_one_out_and_the_other_in(place: Place, mount: MakeMount, user: MakeUser) -> None:
    m = mount("-o", NULL, source=place.source)
    someone = user(ANN)
    someone.do(os.chdir, m.at("dir"))
    os.mkdir(f"{place.outside}/new")
    os.chmod(f"{place.outside}/new", 0o777)
    linux.renameat2(-100, f"{place.source}/dir".encode(), -100, f"{place.outside}/new".encode(), linux.RENAME_EXCHANGE)
    told()
    refused(someone)
    someone.do(create, m.at("dir/made"))
    assert os.listdir(f"{place.source}/dir") == ["made"]


def test_what_is_renamed_in_the_tree_stays_usable(place: Place, mount: MakeMount, user: MakeUser) -> None:
    m = mount("-o", NULL, source=place.source)
    someone, out = user(ANN), user(BEN)
    os.mkdir(f"{place.source}/gone")
    out.do(os.chdir, m.at("gone"))
    os.rename(f"{place.source}/gone", f"{place.outside}/gone")  # so that places are looked at
    someone.do(os.chdir, m.at("dir"))
    for to in ("renamed", "other/below", "dir"):
        came_from = next(name for name in ("dir", "renamed", "other/below") if os.path.exists(f"{place.source}/{name}"))
        os.rename(f"{place.source}/{came_from}", f"{place.source}/{to}")
        told()
        works(someone)
    os.rename(m.at("dir"), m.at("other/through the mount"))
    works(someone)
    assert error_of(out, os.stat, ".") == errno.ESTALE


def test_a_removed_working_directory_is_as_ever(place: Place, mount: MakeMount, user: MakeUser) -> None:
    m = mount("-o", NULL, source=place.source)
    someone, out = user(ANN), user(BEN)
    os.mkdir(f"{place.source}/empty")
    someone.do(os.chdir, m.at("empty"))
    out.do(os.chdir, m.at("dir"))
    os.rename(f"{place.source}/dir", f"{place.outside}/dir")
    os.rmdir(f"{place.source}/empty")
    told()
    assert someone.do(os.stat, ".").st_nlink == 0


def error_of_handle(mountpoint: str, handle: bytes) -> int:
    top = os.open(mountpoint, os.O_RDONLY)
    try:
        fd = linux.open_by_handle(top, handle, os.O_RDONLY)
        try:
            os.fstat(fd)
        finally:
            os.close(fd)
    except OSError as exc:
        return exc.errno or -1
    finally:
        os.close(top)
    return 0


@pytest.mark.parametrize("how", ["known", "forgotten", "restarted"])
@pytest.mark.parametrize("arguments", [("-o", NULL), ("-o", f"{NULL},all_squash")])
def test_handles(how: str, arguments: tuple[str, ...], place: Place, base: str) -> None:
    with steady(place.source, base) as mount, contextlib.ExitStack() as stack:
        m = stack.enter_context(mount(*arguments))
        moved = ["dir", "dir/sub", "dir/sub/deep/file", "dir/file"]
        kept = ["other", "file"]
        handles = {name: handle_of(m.at(name)) for name in [*moved, *kept]}

        def again() -> None:
            if how == "forgotten":
                drop_caches()
            elif how == "restarted":
                stack.close()
                stack.enter_context(mount(*arguments))

        def error(name: str) -> int:
            return error_of_handle(m.path, handles[name])

        again()
        assert {name: error(name) for name in handles} == dict.fromkeys(handles, 0)
        again()
        os.rename(f"{place.source}/dir", f"{place.outside}/dir")
        told()
        assert {name: error(name) for name in handles} == {
            **dict.fromkeys(moved, errno.ESTALE),
            **dict.fromkeys(kept, 0),
        }
        again()
        assert error("dir/sub/deep/file") == errno.ESTALE
        os.rename(f"{place.source}/file", f"{place.outside}/file")
        told()
        assert error("file") == errno.ESTALE
        again()
        assert error("file") == errno.ESTALE
        os.rename(f"{place.outside}/dir", f"{place.source}/other/dir")
        os.rename(f"{place.outside}/file", f"{place.source}/file")
        told()
        again()
        assert {name: error(name) for name in handles} == dict.fromkeys(handles, 0)


def test_moved_while_no_daemon_runs(place: Place, base: str) -> None:
    with steady(place.source, base) as mount:
        with mount("-o", NULL) as m:
            handles = {name: handle_of(m.at(name)) for name in ("dir", "dir/sub/file", "dir/file", "file")}
        os.rename(f"{place.source}/dir/sub", f"{place.outside}/sub")
        os.rename(f"{place.source}/file", f"{place.source}/renamed")
        with mount("-o", NULL) as m:
            assert {name: error_of_handle(m.path, handle) for name, handle in handles.items()} == {
                "dir": 0,
                "dir/sub/file": errno.ESTALE,
                "dir/file": 0,
                "file": 0,
            }


def standing(m: Mount, someone: User, directory: str = "dir") -> int:
    """Make a user stand in a directory; return a descriptor that the user has of `file`."""
    someone.do(os.chdir, m.at(directory))
    held = someone.do(os.open, m.at("file"), os.O_PATH)
    assert someone.do(reopen, held) == b"file"
    return held


def becomes(someone: User, held: int, error: int, name: str) -> None:
    """Before long, making `name` where the user stands and opening what is held end in this error; 0: succeed."""
    wait_until(lambda: error_of(someone, create, name) == error, 10)
    wait_until(lambda: error_of(someone, reopen, held) == error, 10)


def move(origin: str, destination: str, *names: str) -> None:
    for name in names:
        os.rename(f"{origin}/{name}", f"{destination}/{name}")


@pytest.fixture
def unreported() -> Iterator[None]:
    """Daemons to which the kernel reports nothing."""
    with daemons_with(alterations.watch_nothing):
        yield


@pytest.mark.usefixtures("unreported")
def test_without_reports_it_takes_a_second(place: Place, mount: MakeMount, user: MakeUser) -> None:
    m = mount("-o", NULL, source=place.source)
    someone = user(ANN)
    held = standing(m, someone, "dir/sub")
    assert someone.do(slurp, "deep/file") == b"dir/sub/deep/file"
    move(place.source, place.outside, "dir", "file")
    becomes(someone, held, errno.ESTALE, "made")
    os.rename(f"{place.outside}/dir", f"{place.source}/other/dir")
    move(place.outside, place.source, "file")
    becomes(someone, held, 0, "again")


@pytest.fixture
def lossy() -> Iterator[None]:
    """Daemons to which it is reported, instead of renames, that reports were lost."""
    with daemons_with(alterations.lose_renames):
        yield


@pytest.mark.usefixtures("lossy")
def test_when_reports_were_lost(place: Place, mount: MakeMount, user: MakeUser) -> None:
    m = mount("-o", NULL, source=place.source)
    someone = user(ANN)
    held = standing(m, someone)
    works(someone)
    os.rename(f"{place.source}/dir", f"{place.source}/other/dir")
    os.rename(f"{place.source}/file", f"{place.source}/renamed")
    told()
    works(someone)
    assert someone.do(reopen, held) == b"file"
    os.rename(f"{place.source}/other/dir", f"{place.outside}/dir")
    os.rename(f"{place.source}/renamed", f"{place.outside}/file")
    told()
    refused(someone)
    assert error_of(someone, reopen, held) == errno.ESTALE
    os.rename(f"{place.outside}/dir", f"{place.source}/dir")
    os.rename(f"{place.outside}/file", f"{place.source}/renamed")
    told()
    works(someone)
    assert someone.do(reopen, held) == b"file"


def test_every_view_of_a_mount(place: Place, mount: MakeMount, user: MakeUser) -> None:
    m = mount("-o", VIEWS, source=place.source)
    people = {uid: user(uid) for uid in (ANN, BEN)}
    for uid, one in people.items():
        one.do(os.chdir, m.at(f"@{uid}", "dir"))
        works(one)
    os.rename(f"{place.source}/dir", f"{place.outside}/dir")
    told()
    for one in people.values():
        refused(one)
    assert not Path(f"{place.outside}/dir/made").exists()


def test_a_file_that_is_renamed_in_the_tree_where_something_is_hidden(
    place: Place, mount: MakeMount, user: MakeUser
) -> None:
    m = mount("-o", CLOAKED, source=place.source)
    someone = user(ANN)
    held = someone.do(os.open, m.at("dir/file"), os.O_PATH)
    for before, now in (("dir/file", "dir/renamed"), ("dir/renamed", "file"), ("file", "other/elsewhere")):
        os.rename(f"{place.source}/{before}", f"{place.source}/{now}")
        told()
        assert someone.do(reopen, held) == b"dir/file"


def test_over_another_mount(base: str, mount: MakeMount, user: MakeUser) -> None:
    """There, nothing is reported to the daemon, and threads find out where things are."""
    top = os.path.join(base, "lower")
    os.makedirs(f"{top}/inside")
    os.mkdir(f"{top}/outside")
    put(f"{top}/inside")
    lower = mount("-o", NULL, source=top)
    m = mount("-o", NULL, source=lower.at("inside"))
    someone = user(ANN)
    held = standing(m, someone)
    works(someone)
    move(f"{top}/inside", f"{top}/outside", "dir", "file")
    becomes(someone, held, errno.ESTALE, "made")
    refused(someone)
    move(f"{top}/outside", f"{top}/inside", "dir", "file")
    becomes(someone, held, 0, "again")
