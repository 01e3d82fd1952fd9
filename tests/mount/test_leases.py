"""A lease on a file delays only callers that want that file (fcntl(2), F_SETLEASE)."""

import errno
import fcntl
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from cloakfs.fuse.loop import SHARE
from tests.agents import User, read, write
from tests.mount.conftest import Mount

ANN, BOB = 4001, 4002

MakeMount = Callable[..., Mount]
MakeUser = Callable[..., User]


def hold(path: str) -> int:
    """Take a lease, and do not heed the signal that asks for it. The kernel takes it away after 45 s."""
    signal.signal(signal.SIGIO, signal.SIG_IGN)
    fd = os.open(path, os.O_RDONLY)
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    return fd


@pytest.fixture
def leased(tree: str, user: MakeUser) -> tuple[User, int]:
    """Bob's file, on which he has a lease."""
    Path(tree, "bobs").write_text("text")
    os.chown(f"{tree}/bobs", BOB, BOB)
    Path(tree, "anns").write_text("text")
    os.chown(f"{tree}/anns", ANN, ANN)
    bob = user(BOB)
    return bob, bob.do(hold, f"{tree}/bobs")


def work(path: str) -> None:
    assert read(path) == b"text"
    write(path, b"text")
    assert sorted(os.listdir(os.path.dirname(path))) == ["anns", "bobs"]


# Of all system calls on a name or a descriptor, only these wait for a lease to be given up (Linux 6.18: not those
# that change attributes, links or names).
WAYS: dict[str, Callable[[str], object]] = {
    "open": lambda path: os.close(os.open(path, os.O_RDONLY)),
    "open to write": lambda path: os.close(os.open(path, os.O_WRONLY)),
    "create": lambda path: os.close(os.open(path, os.O_WRONLY | os.O_CREAT)),
    "open to truncate": lambda path: os.close(os.open(path, os.O_WRONLY | os.O_TRUNC)),
    "truncate": lambda path: os.truncate(path, 1),
}
OTHERS: dict[str, Callable[[str], object]] = {
    "stat": os.stat,
    "chmod": lambda path: os.chmod(path, 0o644),
    "times": os.utime,
    "attributes": os.listxattr,
    "link": lambda path: os.link(path, f"{path}2"),
    "unlink": lambda path: os.unlink(f"{path}2"),
    "rename": lambda path: os.rename(path, f"{path}3"),
    "rename back": lambda path: os.rename(f"{path}3", path),
}


def go(way: str, path: str) -> None:
    (WAYS | OTHERS)[way](path)


def test_a_lease_keeps_nobody_else_waiting(mount: MakeMount, user: MakeUser, leased: tuple[User, int]) -> None:
    made = mount("-o", "no_root_squash")
    bob, lease = leased
    ann = user(ANN)
    waiting = [user(BOB) for _ in WAYS]
    for one, way in zip(waiting, WAYS, strict=True):
        one.start(go, way, made.at("bobs"))
        ann.do_within(30, work, made.at("anns"))
    assert not any(one.has_answered() for one in waiting), "did the lease hold at all?"
    bob.do(os.close, lease)
    for one, way in zip(waiting, WAYS, strict=True):
        assert one.finish_within(30), way
    assert os.stat(made.at("bobs")).st_size <= 1


def test_what_does_not_wait(mount: MakeMount, user: MakeUser, leased: tuple[User, int]) -> None:
    made = mount("-o", "no_root_squash")
    other = user(BOB)
    for way in OTHERS:
        other.do_within(30, go, way, made.at("bobs"))
    # Who asked not to wait is told.
    assert other.error(os.open, made.at("bobs"), os.O_RDONLY | os.O_NONBLOCK) == errno.EWOULDBLOCK


def open_often(path: str, count: int) -> tuple[int, int]:
    """How many of so many opens at the same time succeeded, and how many were refused."""
    answers: list[int] = []

    def one() -> None:
        try:
            os.close(os.open(path, os.O_RDONLY))
            answers.append(0)
        except OSError as exc:
            answers.append(exc.errno or -1)

    threads = [threading.Thread(target=one) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers.count(0), answers.count(errno.EAGAIN)


def test_one_caller_does_not_take_all_workers(mount: MakeMount, user: MakeUser, leased: tuple[User, int]) -> None:
    made = mount("-o", "no_root_squash")
    bob, lease = leased
    ann, flood = user(ANN), user(BOB)
    flood.start(open_often, made.at("bobs"), SHARE + 20)
    for _ in range(20):
        ann.do_within(30, work, made.at("anns"))
    bob.do(os.close, lease)
    succeeded, refused = flood.answer_within(60)
    assert succeeded + refused == SHARE + 20
    assert succeeded >= SHARE
    assert flood.do(read, made.at("bobs")) == b"text"
