"""The mounts of this machine, as their daemons tell."""

import fcntl
import glob
import json
import os
from dataclasses import dataclass

from .daemon import RUN_DIR, STATE_DIR


@dataclass(frozen=True, slots=True)
class Mounted:
    """A mount that a daemon on this machine serves.

    `reloads` counts the requests to reload, and `failure` is why the last one was refused, None if it was not.
    """

    pid: int
    source: str
    target: str
    options: str
    policy_dir: str
    reloads: int
    failure: str | None


def mounted() -> dict[str, Mounted]:
    """The mounts by mount point."""
    found = {}
    for path in glob.glob(os.path.join(glob.escape(RUN_DIR), "*.json")):
        try:
            with open(path, encoding="utf-8") as file:
                told = json.load(file)
            mount = Mounted(**{name: told[name] for name in Mounted.__dataclass_fields__})
        except (OSError, ValueError, KeyError, TypeError):
            continue  # it just ended
        if _is_served(os.path.basename(path).removesuffix(".json")):
            found[mount.target] = mount
    return found


def _is_served(key: str) -> bool:
    """Does the daemon of this mount live? One that was killed leaves its file behind, and its pid to others."""
    try:
        state = os.open(os.path.join(STATE_DIR, key), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(state, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(state)
    return False
