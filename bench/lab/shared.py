"""What the guests of the laboratory have in common: a directory that host and guest share."""

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from typing import Self


class GuestEnded(RuntimeError):
    """The guest has ended, or does not answer."""


class SharedDirectory:
    """A guest's directory `out`, and its process. Use it as a context manager: whatever happens, its processes end.

    Args:
        prefix: of the directory's name.
        command: shell text for the guest to run as root.
    """

    _process: subprocess.Popen[bytes]

    def __init__(self, prefix: str, command: str) -> None:
        self.out = tempfile.mkdtemp(prefix=prefix)
        self.write("command", command)

    def read(self, name: str) -> str:
        """A file that the guest left, "" if it did not."""
        with (
            contextlib.suppress(FileNotFoundError),
            open(os.path.join(self.out, name), encoding="utf-8", errors="replace") as file,
        ):
            return file.read()
        return ""

    def said(self) -> str:
        """Return what the kernel and the command have printed so far."""
        return self.read("console") + self.read("log")

    def wait_for(self, name: str, seconds: float) -> str:
        """Return a file that the guest will leave there once it is complete, and that is not empty.

        Raises:
            GuestEnded: the guest has ended without it, or has not left it for so long; with what the guest said.
        """
        deadline = time.monotonic() + seconds
        while True:
            is_running = self.is_running()
            if text := self.read(name):
                return text
            if not is_running or time.monotonic() > deadline:
                gone = f"has not answered for {seconds:.0f} s" if is_running else "ended"
                raise GuestEnded(f"the guest {gone}:\n{self.said()[-2000:]}")
            time.sleep(0.02)

    def write(self, name: str, text: str) -> None:
        """Give the guest a file, which it sees once it is complete."""
        path = os.path.join(self.out, name)
        with open(f"{path}.new", "w", encoding="utf-8") as file:
            file.write(text)
        os.rename(f"{path}.new", path)

    def is_running(self) -> bool:
        """Return whether it has neither powered off nor died."""
        return self._process.poll() is None

    def close(self) -> None:
        """End it, and remove the directory that it shares with the host."""
        # All of its processes are in the group that it began.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        shutil.rmtree(self.out)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
