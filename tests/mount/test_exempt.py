"""Callers from whom nothing is hidden (`exempt`): they back up and restore a tree, and nobody else sees more."""

import errno
import json
import os
import shutil
import stat
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.agents import User, names, read, write
from tests.mount.conftest import Mount, run, told
from tests.mount.test_caching import GROUP, OTHER, OWNER, STRANGER, put
from tests.mount.test_cli import explained
from tests.mount.test_control import reload
from tests.waiting import wait_until

MakeMount = Callable[..., Mount]
MakeUser = Callable[..., User]

BACKUP = 3100
CLOAK = "cloak_list=uid +077 3000 3999 gid -002 4000 4999"
OPTIONS = f"rw,suid,no_root_squash,{CLOAK},exempt=0 {BACKUP}"

MODES = (0o600, 0o640, 0o644, 0o660, 0o604, 0o755, 0o4711, 0o2750, 0o1777, 0o000)


def fill(top: str) -> None:
    """Make files and directories of several owners and modes, with ACLs, an attribute, and links of both kinds."""
    for owner in (0, OWNER, OTHER, BACKUP):
        for gid in (owner, GROUP):
            directory = put(os.path.join(top, f"{owner}.{gid}"), owner, stat.S_IFDIR | 0o700, gid=gid)
            for mode in MODES:
                put(os.path.join(directory, f"file {mode:o}"), owner, stat.S_IFREG | mode, gid=gid)
                inside = put(os.path.join(directory, f"dir {mode:o}"), owner, stat.S_IFDIR | mode, gid=gid)
                put(os.path.join(inside, "below"), OWNER, 0o600)
            os.symlink("file 600", os.path.join(directory, "symlink"))
            os.lchown(os.path.join(directory, "symlink"), owner, gid)
            os.mkfifo(os.path.join(directory, "fifo"), 0o600)
            os.link(os.path.join(directory, "file 640"), os.path.join(directory, "dir 755", "hard link"))
    private = os.path.join(top, f"{OWNER}.{OWNER}")
    subprocess.run(["setfacl", "-m", f"u:{OTHER}:rx,g:{GROUP}:r", f"{private}/file 640"], check=True)
    subprocess.run(["setfacl", "-m", f"d:u:{OTHER}:rwx,u:{OTHER}:x", f"{private}/dir 755"], check=True)
    os.setxattr(f"{private}/file 600", "user.colour", b"blue")
    an_hour_ago = time.time_ns() - 3600 * 10**9  # for rsync, times of directories within one second are the same
    for path, directories, files in os.walk(top, topdown=False):
        for name in (*files, *directories, "."):
            os.utime(os.path.join(path, name), ns=(an_hour_ago, an_hour_ago), follow_symlinks=False)


def described(top: str) -> dict[str, object]:
    """Return all that a backup has to preserve of each object of a tree, by path."""
    found: dict[str, object] = {}
    first: dict[tuple[int, int], str] = {}
    for path, directories, files in os.walk(top):
        directories.sort()
        for name in (".", *directories, *sorted(files)):
            at = os.path.normpath(os.path.join(path, name))
            info = os.lstat(at)
            link = at if stat.S_ISDIR(info.st_mode) else first.setdefault((info.st_dev, info.st_ino), at)
            content: object = None
            if stat.S_ISREG(info.st_mode):
                content = read(at)
            elif stat.S_ISLNK(info.st_mode):
                content = os.readlink(at)
            attributes = {
                of: os.getxattr(at, of, follow_symlinks=False) for of in os.listxattr(at, follow_symlinks=False)
            }
            found[os.path.relpath(at, top)] = (
                info.st_mode, info.st_uid, info.st_gid, info.st_mtime_ns, content, sorted(attributes.items()),
                os.path.relpath(link, top),
            )  # fmt: skip
    return found


COPY = {
    "cp": ["cp", "-a"],
    "rsync": ["rsync", "-aHAX", "--numeric-ids"],
}


def copy(tool: str, source: str, target: str) -> None:
    if shutil.which(tool) is None:
        pytest.skip(f"{tool} is not installed")
    done = subprocess.run([*COPY[tool], f"{source}/.", f"{target}/"], capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr


@pytest.mark.parametrize("words", ["", ",default_permissions"])
@pytest.mark.parametrize("tool", COPY)
def test_root_restores_a_tree_into_the_mount_and_backs_it_up(
    tool: str, words: str, base: str, tree: str, mount: MakeMount
) -> None:
    archive, again = os.path.join(base, "archive"), os.path.join(base, "again")
    os.mkdir(archive)
    os.mkdir(again)
    os.chmod(archive, 0o777)  # as the root of the tree
    fill(archive)
    m = mount("-o", OPTIONS + words)
    os.mkdir(m.at("restored"))
    copy(tool, archive, m.at("restored"))
    assert described(m.real("restored")) == described(archive)
    assert described(m.at("restored")) == described(archive)
    copy(tool, m.at("restored"), again)
    assert described(again) == described(archive)


def test_without_the_exemption_root_cannot_restore_it(base: str, tree: str, mount: MakeMount) -> None:
    archive = os.path.join(base, "archive")
    os.mkdir(archive)
    fill(archive)
    m = mount("-o", OPTIONS.replace("exempt=0 ", "exempt="))
    done = subprocess.run(["cp", "-a", f"{archive}/.", m.path], capture_output=True, check=False)
    assert done.returncode
    assert described(m.path) != described(archive)


@pytest.fixture
def scene(tree: str) -> str:
    """Two homes that only their owners see, with directories in them, and a directory of all."""
    for owner in (OWNER, OTHER):
        home = put(os.path.join(tree, str(owner)), owner, stat.S_IFDIR | 0o700)
        put(os.path.join(home, "secret"), owner, 0o600)
        put(os.path.join(home, "work"), owner, stat.S_IFDIR | 0o755)
        put(os.path.join(home, "work/file"), owner, 0o644)
        put(os.path.join(home, "work/private"), owner, 0o600)
    put(os.path.join(tree, "all"), OWNER, stat.S_IFDIR | 0o777)
    put(os.path.join(tree, "all/private"), OWNER, 0o600)
    put(os.path.join(tree, "all/public"), OWNER, 0o644)
    return tree


def paths(top: str) -> list[str]:
    found = [os.path.join(path, name) for path, *below in os.walk(top) for name in below[0] + below[1]]
    return sorted(os.path.relpath(path, top) for path in found)


def known(top: str, candidates: list[str]) -> list[str]:
    """Return the paths that can be looked up."""
    return [path for path in candidates if os.path.lexists(os.path.join(top, path))]


def look(top: str, candidates: list[str]) -> list[str]:
    """Have the kernel remember all there is to know; return what is found by listing and by name."""
    for _ in range(3):
        listed, by_name = paths(top), known(top, candidates)
    # Whoever may list a directory that it may not search knows the names in it.
    return sorted({*listed, *by_name})


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1, 2, 0)])
@pytest.mark.parametrize("words", ["", ",default_permissions"])
@pytest.mark.parametrize("mask", ["+077", "+000"])
def test_others_see_nothing_more_whoever_looks_first(
    mask: str, words: str, order: tuple[int, ...], scene: str, mount: MakeMount, user: MakeUser
) -> None:
    candidates = paths(scene)
    options = OPTIONS.replace("+077", mask) + words
    cloaked, m = mount("-o", options.replace(f",exempt=0 {BACKUP}", "")), mount("-o", options)
    callers = [user(0), user(OWNER), user(STRANGER, STRANGER, [GROUP]), user(BACKUP)]
    expected = [caller.do(look, cloaked.path, candidates) for caller in callers]
    expected[0] = candidates
    # Permissions still hold for an exempt user who is not root.
    expected[3] = [path for path in candidates if os.path.dirname(path) in ("", "all")]
    told(m.path)
    for who in (*order, *order):
        assert callers[who].do(look, m.path, candidates) == expected[who], callers[who].uid
    assert expected[2] == (["all", "all/public"] if mask == "+077" else [])


def test_what_an_exempt_caller_makes_is_hidden_from_others_at_once(
    scene: str, mount: MakeMount, user: MakeUser
) -> None:
    m = mount("-o", OPTIONS)
    root, owner, stranger = user(0), user(OWNER), user(STRANGER)
    root.do(write, m.at("all/new"), b"new")
    assert stranger.do(read, m.at("all/new")) == b"new"
    root.do(os.chmod, m.at("all/new"), 0o600)
    root.do(os.chown, m.at("all/new"), OWNER, OWNER)
    assert stranger.error(os.stat, m.at("all/new")) == errno.ENOENT
    assert stranger.do(names, m.at("all")) == ["public"]
    assert root.do(os.stat, m.at("all/new")).st_uid == OWNER
    assert owner.do(read, m.at("all/new")) == b"new"
    root.do(os.rename, m.at("all/new"), m.at(str(OTHER), "new"))
    assert owner.error(os.stat, m.at(str(OTHER), "new")) == errno.ENOENT
    assert root.do(read, m.at(str(OTHER), "new")) == b"new"


def test_an_exempt_user_makes_what_it_would_not_see(tree: str, mount: MakeMount, user: MakeUser) -> None:
    """A group that hides a file from everybody but its owner hides it from an exempt caller neither."""
    os.mkdir(os.path.join(tree, "shared"))
    os.chown(os.path.join(tree, "shared"), OWNER, GROUP)
    os.chmod(os.path.join(tree, "shared"), stat.S_ISGID | 0o777)
    m = mount("-o", f"rw,{CLOAK},exempt={BACKUP}")
    backup, stranger = user(BACKUP), user(STRANGER)
    backup.do(write, m.at("shared/file"), b"mine", os.O_CREAT, 0o666)
    backup.do(os.chmod, m.at("shared/file"), 0o602)
    assert backup.do(names, m.at("shared")) == ["file"]
    assert stranger.error(os.stat, m.at("shared/file")) == errno.ENOENT


def test_a_reload_adds_and_removes_an_exemption(scene: str, mount: MakeMount, user: MakeUser, tmp_path: Path) -> None:
    candidates = paths(scene)
    config = tmp_path / "a.exports"
    entry = f"{scene} *(rw, no_root_squash, {CLOAK}%s)\n"
    config.write_text(entry % "")
    m = mount("--exports", str(config))
    root, stranger = user(0), user(STRANGER)
    seen = root.do(look, m.path, candidates)
    assert seen == ["all", "all/public"]
    config.write_text(entry % ", exempt = 0")
    reload(m)
    wait_until(lambda: "nothing is hidden from server uid 0 (exempt)" in m.log)  # it is written after the answer
    assert root.do(look, m.path, candidates) == candidates
    fd = root.do(os.open, m.at(str(OWNER), "work"), os.O_RDONLY)
    assert stranger.do(look, m.path, candidates) == seen
    config.write_text(entry % f", exempt = {STRANGER}")
    reload(m)
    assert root.do(look, m.path, candidates) == seen
    assert root.error(os.stat, "file", dir_fd=fd) in (errno.ENOENT, errno.ESTALE)
    assert root.error(os.listdir, fd) in (errno.ENOENT, errno.ESTALE)
    root.do(os.close, fd)
    assert "all/private" in stranger.do(look, m.path, candidates)
    config.write_text(entry % "")
    reload(m)
    assert stranger.do(look, m.path, candidates) == seen


def test_who_is_exempt_is_told(scene: str, base: str, mount: MakeMount, tmp_path: Path) -> None:
    config = tmp_path / "a.exports"
    config.write_text(f"{scene} *(rw, no_root_squash, no_client_cache, {CLOAK}, exempt = 0 {BACKUP})\n")
    said = f"nothing is hidden from server uid 0, {BACKUP} (exempt)"
    m = mount("--exports", str(config))
    assert said in m.log
    assert said in run("export", "plan", "--root", os.path.join(base, "exported"), str(config)).stderr
    private = explained(m.at("all/private"), "--as", f"{BACKUP}:{BACKUP}")
    assert private["visible"]
    assert private["steps"][-1]["reason"] == f"server uid {BACKUP} is exempt"
    columns = f"{BACKUP}:{BACKUP}", f"{STRANGER}:{STRANGER}"
    as_both = [word for column in columns for word in ("--as", column)]
    table = json.loads(run("table", m.at("all"), "--only", "--json", *as_both).stdout)
    (cells,) = [file["cells"] for file in table["files"] if file["name"] == "private"]
    assert [cells[column] for column in columns] == ["v", "-"]
    report = run("exposure", str(config)).stdout
    assert "exempt: client uids 0 become root (0), from whom nothing is hidden (exempt)" in report


@pytest.mark.parametrize("exempt", [0, STRANGER])
def test_a_fixed_view_of_an_exempt_identity_hides_nothing(
    exempt: int, scene: str, mount: MakeMount, user: MakeUser
) -> None:
    m = mount("-o", f"rw,no_root_squash,{CLOAK},exempt={exempt},views=0:0 {STRANGER}:{STRANGER}")
    root = user(0)
    everything = paths(scene)
    expected = [path for path in everything if os.path.dirname(path) in ("", "all")]
    assert (root.do(look, m.at("@0"), everything) == everything) is (exempt == 0)
    assert (root.do(look, m.at(f"@{STRANGER}"), everything) == expected) is (exempt == STRANGER)
