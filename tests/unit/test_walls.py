"""The linter refuses code that bypasses the one module that touches the real tree."""

import os
import subprocess
import sys
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
        "from . import linux\nlinux.credentials.assume(linux.ROOT)\n",
        "from .linux.credentials import assume\nassume(None)\n",
        "from cloakfs import linux\nlinux.credentials.assume(linux.ROOT)\n",
    ],
)
@pytest.mark.parametrize("place", ["cloakfs/explain.py", "cloakfs/groups.py", "cloakfs/watch.py", "cloakfs/new.py"])
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
        "cloakfs/watch.py", "from .linux import ROOT\nfrom .tree import calls\ncalls.open(ROOT, 3, 0)\n"
    )
    assert not refusals("cloakfs/watch.py", "from . import linux\nlinux.act_as_daemon()\n")
