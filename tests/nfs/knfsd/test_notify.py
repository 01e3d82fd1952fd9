"""`export up -f` notifies systemd when the server answers, and not before (sd_notify(3))."""

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from cloakfs.state.runtime import RUN_DIR
from tests.mount.conftest import COMMAND, is_mounted
from tests.nfs.knfsd.fixtures import NfsHost, sh

SECONDS = 60
ROOT = "/srv/notify"
MOUNT = f"{ROOT}/tree-notify"
NAME = "notify"


@pytest.fixture
def notices(tmp_path: Path) -> Iterator[socket.socket]:
    """What a service manager listens on."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.settimeout(SECONDS)
        yield listener


@pytest.fixture
def exports(tmp_path: Path) -> Path:
    os.makedirs("/tree/notify", exist_ok=True)
    Path("/tree/notify/file").write_text("content")
    path = tmp_path / "notify.exports"
    path.write_text("/tree/notify *(rw,insecure)\n")
    return path


def up(exports: Path, notices: socket.socket) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [*COMMAND, "export", "up", "-f", "--name", NAME, "--root", ROOT, str(exports)],
        env={**os.environ, "NOTIFY_SOCKET": notices.getsockname()}, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_the_service_is_ready_when_it_says_so(nfs_host: NfsHost, notices: socket.socket, exports: Path) -> None:
    process = up(exports, notices)
    try:
        assert notices.recv(1000) == b"READY=1"
        place = "/client/notify"
        os.makedirs(place)
        sh("mount", "-t", "nfs", "-o", "vers=4.2,soft,timeo=100", f"127.0.0.1:{MOUNT}", place)
        assert Path(place, "file").read_text() == "content"
        sh("umount", place)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=SECONDS)
        assert process.returncode == 0, said
        assert "Traceback" not in said
        assert not is_mounted(MOUNT)
        assert not os.path.exists(f"{RUN_DIR}/export-{NAME}")
        assert MOUNT not in sh("exportfs", "-v")
    finally:
        process.kill()
        process.wait()


def test_a_service_that_cannot_be_is_never_ready(nfs_host: NfsHost, notices: socket.socket, exports: Path) -> None:
    exports.write_text("/tree/notify *(rw,groups=proc)\n")
    process = up(exports, notices)
    _, said = process.communicate(timeout=SECONDS)
    assert process.returncode == 2, said
    notices.setblocking(False)
    with pytest.raises(BlockingIOError):
        notices.recv(1000)
    assert not os.path.exists(ROOT)
