"""What the benchmark works in that is for some users alone: homes, and the directory of a group."""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bench.homes import HOME, MEMBERS, TEAM, TEAM_GID, USERS, names, place_of, prepare_homes
from bench.peers import BARE, MANY, PEERS, Peer, place
from bench.tree import QUICK, WORKER
from bench.work import all_work
from bench.work_in_team import WORK, prepare_team
from bench.workers import ClientProcesses, WorkError
from tests.agents import User

LOGIN_HOST = all_work(1)["20 users home"]


@pytest.fixture
def peer() -> Iterator[Callable[[str], Peer]]:
    """Mounts a peer over a tree with homes: peer(name)."""
    base = Path(f"/tmp/cloakfs-test-homes-{os.getpid()}")
    base.mkdir(mode=0o755)
    with contextlib.ExitStack() as stack:
        stack.callback(base.rmdir)

        def mount(name: str) -> Peer:
            tree, at = place(stack, str(base), name)
            prepare_homes(tree, QUICK, many=True)
            prepare_team(tree, QUICK)
            return PEERS[name](stack, name, tree, at)()

        yield mount


def test_each_user_sees_one_home(peer: Callable[[str], Peer], user: Callable[..., User]) -> None:
    mounted = peer(MANY)
    for number in (0, 1, USERS - 1):
        ann = user(mounted.uid + number)
        assert ann.do(os.listdir, f"{mounted.path}/home") == [f"user-{number:02}"]
        assert ann.do(os.path.getsize, f"{mounted.path}/{place_of(HOME, number)}/src/part-4/sub/sub/sub/sub/file-00")
        for other in {0, 1, USERS - 1} - {number}:
            with pytest.raises(FileNotFoundError):
                ann.do(os.stat, f"{mounted.path}/home/user-{other:02}")


@pytest.mark.parametrize("name", [BARE, MANY])
def test_the_one_who_polls_counts_for_nothing(peer: Callable[[str], Peer], name: str) -> None:
    mounted = peer(name)
    with ClientProcesses(LOGIN_HOST, mounted, QUICK, "", 0.001, os.sched_getaffinity(0)) as workers:
        units, rate = workers.go()
    assert units >= 5 * (USERS - 1)
    assert rate > 0
    # A single batch is that of the first client, which polls.
    with ClientProcesses(LOGIN_HOST, mounted, QUICK, "", None, os.sched_getaffinity(0)) as workers:
        assert workers.go()[0] == 0


def test_each_client_of_the_login_host_works_in_a_home_of_its_own(peer: Callable[[str], Peer]) -> None:
    mounted = peer(BARE)
    files = [Path(mounted.tree, place_of(HOME, user), name) for user in range(USERS) for name in names(QUICK.others)]
    before = {path: path.stat().st_mtime_ns for path in files}
    with ClientProcesses(LOGIN_HOST, mounted, QUICK, "", 0.001, os.sched_getaffinity(0)) as workers:
        workers.go()
    written = {path for path in files if path.stat().st_mtime_ns > before[path]}
    assert written == {path for path in files if "/user-00/" not in str(path)}


@pytest.mark.parametrize("name", [BARE, MANY])
def test_members_of_a_team_work_on_files_of_both(peer: Callable[[str], Peer], name: str) -> None:
    """All files are as before, afterwards."""
    mounted = peer(name)
    team = Path(mounted.tree, TEAM)
    before = {path.name: (path.stat().st_uid, path.read_bytes()) for path in team.iterdir()}
    assert {uid for uid, _ in before.values()} == {WORKER + number for number in range(MEMBERS)}
    for what in WORK:
        work = all_work(1)[f"{what} {TEAM}"]
        with ClientProcesses(work, mounted, QUICK, "", 0.001, os.sched_getaffinity(0)) as workers:
            units, rate = workers.go()
        assert units >= MEMBERS * QUICK.shared
        assert rate > 0
    assert {path.name: (path.stat().st_uid, path.read_bytes()) for path in team.iterdir()} == before


def test_only_members_see_the_directory_of_the_team(peer: Callable[[str], Peer]) -> None:
    mounted = peer(MANY)
    shift = mounted.uid - WORKER
    with User(mounted.uid + 1, groups=[TEAM_GID + shift]) as member, User(mounted.uid + 1) as other:
        assert os.stat(f"{mounted.tree}/{TEAM}").st_mode & 0o7777 == 0o2770
        assert TEAM in member.do(os.listdir, mounted.path)
        assert TEAM not in other.do(os.listdir, mounted.path)


def test_a_name_that_is_not_refused_fails_the_work(peer: Callable[[str], Peer]) -> None:
    mounted = peer(BARE)
    home = Path(mounted.tree, "home", "user-05")
    for directory in (home, home / "project", home / "project" / "src", home / "project" / "src" / "part-0"):
        directory.chmod(0o711)
    with (
        pytest.raises(WorkError),
        ClientProcesses(LOGIN_HOST, mounted, QUICK, "", 0.05, os.sched_getaffinity(0)) as workers,
    ):
        workers.go()


def test_what_is_created_is_removed_again(peer: Callable[[str], Peer]) -> None:
    mounted = peer(BARE)
    own = Path(mounted.tree, place_of(HOME), "own")
    for name in ("create home", "create+write+unlink home", "sequential write home"):
        with ClientProcesses(all_work(1)[name], mounted, QUICK, "", 0.001, os.sched_getaffinity(0)) as workers:
            assert workers.go()[0] > 0
        assert list(own.iterdir()) == []
        assert own.stat().st_uid == WORKER
