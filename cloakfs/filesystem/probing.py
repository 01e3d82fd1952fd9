"""Notes which callers probe for hidden names, or guess file handles; counts that later, and raises alarms.

A prober must not notice. So a request only makes a note, the same whether its name is hidden or absent, and the notes
are counted every half a second, at a time that no request determines.
"""

import errno
import logging
import os
import time
from collections import Counter

import trio
from pyfuse3 import FUSEError, InodeT, RequestContext

from ..config.options import Options
from ..identity import ClientId
from ..messages import shell_word
from ..monitoring import Events
from ..probes import Alarm, Identity, Kind, Probes
from ..tree.actor import DAEMON
from ..tree.nodes import Nodes
from ..tree.objects import Object
from ..tree.request import Request
from ..tree.views import Views

log = logging.getLogger(__name__)

MOST_NOTES = 32_768
"""How many notes are kept until they are counted; the others are `dropped`."""

# At most this many lines a minute are logged, however many callers there are.
_LOGGED_SECONDS = 60.0
_MOST_LOGGED = 10

_ABSENT = None  # the kind of note that is not counted

_Note = tuple[Kind | None, ClientId | None, int, int, bytes]
"""The kind; the caller: client uid and number of the view; the object: the directory and the name, or a handle."""


class Probing:
    """Notes the probes of one mount.

    Args:
        nodes: the objects.
        views: the views that the mount offers.
        mountpoint: the mount point.
        exported: whether an NFS server exports the mount.
        seconds: how often to count them.

    Attributes:
        probes: the counts.
        events: the events of the mount.
    """

    def __init__(self, nodes: Nodes, views: Views, mountpoint: str, *, exported: bool, seconds: float) -> None:
        self.probes = Probes()
        self.events = Events()
        self._nodes = nodes
        self._views = views
        self._mountpoint = mountpoint
        self._exported = exported
        self._seconds = seconds
        self._delay = 0.0  # a caller above the rate gets one answer in so many seconds; 0 for no limit
        self._notes: list[_Note] = []
        self._rest: trio.Event | None = None  # set by the next note
        self._logged_since = -_LOGGED_SECONDS
        self._logged = self._not_logged = 0

    def use(self, options: Options) -> None:
        """Apply the options from now on."""
        self.probes.use(options.probe_alarm)
        self._delay = options.probe_delay / 1000

    # -- while a request is served -----------------------------------------------------------------

    def note_lookup(self, at: Request, name: bytes, ctx: RequestContext, *, is_hidden: bool) -> None:
        """Note that a LOOKUP of `name` is about to be answered with ENOENT.

        Raises:
            FUSEError: EAGAIN: the caller exceeded the rate, and got ENOENT for another name just now. (To hold back the
                answer would hold up others: the kernel keeps the directory locked meanwhile.)
        """
        if not at.view.hides or at.who is DAEMON or self.probes.rate is None:
            return
        uid = ClientId(ctx.uid)
        self._note(("lookups" if is_hidden else _ABSENT, uid, at.number, at.obj.number, name))
        if self._delay:
            what = (at.obj.number, name)
            if not self.probes.may_answer(Identity(uid, at.number), what, time.monotonic(), self._delay):
                self.probes.counts["refused"] += 1
                raise FUSEError(errno.EAGAIN)

    def note_existing(self, at: Request, name: bytes, ctx: RequestContext) -> None:
        """Note that something has the name that a caller wanted to make."""
        if at.view.hides and at.who is not DAEMON and self.probes.rate is not None:
            self._note(("creations", ClientId(ctx.uid), at.number, at.obj.number, name))

    def note_stale_handle(self, inode: InodeT, ctx: RequestContext) -> None:
        """Note that a file handle did not lead anywhere; only one that was never given to a client counts.

        An NFS server decodes a handle before it acts as the caller who sent it, so there the caller is unknown.
        """
        if self.probes.rate is not None and not self._nodes.was_given(inode):
            self._note(("handles", None if self._exported else ClientId(ctx.uid), 0, inode, b""))

    def _note(self, note: _Note) -> None:
        if len(self._notes) < MOST_NOTES:
            self._notes.append(note)
            if self._rest is not None:
                self._rest.set()
        else:
            self.probes.counts["dropped"] += 1

    # -- later -------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Count what was noted, for ever."""
        while True:
            if not self._notes:
                self._rest = trio.Event()
                await self._rest.wait()
                self._rest = None
            await trio.sleep(self._seconds)
            notes, self._notes = self._notes, []
            now = time.monotonic()
            for (kind, uid, view, place, name), times in Counter(notes).items():
                if kind is not _ABSENT:
                    alarm = self.probes.count(Identity(uid, view), kind, (place, name), now, times)
                    if alarm is not None:
                        self._raise_alarm(alarm, place if kind != "handles" else None, name)

    def _raise_alarm(self, alarm: Alarm, place: int | None, name: bytes) -> None:
        uid, view = alarm.who
        obj = None if place is None else self._nodes.known_as(place)
        path = None if obj is None else known_path(self._nodes, self._views, self._mountpoint, view, obj, name)
        label = self._views.label(view) if view else None
        self.events.add(
            {
                "time": time.time(),
                "event": "probing",
                "client": None if uid is None else {"uid": uid},
                "view": label,
                "rate": str(alarm.rate),
                "lookups": alarm.counts.get("lookups", 0),
                "creations": alarm.counts.get("creations", 0),
                "handles": alarm.counts.get("handles", 0),
                "path": path,
                "delay": round(self._delay * 1000) if uid is not None else 0,
            }
        )
        whose = "an unknown caller of the NFS server" if uid is None else f"client uid {uid}"
        where = "" if label is None else f" in view @{label}"
        self._log(
            f"{self._mountpoint}: {whose}{where} asks for what is hidden from it: more than {alarm.rate} "
            f"(cloakfs events {shell_word(self._mountpoint)})"
        )

    def _log(self, line: str) -> None:
        now = time.monotonic()
        if now >= self._logged_since + _LOGGED_SECONDS:
            if self._not_logged:
                log.warning("%s: %d further alarms were not logged", self._mountpoint, self._not_logged)
            self._logged_since, self._logged, self._not_logged = now, 0, 0
        if self._logged < _MOST_LOGGED:
            self._logged += 1
            log.warning("%s", line)
        else:
            self._not_logged += 1


def known_path(
    nodes: Nodes, views: Views, mountpoint: str, number: int, obj: Object, name: bytes | None = None
) -> str | None:
    """Return the last known path of an object, or of `name` in it, in the view with this number; None if unknown."""
    names = [] if name is None else [name]
    at = obj
    while at is not nodes.root:
        if at.parent is None:
            return None
        names.append(at.name)
        at = at.parent
    if views.top and number:
        names.append(b"@" + os.fsencode(views.label(number) or "?"))
    return os.path.join(mountpoint, *(os.fsdecode(part) for part in reversed(names)))
