"""The benchmark runs and tells of every peer; its figures are not tested."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bench.work import WORK

PEERS = ["bare", "bindfs, caches 0", "bindfs, default", "cloakfs, null"] + [f"cloakfs, {n}" for n in (10, 100, 1000)]


@pytest.mark.skipif(not shutil.which("bindfs"), reason="needs bindfs, the peer (Debian: bindfs)")
def test_every_peer_does_all_the_work(tmp_path: Path) -> None:
    out, plot = tmp_path / "out.json", tmp_path / "out.png"
    arguments = ["--quick", "--markdown", "--json", str(out), "--plot", str(plot)]
    done = subprocess.run(
        [sys.executable, "-m", "bench", *arguments], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(out.read_text())
    assert results["about"]["rounds"] == 2
    for rates in results["rates"].values():
        assert list(rates) == list(WORK)
        for by_peer in rates.values():
            assert list(by_peer) == PEERS
            assert all(rate > 0 for values in by_peer.values() for rate in values)
    assert done.stdout.count("| cloakfs, 1000 |") == 4
    assert plot.read_bytes().startswith(b"\x89PNG")
