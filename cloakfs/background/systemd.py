"""Notifies the service manager that started a daemon (sd_notify(3)), if there is one."""

import os
import time

from sdnotify import SystemdNotifier


class Supervisor:
    """Notifies systemd of the state of the daemon.

    It is made before the process acts as others, who could not reach the socket.

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
        """How often the manager wants to be notified that the daemon is `alive`, at least; None if it does not.

        It is half of what it waits for, as sd_watchdog_enabled(3) recommends.
        """
        wanted, pid = os.environ.get("WATCHDOG_USEC", ""), os.environ.get("WATCHDOG_PID", str(os.getpid()))
        if self._notifier is None or not wanted.isdecimal() or int(wanted) == 0 or pid != str(os.getpid()):
            return None
        return int(wanted) / 2 / 1_000_000

    def alive(self) -> None:
        """Notify that the daemon answers."""
        self._notify("WATCHDOG=1")

    def reloading(self) -> None:
        """Notify that a reload begins; `ready` is its end. (The time is what `Type=notify-reload` goes by.)"""
        self._notify(f"RELOADING=1\nMONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")

    def ready(self, status: str) -> None:
        """Notify that the daemon answers, or has reloaded, with a status of one line."""
        self._notify(f"READY=1\n{_status(status)}")

    def stopping(self) -> None:
        """Notify that the daemon ends."""
        self._notify("STOPPING=1")

    def close(self) -> None:
        """Send no more notifications."""
        if self._notifier is not None and self._notifier.socket is not None:
            self._notifier.socket.close()
        self._notifier = None

    def _notify(self, text: str) -> None:
        if self._notifier is not None:
            self._notifier.notify(text)


def _status(text: str) -> str:
    # The library can send Latin-1 only, and a line feed would begin another assignment.
    return "STATUS=" + "".join(char if char.isprintable() and char.isascii() else "?" for char in text)
