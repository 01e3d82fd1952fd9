"""What clients and administrators see when something dies, breaks, or is in the way."""

import contextlib
import errno
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from bench.lab.nfshost import end_grace
from cloakfs.nfs.plan import mount_name
from cloakfs.state.runtime import RUN_DIR, STATE_DIR, mount_key
from tests.agents import User, names
from tests.mount.conftest import COMMAND, is_mounted
from tests.nfs.knfsd.fixtures import EXPORTS, VERSIONS, Service, Share, sh
from tests.processes import kill
from tests.waiting import wait_until

ANN, BOB = 1000, 1001

# A request of a soft mount comes back with an error after this at the latest (timeo=100, retrans=2).
PATIENCE = 30.0

# On a busy machine, in which the guest's processor is one process of many, it has taken half a minute.
RECOVERY = 90.0
"""How long the guard may take, in seconds, to notice that a daemon died, mount again and export."""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, check=False, timeout=120)


def prepare(tree: str) -> None:
    for owner in (ANN, BOB):
        Path(tree, str(owner)).write_text("private")
        os.chown(Path(tree, str(owner)), owner, owner)
        os.chmod(Path(tree, str(owner)), 0o600)


def sync(path: str) -> None:
    fd = os.open(path, os.O_WRONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def work(place: str, killed: str) -> list[tuple[float, float, int, list[str]]]:
    """Look, write and read until five rounds in a row have succeeded once the file `killed` is there, or for long.

    Returns:
        when each round began, how long it took, how it failed, and what was there.
    """
    rounds = []
    end = time.monotonic() + RECOVERY
    number = good = 0
    while good < 5 and (began := time.monotonic()) < end:
        counts = os.path.exists(killed)
        error, there = 0, []
        number += 1
        mine = f"{place}/round-{os.getpid()}"
        try:
            there = sorted(os.listdir(place))
            Path(mine).write_text(str(number))
            if Path(mine).read_text() != str(number):
                error = -1
        except OSError as exc:
            error = exc.errno or -2
            with contextlib.suppress(OSError):
                sync(mine)  # until then, the client's kernel reports a write that failed at each close(2)
        good = good + 1 if counts and not error else 0
        rounds.append((began, time.monotonic() - began, error, there))
        time.sleep(0.02)
    return rounds


def succeeds(who: User, call: Callable[..., object], *args: object) -> bool:
    return who.error(call, *args) == 0


def has_done(path: str, number: int) -> bool:
    """Whether the client that writes this file has finished so many rounds."""
    with contextlib.suppress(FileNotFoundError):
        return int(Path(path).read_text() or 0) > number
    return False


def test_a_daemon_is_killed_while_clients_work(
    share: Callable[..., Share], mount_nfs: Callable[..., str], user: Callable[..., User]
) -> None:
    """Clients get errors until the guard has mounted again, which takes as long as the machine takes; then they go on.

    Each works on a file of its own, which the kernel's server or the client may have open at that moment.
    """
    tree = share("rw,no_client_cache,cloak_list = uid +077 1000 1001", prepare)
    clients = [(user(uid), mount_nfs(tree, version, "nosharecache")) for uid in (ANN, BOB) for version in VERSIONS]
    flag = f"/run/killed-{tree.name}"
    try:
        for who, place in clients:
            who.start(work, place, flag)
        wait_until(lambda: all(has_done(tree.real(f"round-{who.pid}"), 5) for who, _ in clients), RECOVERY)
        alive = time.monotonic()
        kill(tree.pid)
        killed = time.monotonic()
        Path(flag).touch()
        results = [who.answer_within(RECOVERY + 2 * PATIENCE) for who, _ in clients]
    finally:
        Path(flag).unlink(missing_ok=True)
    for (who, _), rounds in zip(clients, results, strict=True):
        hidden = str(ANN + BOB - who.uid)
        assert all(hidden not in there for *_, there in rounds)
        assert -1 not in [error for _, _, error, _ in rounds]
        assert max(duration for _, duration, _, _ in rounds) < PATIENCE
        before = [error for began, duration, error, _ in rounds if began + duration < alive]
        assert before
        assert not any(before)
        # It is served again, without having been mounted anew by hand.
        after = [(began, error) for began, _, error, _ in rounds[-5:]]
        assert not any(error for _, error in after), rounds[-5:]
        assert all(began > killed for began, _ in after)


def test_a_write_that_failed_is_forgotten_after_fsync(
    share: Callable[..., Share], mount_nfs: Callable[..., str], user: Callable[..., User]
) -> None:
    """Until then, the client's kernel reports it whenever the file is closed, although everything is written again."""
    tree = share("rw", prepare)
    bob = user(BOB)
    mine = [os.path.join(mount_nfs(tree, version, "nosharecache"), f"mine-{version}") for version in VERSIONS]
    guard = json.loads(run("export", "status", "--json").stdout)["pid"]
    opened = []
    for path in mine:
        bob.do(Path(path).write_text, "before")
        fd = bob.do(os.open, path, os.O_WRONLY)
        bob.do(os.write, fd, b"lost")
        opened.append(fd)
    os.kill(guard, signal.SIGSTOP)  # which would have the client wait
    try:
        kill(tree.pid)
        assert [bob.error(os.close, fd) for fd in opened] == [errno.EIO] * len(mine)
    finally:
        os.kill(guard, signal.SIGCONT)
    for path in mine:
        wait_until(partial(succeeds, bob, os.listdir, os.path.dirname(path)), RECOVERY)
        bob.error(Path(path).write_text, "again")
        assert Path(tree.real(os.path.basename(path))).read_text() == "again"
        bob.error(sync, path)
        assert bob.error(sync, path) == 0
        assert bob.error(Path(path).write_text, "after") == 0
        assert Path(tree.real(os.path.basename(path))).read_text() == "after"


def test_only_the_mount_is_ever_exported(
    share: Callable[..., Share], mount_nfs: Callable[..., str], user: Callable[..., User]
) -> None:
    """Without guard, daemon and mount there is an error, and not the directory that is left, or the real tree."""
    tree = share("rw,cloak_list = uid +077 1000 1001", prepare)
    places = [mount_nfs(tree, version) for version in VERSIONS]
    guard = json.loads(run("export", "status", "--json").stdout)["pid"]
    Path(f"{RUN_DIR}/marker").write_text("")
    os.kill(guard, signal.SIGSTOP)
    try:
        os.kill(tree.pid, signal.SIGKILL)
        sh("umount", "-l", tree.path)
        Path(tree.path, "what lies below").write_text("")
        for place in places:
            began = time.monotonic()
            assert user(BOB).error(os.listdir, place) in (errno.ESTALE, errno.EIO, errno.EACCES, errno.ENOENT)
            assert time.monotonic() - began < PATIENCE
        for version in VERSIONS:
            with pytest.raises(RuntimeError, match=r"denied|No such file"):
                mount_nfs(tree, version, "retry=0")
        os.unlink(os.path.join(tree.path, "what lies below"))
    finally:
        os.kill(guard, signal.SIGCONT)
    bob = user(BOB)
    for place in places:
        wait_until(partial(succeeds, bob, os.listdir, place), RECOVERY)
    assert user(BOB).do(names, places[1]) == [str(BOB)]


def test_the_guard_is_killed(
    service: Service, share: Callable[..., Share], mount_nfs: Callable[..., str], user: Callable[..., User]
) -> None:
    """Clients go on; who comes after it knows what it has left, and takes it down or over."""
    tree = share("rw", prepare)
    place = mount_nfs(tree, "4.2", "noac")
    guard = json.loads(run("export", "status", "--json").stdout)["pid"]
    try:
        kill(guard)
        result = run("export", "status")
        assert result.returncode == 1
        assert "was killed" in result.stderr
        assert tree.path in result.stderr
        assert str(ANN) in user(ANN).do(names, place)
        done = run("export", "down")
        assert done.returncode == 0, done
        assert "had been killed" in done.stderr
        assert not is_mounted(tree.path)
        assert tree.path not in sh("exportfs", "-s")
    finally:
        sh(*COMMAND, "export", "up", EXPORTS)
    assert str(ANN) in user(ANN).do(names, place)
    kill(json.loads(run("export", "status", "--json").stdout)["pid"])
    sh(*COMMAND, "export", "up", EXPORTS)
    assert str(ANN) in user(ANN).do(names, place)


def test_a_mount_cannot_be_made_again(
    share: Callable[..., Share], mount_nfs: Callable[..., str], user: Callable[..., User]
) -> None:
    """Its clients get an error, rather than wait for what may never come; the others do not notice."""
    tree, other = share("rw", prepare), share("rw", prepare)
    places = [mount_nfs(tree, version) for version in VERSIONS]
    beside = mount_nfs(other, "4.2")
    os.rename(tree.source, f"{tree.source}-away")
    os.kill(tree.pid, signal.SIGKILL)
    deadline = time.monotonic() + RECOVERY
    while "not a directory" not in (said := run("export", "status").stdout) and "No such" not in said:
        assert time.monotonic() < deadline, said
    assert run("export", "status").returncode == 1
    for place in places:
        began = time.monotonic()
        assert user(BOB).error(os.listdir, place) in (errno.ESTALE, errno.EIO, errno.ENOENT)
        assert time.monotonic() - began < PATIENCE
    assert user(BOB).do(names, beside) == [str(ANN), str(BOB)]
    os.rename(f"{tree.source}-away", tree.source)
    for place in places:
        wait_until(partial(succeeds, user(BOB), os.listdir, place), RECOVERY)
        assert user(BOB).do(names, place) == [str(ANN), str(BOB)]
    tree.expect_errors = True


def test_a_broken_configuration_changes_nothing(
    share: Callable[..., Share], mount_nfs: Callable[..., str], user: Callable[..., User]
) -> None:
    tree = share("rw,cloak_list = uid +077 1000 1001", prepare)
    place = mount_nfs(tree, "4.2")
    file = f"{EXPORTS}/{tree.name}.exports"
    good = Path(file).read_text()
    before = run("export", "status", "--json").stdout
    for text, said in (
        (good.replace("rw", "rv"), f"{file}:1:{good.index('rw') + 1}: unknown option 'rv'; expected"),
        (good + "/does/not/exist *(ro)\n", f"{file}:2:17: /does/not/exist: not a directory"),
        (good + "/tmp *(policy=missing.py:P)\n", f"{file}:2:6: policy="),
        (good + "/tmp *(groups=proc)\n", f"{file}:2:6: groups=proc"),
        # What stands behind a symbolic link is not for a mount point inside of it.
        (good + "/srv *(ro)\n", "/srv/cloakfs/srv: inside /srv"),
    ):
        Path(file).write_text(text)
        done = run("export", "reload")
        assert (done.returncode, done.stdout) in ((1, ""), (2, "")), done
        assert said in done.stderr, done.stderr
        assert "not reloaded, the old configuration stays in force" in done.stderr
        assert run("export", "status", "--json").stdout == before
        assert user(BOB).do(names, place) == [str(BOB)]
    Path(file).write_text(good.replace("+077 1000 1001", "-000 1000 1001"))
    done = run("export", "reload")
    assert (done.returncode, done.stdout) == (0, f"changed {tree.path}\n"), done
    assert user(BOB).do(os.stat, os.path.join(place, str(ANN))).st_uid == ANN


def test_up_twice(share: Callable[..., Share]) -> None:
    share("rw")
    done = run("export", "up", EXPORTS)
    assert done.returncode == 1
    assert "service default is up already" in done.stderr
    # Under another name, but with the same directories.
    done = run("export", "up", EXPORTS, "--name", "other")
    assert done.returncode == 1
    assert "is served already, by service default (use another --root; " in done.stderr
    assert run("export", "status", "--name", "other").returncode == 1
    # What is not ours is not taken off.
    os.makedirs("/srv/other/tree-always")
    sh("mount", "-t", "tmpfs", "precious", "/srv/other/tree-always")
    done = run("export", "up", EXPORTS, "--name", "other", "--root", "/srv/other")
    assert done.returncode == 1
    assert "/srv/other/tree-always: another file system (tmpfs) is mounted there" in done.stderr
    assert is_mounted("/srv/other/tree-always")
    sh("umount", "/srv/other/tree-always")
    assert run("export", "status").returncode == 0


def test_down_with_busy_clients(
    share: Callable[..., Share], mount_nfs: Callable[..., str], user: Callable[..., User]
) -> None:
    tree = share("rw", prepare)
    busy = []
    for version in VERSIONS:
        place = mount_nfs(tree, version)
        bob = user(BOB)
        fd = bob.do(os.open, os.path.join(place, str(BOB)), os.O_RDWR)
        bob.do(os.chdir, place)
        busy.append((bob, fd, place))
    began = time.monotonic()
    done = run("export", "down")
    assert done.returncode == 0, done
    assert time.monotonic() - began < RECOVERY
    assert not is_mounted(tree.path)
    assert not os.path.exists("/srv/cloakfs")
    for bob, fd, _ in busy:
        began = time.monotonic()
        assert bob.error(os.fsync, fd) == 0
        assert bob.error(os.listdir, ".")
        assert time.monotonic() - began < PATIENCE
    assert run("export", "down").returncode == 1
    done = run("export", "up", EXPORTS)
    assert done.returncode == 0, done
    assert tree.path in done.stdout
    for bob, _, _ in busy:
        assert bob.do(names, ".") == [str(ANN), str(BOB)]
    for bob, fd, _ in busy:
        bob.error(os.close, fd)
        bob.do(os.chdir, "/")


def test_the_server_is_stopped(
    share: Callable[..., Share], mount_nfs: Callable[..., str], user: Callable[..., User]
) -> None:
    """By another process, with everything it exported: it is started again, and clients go on.

    The last of those with this server, which afterwards has the kernel's lease time of 90 s.
    """
    tree = share("rw", prepare)
    places = [mount_nfs(tree, version) for version in VERSIONS]
    sh("rpc.nfsd", "0")
    sh("exportfs", "-ua")
    wait_until(lambda: Path("/proc/fs/nfsd/threads").read_text() != "0\n", 2 * RECOVERY)
    # Clients of version 4 have ninety seconds to claim their locks again, in which no client gets new ones.
    end_grace()
    for place in places:
        wait_until(partial(succeeds, user(BOB), Path(place, "new").write_text, "x"), RECOVERY)
    log = Path(f"{RUN_DIR}/export-default.log").read_text()
    assert "had no threads any more; started again" in log


# -- a machine on which no server runs yet --------------------------------------------------------


@pytest.fixture
def fresh() -> Iterator[Callable[..., subprocess.CompletedProcess[str]]]:
    """Runs shell text on a machine of its own: a network namespace, which has its own server, and no rpcbind."""
    sh("ip", "netns", "add", "fresh")
    sh("ip", "-n", "fresh", "link", "set", "lo", "up")
    os.makedirs("/fresh", exist_ok=True)
    Path("/fresh/x.exports").write_text("/tree/fresh *(rw,insecure)\n")
    os.makedirs("/tree/fresh", exist_ok=True)
    Path("/tree/fresh/file").write_text("content")
    preamble = (
        # Sockets of rpcbind are found by their path, whatever the network: a server that ends would take the entries of
        # the guest's own server along.
        "if [ -e /run/rpcbind.sock ]; then mount --bind /dev/null /run/rpcbind.sock; fi && "
        "mount -t nfsd nfsd /proc/fs/nfsd && mount -t tmpfs none /var/lib/nfs && mkdir /var/lib/nfs/sm "
        "/var/lib/nfs/v4recovery && touch /var/lib/nfs/etab /var/lib/nfs/rmtab && mount -t tmpfs none /run/cloakfs && "
        "echo 10 >/proc/fs/nfsd/nfsv4gracetime; "
        f'cloakfs() {{ {" ".join(COMMAND)} "$@"; }}; '
    )

    def run(text: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["nsenter", "--net=/run/netns/fresh", "unshare", "--mount", "sh", "-c", preamble + text],
            capture_output=True, text=True, check=False, timeout=120,
        )  # fmt: skip

    yield run
    sh("ip", "netns", "del", "fresh")


def test_a_server_is_started_and_stopped(fresh: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = fresh(
        "cloakfs export up /fresh --root /srv/fresh || exit; cat /proc/fs/nfsd/threads; mkdir -p /client/fresh; "
        "mount -t nfs -o vers=4.2 127.0.0.1:/srv/fresh/tree-fresh /client/fresh && cat /client/fresh/file; echo; "
        "guard=$(cloakfs export status --json | tr -d ' ,' | sed -n 's/^\"pid\"://p' | head -1); "
        "kill $(pgrep -P $guard mountd); sleep 8; "
        "cloakfs export status; umount /client/fresh; "
        "cloakfs export down; echo down $?; cat /proc/fs/nfsd/threads; cat /run/cloakfs/export-default.log; "
        "grep fresh /proc/mounts"
    )
    said = done.stdout
    assert re.search(r"knfsd: answers\nlocks: .*\n8\ncontent\n", said), done
    assert "rpc.mountd had ended; started again" in said, done
    assert "down 0\n0\n" in said, done
    assert "/srv/fresh" not in said.partition("down 0")[2], done
    assert "Traceback" not in said + done.stderr, done


def test_no_rpcbind(fresh: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = fresh("cloakfs export up /fresh --root /srv/fresh --protocols 3,4; echo $?; cat /proc/fs/nfsd/threads")
    assert done.stdout == "1\n0\n", done
    assert "rpcbind does not answer, and NFSv3 needs it" in done.stderr
    assert not os.path.exists("/srv/fresh")


def test_the_port_is_taken(fresh: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    listen = "import socket,time; s = socket.create_server(('', 2049)); time.sleep(60)"
    done = fresh(
        f'python3 -c "{listen}" & p=$!; sleep 1; cloakfs export up /fresh --root /srv/fresh; echo $?; kill $p; '
        "cat /proc/fs/nfsd/threads"
    )
    assert done.stdout == "1\n0\n", done
    assert "2049" in done.stderr
    assert "ss -lntp" in done.stderr
    assert not os.path.exists("/srv/fresh")


def test_a_full_disk_for_numbers(share: Callable[..., Share], mount_nfs: Callable[..., str]) -> None:
    """Nothing is made that cannot get a number, and the error says why; what has one can be used and removed."""
    states = []

    def prepare_small(tree: str) -> None:
        os.mkdir(os.path.join(tree, "kept"))
        state = os.path.join(STATE_DIR, mount_key(tree, f"/srv/cloakfs/{mount_name(tree, '*')}"))
        os.makedirs(state)
        sh("mount", "-t", "tmpfs", "-o", "size=300k", "none", state)
        states.append(state)

    def fill(place: str) -> tuple[int, int]:
        for number in range(3000):
            try:
                os.mkdir(os.path.join(place, f"{number:04}-{'x' * 200}"))
            except OSError as exc:
                return number, exc.errno or -1
        return 3000, 0

    tree = share("rw,no_root_squash", prepare_small)
    try:
        places = [mount_nfs(tree, version) for version in VERSIONS]
        _, code = fill(os.path.join(places[0], "kept"))
        assert code == errno.ENOSPC
        filler = os.path.join(states[0], "filler")
        with contextlib.suppress(OSError), open(filler, "wb") as file:
            file.write(bytes(1 << 20))
        for place in places:
            before = names(tree.real("kept"))
            more, code = fill(os.path.join(place, "kept/" + before[0]))
            assert code == errno.ENOSPC
            assert len(names(tree.real("kept", before[0]))) == more
            os.rename(os.path.join(place, "kept", before[-1]), os.path.join(place, "kept/renamed"))
            os.rmdir(os.path.join(place, "kept/renamed"))
            assert names(tree.real("kept")) == before[:-1]
        os.unlink(filler)
        sh("mount", "-o", "remount,size=100m", states[0])
        for number, place in enumerate(places):
            os.mkdir(os.path.join(place, f"new-{number}"))
        assert {os.path.basename(path) for path in names(places[0])} == {
            "kept",
            *(f"new-{n}" for n in range(len(places))),
        }
    finally:
        sh("umount", "--lazy", states[0])
