"""An error that a user can mend is one line, whoever forgot to deal with it; any other has a traceback."""

import subprocess
import sys
from pathlib import Path

import pytest

_COMMAND = """\
import click
from cli.output import run
from cloakfs.messages import UserError
from cloakfs.tree.views import ViewError

@click.command()
def command():
    click.echo("found so far")
    raise {error}

run(command, None)
"""


@pytest.mark.parametrize("error", ["UserError('lab: \\x1b is wrong')", "ViewError('lab: \\x1b is wrong')"])
def test_one_line(error: str) -> None:
    done = raising(error)
    assert (done.returncode, done.stdout, done.stderr) == (1, "found so far\n", "cloakfs: lab: \\033 is wrong\n")


def test_others_are_faults() -> None:
    done = raising("ValueError('lab: wrong')")
    assert (done.returncode, done.stderr.splitlines()[-1]) == (1, "ValueError: lab: wrong")
    assert "Traceback" in done.stderr


def raising(error: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", _COMMAND.format(error=error)]
    top = Path(__file__).parents[2]
    return subprocess.run(command, cwd=top, capture_output=True, text=True, check=False, timeout=60)
