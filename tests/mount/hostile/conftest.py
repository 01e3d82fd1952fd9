"""Fixtures: one mount for all attacks, and a table of what they cost another user."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator

import pytest

from cloakfs import linux
from cloakfs.state.runtime import STATE_DIR
from tests.mount.conftest import Mount, mounted
from tests.mount.hostile import victim
from tests.mount.hostile.peers import require
from tests.mount.hostile.victim import Watch
from tests.mount.test_hung import Far

OPTIONS = "rw,range_map=uid 0 9999 map 0 gid 0 9999 map 0,cloak_list=uid +077 1 9999"

REPORT: list[tuple[str, int, Watch]] = []
"""Of each attack: its name, how much it did, and what the other user saw."""


@pytest.fixture(scope="module")
def arena() -> Iterator[Mount]:
    """A mount with a directory of the victim and one that everybody shares, and a file system that stalls."""
    base = tempfile.mkdtemp(prefix="cloakfs-test-")
    os.chmod(base, 0o755)
    real, point = f"{base}/real", f"{base}/mnt"
    for path in (real, point):
        os.mkdir(path, 0o755)
    os.mkdir(f"{real}/shared")
    os.chmod(f"{real}/shared", 0o1777)
    victim.furnish(real)
    stalled = Far(f"{base}/stalled", base)
    try:
        with mounted(real, point, "-o", OPTIONS) as mount:
            yield mount
        shutil.rmtree(os.path.join(STATE_DIR, mount.key))
    finally:
        stalled.close()
        subprocess.run(["rm", "-rf", base], check=True)  # it may be deeper than Python recurses


@pytest.fixture(scope="module", params=["bare", "bindfs"])
def other_arena(request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
    """The same without cloakfs, to compare with: what it is, and where."""
    require(request.param)
    base = tempfile.mkdtemp(prefix="cloakfs-test-")
    os.chmod(base, 0o755)
    real, point = f"{base}/real", f"{base}/mnt"
    for path in (real, point):
        os.mkdir(path, 0o755)
    tree = point if request.param == "bare" else real
    os.mkdir(f"{tree}/shared")
    os.chmod(f"{tree}/shared", 0o1777)
    victim.furnish(tree)
    stalled = Far(f"{base}/stalled", base)
    try:
        if request.param == "bare":
            yield request.param, point
            return
        subprocess.run(["bindfs", "-o", "allow_other", real, point], check=True)
        yield request.param, point
        linux.umount(point, linux.MNT_DETACH)
    finally:
        stalled.close()
        subprocess.run(["rm", "-rf", base], check=True)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not REPORT:
        return
    terminalreporter.section("what one user's attacks cost another one")
    terminalreporter.line(
        f"{'attack':54} {'done':>7} {'requests':>8} {'p50 ms':>8} {'p99 ms':>8} {'max ms':>8} wrong told"
    )
    for name, done, watch in REPORT:
        times = " ".join(f"{watch.percentile(percent) * 1000:8.2f}" for percent in (50, 99, 100))
        terminalreporter.line(f"{name:54} {done:7} {len(watch.seconds):8} {times} {len(watch.wrong):5} {watch.told:4}")
