"""Other processes and their threads: when they began, what /proc tells about them, and when they end.

Process ids are reused. What identifies a process for ever is its id together with the time at which it began, or a
descriptor of it (a pidfd, pidfd_open(2)). (The clean-up process uses this module, so it imports next to nothing.)
"""

import ctypes
import os
import select

from .credentials import act_as_daemon

_LOOK_SECONDS = 1.0

_STATUS_BYTES = 1 << 16
"""More than /proc/PID/status has, even of a process in 65,536 groups: the ids stand before those."""


def held(pid: int) -> int | None:
    """Return a descriptor of a process; None if there is no such process (any more).

    Raises:
        OSError: no descriptor could be opened. The process may be alive, and must not be taken for dead.
    """
    if pid == 0:
        return None  # no process has this id
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None


def ends(process: int, seconds: float | None = None) -> bool:
    """Wait for the end of a process that is `held`, at most `seconds` if given; return whether it has ended."""
    end = select.poll()
    end.register(process, select.POLLIN)
    return bool(end.poll(None if seconds is None else seconds * 1000))


def dies(process: int, pid: int) -> None:
    """Wait until a process that is `held`, and has this id, has ended or is a zombie.

    One of its threads may wait in the kernel for any length of time: until that is over, the process does not end, and
    none of its descriptors is closed.
    """
    while not ends(process, _LOOK_SECONDS):
        if start_time(pid) is None:
            return


def start_time(pid: int) -> int | None:
    """Return when this process began, in clock ticks since boot (proc_pid_stat(5)); None if it has ended.

    The process id together with this time identifies the process.
    """
    try:
        words = _stat(pid)
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if words[0] in (b"Z", b"X") else int(words[19])


def open_threads(pid: int) -> int:
    """Return a descriptor of a process's thread directory, which never shows a later process with the same id.

    Raises:
        OSError: there is no such process, or no descriptor could be opened.
    """
    act_as_daemon()  # /proc may be mounted with hidepid
    return os.open(f"/proc/{pid}/task", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def has_thread(threads: int, tid: int) -> bool:
    """Whether there is a thread with this id in the process whose threads (`open_threads`) these are."""
    act_as_daemon()  # /proc may be mounted with hidepid
    try:
        os.stat(str(tid), dir_fd=threads)
    except OSError:
        return False
    return True


def open_status(tid: int) -> int:
    """Return a descriptor of a thread's proc_pid_status(5), which never shows a later thread with its id (ESRCH).

    Raises:
        OSError: there is no such thread, or no descriptor could be opened.
    """
    act_as_daemon()  # /proc may be mounted with hidepid
    return os.open(f"/proc/{tid}/status", os.O_RDONLY | os.O_CLOEXEC)


def groups_in(status: int) -> bytes:
    """Return the supplementary groups, separated by blanks, of the thread whose status (`open_status`) this is.

    Raises:
        ProcessLookupError: it has ended.
    """
    text = os.pread(status, 1024, 0)
    start = text.find(b"\nGroups:") + 8
    if start < 8:
        return b""
    end = text.find(b"\n", start)
    while end < 0 and (more := os.pread(status, 65536, len(text))):
        text += more  # the user is in a great many groups
        end = text.find(b"\n", start)
    return text[start:end]


def command_of(tid: int) -> str | None:
    """Return the name of the command that this thread runs (proc_pid_comm(5)); None if the thread has ended."""
    act_as_daemon()  # /proc may be mounted with hidepid
    try:
        with open(f"/proc/{tid}/comm", "rb") as file:
            return os.fsdecode(file.read().removesuffix(b"\n"))
    except OSError:
        return None


def has_only_root_ids(tid: int) -> bool:
    """Whether the real, effective and saved ids of this thread are all root's, whatever its file-system ids (proc(5)).

    This is how the kernel decides who may enter a FUSE mount without `allow_other`.
    """
    act_as_daemon()  # /proc may be mounted with hidepid
    try:
        # A file object would make four more system calls, for each ACL that a server asks for.
        status = os.open(f"/proc/{tid}/status", os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, ProcessLookupError):
        return False
    try:
        lines = os.read(status, _STATUS_BYTES).split(b"\n")
    except ProcessLookupError:
        return False
    finally:
        os.close(status)
    ids = [line.split()[1:4] for line in lines if line.startswith((b"Uid:", b"Gid:"))]
    return ids == [[b"0"] * 3] * 2


def call_this_process(*words: str) -> None:
    """Make `ps` show these words, as far as there is room, instead of those that this process was started with."""
    with open("/proc/self/comm", "wb") as file:
        file.write(os.fsencode(words[0]))
    fields = _stat("self")
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end of proc_pid_stat(5)
    text = b"\0".join(os.fsencode(word) for word in words)[: end - start - 1]
    ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


def _stat(pid: int | str) -> list[bytes]:
    """Return the fields of proc_pid_stat(5) from the state on; before that comes the name, which may be anything."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()
