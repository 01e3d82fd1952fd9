"""What the kernel's server does not serve is not called served, and a reload that fails changes nothing."""

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from cloakfs.linux import process
from tests.agents import User, read, write
from tests.mount.conftest import COMMAND
from tests.nfs.knfsd.fixtures import EXPORTS, NfsHost, Share, requests, sh
from tests.nfs.reloads import Reloads, run
from tests.waiting import wait_until

ANN = 1000


def state_of(path: str) -> str | None:
    """What `export status` finds wrong with a mount; everything else is served."""
    result = run("export", "status", "--json")
    status = json.loads(result.stdout)
    problems = {mount["path"]: mount["problem"] for mount in status["mounts"] if mount["problem"]}
    assert list(problems) in ([], [path])
    assert result.returncode == bool(problems or status["problem"])
    return problems.get(path)


def test_an_export_that_is_not_in_the_table(share: Callable[..., Share]) -> None:
    """Withdrawn by another process; it is reported at once, and exported again by the next check."""
    tree = share("rw")
    assert state_of(tree.path) is None
    guard = json.loads(run("export", "status", "--json").stdout)["pid"]
    os.kill(guard, signal.SIGSTOP)
    try:
        sh("exportfs", "-u", f"*:{tree.path}")
        asking = subprocess.Popen([*COMMAND, "export", "status"], stdout=subprocess.PIPE, text=True)
    finally:
        os.kill(guard, signal.SIGCONT)
    said, _ = asking.communicate(timeout=60)
    told_or_repaired = "the server's table does not list it for *" in said
    assert asking.returncode == told_or_repaired
    log = Path("/run/cloakfs/export-default.log").read_text
    while f"{tree.path} was not exported any more" not in log():
        assert run("export", "status").returncode in (0, 1)
    assert state_of(tree.path) is None


def test_the_daemon_reads_and_writes_what_is_exported(
    share: Callable[..., Share], mount_nfs: Callable[..., str], user: Callable[..., User]
) -> None:
    """None of it passes through: the server would go on with a file that a client may not know of any more."""

    def prepare(top: str) -> None:
        Path(top, "large").write_bytes(os.urandom(2 << 20))
        os.chmod(f"{top}/large", 0o644)
        os.chown(f"{top}/large", ANN, ANN)

    tree, ann = share("rw", prepare), user(ANN)
    assert "passes    no file (a server exports the mount)\n" in run("status", tree.path).stdout
    place = mount_nfs(tree, "4.2")
    before = requests(tree)
    assert ann.do(read, f"{place}/large") == read(tree.real("large"))
    for number in range(5):
        ann.do(write, f"{place}/log", b"%d\n" % number, os.O_CREAT | os.O_APPEND)
        ann.do(write, f"{place}/large", b"%d" % number, os.O_WRONLY)
        assert read(tree.real("large"))[:1] == b"%d" % number
    assert read(tree.real("log")) == b"".join(b"%d\n" % number for number in range(5))
    found = requests(tree) - before
    assert found["read"] >= 2
    assert found["write"] >= 10


def test_the_kernel_reads_far_ahead(share: Callable[..., Share], mount_nfs: Callable[..., str]) -> None:
    """Of 8 MiB in order, it wants up to 1 MiB at a time. By itself, FUSE's kernel would want 64 times 128 KiB."""

    def prepare(top: str) -> None:
        Path(top, "large").write_bytes(os.urandom(8 << 20))
        os.chmod(f"{top}/large", 0o644)

    tree = share("ro", prepare)
    place = mount_nfs(tree, "4.2")
    before = requests(tree)
    assert read(f"{place}/large") == read(tree.real("large"))
    assert 8 <= (requests(tree) - before)["read"] <= 24


def _list_with_acls(directory: str) -> None:
    subprocess.run(["ls", "-l", directory], check=True, stdout=subprocess.DEVNULL)


def test_a_listing_renews_the_names_of_files_that_were_used_by_handle(
    share: Callable[..., Share], mount_nfs: Callable[..., str], user: Callable[..., User]
) -> None:
    """`ls -l` reads the ACL of each file, by NFSv3: the server does that by handle, and the name expires."""
    files = 100

    def prepare(top: str) -> None:
        home = Path(top, "home")
        home.mkdir()
        for number in range(files):
            (home / f"file-{number}").touch(mode=0o600)
        for path in (home, *home.iterdir()):
            os.chown(path, ANN, ANN)
        home.chmod(0o700)

    tree, ann = share("ro,subtree_check,cloak_list = uid +077 0 1999", prepare), user(ANN)
    for round_ in range(3):
        before = requests(tree)
        ann.do(_list_with_acls, f"{mount_nfs(tree, '3', 'nosharecache')}/home")
        counts = requests(tree) - before
        assert counts["getxattr"] >= files  # or this test shows nothing
        assert round_ == 0 or counts["lookup"] <= 20, counts


def test_a_daemon_that_hangs_is_told_and_keeps_no_thread_of_the_server(
    share: Callable[..., Share], mount_nfs: Callable[..., str]
) -> None:
    tree, other = share("rw"), share("rw")
    beside = mount_nfs(other, "4.2")
    os.kill(tree.pid, signal.SIGSTOP)
    try:
        for _ in range(10):  # more often than the server has threads
            assert "answer" in str(state_of(tree.path))
        assert os.listdir(beside) == []
        assert run("status").returncode == 3
    finally:
        os.kill(tree.pid, signal.SIGCONT)
    while state_of(tree.path):
        pass
    tree.expect_errors = True


def test_mountd_has_ended(nfs_host: NfsHost, share: Callable[..., Share]) -> None:
    """The kernel goes on for a while with what it knows, but soon knows no client any more."""
    tree = share("rw")
    nfs_host.close()
    try:
        result = run("export", "status")
        assert (result.returncode, "rpc.mountd does not run" in result.stdout) == (1, True), result
        # Nor does anything that merely has its name, or the one of another network.
        shutil.copy("/bin/sleep", "/tmp/rpc.mountd")
        with subprocess.Popen(["/tmp/rpc.mountd", "60"]) as other:
            result = run("export", "status")
            other.kill()
        assert (result.returncode, "rpc.mountd does not run" in result.stdout) == (1, True), result
        with subprocess.Popen(["unshare", "--net", "rpc.mountd", "-F"], stderr=subprocess.DEVNULL) as other:
            wait_until(lambda pid=other.pid: process.command_of(pid) == "rpc.mountd")  # type: ignore[misc]
            time.sleep(1)  # until it would answer, if it were asked where it is
            result = run("export", "status")
            other.terminate()
        assert (result.returncode, "rpc.mountd does not run" in result.stdout) == (1, True), result
    finally:
        os.unlink("/tmp/rpc.mountd")
        nfs_host.restart_mountd()
    while run("export", "status").returncode:
        pass
    assert state_of(tree.path) is None


def test_mountd_is_stopped(nfs_host: NfsHost, share: Callable[..., Share]) -> None:
    tree = share("rw")
    nfs_host.mountd.send_signal(signal.SIGSTOP)
    try:
        result = run("export", "status")
        assert (result.returncode, "rpc.mountd does not run, or is stopped" in result.stdout) == (1, True), result
    finally:
        nfs_host.mountd.send_signal(signal.SIGCONT)
    while run("export", "status").returncode:
        pass
    assert state_of(tree.path) is None


def test_a_host_that_cannot_be_resolved_any_more(share: Callable[..., Share]) -> None:
    hosts = Path("/etc/hosts")
    before = hosts.read_text()
    tree = share("rw")
    try:
        hosts.write_text(f"{before}\n127.0.0.1 lab.example.org lab\n")
        tree.service.write(tree.name, f"{tree.source} lab(insecure,rw)\n")
        path = tree.service.take_over()["added"][0]
        assert state_of(path) is None  # though the table calls it lab.example.org
        hosts.write_text(before)
        assert "lab" in str(state_of(path))
        # What is exported to it stays so, and does not keep other exports from being changed.
        place = f"{EXPORTS}/{tree.name}.exports"
        tree.service.write("other", "/tree/always *.example.org(insecure)\n")
        done = run("export", "reload")
        assert (done.returncode, f"warning: {place}:1:" in done.stderr) == (0, True), done
        assert "lab: this host name cannot be resolved" in done.stderr
        assert "added /srv/cloakfs/tree-always@any.example.org" in done.stdout
        assert "lab" in str(state_of(path))
        # Nothing is newly exported to one.
        tree.service.write("other", "/tree/always *.example.org(insecure)\n\n/tree/always lab(insecure)\n")
        done = run("export", "reload")
        assert (done.returncode, f"{EXPORTS}/other.exports:3:" in done.stderr) == (2, True), done
        assert "lab: this host name cannot be resolved" in done.stderr
        os.unlink(f"{EXPORTS}/other.exports")
        assert run("export", "reload").returncode == 0
        hosts.write_text(f"{before}\n127.0.0.1 lab.example.org lab\n")
        while state_of(path):  # until the next check exports it again
            pass
    finally:
        hosts.write_text(f"{before}\n127.0.0.1 lab.example.org lab\n")
        tree.set("rw")
        hosts.write_text(before)


def test_a_step_of_a_reload_fails(nfs_host: object) -> None:
    with Reloads("knfsd") as site:
        old, new = site.both()
        for step in (2, 3):  # of those that export
            site.fail_at(step, "error", kind="run exportfs")
            site.new()
            done = site.reload()
            steps = site.steps()
            assert done.returncode == 1, (steps, done)
            assert "not as before" not in done.stderr
            assert site.seen() == old, done
        assert site.reload().returncode == 0
        assert site.seen() == new
