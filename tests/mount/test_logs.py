"""Where the log of a mount in the background goes, and that it survives its rotation."""

import os
import signal
import socket
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.mount import alterations
from tests.waiting import wait_until

from .conftest import Mount, daemons_with, is_mounted, run


@pytest.mark.usefixtures("figures_at_once")
def test_a_log_file_that_is_rotated_is_begun_anew(base: str, tree: str, mount: Callable[..., Mount]) -> None:
    log = os.path.join(base, "lab.log")
    m = mount("-o", f"log={log}")
    assert f"{m.path}: serving {tree}\n" in Path(log).read_text()
    os.rename(log, f"{log}.1")
    wait_until(lambda: os.path.exists(log))
    assert stat.S_IMODE(os.stat(log).st_mode) == 0o600
    os.kill(m.pid, signal.SIGHUP)
    wait_until(lambda: "nothing to reload" in Path(log).read_text())
    assert "nothing to reload" not in Path(f"{log}.1").read_text()
    Path(f"/run/cloakfs/{m.key}.log").touch()  # which the clean-up of the test looks at


def test_to_syslog(base: str, tree: str) -> None:
    path, place = os.path.join(base, "view"), os.path.join(base, "syslog")
    os.mkdir(path)
    with daemons_with(partial(alterations.log_to_syslog_at, place)):
        done = run("mount", tree, path, "-o", "log=syslog", check=False)
        assert (done.returncode, done.stderr) == (1, f"cloakfs: log=syslog: {place}: No such file or directory\n")
        assert not is_mounted(path)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as heard:
            heard.bind(place)
            heard.settimeout(60)
            run("mount", tree, path, "-o", "log=syslog")
            pid = Mount(tree, path).pid
            run("umount", path)
            assert heard.recv(1000).decode() == f"<30>cloakfs[{pid}]: {path}: serving {tree}"
            assert f"{path}: access is checked by the daemon alone" in heard.recv(1000).decode()
            assert heard.recv(1000).decode() == f"<30>cloakfs[{pid}]: {path}: unmounted"
    assert Mount(tree, path).log == ""


def test_a_log_needs_a_place(base: str, tree: str) -> None:
    done = run("mount", tree, base, "-o", "log=lab.log", check=False)
    assert (done.returncode, done.stderr) == (
        2,
        "cloakfs: -o log=lab.log: expected syslog, or a file with its whole path\n",
    )
