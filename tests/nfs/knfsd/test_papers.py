"""The ground of the papers' trials behind NFS, in the guest that all tests share."""

import os
from dataclasses import replace

import pytest

from bench.papers.doing import done_as
from bench.papers.ground import VERSIONS
from bench.papers.nfsground import nfs
from bench.papers.trial import Spot, gathering
from bench.papers.trials import TRIALS
from tests.nfs.knfsd.fixtures import NfsHost, sh


def seen(spot: Spot) -> dict[str, float]:
    return {"files": done_as(spot.case, spot.path, lambda: sum(len(files) for _, _, files in os.walk(".")))}


@pytest.mark.timeout(500)  # two exports are made and ended; a machine may be slow
def test_trials_behind_nfs(nfs_host: NfsHost) -> None:
    """The bare tree and a cloaked one, by the ids that the client sends: what is measured is what is configured."""
    trial = TRIALS["scaling"]
    cases = tuple(case for case in trial.cases(True) if case.name in ("VAN-0", "RMAPCLK-10"))
    trial = replace(trial, cases=lambda _: cases, measure=seen)
    with nfs(trial.mib) as ground, gathering(trial, ground, quick=True) as gather:
        for run, setting in enumerate(VERSIONS):
            assert gather(setting, run) == {"VAN-0": {"files": 0}, "RMAPCLK-10": {"files": 10}}
    assert "/papers" not in sh("exportfs", "-v")
