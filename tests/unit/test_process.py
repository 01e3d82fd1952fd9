"""Other processes: what identifies them, and waiting for their end."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from cloakfs.linux import process
from cloakfs.nfs.ending import end, wait_for_end

FOREVER = ("sleep", "60")
STUBBORN = ("sh", "-c", "trap '' TERM; echo ready; while :; do sleep 1; done")


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(FOREVER) as child:
        yield child
        child.kill()


@pytest.fixture
def none() -> int:
    """The number of a process that has ended."""
    with subprocess.Popen(["true"]) as child:
        pass
    return child.pid


def test_the_end_is_waited_for(other: subprocess.Popen[bytes]) -> None:
    held = process.held(other.pid)
    assert held is not None
    assert not process.ends(held, 0)
    assert not process.ends(held, 0.05)
    other.kill()
    assert process.ends(held)
    other.wait()
    assert process.ends(held, 0)
    os.close(held)


def test_nobody_is_held(none: int) -> None:
    assert process.held(none) is None
    assert process.held(0) is None


def test_who_cannot_be_held_is_not_taken_for_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_pid: int) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "pidfd_open", fail)
    with pytest.raises(OSError, match="Too many open files"):
        process.held(os.getpid())
    with pytest.raises(OSError, match="Too many open files"):
        trio.run(wait_for_end, os.getpid())


def test_when_it_began(other: subprocess.Popen[bytes], none: int) -> None:
    began = process.start_time(other.pid)
    assert began is not None
    assert 0 <= time.clock_gettime(time.CLOCK_BOOTTIME) - began / os.sysconf("SC_CLK_TCK") < 60
    assert process.start_time(other.pid) == began
    other.kill()
    os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
    assert process.start_time(other.pid) is None  # though nobody has waited for it yet
    assert process.start_time(none) is None


def test_a_name_cannot_shift_the_time(tmp_path: Path) -> None:
    program = tmp_path / "a) Z (1"
    program.symlink_to("/bin/sleep")
    with subprocess.Popen([program, "60"]) as child:
        assert process.start_time(child.pid) is not None
        child.kill()


def test_the_end_of_nobody_has_come(none: int) -> None:
    trio.run(wait_for_end, none)
    trio.run(wait_for_end, 0)
    trio.run(end, none, [(signal.SIGTERM, 60)])


def test_others_go_on_while_one_waits(other: subprocess.Popen[bytes]) -> None:
    async def both() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait_for_end, other.pid)
            await wait_all_tasks_blocked(0.05)
            assert nursery.child_tasks
            other.kill()

    trio.run(both)


def test_the_first_signal_may_do(other: subprocess.Popen[bytes]) -> None:
    trio.run(end, other.pid, [(signal.SIGTERM, 60), (signal.SIGKILL, 60)])
    assert other.wait() == -signal.SIGTERM


def test_who_does_not_listen_is_ended_all_the_same() -> None:
    with subprocess.Popen(STUBBORN, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        trio.run(end, child.pid, [(0, 0.05), (signal.SIGTERM, 0.05), (signal.SIGKILL, 60)])
        assert child.wait() == -signal.SIGKILL


# As in a container without CAP_SYS_PTRACE (19), where /proc shows nobody the processes of others.
HIDDEN = """
import sys
from cloakfs import linux
from cloakfs.identity import ServerId
from cloakfs.linux import process

linux.mount("proc", "/proc", "proc", 0, "hidepid=2")
pid = int(sys.argv[1])
threads = process.open_threads(pid)
linux.set_effective_capabilities(linux.effective_capabilities() & ~(1 << 19))
linux.credentials.assume(linux.Credentials(ServerId(3001), ServerId(3001), ()))
print(process.has_thread(threads, pid))
"""


def test_a_thread_is_found_whoever_was_served_last() -> None:
    words = ["unshare", "--mount", "--propagation", "private", sys.executable, "-c", HIDDEN, str(os.getpid())]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "True\n"
