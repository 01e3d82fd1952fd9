"""Processes that are not our children: since when they are there, and their end.

A process id is given to others afterwards. What names a process for ever is the id with the time at which it began, or
a descriptor of it (a pidfd, pidfd_open(2)). (The clean-up process has this module, so it imports next to nothing.)
"""

import ctypes
import os
import select

_LOOK_SECONDS = 1.0


def held(pid: int) -> int | None:
    """A descriptor of a process; None if there is none (any more).

    Raises:
        OSError: there is none to be had. The process may live, and must not be taken for dead.
    """
    if pid == 0:
        return None  # nobody's
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None


def ends(process: int, seconds: float | None = None) -> bool:
    """Wait for the end of a process that is `held`, for so long at most: has it ended?"""
    end = select.poll()
    end.register(process, select.POLLIN)
    return bool(end.poll(None if seconds is None else seconds * 1000))


def dies(process: int, pid: int) -> None:
    """Wait until a process that is `held`, and has this id, was ended.

    One of its threads may wait in the kernel, for as long as it likes: until then the process does not end, and of its
    descriptors none is closed.
    """
    while not ends(process, _LOOK_SECONDS):
        if start_time(pid) is None:
            return


def start_time(pid: int) -> int | None:
    """When this process began, in clock ticks since boot (proc_pid_stat(5)); with its id that names it. None: ended."""
    try:
        words = _stat(pid)
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if words[0] in (b"Z", b"X") else int(words[19])


def call_this_process(*words: str) -> None:
    """Have `ps` show these words, as far as there is room, instead of those that this process was started with."""
    with open("/proc/self/comm", "wb") as file:
        file.write(os.fsencode(words[0]))
    fields = _stat("self")
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end of proc_pid_stat(5)
    text = b"\0".join(os.fsencode(word) for word in words)[: end - start - 1]
    ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


def _stat(pid: int | str) -> list[bytes]:
    """What proc_pid_stat(5) tells, from the state on: before that is the name, which may be anything."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()
