"""Locks of NFSv4 clients are locks on the real tree, where the server does not serve NFSv3."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyfuse3
import pytest

from cloakfs.nfs.plan import mount_name
from tests.agents import User
from tests.mount.conftest import is_mounted
from tests.mount.test_locks import NONE, READ, SECONDS, WRITE, Actor, locks_of_status
from tests.nfs.knfsd.fixtures import EXPORTS, Share, nfs_mounted, without_nfsv3
from tests.nfs.reloads import run
from tests.waiting import wait_until

ANN = 1000

pytestmark = pytest.mark.skipif(
    not hasattr(pyfuse3, "FileLock"), reason="this pyfuse3 is not patched (scripts/setup --patched-pyfuse3)"
)


def say_where_locks_hold(tree: Share, start: str) -> bool:
    """Whether the mount, its service, and a plan of the service all say so of it."""
    (of_mount,) = (one["locks"] for one in run_json("export", "status")["mounts"] if one["path"] == tree.path)
    # Mounts that were made while the server served others have their locks elsewhere, and are named.
    shown = [line for line in run("export", "status").stdout.splitlines() if line.startswith("locks: ")]
    assert any(line.endswith(of_mount) and (len(shown) == 1 or tree.path in line) for line in shown), shown
    planned = run_json("export", "plan", EXPORTS)["locks"]
    return all(said.startswith(start) for said in (locks_of_status(tree.path), of_mount, planned))


def run_json(*words: str) -> dict[str, Any]:
    return dict(json.loads(run(*words, "--json").stdout))


def prepare(tree: str) -> None:
    os.chmod(tree, 0o1777)
    Path(tree, "file").write_text("x")
    os.chmod(Path(tree, "file"), 0o666)


@pytest.mark.parametrize("how", ["fcntl", "flock"])
def test_a_client_and_a_program_on_the_server(how: str, share: Callable[..., Share]) -> None:
    with without_nfsv3():
        tree = share("rw,no_client_cache", prepare)
        assert say_where_locks_hold(tree, "on the real tree")
        with nfs_mounted(tree, "4.2") as place, User(ANN) as here, User(ANN) as there:
            client, program = Actor(here, f"{place}/file"), Actor(there, tree.real("file"))
            assert client.try_lock(how, WRITE) == "done"
            # The client's flock(2) is a lock of fcntl(2) on the server.
            assert program.try_lock("fcntl", READ) == "EAGAIN"
            program.wait("fcntl", READ)
            assert program.has_waited() == "waits"
            here.do(os.close, client.fd)
            assert there.finish_within(SECONDS)
            assert Actor(here, f"{place}/file").try_lock(how, WRITE) == "EAGAIN"


def test_a_file_that_its_client_alone_uses(share: Callable[..., Share]) -> None:
    """Since Linux 6.6, the server grants delegations for writing, with which a client locks without asking it."""
    with without_nfsv3():
        tree = share("rw,no_client_cache", prepare)
        with nfs_mounted(tree, "4.2") as place, User(ANN) as here, User(ANN) as there:
            program = Actor(there, tree.real("file"))
            # A delegation is granted when the server has found that it can recall it.
            for _ in range(100):
                client = Actor(here, f"{place}/file")
                assert client.try_lock("fcntl", WRITE) == "done"
                assert program.try_lock("fcntl", READ) == "EAGAIN"
                here.do(os.close, client.fd)


@pytest.mark.parametrize("how", ["withdrawn", "killed"])
def test_the_daemon_ends_while_a_client_may_write(how: str, share: Callable[..., Share]) -> None:
    """Since Linux 6.6, it has what clients have open for writing open in its own mount as well."""
    with without_nfsv3():
        tree = share("rw,no_client_cache", prepare)
        tree.expect_errors = how == "killed"
        with nfs_mounted(tree, "4.2") as place, User(ANN) as here:
            fd = here.do(os.open, f"{place}/file", os.O_RDWR)
            here.do(os.pwrite, fd, b"before", 0)
            here.do(os.fsync, fd)
            daemon = tree.pid
            if how == "killed":
                os.kill(daemon, signal.SIGKILL)
            else:
                done = run("export", "down")
                assert done.returncode == 0, done
                assert not is_mounted(tree.path)
                done = run("export", "up", EXPORTS)
                assert done.returncode == 0, done
            wait_until(lambda: not os.path.exists(f"/proc/{daemon}"), 60)
            wait_until(lambda: tree.is_served_by_another(daemon), 90)
            wait_until(lambda: not here.error(os.stat, f"{place}/file"), 90)
            assert Path(tree.real("file")).read_bytes()[:6] == b"before"
            here.error(os.close, fd)


@contextmanager
def again(first: Share, client: str) -> Iterator[Share]:
    """Export the tree of another share once more, to this client."""
    path = f"/srv/cloakfs/{mount_name(first.source, client)}"
    second = Share(first.service, f"{first.name}-again", first.source, path)
    first.service.write(second.name, f"{first.source} {client}(insecure,rw,no_client_cache)\n")
    first.service.take_over()
    try:
        yield second
    finally:
        os.unlink(f"{EXPORTS}/{second.name}.exports")
        first.service.take_over()


@pytest.mark.parametrize("how", ["fcntl", "flock"])
def test_clients_of_two_exports_of_one_tree(how: str, share: Callable[..., Share]) -> None:
    """They exclude each other, and each sees what the other wrote under its lock."""
    with without_nfsv3():
        first = share("rw,no_client_cache", prepare)
        with (
            again(first, "127.0.0.0/8") as second,
            nfs_mounted(first, "4.2", "nosharecache") as place,
            nfs_mounted(second, "4.2", "nosharecache") as other,
            User(ANN) as here,
            User(ANN) as there,
        ):
            assert say_where_locks_hold(second, "on the real tree")
            one, two = Actor(here, f"{place}/file"), Actor(there, f"{other}/file")
            for number in range(20):
                writer, reader = (one, two) if number % 2 else (two, one)
                assert writer.try_lock(how, WRITE) == "done"
                assert reader.try_lock(how, READ) == "EAGAIN"
                writer.user.do(os.pwrite, writer.fd, str(number).encode(), 0)
                assert writer.try_lock(how, NONE) == "done"
                assert reader.try_lock(how, READ) == "done"
                assert reader.user.do(os.pread, reader.fd, 10, 0) == str(number).encode()
                assert reader.try_lock(how, NONE) == "done"


def test_with_nfsv3_the_kernel_keeps_them(share: Callable[..., Share]) -> None:
    tree = share("rw", prepare)
    assert say_where_locks_hold(tree, "within this mount alone: NFSv3 is served")
