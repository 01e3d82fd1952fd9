"""The daemon's own files are opened as the daemon; a process that acts for nobody stays as it is."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from cloakfs.identity import ServerId
from cloakfs.linux import ROOT, Credentials, as_daemon, credentials, ownfiles

ORDINARY = """
import os
from cloakfs.linux import ownfiles
os.setgroups([4711])
os.setgid(4711)
os.setuid(4711)
ownfiles.stat("/")
ownfiles.listdir("/")
assert os.getgroups() == [4711]
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_command_of_an_ordinary_user_is_not_switched() -> None:
    done = subprocess.run([sys.executable, "-c", ORDINARY], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_thread_that_somebody_else_has_begun_is_the_daemons(tmp_path: Path) -> None:
    somebody = Credentials(ServerId(4711), ServerId(4711), ())
    private = tmp_path / "private"
    private.touch(mode=0o600)
    found: list[object] = []

    def look() -> None:
        for opened in (os.open, ownfiles.open_fd):
            try:
                os.close(opened(private, os.O_RDONLY))
                found.append("opened")
            except PermissionError:
                found.append("refused")

    def begin() -> None:
        credentials.assume(somebody)
        inner = threading.Thread(target=look)
        inner.start()
        inner.join()

    outer = threading.Thread(target=begin)
    outer.start()
    outer.join()
    assert found == ["refused", "opened"]


def test_each_function_acts_as_the_daemon_first() -> None:
    on_descriptors = {"fstat", "fstatvfs", "pread", "read", "write"}
    made_of_others = {"beside", "is_locked", "raised"}
    names = {name for name, made in vars(ownfiles).items() if callable(made) and not name.startswith("_")}
    doors = names - {"Iterator", "act_as_daemon", "as_daemon"} - on_descriptors - made_of_others
    assert {"open", "rmtree", "stat"} <= doors
    acting = as_daemon(os.stat).__code__
    assert [name for name in sorted(doors) if getattr(vars(ownfiles)[name], "__code__", None) is not acting] == []


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_thread_that_is_the_daemon_already_makes_no_system_call(monkeypatch: pytest.MonkeyPatch) -> None:
    credentials.assume(ROOT)
    monkeypatch.setattr(credentials, "syscall", lambda *_: pytest.fail("for nothing"))
    assert ownfiles.exists("/proc/self")
    credentials.act_as_daemon()
