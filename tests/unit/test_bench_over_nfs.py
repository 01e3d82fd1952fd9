"""`ls -l` over NFS in `python -m bench`: what is chosen, in which order it is listed, the targets, and the tables."""

import os
import stat
from pathlib import Path

import pytest

from bench.figures import Run
from bench.homes import HOME
from bench.job import PINNED
from bench.lab import guest
from bench.over_nfs import (
    BARE_EXPORT,
    BELOW,
    CALLER,
    CALLER_CHECKED,
    EXPORTS,
    FIXED,
    PLACES,
    PUBLIC,
    SQUASHED,
    all_listings,
    prepare,
)
from bench.peers import BARE, MANY
from bench.speed.choice import Choice, listing
from bench.speed.overnfs import LISTINGS, measure_over_nfs
from bench.speed.plan import Schedule
from bench.speed.report import against_sheets, nfs_target_sheet, ratio_sheets, request_sheet
from bench.speed.targets import NFS_TARGETS, judge_nfs
from bench.tree import QUICK, WORKER
from bench.work import all_work
from cloakfs.config.parse import parse_options

EVERY = {**all_work(1), **all_listings(1)}
HOME_3 = "ls -l over NFSv3 home"


def plan_of(*works: str, peers: tuple[str, ...] = (), cpus: str = "both", quick: bool = False) -> Schedule:
    return Choice(peers, works, cpus, 3, 0.1, None, quick=quick).plan(EVERY)


def test_every_listing_is_told_of_once() -> None:
    names = [name for name in EVERY if name.startswith("ls -l over")]
    assert len(names) == 2 * 2 * len(PLACES)
    assert {HOME_3, "ls -l over NFSv4.2 public", "ls -l over NFSv4.2 cold below home"} <= set(names)
    assert all(name.endswith(f" {EVERY[name].kind}") for name in names)
    told = listing(EVERY).splitlines()
    assert [told.count(f"  {name}") for name in (*names, *EXPORTS)] == [1] * (len(names) + len(EXPORTS))


def test_it_is_chosen_like_other_work() -> None:
    plan = plan_of("ls -l over NFSv3 *", peers=("bare*", "*all_squash"))
    assert (plan.peers, plan.exports) == ([BARE], [BARE_EXPORT, SQUASHED])
    assert [one.name for one in plan.listings] == [name for name in EVERY if name.startswith("ls -l over NFSv3 ")]
    assert (plan.works, plan.extras, plan.is_local()) == ([], [], False)
    plan = plan_of("* home", peers=("*1000",))
    assert plan.exports == []
    assert plan.is_local()
    assert plan_of().listings == list(all_listings(1).values())
    assert plan_of().exports == list(EXPORTS)


def test_the_guest_has_one_processor() -> None:
    assert plan_of(HOME_3, cpus="pinned").listings
    assert not plan_of(HOME_3, cpus="unpinned").listings


def test_with_quick_only_one_kind_is_listed() -> None:
    assert {one.kind for one in plan_of(quick=True).listings} == {PUBLIC}
    assert {one.kind for one in plan_of("ls -l over*home", quick=True).listings} == {HOME}


def test_of_each_kind_what_is_warm_comes_first() -> None:
    plan = plan_of("ls -l over*public", "ls -l over*3* below home", peers=("bare export", CALLER))
    steps = [(at, one.name.removeprefix("ls -l over NFS")) for at, one in plan.listing_steps()]
    assert steps == [
        *[(at, f"v{version} public") for at in range(3) for version in ("3", "4.2")],
        (0, "v3 cold public"),
        (0, "v4.2 cold public"),
        *[(at, "v3 below home") for at in range(3)],
        (0, "v3 cold below home"),
    ]
    assert plan.length() == 2 * len(steps)


def test_the_exports_are_what_their_names_say() -> None:
    for name, words in EXPORTS.items():
        if words is None:
            assert name == BARE_EXPORT
            continue
        options, warnings = parse_options(words)
        assert warnings == []
        assert ("subtree_check" in words.split(",")) == ("subtree_check" in name)
        assert (options.squash == "all") == (name == SQUASHED)
        assert bool(options.views) == name.startswith(FIXED)


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to others")
@pytest.mark.parametrize("kind", PLACES)
def test_what_is_listed_is_the_worker_s(kind: str, tmp_path: Path) -> None:
    prepare(str(tmp_path), kind, 3)
    place = tmp_path / PLACES[kind]
    assert sorted(os.listdir(place)) == ["file-0000", "file-0001", "file-0002"]
    modes = [(path.stat().st_uid, stat.S_IMODE(path.stat().st_mode)) for path in (place, place / "file-0000")]
    if kind == PUBLIC:
        assert [mode for _, mode in modes] == [stat.S_IMODE(tmp_path.stat().st_mode), 0o644]
        return
    assert modes == [(WORKER, 0o700 if kind == HOME else 0o755), (WORKER, 0o600)]
    mine, other = (tmp_path / "home" / name for name in ("user-00", "user-01"))
    assert [stat.S_IMODE(home.stat().st_mode) for home in (mine, other)] == [0o700, 0o700]
    assert (mine.stat().st_uid, other.stat().st_uid) == (WORKER, WORKER + 1)


def run_of(work: str, asked: dict[str, dict[str, float]], **rates: list[float]) -> Run:
    names = {"bare": BARE_EXPORT, "caller": CALLER, "fixed": FIXED}
    return Run(rates={PINNED: {work: {names[name]: values for name, values in rates.items()}}}, requests={work: asked})


def test_targets() -> None:
    for target in NFS_TARGETS:
        assert {target.peer, target.to} <= set(EXPORTS)
        assert {f"{target.work} {kind}" for kind in PLACES} <= set(EVERY)
    assert {target.peer for target in NFS_TARGETS} == set(EXPORTS) - {BARE_EXPORT}
    asked = {CALLER: {"readdir": 44.0, "lookup": 16.0}, FIXED: {"readdir": 44.0, "getattr": 16.5}}
    run = run_of(HOME_3, asked, bare=[50, 40, 60], caller=[5, 4.1, 6], fixed=[9.8, 7.9, 12])
    found = {
        judged.target: (judged.wanted, {k: str(v) for k, v in judged.figures.items()}) for judged in judge_nfs(run)
    }
    work = "ls -l over NFSv3"
    assert found[f"{work}, pinned: {CALLER} / {BARE_EXPORT}"] == ("time ≤ 10.00", {HOME: "10 (9.8–10) reached"})
    assert found[f"{work}, pinned: {FIXED} / {BARE_EXPORT}"] == ("time ≤ 5.00", {HOME: "5.1 (5–5.1) missed"})
    assert found[f"{work}, requests: {CALLER}"] == ("≤ 60", {HOME: "60.0 reached"})
    assert found[f"{work}, requests: {FIXED}"] == ("≤ 60", {HOME: "60.5 missed"})
    assert found[f"{work}, requests: {SQUASHED}"] == ("≤ 60", {})
    rows = nfs_target_sheet(run).rows
    assert len(rows) == 2 * len(NFS_TARGETS)
    assert rows[0] == [
        f"{work}, pinned: {CALLER} / {BARE_EXPORT}",
        "time ≤ 10.00",
        "not measured",
        "10 (9.8–10) reached",
        "not measured",
    ]


def test_what_is_cold_has_no_target() -> None:
    run = run_of(f"ls -l over NFSv3 cold {HOME}", {CALLER: {"readdir": 99.0}}, bare=[1.0], caller=[0.001])
    assert not any(judged.figures for judged in judge_nfs(run))


def test_tables_compare_with_the_bare_export() -> None:
    run = run_of(HOME_3, {CALLER: {"readdir": 44.0}}, bare=[50, 40], caller=[5, 4])
    run.rates[PINNED]["stat public"] = {BARE: [100.0, 100.0], MANY: [50.0, 50.0]}
    (local,) = ratio_sheets(run, EVERY, BARE)
    assert local.head == ["", "stat public"]
    (sheet,) = ratio_sheets(run, EVERY, BARE_EXPORT)
    assert (sheet.head, sheet.rows) == (
        ["", HOME_3], [[f"{BARE_EXPORT}, per second", "45 listings"], [CALLER, "**0.1** (0.1–0.1)"]]
    )  # fmt: skip
    assert request_sheet(run, EVERY).rows == [[f"{HOME_3}, for 1 listing", "readdir 44"]]
    slower = run_of(HOME_3, {CALLER: {"readdir": 44.0, "getattr": 1000.0}}, bare=[50, 40], caller=[2.5, 2])
    slower.rates[PINNED]["stat public"] = {BARE: [100.0], MANY: [50.0]}
    local, listings, requests = against_sheets(slower, run, EVERY)
    assert local.rows == [[MANY, "+0%"]]
    assert listings.rows == [[CALLER, "-50% **worse**"]]
    assert [row[0] for row in requests.rows] == [f"{HOME_3}, {CALLER}"]


def test_without_a_laboratory_it_is_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(guest, "UML", str(tmp_path))
    why = guest.missing()
    assert why is not None
    run, told = Run(), list[str]()
    plan = Schedule(
        [], [], [], [PINNED], 1, 0.1, QUICK, None, [BARE_EXPORT, CALLER_CHECKED], [*all_listings(1).values()]
    )
    measure_over_nfs(plan, run, lambda _: None, told.append)
    assert (run.skipped, told, run.rates) == ({LISTINGS: why}, [f"skipped {LISTINGS}: {why}"], {})


def test_it_is_left_out_in_silence_if_nobody_asked_for_it() -> None:
    run = Run()
    assert plan_of("stat*").listings == []
    measure_over_nfs(plan_of("stat*"), run, lambda _: None, pytest.fail)
    assert run == Run()
    assert BELOW in {one.kind for one in all_listings(2).values()}
