"""The backing file system, and the mounts of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .harness import MOUNTS, Mount, Workspace, cloakfs_mount, missing_prerequisite, workspace


@pytest.fixture(scope="session")
def backing() -> Iterator[Workspace]:
    if reason := missing_prerequisite():
        pytest.skip(reason)
    with workspace() as space:
        yield space


@pytest.fixture(scope="module", params=MOUNTS)
def mount(request: pytest.FixtureRequest, backing: Workspace) -> Iterator[Mount]:
    source = backing.directory(f"{request.module.__name__.rpartition('.')[2]}-{request.param}")
    with cloakfs_mount(source, backing.path / request.param, MOUNTS[request.param]) as mountpoint:
        yield Mount(source, mountpoint)
