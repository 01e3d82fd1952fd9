"""A reload is all or nothing, whichever of its steps fails, with nfs-ganesha in a network of its own.

`scripts/campaign reloads` makes all of its steps fail, one after the other.
"""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from cloakfs.state.runtime import STATE_DIR, mounted
from tests.mount.conftest import COMMAND
from tests.nfs.reloads import Reloads, in_new_network, run
from tests.nfs.test_ganesha_process import _missing

pytestmark = [pytest.mark.skipif(_missing() is not None, reason=_missing() or "")]


@pytest.fixture(scope="module")
def site() -> Iterator[Reloads]:
    with in_new_network(), Reloads("ganesha") as made:
        yield made


LAST = {
    "idle": (("write ganesha.conf", 2, "error"), ("end a daemon", 2, "error"), ("reload the server", 2, "server")),
    "in use": (("write ganesha.conf", 1, "error"), ("end a daemon", 2, "error")),
}
"""The last step of each kind, since most has to be taken back then; and what happens. A server of which clients have
files open is ended and started instead of being reloaded."""


@pytest.mark.parametrize("server", LAST)
def test_a_step_of_a_reload_fails(site: Reloads, server: str) -> None:
    old, new = site.both()
    for what, number, fault in LAST[server]:
        if server == "idle":
            for write in (site.new, site.old):
                write()
                assert site.reload().returncode == 0  # and no client has opened anything since
        site.fail_at(number, fault, site.victim(fault), kind=what)
        site.new()
        done = site.reload()
        site.steps()
        assert done.returncode == 1, (what, done)
        assert "not reloaded, the old configuration stays in force" in done.stderr
        # The error says at once what was done; a server that was killed has to be started first.
        assert ("not as before" in done.stderr) <= (fault != "error"), (what, done)
        assert site.settled(old, 0 if fault == "error" else 60) == old, (what, done)
    # And then it is corrected, and the next one succeeds.
    assert site.reload().returncode == 0
    assert site.seen() == new
    site.old()
    assert site.reload().returncode == 0


def test_a_misspelled_host(site: Reloads) -> None:
    old = site.seen()
    site.write({"keep": "rw,all_squash"}, "no-such-host.invalid")
    done = site.reload()
    assert done.returncode == 2, done
    assert "no-such-host.invalid: this host name cannot be resolved" in done.stderr
    assert site.seen() == old
    planned = run("export", "plan", site.entries, "--server", "ganesha")
    assert planned.returncode == 2
    assert "cannot be resolved" in planned.stderr
    checked = run("check", site.entries)
    assert checked.returncode == 0, "who checks may be offline"
    assert "warning: no-such-host.invalid: this host name cannot be resolved" in checked.stdout
    assert run("check", "--text-only", site.entries).stdout == ""
    site.old()
    assert site.reload().returncode == 0
    assert site.seen() == old


def test_what_is_not_served_is_not_called_so(site: Reloads) -> None:
    keep = site.mount("keep")
    daemon = mounted()[keep].pid
    os.kill(daemon, signal.SIGSTOP)
    try:
        result = run("export", "status", "--name", site.name)
        assert result.returncode == 1
        (line,) = [line for line in result.stdout.splitlines() if line.startswith(keep)]
        assert "answer" in line, result
        assert sum("since" in line for line in result.stdout.splitlines()) == 3, result
        assert run("status").returncode == 3
    finally:
        os.kill(daemon, signal.SIGCONT)
    assert site.settled({}, 0)["server"] is None
    server = int(Path(f"{STATE_DIR}/export-{site.name}/ganesha.pid").read_text())
    os.kill(server, signal.SIGSTOP)
    try:
        result = run("export", "status", "--name", site.name)
        assert (result.returncode, "ganesha: nfs-ganesha does not answer" in result.stdout) == (1, True), result
        assert run("status").returncode == 3
    finally:
        os.kill(server, signal.SIGCONT)
    assert run("export", "status", "--name", site.name).returncode == 0


def test_an_export_that_the_server_has_lost_is_told_and_made_again(site: Reloads) -> None:
    """Withdrawn by another process; so for a client that this machine is not, and can hear nothing of."""
    old = site.seen()
    config = Path(f"{STATE_DIR}/export-{site.name}/ganesha.conf")
    first, *others = config.read_text().split("EXPORT {")
    (kept,) = [other for other in others if "-keep@" in other]
    config.write_text(first + "".join(f"EXPORT {{{other}" for other in others if other is not kept))
    guard = site.status()["pid"]
    os.kill(guard, signal.SIGSTOP)  # it would repair this within 5 s
    try:
        os.kill(int(Path(f"{STATE_DIR}/export-{site.name}/ganesha.pid").read_text()), signal.SIGHUP)
        for _ in range(600):
            if site.client("keep") == [2]:
                break
    finally:
        os.kill(guard, signal.SIGCONT)
    assert site.settled(old, 60) == old
    log = Path(f"/run/cloakfs/export-{site.name}.log").read_text()
    assert f"nfs-ganesha did not export {site.mount('keep')}; exported again" in log


@pytest.fixture
def down() -> Iterator[Reloads]:
    """A service that is not up."""
    with in_new_network(), Reloads("ganesha", is_up=False, name="test-start") as made:
        yield made


def test_without_a_mount_table(down: Reloads) -> None:
    """nfs-ganesha reads /etc/mtab, and without it exports nothing."""
    place = os.path.join(down.base, "etc")
    shutil.copytree("/etc", place, symlinks=True)
    os.unlink(f"{place}/mtab")
    command = [*COMMAND, "export", "up", down.entries, "--server", "ganesha", "--root", down.root, "--name", down.name]
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", f'mount --bind {place} /etc && exec "$@"', "sh", *command],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done
    assert done.stderr == (
        "cloakfs: /etc/mtab does not exist, and without it nfs-ganesha exports nothing (ln -s /proc/self/mounts "
        "/etc/mtab)\n"
    )
    assert down.left() == []


def test_a_guard_ends_while_it_starts(down: Reloads) -> None:
    """Whatever it has begun then: what it leaves is reported, and `down` removes it. The campaign tries every step."""
    steps = (("run python", 1, "killed"), ("mount", 2, "killed"), ("ask", 2, "interrupted"), ("write", 2, "alone"))
    for what, which, how in steps:
        down.fail_at(which, how, kind=what)
        done = down.up()
        assert done.returncode, (what, how, done)
        down.steps()
        if how == "killed":
            result = run("status")
            assert result.returncode == 3
            assert f"service {down.name}: its guard" in result.stdout, result
            assert run("export", "status", "--name", down.name).returncode == 1
            assert down.down().returncode == 0
        elif how == "alone":
            stopped = down.down()  # unless it has noticed by itself that no process waits for it any more
            assert stopped.returncode == 0 or "is not up" in stopped.stderr, stopped
        assert down.left() == [], (what, how)
