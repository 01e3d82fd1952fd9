"""The process that forks commands: how they end, what they inherit, and what becomes of it."""

import os
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence

import pytest
import trio

from cloakfs.background.forkserver import ForkedResult, ForkServer
from tests.waiting import let_expire, wait_until

PROGRAM = """
import os, signal, sys, time
from cloakfs.background.forkserver import serve

def call():
    match sys.argv[1:]:
        case ["exit", status]:
            sys.exit(int(status))
        case ["say", text]:
            sys.exit(text)
        case ["pid"]:
            sys.stderr.write(str(os.getppid()))
        case ["fail"]:
            raise ValueError("wrong")
        case ["die"]:
            os.kill(os.getpid(), signal.SIGKILL)
        case ["write"]:
            os.write(max(map(int, os.listdir("/proc/self/fd"))), b"inherited")
        case ["child"]:
            sys.exit(os.waitstatus_to_exitcode(os.spawnlp(os.P_WAIT, "false", "false") << 8))
        case ["stay", file]:
            if os.fork() == 0:
                os.closerange(0, 20)
                while not os.path.exists(file):
                    time.sleep(0.01)
                os.unlink(file)
                os._exit(0)

serve(call, idle_seconds={idle})
"""

Run = Callable[..., Awaitable[ForkedResult]]


def forking(work: Callable[[ForkServer], Awaitable[None]], idle: float = 60) -> None:
    """Do the work with a fork server, and end it."""

    async def do() -> None:
        server = ForkServer([sys.executable, "-P", "-c", PROGRAM.replace("{idle}", str(idle))])
        try:
            await work(server)
        finally:
            server.close()

    trio.run(do)


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["exit", "0"], 0, ""),
        (["exit", "7"], 7, ""),
        (["say", "no such thing"], 1, "no such thing\n"),
        (["say", "x" * 100_000], 1, "x" * 100_000),  # more than a pipe, or a message, has room for
        (["fail"], 1, "ValueError: wrong\n"),
        (["nothing"], 0, ""),
        (["die"], None, ""),
        (["child"], 1, ""),  # it can wait for processes of its own
    ],
)
def test_a_command_ends_as_a_program_does(arguments: Sequence[str], status: int | None, said: str) -> None:
    async def work(server: ForkServer) -> None:
        for _ in range(2):
            result = await server.run(arguments)
            assert (result.status, result.said.removesuffix("\n")) == (status, said.removesuffix("\n"))

    forking(work)


def test_commands_at_the_same_time_have_one_parent() -> None:
    async def work(server: ForkServer) -> None:
        parents: set[str] = set()

        async def run() -> None:
            parents.add((await server.run(["pid"])).said)

        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(run)
        assert len(parents) == 1

    forking(work)


def test_what_stays_in_the_background_is_not_waited_for(tmp_path: os.PathLike[str]) -> None:
    file = os.path.join(tmp_path, "end")

    async def work(server: ForkServer) -> None:
        assert (await server.run(["stay", file])).status == 0

    forking(work)
    with open(file, "wb"):
        pass
    wait_until(lambda: not os.path.exists(file))  # also when the server has ended


def test_a_command_inherits_what_it_is_given() -> None:
    reader, writer = os.pipe()

    async def work(server: ForkServer) -> None:
        assert (await server.run(["write"], [writer])).status == 0

    forking(work)
    os.close(writer)
    with open(reader, "rb") as pipe:
        assert pipe.read() == b"inherited"


def test_a_server_that_was_killed_is_started_again() -> None:
    async def work(server: ForkServer) -> None:
        pids = set()
        for _ in range(3):
            pid = int((await server.run(["pid"])).said)
            pids.add(pid)
            os.kill(pid, signal.SIGKILL)
        assert len(pids) == 3

    forking(work)


def test_a_server_that_does_not_start_is_an_error_each_time() -> None:
    """While a package is being upgraded, for example."""

    async def work() -> None:
        server = ForkServer([sys.executable, "-P", "-c", "import no_such_module"])
        for _ in range(2):
            with pytest.raises(OSError, match="does not run"):
                await server.run(["exit", "0"])

    trio.run(work)


def test_a_request_that_a_killed_server_has_not_read_is_made_again() -> None:
    async def work(server: ForkServer) -> None:
        stopped = int((await server.run(["pid"])).said)
        os.kill(stopped, signal.SIGSTOP)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ends_well, server)
            await trio.testing.wait_all_tasks_blocked()
            os.kill(stopped, signal.SIGKILL)

    async def ends_well(server: ForkServer) -> None:
        assert (await server.run(["exit", "3"])).status == 3

    forking(work)


def test_a_server_that_is_idle_ends_and_is_started_again() -> None:
    async def work(server: ForkServer) -> None:
        before = int((await server.run(["pid"])).said)
        held = os.pidfd_open(before)
        try:
            with trio.fail_after(60):
                await trio.lowlevel.wait_readable(held)
        finally:
            os.close(held)
        assert int((await server.run(["pid"])).said) != before

    forking(work, idle=0.1)


def test_requests_to_a_server_that_is_about_to_end_are_not_lost() -> None:
    async def work(server: ForkServer) -> None:
        for number in range(50):
            assert (await server.run(["exit", str(number)])).status == number
            let_expire(0.001 * (number % 5))  # around the time that it waits

    forking(work, idle=0.002)


def test_a_server_that_is_idle_before_this_process_goes_on_runs_what_it_was_started_for() -> None:
    async def keep_busy() -> None:
        while True:
            let_expire(0.2)
            await trio.lowlevel.checkpoint()

    async def work(server: ForkServer) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(keep_busy)
            assert (await server.run(["exit", "3"])).status == 3
            nursery.cancel_scope.cancel()

    forking(work, idle=0.001)
