"""Measures whether the time of a LOOKUP tells more of a hidden name than it does without the alarm of probes."""

import argparse
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from cloakfs.state.runtime import STATE_DIR
from tests.agents import User
from tests.mount.conftest import Mount, mounted

PROBER, OWNER = 1001, 1003
SETTINGS = ("off", "60/min")
NAMES = 200

Times = dict[str, list[int]]


def look_up(paths: list[str]) -> list[int]:
    """The time of each failing stat(2), in nanoseconds."""
    times = []
    for path in paths:
        began = time.perf_counter_ns()
        try:
            os.stat(path)
        except FileNotFoundError:
            times.append(time.perf_counter_ns() - began)
    assert len(times) == len(paths)
    return times


def one_round(prober: User, top: str, order: random.Random) -> dict[str, dict[str, float]]:
    """The times of hidden and of absent names in µs, looked up in random order: the median and the first decile."""
    names = [(kind, number) for kind in ("hidden", "absent") for number in range(NAMES)]
    order.shuffle(names)
    times = prober.do(look_up, [f"{top}/{kind}{number}" for kind, number in names])
    by_kind: Times = {"hidden": [], "absent": []}
    for (kind, _), took in zip(names, times, strict=True):
        by_kind[kind].append(took)
    deciles = {kind: statistics.quantiles(taken, n=10) for kind, taken in by_kind.items()}
    return {
        name: {kind: values[at] / 1000 for kind, values in deciles.items()} for name, at in (("median", 4), ("p10", 0))
    }


def interval(values: list[float], chance: random.Random) -> tuple[float, float]:
    """The 95 % interval of the median (bootstrap)."""
    medians = sorted(statistics.median(chance.choices(values, k=len(values))) for _ in range(2000))
    return medians[50], medians[-51]


def main() -> int:
    """Run the campaign."""
    parser = argparse.ArgumentParser(prog="scripts/campaign timing", description=__doc__)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    words = parser.parse_args()
    print(f"timing: seed {words.seed}", file=sys.stderr, flush=True)
    order = random.Random(words.seed)
    base = tempfile.mkdtemp(prefix="cloakfs-test-")
    os.chmod(base, 0o755)
    rounds: dict[str, list[dict[str, dict[str, float]]]] = {setting: [] for setting in SETTINGS}
    try:
        real = os.path.join(base, "real")
        os.mkdir(real, 0o755)
        for number in range(NAMES):
            Path(real, f"hidden{number}").touch(0o600)
            os.chown(f"{real}/hidden{number}", OWNER, OWNER)
        with ExitStack() as stack:
            prober = stack.enter_context(User(PROBER))
            mounts: dict[str, Mount] = {}
            for number, setting in enumerate(SETTINGS):
                point = os.path.join(base, f"mnt{number}")
                os.mkdir(point)
                options = f"probe_alarm={setting},cloak_list=uid +077 {OWNER} {OWNER}"
                stack.callback(shutil.rmtree, os.path.join(STATE_DIR, Mount(real, point).key), ignore_errors=True)
                mounts[setting] = stack.enter_context(mounted(real, point, "-o", options))
            for count in range(-2, words.rounds):  # the first two are not counted
                for setting in order.sample(SETTINGS, len(SETTINGS)):
                    figures = one_round(prober, mounts[setting].path, order)
                    if count >= 0:
                        rounds[setting].append(figures)
    finally:
        shutil.rmtree(base)
    # A thousandth of a LOOKUP is no finding: one run in forty would have one by chance.
    return int(max(compare(rounds, name, order) for name in ("median", "p10")) > 0.001)


def compare(rounds: dict[str, list[dict[str, dict[str, float]]]], name: str, chance: random.Random) -> float:
    """Print by how much hidden and absent names differ; return what the alarm surely adds, as a share of a LOOKUP."""
    gaps = {}
    for setting, figures in rounds.items():
        hidden, absent = ([one[name][kind] for one in figures] for kind in ("hidden", "absent"))
        gaps[setting] = [one - other for one, other in zip(hidden, absent, strict=True)]
        low, high = interval(gaps[setting], chance)
        print(
            f"{name}, probe_alarm={setting}: hidden {statistics.median(hidden):.2f} µs, "
            f"absent {statistics.median(absent):.2f} µs, difference {statistics.median(gaps[setting]):.2f} µs "
            f"({low:.2f} to {high:.2f})"
        )
    more = [with_alarm - without for without, with_alarm in zip(*gaps.values(), strict=True)]
    low, high = interval(more, chance)
    print(f"{name}: the alarm adds {statistics.median(more):.2f} µs to the difference ({low:.2f} to {high:.2f}, 95 %)")
    return low / statistics.median(absent)


if __name__ == "__main__":
    sys.exit(main())
