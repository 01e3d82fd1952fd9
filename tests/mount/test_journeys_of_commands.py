"""The way of a command through the code: how many functions are called, and in how many files."""

import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import cli
import cloakfs
from cli.main import cloakfs as command
from cloakfs.config import files
from cloakfs.nfs import knfsd
from cloakfs.nfs.plan import plan
from cloakfs.state import runtime
from tests.journeys import Journey

OURS = tuple(os.path.dirname(str(package.__file__)) + os.sep for package in (cloakfs, cli))


def measure(call: Callable[[], Any]) -> Journey:
    """Call a function, and return what that takes of cloakfs and its commands when their modules are loaded."""
    called: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(OURS):
            called.append(file)

    call()
    gc.disable()  # what is left of other tests may call something when it is collected
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
        gc.enable()
    return Journey.of(called)


@pytest.fixture
def exports(tree: str) -> str:
    """The path of an exports.d file with an entry for the tree."""
    Path(tree, "file").write_bytes(b"")
    os.makedirs(f"{tree}/exports.d")
    path = f"{tree}/exports.d/home.exports"
    Path(path).write_text(f"{tree} 10.1.0.0/16(rw,cloak_list=uid +077 0 -1)\n")
    return path


def test_explain(
    tree: str, exports: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without the mounts that there happen to be, each of which takes some calls."""
    monkeypatch.setattr(runtime, "RUN_DIR", str(tmp_path))
    words = ["explain", f"{tree}/file", "--as", "1000:1000", "--exports", exports, "--client", "10.1.0.0/16"]

    def explain() -> None:
        with pytest.raises(SystemExit) as ended:
            command.main(words)
        assert ended.value.code == 0

    journey = measure(explain)
    assert "unchanged" in capsys.readouterr().out
    assert not journey.is_longer_than(Journey(524, 30, 218)), journey


def test_export_plan(exports: str) -> None:
    """Without what depends on the machine: other exports, and NFS servers."""

    def make() -> None:
        made = plan(files.read(exports)[0], "knfsd", "/srv/cloakfs")
        assert "10.1.0.0/16(" in knfsd.render(made.mounts)

    journey = measure(make)
    assert not journey.is_longer_than(Journey(399, 14, 129)), journey
