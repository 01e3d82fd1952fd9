"""Replaying streams to the heuristics offline, and the commands that print the results."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from bench.figures import Run
from bench.prefetch.command import prefetch
from bench.prefetch.experiments import CURSORS, DEFAULT, FIGURES, OFF, QUICK_SCALE, Scale, cases, length
from bench.prefetch.replay import ReplayResult, replay
from bench.prefetch.report import device_sheet, reader_sheets, stride_sheet, targets
from bench.prefetch.streams import generate, merged, reordered
from cloakfs.prefetch import HEURISTICS, MOST, Limits

M = 1 << 20
BLOCK = 8 << 10


def outcomes(
    pattern: str, percent: int = 0, *, readers: int = 1, limits: Limits | None = None
) -> dict[str, ReplayResult]:
    stream = merged(generate(pattern, 8 * M, BLOCK, stride=4, readers=readers))
    arrived = reordered(stream, percent / 100, 0)
    return {name: replay(arrived, heuristic, limits or Limits()) for name, heuristic in HEURISTICS.items()}


def test_in_order_each_does_it() -> None:
    for outcome in outcomes("sequential").values():
        assert outcome.requests == 1024
        assert outcome.misses <= 3
        assert outcome.used == outcome.asked > 7 * M
        assert outcome.wasted == 0
        assert 0 < outcome.peak <= 2 * M


def test_only_cursors_follow_a_stride() -> None:
    found = outcomes("stride")
    assert found["cursors"].misses <= 4 * 3
    assert found["cursors"].wasted == 0
    assert found["cursors"].seq_count > MOST / 2
    for name in ("default", "slowdown"):
        assert (found[name].misses, found[name].asked) == (1024, 0)


def test_random_reads_cost_next_to_nothing() -> None:
    found = outcomes("random")
    for name in ("cursors", "slowdown", "default"):
        assert found[name].wasted < 0.02 * 8 * M
    assert found["always"].asked > found["cursors"].asked


def test_reordering_throws_the_default_back() -> None:
    found = outcomes("sequential", 10)
    assert found["default"].asks > found["slowdown"].asks  # smaller pieces
    assert found["default"].seq_count < found["slowdown"].seq_count / 3
    assert found["slowdown"].misses < 10


def test_a_small_table_forgets_everybody_only_with_the_heuristic_of_the_paper() -> None:
    large = outcomes("sequential", readers=16)
    small = outcomes("sequential", readers=16, limits=Limits(files=8))
    assert (small["default"].misses, small["default"].asked) == (1024, 0)
    for name in ("slowdown", "cursors"):
        assert large[name].misses < 16 * 4
        assert small[name].misses < 0.6 * 1024  # half of the files have room
        assert small[name].asked > 0


def test_one_file_too_many_costs_little() -> None:
    fits = outcomes("sequential", readers=8, limits=Limits(files=8))["cursors"]
    over = outcomes("sequential", readers=9, limits=Limits(files=8))["cursors"]
    assert fits.misses < 8 * 4
    assert over.misses < fits.misses + 0.35 * 1024  # two files of nine take turns in one place


def test_limits_are_kept() -> None:
    assert outcomes("sequential", limits=Limits(window=2 * BLOCK))["cursors"].peak <= 2 * BLOCK


# -- the command ---------------------------------------------------------------------------------------


def run(*arguments: str) -> Result:
    return CliRunner().invoke(prefetch, arguments)


def test_replay_tells_a_table_and_json() -> None:
    done = run("replay", "--pattern", "stride", "--size", "1M")
    assert done.exit_code == 0
    for name in HEURISTICS:
        assert f"│ {name} " in done.stdout
    done = run("replay", "--pattern", "stride", "--size", "1M", "--heuristic", "cursors", "--json")
    told = json.loads(done.stdout)
    assert list(told["heuristics"]) == ["cursors"]
    assert told["heuristics"]["cursors"]["wasted"] == 0
    assert told["limits"]["window"] == 2 * M


def test_a_saved_stream_gives_the_same(tmp_path: Path) -> None:
    saved = tmp_path / "stream"
    made = run(
        *("replay", "--pattern", "sequential", "--readers", "3", "--reordered", "6", "--size", "1M"),
        *("--save", str(saved), "--json"),
    )
    assert made.exit_code == 0, made.output
    assert run("replay", str(saved), "--json").stdout == made.stdout


def test_limits_are_those_of_a_mount() -> None:
    sixteen = ("replay", "--pattern", "sequential", "--readers", "16", "--size", "1M", "--json")
    told = json.loads(run(*sixteen, "-o", "prefetch_files=8,prefetch_window=64K").stdout)
    assert (told["limits"]["files"], told["limits"]["window"]) == (8, 64 << 10)
    assert told["heuristics"]["default"]["asked"] == 0


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["replay"], 2, "cloakfs: prefetch replay: expected either a STREAM-FILE or --pattern\n"),
        (["replay", "absent"], 1, "cloakfs: absent: No such file or directory\n"),
        (
            ["replay", "wrong"],
            2,
            "cloakfs: wrong:1: '1 f' has 2 words; expected SECONDS FILE OFFSET LENGTH\n",
        ),
        (["replay", "--pattern", "stride", "--block", "17M"], 2, "cloakfs: --block 17825792: more than 16M\n"),
        (
            ["replay", "--pattern", "stride", "--size", "2", "--readers", "3"],
            2,
            "cloakfs: --size 2: less than a byte for each of 3 readers\n",
        ),
        (
            ["replay", "--pattern", "stride", "-o", "all_squash"],
            2,
            "cloakfs: -o all_squash: only prefetch_window, _file, _total, _files and _cursors can be given here\n",
        ),
        (
            ["replay", "--pattern", "stride", "--live", "absent"],
            1,
            "cloakfs: absent/file-0: No such file or directory\n",
        ),
        (["replay", "--pattern", "stride", "--save", "absent/x"], 1, "cloakfs: absent/x: No such file or directory\n"),
        (["figures", "--show", "absent"], 1, "cloakfs: absent: No such file or directory\n"),
        (
            ["figures", "--size", "64K"],
            2,
            "cloakfs: --size 65536: less than a block of 8192 for each of 32 readers\n",
        ),
    ],
)
def test_one_line_says_what_is_wrong(
    arguments: list[str], status: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.geteuid", lambda: 0)
    Path("wrong").write_text("1 f\n")
    done = run(*arguments)
    assert (done.exit_code, done.stderr) == (status, said)


def test_sizes() -> None:
    done = run("replay", "--pattern", "stride", "--size", "8Q")
    assert done.exit_code == 2
    assert "'8Q' is not a size; expected a number of bytes up to 1024G, such as 8K or 256M" in done.stderr


# -- what is made of figures ---------------------------------------------------------------------------


def measured() -> Run:
    """Everything with everybody; of each the rate is the number of its place among the peers."""
    run = Run()
    for case in cases(list(FIGURES), QUICK_SCALE):
        rates = {peer: [10.0 * at, 10.0 * at + 2] for at, peer in enumerate(case.peers, 1)}
        run.rates.setdefault(case.setting, {})[case.name] = rates
    return run


def test_every_case_has_its_column() -> None:
    run = measured()
    assert stride_sheet(run).head == ["", "s = 2", "s = 8"]
    rows = {row[0]: row[1:] for row in stride_sheet(run).rows}
    assert rows["paper, ide1 UDP, cursors / default"] == ["1.50", "2.41"]
    assert rows[DEFAULT] == ["31.00 (1.41)"] * 2
    assert rows["cursors / default"] == ["**1.32** (1.31–1.33)"] * 2
    assert [sheet.head for sheet in reader_sheets(run)] == [["readers", "1", "4"]] * 3
    assert len(device_sheet(run).rows) == 6


def test_targets_go_by_the_worst() -> None:
    run = measured()
    run.rates["device"]["disk, random 4K"] = {OFF: [10, 10, 10], CURSORS: [10, 9, 9.5]}
    rows = {row[0]: row[1:] for row in targets(run).rows}
    assert rows["any device: cursors / off"] == ["≥ 0.97", "0.95", "disk, random 4K", "**missed**"]
    assert rows["s = 2: cursors / default"][3] == "**missed**"
    del run.rates["device"]
    assert "any device: cursors / off" not in {row[0] for row in targets(run).rows}


def test_runs_are_taken_together_by_readers_and_by_reordering() -> None:
    run = measured()
    one, four = ["1 reader, 0 % reordered", "1 reader, 10 % reordered"], ["4 readers, 0 % reordered"]
    for case, rates in run.rates["readers"].items():
        rates["always"] = [10.0, 10.0]
        rates["slowdown"] = [9.0, 10.0] if case == one[0] else [9.9, 9.7] if case in four else [10.0, 10.0]
    row = next(row for row in targets(run).rows if row[0].startswith("any readers"))
    assert row[2:] == ["0.98", "0 % reordered", "reached"]  # the median of 0.9, 1, 0.99 and 0.97


def test_what_is_less_than_in_the_paper_is_told() -> None:
    assert Scale(size=256 * M, reader_size=256 * M, reader_runs=10).reductions(["table1", "7"]) == []
    assert QUICK_SCALE.reductions(["table1"]) == [
        "stride: 4 MiB instead of 256 MiB",
        "stride: 1 run instead of 10",
    ]


def test_steps_are_counted() -> None:
    todo = cases(["table1"], QUICK_SCALE)
    assert length(todo) == 1 + 2 * 4
