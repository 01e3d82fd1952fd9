"""Makes what a mount consists of, in this order: the lock of its state, the tree, the operations, the mount itself."""

import contextlib
import errno
import logging
import os
import select
import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from typing import TextIO

import pyfuse3

from .. import linux
from ..accounts.groups import group_source
from ..accounts.threadstatus import ThreadStatus
from ..filesystem import Filesystem
from ..filesystem.reader import Reader
from ..fuse import attach, connection, loop
from ..fuse.attach import Attached, MountError
from ..linux import mountinfo, ownfiles
from ..messages import shell_word
from ..plugin.loader import PolicyError, load_policy
from ..stacking.lower import find_lower
from ..state import handlekey, persistent
from ..state.client import socket_of
from ..state.handlekey import HandleKeyError
from ..state.runtime import PublishedState, all_mounted, mount_key
from ..state.versions import VersionError
from ..tree.index import MEMORY, Index, Unstored
from ..tree.nodes import Nodes
from ..tree.views import ViewError, Views
from .control import Control
from .publication import publish
from .reaper import Reaper
from .settings import Settings

log = logging.getLogger(__name__)

# Clients cannot have this many descriptors, because each request that waits needs some.
_SPARE_DESCRIPTORS = 2 * loop.MOST_PENDING


def lock_state(settings: Settings, key: str, state: str) -> int:
    """Return the locked directory of the mount's state, which one daemon at a time may have.

    Raises:
        MountError: another daemon has it, or it cannot be made.
    """
    try:
        lock = persistent.lock(key)
    except OSError as exc:
        raise MountError(f"{exc.filename}: {exc.strerror}; {_hint(exc, state)}") from exc
    if lock is None:
        raise MountError(_served_already(settings))
    return lock


def open_tree(settings: Settings, state: str, most: int, stack: contextlib.ExitStack) -> tuple[Index, Nodes, Views]:
    """Return the numbers, the objects and the views of a mount, in a process that can have `most` descriptors.

    Raises:
        MountError: one of them cannot be used.
    """
    lower = find_lower(settings.source)
    if lower is not None:
        stack.callback(lower.close)
    with _as_mount_errors(settings, state):
        policy = load_policy(settings.options.policy, settings.options, settings.policy_dir)
        index = _index(settings, os.path.join(state, persistent.INDEX))
        stack.callback(index.close)
        nodes = _nodes(settings, index, min(most // 4, 4096))
        stack.callback(nodes.close)
        views = Views(
            policy,
            settings.options.views,
            frozenset(settings.options.view_access),
            index,
            for_all=settings.mount_options.export_mode.ganesha,
            checked=settings.mount_options.default_permissions,
            lower=lower,
        )
    return index, nodes, views


@contextlib.contextmanager
def _as_mount_errors(settings: Settings, state: str) -> Iterator[None]:
    """Raise what is wrong with the policy, the views, the tree or the state as a MountError with a hint."""
    try:
        yield
    except (PolicyError, VersionError, ViewError) as exc:
        raise MountError(str(exc)) from exc
    except sqlite3.Error as exc:
        raise MountError(f"{state}: {exc}; {_hint(exc, state)}") from exc
    except Unstored as exc:
        raise MountError(f"{exc.filename}: {exc.strerror}; {_hint(exc, state)}") from exc
    except OSError as exc:
        raise MountError(f"{settings.source}: {exc.strerror}") from exc


def make_filesystem(
    settings: Settings, nodes: Nodes, views: Views, threads: ThreadStatus, stack: contextlib.ExitStack, most: int
) -> Filesystem:
    """Return the operations of a mount, in a process that can have `most` descriptors.

    Raises:
        MountError: the source of callers' groups does not go with the server, or the file of `record=` is not written.
    """
    filesystem = Filesystem(
        nodes,
        views,
        group_source(settings.group_words, threads, settings.tuning),
        threads,
        Reader(settings.options.prefetch, settings.options.prefetch_limits, _record(settings, stack)),
        settings.target,
        replace(settings.mount_options.export_mode, no_client_cache=settings.options.no_client_cache),
        default_permissions=settings.mount_options.default_permissions,
        xattrs=settings.mount_options.xattrs,
        local_locks=settings.mount_options.local_locks,
        passthrough=settings.mount_options.passthrough != "off",
        max_open=most - min(most // 4, _SPARE_DESCRIPTORS),
        tuning=settings.tuning,
    )
    filesystem.probing.use(settings.options)
    return filesystem


def start_reaper(settings: Settings, key: str) -> Reaper | None:
    """Return the process that unmounts the mount when its daemon dies; None if the mount has to stay then."""
    # Once such a mount is gone, a server would export what lies below it; where that is the tree itself, all
    # callers would see all of it.
    must_stay = settings.mount_options.export_mode.is_exported or settings.lies_over_the_tree
    if not must_stay:
        return Reaper(key, settings.target, settings.restart_plan)
    if settings.restart_plan is not None:
        log.warning(
            "%s: restart has no effect: the guard of an export mounts again, and a mount over its own source "
            "stays dead, since everybody would see all of the tree in between",
            settings.target,
        )
    return None


def write_record(settings: Settings, state: str) -> None:
    """Write down which mount the state belongs to.

    Raises:
        MountError: it cannot be written, and a server exports the mount.
    """
    try:
        persistent.write_record(
            settings.source, settings.target, exported=settings.mount_options.export_mode.is_exported
        )
    except OSError as exc:
        if settings.mount_options.export_mode.is_exported:
            raise MountError(f"{exc.filename or state}: {exc.strerror}") from exc
        log.warning("%s: %s; cloakfs prune will not know what this state is of", state, exc.strerror)


def attach_filesystem(
    settings: Settings,
    key: str,
    state: str,
    filesystem: Filesystem,
    index: Index,
    reaper: Reaper | None,
    stack: contextlib.ExitStack,
) -> tuple[Attached, PublishedState, Control]:
    """Mount, and return the mount, what it publishes and what it answers. If anything fails, nothing stays mounted.

    Raises:
        MountError: the mount could not be made.
    """
    attached = attach.attach(
        settings.source,
        settings.target,
        settings.mount_options,
        read_only=settings.options.read_only,
        image=os.path.join(state, persistent.IMAGE),
    )
    try:
        _refuse_to_serve_itself(settings)
        filesystem.nodes.mounts.served_at(attached.device)
        pyfuse3.init(filesystem, f"/dev/fd/{attached.session}", {"fsname=cloakfs"})
        filesystem.cache.attach(attached.session)
        published, control = publish(settings, key, attached, filesystem, index)
        try:
            stack.enter_context(published)
            stack.enter_context(control)
        except OSError as exc:
            raise MountError(f"{exc.filename or socket_of(key)}: {exc.strerror}") from exc
        if reaper is not None:
            reaper.assign(attached)
    except BaseException:
        attached.detach()
        raise
    return attached, published, control


def open_abort(attached: Attached, stack: contextlib.ExitStack) -> int | None:
    """Return the descriptor by which the session can be ended; None if the kernel does not offer it."""
    try:
        abort = connection.open_abort(attached.device)
    except OSError:
        return None
    stack.callback(os.close, abort)
    return abort


def give_up_privileges() -> None:
    """Give up those of root with which every caller could do what only root may.

    Every caller could exceed quotas, use reserved blocks, access `trusted.` names and give programs capabilities.
    (setfsuid(2) takes away others, but not these.)
    """
    given_up = 1 << linux.CAP_SYS_ADMIN | 1 << linux.CAP_SYS_RESOURCE | 1 << linux.CAP_SETFCAP
    linux.set_effective_capabilities(linux.effective_capabilities() & ~given_up)


def _index(settings: Settings, path: str) -> Index:
    """Return where numbers are stored. For a mount that nothing exports, that is in memory if the file cannot be used.

    Raises:
        MountError: the file of an exported mount cannot be used, or that of the key.
        VersionError: its version is unknown.
    """
    try:
        key = handlekey.read()
    except HandleKeyError as exc:
        raise MountError(str(exc)) from exc
    secret = None if key is None else key.secret(mount_key(settings.source, settings.target))
    try:
        return Index(path, behind=not settings.mount_options.export_mode.is_exported, secret=secret)
    except (OSError, sqlite3.Error) as exc:
        trouble = f"{path}: {exc.strerror if isinstance(exc, OSError) else exc}"
        hint = _hint(exc, os.path.dirname(path))
        if isinstance(exc, OSError) and exc.errno == errno.ENOKEY:
            give_up = f"cloakfs prune {shell_word(settings.target)}"
            hint = f"put {handlekey.PATH} back, or give up the file handles that clients have ({give_up})"
        if settings.mount_options.export_mode.is_exported:
            raise MountError(f"{trouble}; {hint}") from exc
        log.warning(
            "%s; inode numbers and file handles are in memory, and others from the next mount on (%s)",
            trouble,
            hint,
        )
        return Index(MEMORY, behind=True, trouble=trouble, secret=secret)


def _nodes(settings: Settings, index: Index, max_fds: int) -> Nodes:
    """Return the objects of the tree.

    Raises:
        MountError: the tree cannot be mounted over.
        OSError: the tree cannot be opened.
    """
    covered = settings.covers_its_source
    try:
        return Nodes(settings.source, index, max_fds, covered=covered, tuning=settings.tuning)
    except OSError as exc:
        if covered and exc.errno in (errno.ENOSYS, errno.EINVAL):
            raise MountError(
                f"{settings.target}: cannot be mounted over its own source here (open_tree(2): {exc.strerror}); "
                "this needs Linux 5.2 or later, and mounts that are not unbindable"
            ) from exc
        raise


def _served_already(settings: Settings) -> str:
    """Return why there can be no second mount of the same tree at the same mount point."""
    pair = settings.source, settings.target
    daemon = next((mount for mount in all_mounted() if (mount.source, mount.target) == pair), None)
    places = {
        place.path for place in mountinfo.by_id().values() if daemon is not None and place.device == daemon.device
    }
    if daemon is None or settings.target in places:
        hint = f"cloakfs umount {shell_word(settings.target)}"
        return f"{settings.target}: {settings.source} is mounted there already ({hint})"
    if places:
        return (
            f"{settings.target}: the daemon of an earlier mount (process {daemon.pid}) still serves "
            f"{', '.join(sorted(places))}; unmount that first"
        )
    return (
        f"{settings.target}: the daemon of an earlier mount (process {daemon.pid}) still serves processes that have "
        f"files open in it; try again when they have ended, or end the daemon (kill {daemon.pid}, twice)"
    )


def _record(settings: Settings, stack: contextlib.ExitStack) -> TextIO | None:
    """Return the file in which READs are recorded (`-o record=FILE`).

    Raises:
        MountError: the file cannot be written.
    """
    if settings.mount_options.record is None:
        return None
    try:
        fd = ownfiles.open_fd(
            settings.mount_options.record, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600
        )
    except OSError as exc:
        raise MountError(f"record={settings.mount_options.record}: {exc.strerror}") from exc
    return stack.enter_context(ownfiles.open(fd, "w", encoding="ascii"))


@contextlib.contextmanager
def late_answers_unlogged(session: int) -> Iterator[None]:
    """Keep pyfuse3 from logging errors about replies that came after the end of the session.

    When the last user is gone, the kernel does not wait for requests that this user did not wait for (RELEASE). It no
    longer knows such a request when the reply comes.
    """
    ended = select.poll()
    ended.register(session, 0)  # for POLLERR alone

    def is_worth_logging(record: logging.LogRecord) -> bool:
        if "fuse_reply" not in record.msg or record.args != (os.strerror(errno.ENOENT),):
            return True
        # The kernel forgets the requests a moment before it reports the end of the session, so wait for that. It never
        # forgets a request while the session goes on, so this wait does not happen repeatedly.
        return not ended.poll(100)

    pyfuse3_log = logging.getLogger("pyfuse3")
    pyfuse3_log.addFilter(is_worth_logging)
    try:
        yield
    finally:
        pyfuse3_log.removeFilter(is_worth_logging)


def raise_limits(device: str) -> list[str]:
    """Let the kernel send as many requests as the daemon can share out among callers; return what fails, in lines."""
    try:
        connection.limit_background(device, loop.MOST_BACKGROUND, loop.MOST_BACKGROUND * 3 // 4)
    except OSError as exc:
        problem = (
            f"the kernel sends only 12 requests at a time for which no process waits ({exc.strerror}): one user's "
            "reads of a file system that hangs can stop everybody's reads; write "
            f"{loop.MOST_BACKGROUND} to /sys/fs/fuse/connections/{device.partition(':')[2]}/max_background"
        )
        log.warning("%s", problem)
        return [problem]
    return []


def _refuse_to_serve_itself(settings: Settings) -> None:
    """Refuse a mount that also appears inside the source, as it may where the tree is a shared bind mount.

    Raises:
        MountError: the new mount is visible below the source.
    """
    places = [(place.device, place.path) for place in mountinfo.by_id().values()]
    device = next((device for device, path in reversed(places) if path == settings.target), None)
    inside = settings.source.rstrip("/") + "/"
    for other, path in places:
        if other == device and path != settings.target and path.startswith(inside):
            raise MountError(
                f"{settings.target}: also appears as {path}, inside {settings.source}, where the daemon would wait "
                "for itself; mount it elsewhere"
            )


MAKE_ROOM = "make room on its file system"
"""What to do where there is no room for the state of a mount."""

_HINTS = {
    errno.ENOSPC: MAKE_ROOM,
    errno.EDQUOT: MAKE_ROOM,
    errno.EROFS: "its file system has to be writable (mount -o remount,rw)",
    errno.EAGAIN: "another program has locked it (fuser)",
    errno.ENOMEM: "the machine has too little memory",
    errno.EMFILE: "the limit of open files is too low (ulimit -n)",
    errno.ENFILE: "the limit of open files is too low (sysctl fs.file-max)",
}


def _hint(exc: OSError | sqlite3.Error, state: str) -> str:
    """Say what to do about the state of a mount that cannot be used. Only what is damaged has to be given up."""
    code = exc.errno if isinstance(exc, OSError) else Unstored(exc, "").errno
    return _HINTS.get(code or 0, f"move {state} away to start with an empty one (old file handles become stale)")


def warn_of_handles(nodes: Nodes) -> None:
    """Warn of file systems in the tree whose file handles, and so nodeids, do not last."""
    for filesystem in nodes.mounts.filesystems:
        if not filesystem.has_handles:
            log.warning(
                "%s (%s) has no file handles: nodeids last only as long as the kernel keeps a file in memory, "
                "and each known file costs a descriptor (overlayfs: mount it with nfs_export=on,index=on)",
                filesystem.path,
                filesystem.kind,
            )
        elif not filesystem.decodable:
            log.warning(
                "%s (%s) cannot decode file handles: an old handle works again only once its path has been looked up "
                "(overlayfs: mount it with nfs_export=on,index=on)",
                filesystem.path,
                filesystem.kind,
            )
