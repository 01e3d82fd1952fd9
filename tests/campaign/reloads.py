"""Makes each step of a reload fail in turn: everything is as before, or all of it is new. Or each step of a start."""

import argparse
import sys
import time

from tests.nfs.reloadfaults import ENDS, FAULTS
from tests.nfs.reloads import Reloads, in_new_network, run

PATIENCE = 90.0


def one(site: Reloads, step: int, fault: str, old: dict[str, object], new: dict[str, object]) -> tuple[bool, str, str]:
    """Let one step fail.

    Returns:
        whether there was such a step; what it was, with the exit status and the message; and what is wrong ("" if
        nothing is).
    """
    site.fail_at(step, fault, site.victim(fault))
    site.new()
    done = site.reload()
    steps = site.steps()
    wanted = old if done.returncode else new
    # What had to be put back may take a second attempt, as the message says; what was killed is replaced.
    is_later = (
        "not as before" in done.stderr or fault != "error" or steps[step - 1 :][:1] == [f"{step} write service.json"]
    )
    seen = site.settled(wanted, PATIENCE if is_later else 0)
    wrong = "".join(f"\n  {key}: {seen[key]}\n  wanted {wanted[key]}" for key in wanted if seen[key] != wanted[key])
    if done.returncode and "not reloaded, the old configuration stays in force" not in done.stderr:
        wrong += f"\n  {done}"
    what = steps[step - 1] if len(steps) >= step else "(no such step)"
    return len(steps) >= step, f"{what}: status {done.returncode} {' | '.join(done.stderr.splitlines()[-3:])}", wrong


def starts(server: str, first: int, ways: list[str]) -> int:
    """End a guard at each step of its start; return how often something was wrong afterwards."""
    failures = 0
    with in_new_network(), Reloads(server, is_up=False, name="test-start") as site:
        for how in ways:
            step, is_step = first, True
            while is_step:
                site.fail_at(step, how)
                began = time.monotonic()
                up = site.up()
                steps = site.steps()
                is_step = len(steps) >= step
                there = any(site.root in line for line in site.left())
                told = run("status")
                is_still_there = any(site.root in line for line in site.left())
                down = site.down()
                left = site.left()
                # Without its starters, the guard goes on for a moment, and may end between two looks.
                is_told = site.name in told.stdout or not (there and is_still_there)
                wrong = bool(left) or not is_told or (not is_step and (up.returncode or down.returncode))
                failures += wrong
                print(
                    f"{how} {steps[step - 1] if is_step else '(no such step)'}: up {up.returncode}, down "
                    f"{down.returncode} ({time.monotonic() - began:.0f} s)"
                    + (f"\n  {up}\n  {told}\n  {down}\n  {left}" if wrong else ""),
                    flush=True,
                )
                step += 1
    return failures


def main() -> int:
    """Run the campaign."""
    parser = argparse.ArgumentParser(prog="scripts/campaign reloads", description=__doc__)
    parser.add_argument("--server", choices=("ganesha", "knfsd"), default="ganesha")
    parser.add_argument("--first", type=int, default=1, help="the step to begin with")
    parser.add_argument("--fault", choices=FAULTS, action="append")
    parser.add_argument("--start", choices=ENDS, action="append", help="end a guard so while it starts, instead")
    arguments = parser.parse_args()
    if arguments.start:
        failures = starts(arguments.server, arguments.first, arguments.start)
        print(f"{failures} failures")
        return failures != 0
    failures = 0
    with in_new_network(), Reloads(arguments.server) as site:
        old = site.seen()
        site.new()
        assert site.reload().returncode == 0
        new = site.seen()
        for fault in arguments.fault or FAULTS:
            step = arguments.first
            while True:
                site.old()
                done = site.reload()  # after a failure, this is the correction, and there is nothing to do
                seen = site.settled(old, 0 if fault == "error" else PATIENCE)
                if done.returncode or seen != old:
                    print(f"{fault} {step}: the way back: {done} {seen}", flush=True)
                    failures += 1
                began = time.monotonic()
                is_step, what, wrong = one(site, step, fault, old, new)
                print(f"{fault} {what} ({time.monotonic() - began:.0f} s){wrong}", flush=True)
                failures += bool(wrong)
                if not is_step:
                    break
                step += 1
    print(f"{failures} failures")
    return failures != 0


if __name__ == "__main__":
    sys.exit(main())
