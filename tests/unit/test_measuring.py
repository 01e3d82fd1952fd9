"""What measures is run in a clone: `python -m bench`. An installation only says so."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.mount.conftest import COMMAND

CLONE = Path(__file__).parents[2]

# A machine on which this package was left out; then the command.
_WITHOUT = """\
import runpy, sys

class Missing:
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] == {missing!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing)
runpy.run_module("bench", run_name="__main__", alter_sys=True)
"""


def run(*command: str, cwd: Path = CLONE) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize(("name", "where"), [("bench", "python -m bench"), ("prefetch", "python -m bench prefetch")])
@pytest.mark.parametrize("arguments", [[], ["--help"], ["papers", "--list", "-x", "--", "file"]])
def test_the_command_says_where_it_has_gone(name: str, where: str, arguments: list[str], tmp_path: Path) -> None:
    done = run(*COMMAND, name, *arguments, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"cloakfs: {name}: this is not installed any more; in a clone of the repository, run: {where}\n"
    )


def test_the_list_of_commands_leaves_it_out(tmp_path: Path) -> None:
    done = run(*COMMAND, "--help", cwd=tmp_path)
    assert (done.returncode, "  exposure " in done.stdout) == (0, True), done.stderr
    assert not {"bench", "prefetch"} & set(done.stdout.split())


@pytest.mark.parametrize("arguments", [[], ["papers"], ["prefetch"], ["prefetch", "replay"]])
def test_what_it_names_runs(arguments: list[str]) -> None:
    done = run(sys.executable, "-m", "bench", *arguments, "-h")
    assert (done.returncode, done.stdout.split()[:4]) == (0, ["Usage:", "python", "-m", "bench"]), done.stderr


def test_no_picture_is_no_matplotlib() -> None:
    done = run(sys.executable, "-c", _WITHOUT.format(missing="matplotlib"), "--list")
    assert (done.returncode, done.stderr) == (0, "")
