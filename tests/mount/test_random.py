"""The random tester of tests/campaign: a few programs, and that it notices what it is there for."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import pytest

from tests.altered import command_with
from tests.campaign import random as tester
from tests.mount import alterations

SOME_COMPARISONS = 1000


@pytest.fixture
def top() -> Iterator[str]:
    path = tempfile.mkdtemp(prefix="cloakfs-random-")
    os.chmod(path, 0o755)
    yield path
    shutil.rmtree(path)


@pytest.mark.parametrize("seed", range(8000, 8002))
def test_a_program_shows_no_difference(seed: int, top: str) -> None:
    counts = tester.Counts()
    program = tester.draw(seed, ("tmpfs",), 60)
    assert tester.run(program, top, counts, patience=10.0) == "", tester.script(program)
    assert counts.comparisons > SOME_COMPARISONS


def hiding() -> tester.Program:
    step, op = tester.Step, tester.Op
    return tester.Program(
        "tmpfs",
        tester.Policy(("uid +077 0 4294967294",)),
        (
            step("through", 0, op("create", "a", mode=0o600)),
            step("keep", 0, op("", "a"), 1, "file"),
            step("look"),
        ),
    )


def test_what_is_shown_although_it_is_hidden_is_a_difference(top: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = hiding()
    assert tester.run(program, top, tester.Counts(), 1.0) == ""
    monkeypatch.setattr(tester, "COMMAND", command_with(alterations.hide_nothing))
    found = tester.run(program, top, tester.Counts(), 0.1)
    assert "listed: ('a',) instead of ()" in found


def test_a_program_is_made_as_short_as_possible() -> None:
    program = tester.draw(1, tester.KINDS, 60)
    step = program.steps[7]
    assert tester.shorten(program, lambda shorter: step in shorter.steps, 5).steps == (step,)


def test_a_program_can_be_repeated_from_its_script() -> None:
    done = subprocess.run([sys.executable, "-c", tester.script(hiding())], capture_output=True, text=True, check=True)
    assert done.stdout == "no difference\n"


def test_a_seed_is_one_program() -> None:
    assert tester.draw(7, tester.KINDS, 60) == tester.draw(7, tester.KINDS, 60) != tester.draw(8, tester.KINDS, 60)
