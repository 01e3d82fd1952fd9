"""Fixtures of the tests that run in the guest: its NFS server, a service of cloakfs, and client mounts."""

import contextlib
import fcntl
import itertools
import os
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from bench.lab import nfsexports
from bench.lab.nfshost import NfsHost, drop_caches, sh
from cli.export import _order
from cloakfs.nfs import nfsdrestart
from cloakfs.nfs.plan import mount_name
from cloakfs.state.runtime import RUN_DIR, mount_key, mounted
from tests.mount.conftest import COMMAND, user
from tests.waiting import wait_until

__all__ = ["NfsHost", "client_host", "drop_caches", "mount_nfs", "nfs_host", "service", "sh", "share", "user"]

EXPORTS = "/tmp/exports.d"
VERSIONS = ("3", "4.2")


@pytest.fixture(scope="session")
def nfs_host() -> Iterator[NfsHost]:
    made = NfsHost()
    yield made
    made.close()


@contextlib.contextmanager
def without_nfsv3() -> Iterator[None]:
    """Restart the server's threads without NFSv3 meanwhile, so that locks are locks on the real tree."""
    threads = str(sum(nfsdrestart.current_config().threads))
    _restart("--no-nfs-version", threads)
    try:
        yield
    finally:
        _restart("--nfs-version", threads)


def _restart(option: str, threads: str) -> None:
    """Restart the server with or without NFSv3; the services of this machine wait, and do not start it themselves."""
    command = ["rpc.nfsd", option, "3", threads]
    os.makedirs(RUN_DIR, exist_ok=True)
    with open(f"{RUN_DIR}/nfsd.lock", "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        sh("rpc.nfsd", "0")
        wait_until(lambda: subprocess.run(command, check=False, capture_output=True).returncode == 0)


class Service:
    """`cloakfs export up` on a folder of entries, to which tests add and from which they remove."""

    def __init__(self) -> None:
        os.makedirs(EXPORTS)
        self._up = False
        self.numbers = itertools.count(1)

    def write(self, name: str, text: str) -> None:
        with open(f"{EXPORTS}/{name}.exports", "w", encoding="utf-8") as file:
            file.write(text)

    def take_over(self) -> dict[str, Any]:
        """Serve what the folder says now."""
        if self._up and not os.listdir(EXPORTS):
            sh(*COMMAND, "export", "down")
            self._up = False
            return {}
        if not self._up:
            sh(*COMMAND, "export", "up", EXPORTS)
            self._up = True
            return {}
        result = _order("default", "reload")
        assert not result["errors"], result
        return result

    def close(self) -> None:
        if self._up:
            sh(*COMMAND, "export", "down")
        with open(f"{RUN_DIR}/export-default.log", encoding="utf-8") as file:
            said = file.read()
        assert "Traceback" not in said, said


@dataclass
class Share:
    """One exported tree: `source` is the real one, `path` what clients mount."""

    service: Service
    name: str
    source: str
    path: str
    expect_errors: bool = False

    def real(self, *names: str) -> str:
        return os.path.join(self.source, *names)

    def set(self, options: str) -> dict[str, Any]:
        """Export it with other options from now on."""
        self.service.write(self.name, f"{self.source} *(insecure,{options})\n")
        return self.service.take_over()

    @property
    def pid(self) -> int:
        return mounted()[self.path].pid

    def is_served_by_another(self, pid: int) -> bool:
        """Whether a daemon other than this one serves the mount now. In between, there may be none."""
        mount = mounted().get(self.path)
        return mount is not None and mount.pid != pid

    @property
    def log(self) -> str:
        with open(f"{RUN_DIR}/{mount_key(self.source, self.path)}.log", encoding="utf-8") as file:
            return file.read()


@pytest.fixture(scope="session")
def service(nfs_host: NfsHost) -> Iterator[Service]:
    made = Service()
    # It goes up with something that stays.
    os.makedirs("/tree/always")
    made.write("always", "/tree/always *(insecure)\n")
    made.take_over()
    yield made
    made.close()


@contextlib.contextmanager
def exported(service: Service, options: str, prepare: Callable[[str], None] | None = None) -> Iterator[Share]:
    """Export a new tree for the length of a with block; `prepare(path)` fills it."""
    name = f"tree-{next(service.numbers)}"
    source = f"/{name.replace('-', '/')}"
    os.makedirs(source)
    os.chmod(source, 0o777)
    if prepare is not None:
        prepare(source)
    share = Share(service, name, source, f"/srv/cloakfs/{mount_name(source, '*')}")
    share.set(options)
    try:
        yield share
    finally:
        os.unlink(f"{EXPORTS}/{name}.exports")
        service.take_over()
    if not share.expect_errors:
        assert "ERROR" not in share.log, share.log
        assert "Traceback" not in share.log, share.log
    shutil.rmtree(source)


@contextlib.contextmanager
def nfs_mounted(share: Share, version: str, *options: str, host: str = "127.0.0.1", netns: str = "") -> Iterator[str]:
    """Mount a share as a client, in the network namespace `netns`; gives the mount point."""
    os.makedirs("/client", exist_ok=True)
    path = tempfile.mkdtemp(dir="/client")
    words = ",".join((f"vers={version}", "soft", "timeo=100", *options))
    if netns and version == "3":
        words += ",nolock"  # for which a client host needs a statd of its own; without, all locks of the guest hang
    enter = ("nsenter", f"--net=/run/netns/{netns}") if netns else ()
    sh(*enter, "mount", "-t", "nfs", "-o", words, f"{host}:{share.path}", path)
    try:
        yield path
    finally:
        # Without the helper, which would tell mountd and wait for its answer.
        command = ["umount", "-i", path]
        try:
            wait_until(lambda: subprocess.run(command, check=False, capture_output=True).returncode == 0)
        except AssertionError:
            sh("umount", "-l", path)
            raise
        os.rmdir(path)


def requests(tree: Share) -> Counter[str]:
    """How many requests the daemon of a share has answered, by operation."""
    return nfsexports.requests(tree.path)


@pytest.fixture
def share(service: Service) -> Iterator[Callable[..., Share]]:
    """Exports new trees: share("rw,cloak_list = …", prepare)."""
    with contextlib.ExitStack() as stack:
        yield lambda *arguments: stack.enter_context(exported(service, *arguments))


@pytest.fixture
def mount_nfs() -> Iterator[Callable[..., str]]:
    """Mounts a share as a client: mount_nfs(share, "4.2", "nosharecache") gives the mount point."""
    with contextlib.ExitStack() as stack:
        yield lambda *arguments, **more: stack.enter_context(nfs_mounted(*arguments, **more))


@contextlib.contextmanager
def second_host() -> Iterator[str]:
    """Make a second client machine: a network namespace, 10.9.0.2, that reaches the server at 10.9.0.1."""
    sh("ip", "netns", "add", "client2")
    sh("ip", "link", "add", "veth0", "type", "veth", "peer", "name", "veth1", "netns", "client2")
    sh("ip", "addr", "add", "10.9.0.1/24", "dev", "veth0")
    sh("ip", "link", "set", "veth0", "up")
    sh("ip", "-n", "client2", "addr", "add", "10.9.0.2/24", "dev", "veth1")
    sh("ip", "-n", "client2", "link", "set", "veth1", "up")
    sh("ip", "-n", "client2", "link", "set", "lo", "up")
    # By its name, the host's, the server would take it for the same client.
    name = "mount -t sysfs sysfs /sys && echo client2 >/sys/fs/nfs/net/nfs_client/identifier"
    sh("nsenter", "--net=/run/netns/client2", "unshare", "--mount", "sh", "-c", name)
    try:
        yield "client2"
    finally:
        sh("ip", "netns", "del", "client2")


@pytest.fixture(scope="session")
def client_host() -> Iterator[str]:
    """A second client machine (`second_host`)."""
    with second_host() as name:
        yield name
