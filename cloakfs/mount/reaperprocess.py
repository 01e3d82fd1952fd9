"""The reaper of a mount: waits for the end of the daemon, removes what it leaves behind, and mounts again.

It imports everything before it begins to wait, so that the package may be replaced meanwhile. It imports no more than
it needs, because there may be many mounts.
"""

import contextlib
import os
import signal
import sys
import time

from ..background.backoff import backoff_seconds
from ..fuse import connection
from ..fuse.detach import KINDS, detach_dead
from ..linux import mountinfo, ownfiles, process

NAME = "cloakfs-cleanup"
"""The name that `ps` shows, with the mount point and the daemon; the kernel keeps 15 bytes of it."""


# A mount that lasted this long was well; only the time before counts for the backoff before the next attempt.
_WELL_SECONDS = 60.0

_MOST_OUTPUT = 4096


def main() -> None:
    """Reap one mount.

    The arguments are the mount point, the daemon (a pidfd), the directory that the daemon has locked, the files that it
    leaves, `--`, and what `_mount_again` takes, if the mount is to be made again. The id and the device of the mount
    arrive on standard input once it is made, and later the words of `reaper.Reaper.report`.
    """
    target, daemon, state, *words = sys.argv[1:]
    files, again = words[: words.index("--")], words[words.index("--") + 1 :]
    # A signal to all processes of a terminal or a service ends the daemon as well, and with it this process.
    for ignored in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)
    pid = os.getppid()
    process.call_this_process(NAME, target, str(pid))
    if os.fork():
        os._exit(0)
    reported = ownfiles.read(0, 100).split()
    since = time.monotonic()
    # Once the mount is gone, the next one may get its id and its device, and the daemon may take long to end.
    abort = _open_abort(reported[1].decode()) if reported else -1
    if not again:
        os.dup2(1, 0)
    if not reported:
        return
    number, device = int(reported[0]), reported[1].decode()
    process.dies(int(daemon), pid)
    reported += _reported_since() if again else ()
    was_there = _place(number, device) is not None
    if abort >= 0:
        if not process.ends(int(daemon), 0):
            connection.abort(abort)  # a thread may still hold the session, and wait in the kernel
        os.close(abort)
    _detach(number, device)
    process.ends(int(daemon))
    os.close(int(daemon))
    _remove_files(state, files)
    if b"ready" in reported and b"ended" not in reported and (b"failed" in reported or was_there):
        os.dup2(1, 0)
        left = _place(number, device)
        if left is not None and left.path == target:
            _log(again[1], f"{target}: not mounted again: something else is mounted on top of the dead mount")
            return
        _mount_again(target, state, time.monotonic() - since, *again)


def _reported_since() -> list[bytes]:
    """Return what else the daemon has reported. (If a thread of it cannot end, it still has the other end open.)"""
    os.set_blocking(0, False)
    with contextlib.suppress(BlockingIOError):
        return ownfiles.read(0, 100).split()
    return []


def _mount_again(
    target: str, state: str, lasted: float, waiting: str, log: str, directory: str, restarts: str, *command: str
) -> None:
    """Mount until it succeeds; give up when something else was mounted there, or at SIGTERM.

    Args:
        target: the mount point.
        state: the directory that a daemon locks.
        lasted: how long the mount lasted, in seconds.
        waiting: the file to write while this goes on, for `state.runtime.waiting`.
        log: the log file in which this is noted.
        directory: the working directory of the command.
        restarts: how many times it was mounted again so far.
        command: the command that mounts in the background.
    """
    bottom = _top(target)
    logged = ""
    failures = 0 if lasted >= _WELL_SECONDS else int(restarts)
    _log(log, f"{target}: its daemon died; mounting it again")
    mine = f"{os.getpid()} {process.start_time(os.getpid())} {target}"
    _write(waiting, mine, os.O_TRUNC)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        while True:
            time.sleep(backoff_seconds(failures))
            # A signal that is to end this has effect after the attempt.
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
            if _top(target) != bottom:
                _log(log, f"{target}: not mounted again: meanwhile, something else was mounted or unmounted there")
                return
            failure = _run(directory, (*command, "-o", f"restarted={int(restarts) + 1}"))
            if failure is None or _is_locked(state):
                return
            if failure != logged:
                logged = failure
                _log(log, f"{target}: not mounted again yet: {logged}")
            failures += 1
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    finally:
        # The new daemon may have died already, and its own reaper wait.
        if _read(waiting) == os.fsencode(mine):
            ownfiles.unlink(waiting)


def _top(target: str) -> int | None:
    """Return the id of the topmost mount at `target`."""
    return next((number for number, place in reversed(mountinfo.by_id().items()) if place.path == target), None)


def _run(directory: str, command: tuple[str, ...]) -> str | None:
    """Run the command; return the last line that it printed if it failed, and None if not."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            for number in (signal.SIGHUP, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
            os.dup2(writer, 2)
            with contextlib.suppress(OSError):
                ownfiles.chdir(directory)
            os.execv(command[0], command)
        finally:
            os._exit(127)
    os.close(writer)
    output = b""
    while more := ownfiles.read(reader, _MOST_OUTPUT):
        output = (output + more)[-_MOST_OUTPUT:]
    os.close(reader)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status == 0:
        return None
    lines = output.decode("utf-8", "replace").strip().splitlines()
    return lines[-1] if lines else f"the command ended with {status}"


def _is_locked(state: str) -> bool:
    """Whether a daemon serves the mount by now."""
    with contextlib.suppress(FileNotFoundError):
        return ownfiles.is_locked(state)
    return False


def _log(log: str, text: str) -> None:
    _write(log, f"{time.strftime('%Y-%m-%d %H:%M:%S')} WARNING cloakfs.mount.reaperprocess: {text}\n", os.O_APPEND)


def _read(path: str) -> bytes:
    with contextlib.suppress(FileNotFoundError), ownfiles.open(path, "rb") as file:
        return file.read()
    return b""


def _write(path: str, text: str, how: int) -> None:
    """Write to a file of root; a full disk is no reason to leave a mount undone."""
    with contextlib.suppress(OSError):
        file = ownfiles.open_fd(path, os.O_WRONLY | os.O_CREAT | how, 0o600)
        try:
            ownfiles.write(file, os.fsencode(text))
        finally:
            os.close(file)


def _open_abort(device: str) -> int:
    """Return a descriptor that aborts this connection and no later one (`fuse.connection.open_abort`), or -1."""
    with contextlib.suppress(OSError):
        return connection.open_abort(device)
    return -1


def _detach(number: int, device: str) -> None:
    """Detach the mount, unless something is mounted on top of it."""
    place = _place(number, device)
    if place is not None:
        detach_dead(place.path, number)


def _place(number: int, device: str) -> mountinfo.Place | None:
    place = mountinfo.by_id().get(number)
    return place if place is not None and place.device == device and place.kind in KINDS else None


def _remove_files(state: str, files: list[str]) -> None:
    """Remove what the daemon published, unless a new daemon has locked the directory by now."""
    with contextlib.suppress(OSError):
        lock = ownfiles.open_fd(state, os.O_RDONLY)
        try:
            for path in files if ownfiles.lock(lock) else ():
                with contextlib.suppress(FileNotFoundError):
                    ownfiles.unlink(path)
        finally:
            os.close(lock)
