"""Files that clients hold open and locked when a mount is replaced: they go on with them, and with their locks."""

import contextlib
import errno
import fcntl
import json
import os
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bench.lab.nfshost import end_grace
from cloakfs.linux import mountinfo
from cloakfs.nfs import nfsdrestart
from cloakfs.state.runtime import RUN_DIR
from tests.agents import User, write
from tests.mount.conftest import COMMAND
from tests.nfs.knfsd.fixtures import EXPORTS, NfsHost, Service, Share, exported, nfs_mounted, sh
from tests.processes import kill
from tests.waiting import wait_until

ANN = 1000
V3, V4 = ("3",), ("4.0", "4.2")
VERSIONS = V3 + V4

RECORD = 16

ROOT = str(Path(__file__).parents[3])

LOST_SECONDS = 2.0
"""For how long writes may fail when a daemon dies: until the guard notices. It has been 30 ms."""

RECOVERY = 90.0
"""How long it may take until all can go on, in seconds: on a busy machine, it has taken half a minute."""

MOUNTED = "nosharecache,hard"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, check=False, timeout=120)


def prepare(tree: str) -> None:
    os.chmod(tree, 0o1777)


class Holder:
    """A user with a file open for writing, and locked."""

    def __init__(self, tree: Share, version: str, place: str) -> None:
        self.tree, self.version, self.name = tree, version, f"held-{version}"
        self.who = User(ANN)
        self.path = os.path.join(place, self.name)
        self.fd = self.who.do(os.open, self.path, os.O_RDWR | os.O_CREAT, 0o666)
        self.who.do(os.fchmod, self.fd, 0o666)
        self.who.do(os.write, self.fd, b"." * 20)
        self.who.do(os.fsync, self.fd)
        self.who.do(fcntl.lockf, self.fd, fcntl.LOCK_EX)

    def real(self) -> bytes:
        return Path(self.tree.real(self.name)).read_bytes()

    def goes_on(self) -> None:
        """It can be written and read: what is written arrives."""
        assert self.who.error(os.pwrite, self.fd, b"after", 10) == 0, self.version
        assert self.who.error(os.fsync, self.fd) == 0, self.version
        assert self.real()[10:15] == b"after", self.version
        self.who.do(os.posix_fadvise, self.fd, 0, 0, os.POSIX_FADV_DONTNEED)
        assert self.who.do(os.pread, self.fd, 5, 10) == b"after", self.version
        self.who.do(os.pwrite, self.fd, b"." * 20, 0)
        assert self.who.error(os.fsync, self.fd) == 0, self.version

    def close(self) -> None:
        self.who.error(os.close, self.fd)
        self.who.close()


def write_until(fd: int, stop: str) -> tuple[list[int], list[float]]:
    """Write one record after another, each with fsync(2), until the file `stop` exists.

    Returns:
        the numbers of the records that were acknowledged, and when others were not (`time.monotonic`).
    """
    acknowledged, failures = [], []
    number = 0
    while not os.path.exists(stop):
        try:
            os.pwrite(fd, b"%015d\n" % number, RECORD * number)
            os.fsync(fd)
            acknowledged.append(number)
        except OSError:
            failures.append(time.monotonic())
        number += 1
        time.sleep(0.02)  # records enough, and no more
    return acknowledged, failures


class Writer:
    """A user who writes to a locked file all the time."""

    def __init__(self, tree: Share, version: str, place: str) -> None:
        self.version = version
        self.real = tree.real(f"written-{version}")
        self.stop = f"/run/stop-{tree.name}-{version}"
        self.who = User(ANN)
        fd = self.who.do(os.open, os.path.join(place, os.path.basename(self.real)), os.O_RDWR | os.O_CREAT, 0o666)
        self.who.do(fcntl.lockf, fd, fcntl.LOCK_EX)
        self.who.start(write_until, fd, self.stop)

    def failures(self) -> list[float]:
        """Stop, check that what was acknowledged is there, and return when something was not."""
        Path(self.stop).touch()
        acknowledged: list[int]
        failures: list[float]
        acknowledged, failures = self.who.answer_within(60)
        os.unlink(self.stop)
        self.who.close()
        real = Path(self.real).read_bytes()
        lost = [number for number in acknowledged if real[RECORD * number :][:RECORD] != b"%015d\n" % number]
        assert acknowledged, self.version
        assert not lost, (self.version, lost)
        return failures


def lock_error(path: str) -> int:
    """Try to lock a file; return the errno."""
    fd = os.open(path, os.O_RDWR)
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as exc:
        return exc.errno or -1
    finally:
        os.close(fd)
    return 0


@pytest.fixture(scope="module")
def tree(service: Service) -> Iterator[Share]:
    with exported(service, "rw,cloak_list = uid +007 0 -1", prepare) as made:
        made.expect_errors = True  # its daemon is killed
        yield made


@pytest.fixture(scope="module")
def places(tree: Share) -> Iterator[dict[str, str]]:
    """Where clients have mounted the tree, by version."""
    with contextlib.ExitStack() as stack:
        yield {version: stack.enter_context(nfs_mounted(tree, version, MOUNTED)) for version in VERSIONS}


@pytest.fixture(scope="module")
def holders(tree: Share, places: dict[str, str]) -> Iterator[list[Holder]]:
    with contextlib.ExitStack() as stack:
        made = []
        for version, place in places.items():
            made.append(Holder(tree, version, place))
            stack.callback(made[-1].close)
        yield made


@pytest.fixture
def another(tree: Share) -> Iterator[Callable[[str], int]]:
    """Tries to lock what a holder holds by this version, as another client: returns the errno.

    It is another client to the server only with another minor version. What has the same one would not make the server
    recall a delegation, for which the first client keeps its locks to itself (Linux 6.6).
    """
    who = User(ANN)
    with contextlib.ExitStack() as stack:
        places = {
            held: stack.enter_context(nfs_mounted(tree, other, "nosharecache,actimeo=0"))
            for held, other in zip(V4, reversed(V4), strict=True)
        }
        yield lambda held: who.do(lock_error, os.path.join(places[held], f"held-{held}"))
    who.close()


def device(tree: Share) -> str:
    return next((place.device for place in mountinfo.by_id().values() if place.path == tree.path), "")


def held(tree: Share) -> Counter[tuple[str, str]]:
    """What NFSv4 clients hold of the mount that is there now: their names, and the kinds of states."""
    number = device(tree) or "0:0"
    here = "{:02x}:{:02x}:".format(*map(int, number.split(":")))
    found: Counter[tuple[str, str]] = Counter()
    for client in Path("/proc/fs/nfsd/clients").iterdir():
        with contextlib.suppress(OSError):  # it has just gone
            name = next(line for line in (client / "info").read_text().splitlines() if line.startswith("name:"))
            states = (client / "states").read_text().splitlines()
            found.update(
                (name, kind) for line in states for kind in ("open", "lock") if f"type: {kind}" in line and here in line
            )
    return found


def is_claimed(tree: Share, wanted: Counter[tuple[str, str]]) -> bool:
    """Whether clients have claimed this, or something, and can claim no more."""
    now = held(tree)
    return now >= wanted or (bool(now) and not nfsdrestart.is_in_grace())


def replaced(replace: Callable[[], None], *trees: Share) -> None:
    """Do it, and wait until clients have claimed what they held."""
    before = {tree.name: device(tree) for tree in trees}
    wanted = {tree.name: held(tree) for tree in trees}
    assert all(wanted.values())
    replace()
    wait_until(
        lambda: all(
            device(tree) not in ("", before[tree.name]) and is_claimed(tree, wanted[tree.name]) for tree in trees
        ),
        RECOVERY,
    )
    if nfsdrestart.is_in_grace():  # no client has anything more to claim
        end_grace()


def server() -> tuple[str, ...]:
    """What must be the same after a restart: threads, versions, listeners, and what NFSv3 clients are told of them."""
    files = ("threads", "pool_threads", "versions", "portlist")
    result = sorted(line for line in sh("rpcinfo", "-p", "127.0.0.1").splitlines() if line.split()[0] == "100003")
    assert result
    return *(Path(f"/proc/fs/nfsd/{name}").read_text() for name in files), *result


def guard() -> int:
    return int(json.loads(run("export", "status", "--json").stdout)["pid"])


def kill_daemon(tree: Share) -> None:
    kill(tree.pid)


def renew(tree: Share) -> None:
    result = tree.set("rw,no_client_cache,cloak_list = uid +007 0 -1")
    assert result["renewed"] == [tree.path]


def kill_guard(_: Share) -> None:
    kill(guard())
    sh(*COMMAND, "export", "up", EXPORTS)


def down_and_up(_: Share) -> None:
    assert run("export", "down").returncode == 0
    sh(*COMMAND, "export", "up", EXPORTS)


@pytest.mark.parametrize("how", [kill_daemon, renew, kill_guard, down_and_up])
def test_what_clients_hold_is_not_lost(
    tree: Share,
    places: dict[str, str],
    holders: list[Holder],
    another: Callable[[str], int],
    how: Callable[[Share], None],
) -> None:
    before = server()
    writers = [Writer(tree, *where) for where in places.items()]
    replaced(lambda: how(tree), tree)
    assert server() == before
    for holder in holders:
        holder.goes_on()
    for writer in writers:
        failures = writer.failures()
        if how is kill_daemon:
            assert not failures or failures[-1] - failures[0] < LOST_SECONDS, writer.version
        elif how is not down_and_up:  # between the two, the server exports nothing
            assert not failures, (writer.version, len(failures), failures[-1] - failures[0])
    for version in V4:
        assert another(version) in (errno.EAGAIN, errno.EACCES), version
    log = Path(f"{RUN_DIR}/export-default.log").read_text()
    assert f"claim the files again that they hold of {tree.path}" in log
    result = run("export", "status")
    assert result.returncode == 0, result
    assert f"claim the files again that they hold of {tree.path}" in result.stderr


def test_several_mounts_die_together(
    service: Service, tree: Share, places: dict[str, str], holders: list[Holder]
) -> None:
    """All are there before clients claim what they hold of any: the threads are restarted once."""
    log = Path(f"{RUN_DIR}/export-default.log")
    with contextlib.ExitStack() as stack:
        beside = stack.enter_context(exported(service, "rw", prepare))
        beside.expect_errors = True
        others = []
        writers = [Writer(tree, *where) for where in places.items()]
        for version in VERSIONS:
            place = stack.enter_context(nfs_mounted(beside, version, MOUNTED))
            others.append(Holder(beside, version, place))
            stack.callback(others[-1].close)
            writers.append(Writer(beside, version, place))
        restarts = log.read_text().count("were restarted")
        pids = [tree.pid, beside.pid]

        def kill_both() -> None:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)

        replaced(kill_both, tree, beside)
        for holder in (*holders, *others):
            holder.goes_on()
        for writer in writers:
            failures = writer.failures()
            assert not failures or failures[-1] - failures[0] < LOST_SECONDS, (writer.real, len(failures))
        assert log.read_text().count("were restarted") == restarts + 1


def put_on_record(places: dict[str, str]) -> None:
    """Have the server note that these clients may claim something after the next restart, too.

    With nfsdcld(8), a client of NFSv4.0 that has claimed something is forgotten until one of its users opens a file who
    had none open.
    """
    with User(ANN + 1) as newcomer:
        for version, place in places.items():
            newcomer.do(write, f"{place}/opened-{version}", b"x", os.O_CREAT)


def test_the_old_mount_is_still_mounted_elsewhere(tree: Share, places: dict[str, str], holders: list[Holder]) -> None:
    """A bind mount of it keeps it in the table of mounts."""
    put_on_record(places)
    os.makedirs("/bound", exist_ok=True)
    sh("mount", "--bind", tree.path, "/bound")
    try:
        replaced(lambda: kill_daemon(tree), tree)
        for holder in holders:
            holder.goes_on()
    finally:
        sh("umount", "--lazy", "/bound")


def test_nobody_is_disturbed_who_need_not_be(service: Service, nfs_host: NfsHost) -> None:
    """The threads go on where no client holds anything of the mount that is replaced."""
    with exported(service, "rw", prepare) as other, nfs_mounted(other, "4.2", MOUNTED) as place:
        who = User(ANN)
        who.do(Path(place, "closed").write_text, "x")
        pids = nfsd_pids()
        assert other.set("rw,no_client_cache")["renewed"] == [other.path]
        assert nfsd_pids() == pids
        assert who.do(Path(place, "closed").read_text) == "x"
        who.close()


def nfsd_pids() -> set[str]:
    return {
        path.split("/")[2] for path in sh("grep", "-lx", "nfsd", *map(str, Path("/proc").glob("[0-9]*/comm"))).split()
    }


# -- how the threads are restarted ------------------------------------------------------------------


@pytest.fixture
def machine() -> Iterator[Callable[[str], str]]:
    """Runs shell text on a machine of its own, with a server of its own: a network namespace."""
    sh("ip", "netns", "add", "restarted")
    sh("ip", "-n", "restarted", "link", "set", "lo", "up")
    sh("ip", "-n", "restarted", "addr", "add", "10.8.0.1/24", "dev", "lo")
    preamble = (
        # Its server must not withdraw from the guest's rpcbind what that of the guest has registered there.
        "[ ! -e /run/rpcbind.sock ] || mount --bind /dev/null /run/rpcbind.sock; mount -t nfsd nfsd /proc/fs/nfsd && "
        "mount -t tmpfs none /var/lib/nfs && mkdir /var/lib/nfs/sm /var/lib/nfs/v4recovery && "
        "touch /var/lib/nfs/etab /var/lib/nfs/rmtab; "
    )

    def on_it(text: str) -> str:
        done = subprocess.run(
            ["nsenter", "--net=/run/netns/restarted", "unshare", "--mount", "sh", "-c", preamble + text],
            capture_output=True, text=True, check=False, timeout=120, cwd=os.getcwd(),
        )  # fmt: skip
        return done.stdout + done.stderr

    yield on_it
    sh("ip", "netns", "del", "restarted")


RESTART = f"{COMMAND[0]} -c 'from cloakfs.nfs import nfsdrestart; nfsdrestart.restart()'"
SHOW = "cat /proc/fs/nfsd/threads /proc/fs/nfsd/versions /proc/fs/nfsd/portlist; grep -h :0801 /proc/net/[tu][cd]p*"


def shown(text: str) -> list[str]:
    """What `SHOW` prints, without what differs from one socket to the next; of a socket, address, peer and state."""
    lines = text.strip().splitlines()
    return sorted(" ".join(line.split()[1:4]) if ":0801" in line else line for line in lines)


def test_the_server_is_as_before(machine: Callable[[str], str]) -> None:
    """As many threads, the same versions, and the same listeners, whatever nfs.conf says."""
    said = machine(
        "rpc.nfsd -N 3 -V 4.1 -N 4.2 --udp -H 127.0.0.1 -H 10.8.0.1 5; "
        f"{SHOW}; echo =; {RESTART}; echo = $?; {SHOW}; rpc.nfsd 0"
    )
    before, failed, after = re.split(r"^=.*\n", said, flags=re.MULTILINE)
    assert not failed, said
    assert "= 0" in said
    assert before.startswith("5\n-3 +4 +4.1 -4.2"), said
    assert before.count(":0801") == 4, said
    assert shown(after) == shown(before), said


@pytest.mark.parametrize("killed", ["the one that waits", "the one that restarts"])
def test_the_threads_come_back_whoever_is_killed(machine: Callable[[str], str], killed: str) -> None:
    """At the moment at which there are none."""
    if killed == "the one that waits":
        program = """
import os, threading, trio
from cloakfs.nfs import nfsdrestart
def kill():
    while open("/proc/fs/nfsd/threads").read() != "0\\n":
        pass
    os.kill(os.getpid(), 9)
async def main():
    async with nfsdrestart.exclusive() as lock:
        threading.Thread(target=kill).start()
        await nfsdrestart.restart_apart(lock)
trio.run(main)
"""
        then = "for i in $(seq 300); do grep -qx 0 /proc/fs/nfsd/threads || break; sleep 0.1; done; flock $lock true"
    else:
        program = f"""
import os, sys
sys.path.insert(0, {ROOT!r})
from cloakfs.nfs import nfsdrestart
from tests.altered import replace
from tests.waiting import wait_until
replace(nfsdrestart, "start", lambda before: os.kill(os.getpid(), 9))
nfsdrestart.restart()
"""
        then = f"cat /proc/fs/nfsd/threads; {COMMAND[0]} -c 'from cloakfs.nfs import nfsdrestart; nfsdrestart.resume()'"
    Path("/run/killed.py").write_text(program)
    said = machine(
        "mkdir -p /run/cloakfs; mount -t tmpfs none /run/cloakfs; lock=/run/cloakfs/nfsd.lock; "
        f"rpc.nfsd -N 3 -V 4.1 -N 4.2 -H 127.0.0.1 3; {SHOW}; {COMMAND[0]} /run/killed.py; echo = $?; {then}; "
        f"echo =; {SHOW}; echo =; ls /run/cloakfs; rpc.nfsd 0"
    )
    before, between, after, left = re.split(r"^=.*\n", said, flags=re.MULTILINE)
    assert "= 137\n" in said, said
    assert between == ("" if killed == "the one that waits" else "0\n"), said
    assert shown(after) == shown(before), said
    assert "nfsd.json" not in left, said


def test_a_server_that_cannot_be_restored_is_not_restarted(machine: Callable[[str], str]) -> None:
    """Another process listens on the same port, at another address: which is the server's cannot be found out."""
    other = 'import socket, time; s = socket.create_server(("10.8.0.1", 2049)); time.sleep(60)'
    said = machine(
        f"rpc.nfsd -N 3 -H 127.0.0.1 2; {COMMAND[0]} -c '{other}' & p=$!; "
        f"sleep 1; {RESTART}; echo = $?; cat /proc/fs/nfsd/threads; kill $p; rpc.nfsd 0"
    )
    assert "it cannot be told on which of the addresses with tcp port 2049 it listens" in said, said
    assert "= 1\n2\n" in said, said


def test_a_server_that_was_running_stays_the_administrators(machine: Callable[[str], str]) -> None:
    """Started again, it is as it was last, and `down` does not stop it; another service's restart is waited for."""
    started = "for i in $(seq 600); do grep -qx 0 /proc/fs/nfsd/threads || break; sleep 0.1; done; sleep 1"
    cloakfs = " ".join(COMMAND)
    show = f"{SHOW} | grep ' 0A '"  # of sockets, those that listen
    said = machine(
        "exec 2>&1; mkdir -p /run/cloakfs; mount -t tmpfs none /run/cloakfs; mkdir -p /tree/found /run/cloakfs/found; "
        "echo '/tree/found *(rw,insecure)' >/run/cloakfs/found/x.exports; "
        "rpc.nfsd -N 3 -V 4.1 -N 4.2 -H 127.0.0.1 2; rpc.mountd -F -N 3 & mountd=$!; "
        f"{cloakfs} export up /run/cloakfs/found --root /srv/found; "
        f"rpc.nfsd 5; sleep 7; echo =; {show}; "
        f"rpc.nfsd 0; {started}; echo =; {show}; "
        f"echo =; flock /run/cloakfs/nfsd.lock sh -c 'rpc.nfsd 0; sleep 7; cat /proc/fs/nfsd/threads'; {started}; "
        f"echo =; {show}; {cloakfs} export down; echo =; {show}; echo =; kill $mountd; rpc.nfsd 0"
    )
    _, before, again, meanwhile, after, left, _ = re.split(r"^=\n", said, flags=re.MULTILINE)
    assert before.startswith("5\n-3 +4 +4.1 -4.2"), said
    assert before.count(":0801") == 1, said
    assert meanwhile == "0\n", said
    for now in (again, after, left):
        assert shown(now) == shown(before), said


def test_nfsv3_is_still_registered(tree: Share) -> None:
    """After all of these restarts, and the ends of other servers."""
    with nfs_mounted(tree, "3", MOUNTED) as place:
        os.listdir(place)
