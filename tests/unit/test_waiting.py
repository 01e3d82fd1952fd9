"""A wait of a test ends when its condition is met, and says for what it waited in vain."""

import re
import subprocess
import sys
from functools import partial

import pytest
import trio

from tests.processes import wait_until_blocked
from tests.waiting import wait_in_loop, wait_until


def test_a_wait_ends_when_its_condition_is_met() -> None:
    answers = iter([False, False, True])
    assert wait_until(lambda: next(answers), every=0.01) >= 0.02
    left = iter([False, True])
    trio.run(wait_in_loop, lambda: next(left))


def test_a_wait_in_vain_says_for_what() -> None:
    nothing: list[int] = []
    with pytest.raises(AssertionError, match=re.escape("not within 0 s: wait_until(lambda: nothing == [7], 0)")):
        wait_until(lambda: nothing == [7], 0)
    with pytest.raises(AssertionError, match=r"__contains__.*'seven'"):
        wait_until(partial("".__contains__, "seven"), 0)
    with pytest.raises(AssertionError, match=re.escape("lambda: nothing, 0)")):
        trio.run(lambda: wait_in_loop(lambda: nothing, 0))


def test_a_process_that_reads_from_an_empty_pipe_is_blocked() -> None:
    """It has begun to read: what it printed before is there."""
    program = "print('begun', flush=True); input(); input()"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as one:
        assert one.stdin is not None
        assert one.stdout is not None
        wait_until_blocked(one.pid)
        assert one.stdout.readline() == "begun\n"
        one.stdin.write("\n\n")
        one.stdin.flush()
        wait_until_blocked(one.pid)  # it has ended, and nobody has waited for it
