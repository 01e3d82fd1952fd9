"""The measuring commands are a package of their own: imported only when called, and named if it is missing."""

import subprocess
import sys

import click
import pytest

from bench.prefetch.command import prefetch
from bench.speed.command import bench
from cli.main import cloakfs

# A machine on which the package named was left out; then the command, and what it imported of ours for measuring.
_COMMAND = """\
import atexit, sys

class Missing:
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] == {missing!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing)
atexit.register(lambda: print("imported:", *sorted(sys.modules.keys() & {{"cloakfs_bench", "matplotlib"}})))
from cloakfs_cli.main import main
main()
"""


def run(*arguments: str, missing: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", _COMMAND.format(missing=missing), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["mount", "--help"]])
def test_it_is_not_imported_for_anything_else(arguments: list[str]) -> None:
    done = run(*arguments)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "imported:"


def test_no_picture_is_no_matplotlib() -> None:
    done = run("bench", "--list", missing="matplotlib")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "imported: cloakfs_bench"), done.stderr


@pytest.mark.parametrize("name", ["bench", "prefetch"])
@pytest.mark.parametrize("missing", ["cloakfs_bench", "rich"])
def test_where_it_is_missing_one_line_says_so(name: str, missing: str) -> None:
    done = run(name, "--help", missing=missing)
    assert (done.returncode, done.stderr) == (
        1, f"cloakfs: {name}: {missing} is not installed (pip install 'cloakfs[bench]')\n"
    )  # fmt: skip


def test_help_is_there_without_it() -> None:
    assert run("--help", missing="cloakfs_bench").stdout == run("--help").stdout


@pytest.mark.parametrize("command", [bench, prefetch])
def test_help_says_what_the_command_itself_says(command: click.Command) -> None:
    listed = cloakfs.get_command(click.Context(cloakfs), str(command.name))
    assert listed is not None
    assert listed.get_short_help_str(200) == command.get_short_help_str(200)
