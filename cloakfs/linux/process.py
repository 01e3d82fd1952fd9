"""Processes and threads of others: since when they are there, what /proc tells of them, and their end.

A process id is given to others afterwards. What names a process for ever is the id with the time at which it began, or
a descriptor of it (a pidfd, pidfd_open(2)). (The clean-up process has this module, so it imports next to nothing.)
"""

import ctypes
import os
import select

from .credentials import act_as_daemon

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


def open_threads(pid: int) -> int:
    """A descriptor of the directory of a process's threads; it never tells of another process with the same id.

    Raises:
        OSError: there is no such process, or no descriptor to be had.
    """
    act_as_daemon()  # /proc may be mounted with hidepid
    return os.open(f"/proc/{pid}/task", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def has_thread(threads: int, tid: int) -> bool:
    """Is there a thread with this id in the process whose threads (`open_threads`) these are?"""
    try:
        os.stat(str(tid), dir_fd=threads)
    except OSError:
        return False
    return True


def open_status(tid: int) -> int:
    """A descriptor of what proc_pid_status(5) tells; it never tells of another thread with the same id (ESRCH).

    Raises:
        OSError: there is no such thread, or no descriptor to be had.
    """
    act_as_daemon()  # /proc may be mounted with hidepid
    return os.open(f"/proc/{tid}/status", os.O_RDONLY | os.O_CLOEXEC)


def groups_in(status: int) -> bytes:
    """The supplementary groups of the thread whose status (`open_status`) this is, with blanks between them.

    Raises:
        ProcessLookupError: it has ended.
    """
    text = os.pread(status, 1024, 0)
    start = text.find(b"\nGroups:") + 8
    if start < 8:
        return b""
    end = text.find(b"\n", start)
    while end < 0 and (more := os.pread(status, 65536, len(text))):
        text += more  # somebody in a great many groups
        end = text.find(b"\n", start)
    return text[start:end]


def has_only_root_ids(tid: int) -> bool:
    """Are the real, effective and saved ids of this thread all root's? (Whatever its file-system ids are; proc(5).)

    It is how the kernel tells who may enter a FUSE mount without `allow_other`.
    """
    act_as_daemon()  # /proc may be mounted with hidepid
    try:
        with open(f"/proc/{tid}/status", "rb") as file:
            lines = file.read().split(b"\n")
    except (FileNotFoundError, ProcessLookupError):
        return False
    ids = [line.split()[1:4] for line in lines if line.startswith((b"Uid:", b"Gid:"))]
    return ids == [[b"0"] * 3] * 2


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
