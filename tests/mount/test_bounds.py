"""What the daemon keeps for one caller is bounded, so that nothing is missing for another."""

import contextlib
import errno
import gc
import os
import resource
import sqlite3
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cloakfs import linux
from cloakfs.accounts.threadstatus import ThreadStatus
from cloakfs.filesystem.handles import HalfRead, OpenDirectory
from cloakfs.identity import Caller, ClientId
from cloakfs.linux import mountinfo
from cloakfs.policy import Policy
from cloakfs.state.runtime import STATE_DIR
from cloakfs.tree import actor, filesystems, visibility
from cloakfs.tree.computed import COMPUTED
from cloakfs.tree.index import Index
from cloakfs.tree.nodes import Nodes
from cloakfs.tree.objects import Object, Stale
from cloakfs.view import View
from tests.agents import User, write
from tests.mount import alterations
from tests.mount.conftest import Mount, daemons_with, told
from tests.mount.loopfs import attached, filesystem
from tests.mount.test_caching import requests
from tests.mount.test_trees import by_handle, handle_of, steady
from tests.waiting import wait_until

MakeUser = Callable[..., User]


# -- groups ----------------------------------------------------------------------------------------


def groups_without_descriptors(pids: list[int]) -> list[frozenset[ClientId]]:
    """Of several processes, when there is no descriptor to be had."""
    source = ThreadStatus()
    known = [source.groups(pid) for pid in pids[:2]]
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
    taken: list[int] = []
    with contextlib.suppress(OSError):
        while True:
            taken.append(os.dup(0))
    found = [source.groups(pid) for _ in range(2) for pid in pids]
    assert known == found[:2]
    for fd in taken:
        os.close(fd)
    return found


def test_groups_are_found_without_a_descriptor(user: MakeUser) -> None:
    daemon = user(0)
    callers = [user(4001 + number, 4001, [5000 + number, 6000]) for number in range(5)]
    for caller in callers:
        caller.do(os.getpid)  # it has its groups
    found = daemon.do(groups_without_descriptors, [caller.pid for caller in callers])
    assert found == [frozenset({5000 + number, 6000}) for number in range(5)] * 2


def still_kept(groups: list[weakref.ref[frozenset[Any]]]) -> int:
    """Return how many groups there are in all lists that somebody still refers to."""
    gc.collect()
    return sum(len(one) for ref in groups if (one := ref()) is not None)


def test_lists_of_groups_are_bounded_in_size(user: MakeUser) -> None:
    source, before = ThreadStatus(), set(os.listdir("/proc/self/fd"))
    found = []
    for number in range(12):
        many = range(10_000 + number, 40_000 + number)
        with User(4001, 4001, many) as caller:
            caller.do(os.getpid)  # it has its groups
            groups = source.groups(caller.pid)
        assert groups == frozenset(many)
        found.append(weakref.ref(groups))
        del groups
    assert 0 < still_kept(found) <= 200_000  # in /proc, a MiB
    for fd in set(os.listdir("/proc/self/fd")) - before:
        with contextlib.suppress(OSError):
            os.close(int(fd))


def test_identities_with_many_groups_are_bounded_in_size() -> None:
    view, made = View(Policy()), []
    for number in range(50):
        caller = Caller(4001, 4001, frozenset(range(number, 30_000 + number)))
        made.append(weakref.ref(caller.groups))
        who = view.identify(caller)
        assert who is not None
        assert len(actor.credentials(who).groups) >= 29_990
        assert actor.actor(who).caller == who
    del caller, who
    # By the view, and where credentials are made ready for the kernel.
    assert 0 < still_kept(made) <= 200_000 + linux.MOST_LONG * 30_000
    small = Caller(1, 1, frozenset({1, 2}))
    assert view.identify(small) is view.identify(small)
    assert actor.actor(small) is actor.actor(small)


def test_many_groups_are_neither_copied_nor_hashed_again() -> None:
    view, many = View(Policy()), frozenset(range(100_000, 165_536))
    callers = [Caller(4001, 4001, actor.with_group(many, 4001)) for _ in range(2)]
    assert callers[0].groups is callers[1].groups
    assert callers[0].groups == many | {4001}
    first, second = (actor.credentials(view.identify(caller) or caller) for caller in callers)
    assert first is second
    assert first.groups == tuple(range(100_000, 165_536))


def groups_of_many() -> list[list[int]]:
    """Act as several identities, each of which may be at the address of the one before; return their groups."""
    found = []
    for number in range(20):
        linux.credentials.assume(linux.Credentials(1, 1, tuple(range(number, number + 100))))
        found.append(os.getgroups())
    linux.act_as_daemon()
    return found


def test_another_identity_at_the_same_address_is_another(user: MakeUser) -> None:
    assert user(0).do(groups_of_many) == [[*range(number, number + 100)] for number in range(20)]


# -- the index -------------------------------------------------------------------------------------


@pytest.fixture
def known_by_id(nodes: Nodes) -> None:
    if not nodes.root.filesystem.is_certain:
        pytest.skip(f"{nodes.root.filesystem.kind} does not say for certain which file system a handle is of")


def meet(nodes: Nodes, parent: Object, name: str) -> Object:
    """As a LOOKUP does."""
    fd = os.open(name, os.O_PATH | os.O_NOFOLLOW, dir_fd=nodes.descriptors.fd(parent))
    obj = nodes.registry.resolve(fd, parent, os.fsencode(name))
    obj.lookups += 1
    return obj


def test_a_descriptor_that_cannot_be_looked_at_is_closed(
    nodes: Nodes, tree: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path(tree, "file").touch()
    fd = os.open(f"{tree}/file", os.O_PATH)
    file = nodes.registry.resolve(fd, nodes.root, b"file", nodes.mounts.stat(fd))
    nodes.descriptors.close(file)

    def fail(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(file.filesystem, "stat", fail)
    fd = os.open(f"{tree}/file", os.O_PATH)
    with pytest.raises(OSError, match="Input/output"):
        nodes.descriptors.cache(file, fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_a_file_is_never_taken_for_a_directory(nodes: Nodes, tree: str) -> None:
    """Some file systems use a handle again; a file has no room for what is known of a directory."""
    Path(tree, "file").touch()
    os.makedirs(os.path.join(tree, "directory", "below"))
    fd = os.open(f"{tree}/file", os.O_PATH)
    file = nodes.registry.resolve(fd, nodes.root, b"file", nodes.mounts.stat(fd))
    file.lookups += 1
    nodes.descriptors.close(file)
    fd = os.open(f"{tree}/directory", os.O_PATH)
    with pytest.raises(Stale):
        nodes.descriptors.cache(file, fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    with pytest.raises(Stale):
        nodes.registry.resolve(os.open(f"{tree}/directory/below", os.O_PATH), file, b"below")
    visibility.Visibility(nodes).access_paths.changed(file)  # an event says so


def grow_idle_and_forget(nodes: Nodes, *objects: Object) -> None:
    for _ in range(2):
        list(nodes.descriptors.close_idle())
    for obj in objects:
        nodes.forget(obj.number, 1)


def is_stored(nodes: Nodes, number: int) -> bool:
    """Whether anything is stored about the object with this number."""
    if nodes.numbers.computed is not None and nodes.numbers.places is not None and number & COMPUTED:
        return nodes.numbers.places.find(nodes.numbers.computed.packed_of(number)) is not None
    return nodes.index.find(number) is not None


def sweep(nodes: Nodes, index: Index) -> None:
    nodes.numbers.commit()
    for _ in range(3):
        nodes.sweeper.swept(nodes.sweeper.sweep()())
    index.tidy()


@pytest.mark.usefixtures("known_by_id")
def test_what_was_idle_when_it_was_deleted_leaves_no_row(nodes: Nodes, index: Index, tree: str) -> None:
    for name in ("deleted", "kept", "known"):
        Path(tree, name).touch()
    deleted, kept, known = (meet(nodes, nodes.root, name) for name in ("deleted", "kept", "known"))
    for _ in range(2):
        list(nodes.descriptors.close_idle())
    os.unlink(f"{tree}/deleted")
    os.unlink(f"{tree}/known")
    grow_idle_and_forget(nodes, deleted, kept)
    assert is_stored(nodes, deleted.number)
    sweep(nodes, index)
    assert not is_stored(nodes, deleted.number)
    assert is_stored(nodes, kept.number)
    assert is_stored(nodes, known.number), "the kernel knows it"
    with pytest.raises(Stale):
        nodes.get(deleted.number)
    # No number is given again.
    Path(tree, "new").touch()
    assert meet(nodes, nodes.root, "new").number not in (deleted.number, known.number)


@pytest.mark.usefixtures("known_by_id")
def test_who_left_a_directory_before_it_was_deleted_is_found(nodes: Nodes, index: Index, tree: str) -> None:
    os.mkdir(f"{tree}/directory")
    Path(tree, "directory", "file").touch()
    directory = meet(nodes, nodes.root, "directory")
    file = meet(nodes, directory, "file")
    grow_idle_and_forget(nodes, file, directory)
    os.rename(f"{tree}/directory/file", f"{tree}/file")
    os.rmdir(f"{tree}/directory")
    sweep(nodes, index)
    assert not is_stored(nodes, directory.number)
    again = nodes.get(file.number)
    assert os.fstat(nodes.descriptors.fd(again)).st_ino == os.stat(f"{tree}/file").st_ino


def test_an_xfs_is_told_from_another_one_at_the_same_place(base: str) -> None:
    """Else what is deleted could not leave the index: it may only be on the other disk."""
    place, database = os.path.join(base, "place"), os.path.join(base, "xfs.sqlite")
    with (
        filesystem("xfs", base, "first") as first,
        filesystem("xfs", base, "second") as second,
        contextlib.closing(Index(database)) as index,
    ):
        numbers = []
        for there in (first, second, first):
            with attached(there, place, "--bind"), contextlib.closing(Nodes(place, index)) as nodes:
                numbers.append(nodes.root.filesystem.number)
                assert nodes.root.filesystem.is_certain
        assert numbers[0] == numbers[2] != numbers[1]


def test_what_was_deleted_on_xfs_leaves_the_index(base: str) -> None:
    """Also if the index is of a version that did not tell one xfs from another: its handles stay what they are."""
    with filesystem("xfs", base) as tree, contextlib.closing(Index(os.path.join(base, "xfs.sqlite"))) as index:
        former = index.filesystem(".\0xfs\0000")
        with contextlib.closing(Nodes(tree, index)) as nodes:
            assert nodes.root.filesystem.number == former
            for name in ("deleted", "kept"):
                Path(tree, name).touch()
            deleted, kept = (meet(nodes, nodes.root, name) for name in ("deleted", "kept"))
            for _ in range(2):
                list(nodes.descriptors.close_idle())
            os.unlink(f"{tree}/deleted")
            grow_idle_and_forget(nodes, deleted, kept)
            sweep(nodes, index)
            assert index.find(deleted.number) is None
            assert index.find(kept.number) is not None


def rows(m: Mount) -> set[bytes]:
    """What is in the index, by name."""
    path = os.path.join(STATE_DIR, m.key, "nodes.sqlite")
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as db:
        return {row[0] for row in db.execute("SELECT name FROM objects")}


@pytest.mark.usefixtures("figures_at_once")
def test_what_was_deleted_on_tmpfs_leaves_the_index_and_nothing_else_does(base: str) -> None:
    with filesystem("tmpfs", base) as tree, steady(tree, base) as mount:
        with mount("-o", "no_root_squash") as m:
            os.mkdir(m.at("directory"))
            for name in ("deleted", "moved", "kept", "deleted later"):
                write(m.at("directory", name), name.encode())
            kept = {name: handle_of(m.at("directory", name)) for name in ("moved", "kept")}
        # Another daemon, which has not met them: as after long idleness.
        with mount("-o", "no_root_squash") as m:
            assert {b"deleted", b"moved", b"kept", b"deleted later"} <= rows(m)
            os.unlink(f"{tree}/directory/deleted")
            os.rename(f"{tree}/directory/moved", f"{tree}/moved")
            wait_until(lambda: b"deleted" not in rows(m))
            os.unlink(f"{tree}/directory/deleted later")
            wait_until(lambda: b"deleted later" not in rows(m))
            assert {b"moved", b"kept"} <= rows(m)
            assert {name: by_handle(m.path, handle) for name, handle in kept.items()} == {
                "moved": b"moved",
                "kept": b"kept",
            }


@pytest.mark.usefixtures("figures_at_once")
def test_of_another_tmpfs_at_the_same_place_nothing_is_taken_out(tree: str, base: str) -> None:
    place = os.path.join(tree, "inside")
    with steady(tree, base) as mount, attached("tmpfs", place, "-t", "tmpfs"):
        os.mkdir(f"{place}/directory")
        write(f"{place}/directory/file", b"content")
        with mount("-o", "no_root_squash") as m:
            handle = handle_of(m.at("inside", "directory", "file"))
        with attached("tmpfs", place, "-t", "tmpfs"), mount("-o", "no_root_squash") as m:
            for _ in range(10):
                requests(m)  # a round of housekeeping, in which nothing is seen
            assert b"file" in rows(m)
        with mount("-o", "no_root_squash") as m:
            assert by_handle(m.path, handle) == b"content"


def test_what_was_in_memory_before_the_machine_was_started_again(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with filesystem("ext4", base) as tree, contextlib.closing(Index(os.path.join(base, "nodes.sqlite"))) as index:
        place = os.path.join(tree, "inside")
        met = []
        Path(base, "boot").write_text("the boot before\n")
        for boot in (f"{base}/boot", filesystems.BOOT_ID):
            monkeypatch.setattr(filesystems, "BOOT_ID", boot)
            with attached("tmpfs", place, "-t", "tmpfs"), contextlib.closing(Nodes(tree, index)) as nodes:
                Path(place, "file").touch()
                inside = meet(nodes, nodes.root, "inside")
                met.append(meet(nodes, inside, "file").number)
                nodes.forget(met[-1], 1)
                sweep(nodes, index)
        assert index.find(met[0]) is None
        assert index.find(met[1]) is not None


def test_an_index_of_0_1_0_knows_its_tmpfs_again(base: str) -> None:
    with filesystem("tmpfs", base) as tree, contextlib.closing(Index(os.path.join(base, "nodes.sqlite"))) as index:
        former = index.filesystem(".\0tmpfs\0000")
        for _ in range(2):
            with contextlib.closing(Nodes(tree, index)) as nodes:
                assert nodes.root.filesystem.number == former
                assert nodes.root.filesystem.is_certain


def test_a_mount_point_with_any_name_is_a_file_system(nodes: Nodes, tree: str) -> None:
    path = os.fsencode(tree) + b"/x\xff"
    os.mkdir(path)
    linux.mount("none", os.fsdecode(path), "tmpfs", 0, "size=4k")
    try:
        assert meet(nodes, nodes.root, "x\udcff").filesystem.kind == "tmpfs"
        assert os.fsdecode(path) in mountinfo.by_path()
    finally:
        linux.umount(os.fsdecode(path), linux.MNT_DETACH)


# -- directories that are read half-way ------------------------------------------------------------


def test_entries_read_ahead_are_bounded_for_each_caller() -> None:
    half = HalfRead()
    for _ in range(2):  # what was taken is not counted any more
        made = []
        for number in range(100):
            file: Any = OpenDirectory.__new__(OpenDirectory)
            file.uid, file.cookie, file.pending = number % 2, 7, [(b"name", 8, 8)] * 1000
            half.put(file)
            made.append(file)
        kept = [file for file in made if file.pending]
        assert kept == made[60:]
        assert all(file.cookie == (7 if file.pending else -1) for file in made)
        for file in made:
            half.take(file)


def read_in_turns(path: str, times: int) -> list[list[str]]:
    """List a directory so many times, all of them half-way before the first goes on."""
    listings = [os.scandir(path) for _ in range(times)]
    names = [[next(listing).name] for listing in listings]
    for found, listing in zip(names, listings, strict=True):
        found.extend(entry.name for entry in listing)
    return [sorted(found) for found in names]


@pytest.mark.parametrize("words", ["no_root_squash", "no_root_squash,cloak_list=uid +007 1 9999"])
def test_a_listing_goes_on_where_it_was_dropped(
    tree: str, mount: Callable[..., Mount], user: MakeUser, words: str
) -> None:
    names = sorted(f"{number:04}" for number in range(1500))
    for name in names:
        Path(tree, name).touch()
    made = mount("-o", words)
    assert all(listing == names for listing in user(4001).do(read_in_turns, made.path, 40))


# -- changes behind the mount ----------------------------------------------------------------------


def test_who_changes_many_hidden_directories_keeps_nobody_waiting(
    tree: str, base: str, mount: Callable[..., Mount]
) -> None:
    """In a fixed view the names of those are looked up, which takes time: of a few in each batch of events."""
    hidden = [os.path.join(tree, str(number)) for number in range(2000)]
    for path in hidden:
        os.mkdir(path, 0o700)
    counts = Path(base, "counts")
    counts.touch()
    counts.chmod(0o666)  # the daemon may write there as whoever is served
    with daemons_with(partial(alterations.count_places, str(counts))):
        mount("-o", "no_root_squash,cloak_list=uid +077 0 9999", "--view", "3001:3001")
    for path in hidden:
        os.chmod(path, 0o600)
    told()
    batches = [tuple(map(int, line.split())) for line in counts.read_text().splitlines()]
    assert max(events for events, _ in batches) > 100
    assert 0 < max(asked for _, asked in batches) <= 16


# -- deep trees ------------------------------------------------------------------------------------


def stat_each(paths: list[str]) -> None:
    for path in paths:
        os.stat(path)


@pytest.mark.parametrize("top", [0o755, 0o700])
def test_looks_do_not_grow_with_depth(
    top: int, tree: str, base: str, mount: Callable[..., Mount], user: MakeUser
) -> None:
    """To find out what everybody may know, each directory is looked at once, and not for each name below it."""
    bottom = "/".join(["d"] * 100)
    os.makedirs(os.path.join(tree, bottom))
    files = [f"{bottom}/{number}" for number in range(10)]
    for name in files:
        Path(tree, name).touch()
    os.chown(os.path.join(tree, "d"), 3001, 3001)
    os.chmod(os.path.join(tree, "d"), top)
    counts = Path(base, "counts")
    counts.touch()
    counts.chmod(0o666)  # the daemon writes there as whoever is served
    with daemons_with(partial(alterations.count_checks, str(counts))):
        made = mount("-o", "no_root_squash,cloak_list=uid +077 3000 3999")
    told()
    user(3001).do(stat_each, [made.at(name) for name in files])
    looks = [int(line) for line in counts.read_text().splitlines()]
    assert len(looks) >= 100
    assert sum(looks) < 10 * len(looks), f"{sum(looks)} looks for {len(looks)} names"
    # A directory on the way that is taken away takes all with it.
    os.chmod(os.path.join(tree, "d/d/d"), 0o700)
    os.chown(os.path.join(tree, "d/d/d"), 3002, 3002)
    told()
    told()
    assert user(3001).error(os.stat, made.at(files[0])) in {errno.ENOENT, errno.EACCES}
