"""What is claimed of ratios, and the configurations of Spadavecchia & Zadok: without measuring anything."""

import re

import pytest

from bench.papers import toolkit, zadok
from bench.papers.claims import At, Claim, Sense, criterion, judge
from bench.papers.configurations import (
    ABSENT,
    SHIFT,
    USER,
    cloaking,
    general,
    mapping,
    relays,
    scaling,
    worst,
)
from bench.papers.experiment import Experiment, Grade, MeasuredSeries, Point, Series
from bench.papers.records import RunRecord
from bench.papers.records import measured as gathered
from bench.papers.sites import relative
from bench.papers.trials import TRIALS
from cloakfs.config.options import Options
from cloakfs.config.parse import parse_options


def measured(**series: list[float]) -> MeasuredSeries:
    return MeasuredSeries(
        {name: Series(name, (Point("x", dict(enumerate(values))),)) for name, values in series.items()}
    )


def held(claim: Claim, found: MeasuredSeries) -> bool:
    return claim.check(found).held


def test_a_cost_may_exceed_the_printed_one_by_what_is_not_significant() -> None:
    claim = Claim("cost", At("MNU", "x"), At("VAN", "x"), 1.1)
    assert held(claim, measured(VAN=[2.0], MNU=[2.2]))
    assert held(claim, measured(VAN=[2.0], MNU=[2.219]))  # 1 % of nothing is claimed below that
    assert not held(claim, measured(VAN=[2.0], MNU=[2.23]))
    assert held(claim, measured(VAN=[2.0], MNU=[0.1]))
    # Runs that differ much leave more room; those that agree do not.
    assert held(claim, measured(VAN=[1.0, 1.0, 1.0], MNU=[1.0, 1.2, 1.3]))
    assert not held(claim, measured(VAN=[1.0, 1.0, 1.0], MNU=[1.15, 1.16, 1.17]))


def test_ratios_are_taken_within_runs() -> None:
    found = measured(VAN=[1.0, 100.0], MNU=[1.05, 105.0])
    one = Claim("cost", At("MNU", "x"), At("VAN", "x"), 1.1).check(found)
    assert (one.says, one.wanted, one.held) == ("cost", "printed: 1.1", True)
    assert one.ours == pytest.approx(1.05)
    assert one.to_wanted == pytest.approx(1.05 / 1.1)
    assert one.spread == pytest.approx(0.0)
    single = Claim("cost", At("MNU", "x"), At("VAN", "x"), 1.1, bound=True).check(measured(VAN=[1.0], MNU=[1.05]))
    assert (single.spread, single.wanted) == (None, "bound: 1.1")


@pytest.mark.parametrize(
    ("sense", "values", "holds"),
    [
        (Sense.NO_LESS, [0.91, 0.92], True),
        (Sense.NO_LESS, [0.5, 0.52], False),
        (Sense.BELOW_ONE, [0.9, 0.91], True),
        (Sense.BELOW_ONE, [0.5, 1.4], False),  # on average below, but who knows
        (Sense.ABOVE_ONE, [3.0, 3.1], True),
        (Sense.ABOVE_ONE, [1.0], False),
    ],
)
def test_senses(sense: Sense, values: list[float], *, holds: bool) -> None:
    assert held(Claim("it", At("ratio", "x"), None, 0.92, sense), measured(ratio=values)) == holds


def test_a_verdict_takes_all_claims() -> None:
    good = Claim("good", At("a", "x"), None, 2.0)
    bad = Claim("bad", At("a", "x"), None, 0.5)
    found = measured(a=[1.0, 1.0])
    assert judge([good], found).grade is Grade.HOLDS
    assert judge([bad], found).grade is Grade.FAILS
    both = judge([good, bad], found)
    assert both.grade is Grade.PART
    assert both.sentence == "As claimed: 1 of 2 ratios; farthest from it is bad: 1 (printed: 0.5)."
    assert [(one.says, one.held) for one in both.checked] == [("good", True), ("bad", False)]
    assert criterion([good, bad]).startswith("no more than printed: good (2), bad (0.5). ")
    partly = judge([good, Claim("absent", At("b", "x"), None, 1.0)], found)
    assert partly[:2] == (Grade.HOLDS, "good: 1 (printed: 2); not measured: absent.")
    much = judge([good, *(Claim(name, At("b", "x"), None, 1.0) for name in ("an", "other", "one"))], found)
    assert much.sentence.endswith("; not measured: 3 others.")
    assert Claim("almost none", At("a", "x"), None, 1.00026).check(found).wanted == "printed: 1.00026"
    with pytest.raises(LookupError, match="absent"):
        judge([Claim("absent", At("a", "x"), At("a", "y"), 1.0)], found)


def test_the_farthest_from_its_claim_is_named() -> None:
    """Whatever is claimed of them: the sentence has room for one of many, and it must not be one that is as claimed."""
    found = measured(a=[0.9], b=[1.2], none=[0.0])
    close = Claim("close", At("b", "x"), None, 1.0)
    for far in (
        Claim("far", At("a", "x"), None, 2.0, Sense.ABOVE_ONE),
        Claim("far", At("a", "x"), None, 1.9, Sense.NO_LESS),
        Claim("far", At("b", "x"), None, 0.5, Sense.BELOW_ONE),
        Claim("far", At("none", "x"), None, 1.0, Sense.NO_LESS),
    ):
        for claims in ([close, far], [far, close]):
            assert "0 of 2 ratios; farthest from it is far: " in judge(claims, found).sentence
    # As claimed, but far from what is printed.
    above = Claim("above", At("b", "x"), None, 17.0, Sense.ABOVE_ONE)
    assert "1 of 2 ratios; farthest from it is close: " in judge([above, close], found).sentence


def options(text: str) -> Options:
    return parse_options(text)[0]


def test_definitions() -> None:
    made = options(f"{mapping(1000, 1)},{cloaking(1000, 0)}")
    assert len(made.range_map) == len(made.cloak_list) == 1000
    last = made.range_map[-1]
    assert (last.rm_low, last.rm_high, last.lc_low) == (USER + SHIFT, USER + SHIFT, USER)
    assert all(definition.lc_low >= ABSENT for definition in made.cloak_list)
    all_ten = options(f"{mapping(10, 10)},{cloaking(10, 10)}")
    assert {definition.lc_low for definition in all_ten.range_map} == set(range(USER, USER + 10))
    assert {definition.lc_low for definition in all_ten.cloak_list} == set(range(USER, USER + 10))


def test_every_configuration_is_valid() -> None:
    for case in (*worst(1000), *scaling((10, 100, 1000)), *general(1000), *relays(bindfs=True)):
        if case.options not in ("bare", "bindfs"):
            options(case.options)
        assert case.server_uid < SHIFT


def test_values_are_related_within_a_run() -> None:
    assert relative({"VAN": {"t": 2.0}, "MNU": {"t": 3.0, "u": 1.0}, "CLK": {}}, "t", "VAN") == {"VAN": 1.0, "MNU": 1.5}


class Anything(dict[str, float]):
    """The values of a case: 1 of whatever is asked for."""

    def __missing__(self, key: str) -> float:
        return 1.0

    def __contains__(self, key: object) -> bool:
        return True


@pytest.mark.parametrize("experiment", [*zadok.EXPERIMENTS, *toolkit.EXPERIMENTS], ids=lambda one: one.key)
def test_samples_are_what_the_claims_are_about(experiment: Experiment) -> None:
    """Every sample belongs to a figure of its experiment, every printed value has ours beside it, and all is judged."""
    name = experiment.key.removesuffix("-nfs")
    trial, samples = {
        "zadok-build": ("build", zadok.build_samples),
        "zadok-nfsstone": ("stone", zadok.stone_samples),
        "zadok-listing": ("worst", zadok.worst_samples),
        "zadok-scaling": ("scaling", zadok.scaling_samples),
        "sfs-mab": ("mab", toolkit.mab_samples),
        "toolkit-relay": ("latency", toolkit.latency_samples),
    }[name]
    values = {case.name: Anything() for case in TRIALS[trial].cases(False)}
    suffix = experiment.key.removeprefix(name)
    records = [
        RunRecord(experiment.key, point, run, 1.0, "today", tuple(samples(suffix, point, dict(values))))
        for point in experiment.points(False)
        for run in range(2)
    ]
    keys = {figure.key for figure in experiment.figures}
    assert {sample.figure for record in records for sample in record.samples} == keys
    for figure in experiment.figures:
        found = gathered(records, figure.key)
        verdict = figure.judge(found)
        assert re.search(r"1 \((printed|bound): ", verdict.sentence)
        assert "not measured" not in verdict.sentence
        for series in figure.paper_values:
            for point in series.points:
                assert found.at(series.name, point.x), (figure.key, series.name, point.x)
