"""What the benchmark computes from its rates: ratios, targets, and changes since an earlier run."""

import io
import tarfile
from pathlib import Path

import pytest

from bench.figures import Run, Spread, compare, number
from bench.homes import HOME
from bench.job import PINNED, UNPINNED
from bench.peers import BARE, FEW, FIXED, FLOOR, MANY, PEERS, PLAIN, UNCACHED, VARIANTS, definitions, does
from bench.speed.choice import chosen
from bench.speed.measure import find_package, per_unit
from bench.speed.plan import Schedule
from bench.speed.report import (
    against_sheets,
    home_target_sheet,
    memory_sheet,
    ratio_sheets,
    request_sheet,
    show,
    target_sheet,
    worse,
)
from bench.speed.targets import HOME_TARGETS, TARGETS, judge
from bench.tree import KINDS, QUICK, generated_package
from bench.work import all_work
from cloakfs.config.parse import parse_options

WORKS = all_work(1)


def run_of(setting: str = PINNED, work: str = "stat public", **rates: list[float]) -> Run:
    names = {"bare": BARE, "uncached": UNCACHED, "many": MANY, "few": FEW, "fixed": FIXED}
    return Run(rates={setting: {work: {names[name]: values for name, values in rates.items()}}})


def test_ratios_are_taken_within_a_round() -> None:
    run = run_of(bare=[100, 200, 400], many=[50, 100, 100])
    assert run.ratios(PINNED, "stat public", MANY, BARE) == [0.5, 0.5, 0.25]
    assert run.ratios(PINNED, "stat public", MANY, UNCACHED) == []
    assert run.ratios(UNPINNED, "stat public", MANY, BARE) == []


def test_spread() -> None:
    spread = Spread.of([0.5, 0.25, 2.0])
    assert spread == Spread(0.5, 0.25, 2.0)
    assert spread.inverse() == Spread(2.0, 0.5, 4.0)
    assert str(spread) == "0.50 (0.25–2)"
    assert Spread.of([]) is None


@pytest.mark.parametrize(
    ("value", "text"), [(12345.6, "12,346"), (9.87, "9.9"), (1.3, "1.30"), (0.0123, "0.012"), (0, "0")]
)
def test_number(value: float, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("before", "now", "verdict"),
    [
        (Spread(1.0, 0.9, 1.1), Spread(0.8, 0.7, 0.85), -1),
        (Spread(1.0, 0.9, 1.1), Spread(1.2, 1.15, 1.3), 1),
        (Spread(1.0, 0.9, 1.1), Spread(0.95, 0.94, 0.96), 0),
        (Spread(1.0, 0.9, 1.1), Spread(0.8, 0.7, 1.05), 0),  # its own range is as wide
    ],
)
def test_worse_is_what_is_worse_by_more_than_the_spread(before: Spread, now: Spread, verdict: int) -> None:
    change, found = compare(before, now)
    assert change == pytest.approx(now.middle / before.middle - 1)
    assert found == verdict


def told(run: Run, target: str) -> dict[str, tuple[str, bool | None]]:
    (judged,) = [judged for judged in judge(run) if judged.target == target]
    return {kind: (str(figure.value), figure.reached) for kind, figure in judged.figures.items()}


def test_a_target_for_rates() -> None:
    run = run_of(uncached=[100, 100, 100], many=[125, 140, 131])
    assert told(run, f"stat, pinned: {MANY} / {UNCACHED}") == {"public": ("1.31 (1.25–1.40)", True)}
    run = run_of(work="stat private", uncached=[100, 100, 100], many=[125, 140, 129])
    assert told(run, f"stat, pinned: {MANY} / {UNCACHED}") == {"private": ("1.29 (1.25–1.40)", False)}


def test_a_target_for_times_is_the_inverse() -> None:
    run = run_of(UNPINNED, "tar+make+rm private", bare=[1.0, 1.0, 1.0], many=[0.5, 0.52, 0.55], fixed=[0.7, 0.7])
    assert told(run, f"tar+make+rm, unpinned: {FIXED} / {BARE}")["private"] == ("1.43 (1.43–1.43)", True)
    assert told(run, f"tar+make+rm, unpinned: {MANY} / {BARE}")["private"] == ("1.92 (1.82–2)", False)


def test_what_is_the_same_for_all_is_judged_alone() -> None:
    rates = {BARE: [100.0], MANY: [10.0]}
    run = Run(rates={PINNED: {f"stat {kind}": rates for kind in KINDS}})
    assert told(run, f"stat, pinned: {MANY} / {BARE}") == {
        "public": ("0.1 (0.1–0.1)", False),
        "private": ("0.1 (0.1–0.1)", None),
    }


def test_targets_for_memory_take_the_largest() -> None:
    run = Run(memory={"bindfs": {"idle RSS": 99.0}, MANY: {"idle RSS": 45.0, "growth RSS": 61.0}, FIXED: {}})
    figures = [judged.figures for judged in judge(run)[-2:]]
    assert [str(figure[""]) for figure in figures] == ["45.0 reached", "61.0 missed"]
    assert [judged.figures for judged in judge(Run())[-2:]] == [{}, {}]


def test_every_target_is_about_what_is_measured() -> None:
    for targets, kinds in ((TARGETS, KINDS), (HOME_TARGETS, (HOME,))):
        for target in targets:
            assert {target.peer, target.to} <= set(PEERS)
            for kind in kinds:
                work = WORKS[f"{target.work} {kind}"]
                assert target.setting in work.settings
                assert does(target.peer, work)
                assert does(target.to, work)


def test_targets_for_homes_are_judged_by_what_was_done_in_homes() -> None:
    rates = {BARE: [100.0], MANY: [79.0]}
    run = Run(rates={PINNED: {"stat home": rates, "stat public": rates, "lookup public": rates}})
    first, second = home_target_sheet(run).rows[:2]
    assert first == [f"stat, pinned: {MANY} / {BARE}", "rate ≥ 0.80", "0.79 (0.79–0.79) missed"]
    assert second == [f"lookup, pinned: {MANY} / {BARE}", "rate ≥ 0.80", "not measured"]


def test_who_does_what() -> None:
    assert {peer for peer in PEERS if not does(peer, WORKS["20 users home"])} == {*VARIANTS, FIXED, PLAIN, FLOOR}
    assert [peer for peer in PEERS if not does(peer, WORKS["stat home"])] == [p for p in PEERS if p in VARIANTS]
    assert all(does(peer, WORKS["stat private"]) for peer in PEERS)


def test_a_run_is_read_as_it_was_written(tmp_path: Path) -> None:
    run = run_of(bare=[1.5], many=[0.5])
    run.about, run.skipped, run.memory = {"kernel": "6"}, {"overlayfs": "no"}, {MANY: {"idle RSS": 1.0}}
    run.write(str(tmp_path / "run.json"))
    assert Run.read(str(tmp_path / "run.json")) == run
    (tmp_path / "other.json").write_text('{"other": 1}')
    with pytest.raises(ValueError, match="not a run"):
        Run.read(str(tmp_path / "other.json"))


def test_against_marks_what_got_worse() -> None:
    old = run_of(bare=[100, 100], many=[50, 51], fixed=[50, 52], few=[50, 50])
    now = run_of(bare=[10, 10], many=[4.0, 4.1], fixed=[5.1, 4.9], few=[6, 6])
    old.requests = {"stat public": {MANY: {"lookup": 1.0}, FIXED: {}}}
    now.requests = {"stat public": {MANY: {"lookup": 1.0, "getattr": 1.0}, FIXED: {}}}
    old.memory, now.memory = {MANY: {"idle RSS": 40.0}}, {MANY: {"idle RSS": 30.0}}
    ratios, requests, memory = against_sheets(now, old, WORKS)
    assert ratios.rows == [[MANY, "-20% **worse**"], [FIXED, "-2%"], [FEW, "+20% better"]]
    assert requests.rows == [[f"stat public, {MANY}", "1.00", "2", "+99% **worse**"]]
    assert memory.rows == [[f"{MANY}, idle RSS", "40", "30", "-25% better"]]
    assert worse([ratios, requests, memory]) == 2
    assert worse(against_sheets(old, old, WORKS)) == 0


def test_tables(capsys: pytest.CaptureFixture[str]) -> None:
    run = run_of(bare=[200, 100], many=[50, 50])
    run.requests = {"stat public": {MANY: {"lookup": 1.0, "getattr": 0.001}, FIXED: {}}}
    run.memory = {MANY: {"idle RSS": 40.0}}
    (sheet,) = ratio_sheets(run, WORKS, BARE)
    assert sheet.head == ["", "stat public"]
    assert sheet.rows == [["bare, per second", "150 files"], [MANY, "**0.38** (0.25–0.50)"]]
    assert ratio_sheets(run, WORKS, UNCACHED) == []
    assert request_sheet(run, WORKS).rows == [["stat public, for 1 file", "lookup 1.00", "none"]]
    assert memory_sheet(run).rows == [[MANY, "40.0", "–", "–", "–", "–"]]
    assert len(target_sheet(run).rows) == len(TARGETS) + 2
    run.skipped, run.failed = {"overlayfs": "no such thing"}, ["stat with bindfs: failed"]
    for markdown in (True, False):
        show(run, WORKS, run, markdown=markdown)
        said = capsys.readouterr().out
        assert ("| cloakfs map+cloak 1000 | **0.38** (0.25–0.50) |" in said) == markdown
        assert "Nothing got worse" in said
        assert "skipped overlayfs: no such thing" in said
        assert "failed: stat with bindfs: failed" in said


def test_requests_for_one_unit() -> None:
    before, after = {"lookup": 5, "statfs": 1}, {"lookup": 25, "statfs": 2, "forget": 9, "open": 10}
    assert per_unit(before, after, 10) == {"lookup": 2.0, "open": 1.0}


def test_choosing(capsys: pytest.CaptureFixture[str]) -> None:
    assert chosen(["stat public", "stat private", "lookup public"], ("stat*", "*public"), "--work") == [
        "stat public",
        "stat private",
        "lookup public",
    ]
    assert chosen(["a", "b"], (), "--peer") == ["a", "b"]
    with pytest.raises(SystemExit) as ended:
        chosen(["a"], ("a", "x*"), "--peer")
    assert ended.value.code == 2
    assert capsys.readouterr().err == "cloakfs: --peer x*: no such thing; see --list\n"


def test_a_plan_is_as_long_as_it_says() -> None:
    works = [WORKS["stat public"], WORKS["ls -lR public"], WORKS["4 clients public"]]
    plan = Schedule([BARE, MANY], works, ["requests"], [PINNED, UNPINNED], 3, 0.1, QUICK, None, [], [])
    steps = list(plan.steps())
    assert [(setting, at) for setting, at, work in steps if work is works[0]] == [
        (setting, at) for setting in (PINNED, UNPINNED) for at in range(3)
    ]
    assert [(setting, at) for setting, at, work in steps if work is works[1]] == [(PINNED, 0), (UNPINNED, 0)]
    assert [setting for setting, _, work in steps if work is works[2]] == [UNPINNED] * 3
    assert plan.length() == (len(steps) + 1) * 2 + 1 + 1


@pytest.mark.parametrize("count", [2, 10, 1000])
def test_definitions_are_as_many_as_asked_for(count: int) -> None:
    options, warnings = parse_options(definitions(count))
    assert (len(options.range_map), len(options.cloak_list), warnings) == (count, count, [])
    assert not parse_options(definitions(count, maps=False))[0].range_map
    assert not parse_options(definitions(count, cloaks=False))[0].cloak_list


def test_packages(tmp_path: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(generated_package(3))) as archive:
        assert sum(name.endswith(".c") for name in archive.getnames()) == 4
    mine = tmp_path / "mine.tar.gz"
    mine.write_bytes(b"x")
    assert find_package(str(mine)) == (b"x", "mine.tar.gz")
    assert find_package(None)[0]
