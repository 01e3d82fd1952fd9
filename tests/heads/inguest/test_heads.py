"""Two heads of one CephFS, with the same key and nothing else in common: what one has given, the other knows."""

import errno
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from cloakfs.state import handlekey
from tests.agents import write
from tests.heads.inguest.heads import MOUNT, TREE, Head, lock
from tests.waiting import wait_until

ANN, BOB = 1000, 1001
OPTIONS = "no_root_squash,exempt=0,cloak_list=uid +077 1000 1001"

BOUND = 2.0
"""How long a change on another head may go unnoticed, in seconds: one (docs/nfs.md), and one for the guest."""


def prepare() -> None:
    """Each user has a directory that others do not see, and all see what is public."""
    shutil.rmtree(TREE, ignore_errors=True)
    os.makedirs(f"{TREE}/public/deep/er")
    for number in range(10):
        write(f"{TREE}/public/deep/er/file {number}", b"content %d" % number)
    for owner in (ANN, BOB):
        os.makedirs(f"{TREE}/{owner}")
        write(f"{TREE}/{owner}/file", b"of %d" % owner)
        for path in (f"{TREE}/{owner}", f"{TREE}/{owner}/file"):
            os.chown(path, owner, owner)
            os.chmod(path, 0o700)


@pytest.fixture
def heads() -> Iterator[tuple[Head, Head]]:
    handlekey.make()
    with ExitStack() as stack:
        stack.callback(os.unlink, handlekey.PATH)
        made = []
        for _ in range(2):
            made.append(Head(OPTIONS))
            stack.callback(made[-1].close)
        made[0].do(prepare)
        for head in made:
            head.serve()
        yield made[0], made[1]
        for head in made:
            assert "Traceback" not in head.log(), head.log()


NAMES = ["public", "public/deep", *(f"public/deep/er/file {number}" for number in range(10))]


def test_handles_of_one_are_known_to_the_other(heads: tuple[Head, Head]) -> None:
    one, other = heads
    handles = {name: one.handle(name) for name in NAMES}
    numbers = {name: one.number(name) for name in NAMES}
    # By handle first: the other has not looked anything up.
    assert [other.by_handle(handles[f"public/deep/er/file {number}"]) for number in range(10)] == [
        b"content %d" % number for number in range(10)
    ]
    assert {name: other.handle(name) for name in NAMES} == handles
    assert {name: other.number(name) for name in NAMES} == numbers
    one.do(os.rename, f"{MOUNT}/public/deep/er", f"{MOUNT}/public/moved")
    one.do(os.rename, f"{MOUNT}/public/moved/file 3", f"{MOUNT}/public/file 3")
    one.do(write, f"{MOUNT}/public/new", b"new")
    new = one.handle("public/new")
    for _ in range(2):
        assert other.by_handle(handles["public/deep/er/file 3"]) == b"content 3"
        assert other.by_handle(handles["public/deep/er/file 4"]) == b"content 4"
        assert other.by_handle(new) == b"new"
        other.forget()
    one.do(os.unlink, f"{MOUNT}/public/new")
    wait_until(lambda: other.by_handle(new) == errno.ESTALE, BOUND)
    for head in heads:
        head.restart(lose_state=True)
        assert head.by_handle(handles["public/deep/er/file 5"]) == b"content 5"
        assert head.by_handle(handles["public/deep/er/file 3"]) == b"content 3"
        assert head.by_handle(new) == errno.ESTALE


def test_each_sees_the_same_on_both(heads: tuple[Head, Head]) -> None:
    for head in heads:
        assert head.list_as(ANN) == [str(ANN), "public"]
        assert head.list_as(BOB) == [str(BOB), "public"]
        assert head.list_as(ANN, str(ANN)) == ["file"]
        assert head.list_as(ANN, str(BOB)) == errno.ENOENT


def test_what_one_hides_is_hidden_on_the_other(heads: tuple[Head, Head]) -> None:
    one, other = heads
    longest = 0.0
    for _ in range(3):
        one.do(os.chmod, f"{MOUNT}/{ANN}", 0o755)
        wait_until(lambda: other.list_as(BOB, str(ANN)) == [], BOUND)  # the file in it is private
        one.do(os.chmod, f"{MOUNT}/{ANN}", 0o700)
        began = time.monotonic()
        wait_until(lambda: other.list_as(BOB, str(ANN)) == errno.ENOENT, BOUND)
        longest = max(longest, time.monotonic() - began)
        assert other.list_as(BOB) == [str(BOB), "public"]
    print(f"hidden on the other head after {longest:.2f} s")


@pytest.mark.parametrize("how", ["fcntl", "ofd", "flock"])
def test_locks_hold_on_both(heads: tuple[Head, Head], how: str) -> None:
    one, other = heads
    path = f"{MOUNT}/public/deep/er/file 1"
    mine, its = one.do(os.open, path, os.O_RDWR), other.do(os.open, path, os.O_RDWR)
    assert one.do(lock, how, mine) == 0
    assert other.do(lock, how, its) == errno.EAGAIN
    one.do(os.close, mine)
    wait_until(lambda: other.do(lock, how, its) == 0)
    other.do(os.close, its)


def test_a_head_that_has_lost_all_shows_nothing_that_is_hidden(heads: tuple[Head, Head]) -> None:
    one, other = heads
    handle = one.handle(f"{ANN}/file")
    other.restart(lose_state=True)
    assert other.by_handle(handle) == b"of 1000"  # root is exempt
    assert other.list_as(BOB, str(ANN)) == errno.ENOENT
    assert other.list_as(ANN, str(ANN)) == ["file"]
    assert Path(handlekey.PATH).stat().st_mode & 0o777 == 0o600
