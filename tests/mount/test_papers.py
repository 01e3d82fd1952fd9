"""`python -m bench papers` measures each kind of experiment, reports it, and goes on after it was killed."""

import json
import os
import re
import shutil
import signal
import statistics
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.clone import module_command
from bench.papers.registry import EXPERIMENTS
from bench.prefetch.slowdisk import SlowDiskError, slow_disk
from cloakfs.linux import mountinfo
from tests.waiting import wait_until

PAPERS = module_command("bench", "papers")
CHOSEN = [one for one in EXPERIMENTS if one.key in ("ellard-readers", "ellard-mixed", "ellard-fast")]
"""On a slow disk with a busy client, with clients that make and remove files, and on the disk itself."""


@pytest.fixture
def place() -> Iterator[Path]:
    """Where it works; nothing of it is left."""
    pytest.importorskip("matplotlib", reason="needs the extra `bench`")
    base = Path(f"/tmp/cloakfs-test-papers-{os.getpid()}")
    base.mkdir(mode=0o755)
    yield base
    wait_until(lambda: not any(path.startswith(f"{base}/") for path in mountinfo.by_path()))
    names = [path.name for path in base.iterdir()]
    shutil.rmtree(base)
    assert names == []


def papers(place: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TMPDIR": str(place)}
    return subprocess.run(
        [*PAPERS, *arguments], env=environment, capture_output=True, text=True, check=False, timeout=250
    )


def records(out: Path) -> list[dict[str, Any]]:
    lines = [
        json.loads(line) for line in (out / "runs.jsonl").read_text().splitlines(keepends=True) if line[-1] == "\n"
    ]
    return [line for line in lines if "experiment" in line]


def test_each_kind_is_measured_and_reported(place: Path, tmp_path: Path) -> None:
    try:
        with slow_disk(16, base=str(place)):
            pass
    except SlowDiskError as exc:
        pytest.skip(f"no slow disk: {exc}")
    out = tmp_path / "out"
    chosen = [word for experiment in CHOSEN for word in ("--only", experiment.key)]
    done = papers(place, "--quick", "--runs", "1", *chosen, "--out", str(out))
    assert done.returncode == 0, done.stderr
    text, page = (out / "papers.md").read_text(), (out / "papers.html").read_text()
    found = records(out)
    assert {one["experiment"] for one in found} == {experiment.key for experiment in CHOSEN}
    values: dict[tuple[str, str, str], list[float]] = {}
    for one in found:
        assert not one["failed"]
        for figure, series, x, value in one["samples"]:
            assert value >= 0
            values.setdefault((figure, series, x), []).append(value)
        for name, proof in one["proof"].items():
            if name.startswith("pages in memory before"):
                assert proof in (0, "the kernel cannot tell (before Linux 6.5)")
            if name.startswith("bytes from the disk / bytes read"):
                assert proof > 0.99  # all of it came from there
    for (figure, series, _), measured in values.items():
        section = text.partition(f'<a id="{figure}"></a>')[2].partition("<a id=")[0]
        row = next(line for line in section.splitlines() if line.startswith(f"| cloakfs: {series} |"))
        mean = statistics.fmean(measured)
        assert (f"{mean:,.2f}" if mean < 1000 else f"{mean:,.0f}") in row
        assert f"<td>cloakfs: {series}<td>" in page
    for experiment in CHOSEN:
        for one_of in experiment.figures:
            assert re.search(rf"^{one_of.key}: (holds|holds in part|does not hold)\. ", done.stdout, re.MULTILINE)
            assert f"](papers-{one_of.key}.svg)" in text
            assert "<svg" in (out / f"papers-{one_of.key}.svg").read_text()
    assert page.count("<svg") == sum(len(experiment.figures) for experiment in CHOSEN)
    assert "src=" not in page


def test_it_goes_on_after_it_was_killed(place: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [*PAPERS, "--quick", "--only", "ellard-disk", "--out", str(out), "--runs"]
    with subprocess.Popen([*command, "1000"], env={**os.environ, "TMPDIR": str(place)}, stderr=subprocess.PIPE) as one:
        wait_until(lambda: one.poll() is not None or ((out / "runs.jsonl").exists() and len(records(out)) >= 4), 200)
        assert one.poll() is None
        one.send_signal(signal.SIGKILL)
    before = records(out)
    runs = 1 + max(record["run"] for record in before)
    done = papers(place, *command[len(PAPERS) :], str(runs + 1))
    assert done.returncode == 0, done.stderr
    after = records(out)
    assert after[: len(before)] == before
    measured = [(record["point"], record["run"]) for record in after]
    assert sorted(measured) == sorted((point, run) for point in ("1", "8", "spread") for run in range(runs + 1))
    assert f"{runs + 1} of each point" in (out / "papers.md").read_text()

    os.unlink(out / "papers.md")
    again = papers(place, "--show", "--only", "ellard-1", "--out", str(out))
    assert (again.returncode, records(out)) == (0, after)
    assert "ellard-1: holds" in again.stdout
    assert "ellard-6" not in (out / "papers.md").read_text()

    other = papers(place, "--only", "ellard-1", "--out", str(out))
    assert other.returncode == 2
    assert "the runs in it have quick True, not False" in other.stderr
