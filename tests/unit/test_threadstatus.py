"""What is read of a caller: not more than is needed, and of the process only where the thread is another one."""

import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cloakfs.accounts.threadstatus import ThreadStatus
from cloakfs.linux import FILE_CAPABILITIES, effective_capabilities, ownfiles, process


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The system calls that were made: their names, in order."""
    made: list[str] = []

    def counted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def count(*args: Any, **kwargs: Any) -> Any:
            made.append(name)
            return call(*args, **kwargs)

        return count

    for name in ("open_fd", "pread", "readlink"):
        monkeypatch.setattr(ownfiles, name, counted(name, getattr(ownfiles, name)))
    monkeypatch.setattr(os, "close", counted("close", os.close))
    return made


@pytest.fixture
def other_thread() -> Iterator[int]:
    """The id of a thread that is not the first one of this process."""
    ids: list[int] = []
    started, ends = threading.Event(), threading.Event()

    def run() -> None:
        ids.append(threading.get_native_id())
        started.set()
        ends.wait(60)

    thread = threading.Thread(target=run)
    thread.start()
    started.wait()
    yield ids[0]
    ends.set()
    thread.join()


def test_the_groups_of_an_ordinary_caller_take_one_call(called: list[str]) -> None:
    status = ThreadStatus()
    expected = frozenset(os.getgroups())
    called.clear()
    assert status.groups(os.getpid()) == expected
    assert called == ["open_fd", "pread"]
    called.clear()
    assert status.groups(os.getpid()) == expected
    assert called == ["pread"]


def test_of_another_thread_the_process_is_read_only_if_the_thread_has_groups(
    called: list[str], other_thread: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = ThreadStatus()
    status.groups(other_thread)
    status.groups(os.getpid())
    for has, calls in ((b"", 1), (b"7 8", 2)):

        def groups_in(fd: int, has: bytes = has) -> tuple[bytes, int]:
            ownfiles.pread(fd, 1, 0)
            return has, os.getpid()

        monkeypatch.setattr(process, "groups_in", groups_in)
        called.clear()
        assert status.groups(other_thread) == frozenset(map(int, has.split()))
        assert called == ["pread"] * calls


def test_only_threads_of_daemons_above_have_groups_that_their_process_has_not(
    other_thread: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = ThreadStatus()
    pid = os.getpid()
    of = {other_thread: (b"7 8", pid), pid: (b"8 9", pid)}
    monkeypatch.setattr(status, "_read", lambda read, tid: of[tid])
    assert status.groups(other_thread) == {8}
    status.daemons = {pid}
    assert status.groups(other_thread) == {7, 8}


def test_capabilities_are_those_of_thread_and_process(other_thread: int, monkeypatch: pytest.MonkeyPatch) -> None:
    status = ThreadStatus()
    assert status.lacks(os.getpid()) == FILE_CAPABILITIES & ~effective_capabilities()
    pid = os.getpid()
    of = {other_thread: (0b110, pid), pid: (0b011, pid)}
    monkeypatch.setattr(status, "_read", lambda read, tid: of[tid])
    assert status.lacks(other_thread, 0b111) == 0b101
    status.daemons = {pid}
    assert status.lacks(other_thread, 0b111) == 0b001
    monkeypatch.setattr(process, "is_in_our_user_namespace", lambda tid: False)
    assert status.lacks(other_thread, 0b111) == 0b111


def test_who_cannot_be_seen_has_nothing_and_that_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    status = ThreadStatus()
    assert not status.has_unseen
    for _ in range(3):
        assert status.groups(0) == frozenset()
        assert status.lacks(0) == FILE_CAPABILITIES
    assert status.has_unseen
    assert len(caplog.records) == 1


def test_a_proc_of_others_says_nothing(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(process, "is_proc_ours", lambda: False)
    status = ThreadStatus()
    assert status.has_unseen
    assert status.groups(os.getpid()) == frozenset()
    assert status.lacks(os.getpid()) == FILE_CAPABILITIES
    assert len(caplog.records) == 1
    assert status.is_unseen(os.getpid())


def test_a_caller_that_has_ended_has_nothing() -> None:
    status = ThreadStatus()
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    assert status.groups(pid) == frozenset()
    assert status.lacks(pid) == FILE_CAPABILITIES
