"""Users who look at the same time, on separate clients, with separate mounts, and on one shared mount.

A wrong answer shows what is hidden, misses what is there, or has another file's content. Users with a mount or a client
of their own get no wrong answers, even without no_client_cache. On a shared mount, the option prevents all but a few.
"""

import errno
import os
import random
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.agents import User, read
from tests.nfs.knfsd.fixtures import VERSIONS, Share, drop_caches
from tests.nfs.knfsd.test_leaks import delegations

OPERATIONS = int(os.environ.get("CLOAKFS_NFS_OPERATIONS") or 30_000)
"""By users with mounts or clients of their own, in all tests together."""

SHARED_OPERATIONS = OPERATIONS // 40
"""In each test of a shared mount, where one takes ten times as long."""

BOUND = 0.01
"""The share of wrong answers on a shared mount with no_client_cache, without delegations."""

# Every fourth operation asks the server in any case, others are answered by the client's cache when it has it.
CACHING = ("ac", "ac", "ac", "noac")
FORGET_SECONDS = 2.0

OWNERS = {"ann": 1000, "bob": 1001, "carol": 1002, "shared": 0}
CLOAKED = "rw,cloak_list = uid +000 1000 1002"
FILES = 4
DIRECTORIES = ("", *(f"{owner}-dir/" for owner in OWNERS))

pytestmark = pytest.mark.timeout(max(200, OPERATIONS // 50))


def owner_of(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2].partition("-")[0]


def entries(directory: str) -> list[str]:
    """What there is in each directory: files of all users, and in the first also the others."""
    files = [f"{directory}{owner}-{number}" for owner in OWNERS for number in range(FILES)]
    return files if directory else [*files, *(path.rstrip("/") for path in DIRECTORIES[1:])]


def fill(tree: str) -> None:
    for directory in DIRECTORIES:
        if directory:
            os.mkdir(f"{tree}/{directory}")
            os.chmod(f"{tree}/{directory}", 0o777)
            os.chown(f"{tree}/{directory}", OWNERS[owner_of(directory)], 0)
        for path in entries(directory):
            if f"{path}/" not in DIRECTORIES:
                Path(tree, path).write_text(path)
                os.chmod(f"{tree}/{path}", 0o666)
                os.chown(f"{tree}/{path}", OWNERS[owner_of(path)], 0)


def is_there(path: str, me: str) -> bool:
    """Does it, with all above it, exist for me?"""
    return all(part == "" or owner_of(part) in (me, "shared") for part in path.split("/"))


def wrong(kind: str, path: str, place: str, me: str) -> str:
    """Make one operation: what is wrong with its answer, "" if nothing is."""
    full = f"{place}/{path}"
    try:
        if kind == "stat":
            right = os.stat(full).st_uid == OWNERS[owner_of(path)]
        elif kind == "read":
            right = read(full).decode() == path
        else:
            listed = {f"{path}{name}" for name in os.listdir(full)}
            expected = {entry for entry in entries(path) if is_there(entry, me)}
            if is_there(path, me) and listed != expected:
                return "lists what is hidden" if listed - expected else "lists not all"
            right = listed == expected or not is_there(path, me)
    except OSError as exc:
        if exc.errno not in (errno.ENOENT, errno.ESTALE):
            raise
        return f"{kind} misses" if is_there(path, me) else ""
    if not is_there(path, me):
        return f"{kind} sees"
    return "" if right else f"{kind} gets another's"


class Result(NamedTuple):
    done: int
    wrong: Counter[str]

    @property
    def share(self) -> float:
        return self.wrong.total() / self.done


def work(places: Sequence[str], me: str, count: int, seed: int) -> Counter[str]:
    """Make random operations; how many got a wrong answer, by what was wrong."""
    chance = random.Random(seed)
    found: Counter[str] = Counter()
    for _ in range(count):
        kind = chance.choice(("stat", "stat", "read", "list"))
        directory = chance.choice(DIRECTORIES)
        path = directory if kind == "list" else chance.choice(entries(directory)[: FILES * len(OWNERS)])
        if said := wrong(kind, path, chance.choice(places), me):
            found[said] += 1
    return found


def work_at_once(jobs: Sequence[tuple[User, str, Sequence[str]]], count: int, *, forget: bool = False) -> Result:
    """Have users work at the same time, `count` operations together.

    With `forget`, client and server forget all that they can, time and again: the server's kernel must then find out
    what handles mean.
    """
    done = threading.Event()

    def keep_forgetting() -> None:
        while not done.wait(FORGET_SECONDS):
            drop_caches()

    each = count // len(jobs)
    with ThreadPoolExecutor() as pool:
        working = [pool.submit(who.do, work, places, me, each, seed) for seed, (who, me, places) in enumerate(jobs)]
        if forget:
            pool.submit(keep_forgetting)
        try:
            found = sum((worker.result() for worker in working), Counter[str]())
        finally:
            done.set()
    return Result(each * len(jobs), found)


Told = Callable[[str, Result], None]


@pytest.fixture
def tell(record_property: Callable[[str, object], None]) -> Told:
    def telling(what: str, result: Result) -> None:
        said = f"{result.wrong.total()} of {result.done} wrong ({100 * result.share:.2f} %) {dict(result.wrong)}"
        record_property(what, said)
        print(f"{what}: {said}")

    return telling


@pytest.mark.parametrize("version", VERSIONS)
def test_a_client_for_each(
    version: str,
    share: Callable[..., Share],
    mount_nfs: Callable[..., str],
    client_host: str,
    user: Callable[..., User],
    tell: Told,
) -> None:
    """With two processes on each."""
    tree = share(CLOAKED, fill)
    jobs = []
    for me, where in (("ann", {}), ("bob", {"host": "10.9.0.1", "netns": client_host})):
        places = {option: mount_nfs(tree, version, option, **where) for option in set(CACHING)}
        jobs += [(user(OWNERS[me]), me, [places[option] for option in CACHING]) for _ in range(2)]
    result = work_at_once(jobs, OPERATIONS // 4, forget=True)
    tell(f"v{version}, a client for each", result)
    assert not result.wrong


@pytest.mark.parametrize("version", VERSIONS)
def test_a_mount_for_each(
    version: str,
    share: Callable[..., Share],
    mount_nfs: Callable[..., str],
    user: Callable[..., User],
    tell: Told,
) -> None:
    tree = share(CLOAKED, fill)
    jobs = []
    for me in ("ann", "bob", "carol"):
        places = {option: mount_nfs(tree, version, "nosharecache", option) for option in set(CACHING)}
        jobs.append((user(OWNERS[me]), me, [places[option] for option in CACHING]))
    result = work_at_once(jobs, OPERATIONS // 4, forget=True)
    tell(f"v{version}, a mount for each", result)
    assert not result.wrong


@pytest.mark.parametrize(
    ("version", "options", "on", "bound"),
    [
        ("3", f"{CLOAKED},no_client_cache", False, BOUND),
        ("4.2", f"{CLOAKED},no_client_cache", False, BOUND),
        ("4.2", f"{CLOAKED},no_client_cache", True, 1.0),
        ("4.2", CLOAKED, False, 1.0),
    ],
    ids=["3", "4.2", "4.2-delegations", "4.2-real-times"],
)
def test_a_mount_for_all(
    version: str,
    options: str,
    on: bool,
    bound: float,
    share: Callable[..., Share],
    mount_nfs: Callable[..., str],
    user: Callable[..., User],
    tell: Told,
) -> None:
    with delegations(on=on):
        tree = share(options, fill)
        place = mount_nfs(tree, version)
        jobs = [(user(OWNERS[me]), me, [place]) for me in ("ann", "bob", "carol")]
        result = work_at_once(jobs, SHARED_OPERATIONS)
    tell(f"v{version}, a mount for all, {options}, delegations {on}", result)
    assert result.share <= bound
    if options == CLOAKED:
        assert result.wrong, "wrong answers are not noticed, here or anywhere"
