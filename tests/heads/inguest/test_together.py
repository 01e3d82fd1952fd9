"""Two clients of two heads use one database and one Maildir at once; nothing is lost when a head dies meanwhile.

And locks that move to another head. Some of it runs in `scripts/campaign heads` alone.
"""

import contextlib
import errno
import os
import re
import shlex
import sqlite3
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

from bench.clone import ROOT
from cloakfs.nfs.plan import mount_name
from cloakfs.state import handlekey
from tests.agents import User
from tests.heads.inguest.heads import KILL_REQUEST, SERVICE, TREE, Head, address_of, lead_to, lock, networks, sh
from tests.heads.inguest.test_heads import ANN, prepare
from tests.nfs.knfsd.fixtures import second_host
from tests.waiting import let_expire, wait_until

_WANTED = os.environ.get("CLOAKFS_HEADS_SECONDS", "")
SECONDS = float(_WANTED or 8)
PATH = f"/srv/cloakfs/{mount_name(TREE, '*')}"
_PATIENCE = 100.0
_long = pytest.mark.skipif(not _WANTED, reason="for scripts/campaign heads, with CLOAKFS_HEADS_SECONDS")


class Work(NamedTuple):
    """What one client has done, by the number of each step."""

    done: list[int]
    failed: list[str]


def transact(top: str, who: str, number: int) -> None:
    with contextlib.closing(sqlite3.connect(f"{top}/database", timeout=60, isolation_level=None)) as database:
        database.execute("PRAGMA synchronous = FULL")
        database.execute("BEGIN IMMEDIATE")
        database.execute("UPDATE sums SET sum = sum + 1")
        database.execute("INSERT INTO lines VALUES (?, ?)", (who, number))
        database.execute("COMMIT")


def deliver(top: str, who: str, number: int) -> None:
    """As a mail server does: written under `tmp`, flushed, and renamed."""
    name = f"{who} {number}"
    fd = os.open(f"{top}/maildir/tmp/{name}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.write(fd, name.encode())
        os.fsync(fd)
    finally:
        os.close(fd)
    os.rename(f"{top}/maildir/tmp/{name}", f"{top}/maildir/new/{name}")


def repeat(step: Callable[[str, str, int], None], top: str, who: str, stop: Path) -> Work:
    work = Work([], [])
    number = 0
    while not stop.exists():
        try:
            step(top, who, number)
            work.done.append(number)
        except (OSError, sqlite3.Error) as exc:
            work.failed.append(f"{who} {number}: {exc!r} {getattr(exc, 'sqlite_errorname', '')}")
        number += 1
    return work


def make(top: str) -> None:
    with contextlib.closing(sqlite3.connect(f"{top}/database")) as database, database:
        database.execute("CREATE TABLE sums (sum INTEGER)")
        database.execute("INSERT INTO sums VALUES (0)")
        database.execute("CREATE TABLE lines (who TEXT, line INTEGER)")
    for name in ("tmp", "new"):
        os.makedirs(f"{top}/maildir/{name}")


def lines_of(top: str) -> Counter[str]:
    """What the database contains, which must be intact."""
    with contextlib.closing(sqlite3.connect(f"{top}/database")) as database:
        assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        lines = Counter(f"{who} {number}" for who, number in database.execute("SELECT who, line FROM lines"))
        assert database.execute("SELECT sum FROM sums").fetchall() == [(lines.total(),)]
    return lines


def mails_of(top: str) -> Counter[str]:
    new = f"{top}/maildir/new"
    return Counter(Path(new, name).read_bytes().decode() for name in os.listdir(new))


STEPS = {"database": (transact, lines_of), "maildir": (deliver, mails_of)}


@pytest.fixture
def heads() -> Iterator[tuple[Head, Head]]:
    handlekey.make()
    with ExitStack() as stack:
        stack.callback(os.unlink, handlekey.PATH)
        stack.enter_context(networks(2))
        made = []
        for number in range(2):
            made.append(Head("", number))
            stack.callback(made[-1].close)
        made[0].do(prepare)
        for number, head in enumerate(made):
            # Without NFSv3, so that locks are locks on the real tree.
            head.export(number, f"{TREE} *(rw,insecure,cloak_list = uid +077 1000 1001)\n", without_nfsv3=True)
        lead_to(0)
        yield made[0], made[1]


def nothing(heads: tuple[Head, Head]) -> None:
    pass


def kill_a_daemon(heads: tuple[Head, Head]) -> None:
    heads[0].kill_daemon()


def kill_a_head(heads: tuple[Head, Head]) -> None:
    heads[0].die()
    heads[1].take_over(0)
    lead_to(1)


def kill_the_metadata_server(_: tuple[Head, Head]) -> None:
    request = Path("/run/out", KILL_REQUEST)
    request.touch()
    wait_until(lambda: not request.exists())


@pytest.fixture
def tops(heads: tuple[Head, Head]) -> Iterator[list[str]]:
    """Yield a directory as two client machines see it: by the address of the service, and by the second head's."""
    with ExitStack() as stack:
        machine = stack.enter_context(second_host())
        Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
        sh("ip", "-n", machine, "route", "add", "default", "via", "10.9.0.1")
        places = ["/client-a", "/client-b"]
        for place, address, enter in (
            (places[0], SERVICE, ()),
            (places[1], address_of(1), ("nsenter", f"--net=/run/netns/{machine}")),
        ):
            os.makedirs(place, exist_ok=True)
            sh(*enter, "mount", "-t", "nfs", "-o", "vers=4.2,hard,timeo=50,nosharecache", f"{address}:{PATH}", place)
            stack.callback(sh, "umount", "-f", "-l", place)
        yield [f"{place}/{ANN}" for place in places]


@pytest.mark.parametrize("host", ["service", pytest.param("another", marks=_long), pytest.param("", marks=_long)])
def test_a_client_claims_its_lock_from_the_other_head(heads: tuple[Head, Head], tops: list[str], host: str) -> None:
    """If that takes over, and calls itself as the first one did. Otherwise, the client's program loses the lock."""
    with User(ANN) as one, User(ANN) as other:
        mine = one.do(os.open, f"{tops[0]}/file", os.O_RDWR)
        its = other.do(os.open, f"{tops[1]}/file", os.O_RDWR)
        assert one.do(lock, "fcntl", mine) == 0
        assert other.do(lock, "fcntl", its) == errno.EAGAIN
        assert answers(heads[1])
        heads[0].die()
        if host:
            heads[1].take_over(0, host)
        lead_to(1)
        other.start(lock, "fcntl", its)  # which waits until clients have claimed what they had
        said = one.error(write_through, mine, b"still mine")
        taken = other.answer_within(_PATIENCE)
        assert said == (0 if host == "service" else errno.EIO)
        if host:
            assert taken == (errno.EAGAIN if host == "service" else 0)
        else:  # nobody has told CephFS that the head is gone
            seconds = wait_until(lambda: other.do(lock, "fcntl", its) == 0, _PATIENCE)
            print(f"locked after {seconds:.0f} s")
        one.do(os.close, mine)
        assert other.do(lock, "fcntl", its) == 0
        assert (other.do(os.pread, its, 10, 0) == b"still mine") == (host == "service")
        other.do(os.close, its)
        heads[1].do(sh, "rpc.nfsd", "0")
        assert not answers(heads[1])


def answers(head: Head) -> bool:
    """Whether keepalived would find that the NFS server of this head answers."""
    (check,) = re.findall(r'script "(.*)"', Path(ROOT, "examples/heads/keepalived.conf").read_text())
    return head.do(subprocess.run, shlex.split(check), check=False, capture_output=True).returncode == 0


def write_through(fd: int, content: bytes) -> None:
    os.pwrite(fd, content, 0)
    os.fsync(fd)


@pytest.mark.parametrize(
    "happens",
    [
        nothing,
        pytest.param(kill_a_daemon, marks=_long),
        pytest.param(kill_the_metadata_server, marks=_long),
        kill_a_head,
    ],
)
def test_nothing_is_lost(
    heads: tuple[Head, Head], tops: list[str], happens: Callable[[tuple[Head, Head]], None]
) -> None:
    stop = Path("/tmp/stop")  # which users can see
    with ExitStack() as stack:
        stack.callback(stop.unlink, missing_ok=True)
        with User(ANN) as first:
            first.do(make, tops[1])
        working = [
            (name, stack.enter_context(User(ANN)), top, f"{name}-{number}")
            for name in STEPS
            for number, top in enumerate(tops)
        ]
        for name, user, top, who in working:
            user.start(repeat, STEPS[name][0], top, who, stop)
        wait_until(lambda: len(heads[1].do(os.listdir, f"{TREE}/{ANN}/maildir/new")) > 2)
        let_expire(SECONDS / 2)
        happens(heads)
        let_expire(SECONDS / 2)
        stop.touch()
        found = {who: user.answer_within(_PATIENCE) for _, user, _, who in working}
        for name, (_, look) in STEPS.items():
            with User(ANN) as reader:
                there = reader.do(look, tops[1])
            works = {who: found[who] for kind, _, _, who in working if kind == name}
            print(name, {who: (len(work.done), work.failed[:3], len(work.failed)) for who, work in works.items()})
            done = Counter(f"{who} {number}" for who, work in works.items() for number in work.done)
            assert not done - there, "what was done is there"
            failed = sum(len(work.failed) for work in works.values())
            assert there.total() <= done.total() + failed
            assert set(there.values()) == {1}
            if happens in (nothing, kill_the_metadata_server):
                assert not failed
