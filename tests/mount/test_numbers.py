"""Numbers that are computed: handles survive the loss of what the daemon has stored, and a kill at any moment."""

import contextlib
import ctypes
import errno
import glob
import os
import sqlite3
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from cloakfs import linux
from cloakfs.linux.libc import NR, syscall
from cloakfs.state.runtime import STATE_DIR
from cloakfs.tree.places import Places
from tests.agents import User, write
from tests.mount.conftest import FIGURES_AT_ONCE, Mount, daemons_with, run
from tests.mount.loopfs import filesystem
from tests.mount.test_metrics import figures
from tests.mount.test_trees import by_handle, content_or_error, handle_of, steady
from tests.processes import kill
from tests.waiting import wait_until

COMPUTED = ["ext4", "btrfs"]
NULL = "no_root_squash"
CLOAKED = "no_root_squash,cloak_list=uid +007 1 9999"

CAP_DAC_READ_SEARCH = 2

MakeUser = Callable[..., User]


def grow(top: str, directories: int = 20, files: int = 20) -> list[str]:
    """Make some directories, within each other and beside each other, with files; return the files' paths."""
    paths = []
    at = "top"
    for number in range(directories):
        os.makedirs(os.path.join(top, at))
        for name in range(files):
            paths.append(f"{at}/file {name}")
            write(os.path.join(top, paths[-1]), paths[-1].encode())
        at = f"{at}/{number}" if number % 3 else f"beside {number}"
    return paths


def forget_places(m: Mount) -> None:
    """Remove what the daemon, which has ended, has noted of where files are."""
    found = glob.glob(os.path.join(STATE_DIR, m.key, "places.sqlite*"))
    assert found
    for path in found:
        os.unlink(path)


@pytest.mark.parametrize("options", [NULL, CLOAKED, f"{CLOAKED},knfsd"])
@pytest.mark.parametrize("kind", COMPUTED)
def test_files_are_found_whose_places_were_forgotten(kind: str, options: str, base: str) -> None:
    with filesystem(kind, base) as source, steady(source, base) as mount:
        paths = grow(source)
        with mount("-o", options) as m:
            handles = {path: handle_of(m.at(path)) for path in paths}
            numbers = {path: os.stat(m.at(path)).st_ino for path in paths}
        forget_places(m)
        with mount("-o", options) as m:
            assert {path: by_handle(m.path, handle) for path, handle in handles.items()} == {
                path: path.encode() for path in paths
            }
            assert {path: os.stat(m.at(path)).st_ino for path in paths} == numbers
            assert {path: handle_of(m.at(path)) for path in paths} == handles


@pytest.mark.parametrize("kind", ["ext4", "btrfs", "xfs", "tmpfs"])
def test_a_file_is_found_that_was_renamed_while_it_was_not_mounted(kind: str, base: str, user: MakeUser) -> None:
    """By all of its names, and not by one that was moved out of the tree."""
    with filesystem(kind, base) as top:
        source = os.path.join(top, "tree")
        os.mkdir(source)
        with steady(source, base) as mount:
            paths = grow(source, 5, 3)
            moved, linked, left = (paths[number] for number in (2, 6, 9))
            with mount("-o", CLOAKED) as m:
                handles = {path: handle_of(m.at(path)) for path in paths}
            os.rename(os.path.join(source, moved), os.path.join(source, "beside 0", "moved"))
            os.link(os.path.join(source, linked), os.path.join(source, "linked"))
            os.rename(os.path.join(source, linked), os.path.join(source, "top", "linked"))
            os.rename(os.path.join(source, left), os.path.join(top, "left"))
            with mount("-o", CLOAKED) as m:
                assert by_handle(m.path, handles[moved]) == moved.encode()
                assert by_handle(m.path, handles[linked]) == linked.encode()
                for _ in range(3):  # it is searched for once
                    assert content_or_error(m.path, handles[left]) == errno.ESTALE


@pytest.mark.parametrize("options", [NULL, f"{CLOAKED},knfsd"])
@pytest.mark.parametrize("kind", COMPUTED)
def test_no_handle_is_lost_when_the_daemon_is_killed_at_once(kind: str, options: str, base: str) -> None:
    with filesystem(kind, base) as source, steady(source, base) as mount:
        handles = {}
        for attempt in range(5):
            with mount("-o", options) as m:
                write(m.at(f"file {attempt}"), b"%d" % attempt)
                os.mkdir(m.at(f"directory {attempt}"))
                write(m.at(f"directory {attempt}", "file"), b"inside %d" % attempt)
                handles[b"%d" % attempt] = handle_of(m.at(f"file {attempt}"))
                handles[b"inside %d" % attempt] = handle_of(m.at(f"directory {attempt}", "file"))
                kill(m.without_reaper() if m.reaper else m.pid)
                run("umount", m.path)
        with mount("-o", options) as m:
            for content, handle in handles.items():
                assert by_handle(m.path, handle) == content


def open_as(uid: int, path: str, handle: bytes) -> bytes | int | None:
    for name in ("setfsgid", "setfsuid"):
        syscall(NR[name], ctypes.c_uint32(uid))
    linux.set_effective_capabilities(linux.effective_capabilities() | 1 << CAP_DAC_READ_SEARCH)
    return content_or_error(path, handle)


def content_by_handle_as(uid: int, path: str, handle: bytes) -> bytes | int | None:
    """What a caller gets for whom an NFS server opens the file with this handle."""
    with User(0) as server:
        return server.do(open_as, uid, path, handle)


def test_what_a_caller_may_not_see_stays_hidden_when_it_is_searched_for(base: str, user: MakeUser) -> None:
    with filesystem("ext4", base) as source, steady(source, base) as mount:
        owner, other = user(2001), user(2002)
        owner.do(os.mkdir, os.path.join(source, "own"))
        owner.do(write, os.path.join(source, "own", "mine"), b"mine")
        os.chmod(os.path.join(source, "own", "mine"), 0o600)
        with mount("-o", CLOAKED) as m:
            handle = owner.do(handle_of, m.at("own", "mine"))
        forget_places(m)
        with mount("-o", CLOAKED) as m:
            for _ in range(2):
                assert content_by_handle_as(other.uid, m.path, handle) == errno.ESTALE
                assert content_by_handle_as(owner.uid, m.path, handle) == b"mine"


def test_notes_of_places_that_are_damaged_are_replaced(base: str) -> None:
    """Also where only a later page is, and a number that is none keeps nobody from sweeping the others."""
    with filesystem("ext4", base) as source, steady(source, base) as mount:
        for number in range(3000):
            write(f"{source}/{number}", b"")
        with mount("-o", CLOAKED) as m:
            os.listdir(m.path)
            handles = [handle_of(m.at(f"{number}")) for number in range(0, 3000, 500)]
            places = os.path.join(STATE_DIR, m.key, "places.sqlite")
        with open(places, "r+b") as file:
            for page in range(2, os.path.getsize(places) // 4096):
                file.seek(page * 4096)
                file.write(b"\xff" * 2000)
        for _ in range(2):
            with mount("-o", CLOAKED) as m:
                m.expect_errors = True
                os.listdir(m.path)
                for handle in handles:
                    wait_until(partial(is_found, m, handle))
        with contextlib.closing(sqlite3.connect(places)) as db:
            assert db.execute("PRAGMA quick_check").fetchone() == ("ok",)
            assert db.execute("SELECT count(*) FROM places").fetchone()[0] >= 3000
            db.execute("INSERT INTO places VALUES (?, 1, x'')", (1 << 60,))
            db.commit()
        with daemons_with(tuning=FIGURES_AT_ONCE), mount("-o", CLOAKED) as m:
            os.unlink(m.real("0"))
            wait_until(lambda: not is_noted(places, b"0"))


def is_found(m: Mount, handle: bytes) -> bool:
    return content_or_error(m.path, handle) == b""


def is_noted(places: str, name: bytes) -> bool:
    with contextlib.closing(sqlite3.connect(f"file:{places}?mode=ro", uri=True)) as db:
        return db.execute("SELECT 1 FROM places WHERE name = ?", (name,)).fetchone() is not None


def test_notes_that_cannot_be_written_do_not_fill_the_memory(base: str) -> None:
    os.mkdir(f"{base}/places.sqlite")
    Path(base, "places.sqlite", "file").touch()
    places = Places(f"{base}/places.sqlite")
    for number in range(1, 250_000):
        places.note(number, 1, b"name")
    assert sum(places.find(number) is not None for number in range(1, 250_000)) <= 100_001
    places.close()


REUSES = int(os.environ.get("CLOAKFS_REUSES", "3000"))


@pytest.mark.timeout(60 + REUSES // 20)
@pytest.mark.parametrize("make", [write, lambda path, content: os.mkdir(path)], ids=["file", "directory"])
def test_an_inode_number_that_is_used_again_never_leads_to_the_other_file(
    make: Callable[[str, bytes], None], base: str
) -> None:
    """Whoever has removed the former one, and also while the kernel knows that still: a handle was just used."""
    with filesystem("ext4", base) as source, steady(source, base) as mount, mount("-o", CLOAKED) as m:
        seen: dict[int, bytes] = {}  # the handle of the last one with this inode number
        again = 0
        numbers = set()
        for count in range(REUSES):
            path, real = m.at(f"{count}"), m.real(f"{count}")
            own = b"%d" % count if make is write else errno.EISDIR
            make(path if count % 3 else real, b"%d" % count)
            inode, handle = os.stat(real).st_ino, handle_of(path)
            numbers.add(os.stat(path).st_ino)
            if count % 5:
                assert content_or_error(m.path, handle) == own
            before = seen.get(inode)
            if before is not None:
                again += 1
                assert content_or_error(m.path, before) == errno.ESTALE
            (os.rmdir if make is not write else os.unlink)(path if count % 2 else real)
            # What was removed behind the mount is known for some milliseconds.
            assert content_or_error(m.path, handle) in (own, errno.ESTALE)
            seen[inode] = handle
        assert again > REUSES / 2
        assert len(numbers) > min(REUSES * 0.8, 1000)  # 14 bits of the generation tell most of them apart


@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_handles_of_what_is_gone_leave_nothing_in_memory(kind: str, base: str) -> None:
    """Anybody may send them to an NFS server, again and again."""
    with filesystem(kind, base) as source, steady(source, base) as mount:
        with mount("-o", NULL) as m:
            for number in range(100):
                write(m.at(f"{number}"), b"")
            handles = [handle_of(m.at(f"{number}")) for number in range(100)]
        for number in range(100):
            os.unlink(os.path.join(source, f"{number}"))
        with mount("-o", NULL) as m:
            before = figures(m).get("known_objects")
            assert {content_or_error(m.path, handle) for handle in handles} == {errno.ESTALE}
            assert figures(m).get("known_objects") <= before + 1
