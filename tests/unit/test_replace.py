"""A file is replaced as a whole, or not at all."""

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from cloakfs.linux import ownfiles


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "state")


def test_new_and_replaced(path: str) -> None:
    ownfiles.replace(path, b"long ago")
    with open(path, "rb") as reader:
        ownfiles.replace(path, b"now")
        assert reader.read() == b"long ago"
    assert Path(path).read_bytes() == b"now"
    assert not os.path.exists(ownfiles.beside(path))


@pytest.mark.parametrize(("more", "shown"), [({}, 0o640), ({"mode": 0o600}, 0o600)])
def test_permissions(path: str, more: dict[str, Any], shown: int) -> None:
    before = os.umask(0o027)
    try:
        ownfiles.replace(path, b"", **more)
    finally:
        os.umask(before)
    assert stat.S_IMODE(os.stat(path).st_mode) == shown


def test_what_a_killed_one_left_is_overwritten(path: str) -> None:
    Path(ownfiles.beside(path)).write_text("begun and never ended")
    ownfiles.replace(path, b"all")
    assert Path(path).read_bytes() == b"all"


def test_what_cannot_be_written_changes_nothing(path: str) -> None:
    ownfiles.replace(path, b"before")
    os.mkdir(ownfiles.beside(path))
    with pytest.raises(IsADirectoryError) as caught:
        ownfiles.replace(path, b"after")
    assert caught.value.filename == ownfiles.beside(path)
    assert Path(path).read_bytes() == b"before"


def test_a_disk_that_fails_changes_nothing(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_fd: int) -> None:
        raise OSError(5, "Input/output error")

    ownfiles.replace(path, b"before")
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output error") as caught:
        ownfiles.replace(path, b"after", durable=True)
    assert caught.value.filename == path
    assert not os.path.exists(ownfiles.beside(path)), "which would take up room"
    assert Path(path).read_bytes() == b"before"


@pytest.mark.parametrize(("durable", "expected"), [(False, ["replace"]), (True, ["fsync 5", "replace"])])
def test_it_is_on_disk_before_it_has_its_name(
    path: str, monkeypatch: pytest.MonkeyPatch, *, durable: bool, expected: list[str]
) -> None:
    calls = []
    monkeypatch.setattr(os, "fsync", lambda fd: calls.append(f"fsync {os.fstat(fd).st_size}"))
    monkeypatch.setattr(os, "replace", lambda _old, _new: calls.append("replace"))
    ownfiles.replace(path, b"final", durable=durable)
    assert calls == expected
