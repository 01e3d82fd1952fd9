"""The backing file system, and the mounts of it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from .harness import MOUNTS, Mount, Workspace, cloakfs_mount, missing_prerequisite, workspace


@contextmanager
def interrupt_on(*signals: signal.Signals) -> Iterator[None]:
    """Let a signal end the run as Ctrl-C does: through the clean-up."""
    before = [(number, signal.signal(number, signal.default_int_handler)) for number in signals]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)


@pytest.fixture(scope="session")
def backing() -> Iterator[Workspace]:
    if reason := missing_prerequisite():
        pytest.skip(reason)
    with interrupt_on(signal.SIGTERM, signal.SIGHUP), workspace() as space:
        yield space


@pytest.fixture(scope="module", params=MOUNTS)
def mount(request: pytest.FixtureRequest, backing: Workspace) -> Iterator[Mount]:
    source = backing.directory(f"{request.module.__name__.rpartition('.')[2]}-{request.param}")
    with cloakfs_mount(source, backing.path / request.param, MOUNTS[request.param]) as mountpoint:
        yield Mount(source, mountpoint)
