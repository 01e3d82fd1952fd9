"""The kernel's cache is invalidated whatever locks users hold, and in an order that leaves nothing outdated.

`test_caching.py` tests what is cached, and each way in which it can become untrue.
"""

import contextlib
import ctypes
import errno
import math
import mmap
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.agents import User, read
from tests.mount import alterations, conftest
from tests.mount.conftest import Mount, daemons_with, told
from tests.mount.test_caching import CLOAKED, OTHER, OWNER, STRANGER, put
from tests.mount.test_hung import Far
from tests.waiting import wait_until

MakeMount = Callable[..., Mount]
MakeUser = Callable[..., User]

FILES = 600
SECONDS = 60.0
"""By far more than anything here takes, and less than for ever."""

_libc = ctypes.CDLL(None, use_errno=True)
_kept: list[object] = []


# -- locks that users hold -------------------------------------------------------------------------


def hold(directory: str, page: str) -> None:
    """Keep a directory's lock in the kernel: getdents64(2) into a page that its own file system does not deliver."""
    file = os.open(page, os.O_RDWR)
    memory = mmap.mmap(file, mmap.PAGESIZE)
    listed = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    buffer = ctypes.c_char.from_buffer(memory)
    _kept.extend((memory, buffer))

    def wait() -> None:
        number = {"x86_64": 217, "aarch64": 61}[os.uname().machine]
        _libc.syscall(ctypes.c_long(number), ctypes.c_long(listed), ctypes.byref(buffer), ctypes.c_long(mmap.PAGESIZE))
        _kept.append("let go")

    threading.Thread(target=wait, daemon=True).start()


def has_let_go() -> bool:
    return "let go" in _kept


def open_all(directory: str, count: int) -> None:
    """Look at all, so that they are cached, and be able to change each without its directory."""
    for number in range(count):
        os.stat(f"{directory}/{number}")
        _kept.append(os.open(f"{directory}/{number}", os.O_RDONLY))


def chmod_all(mode: int) -> None:
    """Several at a time: what waits for one must not have others wait."""
    with ThreadPoolExecutor(50) as pool:
        list(pool.map(lambda fd: os.fchmod(fd, mode), [fd for fd in _kept if isinstance(fd, int)]))


def work(near: str) -> None:
    for number in range(20):
        with open(f"{near}/{number}", "wb") as file:
            file.write(b"content")
        os.chmod(f"{near}/{number}", 0o600)
        assert read(f"{near}/{number}") == b"content"
    assert len(os.listdir(near)) == 20
    for number in range(20):
        os.unlink(f"{near}/{number}")


@pytest.fixture
def stalled(base: str) -> Iterator[Far]:
    """A file system of which pages are not delivered."""
    place = Far(os.path.join(base, "stalled"), base)
    yield place
    place.close()


@pytest.fixture(params=["", "before Linux 6.16"])
def kernel(request: pytest.FixtureRequest) -> Iterator[str]:
    with daemons_with(alterations.be_before_linux_6_16) if request.param else contextlib.nullcontext():
        yield str(request.param)


def test_a_directory_whose_lock_is_held(
    kernel: str, mount: MakeMount, user: MakeUser, tree: str, base: str, stalled: Far
) -> None:
    """Only who needs this very directory has to wait; and its owner can take away what others were told."""
    held = put(os.path.join(tree, "held"), OWNER, stat.S_IFDIR | 0o755)
    near = put(os.path.join(tree, "near"), OTHER, stat.S_IFDIR | 0o755)
    put(os.path.join(near, "public"), OTHER, 0o644)
    os.mkdir(os.path.join(tree, "scratch"))
    os.chmod(os.path.join(tree, "scratch"), 0o777)
    for number in range(FILES):
        put(os.path.join(held, str(number)), OWNER, 0o644)
    told()
    m = mount("-o", CLOAKED)
    attacker, other, stranger, waiting = user(OWNER), user(OTHER), user(STRANGER), user(STRANGER)
    attacker.do(open_all, m.at("held"), FILES)
    for path in ("held/5", "near/public"):
        for one in (stranger, waiting):
            one.do(os.stat, m.at(path))
    attacker.do(hold, m.at("held"), os.path.join(stalled.path, "10000"))
    wait_until(lambda: os.path.exists(os.path.join(base, "flag.asked")), SECONDS)
    attacker.start(chmod_all, 0o600)
    for _ in range(5):
        other.do_within(SECONDS, work, m.at("scratch"))
    assert attacker.finish_within(SECONDS)
    waiting.start(os.stat, m.at("held/5"))
    other.do_within(SECONDS, work, m.at("scratch"))
    # What is taken away elsewhere is gone at once.
    other.do_within(SECONDS, os.chmod, m.at("near/public"), 0o600)
    assert stranger.error(os.stat, m.at("near/public")) == errno.ENOENT
    other.do_within(SECONDS, os.chmod, m.at("near"), 0o700)
    assert stranger.error(os.stat, m.at("near")) == errno.ENOENT
    assert not attacker.do(has_let_go), "nothing was held"
    Path(base, "flag").touch()
    wait_until(lambda: attacker.do(has_let_go), SECONDS)
    assert not waiting.finish_within(SECONDS), "it is visible after it was hidden"
    for number in range(0, FILES, 50):
        assert stranger.error(os.stat, m.at(f"held/{number}")) == errno.ENOENT
    assert bool(kernel) <= ("cannot invalidate all names at once" in m.log)


# -- answers that arrive late ----------------------------------------------------------------------


def open_on(processor: int, path: str) -> None:
    os.sched_setaffinity(0, {processor})
    _kept.append(os.open(path, os.O_PATH))


def waits_for(one: User) -> bytes:
    return Path(f"/proc/{one.pid}/wchan").read_bytes()


def tells_what_it_waits_for(idle: User) -> bool:
    with contextlib.suppress(AssertionError):
        wait_until(lambda: waits_for(idle) != b"0", 2)
        return True
    return False


def size_of_opened() -> int:
    (fd,) = (fd for fd in _kept if isinstance(fd, int))
    return os.fstat(fd).st_size


_OCCUPY = """
import os, sys, time
os.sched_setaffinity(0, {int(sys.argv[1])})
os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
print("occupied", flush=True)
until = time.monotonic() + 0.6
while time.monotonic() < until:
    pass
"""


def test_an_answer_that_arrives_after_the_change(mount: MakeMount, user: MakeUser, tree: str, base: str) -> None:
    """Nothing outdated is cached: the name is invalidated, which waits for the answer, and then the attributes."""
    processors = sorted(os.sched_getaffinity(0))
    if len(processors) < 2:
        pytest.skip("needs two processors, one of which is kept from who waits for an answer")
    directory = put(os.path.join(tree, "open"), OWNER, stat.S_IFDIR | 0o755)
    real = put(os.path.join(directory, "file"), OWNER, 0o644)
    m = mount("-o", CLOAKED)
    stranger = user(STRANGER)
    told()
    stranger.do(os.stat, m.at("open"))
    if not tells_what_it_waits_for(stranger):
        pytest.skip("needs /proc/PID/wchan")
    os.sched_setaffinity(m.pid, set(processors[:-1]))
    os.kill(m.pid, signal.SIGSTOP)
    stranger.start(open_on, processors[-1], m.at("open/file"))
    try:
        wait_until(lambda: waits_for(stranger).startswith(b"request_wait"))
        arguments = [sys.executable, "-c", _OCCUPY, str(processors[-1])]
        with subprocess.Popen(arguments, stdout=subprocess.PIPE) as occupied:
            assert occupied.stdout is not None
            if occupied.stdout.readline() != b"occupied\n":
                pytest.skip("needs the right to SCHED_FIFO")
            os.kill(m.pid, signal.SIGCONT)
            os.statvfs(m.path)  # requests are answered in their order
            os.truncate(real, 3)
    finally:
        os.kill(m.pid, signal.SIGCONT)
    assert stranger.finish_within(SECONDS)
    wait_until(lambda: stranger.do(size_of_opened) == 3)


# -- much to invalidate --------------------------------------------------------------------------------

MANY = 20_000


def must_be_served(path: str, begun: str, ended: str) -> None:
    """Ask until there is a file `ended`, and be answered while there is only `begun`."""
    answered = 0
    while not os.path.exists(ended):
        is_meanwhile = os.path.exists(begun)
        for _ in range(10):
            os.path.exists(path)
            answered += is_meanwhile
    assert answered >= 30, f"{answered} answers"


@pytest.mark.timeout(300)
def test_invalidating_much_leaves_time_for_others(mount: MakeMount, user: MakeUser, tree: str, base: str) -> None:
    """A large directory, all of which is cached, is taken from the others."""
    os.chmod(tree, 0o755)
    taken = put(os.path.join(tree, "taken"), 0, stat.S_IFDIR | 0o755)
    here = os.open(taken, os.O_RDONLY | os.O_DIRECTORY)
    for number in range(MANY):
        os.mknod(f"{number}", 0o644, dir_fd=here)
    os.close(here)
    put(os.path.join(taken, "file"), OWNER, 0o644)
    os.chown(taken, OWNER, OWNER)
    told()
    m = mount("-o", CLOAKED)
    owner, other, stranger = user(OWNER), user(OTHER), user(STRANGER)
    assert len(other.do(os.listdir, m.at("taken"))) == MANY + 1
    fd = stranger.do(os.open, m.at("taken/file"), os.O_PATH)
    assert stranger.do(os.stat, m.at("taken/file")).st_size == 7
    begun, ended = Path(base, "begun"), Path(base, "ended")
    other.start(must_be_served, m.at("absent"), str(begun), str(ended))
    begun.touch()
    owner.do_within(SECONDS, os.chmod, m.at("taken"), 0o700)
    ended.touch()
    assert stranger.error(os.stat, m.at("taken/file")) == errno.ENOENT
    assert stranger.error(os.stat, f"/proc/self/fd/{fd}") == errno.ESTALE
    assert other.finish_within(SECONDS), "no other caller was served meanwhile"


# -- the end of a daemon ---------------------------------------------------------------------------


def error_in_the_end(fd: int) -> int:
    try:
        wait_until(lambda: os.fsync(fd), math.inf)
    except OSError as exc:
        return exc.errno or -1
    return 0


@pytest.mark.parametrize("how", ["SIGKILL", "SIGTERM"])
def test_a_daemon_ends_although_a_thread_of_it_waits_for_a_lock(
    how: str, mount: MakeMount, user: MakeUser, tree: str, base: str, stalled: Far
) -> None:
    """Nothing gets that thread out of the kernel: its descriptor of the session must make no request wait."""
    held = put(os.path.join(tree, "held"), OWNER, stat.S_IFDIR | 0o755)
    for number in range(5):
        put(os.path.join(held, str(number)), OWNER, 0o644)
    put(os.path.join(tree, "file"), OTHER, 0o600)
    told()
    m = mount("-o", CLOAKED)
    attacker, other = user(OWNER), user(OTHER)
    attacker.do(open_all, m.at("held"), 5)
    fd = other.do(os.open, m.at("file"), os.O_RDWR)
    attacker.do(hold, m.at("held"), os.path.join(stalled.path, "10000"))
    wait_until(lambda: os.path.exists(os.path.join(base, "flag.asked")), SECONDS)
    try:
        attacker.start(chmod_all, 0o600)
        assert attacker.finish_within(SECONDS)
        pid, reaper = m.pid, m.reaper
        if how == "SIGKILL":
            os.kill(pid, signal.SIGKILL)
        else:
            os.kill(pid, signal.SIGTERM)
            wait_until(lambda: "asked to stop" in m.log, SECONDS)
            os.kill(pid, signal.SIGTERM)
        other.start(error_in_the_end, fd)
        assert other.answer_within(SECONDS) in {errno.ENOTCONN, errno.ECONNABORTED}
        wait_until(lambda: not conftest.is_mounted(m.path))
        assert os.path.exists(f"/proc/{pid}"), "no thread was waiting"
        assert not attacker.do(has_let_go), "nothing was held"
    finally:
        Path(base, "flag").touch()
    wait_until(lambda: not os.path.exists(f"/proc/{pid}"), SECONDS)
    wait_until(lambda: not os.path.exists(f"/proc/{reaper}"), SECONDS)
