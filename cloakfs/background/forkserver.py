"""Runs a command many times without starting Python each time: a process that has imported all of it forks.

A daemon that starts like this takes milliseconds instead of half a second, and shares what was imported with the others
(multiprocessing's fork server would import the main module of the caller in each process, and needs two processes).
While there is nothing to run, there is no such process: what it has imported does not outlive an upgrade of the package
for long.
"""

import contextlib
import errno
import gc
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn

import trio

from ..linux import ownfiles, process

_MOST_FDS = 8

_RUN = b"R"  # a request, with descriptors: of its arguments, of two pipes, and of what the command inherits

# `ps` shows the command of each process in the place of this word, which is as long as most commands.
_ROOM = " " * 512


class ForkedResult(NamedTuple):
    """How a command has ended.

    Attributes:
        status: its exit status; None if it was killed.
        said: what it has written to standard error.
    """

    status: int | None
    said: str


class ForkServer:
    """Runs a command as a forked process, each time that it is called.

    Args:
        program: a program that imports the command, and calls `serve`.
    """

    def __init__(self, program: Sequence[str]) -> None:
        self._program = program
        self._requests: socket.socket | None = None
        self._starting = trio.Lock()

    async def run(self, arguments: Sequence[str], pass_fds: Sequence[int] = ()) -> ForkedResult:
        """Run the command; return when it has ended, whatever it has left running in the background.

        If the server was killed before it had forked, there is a new one.

        Args:
            arguments: its arguments.
            pass_fds: descriptors that it inherits, under other numbers.

        Raises:
            OSError: there can be no process.
        """
        result = await self._run(arguments, pass_fds)
        return await self._run(arguments, pass_fds) if result.status is None else result

    async def _run(self, arguments: Sequence[str], pass_fds: Sequence[int]) -> ForkedResult:
        status, their_status = os.pipe()
        said, their_said = os.pipe()
        ended, text = bytearray(), bytearray()
        async with trio.lowlevel.FdStream(status) as status_stream, trio.lowlevel.FdStream(said) as said_stream:
            try:
                await self._request(arguments, [their_status, their_said, *pass_fds])
            finally:
                os.close(their_status)
                os.close(their_said)
            async with trio.open_nursery() as nursery:  # the command waits while a pipe is full
                nursery.start_soon(_read_all, status_stream, ended)
                nursery.start_soon(_read_all, said_stream, text)
        return ForkedResult(int(ended) if ended else None, text.decode("utf-8", "replace"))

    async def _request(self, arguments: Sequence[str], fds: list[int]) -> None:
        text = _text(json.dumps(arguments).encode())
        try:
            await self._send([text, *fds])
        finally:
            os.close(text)

    async def _send(self, fds: list[int]) -> None:
        async with self._starting:
            if self._requests is not None:
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it was idle, or was killed
                    socket.send_fds(self._requests, [_RUN], fds)
                    return
                self._requests.close()
            self._requests, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
            with theirs:
                # Before the server is started: it may be idle, and end, before this process runs again.
                socket.send_fds(self._requests, [_RUN], fds)
                # It goes on as an orphan, and nobody has to wait for its end.
                started = await trio.run_process(  # noqa: TID251  (whoever starts daemons acts for no caller)
                    [*self._program, _ROOM],
                    stdin=theirs,
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,
                    check=False,
                )
            if started.returncode:
                self.close()
                raise ChildProcessError(errno.ECHILD, "the process that starts daemons does not run (see the log)")

    def close(self) -> None:
        """End the server; commands that run go on."""
        if self._requests is not None:
            self._requests.close()
            self._requests = None


async def _read_all(stream: trio.lowlevel.FdStream, text: bytearray) -> None:
    async for part in stream:
        text += part


def _text(text: bytes) -> int:
    """Return a descriptor from which a text of any length can be read."""
    fd = os.memfd_create("arguments")
    with ownfiles.open(os.dup(fd), "wb") as file:
        file.write(text)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def serve(call: Callable[[], object], idle_seconds: float = 10.0) -> None:
    """As the program of a `ForkServer`: fork for each command, until there is none for a while.

    Args:
        call: runs a command with the arguments in `sys.argv`; ends as a program does.
        idle_seconds: how long a while is.
    """
    if os.fork():
        os._exit(0)
    with socket.socket(fileno=os.dup(0)) as requests:
        os.dup2(1, 0)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the processes
        gc.collect()
        gc.freeze()  # a collection would write to the memory that is shared
        requests.settimeout(idle_seconds)
        while True:
            try:
                request, fds, _, _ = socket.recv_fds(requests, len(_RUN), _MOST_FDS)
            except TimeoutError:
                # From here on, nothing can be sent; what has been sent until now is still received.
                requests.shutdown(socket.SHUT_RD)
                continue
            if not request:
                return
            if os.fork() == 0:
                requests.close()
                _run(call, *fds)
            for fd in fds:
                os.close(fd)


def _run(call: Callable[[], object], text: int, status: int, said: int, *_inherited: int) -> NoReturn:
    with ownfiles.open(text, "rb") as file:
        arguments = json.load(file)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.dup2(said, 2)
    os.close(said)
    sys.argv[1:] = arguments
    ended = 1
    try:
        process.call_this_process("cloakfs", *arguments)
        call()
        ended = 0
    except SystemExit as end:
        ended = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            ownfiles.write(2, f"{end.code}\n".encode())
    except BaseException as exc:  # the process ends here, and nobody else would say why
        ownfiles.write(2, f"{type(exc).__name__}: {exc}\n".encode())
    finally:
        sys.stderr.flush()
        ownfiles.write(status, str(ended).encode())
        os._exit(ended)
