"""Fixtures: real mounts, and users who look through them."""

import contextlib
import glob
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from cloakfs.kernelcache.sharedwatch import watcher_path
from cloakfs.kernelcache.watcherprocess import NAME as WATCHER
from cloakfs.linux import mountinfo
from cloakfs.linux.process import command_of
from cloakfs.mount.reaperprocess import NAME
from cloakfs.state.runtime import RUN_DIR, STATE_DIR, mount_key
from cloakfs.tree.index import Index
from cloakfs.tree.nodes import Nodes
from cloakfs.tuning import STANDARD, Tuning
from tests import starter
from tests.agents import User
from tests.altered import Alteration, command_with
from tests.processes import kill
from tests.waiting import wait_until

COMMAND = (sys.executable, "-m", "cloakfs_cli.main")
alterations_now: tuple[Alteration, ...] = ()
tuning_now = STANDARD
_PID = os.getpid()
_PYTHONPATH = os.environ.get("PYTHONPATH")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = os.path.dirname(__file__)
    reason = None
    if os.geteuid() != 0:
        reason = "needs root: it mounts, and looks as several real uids"
    elif not os.path.exists("/dev/fuse"):
        reason = "needs /dev/fuse (modprobe fuse)"
    for item in items:
        if reason and str(item.path).startswith(here):
            item.add_marker(pytest.mark.skip(reason=reason))


@dataclass
class Mount:
    """One mount: `source` is the real tree, `path` the mount point, `log` what the daemon said."""

    source: str
    path: str
    expect_errors: bool = False

    @property
    def key(self) -> str:
        return mount_key(self.source, self.path)

    @property
    def pid(self) -> int:
        with open(os.path.join(RUN_DIR, f"{self.key}.json"), encoding="utf-8") as file:
            return int(json.load(file)["pid"])

    @property
    def log(self) -> str:
        with open(os.path.join(RUN_DIR, f"{self.key}.log"), encoding="utf-8") as file:
            return file.read()

    @property
    def reaper(self) -> int:
        """The pid of the reaper; 0 if there is none."""
        called = [NAME.encode(), os.fsencode(self.path), b"%d" % self.pid]
        for words in glob.glob("/proc/[0-9]*/cmdline"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if Path(words).read_bytes().split(b"\0")[:3] == called:
                    return int(words.split("/")[2])
        return 0

    def without_reaper(self) -> int:
        """End the reaper, so that the mount stays when its daemon is killed; return the pid of the daemon."""
        reaper = self.reaper
        assert reaper, "there is no reaper"
        kill(reaper)
        return self.pid

    def at(self, *names: str) -> str:
        return os.path.join(self.path, *names)

    def real(self, *names: str) -> str:
        return os.path.join(self.source, *names)


AT_ONCE_OR_NEVER = Tuning(housekeeping_seconds=1000.0, stop_seconds=1000.0)
"""Of a daemon that ends only by the event that should end it: no housekeeping in time, and no limit to its patience."""

FIGURES_AT_ONCE = Tuning(housekeeping_seconds=0.05, notify_patience_seconds=1000.0)


@contextlib.contextmanager
def daemons_with(*alterations: Alteration, tuning: Tuning | None = None) -> Iterator[None]:
    """Alter commands that are run within a with block, and daemons that they start; None: times stay as they are."""
    tuning = tuning or tuning_now
    with pytest.MonkeyPatch.context() as patched:
        here = sys.modules[__name__]
        patched.setattr(here, "COMMAND", command_with(*alterations, tuning=tuning))
        patched.setattr(here, "alterations_now", alterations)
        patched.setattr(here, "tuning_now", tuning)
        yield


@pytest.fixture
def at_once_or_never() -> Iterator[None]:
    """Make daemons that are started from now on end by the event that should end them, however long that takes here."""
    with daemons_with(tuning=AT_ONCE_OR_NEVER):
        yield


@pytest.fixture
def figures_at_once() -> Iterator[None]:
    """Make daemons that are started from now on publish their counts every 0.05 s instead of every 5 s.

    What they count is then requested because of the test, and not because of the machine: a daemon whose threads get no
    processor for half a second would make the kernel request everything anew, as if another process held a lock.
    """
    with daemons_with(tuning=FIGURES_AT_ONCE):
        yield


def publish_at_once() -> bool:
    """Whether daemons that are started now publish their counts at once (`figures_at_once`)."""
    return tuning_now.housekeeping_seconds <= FIGURES_AT_ONCE.housekeeping_seconds


def told(mount: str | None = None) -> None:
    """Wait until the daemons know of a change behind their mounts, and attributes cached for 2 ms have expired.

    In an idle daemon it takes 5 ms at most, but the machine may have other things to do. So this waits until all
    daemons were asleep at ten looks in a row: one that has an event and does not get to run is not asleep.
    With a `mount`, the time passes only as its daemon gets to run: it answers a request now and then.
    """
    end = time.monotonic() + 5
    daemons = _daemons()
    asleep = 0
    while asleep < 10 and time.monotonic() < end:
        if mount is not None:
            os.statvfs(mount)  # before the pause, because the daemon is still awake for a moment
        time.sleep(0.005)
        asleep = 0 if any(map(_has_work, daemons)) else asleep + 1


def _daemons() -> list[int]:
    pids = []
    for state in glob.glob(os.path.join(RUN_DIR, "*.json")):
        with contextlib.suppress(OSError, ValueError), open(state, encoding="utf-8") as file:
            pids.append(int(json.load(file)["pid"]))
    return [*pids, *watchers()]


def watchers() -> list[int]:
    """Return the processes that read what is changed, for several mounts: other suites may have theirs."""
    pids = (int(pid) for pid in os.listdir("/proc") if pid.isdigit())
    here = namespace_of(os.getpid())
    return [pid for pid in pids if command_of(pid) == WATCHER and namespace_of(pid) == here and _listens(pid)]


def _listens(pid: int) -> bool:
    """Whether a watcher is that of the mounts here, and not one that a test has started elsewhere."""
    with contextlib.suppress(OSError):
        return watcher_path(RUN_DIR).encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def namespace_of(pid: int) -> str:
    """Return which mount namespace a process is in; "" if it has ended."""
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{pid}/ns/mnt")
    return ""


def _has_work(pid: int) -> bool:
    """Whether a thread of this process runs, or would if it got a processor (proc(5))."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                stat = Path(f"/proc/{pid}/task/{thread}/stat").read_bytes()
                if stat.rpartition(b")")[2].split()[0] in (b"R", b"D"):
                    return True
    return False


def unmount(path: str) -> None:
    """Run umount(8), again if it finds the mount busy: a daemon or a reaper may look at it just then."""

    def is_unmounted() -> bool:
        done = subprocess.run(["umount", path], check=False, capture_output=True, text=True)
        assert not done.returncode or "busy" in done.stderr, done.stderr
        return not done.returncode

    wait_until(is_unmounted, every=0.02)


def run(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run the real command, in a process that has already imported it.

    It is started anew if a module is to be found elsewhere, or if another process than the suite's calls it: then it
    is to have the ids and the limits of this one.
    """
    if os.environ.get("PYTHONPATH") != _PYTHONPATH or os.getpid() != _PID:
        done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, check=False, timeout=60)
    else:
        done = starter.run(*arguments, alterations=alterations_now, tuning=tuning_now, timeout=60)
    return _checked(done, check, *arguments)


def _checked(done: subprocess.CompletedProcess[str], check: bool, *arguments: str) -> subprocess.CompletedProcess[str]:
    if check and done.returncode:
        _, _, log = done.stderr.strip().partition("; see ")
        said = Path(log).read_text() if os.path.isfile(log) else ""
        raise AssertionError(f"cloakfs {' '.join(arguments)}: exit {done.returncode}: {done.stderr}{said}")
    return done


def is_mounted(path: str) -> bool:
    return path in mountinfo.by_path()


@contextlib.contextmanager
def mounted(source: str, path: str, *arguments: str) -> Iterator[Mount]:
    """Mount for the duration of a with block; the daemon must end cleanly, and must not have logged an error."""
    mount = Mount(source, path)
    try:
        run("mount", source, path, *arguments)
        yield mount
    finally:  # also if the mount is interrupted
        # A process that was just ended may still have a file open.
        with contextlib.suppress(AssertionError):
            wait_until(lambda: not is_mounted(path) or not run("umount", path, check=False).returncode, every=0.05)
        if is_mounted(path):
            run("umount", "--lazy", path)
            raise AssertionError(f"{path} was still in use")
    said = mount.log
    if not mount.expect_errors:
        assert "ERROR" not in said, said
        assert "Traceback" not in said, said


@pytest.fixture
def base() -> Iterator[str]:
    """A directory that every user may enter (pytest's own directories admit only root)."""
    path = tempfile.mkdtemp(prefix="cloakfs-test-")
    os.chmod(path, 0o755)
    yield path
    shutil.rmtree(path)
    # Names of states and logs contain the mount point's.
    for left in glob.glob(f"{STATE_DIR}/*{os.path.basename(path)}*"):
        shutil.rmtree(left)
    for left in glob.glob(f"{RUN_DIR}/**/*{os.path.basename(path)}*", recursive=True):
        with contextlib.suppress(FileNotFoundError):  # the daemon may just be ending
            os.unlink(left)


@pytest.fixture
def tree(base: str) -> str:
    """The root of a real tree that all users may write to."""
    path = os.path.join(base, "real")
    os.mkdir(path)
    os.chmod(path, 0o777)
    return path


@pytest.fixture
def index(base: str) -> Iterator[Index]:
    """An index on disk."""
    with contextlib.closing(Index(os.path.join(base, "nodes.sqlite"))) as made:
        yield made


@pytest.fixture
def nodes(tree: str, index: Index) -> Iterator[Nodes]:
    """The objects of `tree`, without a mount."""
    with contextlib.closing(Nodes(tree, index)) as made:
        yield made


@pytest.fixture
def mount(base: str, tree: str) -> Iterator[Callable[..., Mount]]:
    """Makes mounts of `tree`: mount("-o", "range_map=…")."""
    with contextlib.ExitStack() as stack:
        count = 0

        def make(*arguments: str, source: str = tree) -> Mount:
            nonlocal count
            count += 1
            path = os.path.join(base, f"mnt{count}")
            os.mkdir(path)
            stack.callback(_forget_state, Mount(source, path))  # after the daemon ended
            return stack.enter_context(mounted(source, path, *arguments))

        yield make


def _forget_state(mount: Mount) -> None:
    shutil.rmtree(os.path.join(STATE_DIR, mount.key), ignore_errors=True)


@pytest.fixture
def user() -> Iterator[Callable[..., User]]:
    """Makes users: user(uid, gid, groups)."""
    with contextlib.ExitStack() as stack:

        def make(uid: int, gid: int | None = None, groups: Iterable[int] = ()) -> User:
            made = User(uid, gid, groups)
            stack.callback(made.close)
            return made

        yield make
