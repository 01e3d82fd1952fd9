"""A user who keeps the lock of a directory in the kernel: who waits for it, and who is told of it."""

import os
import subprocess
from collections.abc import Callable, Iterator

import pytest

from tests.agents import User
from tests.mount.conftest import Mount, mounted, told
from tests.mount.test_hung import Far
from tests.mount.test_invalidation import hold
from tests.processes import wait_until_blocked
from tests.waiting import wait_until

MakeMount = Callable[..., Mount]
MakeUser = Callable[..., User]

ANN, BEN, THIEF = 4001, 4002, 6666


@pytest.fixture
def stalled(base: str) -> Iterator[Far]:
    place = Far(os.path.join(base, "stalled"), base)
    yield place
    place.close()


@pytest.fixture
def views(tree: str, base: str) -> Iterator[Mount]:
    """A list of views, in a directory of its own."""
    os.makedirs(f"{base}/above/views")
    with mounted(tree, f"{base}/above/views", "-o", f"views={ANN}:{ANN} {BEN}:{BEN}") as m:
        yield m


def in_processes(calls: list[tuple[Callable[..., object], str]]) -> list[int]:
    """Begin each of these calls, whose errors do not matter, in a process of its own; return their pids."""
    pids = []
    for call, path in calls:
        pid = os.fork()
        if pid == 0:
            try:
                call(path)
            finally:
                os._exit(0)
        pids.append(pid)
    return pids


def lock(thief: User, directory: str, hidden: list[str], page: str, flag: str) -> None:
    """Keep the lock of the directory, so that whoever changes something there waits, and all lookups after that."""
    thief.do(hold, directory, page)
    wait_until(lambda: os.path.exists(flag))
    for calls in [(os.mkdir, f"{directory}/new")], [(os.stat, f"{directory}/{name}") for name in hidden]:
        pids = thief.do(in_processes, calls)
        wait_until_blocked(*pids)
        told()  # so that it is not the daemon that they wait for
        wait_until_blocked(*pids)


def test_who_keeps_the_lock_of_a_directory_is_named(
    tree: str, base: str, mount: MakeMount, user: MakeUser, stalled: Far
) -> None:
    """While it is kept, nobody else gets at a directory in it that is hidden from that one (docs/limits.md)."""
    os.mkdir(f"{tree}/home")
    for uid in (ANN, BEN):
        os.mkdir(f"{tree}/home/{uid}", 0o700)
        os.chown(f"{tree}/home/{uid}", uid, uid)
    m = mount("-o", "cloak_list=uid +077 4000 4999")
    ann, thief = user(ANN), user(THIEF)
    assert ann.do(os.listdir, m.at("home", str(ANN))) == []
    lock(thief, m.at("home"), [str(ANN), str(BEN)], os.path.join(stalled.path, "10000"), f"{base}/flag.asked")
    pid = thief.do(os.getpid)
    said = f"process {pid} of uid {THIEF} keeps the directory 'home' locked"
    wait_until(lambda: said in m.log, 20)
    # What is elsewhere does not wait.
    ann.do_within(10, os.listdir, m.path)
    with open(f"{base}/flag", "w"):
        pass
    ann.do_within(30, os.listdir, m.at("home", str(ANN)))
    assert m.log.count(said) == 1


def bind(view: str, place: str) -> None:
    subprocess.run(["mount", "--bind", view, place], check=True)
    subprocess.run(["umount", place], check=True)


@pytest.mark.parametrize("listed", ["the list of views", "the directory above"])
def test_a_bind_mount_of_a_view_waits_only_for_who_can_list_the_views(
    listed: str, base: str, views: Mount, user: MakeUser, stalled: Far
) -> None:
    """So nobody can keep others from logging in where a directory above the list is root's alone (see sessions.md)."""
    place, view = f"{base}/place", views.at(f"@{ANN}")
    os.mkdir(place)
    root, thief = user(0), user(THIEF)
    root.do(bind, view, place)
    top = listed == "the list of views"
    locked, names = (views.path, [f"@{ANN}", f"@{BEN}"]) if top else (os.path.dirname(views.path), ["views"])
    lock(thief, locked, names, os.path.join(stalled.path, "10000"), f"{base}/flag.asked")
    root.start(bind, view, place)
    if top:
        said = f"process {thief.do(os.getpid)} of uid {THIEF} keeps the directory 'views' locked"
        wait_until(lambda: said in views.log, 20)
        assert not root.has_answered()
    else:
        assert root.finish_within(10)
    with open(f"{base}/flag", "w"):
        pass
    assert not top or root.finish_within(30)
