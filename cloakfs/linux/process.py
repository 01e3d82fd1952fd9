"""Other processes and their threads: when they began, what /proc says about them, and when they end.

Process ids are reused. What identifies a process for ever is its id together with the time at which it began, or a
descriptor of it (a pidfd, pidfd_open(2)). (The reaper uses this module, so it imports next to nothing.)

All is read as the daemon: /proc may be mounted with hidepid, and some of it is only for those who may trace the
process.
"""

import ctypes
import os
import select
from collections.abc import Callable
from functools import cache

from . import ownfiles
from .libc import NR

_LOOK_SECONDS = 1.0

_PF_KTHREAD = 0x00200000  # include/linux/sched.h

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


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped, also by a tracer (proc_pid_stat(5): state T or t)."""
    try:
        return _stat(pid)[0] in (b"T", b"t")
    except (FileNotFoundError, ProcessLookupError):
        return False


def open_threads(pid: int) -> int:
    """Return a descriptor of a process's thread directory, which never shows a later process with the same id.

    Raises:
        OSError: there is no such process, or no descriptor could be opened.
    """
    return ownfiles.open_fd(f"/proc/{pid}/task", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def has_thread(threads: int, tid: int) -> bool:
    """Whether there is a thread with this id in the process whose threads (`open_threads`) these are."""
    try:
        ownfiles.stat(str(tid), dir_fd=threads)
    except OSError:
        return False
    return True


def open_status(tid: int) -> int:
    """Return a descriptor of a thread's proc_pid_status(5), which never shows a later thread with its id (ESRCH).

    Raises:
        OSError: there is no such thread, or no descriptor could be opened.
    """
    return ownfiles.open_fd(f"/proc/{tid}/status", os.O_RDONLY | os.O_CLOEXEC)


def groups_in(status: int) -> tuple[bytes, int]:
    """Return the groups of the thread whose status (`open_status`) this is, and the id of its process.

    The groups are the supplementary ones, separated by blanks.

    Raises:
        ProcessLookupError: it has ended.
    """
    text = more = ownfiles.pread(status, 1024, 0)
    while True:
        before, _, rest = text.partition(b"\nGroups:")
        groups, is_whole, _ = rest.partition(b"\n")
        if is_whole or not more:
            break
        more = ownfiles.pread(status, 65536, len(text))  # the user is in a great many groups
        text += more
    leader, _, _ = before.partition(b"\nTgid:")[2].partition(b"\n")
    return groups if is_whole else b"", int(leader or 0)


def capabilities_in(status: int) -> tuple[int, int]:
    """Return the effective capabilities of the thread whose status this is, as a bit mask, and the id of its process.

    Raises:
        ProcessLookupError: it has ended.
    """
    text = b""
    while (effective := _line(text, b"\nCapEff:")) is None and (more := ownfiles.pread(status, 65536, len(text))):
        text += more
    return int(effective or b"0", 16), int(_line(text, b"\nTgid:") or 0)


def _line(text: bytes, title: bytes) -> bytes | None:
    """Return what stands in this line of a status; None if `text` does not have all of it (yet)."""
    start = text.find(title)
    end = text.find(b"\n", start + 1)
    return None if start < 0 or end < 0 else text[start + len(title) : end]


def is_in_our_user_namespace(tid: int) -> bool:
    """Whether this thread is in the same user namespace as this process (user_namespaces(7)); False in doubt.

    A user namespace gives the process that makes it all capabilities, which count for nothing outside.
    """
    try:
        return ownfiles.readlink(f"/proc/{tid}/ns/user") == _our_user_namespace()
    except OSError:
        return False


@cache
def _our_user_namespace() -> str:
    return ownfiles.readlink("/proc/self/ns/user")


def is_proc_ours() -> bool:
    """Whether /proc shows the process ids of this pid namespace (pid_namespaces(7)), not those of another."""
    try:
        return ownfiles.readlink("/proc/self") == str(os.getpid())
    except OSError:
        return False


def command_of(tid: int) -> str | None:
    """Return the name of the command that this thread runs (proc_pid_comm(5)); None if the thread has ended."""
    try:
        with ownfiles.open(f"/proc/{tid}/comm", "rb") as file:
            return os.fsdecode(file.read().removesuffix(b"\n"))
    except OSError:
        return None


def has_only_root_ids(tid: int) -> bool:
    """Whether the real, effective and saved ids of this thread are all root's, whatever its file-system ids (proc(5)).

    This is how the kernel decides who may enter a FUSE mount without `allow_other`.
    """
    try:
        # A file object would make four more system calls, for each ACL that a server reads.
        status = ownfiles.open_fd(f"/proc/{tid}/status", os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, ProcessLookupError):
        return False
    try:
        lines = ownfiles.read(status, _STATUS_BYTES).split(b"\n")
    except ProcessLookupError:
        return False
    finally:
        os.close(status)
    ids = [line.split()[1:4] for line in lines if line.startswith((b"Uid:", b"Gid:"))]
    return ids == [[b"0"] * 3] * 2


NFS_SERVERS = ("nfsd", "lockd")
"""The threads of the kernel that serve clients of NFS."""


def kernel_thread(tid: int) -> str | None:
    """Return the name of this thread if it is one of the kernel itself (proc_pid_stat(5)); otherwise None."""
    try:
        is_kernels = int(_stat(tid)[6]) & _PF_KTHREAD != 0
    except OSError:
        return None
    return command_of(tid) if is_kernels else None


def call_this_process(*words: str) -> None:
    """Make `ps` show these words, as far as there is room, instead of those that this process was started with."""
    with ownfiles.open("/proc/self/comm", "wb") as file:
        file.write(os.fsencode(words[0]))
    fields = _stat("self")
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end of proc_pid_stat(5)
    text = b"\0".join(os.fsencode(word) for word in words)[: end - start - 1]
    ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


def _stat(pid: int | str) -> list[bytes]:
    """Return the fields of proc_pid_stat(5) from the state on; before that comes the name, which may be anything."""
    with ownfiles.open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()


def who_lists(is_it: Callable[[int], bool], name: bytes) -> list[tuple[int, int]]:
    """Return the process and its uid for each that waits in getdents64(2) for a directory (proc_pid_syscall(5)).

    Args:
        is_it: whether this is the directory's inode number.
        name: the directory's name.
    """
    found = []
    for pid in filter(str.isdigit, ownfiles.listdir("/proc")):
        try:
            if any(_lists(pid, thread, is_it, name) for thread in ownfiles.listdir(f"/proc/{pid}/task")):
                found.append((int(pid), ownfiles.stat(f"/proc/{pid}").st_uid))
        except OSError:
            continue  # it has ended, or may not be read
    return found


def _lists(pid: str, thread: str, is_it: Callable[[int], bool], name: bytes) -> bool:
    with ownfiles.open(f"/proc/{pid}/task/{thread}/syscall", "rb") as file:
        words = file.read().split()
    if len(words) < 2 or words[0] != b"%d" % NR["getdents64"].value:  # it may also be "running"
        return False
    fd = int(words[1], 16)
    if os.path.basename(ownfiles.readlink(f"/proc/{pid}/fd/{fd}".encode())) != name:
        return False
    with ownfiles.open(f"/proc/{pid}/fdinfo/{fd}", "rb") as file:
        return any(line.startswith(b"ino:") and is_it(int(line[4:])) for line in file)
