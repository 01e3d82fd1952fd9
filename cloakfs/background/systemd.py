"""What a service manager is told of a daemon that it started (sd_notify(3)); nobody is told if there is none."""

import os
import time

from sdnotify import SystemdNotifier


class Supervisor:
    """Tells systemd how the daemon is. To be made before the process acts as others, who could not reach the socket.

    Nothing here waits: a message that systemd has no room for is lost.

    Args:
        listens: whether there may be a manager that expects messages of this very process.
    """

    def __init__(self, *, listens: bool) -> None:
        self._notifier = SystemdNotifier() if listens and os.environ.get("NOTIFY_SOCKET") else None
        if self._notifier is not None and self._notifier.socket is not None:
            self._notifier.socket.setblocking(False)

    @property
    def watchdog_seconds(self) -> float | None:
        """How often the manager wants to hear that the daemon is `alive`, at least; None if it does not want to.

        It is half of what it waits for, as sd_watchdog_enabled(3) recommends.
        """
        wanted, pid = os.environ.get("WATCHDOG_USEC", ""), os.environ.get("WATCHDOG_PID", str(os.getpid()))
        if self._notifier is None or not wanted.isdecimal() or int(wanted) == 0 or pid != str(os.getpid()):
            return None
        return int(wanted) / 2 / 1_000_000

    def alive(self) -> None:
        """Tell that the daemon answers."""
        self._tell("WATCHDOG=1")

    def reloading(self) -> None:
        """Tell that a reload begins; `ready` is its end. (The time is what `Type=notify-reload` goes by.)"""
        self._tell(f"RELOADING=1\nMONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")

    def ready(self, status: str) -> None:
        """Tell that the daemon answers, or has reloaded, and in one line how it is."""
        self._tell(f"READY=1\n{_status(status)}")

    def stopping(self) -> None:
        """Tell that the daemon ends."""
        self._tell("STOPPING=1")

    def close(self) -> None:
        """Tell nothing any more."""
        if self._notifier is not None and self._notifier.socket is not None:
            self._notifier.socket.close()
        self._notifier = None

    def _tell(self, text: str) -> None:
        if self._notifier is not None:
            self._notifier.notify(text)


def _status(text: str) -> str:
    # The library can send Latin-1 only, and a line feed would begin another assignment.
    return "STATUS=" + "".join(char if char.isprintable() and char.isascii() else "?" for char in text)
