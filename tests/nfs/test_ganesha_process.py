"""The server process, in a network of its own: what it can reach, whom it serves, and that it keeps running."""

import contextlib
import ctypes
import errno
import os
import shutil
import signal
import socket
import subprocess
import threading
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import trio

from cloakfs import linux
from cloakfs.nfs.ganesha import GRACE_SECONDS, Ganesha, GaneshaExport, installed_release, render
from cloakfs.nfs.server import ServerError
from cloakfs.state.runtime import mounted
from tests.agents import User
from tests.mount import conftest as mounts
from tests.mount.conftest import Mount, is_mounted
from tests.mount.loopfs import filesystem
from tests.nfs import libnfs
from tests.nfs.wire import Refused, Wire
from tests.processes import kill
from tests.waiting import wait_in_loop

# A real mount point, and everything of it put away afterwards.
base = mounts.base
tree = mounts.tree

PORT = 2049
NOENT = 2
NAMES = (
    "with space", "it's", "'quoted'", "#comment", "semi;colon", "{brace}", "100%", "a,b", "= x", "größe", "日本",
    "%include", "two  ", "true", "1", "*", "~", "-", "@group", "x" * 200,
)  # fmt: skip
# What of exports(5) lets in whom: a client at 127.0.0.1, one at ::1.
CLIENTS = {
    "*": (True, True), "127.0.0.1": (True, False), "127.0.0.2": (False, False), "127.0.0.0/8": (True, False),
    "127.0.0.0/255.0.0.0": (True, False), "10.1.0.0/16": (False, False), "0.0.0.0/0": (True, False),
    "128.0.0.0/1": (False, False), "::1": (False, True), "::/0": (False, True), "8000::/1": (False, False),
    "localhost": (True, None), "@no-such-netgroup": (False, False),
}  # fmt: skip

_PR_CAPBSET_DROP = 24
_CLONE_NEWNET = 0x40000000


def _missing() -> str | None:
    if os.geteuid() != 0:
        return "needs root: it mounts"
    for program in ("ganesha.nfsd", "ip"):
        if shutil.which(program) is None:
            return f"needs {program} (scripts/setup --test)"
    return None if os.path.exists("/dev/fuse") else "needs /dev/fuse (modprobe fuse)"


pytestmark = pytest.mark.skipif(_missing() is not None, reason=_missing() or "")

Scenario = Callable[[str, Sequence[str]], Awaitable[None]]


def _in_new_network(scenario: Scenario, state_dir: str, paths: Sequence[str]) -> None:
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "unshare")
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    trio.run(scenario, state_dir, paths)


class Place:
    """A tree, mounts of it as fixed views, and a state directory for a server."""

    def __init__(self, base: str, tree: str) -> None:
        self.base = base
        self.tree = tree
        self.state_dir = os.path.join(base, "state")
        self.paths: list[str] = []
        self._stack = contextlib.ExitStack()

    def mount(self, name: str) -> Mount:
        path = os.path.join(self.base, name)
        os.mkdir(path)
        made = Mount(self.tree, path)
        self._stack.callback(self._unmount, made)
        self.mount_again(path)
        self.paths.append(path)
        return made

    def mount_again(self, path: str) -> None:
        mounts.run("mount", self.tree, path, "--view", "4001:4001", "-o", "no_root_squash,ganesha")

    def _unmount(self, mount: Mount) -> None:
        if is_mounted(mount.path):
            mounts.run("umount", mount.path)

    def run(self, scenario: Scenario) -> None:
        """Run it in a process and a network of its own."""
        with User(0) as process:
            process.do(_in_new_network, scenario, self.state_dir, tuple(self.paths))

    def close(self) -> None:
        left = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines() if self.state_dir in line]
        for path in reversed(left):
            linux.umount(path, linux.MNT_DETACH)
        self._stack.close()
        assert left == []


@pytest.fixture
def place(base: str, tree: str) -> Iterator[Place]:
    Path(tree, "file").write_text("content")
    made = Place(base, tree)
    yield made
    made.close()


def exports_of(paths: Sequence[str]) -> list[GaneshaExport]:
    return [
        GaneshaExport(number, path, f"/{os.path.basename(path)}", "*", False, ("sys",), (7, number))
        for number, path in enumerate(paths, 1)
    ]


@contextlib.asynccontextmanager
async def serving(ganesha: Ganesha, exports: Sequence[GaneshaExport]) -> AsyncIterator[None]:
    try:
        await ganesha.start(exports)
        yield
    finally:
        await ganesha.stop()


def handle_of(wire: Wire, *names: str) -> bytes:
    handle = wire.root()
    for name in names:
        handle = wire.lookup(handle, name.encode())
    return handle


def status(call: Callable[..., object], *arguments: object) -> int:
    try:
        call(*arguments)
    except Refused as exc:
        return exc.status
    return 0


# -- the way up --------------------------------------------------------------------------------------

ABOVE = uuid.UUID("5d0ce8a2-5cf4-4f5c-8a1b-0d7f1a3c9be1")


def _try_to_get_up(names: Sequence[str]) -> tuple[bytes | None, int]:
    """The content of a file on the file system above the export, had by a made-up handle; else the last refusal."""
    refusal = 0
    with Wire(PORT, version=4) as wire:
        known = handle_of(wire, *names)
        # Version, flags, export id, length; then FSAL_VFS's: kind of id (a UUID) and of handle, id, kernel's handle.
        for inode in range(2, 20):
            made = bytes([0x43]) + ABOVE.bytes + bytes([1]) + inode.to_bytes(4, "little") + bytes(4)
            try:
                return wire.read(wire.lookup(known[:4] + bytes([len(made)]) + made, b"secret")), 0
            except Refused as exc:
                refusal = exc.status
    return None, refusal


class _Unprotected(Ganesha):
    """As nfs-ganesha's own documentation has it: the path is exported as it is."""

    def _render(self, exports: Sequence[GaneshaExport]) -> str:
        release = installed_release()
        return render(
            exports, state_dir=self.state_dir, port=self.port, bind_addr=None, protocols=(4,), release=release
        )


async def _protected(state_dir: str, paths: Sequence[str]) -> None:
    ganesha = Ganesha(state_dir)
    async with serving(ganesha, exports_of(paths)):
        content, refusal = _try_to_get_up(["mnt"])
        assert (content, refusal) == (None, 70)
        # Nor by what Ganesha does find above: no client has a handle of that.
        room = os.open(f"{state_dir}/exports", os.O_PATH)
        with pytest.raises(OSError, match=os.strerror(errno.EOPNOTSUPP)):
            linux.name_to_handle(room)
        os.close(room)
        with Wire(PORT, version=4) as wire:
            assert wire.read(handle_of(wire, "mnt", "file")) == b"content"


async def _unprotected(state_dir: str, paths: Sequence[str]) -> None:
    async with serving(_Unprotected(state_dir), exports_of(paths)):
        assert _try_to_get_up(["mnt"])[0] == b"root's alone"


@pytest.mark.parametrize("scenario", [_protected, _unprotected])
def test_the_file_system_above_is_out_of_reach(scenario: Scenario, base: str, tree: str) -> None:
    """Without protection the same handle does have it: this is what the protection is for."""
    Path(tree, "file").write_text("content")
    with filesystem("ext4", base, mkfs=("-U", str(ABOVE))) as above:
        Path(above, "secret").write_text("root's alone")
        os.chmod(f"{above}/secret", 0o600)
        place = Place(above, tree)
        try:
            place.mount("mnt")
            place.run(scenario)
        finally:
            place.close()
        for left in ("mnt", "state"):
            shutil.rmtree(f"{above}/{left}", ignore_errors=True)


# -- the configuration, as the server understands it ------------------------------------------------------


async def _odd_names(state_dir: str, paths: Sequence[str]) -> None:
    exports = [
        replace(export, export_id=number, pseudo=f"/top/{name}", filesystem_id=(2**63 - 1, 2**63 - number))
        for export in exports_of(paths)
        for number, name in enumerate(NAMES, 1)
    ]
    async with serving(Ganesha(f"{state_dir} of 'é' #1;"), exports):
        with Wire(PORT, version=4) as wire:
            for name in NAMES:
                assert wire.read(handle_of(wire, "top", name, "file")) == b"content", name


def test_names_that_need_quotes(place: Place) -> None:
    place.mount("mnt")
    place.run(_odd_names)


async def _clients(state_dir: str, paths: Sequence[str]) -> None:
    ganesha = Ganesha(state_dir)
    (export,) = exports_of(paths)
    async with serving(ganesha, [export]):
        for text, expected in CLIENTS.items():
            await ganesha.reload([replace(export, clients=text)])
            for host, may in zip(("127.0.0.1", "::1"), expected, strict=True):
                with Wire(PORT, version=4, host=host) as wire:
                    if may is not None:  # what localhost is, /etc/hosts says
                        assert status(handle_of, wire, "mnt", "file") == (0 if may else NOENT), (text, host)


def test_who_may_mount(place: Place) -> None:
    place.mount("mnt")
    place.run(_clients)


async def _refused(state_dir: str, paths: Sequence[str]) -> None:
    ganesha = Ganesha(state_dir)
    (export,) = exports_of(paths)
    async with serving(ganesha, [export]):
        for bad, said in (
            (replace(export, clients="no-such-host.invalid"), "no-such-host.invalid"),
            (replace(export, clients="0.0.0.0"), "every machine"),
            (replace(export, path="/etc"), "not a cloakfs mount"),
            (replace(export, pseudo='/a"b'), "cannot express"),
        ):
            with pytest.raises(ServerError, match=said):
                await ganesha.reload([bad])
            with Wire(PORT, version=4) as wire:
                assert wire.read(handle_of(wire, "mnt", "file")) == b"content", said


def test_what_cannot_be_served_leaves_all_as_it_was(place: Place) -> None:
    place.mount("mnt")
    place.run(_refused)


# -- where it listens ------------------------------------------------------------------------------------


async def _one_address(state_dir: str, paths: Sequence[str]) -> None:
    for address in ("192.0.2.1/32", "fd00::1/128"):
        subprocess.run(["ip", "address", "add", address, "dev", "lo"], check=True)
    for wanted, other in (("127.0.0.1", "192.0.2.1"), ("192.0.2.1", "127.0.0.1"), ("fd00::1", "::1")):
        async with serving(Ganesha(state_dir, bind_addr=wanted), exports_of(paths)):
            with Wire(PORT, version=4, host=wanted) as wire:
                assert wire.read(handle_of(wire, "mnt", "file")) == b"content"
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((other, PORT), timeout=5)


def test_it_listens_on_one_address_alone(place: Place) -> None:
    place.mount("mnt")
    place.run(_one_address)


# -- going on ------------------------------------------------------------------------------------------


async def _undisturbed(state_dir: str, paths: Sequence[str]) -> None:
    stays, comes = exports_of(paths)
    ganesha = Ganesha(state_dir)
    end = threading.Event()
    answers: list[object] = []

    def call_server() -> None:
        with Wire(PORT, version=4) as wire:
            handle = handle_of(wire, "a", "file")
            while not end.is_set():
                try:
                    answers.append(wire.read(handle))
                except (OSError, Refused) as exc:
                    answers.append(repr(exc))

    async with serving(ganesha, [stays]), trio.open_nursery() as nursery:
        nursery.start_soon(trio.to_thread.run_sync, call_server)
        try:
            for _ in range(10):
                await ganesha.reload([stays, comes])
                with Wire(PORT, version=4) as wire:
                    assert wire.read(handle_of(wire, "b", "file")) == b"content"
                await ganesha.reload([stays])
                with Wire(PORT, version=4) as wire:
                    assert status(handle_of, wire, "b") == NOENT
        finally:
            end.set()
    assert len(answers) > 100
    assert set(answers) == {b"content"}


def test_clients_of_other_exports_do_not_notice(place: Place) -> None:
    place.mount("a")
    place.mount("b")
    place.run(_undisturbed)


def _device(path: str) -> str:
    return next(line.split()[0] for line in Path("/proc/mounts").read_text().splitlines() if line.split()[1] == path)


def test_mounts_that_come_back_on_each_others_devices(place: Place) -> None:
    """libblkid remembers what it read from a device; handles must not be those of another file system for it."""
    first, second = place.mount("a"), place.mount("b")

    async def scenario(state_dir: str, paths: Sequence[str]) -> None:
        ganesha = Ganesha(state_dir)
        exports = exports_of(paths)
        devices = [_device(path) for path in paths]
        async with serving(ganesha, exports):
            with Wire(PORT, version=4) as wire:
                handles = [handle_of(wire, name, "file") for name in "ab"]
                assert handles[0] != handles[1]
            for path in paths:
                kill(mounted()[path].pid)
            await ganesha.reload([])
            for path in paths:
                linux.umount(path)
            with trio.move_on_after(10):
                await wait_in_loop(
                    lambda: not any(Path(f"/sys/block/{os.path.basename(device)}/loop").exists() for device in devices)
                )
            for path in reversed(paths):
                place.mount_again(path)
            # Unless another process takes one meanwhile.
            assert [_device(path) for path in paths] == devices[::-1]
            await ganesha.reload(exports)
            with Wire(PORT, version=4) as wire:
                for handle in handles:
                    assert wire.read(handle) == b"content"
                assert [handle_of(wire, name, "file") for name in "ab"] == handles

    assert first.key != second.key
    # Not a function that can be sent to another process: it is in there already.
    global _scenario  # noqa: PLW0603
    _scenario = scenario
    place.run(_call_scenario)


_scenario: Scenario


async def _call_scenario(state_dir: str, paths: Sequence[str]) -> None:
    await _scenario(state_dir, paths)


async def _start_and_leave(state_dir: str, paths: Sequence[str]) -> None:
    ganesha = Ganesha(state_dir)
    await ganesha.start(exports_of(paths))
    os.kill(os.getpid(), signal.SIGKILL)


def _command_of(pid: int) -> bytes:
    """Empty if it has ended, also if its parent has not waited for it yet."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        return b""


async def _start_over(state_dir: str, paths: Sequence[str]) -> None:
    left = int(Path(state_dir, "ganesha.pid").read_text())
    assert b"ganesha.nfsd" in _command_of(left)
    ganesha = Ganesha(state_dir)
    async with serving(ganesha, exports_of(paths)):
        assert ganesha.pid != left
        assert not _command_of(left)
        with Wire(PORT, version=4) as wire:
            assert wire.read(handle_of(wire, "mnt", "file")) == b"content"


def test_what_a_killed_supervisor_left_is_cleared_away(place: Place) -> None:
    place.mount("mnt")
    with pytest.raises(EOFError):
        place.run(_start_and_leave)
    place.run(_start_over)


# -- what clients have locked ----------------------------------------------------------------------------


def _open_for_writing(name: str) -> libnfs.File:
    """A file that the server takes for open from now on: no client closes it."""
    return libnfs.Client(f"/{name}", version=4, port=PORT, uid=4001).open("/file", os.O_RDWR)


def test_clients_claim_what_they_have_locked(place: Place) -> None:
    """From a server that is started again if the mount is replaced; where nothing is locked, no client has to wait."""
    os.chmod(f"{place.tree}/file", 0o666)
    place.mount("a")
    place.mount("b")

    def replace_mount(path: str) -> None:
        daemon = mounted()[path].pid
        linux.umount(path, linux.MNT_DETACH)
        kill(daemon)
        place.mount_again(path)

    async def scenario(state_dir: str, paths: Sequence[str]) -> None:
        ganesha = Ganesha(state_dir)
        exports = exports_of(paths)
        async with serving(ganesha, exports):
            files = [_open_for_writing(name) for name in "ab"]
            await ganesha.stop()
            await ganesha.start(exports)
            assert not ganesha.is_in_grace, "nothing is locked"

            files.append(_open_for_writing("a"))
            first = ganesha.pid
            await ganesha.hold()
            replace_mount(paths[1])
            await ganesha.hold()
            await ganesha.reload(exports)
            assert ganesha.pid == first, "nothing of what was replaced is open"

            replace_mount(paths[0])
            await ganesha.hold()
            assert ganesha.is_held
            await ganesha.stop()
            await ganesha.start(exports)
            assert not ganesha.is_in_grace, "nothing is locked"

            files.append(_open_for_writing("a"))
            files[-1].lock()
            replace_mount(paths[0])
            await ganesha.hold()
            assert (ganesha.pid, ganesha.is_held, ganesha.current()) == (None, True, set())
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", PORT), timeout=5)
            await ganesha.stop()
            await ganesha.start(exports)
            assert ganesha.is_in_grace
            assert not ganesha.is_held
            assert ganesha.current() == {1, 2}
        # Who could claim it, and has not yet, can still claim it from the next one.
        async with serving(ganesha, exports):
            assert ganesha.is_in_grace
            await wait_in_loop(lambda: not ganesha.is_in_grace, GRACE_SECONDS + 15, every=0.05)

            files.append(_open_for_writing("a"))
            files[-1].lock()
            before = ganesha.pid
            replace_mount(paths[0])
            await ganesha.reload(exports)  # which it has not exported before
            assert ganesha.pid not in (None, before)
            assert ganesha.is_in_grace

    global _scenario  # noqa: PLW0603
    _scenario = scenario
    place.run(_call_scenario)


class _WithoutLeave(Ganesha):
    """As for a release that does not need leave to start without CAP_SYS_RESOURCE."""

    def _render(self, exports: Sequence[GaneshaExport]) -> str:
        return render(exports, state_dir=self.state_dir, port=self.port, bind_addr=None, protocols=(4,))


def _drop_sys_resource() -> None:
    """Do without CAP_SYS_RESOURCE from now on, as in many containers."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_CAPBSET_DROP, linux.CAP_SYS_RESOURCE, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


async def _confined(state_dir: str, paths: Sequence[str]) -> None:
    _drop_sys_resource()
    async with serving(Ganesha(state_dir), exports_of(paths)):
        with Wire(PORT, version=4) as wire:
            assert wire.read(handle_of(wire, "mnt", "file")) == b"content"


def test_it_starts_where_root_lacks_the_right_to_resources(place: Place) -> None:
    place.mount("mnt")
    place.run(_confined)


async def _fatal(state_dir: str, paths: Sequence[str]) -> None:
    _drop_sys_resource()
    with pytest.raises(ServerError, match=r"ended: Failed to PR_SET_IO_FLUSHER with EPERM"):
        await _WithoutLeave(state_dir).start(exports_of(paths))


@pytest.mark.skipif(installed_release() < 6, reason="needs nfs-ganesha 6: this one does not end by itself")
def test_why_it_has_ended_is_told_rather_than_what_it_complained_of_before(place: Place) -> None:
    place.mount("mnt")
    place.run(_fatal)


async def _not_installed(state_dir: str, paths: Sequence[str]) -> None:
    os.environ["PATH"] = "/nonexistent"
    with pytest.raises(ServerError, match="apt install nfs-ganesha nfs-ganesha-vfs"):
        await Ganesha(state_dir).start(exports_of(paths))


def test_it_is_not_installed(place: Place) -> None:
    place.mount("mnt")
    place.run(_not_installed)
