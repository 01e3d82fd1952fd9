"""A request that looks at very many objects lets others be served in between."""

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.agents import User, names
from tests.mount import alterations
from tests.mount.conftest import Mount, daemons_with, mounted
from tests.mount.loopfs import filesystem
from tests.waiting import wait_until

CLOAKED = "rw,cloak_list=uid +077 0 -1"
ANN, BEN = 2001, 2002
MANY = 30_000

MakeMount = Callable[..., Mount]
MakeUser = Callable[..., User]


def fill(path: str, count: int, mode: int = 0o600) -> None:
    """Make so many files of root's."""
    for number in range(count):
        os.close(os.open(f"{path}/{number:06}", os.O_CREAT | os.O_WRONLY, mode))


def answers_until(path: str, stop: str) -> tuple[int, float]:
    """Open and read a file until another one exists; return how often, and how long that took at most."""
    count, longest = 0, 0.0
    while not os.path.exists(stop):
        began = time.monotonic()
        with open(path, "rb") as file:
            assert file.read() == b"content"
        longest = max(longest, time.monotonic() - began)
        count += 1
    return count, longest


def list_often(path: str, times: int) -> list[list[str]]:
    return [names(path) for _ in range(times)]


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_listings_of_hidden_files_keep_nobody_waiting(base: str, kind: str, user: MakeUser) -> None:
    """The other user gets answers while directories are listed of which nothing can be shown for a long time."""
    with filesystem(kind, base, mib=256) as tree:
        os.chmod(tree, 0o755)
        os.mkdir(f"{tree}/spool", 0o755)
        fill(f"{tree}/spool", MANY)
        with open(f"{tree}/file", "wb") as file:
            file.write(b"content")
        os.chmod(f"{tree}/file", 0o644)
        os.mkdir(f"{base}/point")
        with mounted(tree, f"{base}/point", "-o", CLOAKED) as there:
            ann, listers = user(ANN), [user(BEN) for _ in range(4)]
            stop = f"{base}/stop"
            ann.start(answers_until, there.at("file"), stop)
            began = time.monotonic()
            for one in listers:
                one.start(list_often, there.at("spool"), 1)
            for one in listers:
                assert one.answer_within(120) == [[]]
            took = time.monotonic() - began
            open(stop, "wb").close()
            count, longest = ann.answer_within(60)
    assert took > 0.4, "there was nothing to wait for"
    assert count > 20 * took  # each listing takes some hundred milliseconds, and there are four
    assert longest < took / 4


def test_a_listing_in_slices_is_complete_while_everything_changes(tree: str, mount: MakeMount, user: MakeUser) -> None:
    """Names that are there all the time are in it, once each; hidden ones never are."""
    os.mkdir(f"{tree}/busy")
    os.chmod(f"{tree}/busy", 0o777)
    fill(f"{tree}/busy", 4000)
    shown = [f"{number:06}" for number in range(0, 4000, 97)]
    for name in shown:
        os.chmod(f"{tree}/busy/{name}", 0o644)
    there = mount("-o", CLOAKED)
    ann = user(ANN)
    ann.start(list_often, there.at("busy"), 6)
    number = 0
    while not ann.has_answered():
        path = f"{tree}/busy/{'x' if number % 2 else 'a'}{number}"
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o644))
        os.chmod(path, 0o600)
        os.unlink(path)
        os.chmod(f"{tree}/busy/000001", 0o600)
        number += 1
    for listed in ann.answer_within(60):
        assert [name for name in listed if name[0] not in "xa"] == shown


def many(entry: str, first: int) -> str:
    """An entry with 15,000 definitions of each kind."""
    numbers = range(first, first + 15_000)
    maps = " ".join(f"uid {10_000 + 2 * number} map {10_000 + 2 * number}" for number in numbers)
    cloaks = " ".join(f"uid +077 {10_000 + 2 * number}" for number in numbers)
    return f"{entry} *(rw,range_map = uid 0 9999 map 0 {maps},cloak_list = uid +077 0 9999 {cloaks})\n"


def test_very_many_definitions_are_reloaded_without_anybody_waiting(
    tree: str, base: str, mount: MakeMount, user: MakeUser
) -> None:
    """Another caller gets many answers while they are read, and none of them takes nearly as long as that.

    The loop, by its own processor time, is never kept long, and no thread of the daemon makes the definitions: all
    others wait while a thread runs Python.
    """
    with open(f"{tree}/file", "wb") as file:
        file.write(b"content")
    os.chmod(f"{tree}/file", 0o644)
    exports = Path(base, "x.exports")
    exports.write_text(many(tree, 0))
    with daemons_with(partial(alterations.measure_reloads, f"{base}/measured")):
        there = mount("--exports", str(exports))
    there.expect_errors = True
    ann, stop = user(ANN), f"{base}/stop"
    exports.write_text(many(tree, 1))
    ann.start(answers_until, there.at("file"), stop)
    began = time.monotonic()
    os.kill(there.pid, signal.SIGHUP)
    wait_until(lambda: "reloaded" in there.log, 120)
    took = time.monotonic() - began
    open(stop, "wb").close()
    count, longest = ann.answer_within(60)
    assert count > 20 * took
    assert longest < took / 4
    turn, made = Path(base, "measured").read_text().split()
    assert float(turn) < 0.05
    assert int(made) < 100
    exports.write_text(f"{tree} *(rw,cloak_list = uid +077 0 -1 nonsense)\n")
    os.kill(there.pid, signal.SIGHUP)
    wait_until(lambda: "not reloaded, the old configuration stays in force" in there.log)
    assert "nonsense" in there.log
