"""The testbed of the papers' trials behind NFS, in the guest that all tests share."""

import mmap
import os
import time
from dataclasses import replace

import pytest

from bench.papers.fastreads import LARGE_KB, PATTERNS, SMALL_KB, value
from bench.papers.nfstestbed import nfs
from bench.papers.processes import done_as
from bench.papers.testbed import VERSIONS
from bench.papers.trial import Spot, gathering
from bench.papers.trials import TRIALS
from bench.papers.workloads import COLD_KIB
from tests.nfs.knfsd.fixtures import NfsHost, sh


def seen(spot: Spot) -> dict[str, float]:
    return {"files": done_as(spot.case, spot.path, lambda: sum(len(files) for _, _, files in os.walk(".")))}


@pytest.mark.timeout(500)  # two exports are made and ended; a machine may be slow
def test_trials_behind_nfs(nfs_host: NfsHost) -> None:
    """The bare tree and a cloaked one, by the ids that the client sends: what is measured is what is configured."""
    trial = TRIALS["scaling"]
    cases = tuple(case for case in trial.cases(True) if case.name in ("VAN-0", "RMAPCLK-10"))
    trial = replace(trial, cases=lambda _: cases, measure=seen)
    with nfs(trial.mib) as testbed, gathering(trial, testbed, quick=True) as gather:
        for run, setting in enumerate(VERSIONS):
            assert gather(setting, run) == {"VAN-0": {"files": 0}, "RMAPCLK-10": {"files": 10}}
    assert "/papers" not in sh("exportfs", "-v")


@pytest.mark.timeout(500)
def test_a_fast_disk_behind_nfs(nfs_host: NfsHost) -> None:
    """All is read from the disk, whose commands take their time, in each pattern and with both settings."""
    trial = TRIALS["fast"]
    without_prefetch = trial.cases(True)[1:2]
    trial = replace(trial, cases=lambda _: without_prefetch, rehearsed=False)
    with nfs(trial.mib, trial.microseconds) as testbed, gathering(trial, testbed, quick=True) as gather:
        fd = os.open(os.path.join(testbed.tree, "content"), os.O_RDONLY | os.O_DIRECT)
        with mmap.mmap(-1, 4096) as page:
            began = time.monotonic()
            for _ in range(20):
                assert os.preadv(fd, [page], 0) == 4096
            assert time.monotonic() - began >= 20 * trial.microseconds * 1e-6
        os.close(fd)
        (values,) = gather("NFSv4.2", 0).values()
    rates = {value(pattern, kb) for pattern in PATTERNS for kb in (SMALL_KB, LARGE_KB)}
    assert values.keys() == rates | {COLD_KIB}
    assert all(values[rate] > 0 for rate in rates)
    assert values[COLD_KIB] >= 1024
    assert not os.path.exists("/sys/module/scsi_debug")
