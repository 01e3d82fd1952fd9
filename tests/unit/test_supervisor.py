"""What systemd is told, by messages on a socket of our own."""

import os
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cloakfs.background.systemd import Supervisor


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as heard:
        heard.bind(str(tmp_path / "notify"))
        heard.settimeout(10)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        yield heard


@pytest.fixture
def supervisor(manager: socket.socket) -> Iterator[Supervisor]:
    it = Supervisor(listens=True)
    yield it
    it.close()


def test_it_says_each_state_in_a_message(manager: socket.socket, supervisor: Supervisor) -> None:
    supervisor.ready("serving /srv/ö\nREADY=0")
    assert manager.recv(1000) == b"READY=1\nSTATUS=serving /srv/??READY=0"
    supervisor.alive()
    assert manager.recv(1000) == b"WATCHDOG=1"
    before = time.monotonic_ns() // 1000
    supervisor.reloading()
    said = re.fullmatch(rb"RELOADING=1\nMONOTONIC_USEC=(\d+)", manager.recv(1000))
    assert said
    assert before <= int(said[1]) <= time.monotonic_ns() // 1000
    supervisor.stopping()
    assert manager.recv(1000) == b"STOPPING=1"


def test_a_manager_that_reads_nothing_keeps_nobody_waiting(supervisor: Supervisor) -> None:
    for _ in range(10_000):
        supervisor.alive()


def test_the_watchdog_is_for_the_process_that_is_named(supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WATCHDOG_USEC", raising=False)
    assert supervisor.watchdog_seconds is None
    monkeypatch.setenv("WATCHDOG_USEC", "3000000")
    assert supervisor.watchdog_seconds == 1.5
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))
    assert supervisor.watchdog_seconds == 1.5
    monkeypatch.setenv("WATCHDOG_PID", "1")
    assert supervisor.watchdog_seconds is None
    monkeypatch.delenv("WATCHDOG_PID")
    for wrong in ("0", "-1", "soon", ""):
        monkeypatch.setenv("WATCHDOG_USEC", wrong)
        assert supervisor.watchdog_seconds is None


def test_without_a_manager_nothing_is_said(monkeypatch: pytest.MonkeyPatch, manager: socket.socket) -> None:
    manager.setblocking(False)
    monkeypatch.setenv("WATCHDOG_USEC", "3000000")
    silent = Supervisor(listens=False)
    silent.ready("")
    assert silent.watchdog_seconds is None
    with pytest.raises(BlockingIOError):
        manager.recv(1000)
    silent.close()
    monkeypatch.delenv("NOTIFY_SOCKET")
    alone = Supervisor(listens=True)
    alone.ready("")
    alone.close()
