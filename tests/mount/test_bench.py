"""The benchmark runs and tells of every peer; its figures are not tested."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.work import WORK
from cloakfs.mounted import RUN_DIR

PEERS = ["bare", "bindfs, caches 0", "bindfs, default", "cloakfs, null"] + [f"cloakfs, {n}" for n in (10, 100, 1000)]

pytestmark = pytest.mark.skipif(not shutil.which("bindfs"), reason="needs bindfs, the peer (Debian: bindfs)")


def mounts_below(path: Path) -> list[str]:
    with open("/proc/self/mounts", encoding="utf-8") as mounts:
        return [line for line in mounts if line.split()[1].startswith(f"{path}/")]


def test_every_peer_does_all_the_work(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra `bench`")
    out, plot = tmp_path / "out.json", tmp_path / "out.svg"
    arguments = ["--quick", "--markdown", "--json", str(out), "--plot", str(plot)]
    done = subprocess.run(
        [sys.executable, "-m", "bench", *arguments], capture_output=True, text=True, check=False, timeout=200
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(out.read_text())
    assert results["about"]["rounds"] == 2
    assert list(results["rates"]) == ["pinned", "unpinned"]
    for rates in results["rates"].values():
        assert list(rates) == list(WORK)
        for by_peer in rates.values():
            assert list(by_peer) == PEERS
            assert all(len(values) == 2 and min(values) > 0 for values in by_peer.values())
    for peer in PEERS[2:]:
        assert done.stdout.count(f"\n| {peer} |") == 4
    assert "<svg" in plot.read_text()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_leaves_nothing_behind(number: signal.Signals) -> None:
    # Not pytest's own directory, which other users may not enter.
    base = Path(f"/tmp/cloakfs-test-bench-{os.getpid()}")
    base.mkdir(mode=0o755)
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "bench"],
            env={**os.environ, "TMPDIR": str(base)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        deadline = time.monotonic() + 60
        while len(mounts_below(base)) < len(PEERS) - 1:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(number)
        process.communicate(timeout=60)
        assert process.returncode
        assert mounts_below(base) == []
        assert list(base.iterdir()) == []
        assert not [name for name in os.listdir(RUN_DIR) if base.name in name]
    finally:
        shutil.rmtree(base)
