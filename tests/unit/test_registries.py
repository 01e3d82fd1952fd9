"""What is installed comes through package managers, which know their registries: mirrors, proxies, offline copies."""

import re
import subprocess
from pathlib import Path

TOP = Path(__file__).parents[2]
HOSTS = re.compile(r"pythonhosted\.org|pypi\.org|//deb\.debian\.org|security\.debian\.org|static\.crates\.io")


def test_no_script_names_the_host_of_a_registry() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=TOP, capture_output=True, check=True).stdout
    files = [
        TOP / name.decode() for name in listed.split(b"\0") if name and name.decode() != "tests/unit/test_registries.py"
    ]
    assert TOP / "scripts/setup" in files
    assert [str(file) for file in files if file.is_file() and HOSTS.search(file.read_text(errors="replace"))] == []
