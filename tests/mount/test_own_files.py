"""The daemon opens files of its own as itself, whatever credentials the thread had before."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from cloakfs.identity import ServerId
from cloakfs.linux import Credentials, credentials
from cloakfs.state.runtime import RUN_DIR, STATE_DIR
from cloakfs.tuning import Tuning
from tests.agents import User, read, write
from tests.mount import alterations, strangers
from tests.waiting import wait_until

from .conftest import Mount, daemons_with, run

MakeMount = Callable[..., Mount]
MakeUser = Callable[..., User]

OFTEN = Tuning(housekeeping_seconds=0.05, view_seconds=0.1, probe_seconds=0.05)

PLUGIN = """
from cloakfs.policy import Policy

class P(Policy):
    def visible(self, who, attrs):
        with open({rules!r}) as file:  # which only root may read
            hidden = file.read().split()
        attrs.accessible(who, 4)
        with open({rules!r}) as file:
            return attrs.name not in hidden and file.read() is not None
"""


def asking(user: MakeUser, uid: int, *groups: int) -> User:
    """A process that asks as a server does for its clients: with these file-system ids, and as root otherwise."""
    made = user(0, 0, groups)
    made.do(credentials.assume, Credentials(ServerId(uid), ServerId(uid), tuple(map(ServerId, groups))))
    return made


def use(m: Mount, user: MakeUser) -> None:
    """Do a bit of everything, as several users, in front of the mount and behind it."""
    ann, bob = asking(user, 3001, 3005), asking(user, 3002)
    ann.do(os.mkdir, m.at("ann"))
    for number in range(20):
        ann.do(write, m.at("ann", f"file{number}"), b"text")
    assert len(bob.do(os.listdir, m.at("ann"))) == 20
    assert bob.do(read, m.at("ann", "file1")) == b"text"
    bob.error(os.unlink, m.at("ann", "file1"))
    bob.error(os.stat, m.at("hidden"))
    bob.error(write, m.at("hidden"), b"")
    ann.do(os.symlink, "file1", m.at("ann", "link"))
    ann.do(os.link, m.at("ann", "file1"), m.at("ann", "other"))
    ann.do(os.rename, m.at("ann", "file2"), m.at("ann", "renamed"))
    ann.do(os.setxattr, m.at("ann", "renamed"), "user.x", b"1")
    ann.do(os.listxattr, m.at("ann", "renamed"))
    ann.do(os.truncate, m.at("ann", "renamed"), 2)
    ann.do(os.chmod, m.at("ann", "renamed"), 0o640)
    ann.do(os.unlink, m.at("ann", "file3"))
    os.rename(m.real("ann", "file4"), m.real("ann", "moved"))
    os.chmod(m.real("ann", "file5"), 0o600)
    wait_until(lambda: "moved" in bob.do(os.listdir, m.at("ann")))
    os.mkdir(m.real("below"))
    subprocess.run(["mount", "-t", "tmpfs", "none", m.real("below")], check=True)
    try:
        os.chmod(m.real("below"), 0o777)
        ann.do(write, m.at("below", "file"), b"")
        os.stat(m.at("below", "file"))
    finally:
        subprocess.run(["umount", "--lazy", m.real("below")], check=True)
    for words in (
        ["status", m.path],
        ["explain", m.at("ann", "renamed"), "--as", "3002:3002"],
        ["trace", m.path, "--seconds", "0.1"],
        ["events", m.path],
        ["metrics"],
    ):
        run(*words)
    with contextlib.suppress(OSError):
        ann.do(os.readlink, m.at("ann", "link"))


@pytest.fixture
def noted(base: str) -> str:
    return os.path.join(base, "noted")


def strange(noted: str) -> list[str]:
    return [line for line in Path(noted).read_text(errors="replace").splitlines() if line.startswith("STRANGE")]


def own(noted: str) -> str:
    return "\n".join(line for line in Path(noted).read_text(errors="replace").splitlines() if line.startswith("own"))


@pytest.mark.parametrize("more", [[], ["-o", "knfsd"]], ids=["local", "exported"])
def test_whoever_begins(base: str, noted: str, tree: str, mount: MakeMount, user: MakeUser, more: list[str]) -> None:
    private = os.path.join(base, "private")  # as the daemon's state, and its program, may be
    os.mkdir(private, 0o700)
    rules, plug_in, log = (os.path.join(private, name) for name in ("rules", "plug.py", "log"))
    Path(rules).write_text("hidden")
    Path(plug_in).write_text(PLUGIN.format(rules=rules))
    Path(tree, "hidden").touch()
    entry = Path(private, "lab.exports")
    entry.write_text(f"{tree} *(rw, policy=plug.py:P, groups=database)\n")
    with daemons_with(
        partial(strangers.alter, noted),
        partial(alterations.fail_at_readlink, ZeroDivisionError, "as a bug would"),
        tuning=OFTEN,
    ):
        m = mount("--exports", str(entry), "-o", f"log={log}", *more)
    Path(f"/run/cloakfs/{m.key}.log").touch()  # which the clean-up of the test looks at
    use(m, user)
    os.rename(log, f"{log}.1")
    wait_until(lambda: os.path.exists(log))
    entry.write_text(f"{tree} *(rw, policy=plug.py:P, prefetch=off, groups=database)\n")
    os.kill(m.pid, signal.SIGHUP)
    wait_until(lambda: "reloaded" in Path(log).read_text())
    assert f"{m.path}: reloaded" in Path(log).read_text()
    asking(user, 3003).do(os.listdir, m.path)
    run("umount", m.path)
    assert not strange(noted)
    met = own(noted)
    for file in ("/proc/", RUN_DIR, STATE_DIR, log, rules, "SQL"):
        assert file in met, f"{file} was never opened, so that this shows nothing"
    assert "raise error(*arguments)" in Path(f"{log}.1").read_text(), "the source is not in the traceback"


def test_over_another_mount(noted: str, tree: str, mount: MakeMount, user: MakeUser) -> None:
    lower = mount()
    with daemons_with(partial(strangers.alter, noted), tuning=OFTEN):
        m = mount(source=lower.path)
    user(3001).do(write, m.at("file"), b"text")
    assert user(3002).do(read, m.at("file")) == b"text"
    run("umount", m.path)
    assert not strange(noted)
    assert RUN_DIR in own(noted)


def test_this_would_find_what_is_opened_as_a_caller(noted: str, mount: MakeMount, user: MakeUser) -> None:
    with daemons_with(partial(strangers.alter, noted), strangers.forget_to_switch):
        m = mount()
    user(3001).error(os.listdir, m.path)
    wait_until(lambda: strange(noted))
    assert any("/proc/" in line for line in strange(noted))
