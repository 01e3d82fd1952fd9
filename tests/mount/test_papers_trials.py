"""The trials of the papers' experiments, on real mounts: each does what it says, and leaves nothing behind."""

import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from bench.clone import module_command
from bench.papers import workloads
from bench.papers.configurations import BARE, USER, Configuration
from bench.papers.processes import done_as, timed
from bench.papers.testbed import LOCAL, local
from bench.papers.trial import Spot, Trial, Values, gathering
from bench.papers.trials import TRIALS
from cloakfs.linux import mountinfo
from cloakfs.state.runtime import RUN_DIR, STATE_DIR
from tests.mount.loopfs import require
from tests.waiting import wait_until

# The others are tested below, and behind NFS.
CHOSEN = {
    "build": ("RMAPCLK",),
    "stone": ("RMAPCLK",),
    "worst": ("VAN", "RMAPCLK"),
    "mab": ("MNU",),
}


@pytest.fixture(autouse=True)
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where trials work; nothing is left there, nor where daemons tell of themselves."""
    require("ext4")
    with tempfile.TemporaryDirectory(prefix="cloakfs-test-papers-") as base:
        os.chmod(base, 0o755)
        monkeypatch.setattr(tempfile, "tempdir", base)
        yield Path(base)
        left = [path for path in mountinfo.by_path() if path.startswith(base)]
        told = [n for where in (RUN_DIR, STATE_DIR) for n in os.listdir(where) if os.path.basename(base) in n]
        assert left + told + os.listdir(base) == []


def once(trial: Trial) -> Values:
    with local(trial.mib) as testbed, gathering(trial, testbed, quick=True) as gather:
        return gather(LOCAL, 1)


@pytest.mark.parametrize("key", CHOSEN)
def test_trial(key: str) -> None:
    cases = tuple(case for case in TRIALS[key].cases(True) if case.name in CHOSEN[key])
    values = once(replace(TRIALS[key], cases=lambda _: cases))
    assert set(values) == set(CHOSEN[key])
    for of in values.values():
        assert all(value > 0 for what, value in of.items() if not what.startswith("KiB"))
    if key == "worst":
        # Cold is cold: the first who lists a directory reads it from the device.
        assert max(of[workloads.COLD_KIB] for of in values.values()) > 0
        assert all(set(of) == set(values[CHOSEN[key][0]]) for of in values.values())
    if key in ("build", "stone"):
        # So is the start of what is read first.
        assert all(of[workloads.COLD_KIB] > 0 for of in values.values())
    if key == "build":
        assert values["RMAPCLK"]["elapsed"] == pytest.approx(sum(values["RMAPCLK"][name] for name in workloads.BUILT))


def test_what_is_rehearsed_does_not_count() -> None:
    measured: list[str] = []

    def measure(spot: Spot) -> dict[str, float]:
        measured.append(spot.path)
        return {"measured": len(measured)}

    trial = Trial("any", lambda _: (Configuration("VAN", BARE),), lambda *_: None, measure, rehearsed=True)
    with local(trial.mib) as testbed, gathering(trial, testbed, quick=True) as gather:
        assert [gather(LOCAL, run) for run in range(2)] == [{"VAN": {"measured": number}} for number in (2, 3)]


def command(place: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        module_command("bench", "papers", "--quick", "--out", f"{place}-out", *arguments),
        env={**os.environ, "TMPDIR": str(place)}, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.fixture
def out(place: Path) -> Iterator[Path]:
    yield Path(f"{place}-out")
    shutil.rmtree(f"{place}-out")


def test_the_report_has_the_printed_values_beside_ours(place: Path, out: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra `bench`")
    with command(place, "--only", "toolkit-relay") as process:
        _, said = process.communicate()
    assert process.returncode == 0, said
    report = (out / "papers.md").read_text()
    assert "| paper: MNU / VAN | **1.72** |" in report
    assert re.search(r"\| MNU / VAN, local, fchown \| printed: 1\.72 \| [\d.,]+ \| – \| [\d.,]+ \| ", report)
    runs = [json.loads(line) for line in (out / "runs.jsonl").read_text().splitlines()]
    (run,) = [run for run in runs if "samples" in run]
    assert {series for _, series, _, _ in run["samples"]} == {"VAN", "MNU", "RMAPCLK"}


def test_an_interrupted_build_leaves_nothing(place: Path, out: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra `bench`")
    with command(place, "--only", "zadok-build") as process:
        configure = "cloakfs-papers-*/disk/tree/work-0/source/configure"
        wait_until(lambda: process.poll() is not None or list(place.glob(configure)), 200)
        assert process.poll() is None
        process.terminate()
        _, said = process.communicate()
    assert process.returncode == 1
    assert "interrupted" in said


def test_a_configuration_that_hides_nothing_is_no_measurement_of_cloaking() -> None:
    case = Configuration("CLK", BARE, USER, "by-10", visible=0)
    with pytest.raises(RuntimeError, match="CLK shows 100 files, not 0"):
        once(replace(TRIALS["scaling"], cases=lambda _: (case,)))


def test_what_fails_says_why() -> None:
    case = Configuration("VAN", groups=(31000,))
    with pytest.raises(RuntimeError, match=r"VAN: sh: exit status 3: why"):
        timed(["sh", "-c", "echo why >&2; exit 3"], "/", case)
    with pytest.raises(RuntimeError, match=r"VAN: ZeroDivisionError: .* \(test_papers_trials.py:"):
        done_as(case, "/", lambda: 1 // 0)
    assert done_as(case, "/", lambda: (os.getuid(), os.getgid(), os.getgroups(), os.getcwd())) == (
        USER, USER, [31000], "/"
    )  # fmt: skip
    times = timed(["sh", "-c", "sleep 0.2"], "/", case)
    assert times.elapsed >= 0.2 > times.user + times.system
