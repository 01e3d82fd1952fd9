"""`mount -f` notifies systemd when the mount answers, and not before (sd_notify(3))."""

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mount.conftest import COMMAND, Mount, _forget_state, is_mounted

SECONDS = 60


@pytest.fixture
def notices(tmp_path: Path) -> Iterator[socket.socket]:
    """What a service manager listens on."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.settimeout(SECONDS)
        yield listener


def test_mount_is_ready_when_it_says_so(notices: socket.socket, base: str, tree: str) -> None:
    Path(tree, "file").write_text("content")
    place = os.path.join(base, "mnt")
    os.mkdir(place)
    environment = {**os.environ, "NOTIFY_SOCKET": notices.getsockname()}
    process = subprocess.Popen(
        [*COMMAND, "mount", "-f", tree, place], env=environment, stderr=subprocess.PIPE, text=True
    )
    try:
        assert notices.recv(1000) == b"READY=1"
        assert Path(place, "file").read_text() == "content"
        assert is_mounted(place)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=SECONDS)
        assert process.returncode == 0, said
        assert not is_mounted(place)
    finally:
        process.kill()
        process.wait()
        if is_mounted(place):
            subprocess.run(["umount", "-l", place], check=True)
        _forget_state(Mount(tree, place))


def test_what_cannot_be_mounted_is_never_ready(notices: socket.socket, base: str, tree: str) -> None:
    environment = {**os.environ, "NOTIFY_SOCKET": notices.getsockname()}
    for words, status in (("views=nobody-knows", 1), ("cloak_list=uid 007 1000", 2)):
        done = subprocess.run(
            [*COMMAND, "mount", "-f", tree, base, "-o", words],
            env=environment, capture_output=True, text=True, check=False, timeout=SECONDS,
        )  # fmt: skip
        assert done.returncode == status, done
        notices.setblocking(False)
        with pytest.raises(BlockingIOError):
            notices.recv(1000)
