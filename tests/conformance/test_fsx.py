"""fsx: random operations give on a mount what they give on the backing file system, and reach it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from .harness import SUITES, Mount, Result, Workspace, disagreements, known_differences, run

OPERATIONS = 1500
SEEDS = (1, 2)
TIMEOUT = 300

BASIC = "read = 10\nwrite = 10\ntruncate = 3\nclose_open = 1\nfsync = 0.5\nfdatasync = 0.5\n"
# fsx adds the mapped operations by itself where they are not said to be left out.
UNMAPPED = "mapread = 0\nmapwrite = 0\n"
MAPPED = "mapread = 10\nmapwrite = 10\ninvalidate = 1\n"

# A configuration for each group of operations, so that one that cannot work leaves the others tested.
PROFILES = {
    "read-write": "[weights]\n" + BASIC + UNMAPPED,
    "small-operations": "[opsize]\nmax = 300\n[weights]\n" + BASIC + MAPPED,
    "mmap": "[weights]\n" + BASIC + MAPPED,
    "mmap-without-msync": "nomsyncafterwrite = true\n[weights]\n" + BASIC + MAPPED,
    "sendfile": "[weights]\n" + BASIC + MAPPED + "sendfile = 10\n",
    "posix_fadvise": "[weights]\n" + BASIC + MAPPED + "posix_fadvise = 10\n",
    "posix_fallocate": "[weights]\n" + BASIC + MAPPED + "posix_fallocate = 10\n",
    "copy_file_range": "[weights]\n" + BASIC + MAPPED + "copy_file_range = 10\n",
    "punch_hole": "[weights]\n" + BASIC + MAPPED + "punch_hole = 10\n",
}


def fsx(directory: Path, profile: str, seed: int, space: Workspace, below: Path | None = None) -> Result:
    config = space.path / f"fsx-{profile}.toml"
    config.write_text(PROFILES[profile], encoding="utf-8")
    file = directory / f"{profile}-{seed}"
    status, output = run(
        [SUITES / "fsx", "-f", config, "-N", str(OPERATIONS), "-S", str(seed), "-P", space.path, file],
        timeout=TIMEOUT,
        below=below,
    )
    if status != 0:
        return Result("FAILED", output[-2000:])
    # What a mapping left behind is written back now, so that the backing file can be compared.
    descriptor = os.open(file, os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return Result("ok")


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.fixture(scope="session")
def directory(backing: Workspace) -> Path:
    return backing.directory("fsx-bare")


@pytest.fixture(scope="session")
def bare(backing: Workspace, directory: Path) -> Callable[[str, int], Result]:
    done: dict[tuple[str, int], Result] = {}

    def result(profile: str, seed: int) -> Result:
        if (profile, seed) not in done:
            done[profile, seed] = fsx(directory, profile, seed, backing)
        return done[profile, seed]

    return result


@pytest.mark.timeout(3 * TIMEOUT)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("profile", PROFILES)
def test_same_result(
    *,
    bare: Callable[[str, int], Result],
    directory: Path,
    mount: Mount,
    backing: Workspace,
    profile: str,
    seed: int,
) -> None:
    here = bare(profile, seed)
    assert here.outcome == "ok", here
    there = fsx(mount.mountpoint, profile, seed, backing, below=mount.mountpoint)
    differing = disagreements("fsx", {profile: here}, {profile: there})
    assert not differing, "\n".join(differing)
    if there.outcome == "ok":
        name = f"{profile}-{seed}"
        assert digest(mount.source / name) == digest(mount.mountpoint / name) == digest(directory / name)


def test_the_list_names_existing_cases() -> None:
    assert {one.case for one in known_differences("fsx")} <= PROFILES.keys()
