"""What a user without any privilege can do to a mount that others use.

Each attack is a function. Its arguments are a directory of the attacker's own on the mount (whose parent is the shared
directory, with the sticky bit) and the time at which it has to end; it returns how much it did.
"""

import contextlib
import ctypes
import fcntl
import mmap
import os
import random
import resource
import signal
import struct
import tempfile
import time
from collections.abc import Callable, Iterator

from tests.mount.test_invalidation import chmod_all, has_let_go, hold, open_all
from tests.mount.test_leases import hold as lease
from tests.mount.usersmounts import as_users_mount
from tests.processes import wait_until_blocked
from tests.waiting import wait_until

Attack = Callable[[str, float], int]

ATTACKS: dict[str, Attack] = {}

SYS_GETDENTS64 = 217 if os.uname().machine == "x86_64" else 61

_LIBC = ctypes.CDLL(None, use_errno=True)


def attack(function: Attack) -> Attack:
    ATTACKS[function.__name__.replace("_", " ")] = function
    return function


def rounds(end: float) -> Iterator[int]:
    """0, 1, 2 … until then; at least one."""
    number = 0
    while not number or time.monotonic() < end:
        yield number
        number += 1


def last_until(end: float) -> None:
    """Let others do what they do until then."""
    time.sleep(max(0, end - time.monotonic()))


def beside(here: str, name: str) -> str:
    """What lies next to the mount: `real`, the tree behind it, or `stalled`; see the arena in conftest.py."""
    return os.path.join(here.partition("/mnt/")[0], name)


def behind(here: str) -> str:
    """The same directory on the real tree."""
    return os.path.join(beside(here, "real"), here.partition("/mnt/")[2])


def make(path: str | bytes, data: bytes = b"x", mode: int = 0o644) -> None:
    fd = os.open(path, os.O_CREAT | os.O_WRONLY, mode)
    try:
        os.write(fd, data)
    finally:
        os.close(fd)


def lock(fd: int, start: int, *, wait: bool = False) -> None:
    fcntl.fcntl(
        fd, fcntl.F_SETLKW if wait else fcntl.F_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, start, 1, 0)
    )


@contextlib.contextmanager
def descriptors(wanted: int) -> Iterator[int]:
    """As many as this process may have, up to so many."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft = min(hard, wanted + 100)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    yield min(wanted, soft - 100)


@contextlib.contextmanager
def children(count: int, work: Callable[[int], object]) -> Iterator[list[int]]:
    """Processes that do something, and are killed at the end."""
    pids = []
    try:
        for number in range(count):
            pid = os.fork()
            if pid == 0:
                try:
                    work(number)
                finally:
                    os._exit(0)
            pids.append(pid)
        yield pids
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


@attack
def nothing(here: str, end: float) -> int:
    """To compare with."""
    last_until(end)
    return 1


@attack
def locks_of_5000_bytes(here: str, end: float) -> int:
    """Every second byte, so that none can be merged; and the same file is written meanwhile."""
    path = os.path.join(here, "locked")
    make(path, bytes(10_000))
    fd = os.open(path, os.O_RDWR)
    done = 0
    for number in rounds(end):
        lock(fd, number % 5000 * 2)
        os.pwrite(fd, b"y", number % 10_000)
        done += 1
    os.close(fd)
    return done


@attack
def processes_that_wait_for_locks(here: str, end: float) -> int:
    path = os.path.join(here, "wanted")
    make(path)
    fd = os.open(path, os.O_RDWR)
    lock(fd, 0)

    def wait(number: int) -> None:
        theirs = os.open(path, os.O_RDWR)
        lock(theirs, 0, wait=True)

    with children(20, wait) as pids:
        for _ in rounds(end):
            fcntl.flock(fd, fcntl.LOCK_EX)
            fcntl.flock(fd, fcntl.LOCK_UN)
        return len(pids)


@attack
def hard_links(here: str, end: float) -> int:
    os.mkdir(f"{here}/links")
    make(f"{here}/linked")
    for number in rounds(end):
        os.link(f"{here}/linked", f"{here}/links/{number}")
        os.chmod(f"{here}/linked", 0o600 if number % 2 else 0o644)
    return len(os.listdir(f"{here}/links"))


@attack
def renames_of_directories(here: str, end: float) -> int:
    """Two trees change places while others walk through them."""
    for name in "ab":
        os.makedirs(f"{here}/{name}/1/2/3")
        make(f"{here}/{name}/1/2/3/{name}")

    def walk(number: int) -> None:
        while True:
            for name in "ab":
                with contextlib.suppress(OSError):
                    os.stat(f"{here}/{name}/1/2/3/{name}")

    done = 0
    with children(2, walk):
        for _ in rounds(end):
            os.rename(f"{here}/a", f"{here}/c")
            os.rename(f"{here}/b", f"{here}/a")
            os.rename(f"{here}/c", f"{here}/b")
            done += 3
    return done


@attack
def names_of_the_shared_directory(here: str, end: float) -> int:
    """Made, hidden, shown, renamed and removed beside the others'."""
    shared = os.path.dirname(here)
    for number in rounds(end):
        path = os.path.join(shared, f"mine{number % 50}")
        with contextlib.suppress(FileExistsError):
            make(path)
        os.chmod(path, 0o600)
        os.chmod(path, 0o644)
        os.rename(path, path + "x")
        os.unlink(path + "x")
    return number + 1


@attack
def deep_trees(here: str, end: float) -> int:
    """With descriptors all the way down, and the top hidden and shown again."""
    top = os.open(here, os.O_PATH)
    at, depth = top, 0
    for _ in rounds(end):
        if depth < 400:
            os.mkdir("d", dir_fd=at)
            at = os.open("d", os.O_PATH, dir_fd=at)
            depth += 1
        else:
            os.stat(".", dir_fd=at)
            os.chmod("d", 0o700 if depth % 2 else 0o755, dir_fd=top)
    return depth


@attack
def deeper_than_a_path(here: str, end: float) -> int:
    """As deep as there is time for, with relative names; all above changes while what is deep is asked about."""
    own = os.open(here, os.O_PATH)
    os.chdir(here)
    depth = 0
    half = time.monotonic() + (end - time.monotonic()) / 2
    for _ in rounds(half):
        try:
            os.mkdir("d")
        except OSError:
            break
        os.chdir("d")
        depth += 1
    make("file")
    for number in rounds(end):
        os.chmod("d", 0o711 if number % 2 else 0o755, dir_fd=own)
        os.close(os.open("file", os.O_RDONLY))
        os.listdir(".")
    os.chdir("/")
    return depth


@attack
def the_lock_above_hidden_homes(here: str, end: float) -> int:
    """A listing into a page that does not come, a mkdir behind it, and lookups of what is hidden in the directory."""
    homes = os.path.join(os.path.dirname(os.path.dirname(here)), "homes")
    hidden = [f"{homes}/{name}" for name in ("victim", "another")]

    def keep(number: int) -> None:
        hold(homes, f"{beside(here, 'stalled')}/20000")
        signal.pause()

    with children(1, keep) as keepers:
        wait_until_blocked(*keepers)
        for path in (f"{homes}/new", *hidden):
            pid = os.fork()
            if pid == 0:  # it cannot be killed while it waits
                try:
                    os.stat(path) if path in hidden else os.mkdir(path)
                finally:
                    os._exit(0)
            wait_until_blocked(pid)
        last_until(end)
    return len(hidden)


@attack
def odd_names(here: str, end: float) -> int:
    chance = random.Random(1)
    done = 0
    for _ in rounds(end):
        name = bytes(chance.choice(range(1, 256)) for _ in range(chance.randrange(1, 256))).replace(b"/", b"\n")
        path = os.path.join(os.fsencode(here), b"odd" + name[:252])
        make(path)
        os.setxattr(path, "user.x", name)
        os.rename(path, path[:-1] + b"\xff")
        os.unlink(path[:-1] + b"\xff")
        done += 1
    return done


@attack
def a_thousand_descriptors(here: str, end: float) -> int:
    """Of files that are removed already, some of them."""
    with descriptors(1000) as count:
        held = []
        for number in range(count):
            path = os.path.join(here, f"open{number}")
            held.append(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
            if number % 2:
                os.unlink(path)
        for number in rounds(end):
            os.pwrite(held[number % count], b"x" * 100, 0)
        for fd in held:
            os.close(fd)
    return count


@attack
def directories_half_read(here: str, end: float) -> int:
    os.mkdir(f"{here}/large")
    for number in range(60):
        make(f"{here}/large/{number}" + "a name that is long enough to need several answers" * 4)
    held = [os.open(f"{here}/large", os.O_RDONLY) for _ in range(200)]
    room = ctypes.create_string_buffer(1000)
    for number in rounds(end):
        _LIBC.syscall(SYS_GETDENTS64, held[number % 200], room, 1000)
    for fd in held:
        os.close(fd)
    return number + 1


@attack
def mapped_files(here: str, end: float) -> int:
    """Written through a mapping, while they become shorter and longer."""
    path = os.path.join(here, "mapped")
    make(path, bytes(1 << 20))
    fd = os.open(path, os.O_RDWR)
    with mmap.mmap(fd, 1 << 20) as area:
        for number in rounds(end):
            area[number * 4096 % (1 << 20)] = 1
            area.flush()
            os.ftruncate(fd, 2 << 20)
            os.ftruncate(fd, 1 << 20)
    os.close(fd)
    return number + 1


@attack
def stopped_processes(here: str, end: float) -> int:
    """With files, locks and half of a listing; some are stopped in the middle of a request."""

    def busy(number: int) -> None:
        path = os.path.join(here, f"stopped{number}")
        fd = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)
        scan = os.scandir(here)
        next(scan, None)
        while True:
            os.pwrite(fd, bytes(1 << 17), 0)
            os.stat(path)

    with children(10, busy) as pids:
        for number in range(len(pids)):
            path = os.path.join(here, f"stopped{number}")
            wait_until(lambda path=path: os.path.exists(path) and os.path.getsize(path))  # type: ignore[misc]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        last_until(end)
        return len(pids)


@attack
def interrupted_requests(here: str, end: float) -> int:
    """A signal every millisecond."""
    path = os.path.join(here, "interrupted")
    make(path, bytes(1 << 20))
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        for number in rounds(end):
            with contextlib.suppress(OSError):
                make(f"{path}{number % 10}", bytes(1 << 16))
                os.unlink(f"{path}{number % 10}")
                os.listdir(here)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return number + 1


@attack
def killed_in_the_middle(here: str, end: float) -> int:
    path = os.path.join(here, "killed")

    def busy(number: int) -> None:
        while True:
            with contextlib.suppress(OSError):
                make(f"{path}{number}", bytes(1 << 17))
                os.rename(f"{path}{number}", f"{path}{number}x")
                os.unlink(f"{path}{number}x")

    done = 0
    for _ in rounds(end):
        with children(4, busy):
            time.sleep(0.03)
            done += 4
    return done


@attack
def large_attributes(here: str, end: float) -> int:
    path = os.path.join(here, "attributes")
    make(path)
    for number in rounds(end):
        with contextlib.suppress(OSError):  # there is only so much room
            os.setxattr(path, f"user.{number % 40}", b"v" * 2000)
        for name in os.listxattr(path):
            os.getxattr(path, name)
    return number + 1


@attack
def links_that_lead_in_circles(here: str, end: float) -> int:
    for number in range(60):
        os.symlink(f"link{(number + 1) % 60}", f"{here}/link{number}")
    os.symlink("x/" * 2000, f"{here}/long")
    done = 0
    for number in rounds(end):
        with contextlib.suppress(OSError):
            os.stat(f"{here}/link{number % 60}")
        os.readlink(f"{here}/long")
        done += 1
    return done


@attack
def random_reads(here: str, end: float) -> int:
    """Of a sparse file of a terabyte."""
    path = os.path.join(here, "sparse")
    make(path)
    fd = os.open(path, os.O_RDWR)
    os.ftruncate(fd, 1 << 40)
    chance = random.Random(2)
    done = 0
    for number in rounds(end):
        done = number + 1
        os.pread(fd, 4096, chance.randrange(1 << 28) << 12)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
    return done


@attack
def leases_and_watches(here: str, end: float) -> int:
    """On the mount's files: a lease, and inotify watches, which others' changes have to tell."""
    path = os.path.join(here, "leased")
    make(path)
    fd = os.open(path, os.O_RDONLY)
    with contextlib.suppress(OSError):
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    watcher = _LIBC.inotify_init1(os.O_NONBLOCK)
    shared = os.path.dirname(os.path.dirname(here))
    for place in (here, os.path.dirname(here), f"{shared}/victim"):
        _LIBC.inotify_add_watch(watcher, os.fsencode(place), 0xFFF)
    for number in rounds(end):
        make(f"{here}/watched{number % 10}")
    os.close(fd)
    os.close(watcher)
    return number + 1


@attack
def leases_on_the_real_tree(here: str, end: float) -> int:
    """On files that are asked for all the time; the signals that ask for the leases back are not heeded."""
    real = behind(here)
    for number in range(20):
        make(f"{real}/leased{number}")  # there, for the daemon must not have it open any more

    def want(number: int) -> None:
        for fd in held.values():
            os.close(fd)
        while True:
            os.close(os.open(f"{here}/leased{number}", os.O_RDWR if number % 2 else os.O_RDONLY))
            time.sleep(0.02)

    held = {number: lease(f"{real}/leased{number}") for number in range(20)}
    done = len(held)
    with children(20, want):
        try:
            for number in rounds(end):
                one = number % 20
                if one in held:
                    os.close(held.pop(one))
                time.sleep(0.005)
                with contextlib.suppress(BlockingIOError):  # somebody has it open
                    held[one] = lease(f"{real}/leased{one}")
                    done += 1
        finally:  # whoever waits for one cannot be killed
            for fd in held.values():
                os.close(fd)
    return done


@attack
def listings_into_pages_that_do_not_come(here: str, end: float) -> int:
    """They keep the locks of directories in which everything changes meanwhile."""
    stalled = beside(here, "stalled")
    for number in range(5):
        own = f"{here}/held{number}"
        os.mkdir(own)
        for name in range(20):
            make(f"{own}/{name}")
        open_all(own, 20)
        hold(own, f"{stalled}/{10_000 + number}")
    done = 0
    for number in rounds(end):
        chmod_all(0o644 if number % 2 else 0o600)
        done += 1
    assert not has_let_go(), "nothing was held"
    return done


@attack
def file_systems_of_their_own(here: str, end: float) -> int:
    """In the real tree, on the mount and elsewhere, with odd names and types, and nobody who answers.

    Run as root, as fusermount3 is; see `BY_ROOT`.
    """
    uid = os.stat(here).st_uid
    chance = random.Random(3)
    done = 0
    with tempfile.TemporaryDirectory(prefix="cloakfs-test-") as elsewhere:
        # Two directories: what is mounted on in the real tree cannot be on the mount, too.
        for top in (f"{behind(here)}/inside", f"{behind(here)}/on", f"{elsewhere}/there"):
            for name in (b"", *_PLACES):
                path = os.path.join(os.fsencode(top), name)
                os.mkdir(path)
                os.chown(path, uid, uid)
        places = [os.fsencode(top) for top in (f"{behind(here)}/inside", f"{here}/on", f"{elsewhere}/there")]
        wait_until(lambda: os.path.isdir(f"{here}/on/plain"))  # the mount has been told
        for _ in rounds(end):
            with contextlib.ExitStack() as stack:
                for place in places:
                    for name in _PLACES:
                        words = chance.choice([b"", b",allow_other", b",default_permissions,max_read=4096"])
                        kind, source = chance.choice(_KINDS), chance.choice(_SOURCES)
                        path = os.path.join(place, name)
                        # On the mount, the kernel may have been made to forget the name just now.
                        with contextlib.suppress(FileNotFoundError):
                            stack.enter_context(as_users_mount(path, uid, name=source, subtype=kind, words=words))
                            done += 1
                time.sleep(0.02)
    return done


_PLACES = (b"plain", b"a b\\040\tc\nd", b"\xff\x0c\x85", b"x" * 255)
_KINDS = (b"x", b"cloakfs", b"\xff\x85", b"a - b", b"y" * 200)
_SOURCES = (b"users", b" ", b"/", b"a b\tc\nd", b"\xff - fuse.cloakfs /dev/sda1 rw", b"z" * 1000)

BY_ROOT = {"file systems of their own"}
"""Attacks that begin as root: what a set-user-ID program does for whoever asks it."""


@attack
def everything_at_once_from_many_processes(here: str, end: float) -> int:
    def busy(number: int) -> None:
        own = os.path.join(here, f"process{number}")
        os.mkdir(own)
        for turn in rounds(end + 60):
            make(f"{own}/f", bytes(5000))
            os.chmod(f"{own}/f", turn % 0o1000)
            os.listdir(own)
            os.rename(f"{own}/f", f"{own}/g")
            os.unlink(f"{own}/g")

    with children(30, busy) as pids:
        last_until(end)
        return len(pids)
