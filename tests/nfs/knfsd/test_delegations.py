"""A change behind the mount reaches NFSv4 clients that hold a delegation, and would answer from their own cache."""

import contextlib
import errno
import mmap
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cloakfs.linux import mountinfo
from tests.agents import User
from tests.nfs.knfsd.fixtures import EXPORTS, Service, Share, exported, nfs_mounted
from tests.waiting import wait_until

ANN = 1000
V4 = ("4.0", "4.2")

# Only a delegation makes the client answer from its cache: it keeps no attributes for a time of its own.
OPTIONS = "actimeo=0,nosharecache"

SOON = 3.0
"""Within how many seconds a change is seen. It is milliseconds on a machine that has nothing else to do."""

FOR_LONG = 20.0
"""For how long a delegation is waited for: v4.0 has a connection of its own for recalls, which is tried first."""


def device_of(share: Share) -> str:
    return next(place.device for place in mountinfo.by_id().values() if place.path == share.path)


def delegations(share: Share) -> int:
    """How many there are on files of this mount."""
    device = [int(number) for number in device_of(share).split(":")]
    wanted = f'type: deleg, access: r, superblock: "{device[0]:02x}:{device[1]:02x}:'
    return sum(states.read_text().count(wanted) for states in Path("/proc/fs/nfsd/clients").glob("*/states"))


def read(path: str) -> str:
    return Path(path).read_text()


def size(path: str) -> int:
    return os.stat(path).st_size


def seen(who: User, what: Callable[[str], object], path: str, wanted: object) -> float:
    """After how many seconds the client sees it; infinity if it does not soon."""
    # A client that looks a name up before the server's kernel has dropped it remembers that answer, and nothing tells
    # when that has been dropped.
    time.sleep(0.3)
    began = time.monotonic()
    while time.monotonic() - began < SOON:
        if who.do(what, path) == wanted:
            return time.monotonic() - began
        time.sleep(0.01)
    return float("inf")


def exists(path: str) -> bool:
    return os.path.lexists(path)


def mode(path: str) -> int:
    return os.stat(path).st_mode & 0o777


def links(path: str) -> int:
    return os.stat(path).st_nlink


class Reader:
    """A client that holds delegations of files which it has open."""

    def __init__(self, tree: Share, place: str, who: User) -> None:
        self.tree, self.place, self.who = tree, place, who
        self.open: list[int] = []

    def hold(self, name: str) -> str:
        """Open a file for reading until there is a delegation of it, and keep it open; return its path."""
        path = os.path.join(self.place, name)
        before = delegations(self.tree)

        def is_delegated() -> bool:
            if delegations(self.tree) != before:
                return True
            self.open.append(self.who.do(os.open, path, os.O_RDONLY))
            self.who.do(os.read, self.open[-1], 10)
            return False

        wait_until(is_delegated, FOR_LONG, every=0.05)
        return path

    def close(self) -> None:
        """Close all files; the delegations stay."""
        while self.open:
            self.who.error(os.close, self.open.pop())


def prepare(tree: str) -> None:
    os.mkdir(f"{tree}/below")
    os.chmod(f"{tree}/below", 0o777)
    for name in (
        "written",
        "same",
        "mapped",
        "emptied",
        "mode",
        "replaced",
        "new",
        "removed",
        "renamed",
        "linked",
        "below/by-entry",
    ):
        Path(tree, name).write_text("old")
        os.chmod(Path(tree, name), 0o666)


@pytest.fixture(scope="module", params=V4)
def reader(service: Service, request: pytest.FixtureRequest) -> Iterator[Reader]:
    who = User(ANN)
    with (
        exported(service, "rw,cloak_list = uid +007 0 -1", prepare) as tree,
        nfs_mounted(tree, request.param, OPTIONS) as place,
    ):
        made = Reader(tree, place, who)
        yield made
        made.close()
        who.close()


only_one = pytest.mark.parametrize("reader", ["4.2"], indirect=True)


def test_content(reader: Reader) -> None:
    path = reader.hold("written")
    assert reader.who.do(read, path) == "old"
    Path(reader.tree.real("written")).write_text("NEW data")
    assert seen(reader.who, size, path, 8) < SOON
    assert reader.who.do(read, path) == "NEW data"
    assert reader.who.do(os.pread, reader.open[-1], 20, 0) == b"NEW data"


def test_content_of_the_same_size(reader: Reader) -> None:
    """Only the ctime tells a client that it changed, and tells it nothing while it holds the delegation."""
    path = reader.hold("same")
    assert reader.who.do(read, path) == "old"
    with open(reader.tree.real("same"), "r+") as file:
        file.write("NEW")
    assert seen(reader.who, read, path, "NEW") < SOON
    assert reader.who.do(os.pread, reader.open[-1], 20, 0) == b"NEW"


@only_one
def test_a_mapping(reader: Reader) -> None:
    """What was written through it is seen when it is gone, and the file closed."""
    path = reader.hold("mapped")
    assert reader.who.do(read, path) == "old"
    with open(reader.tree.real("mapped"), "r+b") as file, mmap.mmap(file.fileno(), 3) as mapped:
        mapped[:] = b"NEW"
    assert seen(reader.who, read, path, "NEW") < SOON
    assert reader.who.do(os.pread, reader.open[-1], 20, 0) == b"NEW"


@only_one
def test_the_size_alone(reader: Reader) -> None:
    path = reader.hold("emptied")
    assert reader.who.do(size, path) == 3
    os.truncate(reader.tree.real("emptied"), 0)
    assert seen(reader.who, size, path, 0) < SOON


def test_attributes(reader: Reader) -> None:
    path = reader.hold("mode")
    os.chmod(reader.tree.real("mode"), 0o604)
    assert seen(reader.who, mode, path, 0o604) < SOON


@only_one
def test_another_file_under_the_name(reader: Reader) -> None:
    path = reader.hold("replaced")
    Path(reader.tree.real("new")).write_text("another file")
    os.rename(reader.tree.real("new"), reader.tree.real("replaced"))
    assert seen(reader.who, read, path, "another file") < SOON
    assert reader.who.do(os.pread, reader.open[-1], 20, 0) == b"old"


@only_one
def test_no_name(reader: Reader) -> None:
    path = reader.hold("removed")
    os.unlink(reader.tree.real("removed"))
    assert seen(reader.who, exists, path, False) < SOON


@only_one
def test_another_name(reader: Reader) -> None:
    path = reader.hold("renamed")
    os.rename(reader.tree.real("renamed"), reader.tree.real("below/renamed"))
    assert seen(reader.who, exists, path, False) < SOON


@only_one
def test_a_further_name(reader: Reader) -> None:
    path = reader.hold("linked")
    os.link(reader.tree.real("linked"), reader.tree.real("further"))
    assert seen(reader.who, links, path, 2) < SOON


@only_one
def test_hidden_now(reader: Reader) -> None:
    """What the file's mode, changed behind the mount, hides from the client."""
    Path(reader.tree.real("hidden")).write_text("old")
    os.chmod(reader.tree.real("hidden"), 0o666)
    path = reader.hold("hidden")
    reader.close()  # who has it open may go on with it
    os.chmod(reader.tree.real("hidden"), 0o660)
    assert seen(reader.who, exists, path, False) < SOON


@only_one
def test_through_another_entry(reader: Reader, service: Service) -> None:
    """Another mount of the same tree, by which a client writes."""
    path = reader.hold("below/by-entry")
    name = f"{reader.tree.name}-below"
    service.write(name, f"{reader.tree.real('below')} *(insecure,rw,no_root_squash)\n")
    service.take_over()
    try:
        other = Share(service, name, reader.tree.real("below"), f"{reader.tree.path}-below")
        with nfs_mounted(other, "4.2", OPTIONS) as place:
            Path(place, "by-entry").write_text("NEW data")
            assert seen(reader.who, read, path, "NEW data") < SOON
    finally:
        os.unlink(f"{EXPORTS}/{name}.exports")
        service.take_over()


def test_through_another_view(service: Service) -> None:
    """Of the same mount: for one view, what another does is a change behind the mount."""
    options = f"rw,no_root_squash,views = {ANN}:{ANN} {ANN + 1}:{ANN + 1}"
    who, root = User(0), User(0)
    with exported(service, options, prepare) as tree, nfs_mounted(tree, "4.2", OPTIONS) as place:
        reader = Reader(tree, f"{place}/@{ANN}", who)
        path = reader.hold("written")
        root.do(Path(tree.path, f"@{ANN + 1}", "written").write_text, "NEW data")
        assert seen(who, read, path, "NEW data") < SOON
        reader.close()
        who.close()
        root.close()


def test_of_an_entry_that_is_read_only(service: Service) -> None:
    """The daemon can have its delegations recalled, too; no caller can write."""
    who, root = User(ANN), User(0)
    with (
        exported(service, "ro,no_root_squash", prepare) as tree,
        nfs_mounted(tree, "4.2", OPTIONS) as place,
        contextlib.closing(who),
        contextlib.closing(root),
    ):
        reader = Reader(tree, place, who)
        path = reader.hold("written")
        Path(tree.real("written")).write_text("NEW data")
        assert seen(who, size, path, 8) < SOON
        assert who.do(read, path) == "NEW data"
        reader.close()
        changes: tuple[tuple[Any, ...], ...] = (
            (os.open, os.O_WRONLY), (os.truncate, 0), (os.chmod, 0o600), (os.unlink,), (os.utime,),
        )  # fmt: skip
        for call, *more in changes:
            assert root.error(call, os.path.join(tree.path, "written"), *more) == errno.EROFS, call
            assert root.error(call, os.path.join(place, "written"), *more) in (errno.EROFS, errno.EACCES), call
        for at in (tree.path, place):
            assert root.error(os.mkdir, os.path.join(at, "made")) == errno.EROFS, at
        assert Path(tree.real("written")).read_text() == "NEW data"
