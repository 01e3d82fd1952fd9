"""A caller for whom the lower mount does not answer delays no other caller of the upper mount."""

import contextlib
import errno
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from cloakfs.tuning import Tuning
from tests.agents import User, names, read, write
from tests.mount import alterations
from tests.waiting import wait_until

from .conftest import Mount, daemons_with, run, told
from .fuseconnections import nobody_waits_for_ever

SECONDS = 60.0
"""So long nothing may take; each of it takes milliseconds."""

SLOW, QUICK = 2001, 2002

ASKS_EACH_TIME = Tuning(groups_patience_seconds=1000.0, groups_again_seconds=0.0, groups_seconds=0.0)


@pytest.fixture(autouse=True)
def _released(base: str) -> Iterator[None]:
    with nobody_waits_for_ever(base, 200.0):
        yield


class Database:
    """The database that the lower mount has its groups from."""

    def __init__(self, base: str) -> None:
        self.flag = os.path.join(base, "silent")

    @contextlib.contextmanager
    def silent(self) -> Iterator[None]:
        """It does not answer about one user."""
        Path(self.flag).touch()
        try:
            yield
        finally:
            self.speak()

    def speak(self) -> None:
        for path in (self.flag, f"{self.flag}.asked"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    def is_asked(self) -> bool:
        return os.path.exists(f"{self.flag}.asked")


@pytest.fixture
def database(base: str) -> Database:
    return Database(base)


@pytest.fixture
def lower(database: Database, mount: Callable[..., Mount]) -> Mount:
    with daemons_with(partial(alterations.query_database_slowly, SLOW, database.flag), tuning=ASKS_EACH_TIME):
        below = mount("-o", "rw,groups=database")
    for uid in (SLOW, QUICK):
        os.makedirs(below.real(str(uid), "inside"))
        for number in range(3):
            Path(below.real(str(uid), f"file{number}")).write_text("content")
        for above, directories, files in os.walk(below.real(str(uid))):
            for name in [".", *directories, *files]:
                os.chown(os.path.join(above, name), uid, uid)
    for name in ("on-top", "shared"):
        os.mkdir(below.real(name))
        os.chmod(below.real(name), 0o777)
    told()  # what is mounted on a name is detached when the name is forgotten (docs/limits.md)
    return below


def do_quickly(top: str) -> None:
    """Some operations of each kind, which must not wait."""
    own = f"{top}/{QUICK}"
    assert sorted(names(own)) == ["file0", "file1", "file2", "inside"]
    assert read(f"{own}/file0") == b"content"
    write(f"{own}/new", b"mine")
    os.rename(f"{own}/new", f"{own}/newer")
    os.chmod(f"{own}/newer", 0o600)
    os.unlink(f"{own}/newer")
    os.mkdir(f"{own}/inside/made")
    os.rmdir(f"{own}/inside/made")
    assert os.statvfs(top).f_bsize


# All sorts of operations that query the lower mount.
WAYS: dict[str, Callable[[str], object]] = {
    "stat": lambda top: os.stat(f"{top}/{SLOW}/file0"),
    "absent": lambda top: os.path.exists(f"{top}/{SLOW}/nothing"),
    "list": lambda top: list(os.scandir(f"{top}/{SLOW}")),
    "read": lambda top: read(f"{top}/{SLOW}/file1"),
    "make": lambda top: os.mkdir(f"{top}/shared/made"),
    "rename": lambda top: os.rename(f"{top}/{SLOW}/file1", f"{top}/{SLOW}/file2"),
    "link": lambda top: os.link(f"{top}/{SLOW}/file0", f"{top}/{SLOW}/file3"),
    "remove": lambda top: os.unlink(f"{top}/{SLOW}/file2"),
    "stat of what is on top": lambda top: os.stat(f"{top}/on-top/local"),
    "statvfs": os.statvfs,
}


def go(way: str, top: str) -> None:
    WAYS[way](top)


@pytest.mark.parametrize("above", ["rw", "rw,cloak_list=uid +007 0 -1"])
def test_whom_the_mount_below_keeps_waiting_waits_alone(
    lower: Mount, database: Database, mount: Callable[..., Mount], user: Callable[..., User], above: str
) -> None:
    place = lower.at("on-top")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=777", "none", place], check=True, timeout=SECONDS)
    with contextlib.ExitStack() as stack:
        stack.callback(subprocess.run, ["umount", "--lazy", place], check=True, timeout=SECONDS)
        upper = mount("-o", above, source=lower.path)
        quick = user(QUICK)
        waiting = [user(SLOW) for _ in WAYS]
        quick.do_within(SECONDS, do_quickly, upper.path)
        quick.do_within(SECONDS, write, upper.at("on-top/local"), b"on top")
        opened = quick.do(os.open, upper.at("on-top/local"), os.O_RDWR)
        names(upper.path)  # or else the kernel has it wait, below, for whoever looks up a name there for the first time
        with database.silent():
            for one, way in zip(waiting, WAYS, strict=True):
                one.start(go, way, upper.path)
                if way == "stat":
                    wait_until(database.is_asked)
                # None of this would ever end if the daemon waited for the other one. (Nor in a directory that the
                # other one is changing: there it is the kernel that has everybody wait.)
                quick.do_within(SECONDS, do_quickly, upper.path)
                assert quick.do(os.pread, opened, 10, 0) == b"on top"
                assert quick.do(os.stat, upper.at("on-top/local")).st_size == 6
            assert "2001" in names(upper.path)
            assert run("explain", upper.path, "--as", f"{QUICK}:{QUICK}").returncode == 0
            late = [name for one, name in zip(waiting, WAYS, strict=True) if not one.has_answered()]
            assert len(late) >= 6, f"did it wait at all? only {late}"
        for one in waiting:
            one.finish_within(SECONDS)
        quick.do(os.close, opened)


def look_often(top: str) -> tuple[set[int], set[tuple[str, ...]]]:
    """What comes of looking at a file, and what is listed, in the course of a second."""
    errors, lists = set(), set()
    until = time.monotonic() + 1
    while time.monotonic() < until:
        try:
            os.stat(f"{top}/{SLOW}/file0")
            errors.add(0)
        except OSError as exc:
            errors.add(exc.errno or -1)
        lists.add(tuple(sorted(names(top))))
    return errors, lists


def test_what_it_answers_one_caller_is_no_answer_for_another(
    lower: Mount, mount: Callable[..., Mount], user: Callable[..., User]
) -> None:
    """Both ask about the same at the same time."""
    hiding = mount("-o", "rw,cloak_list=uid +000 2000 2999", source=lower.path)
    upper = mount("-o", "rw", source=hiding.path)
    askers = [user(uid) for uid in (SLOW, QUICK)]
    for one in askers:
        one.start(look_often, upper.path)
    assert [one.answer_within(SECONDS) for one in askers] == [
        ({0}, {(str(SLOW), "on-top", "shared")}),
        ({errno.ENOENT}, {(str(QUICK), "on-top", "shared")}),
    ]


def test_a_long_listing_is_complete(mount: Callable[..., Mount], user: Callable[..., User]) -> None:
    """However many entries the lower mount is queried about at a time, and however many of them it hides."""
    lower = mount("-o", "rw,cloak_list=uid +000 2000 2999")
    upper = mount("-o", "rw", source=lower.path)
    for number in range(700):
        path = lower.real(f"entry-{number}")
        Path(path).touch()
        os.chown(path, SLOW if number % 7 else QUICK, 0)
    everything = {f"entry-{number}" for number in range(700)}
    quick = {f"entry-{number}" for number in range(0, 700, 7)}
    assert sorted(user(QUICK).do(names, upper.path)) == sorted(quick)
    assert sorted(user(SLOW).do(names, upper.path)) == sorted(everything - quick)


def test_in_a_file_system_on_top_only_the_own_rules_say_who_makes_what(
    lower: Mount, mount: Callable[..., Mount], user: Callable[..., User]
) -> None:
    """Twice something is mounted at the place: what is covered is never met."""
    place = lower.at("shared")
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=777", "none", place], check=True, timeout=SECONDS)
            stack.callback(subprocess.run, ["umount", "--lazy", place], check=True, timeout=SECONDS)
        upper = mount("-o", "rw,cloak_list=uid +000 2000 2999", source=lower.path)
        someone, other = user(SLOW), user(QUICK)
        someone.do(os.mkdir, upper.at("shared/made"))
        someone.do(write, upper.at("shared/made/file"), b"content")
        assert someone.do(read, upper.at("shared/made/file")) == b"content"
        assert someone.do(names, upper.at("shared")) == ["made"]
        assert other.do(names, upper.at("shared")) == []
        assert other.error(os.stat, upper.at("shared/made/file")) == errno.ENOENT
