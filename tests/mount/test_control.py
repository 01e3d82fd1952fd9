"""`explain` and `table` report what the running daemon does, not what is on disk; asking delays nobody."""

import contextlib
import errno
import json
import os
import signal
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cloakfs.identity import ClientId, ServerId
from cloakfs.mount.control import MOST_CONVERSATIONS
from cloakfs.state import client
from cloakfs.state.client import CONTROL_DIR, LONGEST_REQUEST, VERSION, socket_of
from cloakfs.state.runtime import mounted as telling
from tests.agents import User, names
from tests.mount.conftest import Mount, mounted, run
from tests.mount.test_cli import explained
from tests.mount.test_limits import memory
from tests.mount.test_plugins import plugin
from tests.waiting import wait_until

MakeMount = Callable[..., Mount]
MakeUser = Callable[..., User]

ANN = 3001


def reload(m: Mount) -> None:
    before = m.log.count(": reloaded")
    os.kill(m.pid, signal.SIGHUP)
    wait_until(lambda: m.log.count(": reloaded") > before)


def cells(m: Mount, *who: str) -> dict[str, str]:
    """What `table` tells of each file for the last of `who`."""
    told = json.loads(run("table", m.path, "--only", "--json", *who).stdout)
    return {file["name"]: file["cells"][who[-1]] for file in told["files"]}


@contextlib.contextmanager
def connected(m: Mount) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(30)
        connection.connect(socket_of(m.key))
        assert asked(connection, json.dumps({"version": VERSION}).encode()) == {"version": VERSION}
        yield connection


def asked(connection: socket.socket, request: bytes) -> dict[str, Any]:
    connection.sendall(request + b"\n")
    answer = b""
    while not answer.endswith(b"\n"):
        data = connection.recv(65536)
        assert data, "not answered"
        answer += data
    told: dict[str, Any] = json.loads(answer)
    return told


# -- what is in force ------------------------------------------------------------------------------


def test_a_plug_in_that_was_edited(base: str, tree: str, mount: MakeMount, user: MakeUser) -> None:
    odd = os.fsdecode(b"odd\xff\n")
    for name in ("one", "two", odd):
        Path(tree, name).touch()
    hides = "class P:\n    def visible(self, caller, attrs):\n        return attrs.name not in {!r}\n"
    m = mount("--policy", plugin(base, hides.format(["one", odd])))
    ann = user(ANN)

    def assert_told(*seen: str) -> None:
        assert sorted(ann.do(os.listdir, m.path)) == sorted(seen)
        assert explained(m.at(odd), "--as", f"{ANN}:{ANN}")["visible"] is (odd in seen)
        told = cells(m, "--as", f"{ANN}:{ANN}")
        assert {name: cell != "-" for name, cell in told.items()} == {
            "one": "one" in seen,
            "two": "two" in seen,
            "odd\\377\n": odd in seen,
        }

    assert_told("two")
    plugin(base, hides.format(["two"]))
    assert_told("two")
    reload(m)
    assert_told("one", odd)
    Path(base, "plug.py").write_text("no Python")
    assert_told("one", odd)
    os.unlink(f"{base}/plug.py")
    assert_told("one", odd)


def test_every_method_of_a_plug_in_is_asked_in_the_daemon(base: str, tree: str, mount: MakeMount) -> None:
    Path(tree, "file").touch(0o640)
    Path(tree, "failing").touch()
    m = mount(
        "--policy",
        plugin(
            base,
            "import os\nfrom cloakfs.identity import Caller, ClientCaller\nWHERE = os.getpid()\n"
            "class P(Policy):\n"
            "    def here(self):\n        assert os.getpid() == WHERE\n"
            "    def forward(self, caller):\n        self.here()\n        assert type(caller) is ClientCaller\n"
            "        return caller.uid + 5, 8, [9]\n"
            "    def visible(self, caller, attrs):\n        self.here()\n        assert type(caller) is Caller\n"
            "        return attrs.name == 'file' if caller.uid == 10 else attrs.accessible(caller, 4)\n"
            "    def show(self, attrs):\n        self.here()\n        return Attrs('', 0o604, attrs.size + 7, 12)\n"
            "    def client_id(self, kind, server_id):\n        self.here()\n        return server_id + 1\n"
            "    def server_id(self, kind, client_id):\n        raise SystemExit\n",
        ),
    )
    plugin(base, "class P:\n    def visible(self, caller, attrs):\n        return False\n")
    told = explained(m.at("file"), "--as", "5:5:6")
    assert told["caller"]["uid"]["server"] == 10
    assert told["caller"]["gid"]["server"] == 8
    assert [group["server"] for group in told["caller"]["groups"]] == [9]
    assert told["file"]["mode"]["client"] == "0604"
    assert told["file"]["uid"]["client"] == 7
    assert told["file"]["gid"]["client"] == 12
    assert told["visible"] is True
    # What the kernel grants, by the object that only the command has open.
    assert explained(m.at("file"), "--as-server", "11:11")["visible"] is False
    assert explained(m.at("file"), "--as-server", "11:11:0")["visible"] is True
    (daemon,) = [client.Daemon(mount) for mount in telling().values() if mount.target == m.path]
    with daemon:
        assert daemon.policy.client_id("gid", ServerId(41)) == 42
        with pytest.raises(client.PluginError, match=r"^SystemExit"):
            daemon.policy.server_id("uid", ClientId(1))


def test_a_plug_in_that_fails_in_the_daemon(base: str, tree: str, mount: MakeMount) -> None:
    Path(tree, "file").touch()
    m = mount("--policy", plugin(base, "class P:\n    def visible(self, caller, attrs):\n        1 / 0\n"))
    os.unlink(f"{base}/plug.py")
    done = run("explain", m.at("file"), "--as", "5:5", check=False)
    assert done.returncode == 3
    assert "PluginError: ZeroDivisionError: division by zero (plug.py:5)" in done.stderr


def test_a_plug_in_with_options_of_its_own(base: str, tree: str, mount: MakeMount) -> None:
    Path(tree, "file").touch(0o600)
    code = (
        "from dataclasses import replace\nfrom cloakfs.config.parse import parse_options\n"
        "class P(Policy):\n    def __init__(self, options):\n"
        "        super().__init__(replace(options, {}=parse_options('{} = {}')[0].{}))\n"
    )
    m = mount("--policy", plugin(base, code.format(*["range_map", "range_map", "uid 10 19 map 30", "range_map"])))
    plugin(base, "class P:\n    def visible(self, caller, attrs):\n        return False\n")
    told = explained(m.at("file"), "--as", "12:5")
    assert told["caller"]["uid"] == {"client": 12, "server": 32, "rule": "uid 10 19 map 30"}
    assert told["steps"][1]["reason"] == "nothing is hidden: there is no cloak_list"


def test_options_that_were_edited(base: str, tree: str, mount: MakeMount, user: MakeUser) -> None:
    Path(tree, "file").touch(0o600)
    os.chown(f"{tree}/file", 3002, 3002)
    entry = Path(base, "lab.exports")
    entry.write_text(f"{tree} *(rw)\n")
    m = mount("--exports", str(entry))
    ann = user(ANN)
    entry.write_text(f"{tree} *(rw, cloak_list = uid +077 3002)\n")
    assert ann.do(os.listdir, m.path) == ["file"]
    assert explained(m.at("file"), "--as", f"{ANN}:{ANN}")["visible"] is True
    assert cells(m, "--as", f"{ANN}:{ANN}") == {"file": "v"}
    reload(m)
    assert ann.do(os.listdir, m.path) == []
    assert explained(m.at("file"), "--as", f"{ANN}:{ANN}")["visible"] is False
    assert cells(m, "--as", f"{ANN}:{ANN}") == {"file": "-"}


def test_groups_that_the_mount_takes_by_itself(tree: str, mount: MakeMount) -> None:
    m = mount("-o", "knfsd")
    assert explained(m.path, "--as", "5:5:6")["caller"]["groups_from"] == "database"


# -- who asks --------------------------------------------------------------------------------------


def test_the_socket_is_roots(mount: MakeMount, user: MakeUser) -> None:
    m = mount()
    where = socket_of(m.key)
    ann = user(ANN)
    assert stat.S_IMODE(os.stat(CONTROL_DIR).st_mode) == 0o700
    assert stat.S_IMODE(os.stat(where).st_mode) == 0o600
    assert ann.error(connect, where) == errno.EACCES
    # Whoever got hold of the socket is not answered, either.
    fd = os.open(where, os.O_PATH)
    try:
        with User(3002) as holder:
            assert holder.error(connect, f"/proc/self/fd/{fd}") == errno.EACCES
            os.chmod(where, 0o666)
            assert holder.do(said_to, f"/proc/self/fd/{fd}") == b""
    finally:
        os.close(fd)
    with connected(m) as connection:
        assert asked(connection, b"{}")["plugin"] is None


def sockets(m: Mount) -> int:
    """How many the daemon has open."""
    count = 0
    for fd in os.listdir(f"/proc/{m.pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            count += os.readlink(f"/proc/{m.pid}/fd/{fd}").startswith("socket:")
    return count


def connect(where: str) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(where)


def said_to(where: str) -> bytes:
    with socket.socket(socket.AF_UNIX) as connection, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        connection.connect(where)
        connection.sendall(b"{}\n")
        return connection.recv(100)
    return b""


def test_who_says_nothing_makes_room(mount: MakeMount) -> None:
    m = mount()
    before = sockets(m)
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(connected(m))
        assert "options" in asked(first, b"{}")
        for _ in range(3 * MOST_CONVERSATIONS):
            stack.enter_context(connected(m))
        assert explained(m.path, "--as", "5:5")["visible"] is True
        wait_until(lambda: sockets(m) <= before + MOST_CONVERSATIONS)
        assert first.recv(1) == b""
        os.listdir(m.path)
    wait_until(lambda: sockets(m) <= before)


def test_a_request_without_an_end(tree: str, mount: MakeMount, user: MakeUser) -> None:
    Path(tree, "file").touch()
    m = mount()
    before = memory(m.pid)
    sent = 0
    with connected(m) as connection, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        while sent < 1 << 30:
            sent += connection.send(bytes(1 << 20))
    assert sent < 1 << 24
    assert memory(m.pid) < before + 20
    assert user(ANN).do(names, m.path) == ["file"]
    with connected(m) as connection:
        assert "refused" in asked(connection, b'"' + b"x" * (LONGEST_REQUEST - 10) + b'"')


def test_who_does_not_read(tree: str, mount: MakeMount, user: MakeUser) -> None:
    Path(tree, "file").touch()
    m = mount()
    before = memory(m.pid)
    with connected(m) as connection:
        connection.setblocking(False)
        with pytest.raises(BlockingIOError):
            send_on_and_on(connection, b"{}\n" * 10_000)
        assert user(ANN).do(names, m.path) == ["file"]
        assert explained(m.at("file"), "--as", "5:5")["visible"] is True
        assert memory(m.pid) < before + 20


def send_on_and_on(connection: socket.socket, data: bytes) -> None:
    for _ in range(1000):
        connection.send(data)


def test_odd_requests_are_refused(mount: MakeMount) -> None:
    m = mount()
    with connected(m) as connection:
        for odd in (
            b"",
            b"\xff",
            b"[]",
            b"[" * 100_000,
            b'{"method": "__init__", "arguments": []}',
            b'{"method": ["visible"]}',
            b'{"method": "visible"}',
            b'{"method": "visible", "arguments": 5}',
            b'{"method": "visible", "arguments": [], "access": [1]}',
            b'{"method": "show", "arguments": [{"name": 5}]}',
        ):
            assert list(asked(connection, odd)) == ["refused"], odd
        for odd in (b'{"method": "visible", "arguments": []}', b'{"method": "client_id", "arguments": ["uid", "x"]}'):
            assert list(asked(connection, odd)) == ["failed"], odd
        assert "options" in asked(connection, b"{}")


# -- a daemon that cannot be asked -----------------------------------------------------------------


def test_a_daemon_without_a_socket(base: str, mount: MakeMount) -> None:
    plain = mount("-o", "cloak_list=uid +007 5")
    os.unlink(socket_of(plain.key))
    done = run("explain", plain.path, "--as", "5:5")
    assert "Visible" in done.stdout
    assert done.stderr == (
        f"cloakfs: {plain.path}: its daemon (process {plain.pid}) cannot be asked: it is of an earlier version, "
        "or is about to end; using the options that it published last\n"
    )
    plugged = mount("--policy", plugin(base, "class P:\n    def visible(self, caller, attrs):\n        return True\n"))
    os.unlink(socket_of(plugged.key))
    for command in ("explain", "table"):
        done = run(command, plugged.path, "--as", "5:5", check=False)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.endswith("; only the daemon can ask its plug-in (-o policy=… asks the one on disk)\n")
        assert done.stderr.count("\n") == 1
        assert run(command, plugged.path, "--as", "5:5", "-o", f"policy={base}/plug.py:P").stderr == ""


def test_a_daemon_that_hangs(mount: MakeMount, monkeypatch: pytest.MonkeyPatch) -> None:
    m = mount()
    (told,) = [mount for mount in telling().values() if mount.target == m.path]
    monkeypatch.setattr(client, "PATIENCE_SECONDS", 0.2)
    os.kill(m.pid, signal.SIGSTOP)
    try:
        with pytest.raises(client.DaemonError, match=r"does not answer: timed out$"):
            client.Daemon(told)
    finally:
        os.kill(m.pid, signal.SIGCONT)


def test_a_daemon_that_was_killed(base: str, tree: str) -> None:
    """Without a reaper it leaves its socket behind; the next one takes it away and listens there."""
    Path(tree, "bomb").touch()
    path = os.path.join(base, "mnt")
    os.mkdir(path)
    code = "import os\nclass P:\n    def visible(self, caller, attrs):\n        {}\n"
    with mounted(tree, path, "--policy", plugin(base, code.format("os.kill(os.getpid(), 9)"))) as m:
        pid = m.without_reaper()
        done = run("explain", m.at("bomb"), "--as", "5:5", check=False)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith(f"cloakfs: {m.path}: its daemon (process {pid}) does not answer: ")
        assert done.stderr.count("\n") == 1
        wait_until(lambda: run("explain", m.at("bomb"), "--as", "5:5", check=False).stderr.endswith("there\n"))
        done = run("explain", m.at("bomb"), "--as", "5:5", check=False)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr == (
            f"cloakfs: {m.at('bomb')}: the daemon of the mount at {m.path} has died, "
            "so that no caller sees anything there\n"
        )
        assert os.path.exists(socket_of(m.key))
    with mounted(tree, path, "--policy", plugin(base, code.format("return True"))) as m:
        assert explained(m.at("bomb"), "--as", "5:5")["visible"] is True
    assert not os.path.exists(socket_of(m.key))
