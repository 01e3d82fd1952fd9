"""`cloakfs events`: prints what happened on mounts that their administrator may want to know."""

import contextlib
import os
import signal
import sys
import threading
from datetime import datetime
from typing import Any

import click

from cloakfs.messages import printable
from cloakfs.state.client import DaemonError, Watcher
from cloakfs.state.runtime import Mounted, mounted

from .common import fail, note
from .completion import a_mount_point
from .exits import FAILED
from .output import echo_json_line

_POLL_SECONDS = 0.5


@click.command()
@click.argument("mountpoints", nargs=-1, metavar="[MOUNT]…", shell_complete=a_mount_point)
@click.option("--follow", "-f", is_flag=True, help="Also print the events to come, until the command is interrupted.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object per line.")
def events(mountpoints: tuple[str, ...], *, follow: bool, as_json: bool) -> None:
    """Print what happened on each MOUNT since it was mounted: who asks for what is hidden from it, again and again.

    Without a MOUNT, all mounts of this machine. --follow waits for mounts that end, or have yet to be made.

    Exit status: 0 printed, 1 a MOUNT is not served, or its daemon cannot be asked.
    """
    if os.geteuid() != 0:
        fail("only root may see what others do", FAILED)
    wanted = [os.path.realpath(path) for path in mountpoints]
    served_mounts = mounted()
    for path in wanted:
        if path not in served_mounts:
            fail(f"{path}: not a cloakfs mount, or its daemon has died (cloakfs status lists all)", FAILED)
        if served_mounts[path].unknown:
            fail(f"{path}: {served_mounts[path].unknown}", FAILED)
    interrupted = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: interrupted.set())
    with contextlib.closing(_Watch(wanted)) as watch:
        _print(watch.fetch(), as_json=as_json)
        while follow and not interrupted.wait(_POLL_SECONDS):
            _print(watch.fetch(), as_json=as_json)
    if watch.failed and not follow:
        sys.exit(FAILED)


class _Watch:
    """Fetches the events of several mounts, or of all.

    Attributes:
        failed: the mounts whose daemon cannot be asked at the moment, each of which was reported once.
    """

    def __init__(self, wanted: list[str]) -> None:
        self.failed: set[str] = set()
        self._wanted = wanted
        self._watchers: dict[str, Watcher] = {}
        self._known: dict[str, tuple[int, int]] = {}  # the daemon, and the number of its last event that is known

    def close(self) -> None:
        for watcher in self._watchers.values():
            watcher.close()

    def fetch(self) -> list[dict[str, Any]]:
        """Return the events since the last call, in the order of their times."""
        served_mounts = mounted()
        found = [
            {"mount": path, **event}
            for path in self._wanted or served_mounts
            if path in served_mounts
            for event in self._fetch(path, served_mounts[path])
        ]
        return sorted(found, key=lambda event: float(event["time"]))

    def _fetch(self, path: str, mount: Mounted) -> list[dict[str, Any]]:
        pid, last = self._known.get(path, (mount.pid, 0))
        try:
            if pid != mount.pid:
                last = 0
                if path in self._watchers:
                    self._watchers.pop(path).close()
            if path not in self._watchers:
                if mount.unknown:
                    raise DaemonError(f"{path}: {mount.unknown}")
                self._watchers[path] = Watcher(mount, last)
            fetched = self._watchers[path].fetch()
        except DaemonError as exc:
            if path not in self.failed:
                note(str(exc))
            self.failed.add(path)
            if path in self._watchers:
                self._watchers.pop(path).close()
            return []
        self._known[path] = mount.pid, self._watchers[path].last
        self.failed.discard(path)
        return fetched


def _print(fetched: list[dict[str, Any]], *, as_json: bool) -> None:
    for event in fetched:
        if as_json:
            echo_json_line(event)
        else:
            click.echo(line(event))
    sys.stdout.flush()


def line(event: dict[str, Any]) -> str:
    """Return the line that describes an event."""
    when = datetime.fromtimestamp(event["time"]).isoformat(" ", "seconds")
    who = f"client uid {event['client']['uid']}" if event["client"] else "an unknown caller of the NFS server"
    where = event["mount"] + (f" (view @{event['view']})" if event["view"] else "")
    names = {
        "lookups": "lookups of hidden names",
        "creations": "attempts to create one",
        "handles": "file handles that never existed",
    }
    counts = ", ".join(f"{event[kind]:,} {name}" for kind, name in names.items() if event[kind])
    text = f"{when} {where}: {who}: more than {event['rate']}: {counts}"
    if event["path"]:
        text += f"; the last: {event['path']}"
    if event["delay"]:
        text += f"; held back by {event['delay']} ms"
    return printable(text)
