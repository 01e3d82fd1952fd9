"""`python -m bench nfs`, without a guest: what is chosen, the results, and the tables."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench.lab.stock.setup import NoLaboratory
from bench.lab.stock.weights import Counts
from bench.nfs import command
from bench.nfs.plan import BARE, BINDFS, OPTIONS, NfsPlan, Record, parse_records
from bench.nfs.report import against_sheet, doubts, ratio_sheet, request_sheet
from bench.nfs.results import Case, NfsMeasurement, NfsRun
from bench.nfs.targets import TARGETS, target_sheet
from bench.nfs.work import Amounts, all_nfs_work
from bench.over_nfs import EXPORTS
from cloakfs.config.parse import parse_options

WORKS = all_nfs_work(Amounts())
CALLER = "caller view"


def case(export: str, work: str = "append", version: str = "3", kernel: str = "6.1") -> Case:
    return Case(kernel, work, version, export)


def measured(microseconds: float, **requests: int) -> NfsMeasurement:
    return NfsMeasurement(Counts(0, 0, round(microseconds * 10_000), 0), requests)


def run_of(**times: list[float]) -> NfsRun:
    names = {"bare": BARE, "caller": CALLER, "bindfs": BINDFS}
    return NfsRun(measured={case(names[name]): [measured(time) for time in several] for name, several in times.items()})


def test_every_export_of_the_other_benchmark_is_there() -> None:
    assert list(OPTIONS)[:2] == [BARE, BINDFS]
    assert [value for value in OPTIONS.values() if value] == [value for value in EXPORTS.values() if value]
    for words in filter(None, OPTIONS.values()):
        parse_options(words)


def test_every_work_says_what_one_of_it_is() -> None:
    for work in WORKS.values():
        assert work.unit
        assert work.units > 0


def test_nothing_is_renamed_through_bindfs() -> None:
    plan = NfsPlan(["tar x", "rename", "git clone"])
    assert plan.works_with(BINDFS) == ["tar x"]
    assert plan.works_with(CALLER) == plan.works


def test_the_guest_reads_the_plan_of_the_host() -> None:
    plan = NfsPlan(["append"], [BARE, CALLER], ["3"], 2, Amounts(files=7))
    assert NfsPlan.parse(plan.text()) == plan
    assert plan.length() == 4
    assert NfsPlan().length() == (len(WORKS) * len(OPTIONS) - sum(work.renames for work in WORKS.values())) * 2 * 3


def test_the_host_reads_the_records_of_the_guest() -> None:
    lines = (
        '{"work": "append", "version": "3", "export": "bare", "number": 5, "switches": 9, "requests": {"read": 1}}\n'
    )
    assert parse_records("") == []
    assert parse_records(lines + '{"work": "app') == [Record("append", "3", BARE, 5, 9, {"read": 1})]


def test_records_are_joined_with_what_was_counted_under_their_number() -> None:
    run = NfsRun()
    records = [
        Record("append", "3", BARE, 2, 9, {}),
        Record("append", "3", CALLER, 4, failed="OSError: no"),
        Record("append", "4.2", BARE, 6),
    ]
    run.add("6.1", records, {1: (7, 7, 7), 2: (10, 20, 30), 4: (1, 1, 1)})
    assert run.measured == {case(BARE): [NfsMeasurement(Counts(10, 20, 30, 9), {})]}
    assert run.failed == [
        "Linux 6.1: append by NFSv3 with caller view: OSError: no",
        "Linux 6.1: append by NFSv4.2 with bare: nothing was counted",
    ]


def test_the_least_decides() -> None:
    run = run_of(bare=[110, 100, 102], caller=[250, 251, 300])
    assert run.seconds(case(BARE)) == pytest.approx(100e-6)
    assert run.ratio(case(CALLER)) == pytest.approx(2.5)
    assert run.ratio(case(BINDFS)) is None
    assert run_of(caller=[1]).ratio(case(CALLER)) is None
    assert run.spread(case(BARE)) == pytest.approx(0.02)
    assert run.spread(case(BINDFS)) == 0
    assert list(doubts(run)) == []
    assert list(doubts(run_of(bare=[100, 150, 160]))) == ["append, Linux 6.1, NFSv3, bare: repeats differ by 50%"]


def test_a_run_is_written_and_read_again(tmp_path: Path) -> None:
    run = run_of(bare=[100, 110], caller=[250])
    run.about, run.failed = {"qemu": "7.2"}, ["something"]
    path = str(tmp_path / "run.json")
    run.write(path)
    again = NfsRun.read(path)
    assert again == run
    other = run_of(bare=[90])
    again.merge(other)
    assert again.ratio(case(CALLER)) == pytest.approx(250 / 90)
    (tmp_path / "other.json").write_text(json.dumps({"rates": {}}))
    with pytest.raises(ValueError, match="not a run"):
        NfsRun.read(str(tmp_path / "other.json"))


def test_the_table_compares_with_the_bare_export() -> None:
    run = run_of(bare=[5000], caller=[10000])
    run.measured[case(BARE, version="4.2")] = [measured(10000)]
    run.measured[case(BINDFS, version="4.2")] = [measured(15000)]
    run.measured[case(BARE, kernel="6.12")] = [measured(1)]
    sheet = ratio_sheet(run, WORKS, "6.1")
    assert sheet.head == ["", "bare, µs", BINDFS, CALLER]
    assert sheet.rows == [["append, 1 line", "100, 200", "–, 1.50", "2, –"]]
    assert run.kernels() == ["6.1", "6.12"]


def test_targets_are_compared_with_what_was_measured() -> None:
    run = NfsRun()
    for export, kernel, time in ((BARE, "6.1", 100), (CALLER, "6.1", 801), (BARE, "6.12", 100), (CALLER, "6.12", 799)):
        run.measured[case(export, "list+stat", kernel=kernel)] = [measured(time)]
    sheet = target_sheet(run)
    assert sheet.head == ["export", "work", "NFS", "wanted", "6.1", "6.12"]
    assert sheet.rows == [[CALLER, "list+stat", "3", "≤ 8", "8 missed", "8 reached"]]


def test_targets_are_of_works_and_exports_that_there_are() -> None:
    assert {target.work for target in TARGETS} <= WORKS.keys()
    assert {target.export for target in TARGETS} <= OPTIONS.keys()


def test_requests_are_those_of_one_unit() -> None:
    run = run_of(bare=[100])
    run.measured[case(CALLER)] = [measured(200, lookup=50, getattr=100, fsync=1), measured(300, lookup=99)]
    assert request_sheet(run, WORKS, "6.1").rows == [["append, for 1 line", "3", CALLER, "3", "getattr 2, lookup 1.00"]]


def test_what_changed() -> None:
    old, new = run_of(bare=[100], caller=[300], bindfs=[150]), run_of(bare=[100], caller=[250], bindfs=[152])
    assert against_sheet(new, old, WORKS).rows == [["append", "6.1", "3", CALLER, "3 → 2.5", "–"]]
    new.measured[case(BINDFS)] = [measured(152, read=50)]
    assert against_sheet(new, old, WORKS).rows[1] == ["append", "6.1", "3", BINDFS, "–", "0 → 1.00"]
    assert against_sheet(new, run_of(), WORKS).rows == []


def test_what_is_chosen() -> None:
    done = CliRunner().invoke(command.nfs, ["--list", "--export", "caller*", "--work", "*read*"])
    assert done.output.splitlines() == [
        "works (--work):", "  open+read", "  sequential read", "  sequential read cold",
        "exports (--export):", "  bare", "  caller view", "  caller view, subtree_check",
    ]  # fmt: skip
    done = CliRunner().invoke(command.nfs, ["--work", "no such*"])
    assert (done.exit_code, done.stderr) == (2, "cloakfs: --work no such*: no such thing; see --list\n")


def test_without_a_laboratory_it_says_why_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> list[str]:
        raise NoLaboratory("needs root: and why")

    monkeypatch.setattr(command, "install_missing", refuse)
    done = CliRunner().invoke(command.nfs, [])
    assert (done.exit_code, done.stderr) == (1, "cloakfs: nfs: needs root: and why\n")


def test_earlier_runs_are_shown_together(tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in ("a.json", "b.json")]
    run_of(bare=[100], caller=[210]).write(paths[0])
    run_of(bindfs=[150]).write(paths[1])
    done = CliRunner().invoke(command.nfs, ["--markdown", "--show", paths[0], "--show", paths[1]])
    assert done.exit_code == 0
    assert "| append, 1 line | 2 | 1.50 | 2.1 |" in done.stdout
    done = CliRunner().invoke(command.nfs, ["--show", str(tmp_path / "none.json")])
    assert (done.exit_code, done.stderr.count("\n")) == (1, 1)
