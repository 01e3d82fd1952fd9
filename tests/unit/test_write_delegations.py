"""On which kernels an NFSv4 client may get a delegation for writing, with which it would lock without telling."""

import os
from types import SimpleNamespace

import pytest

from cloakfs.linux import mounting


@pytest.mark.parametrize(
    ("release", "may"),
    [("5.10.0-30-amd64", False), ("6.1.176", False), ("6.5-rc1", False), ("6.6.0", True), ("6.12.113+deb13", True),
     ("6.6-rc1", True), ("7.0.1", True), ("10.1", True)],
)  # fmt: skip
def test_since_linux_6_6(release: str, may: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(release=release))
    monkeypatch.setattr(mounting, "may_lease", lambda: True)
    assert mounting.may_delegate_writing() == may
    monkeypatch.setattr(mounting, "may_lease", lambda: False)
    assert not mounting.may_delegate_writing()
