"""Has changes behind the mount reported: read by the daemon itself, or by one process for all that show the same."""

import contextlib
import logging
import subprocess

from ..filesystem import Filesystem
from ..fuse.attach import MountError
from ..kernelcache import watcherprocess
from ..kernelcache.cachepolicy import SHORT_SECONDS
from ..kernelcache.sharedwatch import SharedWatch
from ..kernelcache.watch import Watch
from ..state.runtime import RUN_DIR
from ..tree.filesystems import MountedFilesystem

log = logging.getLogger(__name__)


def watch_changes(filesystem: Filesystem) -> None:
    """Have changes behind the mount reported, if the kernel supports that."""
    # With several views, a change made through one of them is behind the mount for the others.
    own = filesystem.views.top
    try:
        if is_alone(filesystem):
            watch: Watch | SharedWatch = Watch(own=own)
        else:
            watch = _shared_watch(own=own)
    except OSError as exc:
        log.warning(
            "fanotify cannot be used (%s): changes behind the mount are seen within %g s",
            exc.strerror,
            SHORT_SECONDS,
        )
        return
    filesystem.cache.watch(watch)


async def share_changes(filesystem: Filesystem) -> None:
    """Leave reading to the watcher if this process reads all changes itself, and other mounts show the same by now.

    Or have the watcher forget what the kernel has forgotten.
    """
    cache = filesystem.cache
    is_first = cache.is_reading_all_changes
    is_wanted = not is_alone(filesystem) if is_first else cache.has_stale_notes
    if not is_wanted:
        return
    with contextlib.suppress(OSError, subprocess.CalledProcessError):  # another time
        if await cache.share_changes(lambda: SharedWatch(RUN_DIR, own=filesystem.views.top)) and is_first:
            log.info("other mounts show the same: from now on, %s reads the changes", watcherprocess.NAME)


def is_alone(filesystem: Filesystem) -> bool:
    """Whether no other mount shows what this one shows, except what lies on other machines."""
    presence = filesystem.passthrough.presence
    local = [shown for shown in filesystem.nodes.mounts.filesystems if not shown.remote]
    return all(presence.is_alone(shown.shared_key) for shown in local)


def _shared_watch(*, own: bool) -> Watch | SharedWatch:
    """Have changes reported by the watcher, since other mounts show the same; or read them here if there is none.

    Raises:
        OSError: the kernel does not report them.
    """
    try:
        return SharedWatch(RUN_DIR, own=own)
    except (OSError, subprocess.CalledProcessError) as exc:
        log.warning(
            "there can be no %s (%s): this mount reads all changes of its file systems", watcherprocess.NAME, exc
        )
        return Watch(own=own)


def announce(filesystem: Filesystem, stack: contextlib.ExitStack) -> None:
    """Let other mounts know which file systems this one shows.

    Raises:
        MountError: the directory for that cannot be written.
    """
    mounts, presence = filesystem.nodes.mounts, filesystem.passthrough.presence

    def add(shown: MountedFilesystem) -> None:
        if not shown.remote:
            presence.announce(shown.shared_key)

    def add_later(shown: MountedFilesystem) -> None:
        try:
            add(shown)
        except OSError as exc:
            log.warning("%s: other mounts do not learn that this one shows %s", exc, shown.path)

    stack.callback(presence.close)
    try:
        for shown in mounts.filesystems:
            add(shown)
    except OSError as exc:
        raise MountError(f"{exc.filename}: {exc.strerror}") from exc
    mounts.on_new_filesystem.append(add_later)
