"""The real commands: what they do, what they say, and how they end."""

import contextlib
import errno
import fcntl
import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from cli.main import cloakfs
from cloakfs.config.options import Export
from cloakfs.config.parse import parse
from cloakfs.config.render import format_exports
from cloakfs.config.viewitems import User as UserItem
from cloakfs.state.runtime import mounted as telling
from cloakfs.tuning import Tuning
from tests.agents import User, read
from tests.altered import Alteration, command_with
from tests.mount import alterations
from tests.mount.conftest import COMMAND, Mount, daemons_with, is_mounted, mounted, run
from tests.processes import kill
from tests.waiting import wait_until

SCRIPTS = Path(__file__).parents[2] / ".venv" / "bin"
EXAMPLES = Path(__file__).parents[2] / "examples"

# All commands are imported here, as root: others may not be allowed to read this tree.
_CONTEXT = click.Context(cloakfs)
_COMMANDS = [cloakfs.get_command(_CONTEXT, name) for name in cloakfs.list_commands(_CONTEXT)]

MakeMount = Callable[..., Mount]
MakeUser = Callable[..., User]


@pytest.fixture
def target(base: str) -> str:
    """An empty directory to mount on."""
    path = os.path.join(base, "mnt")
    os.mkdir(path)
    return path


def put(path: str, uid: int, gid: int, mode: int = 0o644) -> str:
    Path(path).write_text("text")
    os.chown(path, uid, gid)
    os.chmod(path, mode)
    return path


def refused(status: int, *arguments: str) -> str:
    """The one line that a command says when it ends with this status."""
    done = run(*arguments, check=False)
    assert (done.returncode, done.stdout) == (status, ""), done
    assert done.stderr.startswith("cloakfs: ")
    assert done.stderr.count("\n") == 1
    return done.stderr.removeprefix("cloakfs: ").rstrip("\n")


def run_here(*arguments: str) -> tuple[int, str]:
    """Run a command in this process, for a User: others may not be allowed to execute root's interpreter."""
    done = CliRunner().invoke(cloakfs, arguments)
    return done.exit_code, done.output


def test_mount_points_are_completed(tree: str, mount: MakeMount, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = mount(), mount()
    for name, value in (("COMP_WORDS", f"cloakfs umount {os.path.dirname(tree)}/m"), ("COMP_CWORD", "2")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("_CLOAKFS_COMPLETE", "bash_complete")
    done = subprocess.run([f"{SCRIPTS}/cloakfs"], capture_output=True, text=True, check=True)
    monkeypatch.delenv("_CLOAKFS_COMPLETE")  # for the umount at the end
    assert done.stdout.split() == [f"plain,{one.path}", f"plain,{two.path}"]


# -- mount -----------------------------------------------------------------------------------------


def test_what_is_not_there_cannot_be_mounted(base: str, tree: str, target: str) -> None:
    assert refused(1, "mount", f"{base}/absent", target) == f"{base}/absent: No such file or directory"
    assert refused(1, "mount", tree, f"{base}/absent") == f"{base}/absent: No such file or directory"
    file = put(f"{base}/file", 0, 0)
    assert refused(1, "mount", file, target) == f"{file}: not a directory"
    assert refused(1, "mount", tree, target, "--exports", f"{base}/absent") == (
        f"{base}/absent: No such file or directory"
    )
    assert not is_mounted(target)


def test_only_root_mounts(tree: str, target: str, user: MakeUser) -> None:
    done = user(3001).do(run_here, "mount", tree, target)
    assert done == (1, "cloakfs: only root can mount: the daemon acts as every caller\n")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("rw,range_map=uid 1 mapp 2", "-o:1:20: unexpected 'mapp'; expected map or squash"),
        # mount(8)'s words are taken out first; columns still count from the beginning.
        ("nosuid,dev,cloak_list=uid 007 1", "-o:1:27: '007' is not a mask; expected a mask: "),
        ("cloak_lst=uid +007 1", "-o:1:1: unknown option 'cloak_lst'; expected perhaps cloak_list"),
        ("range_map=uid 5 1 map 2", "-o:1:11: bad definition, the range 5 1 ends before it begins; expected "),
        ("views=", "-o:1:7: the text ends here; expected a user name, uid"),
        ("groups=some", "-o:1:8: bad value of groups, 'some'; expected proc, database, none or gids"),
    ],
)
def test_a_wrong_option_is_told_with_its_column(tree: str, target: str, options: str, says: str) -> None:
    assert refused(2, "mount", tree, target, "-o", options).startswith(says)
    assert not is_mounted(target)


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("--groups", "some", "--groups: bad value of groups, 'some'; expected proc, database"),
        ("--view", "ann bob", "--view ('ann bob',): not a single value"),
        ("--view", "5:x", "--view: '5:x' does not belong in views; expected a user name"),
        ("--policy", "file.py", "--policy: bad value of policy, 'file.py'; expected FILE.py:Class or"),
    ],
)
def test_an_option_of_the_command_is_checked_like_one_of_exports(
    tree: str, target: str, option: str, value: str, says: str
) -> None:
    assert refused(2, "mount", tree, target, option, value).startswith(says)


def test_a_view_of_an_unknown_user_cannot_be_mounted(tree: str, target: str) -> None:
    said = refused(1, "mount", tree, target, "--view", "no-such-user")
    assert said.startswith("view no-such-user: no such user in the user database")
    assert not is_mounted(target)


def test_a_view_with_groups_is_written_with_commas_or_as_in_exports(
    tree: str, mount: MakeMount, user: MakeUser
) -> None:
    put(os.path.join(tree, "file"), 3009, 3101, 0o640)
    for spec in ("3001:3001:3100,3101", "3001:3001:3100+3101"):
        m = mount("--view", spec)
        assert read(m.at("file")) == b"text"
        assert user(3001).do(read, m.at("file")) == b"text"
        assert user(3002).error(os.listdir, m.path) == errno.EACCES
        assert json.loads(run("explain", m.at("file"), "--json").stdout)["accessible"]["read"] is True


def test_a_client_without_a_file_of_entries_is_refused(tree: str, target: str) -> None:
    assert refused(2, "mount", tree, target, "--client", "*") == (
        "--client chooses an entry of an exports.d file, and needs --exports FILE"
    )
    assert not is_mounted(target)


def test_a_mount_whose_daemon_died_is_told_and_taken_off_by_the_next(mount: MakeMount, tree: str) -> None:
    Path(tree, "file").write_text("")
    m = mount("-o", "views=0:0,default_permissions")  # the kernel remembers its top, dead or not
    assert os.listdir(m.path) == ["file"]
    kill(m.without_reaper())
    assert f"{m.path}: its daemon has died" in run("status", check=False).stdout
    assert [
        told["pid"] for told in json.loads(run("status", "--json", check=False).stdout) if told["target"] == m.path
    ] == [None]
    done = run("mount", tree, m.path)
    assert "unmounted a mount whose daemon had died" in done.stderr
    with open("/proc/self/mounts", encoding="utf-8") as mounts:
        assert sum(line.split()[1] == m.path for line in mounts) == 1
    assert f"{m.path}: its daemon has died" not in run("status", check=False).stdout
    assert os.listdir(m.path) == ["file"]


def test_a_working_directory_that_is_gone(base: str, tree: str, target: str) -> None:
    def there(*arguments: str) -> tuple[int, str]:
        gone = os.path.join(base, "gone")
        os.mkdir(gone)
        script = 'cd "$1" && rmdir "$1" && shift && exec "$@"'
        done = subprocess.run(
            ["sh", "-c", script, "sh", gone, str(SCRIPTS / "cloakfs"), *arguments],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        return done.returncode, done.stderr

    assert there("mount", tree, target) == (0, "")
    assert there("explain", target, "--as", "1000:1000") == (0, "")
    assert there("umount", target) == (0, "")


def test_a_mount_made_twice(tree: str, mount: MakeMount) -> None:
    m = mount()
    assert refused(1, "mount", tree, m.path) == f"{m.path}: {tree} is mounted there already (cloakfs umount {m.path})"
    assert os.listdir(m.path) == []


def test_warnings_do_not_prevent_a_mount(tree: str, target: str) -> None:
    done = run("mount", tree, target, "-o", "range_map=uid 1 map 2 uid 1 map 3")
    try:
        assert is_mounted(target)
        assert done.stderr.startswith("cloakfs: -o:1:23: warning: 'uid 1 map 3' loses all of its client ids")
    finally:
        run("umount", target)


def test_the_daemon_holds_nothing_of_whoever_mounts(base: str, tree: str, target: str) -> None:
    lock = os.open(f"{base}/lock", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    subprocess.run([*COMMAND, "mount", tree, target], check=True, pass_fds=[lock], timeout=60)
    try:
        os.close(lock)
        lock = os.open(f"{base}/lock", os.O_RDWR)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(lock)
        run("umount", target)


def test_in_the_foreground_it_logs_to_the_terminal_and_ends_by_interrupt(base: str, tree: str, target: str) -> None:
    command = [str(SCRIPTS / "cloakfs"), "mount", "-f", tree, target]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            assert process.stderr.readline() == f"cloakfs: {target}: serving {tree}\n"
            assert is_mounted(target)
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    assert not is_mounted(target)


def test_the_status_of_a_mount_is_for_root_alone(mount: MakeMount, user: MakeUser) -> None:
    m = mount("-o", "cloak_list=uid +000 0 -1")
    assert user(3001).error(read, f"/run/cloakfs/{m.key}.json") == errno.EACCES


# -- umount ----------------------------------------------------------------------------------------


def test_what_is_no_mount_cannot_be_unmounted(base: str, target: str) -> None:
    assert refused(1, "umount", target) == f"{target}: not a cloakfs mount"
    assert refused(1, "umount", "/proc") == "/proc: not a cloakfs mount"
    assert refused(1, "umount", f"{base}/absent") == f"{base}/absent: not a cloakfs mount"


def test_a_busy_mount_stays_until_it_is_asked_to_go_lazily(tree: str, target: str, user: MakeUser) -> None:
    put(os.path.join(tree, "file"), 3001, 3001)
    run("mount", tree, target)
    reader = user(3001)
    fd = reader.do(os.open, os.path.join(target, "file"), os.O_RDONLY)
    assert (
        refused(1, "umount", target) == f"{target}: Device or resource busy; see who uses it (fuser -vm), or use --lazy"
    )
    assert is_mounted(target)
    run("umount", "--lazy", target)
    assert not is_mounted(target)
    assert reader.do(os.read, fd, 10) == b"text"
    reader.do(os.close, fd)


def test_only_root_unmounts(mount: MakeMount, user: MakeUser) -> None:
    m = mount()
    assert user(3001).do(run_here, "umount", m.path) == (1, f"cloakfs: {m.path}: Operation not permitted\n")


@pytest.mark.parametrize("name", ["spa ce", "back\\slash", "ta\tb", "lüne", b"\xff\xfe", "new\nline", "#hash"])
def test_mount_points_of_any_name(base: str, tree: str, name: str | bytes) -> None:
    put(os.path.join(tree, "file"), 0, 0)
    path = os.path.join(base, os.fsdecode(name))
    os.mkdir(path)
    run("mount", tree, path)
    assert os.listdir(path) == ["file"]
    run("umount", path)
    assert os.listdir(path) == []


def test_by_a_symbolic_link_and_by_a_relative_path(base: str, tree: str, target: str) -> None:
    os.symlink(target, os.path.join(base, "link"))
    for path in (os.path.join(base, "link"), os.path.relpath(target), f"{target}/"):
        run("mount", tree, path)
        assert is_mounted(target)
        run("umount", path)
        assert not is_mounted(target)


# -- exports.d -------------------------------------------------------------------------------------


@pytest.fixture
def accounts() -> Iterator[Callable[[str], None]]:
    """Makes users in this machine's database; one that is there already is used as it is."""
    made = []

    def make(name: str) -> None:
        if subprocess.run(["getent", "passwd", name], capture_output=True, check=False).returncode:
            # Not among the uids that other tests act as: a user who has processes cannot be deleted.
            numbers = [word for kind in "UG" for word in ("-K", f"{kind}ID_MIN=58100", "-K", f"{kind}ID_MAX=58999")]
            command = ["useradd", *numbers, "--no-create-home", "--user-group", name]
            subprocess.run(command, check=True, capture_output=True)
            made.append(name)

    yield make
    for name in made:
        subprocess.run(["userdel", name], check=True, capture_output=True)


def example_entries() -> list[Any]:
    found = []
    for path in sorted((EXAMPLES / "exports.d").glob("*.exports")):
        exports, _ = parse(path.read_text("utf-8"), path.name)
        found += [pytest.param(export, id=f"{path.stem}-{export.client}") for export in exports]
    return found


@pytest.mark.parametrize("export", example_entries())
def test_every_entry_of_the_examples_can_be_mounted(
    export: Export, base: str, mount: MakeMount, accounts: Callable[[str], None]
) -> None:
    source = os.path.join(base, os.path.basename(export.path))
    os.mkdir(source)
    put(os.path.join(source, "file"), 12345, 12345)
    options = export.options
    for view in options.views:
        if isinstance(view, UserItem):
            accounts(view.name)
    if options.policy:
        example = EXAMPLES / "policies" / os.path.basename(options.policy.rpartition(":")[0])
        assert example.exists()
        options = replace(options, policy=f"{example}:{options.policy.rpartition(':')[2]}")
    file = Path(base, "one.exports")
    file.write_text(format_exports([replace(export, path=source, options=options)]), "utf-8")
    m = mount("--exports", str(file), source=source)
    if options.views:
        assert sorted(os.listdir(m.path)) == ["@2001", "@ann", "@bob"]
        assert os.listdir(m.at("@ann")) == ["file"]
        assert json.loads(run("explain", m.at("@ann", "file"), "--json").stdout)["visible"] is True
    else:
        # Root of a client has no exemption, and the file is another's: ask as the one that `explain` asks as.
        expected = run("explain", m.at("file"), "--as", "0:0", check=False).returncode == 0
        assert (os.listdir(m.path) == ["file"]) == expected
    writes = not options.read_only
    assert bool(os.statvfs(m.path).f_flag & os.ST_RDONLY) != writes


def test_an_entry_is_found_by_path_and_client(base: str, tree: str, target: str) -> None:
    file = Path(base, "some.exports")
    file.write_text(f"{tree} one(rw) two(ro)\n/srv three(rw)\n")
    said = refused(2, "mount", tree, target, "--exports", str(file))
    assert said == f"{file}: several entries for {tree}; choose one with --client (one, two)"
    said = refused(2, "mount", tree, target, "--exports", str(file), "--client", "three")
    assert said == f"{file}: no entry for {tree} and client three"
    assert refused(2, "mount", "/proc", target, "--exports", str(file)) == f"{file}: no entry for /proc"
    said = refused(2, "mount", tree, target, "--exports", str(file), "--client", "one", "-o", "rw,no_client_cache")
    assert said == "-o no_client_cache: with --exports, options come from the file alone"
    with mounted(tree, target, "--exports", str(file), "--client", "two"):
        assert os.statvfs(target).f_flag & os.ST_RDONLY
    with mounted(tree, target, "--exports", str(file), "--client", "one", "-o", "nosuid"):
        assert not os.statvfs(target).f_flag & os.ST_RDONLY


def test_an_error_in_a_file_is_told_with_its_place(base: str, tree: str, target: str) -> None:
    file = Path(base, "bad.exports")
    file.write_text(f"# two lines\n{tree} one(rw, range_map=uid 1 map)\n")
    said = refused(2, "mount", tree, target, "--exports", str(file))
    assert said.startswith(f"{file}:2:{len(tree) + 29}: unexpected ')'; expected lc-low")


def test_a_reload_takes_over_what_changed_and_keeps_what_is_in_force_if_it_is_broken(
    base: str, tree: str, mount: MakeMount, user: MakeUser
) -> None:
    for uid in (3001, 3002):
        put(os.path.join(tree, f"of-{uid}"), uid, uid)
    file = Path(base, "lab.exports")
    hide = f"{tree} *(rw, cloak_list=uid +000 {{}})\n"
    file.write_text(hide.format(3001))
    m = mount("--exports", str(file))
    m.expect_errors = True
    caller = user(3009)
    assert caller.do(os.listdir, m.path) == ["of-3002"]

    def reload(says: str) -> None:
        before = m.log.count(says)
        os.kill(m.pid, signal.SIGHUP)
        wait_until(lambda: m.log.count(says) > before)

    file.write_text(hide.format(3002))
    reload(": reloaded")
    assert caller.do(os.listdir, m.path) == ["of-3001"]
    assert json.loads(run("explain", m.at("of-3002"), "--as", "3009:3009", "--json", check=False).stdout)["steps"][1][
        "verdicts"
    ][0]["definition"] == ("uid +000 3002")
    kept = "not reloaded, the old configuration stays in force: "
    for broken, says in (
        ("nonsense", f"{kept}{file}:1:1: 'nonsense' is not an absolute path"),
        (f"{tree} *(rw, cloak_list=uid 000 1)", f"{kept}{file}:1:"),
        (f"{tree} *(rw, policy=absent.py:P)", f"{kept}policy=absent.py:P: FileNotFoundError"),
        ("/elsewhere *(rw)", f"{kept}{file}: no entry for {tree}"),
        ("", f"{kept}{file}: no entry for {tree}"),
    ):
        file.write_text(broken + "\n")
        reload(says)
        assert caller.do(os.listdir, m.path) == ["of-3001"], broken
        assert caller.error(os.stat, m.at("of-3002")) == errno.ENOENT
    file.unlink()
    reload(f"{kept}[Errno 2] No such file or directory")
    assert caller.do(os.listdir, m.path) == ["of-3001"]
    file.write_text(f"{tree} *(rw)\n")
    reload(": reloaded")
    assert sorted(caller.do(os.listdir, m.path)) == ["of-3001", "of-3002"]


def test_a_reload_of_what_only_a_new_mount_changes_fails_as_a_whole(
    base: str, tree: str, mount: MakeMount, user: MakeUser
) -> None:
    put(os.path.join(tree, "file"), 3001, 3001)
    file = Path(base, "lab.exports")
    file.write_text(f"{tree} *(rw)\n")
    m = mount("--exports", str(file))
    m.expect_errors = True
    caller = user(3009)
    before = telling()[m.path]
    for count, (options, named) in enumerate(
        (
            ("ro", "ro or rw"),
            ("rw, groups=none", "groups"),
            ("rw, views=3001:3001", "views"),
            ("rw, view_access=3009", "view_access"),
            ("rw, no_client_cache", "no_client_cache"),
            ("ro, groups=none, no_client_cache", "ro or rw, no_client_cache, groups"),
        ),
        start=1,
    ):
        # What could be taken over is not, either.
        file.write_text(f"{tree} *({options}, prefetch=off, cloak_list=uid +000 3001)\n")
        os.kill(m.pid, signal.SIGHUP)
        wait_until(lambda count=count: telling()[m.path].asked == count)  # type: ignore[misc]
        now = telling()[m.path]
        says = f"{named}: only a new mount can change this (cloakfs umount {m.path}, and mount it again)"
        assert now.failure == says
        assert f"not reloaded, the old configuration stays in force: {says}\n" in m.log
        assert (now.reloads, now.options) == (0, before.options)
        assert caller.do(os.listdir, m.path) == ["file"], options
    assert ": reloaded" not in m.log
    said = run("status", m.path).stdout
    assert "0 reloads" in said
    assert "not reloaded ro or rw, no_client_cache, groups" in said
    assert not os.statvfs(m.path).f_flag & os.ST_RDONLY
    file.write_text(f"{tree} *(rw, cloak_list=uid +000 3001)\n")
    os.kill(m.pid, signal.SIGHUP)
    wait_until(lambda: telling()[m.path].reloads == 1)
    assert telling()[m.path].failure is None
    assert caller.do(os.listdir, m.path) == []


def test_a_file_named_by_a_relative_path_is_found_again_at_a_reload(
    base: str, tree: str, mount: MakeMount, user: MakeUser
) -> None:
    put(os.path.join(tree, "file"), 3001, 3001)
    file = Path(base, "lab.exports")
    file.write_text(f"{tree} *(rw, policy=plug.py:P)\n")
    code = "class P:\n    def visible(self, caller, attrs):\n        return {}\n"
    Path(base, "plug.py").write_text(code.format(True))
    m = mount("--exports", os.path.relpath(file))
    assert user(3002).do(os.listdir, m.path) == ["file"]
    Path(base, "plug.py").write_text(code.format(False))
    os.kill(m.pid, signal.SIGHUP)
    wait_until(lambda: ": reloaded" in m.log)
    assert user(3002).do(os.listdir, m.path) == []


def test_without_a_file_there_is_nothing_to_reload(tree: str, mount: MakeMount, user: MakeUser) -> None:
    put(os.path.join(tree, "file"), 3001, 3001)
    m = mount("-o", "cloak_list=uid +000 3001")
    os.kill(m.pid, signal.SIGHUP)
    wait_until(lambda: "nothing to reload: the options came from the command line" in m.log)
    assert user(3002).do(os.listdir, m.path) == []


# -- mount(8) --------------------------------------------------------------------------------------


@pytest.fixture
def helper() -> Iterator[None]:
    """Put the helper of mount(8) where it looks for one."""
    place = Path("/sbin/mount.fuse.cloakfs")
    if place.exists() or place.is_symlink():
        pytest.skip(f"{place} is there already: it would be tested instead of this one")
    place.symlink_to(SCRIPTS / "mount.fuse.cloakfs")
    yield
    place.unlink()


@pytest.fixture
def helper_by_path() -> Iterator[None]:
    """Put the command where mount.fuse3 looks for one: mount(8) gives it a PATH of its own."""
    if Path("/sbin/mount.fuse.cloakfs").exists():
        pytest.skip("/sbin/mount.fuse.cloakfs is there: mount(8) would not ask mount.fuse3")
    if not Path("/sbin/mount.fuse").exists():
        pytest.skip("no /sbin/mount.fuse (package fuse3)")
    place = Path("/usr/local/bin/cloakfs")
    if place.exists() or place.is_symlink():
        pytest.skip(f"{place} is there already: it would be tested instead of this one")
    place.symlink_to(SCRIPTS / "cloakfs")
    yield
    place.unlink()


def mount8(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False, timeout=60)


@contextlib.contextmanager
def unmounted_after(path: str) -> Iterator[None]:
    try:
        yield
    finally:
        if os.path.ismount(path):
            run("umount", path)


@pytest.mark.usefixtures("helper")
def test_mount8_with_the_helper(tree: str, target: str, user: MakeUser) -> None:
    put(os.path.join(tree, "file"), 3001, 3001)
    with unmounted_after(target):
        done = mount8("-t", "fuse.cloakfs", tree, target, "-o", "noexec,cloak_list=uid +000 3001")
        assert (done.returncode, done.stderr) == (0, "")
        assert user(3001).do(os.listdir, target) == ["file"]
        assert user(3002).do(os.listdir, target) == []
        flags = os.statvfs(target).f_flag
        assert flags & os.ST_NOSUID
        assert flags & os.ST_NODEV
        assert flags & os.ST_NOEXEC
    assert not is_mounted(target)


@pytest.mark.usefixtures("helper")
def test_mount8_passes_on_what_went_wrong(tree: str, target: str) -> None:
    done = mount8("-t", "fuse.cloakfs", tree, target, "-o", "cloak_list=uid 000 3001")
    assert done.returncode == 2
    assert "'000' is not a mask" in done.stderr
    assert not is_mounted(target)


@pytest.mark.usefixtures("helper")
def test_mount8_may_pretend(tree: str, target: str) -> None:
    assert mount8("-f", "-t", "fuse.cloakfs", tree, target).returncode == 0
    assert not is_mounted(target)


@pytest.mark.parametrize("word", ["-h", "--help"])
def test_the_helper_tells_what_it_is(word: str) -> None:
    done = subprocess.run(
        [SCRIPTS / "mount.fuse.cloakfs", word], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Usage: mount.fuse.cloakfs SOURCE MOUNTPOINT [-sfnv] ")


def fstab_word(text: str) -> str:
    return text.replace("\\", "\\134").replace(" ", "\\040").replace("\t", "\\011")


@pytest.mark.usefixtures("helper")
def test_a_line_of_fstab(base: str, user: MakeUser) -> None:
    source, path = os.path.join(base, "real tree"), os.path.join(base, "mount point")
    os.mkdir(source)
    os.mkdir(path)
    put(os.path.join(source, "file"), 20001, 20001, 0o600)
    options = "rw,nofail,x-systemd.automount,range_map=uid 1000 1999 map 20000 gid 1000 1999 map 20000"
    fstab = Path(base, "fstab")
    fstab.write_text(f"{fstab_word(source)} {fstab_word(path)} fuse.cloakfs {fstab_word(options)} 0 0\n")
    with unmounted_after(path):
        done = mount8("-T", str(fstab), path)
        assert (done.returncode, done.stderr) == (0, "")
        info = os.stat(os.path.join(path, "file"))
        assert (info.st_uid, info.st_gid) == (1001, 1001)
        assert user(1001).do(read, os.path.join(path, "file")) == b"text"
        assert user(1002).error(read, os.path.join(path, "file")) == errno.EACCES
    assert not os.listdir(path)


@pytest.mark.usefixtures("helper_by_path")
def test_mount8_without_the_helper_finds_the_command_by_mount_fuse(tree: str, target: str, user: MakeUser) -> None:
    put(os.path.join(tree, "file"), 3001, 3001)
    with unmounted_after(target):
        done = mount8("-t", "fuse.cloakfs", tree, target, "-o", "ro,cloak_list=uid +000 3001")
        # Unlike the helper of its own, mount.fuse3 asks for suid and dev.
        assert done.stderr == "cloakfs: warning: dev has no effect without default_permissions\n"
        assert done.returncode == 0
        assert user(3001).do(os.listdir, target) == ["file"]
        assert user(3002).do(os.listdir, target) == []
        flags = os.statvfs(target).f_flag
        assert flags & os.ST_RDONLY
        assert flags & os.ST_NODEV
        assert not flags & os.ST_NOSUID


# -- check -----------------------------------------------------------------------------------------


def test_check_tells_every_error_and_warning_with_its_place(base: str, tree: str) -> None:
    folder = Path(base, "exports.d")
    folder.mkdir()
    good, bad = folder / "a.exports", folder / "b.exports"
    good.write_text(f"{tree} @on(rw)\n")
    bad.write_text(
        f"{tree} @on(rw, colour=blue)\n"  # an error, and the next entry is looked at all the same
        f"{tree} (rw)\n"
        f"{tree} @thre(rw, cloak_list = uid 007 5)\n"
        f"{tree} @fou(rw, policy=absent.py:P, views = no-such-user 5:5)\n"
        f"{base}/absent @fiv(rw) @si(rw)\n"
    )
    (folder / "notes.txt").write_text("not looked at")
    done = run("check", str(folder), check=False)
    column = len(tree) + 2
    lines = done.stdout.splitlines()
    assert done.returncode == 1
    assert [line.partition(": ")[0] for line in lines] == [
        f"{bad}:1:{column + 8}",
        f"{bad}:2:{column}",
        f"{bad}:3:{column + 27}",
        f"{bad}:4:{column}",
        f"{bad}:4:{column}",
        f"{bad}:5:{len(base) + 9}",
    ]
    for line, says in zip(
        lines,
        (
            "error: unknown option 'colour'; expected an option of exports(5) or of cloakfs",
            "warning: options without a client",
            "error: '007' is not a mask; expected a mask",
            "error: policy=absent.py:P: FileNotFoundError",
            "error: view no-such-user: no such user in the user database",
            f"error: {base}/absent: not a directory",
        ),
        strict=True,
    ):
        assert says in line
    told = json.loads(run("check", "--json", str(folder), check=False).stdout)
    assert [f"{f['file']}:{f['line']}:{f['column']}: {f['severity']}: {f['message']}" for f in told] == lines
    text_only = run("check", "--text-only", str(bad), check=False)
    assert text_only.returncode == 1
    assert text_only.stdout.splitlines() == lines[:3]


def test_what_is_not_there_is_said_once_for_all_clients(base: str) -> None:
    file = Path(base) / "a.exports"
    file.write_text(f"{base}/absent one(rw) two(rw)\n")
    said = f"{base}/absent: not a directory"
    checked = run("check", str(file), check=False)
    planned = run("export", "plan", str(file), check=False)
    assert (checked.returncode, planned.returncode) == (1, 2)
    assert checked.stdout.count(said) == 1
    assert planned.stderr.count(said) == 1


@pytest.mark.parametrize(
    ("alteration", "problem"),
    [
        (alterations.hide_readers, "the caller of a listing cannot be found out"),
        (alterations.shrink_entries, "a listing could not leave out nodeids"),
    ],
)
def test_a_pyfuse3_with_other_objects_is_refused(tree: str, target: str, alteration: Alteration, problem: str) -> None:
    with daemons_with(alteration):
        done = run("mount", tree, target, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("cloakfs: pyfuse3 ")
    assert f": {problem}, because its objects are laid out differently " in done.stderr
    assert done.stderr.count("\n") == 1
    assert not is_mounted(target)


def test_check_of_what_is_right_says_nothing(base: str, tree: str, user: MakeUser) -> None:
    file = Path(base, "good.exports")
    file.write_text(f"{tree} @on(rw, views=root 5:5, policy={EXAMPLES}/policies/office_hours.py:OfficeHours)\n")
    done = run("check", str(file))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert json.loads(run("check", "--json", str(file)).stdout) == []
    # It needs no privileges.
    file.write_text(f"{tree} @on(rw, views=root 5:5)\n")
    assert user(3001).do(run_here, "check", str(file)) == (0, "")


def test_check_with_warnings_alone_is_no_failure(base: str, tree: str) -> None:
    file = Path(base, "warned.exports")
    file.write_text(f"{tree} (rw)\n")
    done = run("check", str(file))
    assert done.returncode == 0
    assert ": warning: options without a client" in done.stdout
    empty = Path(base, "empty")
    empty.mkdir()
    assert run("check", str(empty)).stdout == f"{empty}: warning: no *.exports files in this folder\n"


def test_check_of_what_cannot_be_read(base: str, tree: str) -> None:
    good = Path(base, "good.exports")
    good.write_text(f"{tree} @on(rw)\n")
    done = run("check", f"{base}/absent", str(good), check=False)
    assert (done.returncode, done.stdout) == (1, f"{base}/absent: error: No such file or directory\n")
    (told,) = json.loads(run("check", "--json", f"{base}/absent", check=False).stdout)
    assert (told["line"], told["column"], told["severity"]) == (None, None, "error")
    assert run("check", check=False).returncode == 2


def test_check_tells_names_of_any_bytes_without_harm(base: str) -> None:
    path = os.path.join(os.fsencode(base), b"\xff\x1b[31m.exports")
    with open(path, "wb") as file:
        file.write(b"\xfe\x1b nonsense\n")
    done = run("check", os.fsdecode(path), check=False)
    assert done.returncode == 1
    assert done.stdout.startswith(f"{base}/\\377\\033[31m.exports:1:1: error: ")


@pytest.mark.parametrize("file", sorted((EXAMPLES / "exports.d").iterdir()), ids=lambda file: file.stem)
def test_check_of_the_examples_text(file: Path) -> None:
    """Each file by itself: several of them are about the same tree and client."""
    assert ": error: " not in run("check", "--text-only", str(file)).stdout


# -- explain and table -----------------------------------------------------------------------------

MAPPED = "anonuid=65000,anongid=65001,range_map=uid 1000 1999 map 20000 gid 1000 1999 map 20000"
CLOAKED = f"{MAPPED},cloak_list=uid +077 20000 20999 gid -400 0 -1"


@pytest.fixture
def home(tree: str) -> str:
    """What is explained: directories open and closed, files of several owners."""
    os.mkdir(os.path.join(tree, "ann"))
    put(os.path.join(tree, "ann", "note"), 20001, 20001, 0o640)
    put(os.path.join(tree, "ann", "secret"), 20001, 20001, 0o600)
    put(os.path.join(tree, "program"), 0, 0, 0o4755)
    os.chown(os.path.join(tree, "ann"), 20001, 20001)
    os.chmod(os.path.join(tree, "ann"), 0o750)
    os.mkdir(os.path.join(tree, "barred"))
    put(os.path.join(tree, "barred", "file"), 0, 0, 0o644)
    os.chmod(os.path.join(tree, "barred"), 0o744)
    os.symlink("ann/note", os.path.join(tree, "link"))
    os.symlink("ann", os.path.join(tree, "dirlink"))
    os.symlink("/etc", os.path.join(tree, "out"))
    return tree


def explained(*arguments: str) -> dict[str, Any]:
    done = run("explain", "--json", *arguments, check=False)
    assert done.stderr == ""
    told: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == (0 if told["visible"] else 3)
    return told


def test_explain_tells_each_step(home: str, mount: MakeMount) -> None:
    m = mount("-o", CLOAKED)
    told = explained(m.at("ann", "note"), "--as", "1002:1002:1001,7")
    assert told["path"] == f"{home}/ann/note"
    assert told["source"] == home
    uid_rule, gid_rule = "uid 1000 1999 map 20000", "gid 1000 1999 map 20000"
    assert told["caller"] == {
        "uid": {"client": 1002, "server": 20002, "rule": uid_rule},
        "gid": {"client": 1002, "server": 20002, "rule": gid_rule},
        "groups": [
            {"client": 7, "server": None, "rule": "in no definition: nobody"},
            {"client": 1001, "server": 20001, "rule": gid_rule},
        ],
        "groups_from": "proc",
        "admitted": True,
    }
    assert told["file"] == {
        "type": "file",
        "mode": {"server": "0640", "client": "0640"},
        "uid": {"client": 1001, "server": 20001, "rule": uid_rule},
        "gid": {"client": 1001, "server": 20001, "rule": gid_rule},
    }
    assert [step["path"] for step in told["steps"]] == ["/", "/ann", "/ann/note"]
    root, _, note = told["steps"]
    assert root["reason"] == "the root of an export is always visible"
    assert note["verdicts"] == [
        {"definition": "uid +077 20000 20999", "hit_group": 4, "hit_other": 0, "hit_special": 0, "visible": True},
        {"definition": "gid -400 0 -1", "hit_group": 0, "hit_other": 0, "hit_special": 0, "visible": True},
    ]
    assert note["owner"] is False
    assert (told["visible"], told["hidden_at"]) == (True, None)
    assert told["accessible"] == {"read": True, "write": False, "execute": False}


def test_explain_tells_where_something_is_hidden(home: str, mount: MakeMount) -> None:
    m = mount("-o", CLOAKED)
    told = explained(m.at("ann", "note"), "--as", "1003:1003")
    assert (told["visible"], told["hidden_at"]) == (False, "/ann")
    assert told["accessible"] == {"read": False, "write": False, "execute": False}
    assert told["steps"][1]["reason"].startswith("uid +077 20000 20999 hides it (no bit of the mask met); gid -400")
    told = explained(m.at("program"), "--as", "1003:1003")
    assert told["steps"][1]["verdicts"] == [
        {"definition": "gid -400 0 -1", "hit_group": 0, "hit_other": 0, "hit_special": 4, "visible": False}
    ]
    assert told["steps"][1]["reason"] == "gid -400 0 -1 hides it (setuid met)"
    told = explained(m.at("ann", "secret"), "--as", "1001:1001")
    assert told["steps"][2]["owner"] is True
    assert told["steps"][2]["reason"] == "owners see their own files"
    assert told["accessible"] == {"read": True, "write": True, "execute": False}


def test_explain_counts_search_permission_above_and_a_read_only_export(home: str, mount: MakeMount) -> None:
    m = mount("-o", "rw")
    told = explained(m.at("barred", "file"), "--as", "3001:3001")
    assert told["steps"][2]["permissions"] == {"read": True, "write": False, "execute": False}
    assert told["accessible"] == {"read": False, "write": False, "execute": False}
    ro = mount("-o", "ro")
    told = explained(ro.at("ann", "secret"), "--as-server", "20001:20001")
    assert told["accessible"] == {"read": True, "write": False, "execute": False}
    assert told["read_only"] is True
    # Several mounts show the tree: say which.
    said = refused(2, "explain", f"{home}/ann", "--as", "3001:3001")
    assert said == f"{home}/ann: shown by several mounts; give the path below {m.path} or {ro.path}"


CALLERS = [(1001, 1001, []), (1002, 1002, [1001]), (1003, 1003, []), (5, 1001, []), (1004, 9, [1001])]


@pytest.mark.parametrize("caller", CALLERS, ids=str)
def test_explain_says_what_the_mount_does(
    caller: tuple[int, int, list[int]], home: str, mount: MakeMount, user: MakeUser
) -> None:
    m = mount("-o", CLOAKED)
    uid, gid, groups = caller
    someone = user(uid, gid, groups)
    who = f"{uid}:{gid}" + (f":{','.join(map(str, groups))}" if groups else "")
    modes = {"read": os.R_OK, "write": os.W_OK, "execute": os.X_OK}
    for names in (
        (), ("ann",), ("ann", "note"), ("ann", "secret"), ("program",), ("barred",), ("barred", "file")
    ):  # fmt: skip
        told = explained(m.at(*names), "--as", who)
        path = m.at(*names).rstrip("/")
        code = someone.error(os.lstat, path)
        # Where a directory above may not be searched, nobody can tell whether there is something.
        assert code == errno.EACCES or told["visible"] == (code == 0), (names, code)
        for what, mode in modes.items():
            assert told["accessible"][what] == someone.do(os.access, path, mode), (names, what)
        if told["visible"] and code == 0:
            info = someone.do(os.lstat, path)
            assert (told["file"]["uid"]["client"], told["file"]["gid"]["client"]) == (info.st_uid, info.st_gid)


def test_explain_for_people(home: str, mount: MakeMount) -> None:
    m = mount("-o", CLOAKED)
    done = run("explain", m.at("ann", "note"), "--as", "1002:1002:1001,7")
    assert "\x1b" not in done.stdout
    for words in (
        f"{home}/ann/note (export {home})",
        "uid 1000 1999 map 20000",
        "dropped",
        "in no definition: nobody",
        "Supplementary groups: as given (groups=proc).",
        "uid +077 20000 20999 shows it (group r met)",
        "-rw-r-----",
        "Visible; accessible to read.",
    ):
        assert words in done.stdout, words
    done = run("explain", m.at("ann", "note"), "--as", "1003:1003", check=False)
    assert done.returncode == 3
    assert done.stdout.endswith("Hidden, at /ann.\n")
    done = run("explain", m.at("barred", "file"), "--as", "1003:1003")
    assert done.stdout.endswith("Visible; not accessible.\n")


def test_explain_of_a_user_name_is_of_that_local_user(
    home: str, mount: MakeMount, accounts: Callable[[str], None]
) -> None:
    accounts("cloakfs-ann")
    uid = int(subprocess.run(["id", "-u", "cloakfs-ann"], capture_output=True, text=True, check=True).stdout)
    m = mount("-o", f"range_map=uid {uid} map 20001 gid 0 -1 map 0,cloak_list=uid +000 20000 -1")
    told = explained(m.at("ann", "secret"), "--as", "cloakfs-ann")
    assert told["caller"]["uid"] == {"client": uid, "server": 20001, "rule": f"uid {uid} map 20001"}
    assert told["visible"] is True
    told = explained(m.at("ann", "secret"), "--as-server", "cloakfs-ann")
    assert told["caller"]["uid"] == {"client": None, "server": uid, "rule": "named by server ids"}
    assert told["visible"] is False
    assert explained(m.at("ann"), "--as", str(uid))["caller"]["uid"]["server"] == 20001


def test_explain_asks_the_group_source_of_the_export(home: str, accounts: Callable[[str], None]) -> None:
    accounts("cloakfs-ann")
    ids = [
        int(subprocess.run(["id", flag, "cloakfs-ann"], capture_output=True, text=True, check=True).stdout)
        for flag in ("-u", "-g")
    ]
    for source, options, who, groups in (
        ("none", "", "5:5:6,7", []),
        ("1001:1002", "", "5:5:6,7", [(1001, 1001), (1002, 1002)]),
        ("proc", "", "5:5:6,7", [(6, 6), (7, 7)]),
        ("proc", ",root_squash", "5:5:0,7", [(0, None), (7, 7)]),
        ("proc", ",all_squash", "5:5:6", [(6, None)]),
        ("database", "", f"{ids[0]}:5:6", [(None, ids[1])]),
        ("database", "", "5999:5:6", []),
    ):
        told = explained(f"{home}/ann", "--source", home, "-o", f"groups={source}{options}", "--as", who)
        assert [(group["client"], group["server"]) for group in told["caller"]["groups"]] == groups, source
        assert told["caller"]["groups_from"] == source


def test_explain_tells_squashing(home: str) -> None:
    for options, uid, server, rule in (
        ("", 0, 65534, "root_squash: nobody"),
        ("", 5, 5, "unchanged"),
        ("no_root_squash", 0, 0, "unchanged"),
        ("all_squash,anonuid=9", 5, 9, "all_squash: nobody"),
        ("range_map=uid 1 map 2", 5, 65534, "in no definition: nobody"),
    ):
        told = explained(home, "--source", home, "-o", options, "--as", f"{uid}:5")
        assert told["caller"]["uid"] == {"client": uid, "server": server, "rule": rule}
        assert told["caller"]["gid"]["server"] == (65534 if "all_squash" in options else 5)


def test_explain_with_a_file_of_exports_and_no_mount(base: str, home: str) -> None:
    file = Path(base, "some.exports")
    file.write_text(f"{base} *(rw)\n{home} one(rw, cloak_list=uid +000 20001) two(rw)\n")
    exports = ("--exports", str(file))
    assert explained(f"{home}/ann", *exports, "--client", "one", "--as", "5:5")["hidden_at"] == "/ann"
    assert explained(f"{home}/ann", *exports, "--client", "two", "--as", "5:5")["visible"] is True
    # The entry of the deepest directory counts.
    assert explained(home, *exports, "--client", "two", "--as", "5:5")["source"] == home
    assert explained(base, *exports, "--as", "5:5")["source"] == base
    said = refused(2, "explain", f"{home}/ann", *exports, "--as", "5:5")
    assert said == f"{file}: several entries for {home}; choose one with --client (one, two)"
    assert refused(2, "explain", "/etc", *exports, "--as", "5:5") == (
        f"{file}: no entry for /etc or a directory above it"
    )
    # And so of a mounted tree, as it would be with other options.
    target = os.path.join(base, "mnt")
    os.mkdir(target)
    with mounted(home, target):
        assert explained(f"{target}/ann", "--as", "5:5")["visible"] is True
        assert explained(f"{target}/ann", *exports, "--client", "one", "--as", "5:5")["visible"] is False
        assert explained(f"{target}/ann", "-o", "cloak_list=uid +000 20001", "--as", "5:5")["visible"] is False


def test_explain_follows_links_to_a_directory_but_not_the_last(home: str, mount: MakeMount) -> None:
    m = mount("-o", CLOAKED)
    assert explained(m.at("link"), "--as", "1001:1001")["file"]["type"] == "symbolic link"
    assert explained(m.at("dirlink", "note"), "--as", "1001:1001")["path"] == f"{home}/ann/note"
    said = refused(1, "explain", m.at("out", "passwd"), "--as", "1001:1001")
    assert said == f"{m.at('out', 'passwd')}: a symbolic link leads to /etc/passwd, which is not below {home}"


def test_explain_through_fixed_views(home: str, mount: MakeMount) -> None:
    m = mount("-o", f"{CLOAKED},views=20001:20001 20003:20003,view_access=33")
    told = explained(m.at("@20001", "ann", "secret"))
    assert told["caller"]["uid"] == {"client": None, "server": 20001, "rule": "named by server ids"}
    assert told["accessible"]["read"] is True
    assert explained(m.at("@20003", "ann", "secret"))["hidden_at"] == "/ann"
    for client, admitted in ((1001, True), (0, True), (33, True), (1003, False)):
        told = explained(m.at("@20001", "ann"), "--as", f"{client}:5")
        assert (told["caller"]["admitted"], told["visible"]) == (admitted, admitted)
    assert told["hidden_at"] == "the entrance of the fixed view"
    assert refused(1, "explain", m.at("@5", "ann")).endswith("@5: no such view")
    assert refused(2, "explain", m.path).endswith("not below one of the mount's views (@NAME)")
    assert refused(2, "explain", f"{home}/ann", "--as", "5:5").startswith(
        "--as: has no meaning with fixed views; give --as-server"
    )
    assert explained(f"{home}/ann", "--as-server", "20001:5")["visible"] is True
    one = mount("--view", "20003:20003")
    assert explained(one.at("ann"))["caller"]["uid"]["server"] == 20003
    table = json.loads(run("table", one.path, "--json").stdout)
    assert [user["uid"] for user in table["users"]] == [20003]


def test_explain_and_a_plug_in(base: str, home: str, mount: MakeMount) -> None:
    Path(base, "plug.py").write_text(
        "class P:\n"
        "    def visible(self, caller, attrs):\n        return attrs.name != 'secret'\n"
        "    def forward(self, caller):\n        return caller._replace(uid=20001) if caller.uid else 1 / 0\n"
        "    def client_id(self, kind, server_id):\n        return 7\n"
    )
    m = mount("--policy", f"{base}/plug.py:P")
    told = explained(m.at("ann", "secret"), "--as", "5:5:6")
    assert told["caller"]["uid"] == {"client": 5, "server": 20001, "rule": f"plug-in {base}/plug.py:P"}
    assert told["caller"]["groups"] == [{"client": None, "server": 6, "rule": f"plug-in {base}/plug.py:P"}]
    assert told["file"]["uid"] == {"client": 7, "server": 20001, "rule": f"plug-in {base}/plug.py:P"}
    assert (told["hidden_at"], told["steps"][2]["reason"]) == ("/ann/secret", f"plug-in {base}/plug.py:P")
    done = run("explain", m.at("ann"), "--as", "0:0", check=False)
    assert done.returncode == 3
    assert "the plug-in failed" in done.stdout
    assert "ZeroDivisionError" in done.stderr


def test_explain_of_what_cannot_be_explained(home: str, mount: MakeMount, user: MakeUser) -> None:
    m = mount()
    assert refused(1, "explain", m.at("absent"), "--as", "5:5") == f"{home}/absent: No such file or directory"
    assert refused(1, "explain", m.at("program", "x"), "--as", "5:5") == f"{home}/program/x: Not a directory"
    assert refused(2, "explain", m.path).startswith("no caller given; give either --as WHO")
    assert refused(2, "explain", m.path, "--as", "5:5", "--as-server", "5:5").startswith("no caller given;")
    said = refused(2, "explain", m.path, "--as", "no-such-user")
    assert said.startswith("--as no-such-user: no such user in the user database")
    assert refused(2, "explain", m.path, "--as", "1-5") == "--as 1-5: expected USER or UID:GID[:GID,GID…]"
    assert refused(2, "explain", m.path, "--as", "5:x") == "--as 5:x: expected USER or UID:GID[:GID,GID…]"
    assert refused(2, "explain", "/etc", "--as", "5:5").startswith("/etc: not in a mount; give its options with")
    assert refused(2, "explain", "/etc", "--as", "5:5", "-o", "ro").startswith("/etc: not in a mount")
    assert refused(2, "explain", "/etc", "--as", "5:5", "--source", home) == f"/etc: not below {home}"
    assert refused(2, "explain", m.path, "--as", "5:5", "--source", home).startswith("--source is only for a path")
    assert refused(2, "explain", m.path, "--as", "5:5", "-o", "rwx").startswith("-o:1:1: unknown option 'rwx'")
    assert refused(2, "explain", m.path, "--as", "5:5", "-o", "ro", "--exports", "x").startswith("-o and --exports")
    assert refused(1, "explain", m.path, "--as", "5:5", "--exports", "absent") == "absent: No such file or directory"
    done = user(3001).do(run_here, "explain", m.path, "--as", "5:5")
    assert done == (1, "cloakfs: only root can act as another user\n")


def test_table_of_a_directory(home: str, mount: MakeMount, accounts: Callable[[str], None]) -> None:
    m = mount("-o", CLOAKED)
    told = json.loads(run("table", m.path, "--as", "1002:1002:1001", "--as-server", "20009:9", "--json").stdout)
    assert (told["path"], told["source"]) == (home, home)
    assert [user["name"] for user in told["users"]] == ["root", "20001", "20009:9", "1002:1002:1001"]
    assert told["users"][3] == {"name": "1002:1002:1001", "uid": 20002, "gid": 20002, "groups": [20001, 20002]}
    # An owner without an account has no groups.
    assert told["users"][1] == {"name": "20001", "uid": 20001, "gid": 65001, "groups": [65001]}
    cells = {file["name"]: "".join(file["cells"].values()) for file in told["files"]}
    assert cells == {
        "ann": "-A-A",
        "barred": "AAAA",
        "dirlink": "AAAA",
        "link": "AAAA",
        "out": "AAAA",
        "program": "A---",
    }
    inside = json.loads(run("table", m.at("barred"), "--as", "1002:1002", "--json").stdout)
    assert inside["files"][0]["cells"] == {"root": "A", "1002:1002": "v"}
    hidden = json.loads(run("table", m.at("ann"), "--only", "--as", "1003:1003", "--json").stdout)
    assert [file["cells"] for file in hidden["files"]] == [{"1003:1003": "-"}] * 2


def test_table_for_people(home: str, mount: MakeMount) -> None:
    put(os.path.join(home, "\x1b[31m[red]"), 0, 0)
    m = mount("-o", CLOAKED)
    done = run("table", m.path, "--as", "1003:1003")
    assert "\x1b" not in done.stdout
    rows = {row[0]: row for line in done.stdout.splitlines() if len(row := line.strip("┃│ ").split()) > 1}
    cells = {name: [word for word in row[1:] if word not in ("│", "┃")] for name, row in rows.items()}
    assert cells["file"] == ["mode", "owner", "group", "root", "20001", "1003:1003"]
    assert cells["ann"] == ["drwxr-x---", "20001", "20001", "-", "A", "-"]
    assert cells["program"] == ["-rwsr-xr-x", "0", "0", "A", "-", "-"]
    assert cells["\\033[31m[red]"][3:] == ["A", "A", "A"]
    assert done.stdout.endswith("A visible and accessible, v visible only, - hidden\n")


def test_table_says_what_the_mount_does(home: str, mount: MakeMount, user: MakeUser) -> None:
    m = mount("-o", CLOAKED)
    arguments = [word for uid, gid, groups in CALLERS for word in ("--as", _who(uid, gid, groups))]
    for directory in ((), ("ann",), ("barred",)):
        told = json.loads(run("table", m.at(*directory), "--only", "--json", *arguments).stdout)
        assert [file["name"] for file in told["files"]] == sorted(os.listdir(os.path.join(home, *directory)))
        for uid, gid, groups in CALLERS:
            someone = user(uid, gid, groups)
            for file in told["files"]:
                path = m.at(*directory, file["name"])
                cell = file["cells"][_who(uid, gid, groups)]
                code = someone.error(os.lstat, path)
                assert code == errno.EACCES or (cell != "-") == (code == 0), (file, uid)
                if file["type"] == "symbolic link":
                    continue  # access(2) follows it
                grants = any(someone.do(os.access, path, mode) for mode in (os.R_OK, os.W_OK, os.X_OK))
                assert (cell == "A") == grants, (file, uid)


def _who(uid: int, gid: int, groups: list[int]) -> str:
    return f"{uid}:{gid}" + (f":{','.join(map(str, groups))}" if groups else "")


def test_table_of_what_cannot_be_told(home: str, mount: MakeMount) -> None:
    m = mount()
    assert refused(1, "table", m.at("absent")) == f"{home}/absent: No such file or directory"
    assert refused(1, "table", m.at("program")) == f"{home}/program: Not a directory"
    assert refused(2, "table", m.path, "--only") == "--only: no caller given; add --as or --as-server"
    assert refused(2, "table", "/etc").startswith("/etc: not in a mount")
    views = mount("--view", "5:5")
    assert refused(2, "table", views.path, "--as", "5:5").startswith("--as: the path leads through a fixed view")
    assert refused(2, "table", home, "--as", "5:5").startswith(f"{home}: shown by several mounts")


def test_table_follows_a_link_to_the_directory(home: str, mount: MakeMount) -> None:
    m = mount()
    told = json.loads(run("table", m.at("dirlink"), "--json").stdout)
    assert told["path"] == f"{home}/ann"
    assert [file["name"] for file in told["files"]] == ["note", "secret"]


# -- the group of commands -------------------------------------------------------------------------


def test_help_and_version() -> None:
    for command in ((), ("mount",), ("umount",), ("check",), ("explain",), ("table",)):
        done = run(*command, "--help")
        assert done.stdout.startswith("Usage: cloakfs")
        if command:
            assert "Exit status: 0 " in " ".join(done.stdout.split())
    assert run("--version").stdout.startswith("cloakfs, version ")
    assert run("no-such-command", check=False).returncode == 2


def test_umount_waits_while_the_mount_is_busy_for_a_moment(base: str, mount: MakeMount) -> None:
    """As it is when the daemon looks at its own mount."""
    m = mount()
    flag = os.path.join(base, "tried")
    held = os.open(m.path, os.O_RDONLY)
    with subprocess.Popen(
        [
            *command_with(partial(alterations.note_umount_in_vain, flag), tuning=Tuning(unmount_seconds=30.0)),
            "umount",
            m.path,
        ]
    ) as process:
        try:
            wait_until(lambda: os.path.exists(flag))
            assert is_mounted(m.path)
        finally:
            os.close(held)
        assert process.wait(30) == 0
    assert not is_mounted(m.path)


def test_exports_may_be_a_folder(base: str, tree: str, mount: MakeMount) -> None:
    """With one entry of a tree in each of two files, the client chooses."""
    folder = os.path.join(base, "exports.d")
    os.mkdir(folder)
    put(os.path.join(tree, "file"), 3001, 3001, 0o600)
    for client, mask in (("lab", "+000"), ("office", "-000")):
        Path(folder, f"{client}.exports").write_text(f"{tree} {client}(rw,cloak_list = uid {mask} 0 -1)\n")
    path = os.path.join(tree, "file")
    asked = ("explain", path, "--as-server", "3002:3002", "--exports", folder, "--client")
    assert run(*asked, "lab", check=False).returncode == 3
    assert run(*asked, "office").returncode == 0
    assert "choose one with --client (lab, office)" in run(*asked[:-1], check=False).stderr
    assert run("table", tree, "--exports", folder, "--client", "lab").returncode == 0
    m = mount("--exports", folder, "--client", "lab")
    assert os.listdir(m.path) == []
    link = os.path.join(base, "link")
    os.symlink(tree, link)
    Path(folder, "third.exports").write_text(f"{link} lab(rw)\n")
    said = run(*asked, "lab", check=False)
    assert f"{folder}: several entries for {tree} and client lab ({folder}/lab.exports:1:" in said.stderr
    checked = run("check", folder).stdout
    place = f"{folder}/third.exports:1:{len(link) + 2}"
    assert (
        f"{place}: warning: {link} is {tree} by another path, which is exported to lab already, at {folder}/" in checked
    )
    assert "by another path" not in run("check", "--text-only", folder).stdout
    Path(folder, "third.exports").write_text(f"{tree}/ LAB(rw)\n")
    said = run(*asked, "lab", check=False)
    assert said.returncode == 2
    assert f"third.exports:1:{len(tree) + 3}: " in said.stderr
    assert "exported to LAB already, at" in said.stderr
    said = run("check", folder, check=False)
    assert said.returncode == 1
    assert f"third.exports:1:{len(tree) + 3}: error: '{tree}/' is exported to LAB already, at " in said.stdout
    for command in ("plan", "up"):
        said = run("export", command, folder, f"{folder}/lab.exports", check=False)  # a file given twice is read once
        assert said.returncode == 2
        assert said.stderr.count("already, at") == 1
        assert (
            f"third.exports:1:{len(tree) + 3}: error: '{tree}/' is exported to LAB already, at {folder}/lab"
            in said.stderr
        )
        assert "bind mount" not in said.stderr
