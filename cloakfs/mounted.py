"""The mounts of this machine, as their daemons tell."""

import contextlib
import errno
import fcntl
import glob
import hashlib
import json
import logging
import os
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from . import files, linux
from .config.options import Options
from .config.render import format_options
from .linux import mountinfo
from .unmount import KINDS
from .versions import is_known, refusal

log = logging.getLogger(__name__)

STATE_DIR = "/var/lib/cloakfs"
RUN_DIR = "/run/cloakfs"

VERSION = 1
"""Of what daemons tell. `version`, `pid`, `source`, `target` and `device` mean the same in every later one."""

_IN_EVERY_VERSION = {"version": int, "pid": int, "source": str, "target": str, "device": str}


def mount_key(source: str, target: str) -> str:
    """The name of a mount's state: readable, and one for each pair of source and mount point."""
    digest = hashlib.sha256(f"{source}\0{target}".encode("utf-8", "surrogateescape")).hexdigest()[:12]
    return f"{re.sub('[^A-Za-z0-9._-]+', '-', target).strip('-')[:64] or 'root'}-{digest}"


@dataclass(frozen=True, slots=True)
class Mounted:
    """A mount that a daemon on this machine serves.

    Attributes:
        pid: of the daemon.
        source: the real tree.
        target: the mount point.
        options: in force, as for `mount -o`.
        policy_dir: what a relative `policy=` file is relative to.
        device: st_dev of its file system as `mountinfo.Place` has it; "" is not told.
        reloads: how often the daemon took over what it was told to reload.
        asked: how often it was told to, and answered, one way or the other.
        failure: why it refused the last time; None if it did not.
        requests: how many of each kind it was asked, by the name of the operation; some seconds old.
        prefetch: what reading has come to (`Reader.state`); some seconds old.
        since: when it was mounted, in seconds since 1970; 0 is not told.
        version: of what is told; if it is not known, there is no more than what is in every version (`unknown`).
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
    since: float = 0
    version: int = 0

    @property
    def unknown(self) -> str | None:
        """Why no more is known than which mount it is, in one line; None if it is known."""
        if is_known(self.version, VERSION):
            return None
        place = state_path(mount_key(self.source, self.target))
        return refusal(place, self.version, VERSION, f"use the cloakfs that mounted it (process {self.pid})")


def state_path(key: str) -> str:
    """The file in which the daemon of a mount publishes its state."""
    return os.path.join(RUN_DIR, f"{key}.json")


class PublishedState:
    """Publishes the state of a mount for other commands; as a context manager, removes it on exit."""

    def __init__(self, key: str, source: str, target: str, options: Options, policy_dir: str, device: str = "") -> None:
        self._path = state_path(key)
        text = format_options(options)
        self._now = Mounted(os.getpid(), source, target, text, policy_dir, device, since=time.time(), version=VERSION)

    def __enter__(self) -> None:
        os.makedirs(RUN_DIR, mode=0o755, exist_ok=True)
        self._write()

    def __exit__(self, *exc: object) -> None:
        linux.act_as_daemon()
        with contextlib.suppress(OSError):
            os.unlink(self._path)

    @property
    def options(self) -> str:
        """Those in force, as for `mount -o`."""
        return self._now.options

    def reloaded(self, options: Options) -> None:
        """A reload succeeded: these options are in force now."""
        now = self._now
        text = format_options(options)
        self._now = replace(now, options=text, reloads=now.reloads + 1, asked=now.asked + 1, failure=None)
        self._try_to_write()

    def not_reloaded(self, failure: str) -> None:
        """A reload was refused because of `failure`: the options of before are in force."""
        self._now = replace(self._now, asked=self._now.asked + 1, failure=failure)
        self._try_to_write()

    def work(self, requests: Mapping[str, int], prefetch: Mapping[str, Any]) -> None:
        """So many requests of each kind were answered until now; and what reading has come to."""
        if requests != self._now.requests or prefetch != self._now.prefetch:
            self._now = replace(self._now, requests=dict(requests), prefetch=dict(prefetch))
            self._try_to_write()

    def _try_to_write(self) -> None:
        try:
            self._write()
        except OSError as exc:
            log.warning("other commands will not know of the change: %s", exc)

    def _write(self) -> None:
        # For root alone: callers are not told the rules that hide things from them.
        files.replace(self._path, json.dumps(asdict(self._now)).encode(), mode=0o600)


def all_mounted() -> list[Mounted]:
    """The mounts that are served.

    Raises:
        OSError: there is no descriptor, or no memory, to find out.
    """
    found = []
    for path in glob.glob(os.path.join(glob.escape(RUN_DIR), "*.json")):
        try:
            with open(path, encoding="utf-8") as file:
                told = json.load(file)
            mount = _restored(told)
        except (ValueError, TypeError, AttributeError, KeyError):
            continue  # it just ended
        except OSError as exc:
            _raise_if_full(exc)
            continue
        if _is_served(os.path.basename(path).removesuffix(".json")):
            found.append(mount if mount.device else replace(mount, device=_device_at(mount.target)))
    return found


def _restored(told: dict[str, Any]) -> Mounted:
    if is_known(told.get("version"), VERSION):
        return Mounted(**{name: told[name] for name in Mounted.__dataclass_fields__ if name in told})
    sure = {name: told[name] for name in _IN_EVERY_VERSION}
    if any(type(sure[name]) is not kind for name, kind in _IN_EVERY_VERSION.items()):
        raise TypeError
    return Mounted(**sure, options="", policy_dir="")


def _device_at(target: str) -> str:
    """The device of the mount of ours that is on top there, for daemons of 0.1.0, which do not tell it."""
    return {place.path: place.device for place in mountinfo.by_id().values() if place.kind in KINDS}.get(target, "")


def mounted() -> dict[str, Mounted]:
    """The mounts by mount point; of several at one, the one on top.

    Raises:
        OSError: there is no descriptor, or no memory, to find out.
    """
    found: dict[str, Mounted] = {}
    tops: dict[str, str] = {}
    for mount in all_mounted():
        if mount.target in found:
            tops = tops or {place.path: place.device for place in mountinfo.by_id().values()}
            if tops.get(mount.target) != mount.device:
                continue
        found[mount.target] = mount
    return found


def dead() -> list[mountinfo.Place]:
    """Mounts of cloakfs that no daemon of this machine serves, in the order of mounting.

    Nobody gets an answer there. (Of one that is just coming up it is not known yet either.)

    Raises:
        OSError: there is no descriptor, or no memory, to find out.
    """
    there = [place for place in mountinfo.by_id().values() if place.kind in KINDS and place.mounter == 0]
    served = {mount.device for mount in all_mounted()}
    return [place for place in there if place.device not in served]


def _raise_if_full(exc: OSError) -> None:
    """Who cannot find out whether a daemon lives must not take it for dead."""
    if exc.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
        raise exc


def _is_served(key: str) -> bool:
    """Does the daemon of this mount live? One that was killed leaves its file behind, and its pid to others."""
    try:
        state = os.open(os.path.join(STATE_DIR, key), os.O_RDONLY | os.O_CLOEXEC)
    except OSError as exc:
        _raise_if_full(exc)
        return False
    try:
        fcntl.flock(state, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(state)
    return False
