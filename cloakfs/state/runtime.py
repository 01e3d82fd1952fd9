"""The mounts of this machine, according to the state that their daemons publish."""

import contextlib
import errno
import hashlib
import json
import logging
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ..fuse.detach import KINDS
from ..linux import mountinfo, ownfiles, process
from .versions import is_known, version_problem

log = logging.getLogger(__name__)

STATE_DIR = "/var/lib/cloakfs"
RUN_DIR = "/run/cloakfs"

VERSION = 1
"""The version of the published state. `version`, `pid`, `source`, `target` and `device` keep their meaning in every
later version."""

_IN_EVERY_VERSION = {"version": int, "pid": int, "source": str, "target": str, "device": str}


_DIGITS = 12


def mount_key(source: str, target: str) -> str:
    """Return the name of a mount's state: readable, and unique to each pair of source and mount point."""
    digest = hashlib.sha256(f"{source}\0{target}".encode("utf-8", "surrogateescape")).hexdigest()[:_DIGITS]
    return f"{re.sub('[^A-Za-z0-9._-]+', '-', target).strip('-')[:64] or 'root'}-{digest}"


@dataclass(frozen=True, slots=True)
class Mounted:
    """A mount that a daemon on this machine serves.

    Attributes:
        pid: the pid of the daemon.
        source: the real tree.
        target: the mount point.
        options: the options in force, as for `mount -o`.
        policy_dir: the directory that a relative `policy=` file is relative to.
        device: st_dev of its file system in the form of `mountinfo.Place`; "" if it was not published.
        reloads: how many reloads the daemon has applied.
        asked: how many reloads were requested and answered, whether applied or refused.
        failure: why the daemon refused the last reload; None if it did not.
        requests: the number of requests per operation, by its name; some seconds old.
        prefetch: statistics of reading and read-ahead (`Reader.state`); some seconds old.
        remembered: what the kernel may cache of it, each a dict with the fields of `cachepolicy.Fact`, and `way_out`,
            the earlier name of `hint`; some seconds old, and empty if it was not published.
        access: who checks permissions (`reasons.who_checks`); "" if it was not published.
        locks: where the locks of clients hold (`reasons.who_locks`); "" if it was not published.
        passthrough: which files the kernel reads and writes by itself, in words; "" if it was not published.
        refused: how often callers were refused more than their share, by what they wanted more of; some seconds old.
        lacking: what this machine does not let the daemon do, one line each.
        numbers: what is wrong with inode numbers and file handles; "" if nothing is.
        since: when it was mounted, in seconds since 1970; 0 if this was not published.
        given: the options after `-o` of the mount, as they were given; empty if they were not published.
        version: the version of the published state; if it is not known, only the fields that are in every version
            are set (`unknown`).
    """

    pid: int
    source: str
    target: str
    options: str
    policy_dir: str
    device: str = ""
    reloads: int = 0
    asked: int = 0
    failure: str | None = None
    requests: Mapping[str, int] = field(default_factory=dict)
    prefetch: Mapping[str, Any] = field(default_factory=dict)
    remembered: Sequence[Mapping[str, Any]] = ()
    access: str = ""
    locks: str = ""
    passthrough: str = ""
    refused: Mapping[str, int] = field(default_factory=dict)
    lacking: Sequence[str] = ()
    numbers: str = ""
    since: float = 0
    given: Sequence[str] = ()
    version: int = 0

    @property
    def unknown(self) -> str | None:
        """One line that says why only the identity of the mount is known; None if its version is known."""
        if is_known(self.version, VERSION):
            return None
        place = state_path(mount_key(self.source, self.target))
        return version_problem(place, self.version, VERSION, f"use the cloakfs that mounted it (process {self.pid})")


def state_path(key: str) -> str:
    """The file in which the daemon of a mount publishes its state."""
    return os.path.join(RUN_DIR, f"{key}.json")


def waiting_path(key: str) -> str:
    """The file in which the reaper of a mount whose daemon died says that it mounts again.

    Its form is the same in every version: pid, start time (`process.start_time`) and mount point, separated by blanks.
    """
    return os.path.join(RUN_DIR, f"{key}.waiting")


@dataclass(frozen=True, slots=True)
class Waiting:
    """A mount whose daemon has died, and which is being mounted again.

    Attributes:
        target: the mount point.
        pid: the process that mounts again (`mount.reaperprocess`).
        path: the file that says so.
    """

    target: str
    pid: int
    path: str


def waiting() -> list[Waiting]:
    """Return the mounts that are being mounted again, or wait for the next attempt."""
    found = []
    for path in ownfiles.glob(RUN_DIR, "*.waiting"):
        with contextlib.suppress(OSError, ValueError):
            with ownfiles.open(path, "rb") as file:
                pid, started, target = file.read().split(b" ", 2)
            if process.start_time(int(pid)) == int(started):
                found.append(Waiting(os.fsdecode(target), int(pid), path))
    return found


class PublishedState:
    """Publishes the state of a mount for other commands; as a context manager, removes it on exit.

    Options are text, as for `mount -o`. The commands that read it take a third less time to start without the modules
    that give options their meaning. Here they are JSON already, since they may be megabytes, and are written every few
    seconds.
    """

    def __init__(
        self,
        key: str,
        source: str,
        target: str,
        options: bytes,
        policy_dir: str,
        device: str = "",
        given: Sequence[str] = (),
    ) -> None:
        self._path = state_path(key)
        self._now = Mounted(
            os.getpid(), source, target, "", policy_dir, device, since=time.time(), given=given, version=VERSION
        )
        self._options = options

    def __enter__(self) -> None:
        ownfiles.makedirs(RUN_DIR, mode=0o755, exist_ok=True)
        self._write()

    def __exit__(self, *exc: object) -> None:
        with contextlib.suppress(OSError):
            ownfiles.unlink(self._path)

    @property
    def options(self) -> str:
        """The options in force, as for `mount -o`."""
        return str(json.loads(self._options))

    def reloaded(self, options: bytes) -> None:
        """Publish that a reload succeeded: these options, as JSON, are in force now."""
        now = self._now
        self._options = options
        self._now = replace(now, reloads=now.reloads + 1, asked=now.asked + 1, failure=None)
        self._try_to_write()

    def not_reloaded(self, failure: str) -> None:
        """Publish that a reload was refused because of `failure`: the previous options stay in force."""
        self._now = replace(self._now, asked=self._now.asked + 1, failure=failure)
        self._try_to_write()

    def work(self, requests: Mapping[str, int], prefetch: Mapping[str, Any], refused: Mapping[str, int]) -> None:
        """Publish how many requests of each kind were answered so far, and the statistics of reading and of shares."""
        now = replace(self._now, requests=dict(requests), prefetch=dict(prefetch), refused=dict(refused))
        if now != self._now:
            self._now = now
            self._try_to_write()

    def lacking(self, problems: Sequence[str]) -> None:
        """Publish what this machine does not let the daemon do, one line each."""
        if problems:
            self._now = replace(self._now, lacking=problems)
            self._try_to_write()

    def rules(
        self, cached: Sequence[Mapping[str, Any]], *, access: str, locks: str, passthrough: str, numbers: str
    ) -> None:
        """Publish what the kernel may cache or does by itself, who checks permissions, where locks hold, what fails."""
        changed = replace(
            self._now, remembered=cached, access=access, locks=locks, passthrough=passthrough, numbers=numbers
        )
        if changed != self._now:
            self._now = changed
            self._try_to_write()

    def _try_to_write(self) -> None:
        try:
            self._write()
        except OSError as exc:
            log.warning("the state of the mount cannot be published for other commands: %s", exc)

    def _write(self) -> None:
        # Only root may read it, because callers must not learn the rules that hide things from them.
        others = asdict(self._now)
        del others["options"]
        content = b'{"options": %b, %b' % (self._options, json.dumps(others)[1:].encode())
        ownfiles.replace(self._path, content, mode=0o600)


def all_mounted(pattern: str = "*") -> list[Mounted]:
    """Return the mounts that are served, whose keys match a pattern.

    Raises:
        OSError: there is no free descriptor, or not enough memory, to find out.
    """
    found = []
    for path in ownfiles.glob(RUN_DIR, f"{pattern}.json"):
        try:
            with ownfiles.open(path, encoding="utf-8") as file:
                published = json.load(file)
            mount = _restored(published)
        except (ValueError, TypeError, AttributeError, KeyError):
            continue  # the daemon has just ended
        except OSError as exc:
            _raise_if_full(exc)
            continue
        if _is_served(os.path.basename(path).removesuffix(".json")):
            found.append(mount if mount.device else replace(mount, device=_device_at(mount.target)))
    return found


def _restored(published: dict[str, Any]) -> Mounted:
    if is_known(published.get("version"), VERSION):
        return Mounted(**{name: published[name] for name in Mounted.__dataclass_fields__ if name in published})
    sure = {name: published[name] for name in _IN_EVERY_VERSION}
    if any(type(sure[name]) is not kind for name, kind in _IN_EVERY_VERSION.items()):
        raise TypeError
    return Mounted(**sure, options="", policy_dir="")


def _device_at(target: str) -> str:
    """Return the device of the topmost cloakfs mount at `target`, for daemons of 0.1.0, which do not publish it."""
    return {place.path: place.device for place in mountinfo.by_id().values() if place.kind in KINDS}.get(target, "")


def mounted(pattern: str = "*") -> dict[str, Mounted]:
    """Return the mounts by mount point; where several share a mount point, the topmost one.

    Args:
        pattern: of the keys of the mounts that count.

    Raises:
        OSError: there is no free descriptor, or not enough memory, to find out.
    """
    found: dict[str, Mounted] = {}
    tops: dict[str, str] = {}
    for mount in all_mounted(pattern):
        if mount.target in found:
            tops = tops or {place.path: place.device for place in mountinfo.by_id().values()}
            if tops.get(mount.target) != mount.device:
                continue
        found[mount.target] = mount
    return found


def mounted_at(target: str) -> Mounted | None:
    """Return the topmost mount at this mount point, if there is one, without reading of others.

    Raises:
        OSError: there is no free descriptor, or not enough memory, to find out.
    """
    return mounted(mount_key("", target)[:-_DIGITS] + "?" * _DIGITS).get(target)


def places() -> list[mountinfo.Place]:
    """Return the cloakfs mounts of this machine that root has made, in mount order, whichever process serves them.

    The bind mounts below the state of a service, which are what nfs-ganesha exports, are not among them: they come and
    go with the mounts that they show.
    """
    return [
        place
        for place in mountinfo.by_id().values()
        if place.kind in KINDS and place.mounter == 0 and not place.path.startswith(f"{STATE_DIR}/")
    ]


def dead() -> list[mountinfo.Place]:
    """Return the cloakfs mounts that no daemon of this machine serves, in the order of mounting.

    Requests there get no answer. (A mount that is just starting may be among them, too.)

    Raises:
        OSError: there is no free descriptor, or not enough memory, to find out.
    """
    there = places()
    served = {mount.device for mount in all_mounted()}
    return [place for place in there if place.device not in served]


def _raise_if_full(exc: OSError) -> None:
    """Raise `exc` if it is a lack of resources, which must not be mistaken for the death of a daemon."""
    if exc.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
        raise exc


def _is_served(key: str) -> bool:
    """Whether the daemon of this mount lives. A killed daemon leaves its file behind, and its pid can be reused."""
    try:
        return ownfiles.is_locked(os.path.join(STATE_DIR, key))
    except OSError as exc:
        _raise_if_full(exc)
        return False
