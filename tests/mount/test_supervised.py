"""A mount in the foreground tells systemd how it is (sd_notify(3)); the manager here is the test."""

import contextlib
import os
import select
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

from .conftest import COMMAND, is_mounted, unmount
from .fuseconnections import nobody_waits_for_ever
from .test_on_top import ended

SECONDS = 60.0
WATCHDOG_SECONDS = 0.2

PLUGIN = """
import os, time
from cloakfs.policy import Policy
class Hangs(Policy):
    def visible(self, caller, attrs):
        while os.path.exists({flag!r}):
            time.sleep(.01)
        return True
"""


class Manager:
    """Systemd, as far as the messages of one service go."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(path)

    def hears(self, wanted: str, seconds: float = SECONDS) -> str | None:
        """Return the next message that begins like this; None if none comes."""
        while select.select([self._socket], [], [], seconds)[0]:
            said = self._socket.recv(10_000).decode()
            if said.startswith(wanted):
                return said
        return None

    def forget(self) -> None:
        """Take no notice of what was said so far."""
        while select.select([self._socket], [], [], 0)[0]:
            self._socket.recv(10_000)

    def close(self) -> None:
        self._socket.close()


@contextlib.contextmanager
def service(manager: Manager, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    usec = str(int(WATCHDOG_SECONDS * 2_000_000))
    environment = {**os.environ, "NOTIFY_SOCKET": manager.path, "WATCHDOG_USEC": usec}
    with subprocess.Popen([*COMMAND, "mount", "-f", *arguments], env=environment, stderr=subprocess.DEVNULL) as daemon:
        try:
            yield daemon
        finally:
            if daemon.poll() is None:
                daemon.kill()


def test_a_service_from_start_to_end(base: str, tree: str) -> None:
    path, flag, plugin, exports = (os.path.join(base, name) for name in ("view", "flag", "plug.py", "some.exports"))
    os.mkdir(path)
    Path(tree, "file").touch()
    Path(plugin).write_text(PLUGIN.format(flag=flag))
    Path(exports).write_text(f"{tree} *(rw, policy={plugin}:Hangs)\n")
    manager = Manager(f"{base}/notify")
    with (
        contextlib.closing(manager),
        nobody_waits_for_ever(base),
        service(manager, tree, path, "-o", f"exports={exports},restart") as daemon,
    ):
        assert manager.hears(f"READY=1\nSTATUS=serving {tree} at {path}")
        for _ in range(3):
            assert manager.hears("WATCHDOG=1")

        daemon.send_signal(signal.SIGHUP)
        assert manager.hears("RELOADING=1\nMONOTONIC_USEC=")
        assert manager.hears(f"READY=1\nSTATUS=reloaded; serving {tree} at {path}")
        Path(exports).write_text(f"{tree} *(rw, colour=blue)\n")
        daemon.send_signal(signal.SIGHUP)
        assert manager.hears("RELOADING=1\n")
        said = manager.hears("READY=1\n")
        assert said is not None
        assert "STATUS=not reloaded, the old configuration stays in force: " in said

        # The loop hangs: nobody hears that it lives.
        Path(flag).touch()
        with subprocess.Popen(["stat", os.path.join(path, "file")], stdout=subprocess.DEVNULL) as waits:
            while manager.hears("WATCHDOG=1", 10 * WATCHDOG_SECONDS):
                pass
            assert waits.poll() is None
            Path(flag).unlink()
            assert manager.hears("WATCHDOG=1")

        # Where something else is mounted on top, nobody can ask. That alone kills no daemon.
        subprocess.run(["mount", "-t", "tmpfs", "none", path], check=True)
        try:
            manager.forget()
            for _ in range(3):
                assert manager.hears("WATCHDOG=1")
        finally:
            unmount(path)

        daemon.send_signal(signal.SIGTERM)
        assert manager.hears("STOPPING=1")
        assert ended(daemon.pid)
    assert daemon.returncode == 0
    assert not is_mounted(path)
