"""Fixed views through nfs-ganesha, by NFSv3 and v4: `cloakfs export up --server ganesha`, seen by libnfs.

All of it happens in a network namespace of its own, with its own rpcbind.
"""

import ctypes
import errno
import json
import os
import select
import shutil
import signal
import socket
import stat
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from cloakfs import linux
from cloakfs.linux import mountinfo
from cloakfs.nfs.plan import mount_name
from cloakfs.state.runtime import RUN_DIR, STATE_DIR, mount_key, mounted
from tests.mount.conftest import COMMAND, is_mounted, told
from tests.mount.test_tables import CELLS, FIGURE_1, FILES, GIDS, GROUPS, MASKS, REVERSE, UIDS
from tests.nfs import libnfs, nfs3
from tests.nfs.wire import Refused, Wire
from tests.waiting import wait_until

VERSIONS = (3, 4)
NAME = "test-ganesha"
CLIENT = "127.0.0.0/8"
STALE = 70
REFUSED = (errno.EACCES, errno.EFAULT)  # libnfs tells EFAULT for every error of READ and WRITE by version 3
PATIENCE = 90.0

_CLONE_NEWNET = 0x40000000
_NEEDED = ("/usr/bin/ganesha.nfsd", "/sbin/rpcbind", "/sbin/ip")


def _missing() -> str | None:
    if os.geteuid() != 0:
        return "needs root: it mounts"
    for program in _NEEDED:
        if not os.path.exists(program):
            return f"needs {program} (scripts/setup --test)"
    if os.path.exists("/run/rpcbind.sock"):
        return "needs a machine without an rpcbind of its own, whose socket it would use"
    return None


pytestmark = [pytest.mark.skipif(_missing() is not None, reason=_missing() or "")]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, check=False, timeout=120)


def sh(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


@pytest.fixture(scope="module")
def network() -> Iterator[None]:
    """This thread, and all it starts, in a network of its own."""
    libc = ctypes.CDLL(None, use_errno=True)
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    if libc.unshare(_CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "unshare")
    try:
        sh("ip", "link", "set", "lo", "up")
        yield
    finally:
        assert libc.setns(before, 0) == 0
        os.close(before)


@pytest.fixture(scope="module")
def rpcbind(network: None) -> Iterator[None]:
    process = subprocess.Popen(["/sbin/rpcbind", "-w", "-f"], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_until(lambda: process.poll() is not None or os.path.exists("/run/rpcbind.sock"))
    assert process.poll() is None
    yield
    process.terminate()
    process.wait()
    for left in ("/run/rpcbind.sock", "/run/rpcbind.lock"):
        with suppress(FileNotFoundError):
            os.unlink(left)


class Site:
    """A service with a folder of entries."""

    def __init__(self, base: str) -> None:
        self.base = base
        self.tree = os.path.join(base, "tree")
        self.entries = os.path.join(base, "exports.d")
        self.root = os.path.join(base, "mounts")
        self.name = mount_name(self.tree, CLIENT)
        os.mkdir(self.tree)
        os.chmod(self.tree, 0o777)
        os.mkdir(self.entries)

    def write(self, options: str) -> None:
        Path(self.entries, "x.exports").write_text(f"{self.tree} {CLIENT}(insecure,{options})\n")

    def up(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return run("export", "up", self.entries, "--server", "ganesha", "--root", self.root, "--name", NAME, *arguments)

    def set(self, options: str) -> None:
        """Serve the tree with other options from now on."""
        self.write(options)
        done = run("export", "reload", "--name", NAME)
        assert done.returncode == 0, done

    def real(self, *names: str) -> str:
        return os.path.join(self.tree, *names)

    def client(self, view: str, version: int, uid: int = 4242, **more: object) -> libnfs.Client:
        return libnfs.Client(f"/{self.name}/@{view}", version=version, port=2049, mount_port=20048, uid=uid, **more)  # type: ignore[arg-type]

    def mount(self, view: str) -> str:
        return f"{self.root}/{self.name}+{view}"

    def kill_daemon(self, view: str) -> None:
        process = os.pidfd_open(mounted()[self.mount(view)].pid)
        signal.pidfd_send_signal(process, signal.SIGKILL)
        select.select([process], [], [], 10)
        os.close(process)

    def status(self) -> dict[str, object]:
        return json.loads(run("export", "status", "--json", "--name", NAME).stdout)  # type: ignore[no-any-return]

    def close(self) -> None:
        done = run("export", "down", "--name", NAME)
        log = Path(f"{RUN_DIR}/export-{NAME}.log").read_text()
        for view in os.listdir(self.root) if os.path.exists(self.root) else []:
            assert not is_mounted(f"{self.root}/{view}")
        shutil.rmtree(self.base)
        shutil.rmtree(f"{STATE_DIR}/export-{NAME}", ignore_errors=True)
        os.unlink(f"{RUN_DIR}/export-{NAME}.log")
        assert done.returncode == 0, done
        assert "Traceback" not in log, log


@pytest.fixture(scope="module")
def site(rpcbind: None) -> Iterator[Site]:
    """A service that is up, with views for ezk and joe of Table 2."""
    base = tempfile.mkdtemp(prefix="cloakfs-test-")
    os.chmod(base, 0o755)
    made = Site(base)
    made.write(f"rw,{VIEWS}")
    done = made.up("--protocols", "3,4")
    assert done.returncode == 0, done
    assert "ganesha: answers" in done.stdout
    yield made
    keys = [mount_key(made.tree, mount) for mount in (made.mount(str(uid)) for uid in (*UIDS.values(), 200, 0))]
    made.close()
    for key in keys:
        shutil.rmtree(f"{STATE_DIR}/{key}", ignore_errors=True)
        with suppress(FileNotFoundError):
            os.unlink(f"{RUN_DIR}/{key}.log")


@pytest.fixture
def empty(site: Site) -> Iterator[Site]:
    """The same with an empty tree, for tests that set options before anything else."""
    yield site
    for entry in os.scandir(site.tree):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        else:
            os.unlink(entry.path)


@pytest.fixture
def tree(empty: Site) -> Site:
    """The same with an empty tree and without options."""
    empty.set(f"rw,{VIEWS}")
    return empty


VIEWS = "views = " + " ".join(
    f"{UIDS[name]}:{GIDS[GROUPS[name][0]]}:{'+'.join(str(GIDS[group]) for group in GROUPS[name])}" for name in UIDS
)
EZK, JOE = str(UIDS["ezk"]), str(UIDS["joe"])


def error(call: Callable[..., object], *arguments: object) -> int:
    try:
        call(*arguments)
    except OSError as exc:
        return exc.errno or -1
    return 0


def cell(client: libnfs.Client, name: str, uid: int, groups: set[int]) -> str:
    """What [SZ Table 2] says a user can do with a file. (Of what may only be executed, NFS can tell nothing.)"""
    try:
        info = client.lstat(f"/{name}")
    except FileNotFoundError:
        return "-"
    if not error(client.read, f"/{name}") or not error(client.write, f"/{name}", b"", 0):
        return "A"
    bits = info.mode >> (6 if info.uid == uid else 3 if info.gid in groups else 0)
    return "A" if bits & 1 else "v"


@pytest.mark.parametrize("mask", MASKS)
def test_table_2(empty: Site, mask: str) -> None:
    tree = empty
    for file in FILES:
        path = tree.real(file["file"])
        Path(path).write_text("")
        os.chown(path, UIDS[file["user"]], GIDS[file["group"]])
        os.chmod(path, int(file["mode"], 8))
    tree.set(f"rw,range_map = uid 0 -1 map 0 gid 0 -1 map 0,cloak_list = uid {mask} 3001 3002,{VIEWS}")
    for version in VERSIONS:
        for name, uid in UIDS.items():
            with tree.client(str(uid), version) as client:
                listed = client.listdir()
                for expected in (c for c in CELLS if c["mask"] == mask and c["caller"] == name):
                    path = expected["file"]
                    seen = cell(client, path, uid, {GIDS[group] for group in GROUPS[name]})
                    assert seen == expected["algorithm"], (mask, name, path, version)
                    assert (path in listed) == (seen != "-"), (mask, name, path, version)


def test_figure_1(tree: Site) -> None:
    """Views are chosen by server ids; what they show and store is mapped."""
    for server in REVERSE:
        path = tree.real(f"owned-by-{server}")
        Path(path).write_text("")
        os.chown(path, server, 0)
    tree.set(f"rw,{FIGURE_1},views = 200:0 0:0")
    for version in VERSIONS:
        with tree.client("200", version) as client, tree.client("0", version) as root:
            for server, shown in REVERSE.items():
                assert client.lstat(f"/owned-by-{server}").uid == shown, (server, version)
            client.mkdir(f"/made-{version}")
            assert os.stat(tree.real(f"made-{version}")).st_uid == 200
            assert client.lstat(f"/made-{version}").uid == 400
            client.write(f"/file-{version}", b"")
            root.chown(f"/file-{version}", 450, 0)
            assert os.stat(tree.real(f"file-{version}")).st_uid == 250
            assert error(root.chown, f"/file-{version}", 501, 0) == errno.EINVAL
            assert os.stat(tree.real(f"file-{version}")).st_uid == 250


@pytest.mark.parametrize("version", VERSIONS)
def test_operations(tree: Site, version: int) -> None:
    """Every caller, root of the client included, acts as the view's identity, with all of its groups."""
    uid, fac = UIDS["ezk"], GIDS["fac"]
    for caller in (0, 1, uid, 4242):
        with tree.client(EZK, version, caller) as ezk, tree.client(JOE, version, caller) as joe:
            ezk.write("/file", b"content")
            ezk.mkdir("/dir")
            ezk.symlink("file", "/symlink")
            ezk.link("/file", "/dir/link")
            ezk.rename("/dir/link", "/dir/moved")
            for name in ("file", "dir", "symlink", "dir/moved"):
                info = os.lstat(tree.real(name))
                assert (info.st_uid, info.st_gid) == (uid, GIDS["src"]), (caller, name)
            ezk.chmod("/file", 0o644)
            assert stat.S_IMODE(os.stat(tree.real("file")).st_mode) == 0o644
            assert ezk.lstat("/file").nlink == 2
            assert joe.readlink("/symlink").startswith("file")  # libnfs does not always end it there
            assert joe.read("/dir/moved") == b"content"

            ezk.chmod("/file", 0o600)
            assert error(joe.read, "/file") in REFUSED
            with ezk.open("/file", os.O_RDWR) as held:
                # It is cached and open now, for one; the other is asked for all the same.
                assert held.pread() == b"content"
                assert error(joe.read, "/file") in REFUSED
                assert error(joe.write, "/file", b"joe's") == errno.EACCES
                held.pwrite(b"CONTENT")
            assert Path(tree.real("file")).read_bytes() == b"CONTENT"
            # Version 4 of libnfs opens the file first.
            assert error(joe.chmod, "/file", 0o666) in (errno.EPERM, errno.EACCES)
            assert error(joe.chown, "/file", UIDS["joe"], -1) in (errno.EPERM, errno.EACCES)
            assert error(joe.truncate, "/file", 0) == errno.EACCES

            # A file that is his by a supplementary group alone.
            Path(tree.real("of-fac")).write_text("for fac")
            os.chown(tree.real("of-fac"), 1, fac)
            os.chmod(tree.real("of-fac"), 0o660)
            assert ezk.read("/of-fac") == b"for fac"
            ezk.write("/of-fac", b"by fac", 0)
            assert error(joe.read, "/of-fac") in REFUSED
            ezk.chown("/file", -1, fac)
            assert os.stat(tree.real("file")).st_gid == fac

            # In a sticky directory, what is his alone.
            os.chmod(tree.tree, 0o1777)
            assert error(joe.unlink, "/file") in (errno.EPERM, errno.EACCES)
            assert error(joe.rename, "/file", "/stolen") in (errno.EPERM, errno.EACCES)
            os.chmod(tree.tree, 0o777)
            ezk.unlink("/dir/moved")
            ezk.rmdir("/dir")
            for name in ("/file", "/symlink", "/of-fac"):
                ezk.unlink(name)
            assert os.listdir(tree.tree) == []


@pytest.mark.parametrize("version", VERSIONS)
def test_what_is_hidden_meanwhile_is_gone_at_the_next_request(tree: Site, version: int) -> None:
    tree.set(f"rw,cloak_list = uid +007 3001 3001,{VIEWS}")
    Path(tree.real("file")).write_text("content")
    os.chown(tree.real("file"), UIDS["joe"], 0)
    with tree.client(EZK, version) as client, Wire(2049, version=version) as wire:
        held = client.open("/file")
        handle = held.handle
        assert held.pread() == b"content"
        assert wire.getattr(handle)[1] == 7
        os.chmod(tree.real("file"), 0o600)
        told()
        assert error(client.lstat, "/file") == errno.ENOENT
        assert client.listdir() == []
        for operation in (wire.getattr, wire.read):
            with pytest.raises(Refused) as refused:
                operation(handle)
            assert refused.value.status == STALE
        # The server keeps it open, but NFS clients have handles, not descriptors.
        assert error(held.pread)
        os.chmod(tree.real("file"), 0o604)
        told()
        assert client.listdir() == ["file"]
    with tree.client(EZK, version) as client:
        assert client.read("/file") == b"content"


def test_a_thousand_files(tree: Site) -> None:
    for number in range(1000):
        Path(tree.real(f"file-{number:04}")).touch()
    for version in VERSIONS:
        with tree.client(EZK, version) as client:
            found = client.scandir()
            assert sorted(found) == [f"file-{number:04}" for number in range(1000)]
            for name in list(found)[::100]:
                assert client.lstat(f"/{name}").mode == found[name].mode


@pytest.mark.parametrize("version", VERSIONS)
def test_crafted_handles(tree: Site, version: int) -> None:
    """Of another view, of what is not exported, and guessed."""
    Path(tree.real("mine")).write_text("ezk's alone")
    os.chown(tree.real("mine"), UIDS["ezk"], 0)
    os.chmod(tree.real("mine"), 0o600)
    Path(tree.real("public")).write_text("public")
    with (
        tree.client(EZK, version) as ezk,
        tree.client(JOE, version) as joe,
        Wire(2049, version=version) as wire,
    ):
        with ezk.open("/mine") as file:
            mine = file.handle
        with joe.open("/public") as file:
            public = file.handle
        assert wire.read(mine) == b"ezk's alone"
        # All mixtures of a handle of one view with one of the other.
        assert len(mine) == len(public)
        differing = [at for at in range(len(mine)) if mine[at] != public[at]]
        for cut in range(1, len(differing)):
            for ours, theirs in ((mine, public), (public, mine)):
                made = bytearray(theirs)
                for at in differing[:cut]:
                    made[at] = ours[at]
                if bytes(made) not in (mine, public):
                    with pytest.raises(Refused):
                        wire.read(bytes(made))
        for at in range(len(mine)):
            made = bytearray(mine)
            made[at] ^= 0x11
            with suppress(Refused, ConnectionError):
                assert wire.read(bytes(made)) in (b"ezk's alone",)
    # The file system that the mount point lies on, by its root.
    with tree.client(EZK, 4) as client, Wire(2049, version=4) as wire:
        with client.open("/public") as file:
            known = file.handle
        for place in ("/", f"{STATE_DIR}/export-{NAME}/exports", tree.root):
            info = os.stat(place)
            fd = os.open(place, os.O_PATH)
            inode = struct.pack("<IQI", 1, info.st_ino, 0)  # what has no handles may have an inode number
            with suppress(OSError):
                inode, _ = linux.name_to_handle(fd)
            os.close(fd)
            for ids in ((os.major(info.st_dev), os.minor(info.st_dev)), (0, os.minor(info.st_dev))):
                for kind in range(8):
                    tail = bytes([kind]) + struct.pack("<II", *ids) + inode[:1] + inode[4:]
                    for head in (known[:6], known[:8], known[:5]):
                        with pytest.raises((Refused, ConnectionError)):
                            wire.getattr(head + bytes([len(tail)]) + tail)


@pytest.mark.parametrize("version", VERSIONS)
def test_clients_go_on(tree: Site, version: int) -> None:
    """Over a rename elsewhere, forgetting and a new daemon, with the handles they have."""
    with tree.client(EZK, version) as client:
        client.mkdir("/dir")
        client.write("/dir/file", b"content")
        client.chmod("/dir/file", 0o644)
        held = client.open("/dir/file")
        handle = held.handle
        os.mkdir(tree.real("elsewhere"))
        os.chmod(tree.real("elsewhere"), 0o777)
        os.rename(tree.real("dir", "file"), tree.real("elsewhere", "file"))
        Path("/proc/sys/vm/drop_caches").write_text("2")
        assert held.pread() == b"content"
        with Wire(2049, version=version) as wire:
            assert wire.read(handle) == b"content"

        tree.kill_daemon(EZK)
        began = time.monotonic()
        while True:
            # An error at once, or service again: nothing else, and never the directory below. (libnfs claims nothing.)
            sent = time.monotonic()
            try:
                with tree.client(EZK, version) as again:
                    assert again.listdir() == ["dir", "elsewhere"]
                    assert again.read("/elsewhere/file") == b"content"
                break
            except OSError:
                assert time.monotonic() - sent < 60
                assert time.monotonic() - began < PATIENCE
                time.sleep(0.1)
        with Wire(2049, version=version) as wire:
            assert wire.read(handle) == b"content"
        with tree.client(JOE, version) as other:
            assert other.read("/elsewhere/file") == b"content"


def _server_pid() -> int:
    return int(subprocess.run(["pgrep", "-f", f"export-{NAME}/ganesha.conf"], capture_output=True, check=True).stdout)


def has_content(handle: bytes, version: int) -> bool:
    """Whether the file of a handle is served, to a client that claims nothing."""
    with suppress(OSError, Refused), Wire(2049, version=version) as wire:
        return wire.read(handle) == b"content"
    return False


def test_clients_claim_what_they_have_locked_from_a_new_server(tree: Site) -> None:
    """It takes the place of the old one when a daemon dies, and so does the next one when it is killed itself."""

    def is_told() -> bool:
        return any("nfs-ganesha was started" in str(said) for said in tree.status()["warnings"])  # type: ignore[attr-defined]

    Path(tree.real("file")).write_text("content")
    os.chmod(tree.real("file"), 0o666)
    handles, server = {}, _server_pid()
    for version in VERSIONS:
        with tree.client(EZK, version) as client:
            file = client.open("/file", os.O_RDWR)
            handles[version] = file.handle
            if version == 4:
                file.lock()
    tree.kill_daemon(EZK)
    wait_until(is_told, PATIENCE)
    killed = _server_pid()
    assert killed != server
    os.kill(killed, signal.SIGKILL)
    for version, handle in handles.items():
        wait_until(partial(has_content, handle, version), PATIENCE)
    wait_until(lambda: not is_told(), PATIENCE)
    assert tree.status()["problem"] is None
    assert _server_pid() not in (server, killed)


def test_what_ganesha_exports_is_no_mount_to_anybody_else(tree: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a shell nor `status` names the bind mounts in its state, also not when a daemon has just died."""
    room = f"{STATE_DIR}/export-{NAME}/exports/"
    assert any(path.startswith(room) for path in mountinfo.by_path())
    monkeypatch.setenv("COMP_CWORD", "2")
    monkeypatch.setenv("COMP_WORDS", "cloakfs umount /")
    monkeypatch.setenv("_CLOAKFS_COMPLETE", "bash_complete")
    completed = run().stdout
    monkeypatch.delenv("_CLOAKFS_COMPLETE")
    assert tree.mount(EZK) in completed
    assert room not in completed
    guard = os.pidfd_open(int(str(tree.status()["pid"])))
    signal.pidfd_send_signal(guard, signal.SIGSTOP)
    try:
        tree.kill_daemon(EZK)
        said = run("status").stdout
    finally:
        signal.pidfd_send_signal(guard, signal.SIGCONT)
        os.close(guard)
    assert f"{tree.mount(EZK)}: " in said
    assert room not in said
    wait_until(lambda: not tree.status()["mounts"][0]["problem"], PATIENCE)  # type: ignore[index]


@pytest.mark.parametrize("version", VERSIONS)
def test_a_program_that_may_only_be_executed_cannot_be_read(tree: Site, version: int) -> None:
    """So clients cannot execute it: Ganesha does not let them read, as RFC 1813, section 4.4, allows it."""
    for name, mode in (("program", 0o111), ("readable", 0o555)):
        Path(tree.real(name)).write_text("#!/bin/sh\n")
        os.chmod(tree.real(name), mode)
    told()
    with tree.client(EZK, version) as client:
        assert client.read("/readable") == b"#!/bin/sh\n"
        assert error(client.read, "/program") in REFUSED


def kill_guard(tree: Site) -> None:
    process = os.pidfd_open(int(str(tree.status()["pid"])))
    signal.pidfd_send_signal(process, signal.SIGKILL)
    assert select.select([process], [], [], PATIENCE)[0]
    os.close(process)


def test_clients_go_on_when_the_guard_is_killed(tree: Site) -> None:
    """And the next command knows what it has left, can take over, and can take it down."""
    Path(tree.real("file")).write_text("")
    kill_guard(tree)
    result = run("export", "status", "--name", NAME)
    assert (result.returncode, result.stderr.count("\n")) == (1, 1)
    assert "was killed" in result.stderr
    assert tree.mount(EZK) in result.stderr
    with tree.client(EZK, 4) as client:
        assert client.listdir() == ["file"]
    try:
        done = tree.up("--protocols", "3,4")
        assert done.returncode == 0, done
        assert run("export", "status", "--name", NAME).returncode == 0
        with tree.client(EZK, 4) as client:
            assert client.listdir() == ["file"]
        kill_guard(tree)
        done = run("export", "down", "--name", NAME)
        assert done.returncode == 0, done
        assert "had been killed" in done.stderr
        assert not is_mounted(tree.mount(EZK))
        assert not os.path.exists(tree.mount(EZK))
        assert tree.mount(EZK) not in mounted()
        with socket.socket() as asking:
            assert asking.connect_ex(("127.0.0.1", 2049)) == errno.ECONNREFUSED
        assert "is not up" in run("export", "down", "--name", NAME).stderr
    finally:
        tree.up("--protocols", "3,4")


def test_an_entry_with_mp_waits_for_its_disk(tree: Site) -> None:
    """What lies below an unmounted disk is never exported."""
    Path(tree.real("below")).write_text("")
    try:
        tree.set(f"rw,mp,{VIEWS}")
        result = run("export", "status", "--name", NAME)
        assert result.returncode == 1
        assert f"waits for something to be mounted on {tree.tree} (mp)" in result.stdout
        assert not is_mounted(tree.mount(EZK))
        with pytest.raises(OSError), tree.client(EZK, 4) as client:  # noqa: PT011  (libnfs says EINVAL, or something else)
            client.listdir()
        sh("mount", "--bind", tree.tree, tree.tree)
        wait_until(lambda: run("export", "status", "--name", NAME).returncode == 0, PATIENCE)
        with tree.client(EZK, 4) as client:
            assert client.listdir() == ["below"]
        assert all(mount["restarts"] == 0 for mount in tree.status()["mounts"])  # type: ignore[attr-defined]
    finally:
        tree.set(f"rw,{VIEWS}")
        if is_mounted(tree.tree):
            sh("umount", "-l", tree.tree)


def test_a_broken_configuration_changes_nothing(tree: Site) -> None:
    Path(tree.real("file")).write_text("content")
    file = f"{tree.entries}/x.exports"
    good = Path(file).read_text()
    with tree.client(EZK, 3) as client:
        for text, said in (
            (good.replace("rw", "rv"), f"{file}:1:"),
            (good + "/tmp *(rw)\n", "nfs-ganesha looks files up as root"),
            (good + "/tmp *(views = does-not-exist)\n", "no such user"),
        ):
            Path(file).write_text(text)
            done = run("export", "reload", "--name", NAME)
            assert done.returncode == 2, done
            assert said in done.stderr
            assert client.read("/file") == b"content"
        Path(file).write_text(good.replace("rw", "ro"))
        done = run("export", "reload", "--name", NAME)
        assert done.returncode == 0, done
        with tree.client(EZK, 3) as again:
            assert error(again.write, "/file", b"") == errno.EROFS
            assert again.read("/file") == b"content"


def test_whoever_may_write_sets_the_size_and_the_present(tree: Site) -> None:
    """Also one of the times alone, which utimensat(2) refuses: nfs-ganesha asks for it in a request of its own."""
    path = tree.real("shared")
    owner, group = UIDS["joe"], GIDS[GROUPS["ezk"][0]]
    for version in VERSIONS:
        Path(path).write_bytes(b"content")
        os.chown(path, owner, group)
        os.chmod(path, 0o664)
        with tree.client(EZK, version) as client:
            client.truncate("/shared", 3)
            assert Path(path).read_bytes() == b"con"
            client.write("/shared", b"new", os.O_TRUNC)
            assert Path(path).read_bytes() == b"new"
    raw = nfs3.Client("127.0.0.1", 4242, 4242)
    try:
        handle = raw.walk(raw.mount(f"/{tree.name}/@{EZK}"), "shared")
        for changes in ({"atime": nfs3.NOW}, {"mtime": nfs3.NOW}, {"size": 2, "mtime": nfs3.NOW}):
            os.utime(path, (1, 1))
            assert raw.setattr(handle, **changes) == nfs3.OK, changes
            info = os.stat(path)
            assert [info.st_atime > 1, info.st_mtime > 1] == ["atime" in changes, "mtime" in changes], changes
        assert Path(path).read_bytes() == b"ne"
        os.utime(path, (1, 1))
        for changes in ({"mtime": 5}, {"mode": 0o666}, {"uid": UIDS["ezk"]}, {"atime": nfs3.NOW, "mode": 0o666}):
            assert raw.setattr(handle, **changes) in (nfs3.PERM, nfs3.ACCES), changes
        os.chmod(path, 0o644)
        for changes in ({"atime": nfs3.NOW}, {"mtime": nfs3.NOW}, {"size": 0, "mtime": nfs3.NOW}):
            assert raw.setattr(handle, **changes) in (nfs3.PERM, nfs3.ACCES), changes
        info = os.stat(path)
        assert (info.st_uid, info.st_size, info.st_atime, info.st_mtime) == (owner, 2, 1, 1)
    finally:
        raw.close()


@pytest.fixture
def lonely(network: None) -> Iterator[Site]:
    """A service that is not up, with one view of its own tree, in a network without rpcbind."""
    libc = ctypes.CDLL(None, use_errno=True)
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    assert libc.unshare(_CLONE_NEWNET) == 0
    base = tempfile.mkdtemp(prefix="cloakfs-test-")
    os.chmod(base, 0o755)
    made = Site(base)
    try:
        sh("ip", "link", "set", "lo", "up")
        Path(made.entries, "x.exports").write_text(f"{made.tree} {CLIENT}(rw,all_squash,anonuid=3001,anongid=3101)\n")
        Path(made.real("file")).write_text("content")
        yield made
    finally:
        run("export", "down", "--name", f"{NAME}-lonely")
        assert libc.setns(before, 0) == 0
        os.close(before)
        key = mount_key(made.tree, f"{made.root}/{made.name}")
        shutil.rmtree(base)
        for left in (f"{STATE_DIR}/export-{NAME}-lonely", f"{STATE_DIR}/{key}"):
            shutil.rmtree(left, ignore_errors=True)
        for left in (
            f"{RUN_DIR}/export-{NAME}-lonely.log",
            f"{RUN_DIR}/export-{NAME}-lonely.lock",
            f"{RUN_DIR}/{key}.log",
        ):
            with suppress(FileNotFoundError):
                os.unlink(left)


def up(site: Site, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run("export", "up", site.entries, "--server", "ganesha", "--root", site.root, "--name", f"{NAME}-lonely",
               *arguments)  # fmt: skip


def test_version_4_without_rpcbind(lonely: Site) -> None:
    done = up(lonely)
    assert done.returncode == 0, done
    with libnfs.Client(f"/{lonely.name}", version=4, port=2049, uid=77) as client:
        assert client.read("/file") == b"content"
        client.write("/new", b"")
        assert os.stat(lonely.real("new")).st_uid == 3001
    done = run("export", "down", "--name", f"{NAME}-lonely")
    assert done.returncode == 0, done
    assert not os.path.exists(lonely.root)
    assert "lonely" not in Path("/proc/mounts").read_text()


def test_what_stands_in_the_way(lonely: Site) -> None:
    """Each is reported in one line with a hint, and nothing is left behind."""
    with subprocess.Popen(
        [
            "python3",
            "-c",
            "import socket, time; s = socket.create_server(('', 2049)); print(flush=True); time.sleep(60)",
        ],
        stdout=subprocess.PIPE,
    ) as taker:
        assert taker.stdout is not None
        taker.stdout.readline()
        done = up(lonely)
        taker.kill()
    assert done.returncode == 1
    assert "2049" in done.stderr
    done = up(lonely, "--protocols", "3,4")
    assert done.returncode == 1
    assert "rpcbind" in done.stderr
    done = up(lonely, "--bind", "127.0.0.1")
    assert done.returncode == 1
    assert "127.0.0.1" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not os.path.exists(lonely.root)
    assert lonely.root not in Path("/proc/mounts").read_text()
    assert run("export", "status", "--name", f"{NAME}-lonely").returncode == 1
