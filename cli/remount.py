"""`mount -o remount,ro` and `remount,rw`, which the kernel applies; a mount can change nothing else."""

import errno
import os
from collections.abc import Iterable

from cloakfs import linux
from cloakfs.fuse.attach import MountOptions, flags_of, is_ignored
from cloakfs.fuse.detach import KINDS
from cloakfs.linux import mountinfo
from cloakfs.messages import shell_word
from cloakfs.state.runtime import Mounted, all_mounted

from .common import fail
from .exits import FAILED, WRONG

# mount(8) adds what the mount table and fstab say of the mount to what it was asked for, and its helper for FUSE adds
# `suid` and `dev`, so what is as it was has to be accepted.
_ADDED = frozenset({"remount", "ro", "rw", "suid", "dev", "exec", "async", "atime"})
_ADDED_BEGINNINGS = ("user_id=", "group_id=")


def remount(mountpoint: str, requested: MountOptions) -> None:
    """Make the topmost mount at `mountpoint` read-only or writable; end the command if that is not what is asked for.

    The kernel itself refuses changes in a read-only mount (EROFS), in every place where it is mounted.
    """
    target = os.path.realpath(mountpoint)
    place = next((place for place in reversed(mountinfo.by_id().values()) if place.path == target), None)
    if place is None or place.kind not in KINDS:
        fail(f"{mountpoint}: not a cloakfs mount, so there is nothing to remount", FAILED)
    daemon = next((mount for mount in all_mounted() if mount.device == place.device), None)
    if daemon is None:
        fail(
            f"{target}: its daemon has died; unmount it, and mount it again (cloakfs umount {shell_word(target)})",
            FAILED,
        )
    others = _others(requested.given, {*daemon.given, *place.words.split(",")})
    wanted = [word for word in requested.given if word in ("ro", "rw")][-1:]
    if others or not wanted:
        fail(f"{', '.join(others) or 'remount'}: a remount changes only ro and rw; {_hint(daemon)}", WRONG)
    present = flags_of([*place.words.split(","), *daemon.given]) | linux.MS_REMOUNT
    flags = present | linux.MS_RDONLY if wanted == ["ro"] else present
    try:
        linux.mount(daemon.source, target, place.kind, flags, "")
    except OSError as exc:
        hint = "; files are open for writing (fuser -vm), so close them first" if exc.errno == errno.EBUSY else ""
        fail(f"{target}: {exc.strerror}{hint}", FAILED)


def _others(requested: Iterable[str], known: set[str]) -> list[str]:
    """Return the words that ask for something other than how the mount already is."""
    if "knfsd" in known:
        known = {*known, "default_permissions"}
    return [
        word
        for word in requested
        if not (word in _ADDED or word in known or is_ignored(word) or word.startswith(_ADDED_BEGINNINGS))
    ]


def _hint(daemon: Mounted) -> str:
    text = f"for anything else, unmount and mount again (cloakfs umount {shell_word(daemon.target)})"
    if any(word.startswith("exports=") for word in daemon.given):
        text += f", or change the exports.d file and reload it (kill -HUP {daemon.pid})"
    return text
