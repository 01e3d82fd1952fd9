"""No code bypasses the modules that touch files: the real tree as somebody, and the daemon's own as the daemon."""

import ast
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

TOP = Path(__file__).parents[2]


def refusals(place: str, code: str) -> list[str]:
    """The banned calls in a module of this path with this code."""
    ruff = subprocess.run(
        [os.path.join(os.path.dirname(sys.executable), "ruff"), "check", "--select=TID251", "--no-cache",
         "--output-format=concise", f"--stdin-filename={place}", "-"],
        input=code, cwd=TOP, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ruff.returncode in (0, 1), ruff.stderr
    return [line for line in ruff.stdout.splitlines() if " TID251 " in line]


@pytest.mark.parametrize(
    "code",
    [
        "import os\nos.open('x', os.O_RDONLY, dir_fd=3)\n",
        "import os\nos.unlink('x', dir_fd=3)\n",
        "from os import scandir\nscandir(3)\n",
        "import os as system\nsystem.getxattr('x', 'user.x')\n",
        "import os\ncall = os.stat\n",
        "from pathlib import Path\nPath('x').stat()\n",
        "import os.path\nos.path.exists('x')\n",
        "from .. import linux\nlinux.credentials.assume(linux.ROOT)\n",
        "from ..linux.credentials import assume\nassume(None)\n",
        "from cloakfs import linux\nlinux.credentials.assume(linux.ROOT)\n",
        "import sqlite3\nsqlite3.connect('x')\n",
        "import socket\nsocket.socket(socket.AF_UNIX, socket.SOCK_STREAM).connect('x')\n",
        "import subprocess\nsubprocess.run(['x'])\n",
        "import trio\ncall = trio.run_process\n",
        "import trio\ncall = trio.lowlevel.open_process\n",
        "import trio\ncall = trio.open_unix_socket\n",
        "import pwd\npwd.getpwuid(0)\n",
        "import io\nio.open('x')\n",
        "from .. import linux\nwith linux.raised(linux.CAP_SYS_ADMIN):\n    linux.umount('x')\n",
    ],
)
@pytest.mark.parametrize(
    "place",
    ["cloakfs/audit/explain.py", "cloakfs/kernelcache/watch.py", "cloakfs/mount/control.py", "cloakfs/mount/new.py"],
)
def test_the_real_tree_is_touched_in_one_place(place: str, code: str) -> None:
    assert refusals(place, code)


@pytest.mark.parametrize("place", ["cloakfs/tree/new.py"])
@pytest.mark.parametrize(
    "code", ["import os\nos.open('x', os.O_RDONLY)\n", "from .. import linux\nlinux.credentials.assume(linux.ROOT)\n"]
)
def test_also_in_a_package(place: str, code: str) -> None:
    assert refusals(place, code)


def test_there_it_says_as_whom() -> None:
    assert not refusals("cloakfs/tree/calls.py", "import os\nos.open('x', os.O_RDONLY, dir_fd=3)\n")
    assert not refusals(
        "cloakfs/kernelcache/watch.py", "from ..linux import ROOT\nfrom ..tree import calls\ncalls.open(ROOT, 3, 0)\n"
    )
    assert not refusals("cloakfs/kernelcache/watch.py", "from ..linux import ownfiles\nownfiles.open_fd('x', 0)\n")


DOORS = {
    "cloakfs/linux/ownfiles.py",
    "cloakfs/config/files.py",  # read before there is a mount, or in a process of its own
    "cloakfs/plugin/loader.py",  # a plug-in, whose code must not run as a caller anyway
}


def opens(code: str) -> list[int]:
    """The lines in which the builtin `open` is used, which the linter cannot ban."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.Name) and node.id == "open" and isinstance(node.ctx, ast.Load)
    ]


def test_files_are_not_opened_by_the_builtin() -> None:
    assert sorted(opens("with open('x') as file:\n    pass\ncall = open\nfile.open()\n")) == [1, 3]
    modules = {path.relative_to(TOP).as_posix(): path.read_text() for path in (TOP / "cloakfs").rglob("*.py")}
    assert {module for module, code in modules.items() if opens(code)} == DOORS


def test_where_the_daemon_is_acted_as_by_hand() -> None:
    modules = {path.relative_to(TOP).as_posix(): path.read_text() for path in (TOP / "cloakfs").rglob("*.py")}
    assert {
        module for module, code in modules.items() if "act_as_daemon()" in code.replace("def act_as_daemon()", "")
    } == {
        "cloakfs/mount/control.py",  # a plug-in is asked for a daemon above
        "cloakfs/mount/reload.py",  # a plug-in is loaded again
        "cloakfs/linux/ownfiles.py",
        "cloakfs/tree/calls.py",  # what goes on after a call as somebody else is none of ours
    }


def test_what_lies_loose_is_pure() -> None:
    """A module outside the rooms decides, and touches nothing: import-linter checks the ones that it is told of."""
    contracts = tomllib.loads((TOP / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (pure,) = [contract for contract in contracts if contract["name"] == "Pure logic makes no system calls"]
    loose = {f"cloakfs.{path.stem}" for path in (TOP / "cloakfs").glob("*.py") if path.stem != "__init__"}
    assert loose == {module for module in pure["source_modules"] if module.count(".") == 1}
