"""Clients go on when the state of a mount is lost, if there is the key of file handles, and numbers are computed."""

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest

from cloakfs.nfs.plan import mount_name
from cloakfs.state import handlekey
from cloakfs.state.runtime import STATE_DIR, mount_key
from tests.agents import User, names, read
from tests.mount.conftest import run
from tests.mount.loopfs import filesystem
from tests.nfs import nfs3
from tests.nfs.knfsd.fixtures import EXPORTS, VERSIONS, Service, Share, drop_caches, nfs_mounted
from tests.waiting import wait_until

ANN, BOB = 1000, 1001
RECOVERY = 90.0
"""How long it may take until all can go on, in seconds (test_held_files)."""

CLOAKED = "rw,no_client_cache,cloak_list = uid +077 1000 1001"


@pytest.fixture
def key() -> Iterator[None]:
    handlekey.make()
    yield
    os.unlink(handlekey.PATH)


def prepare(tree: str) -> None:
    for owner in (ANN, BOB):
        os.makedirs(os.path.join(tree, str(owner), "deep", "er"))
        Path(tree, str(owner), "deep", "er", "file").write_text(f"of {owner}")
        for at, _, files in os.walk(os.path.join(tree, str(owner))):
            for path in (at, *(os.path.join(at, name) for name in files)):
                os.chown(path, owner, owner)
                os.chmod(path, 0o700)


@contextmanager
def exported_disk(service: Service, options: str) -> Iterator[Share]:
    """Export a tree on a file system of its own."""
    with filesystem("ext4", "/tmp", "disk", mib=32) as disk:
        source = os.path.join(disk, "tree")
        os.mkdir(source)
        prepare(source)
        share = Share(service, "disk", source, f"/srv/cloakfs/{mount_name(source, '*')}")
        share.set(options)
        try:
            yield share
        finally:
            os.unlink(f"{EXPORTS}/disk.exports")
            service.take_over()
            shutil.rmtree(os.path.join(STATE_DIR, mount_key(source, share.path)))


def lose_state(share: Share) -> None:
    """Remove all that is stored about the mount, and kill its daemon; the guard starts another."""
    before = share.pid
    shutil.rmtree(os.path.join(STATE_DIR, mount_key(share.source, share.path)))
    os.kill(before, signal.SIGKILL)
    wait_until(lambda: share.is_served_by_another(before))


@pytest.mark.parametrize("options", ["rw", CLOAKED, f"{CLOAKED},subtree_check"])
@pytest.mark.usefixtures("key")
def test_files_that_clients_hold(service: Service, options: str) -> None:
    with exported_disk(service, options) as share, ExitStack() as stack:
        raw = nfs3.Client("127.0.0.1", ANN, ANN)
        stack.callback(raw.close)
        handle = raw.walk(raw.mount(share.path), str(ANN), "deep", "er", "file")
        files = {}
        places = {version: stack.enter_context(nfs_mounted(share, version)) for version in VERSIONS}
        ann, bob = (stack.enter_context(User(uid)) for uid in (ANN, BOB))
        for version in VERSIONS:
            for who in (ann, bob):
                directory = os.path.join(places[version], str(who.uid), "deep", "er")
                files[who.uid, version] = who, who.do(os.open, f"{directory}/file", os.O_RDONLY), directory
        ann.do(os.chdir, files[ANN, VERSIONS[-1]][2])
        for moved in (False, True):
            if moved:  # while no daemon knows of it
                os.rename(share.real(str(ANN), "deep"), share.real(str(ANN), "moved"))
            lose_state(share)
            drop_caches()
            # NFSv4 clients claim what they have open once the server's threads have been restarted.
            wait_until(partial(go_on, files), RECOVERY)
            assert raw.read(handle) == (nfs3.OK, b"of 1000")
            assert ann.do(names, ".") == ["file"]
            assert ann.do(read, "file") == b"of 1000"
        for who, fd, _ in files.values():
            who.do(os.close, fd)
        ann.do(os.chdir, "/")
        wait_until(
            lambda: run("export", "status", check=False).returncode == 0
        )  # its threads may be restarted just now


def go_on(files: dict[tuple[int, str], tuple[User, int, str]]) -> bool:
    with suppress(OSError):
        return all(who.do(os.pread, fd, 100, 0) == b"of %d" % uid for (uid, _), (who, fd, _) in files.items())
    return False
