"""What the kernel caches, for whom, and that it is invalidated.

`test_stateful.py` shows for arbitrary sequences that nothing one caller does changes what another one sees. This module
tests what is cached at all, and each way in which it can become untrue.
"""

import errno
import os
import shutil
import signal
import stat
import struct
import subprocess
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from cloakfs.state.runtime import mounted as what_is_mounted
from tests.agents import User, names, read, write
from tests.mount import alterations
from tests.mount.conftest import Mount, daemons_with, publish_at_once, told, unmount
from tests.mount.loopfs import attached
from tests.waiting import let_expire, wait_until

OWNER, OTHER, STRANGER = 3001, 3002, 3003
GROUP = 4001

CLOAKED = "rw,no_root_squash,cloak_list=uid +077 3000 3999"
"""Files of these owners are seen by those to whom the mode bits give something."""

MakeMount = Callable[..., Mount]
MakeUser = Callable[..., User]


def put(path: str, uid: int, mode: int, *, gid: int | None = None) -> str:
    """A file, or, if the mode says so, a directory."""
    if stat.S_ISDIR(mode):
        os.mkdir(path)
    else:
        write(path, b"content")
    os.chown(path, uid, uid if gid is None else gid)
    os.chmod(path, stat.S_IMODE(mode))
    return path


@pytest.fixture
def scene(tree: str) -> str:
    """open/public is everybody's to see, open/private its group's, closed/file below what not everybody may search."""
    put(os.path.join(tree, "open"), OWNER, stat.S_IFDIR | 0o777)
    put(os.path.join(tree, "open/public"), OWNER, 0o644)
    put(os.path.join(tree, "open/private"), OWNER, 0o640, gid=GROUP)
    put(os.path.join(tree, "closed"), OWNER, stat.S_IFDIR | 0o750, gid=GROUP)
    put(os.path.join(tree, "closed/file"), OWNER, 0o644)
    return tree


def requests(m: Mount) -> Counter[str]:
    """What the daemon was asked until now, by operation; for tests that use `figures_at_once`."""
    assert publish_at_once(), "this takes five seconds, and a busy machine makes the kernel ask for everything anew"
    before = what_is_mounted()[m.path].requests.get("statfs", 0)
    os.statvfs(m.path)
    wait_until(lambda: what_is_mounted()[m.path].requests.get("statfs", 0) > before)
    return Counter(what_is_mounted()[m.path].requests)


def many(call: Callable[..., object], *args: object) -> None:
    for _ in range(100):
        call(*args)


def read_again(path: str) -> bytes:
    for _ in range(100):
        content = read(path)
    return content


# -- what is remembered ----------------------------------------------------------------------------


@pytest.mark.usefixtures("figures_at_once")
def test_a_caller_view_remembers_what_is_the_same_for_all(scene: str, mount: MakeMount, user: MakeUser) -> None:
    m = mount("-o", CLOAKED)
    member = user(OTHER, GROUP)
    told()  # a change within the last tick of the clock is nothing to rely on
    for name in ("open/public", "open/private", "closed/file"):
        member.do(os.stat, m.at(name))
    before = requests(m)
    member.do(many, os.stat, m.at("open/public"))
    public = requests(m) - before
    assert public["lookup"] + public["getattr"] <= 5
    before = requests(m)
    for name in ("open/private", "closed/file"):
        member.do(many, os.stat, m.at(name))
    hidden = requests(m) - before
    assert hidden["lookup"] >= 200  # each time, for somebody else might ask
    assert hidden["getattr"] <= 100  # one system call asks but once, if it gets a processor in time
    before = requests(m)
    assert member.do(read_again, m.at("open/public")) == b"content"
    contents = requests(m) - before
    assert contents["open"] == 100  # permission is the daemon's
    assert contents["read"] <= 5
    assert contents["flush"] <= 1
    before = requests(m)
    for _ in range(20):
        assert member.error(os.stat, m.at("open/absent")) == errno.ENOENT
    assert (requests(m) - before)["lookup"] >= 20  # else, time would tell hidden names from absent ones


@pytest.mark.usefixtures("figures_at_once")
def test_where_nothing_is_hidden_absent_names_are_remembered(scene: str, mount: MakeMount, user: MakeUser) -> None:
    m = mount("-o", "rw,no_root_squash")
    other, member = user(OTHER), user(OTHER, GROUP)
    told()
    absent = m.at("open/absent")
    before = requests(m)
    for _ in range(100):
        assert other.error(os.stat, absent) == errno.ENOENT
    assert (requests(m) - before)["lookup"] <= 5
    write(m.real("open/absent"), b"")  # made behind the mount, and then in a directory that not everybody may search
    wait_until(lambda: other.error(os.stat, absent) == 0)
    assert other.error(os.stat, m.at("closed/absent")) == errno.EACCES
    before = requests(m)
    for _ in range(20):
        assert member.error(os.stat, m.at("closed/absent")) == errno.ENOENT
    assert (requests(m) - before)["lookup"] >= 20


@pytest.mark.usefixtures("figures_at_once")
def test_a_fixed_view_remembers_hidden_names_as_absent_ones(scene: str, mount: MakeMount, user: MakeUser) -> None:
    """Else, time would tell them apart."""
    m = mount("-o", f"{CLOAKED},default_permissions,views={STRANGER}:{STRANGER}")
    stranger = user(STRANGER)
    for name in ("open/private", "open/absent"):
        before = requests(m)
        for _ in range(100):
            assert stranger.error(os.stat, m.at(name)) == errno.ENOENT
        assert (requests(m) - before)["lookup"] <= 5, name


def list_and_stat(directory: str) -> None:
    with os.scandir(directory) as entries:
        for entry in entries:
            entry.stat(follow_symlinks=False)


@pytest.mark.usefixtures("figures_at_once")
def test_what_was_listed_need_not_be_looked_up(scene: str, mount: MakeMount, user: MakeUser) -> None:
    for number in range(1000):  # many replies, each of which has no room for one more entry
        put(os.path.join(scene, "open", f"{number:04}"), OWNER, 0o644)
    m = mount("-o", CLOAKED)
    told()
    before = requests(m)
    user(OTHER).do(list_and_stat, m.at("open"))
    asked = requests(m) - before
    assert asked["lookup"] <= 1, asked  # for the directory
    assert asked["readdir"] >= 5, asked


@pytest.mark.parametrize("options", ["default_permissions", "several"])
@pytest.mark.usefixtures("figures_at_once")
def test_a_fixed_view_remembers_everything(options: str, scene: str, mount: MakeMount, user: MakeUser) -> None:
    views = f"views={OTHER}:{GROUP} {STRANGER}:{STRANGER}" if options == "several" else f"views={OTHER}:{GROUP}"
    m = mount("-o", f"{CLOAKED},{views}" + ",default_permissions" * (options != "several"))
    member = user(OTHER, GROUP)
    member.do(os.chdir, m.at(f"@{OTHER}" if options == "several" else "."))
    told()
    paths = ("open/public", "open/private", "closed/file")
    for path in paths:
        member.do(os.stat, path)
    assert member.error(os.stat, "open/absent") == errno.ENOENT
    before = requests(m)
    for path in paths:
        member.do(many, os.stat, path)
        member.do(many, os.lstat, path)
    for _ in range(100):
        assert member.error(os.stat, "open/absent") == errno.ENOENT
    asked = requests(m) - before
    assert asked["lookup"] + asked["getattr"] <= 10, asked


@pytest.mark.usefixtures("figures_at_once")
def test_without_extended_attributes_nobody_asks_for_them(scene: str, mount: MakeMount, user: MakeUser) -> None:
    m = mount("-o", f"{CLOAKED},noxattr,passthrough=off")
    other = user(OTHER)
    # Which of them is for the kernel to choose: it knows of ACLs by itself from Linux 6.2 on.
    there_is_none = other.error(os.getxattr, m.at("open/public"), "system.posix_acl_access")
    assert there_is_none in (errno.ENODATA, errno.EOPNOTSUPP)
    assert other.error(os.getxattr, m.at("open/public"), "user.note") == errno.EOPNOTSUPP
    assert other.error(os.setxattr, m.at("open/public"), "user.note", b"x") == errno.EOPNOTSUPP
    other.do(write, m.at("open/mine"), b"x")
    before = requests(m)
    other.do(many, write, m.at("open/mine"), b"y")
    asked = requests(m) - before
    assert asked["write"] == 100
    assert asked["getxattr"] == 0
    os.setxattr(m.real("open/public"), "system.posix_acl_access", ACL_FOR_NOBODY)
    told()
    assert other.error(read, m.at("open/public")) == errno.ENOENT  # it is in force all the same


def test_no_client_cache_forgets_directories(scene: str, mount: MakeMount, user: MakeUser) -> None:
    m = mount("-o", f"{CLOAKED},no_client_cache")
    other = user(OTHER)
    times = [other.do(os.stat, m.at("open")).st_mtime_ns for _ in range(10)]
    assert times == sorted(set(times))


# -- who is kept out -------------------------------------------------------------------------------


@pytest.mark.parametrize("options", ["", ",default_permissions", f",view_access={STRANGER}"])
def test_the_gate_of_a_fixed_view(options: str, scene: str, mount: MakeMount, user: MakeUser) -> None:
    m = mount("-o", f"{CLOAKED},views={OWNER}:{OWNER}{options}")
    owner, root, other, stranger = user(OWNER), user(0), user(OTHER), user(STRANGER)
    for _ in range(3):
        for entered in (owner, root, *([stranger] if "access" in options else [])):
            assert entered.do(names, m.path) == ["closed", "open"]
            assert entered.do(read, m.at("open/private")) == b"content"
            assert entered.do(os.stat, m.at("closed/file")).st_size == 7
            assert entered.error(os.stat, m.at("open/absent")) == errno.ENOENT
        for refused in (other, *([stranger] if "access" not in options else [])):
            for name in ("open", "open/public", "closed/file", "absent", "open/absent"):
                assert refused.error(os.stat, m.at(name)) == errno.EACCES, (refused.uid, name)
            assert refused.error(os.listdir, m.path) == errno.EACCES
            assert refused.error(os.chdir, m.path) == errno.EACCES


# -- changes through the mount ---------------------------------------------------------------------

ACL_FOR_NOBODY = struct.pack("<I", 2) + b"".join(
    struct.pack("<HHI", *entry)
    for entry in ((1, 7, -1 & 0xFFFFFFFF), (4, 0, -1 & 0xFFFFFFFF), (0x20, 0, -1 & 0xFFFFFFFF))
)

NARROWED: dict[str, tuple[Callable[..., object], tuple[object, ...]]] = {
    "chmod": (os.chmod, ("open/public", 0o600)),
    "chmod-directory": (os.chmod, ("open", 0o700)),
    "chmod-only-search": (os.chmod, ("open", 0o766)),
    "rename": (os.rename, ("open/public", "closed/public")),
    "rename-directory": (os.rename, ("open", "closed/open")),
    "unlink": (os.unlink, ("open/public",)),
    "setfacl": (os.setxattr, ("open/public", "system.posix_acl_access", ACL_FOR_NOBODY)),
    "setfacl-directory": (os.setxattr, ("open", "system.posix_acl_access", ACL_FOR_NOBODY)),
}


@pytest.mark.parametrize("how", NARROWED)
@pytest.mark.parametrize("words", ["", ",default_permissions"])
def test_what_its_owner_takes_away_is_gone_at_once(
    how: str, words: str, scene: str, mount: MakeMount, user: MakeUser
) -> None:
    call, args = NARROWED[how]
    m = mount("-o", CLOAKED + words)
    owner, stranger, inside = user(OWNER), user(STRANGER), user(STRANGER)
    inside.do(os.chdir, m.at("open"))
    owner.do(os.chdir, m.path)
    told()
    for who, path in ((stranger, m.at("open/public")), (inside, "public")):
        for _ in range(3):
            assert who.do(read, path) == b"content"
            assert who.do(os.stat, path).st_size == 7
    owner.do(call, *args)
    expected = {errno.ENOENT, errno.ESTALE, errno.EACCES}
    assert stranger.error(os.stat, m.at("open/public")) in expected
    assert stranger.error(os.lstat, m.at("open/public")) in expected
    assert stranger.error(read, m.at("open/public")) in expected
    assert inside.error(os.stat, "public") in expected
    assert inside.error(read, "public") in expected
    told(m.path)  # nothing comes back
    assert stranger.error(os.stat, m.at("open/public")) in expected


@pytest.mark.parametrize("how", ["unlink", "rename over it", "rename it"])
def test_the_only_name_that_all_knew_goes(how: str, scene: str, mount: MakeMount, user: MakeUser) -> None:
    """What is left is a name below a directory that not everybody may see."""
    put(os.path.join(scene, "vault"), OWNER, stat.S_IFDIR | 0o700)
    os.link(os.path.join(scene, "open/public"), os.path.join(scene, "vault/twin"))
    m = mount("-o", CLOAKED)
    owner, stranger = user(OWNER), user(STRANGER)
    told()
    fd = stranger.do(os.open, m.at("open/public"), os.O_PATH)
    path = f"/proc/self/fd/{fd}"
    for _ in range(3):
        owner.do(os.stat, m.at("vault/twin"))
        assert stranger.do(read, m.at("open/public")) == b"content"
        assert stranger.do(read, path) == b"content"
    if how == "unlink":
        owner.do(os.unlink, m.at("open/public"))
    elif how == "rename it":
        owner.do(os.rename, m.at("open/public"), m.at("vault/other"))
    else:
        owner.do(write, m.at("open/new"), b"new")
        owner.do(os.rename, m.at("open/new"), m.at("open/public"))
    let_expire(0.02)  # as long as any attributes are remembered
    assert stranger.error(read, path) == errno.ESTALE
    assert stranger.error(os.stat, path) == errno.ESTALE
    assert owner.do(os.stat, m.at("vault/twin")).st_size == 7


def test_what_one_view_changes_the_others_see(scene: str, mount: MakeMount, user: MakeUser) -> None:
    m = mount("-o", f"{CLOAKED},views={OWNER}:{OWNER} {OTHER}:{OTHER}")
    owner, other = user(OWNER), user(OTHER)
    owner.do(os.chdir, m.at(f"@{OWNER}/open"))
    other.do(os.chdir, m.at(f"@{OTHER}/open"))
    for _ in range(3):
        assert other.error(os.stat, "new") == errno.ENOENT
        assert other.do(read, "public") == b"content"
    owner.do(write, "new", b"new")
    owner.do(write, "public", b"changed content")
    told()
    assert other.do(read, "new") == b"new"
    assert other.do(read, "public") == b"changed content"
    owner.do(os.chmod, "public", 0o600)
    owner.do(os.rename, "new", "newer")
    told()
    assert other.error(os.stat, "public") == errno.ENOENT
    assert other.error(os.stat, "new") == errno.ENOENT
    assert other.do(read, "newer") == b"new"


# -- changes behind the mount ----------------------------------------------------------------------


@pytest.fixture(params=["caller", "fixed"])
def options(request: pytest.FixtureRequest) -> str:
    return CLOAKED if request.param == "caller" else f"{CLOAKED},default_permissions,views={STRANGER}:{STRANGER}"


def look(at: str) -> dict[object, object]:
    """All there is to see, more than once."""
    for _ in range(3):
        found: dict[object, object] = {}
        for name in ("public", "private", "mine", "renamed", "made", "directory", "directory/file"):
            path = os.path.join(at, "open", name)
            try:
                info = os.stat(path)
            except OSError as exc:
                found[name] = exc.errno
                continue
            found[name] = (info.st_mode, info.st_uid, info.st_size, info.st_nlink if name == "public" else 0)
            if stat.S_ISREG(info.st_mode) and info.st_mode & 4:
                found[name, "content"] = read(path)
        found["list"] = names(os.path.join(at, "open"))
    return found


BEHIND: dict[str, Callable[[str], object]] = {
    "chmod hides": lambda at: os.chmod(f"{at}/public", 0o600),
    "chmod shows": lambda at: os.chmod(f"{at}/private", 0o644),
    "chown hides": lambda at: os.chown(f"{at}/mine", OTHER, OTHER),
    "chown shows": lambda at: os.chown(f"{at}/private", STRANGER, STRANGER),
    "rename": lambda at: os.rename(f"{at}/public", f"{at}/renamed"),
    "rename over": lambda at: os.rename(f"{at}/private", f"{at}/public"),
    "unlink": lambda at: os.unlink(f"{at}/public"),
    "create": lambda at: put(f"{at}/made", OWNER, 0o644),
    "link": lambda at: os.link(f"{at}/public", f"{at}/made"),
    "mkdir": lambda at: put(f"{at}/made", OWNER, stat.S_IFDIR | 0o755),
    "symlink": lambda at: os.symlink("public", f"{at}/made"),
    "write": lambda at: write(f"{at}/public", b"CONTENT", flags=0),
    "append": lambda at: write(f"{at}/public", b"more of it, after all"),
    "truncate": lambda at: os.truncate(f"{at}/public", 3),
    "chmod a directory": lambda at: os.chmod(f"{at}/directory", 0o700),
    "move a directory": lambda at: os.rename(f"{at}/directory", f"{at}/../closed/directory"),
    "remove a directory": lambda at: shutil.rmtree(f"{at}/directory"),
    "chmod the one above": lambda at: os.chmod(at, 0o700),
}


@pytest.mark.parametrize("what", BEHIND)
def test_a_change_on_the_real_tree_is_seen_soon(
    what: str, options: str, scene: str, mount: MakeMount, user: MakeUser
) -> None:
    """As by a mount that was made afterwards, and so remembers nothing."""
    put(os.path.join(scene, "open/directory"), OWNER, stat.S_IFDIR | 0o755)
    put(os.path.join(scene, "open/directory/file"), OWNER, 0o644)
    put(os.path.join(scene, "open/mine"), STRANGER, 0o600)
    m = mount("-o", options)
    stranger = user(STRANGER)
    before = stranger.do(look, m.path)
    BEHIND[what](os.path.join(scene, "open"))
    told()
    after = stranger.do(look, m.path) if what != "chmod the one above" else stranger.error(names, m.at("open"))
    fresh = mount("-o", options)
    again = stranger.do(look, fresh.path) if what != "chmod the one above" else stranger.error(names, fresh.at("open"))
    assert after == again
    assert after != before


def test_where_changes_are_not_told_they_are_seen_within_a_second(
    tree: str, base: str, mount: MakeMount, user: MakeUser
) -> None:
    lower = put(os.path.join(base, "lower"), 0, stat.S_IFDIR | 0o755)
    os.mkdir(os.path.join(lower, "open"))
    put(os.path.join(lower, "open/public"), OWNER, 0o644)
    with attached("tmpfs", tree, "-t", "tmpfs"):
        for name in ("upper", "work", "merged"):
            os.mkdir(os.path.join(tree, name))
        merged = os.path.join(tree, "merged")
        with attached(
            "overlay", merged, "-t", "overlay", "-o", f"lowerdir={lower},upperdir={tree}/upper,workdir={tree}/work"
        ):
            m = mount("-o", f"{CLOAKED},default_permissions,views={STRANGER}:{STRANGER}", source=merged)
            try:
                assert "changes behind the mount are not reported" in m.log
                stranger = user(STRANGER)
                stranger.do(os.stat, m.at("open/public"))
                os.chmod(os.path.join(merged, "open/public"), 0o600)
                put(os.path.join(merged, "open/made"), OWNER, 0o644)
                let_expire(1.1)
                assert stranger.error(os.stat, m.at("open/public")) == errno.ENOENT
                assert stranger.do(read, m.at("open/made")) == b"content"
            finally:
                unmount(m.path)


def test_where_changes_above_are_not_told_they_are_seen_within_a_second(
    tree: str, mount: MakeMount, user: MakeUser
) -> None:
    with attached("ramfs", tree, "-t", "ramfs"):
        above = put(os.path.join(tree, "above"), OWNER, stat.S_IFDIR | 0o755)
        inner = put(os.path.join(above, "inner"), OWNER, stat.S_IFDIR | 0o755)
        with attached("tmpfs", inner, "-t", "tmpfs"):
            put(os.path.join(inner, "public"), OWNER, 0o644)
            m = mount("-o", CLOAKED)
            try:
                stranger = user(STRANGER)
                stranger.do(os.chdir, m.at("above/inner"))  # which needs no name of what is above
                assert stranger.do(read, "public") == b"content"
                os.chmod(above, 0o700)
                let_expire(1.1)
                for call in (os.stat, read):
                    assert stranger.error(call, "public") in (errno.ENOENT, errno.ESTALE)
            finally:
                stranger.close()
                unmount(m.path)


def test_a_removed_file_is_not_opened_by_its_cached_name(tree: str, mount: MakeMount, user: MakeUser) -> None:
    """The kernel has its name for up to a second. What is written to a removed file is lost."""
    with attached("ramfs", tree, "-t", "ramfs"):
        os.chmod(tree, 0o777)
        for name in ("file", "open"):
            put(os.path.join(tree, name), OWNER, 0o666)
        m = mount("-o", CLOAKED)
        stranger = user(STRANGER)
        try:
            fds = [stranger.do(os.open, m.at("open"), os.O_RDONLY)]
            stranger.do(os.stat, m.at("file"))
            for name in ("file", "open"):
                os.unlink(m.real(name))
            fds.append(stranger.do(os.open, m.at("file"), os.O_WRONLY | os.O_CREAT, 0o666))
            stranger.do(os.write, fds[1], b"new")
            assert Path(m.real("file")).read_bytes() == b"new"
            fds.append(stranger.do(os.open, f"/proc/self/fd/{fds[0]}", os.O_RDONLY))  # which a process has open
            assert stranger.do(os.read, fds[2], 10) == b"content"
        finally:
            stranger.close()
            unmount(m.path)


def test_lost_events_make_everything_forgotten(scene: str, mount: MakeMount, user: MakeUser) -> None:
    most = int(Path("/proc/sys/fs/fanotify/max_queued_events").read_text())
    m = mount("-o", CLOAKED)
    stranger = user(STRANGER)
    for _ in range(3):
        stranger.do(os.stat, m.at("open/public"))
    os.kill(m.pid, signal.SIGSTOP)
    try:
        for number in range(most + 10):  # different ones, or they become one event
            os.mknod(os.path.join(scene, f"closed/{number}"))
        os.chmod(os.path.join(scene, "open/public"), 0o600)
    finally:
        os.kill(m.pid, signal.SIGCONT)
    wait_until(lambda: stranger.error(os.stat, m.at("open/public")) == errno.ENOENT)


@pytest.mark.parametrize("above", ["", "open/"])
def test_a_reload_makes_absent_names_forgotten(
    above: str, scene: str, mount: MakeMount, user: MakeUser, tmp_path: Path
) -> None:
    """Also those at the top of a view, and what is made under such a name afterwards is seen at once."""
    put(os.path.join(scene, above, "hidden"), OWNER, 0o600)
    entry = f"{scene} *(rw,no_root_squash,views={STRANGER}:{STRANGER},cloak_list=uid %s 3000 3999)\n"
    config = tmp_path / "a.exports"
    config.write_text(entry % "+077")
    m = mount("--exports", str(config), "-o", "default_permissions")
    stranger = user(STRANGER)
    for _ in range(3):
        assert stranger.error(os.stat, m.at(f"{above}hidden")) == errno.ENOENT
        assert stranger.error(os.stat, m.at(f"{above}new")) == errno.ENOENT
    config.write_text(entry % "-000")  # nothing is hidden
    os.kill(m.pid, signal.SIGHUP)
    wait_until(lambda: "reloaded" in m.log)
    told()
    assert stranger.do(os.stat, m.at(f"{above}hidden")).st_size == 7
    put(os.path.join(scene, above, "new"), OWNER, 0o644)
    told()
    assert stranger.do(os.stat, m.at(f"{above}new")).st_size == 7


def test_a_reload_makes_everything_forgotten(
    scene: str, base: str, mount: MakeMount, user: MakeUser, tmp_path: Path
) -> None:
    entry = f"{scene} *(rw,no_root_squash,cloak_list=uid %s 3000 3999)\n"
    config = tmp_path / "a.exports"
    config.write_text(entry % "+077")
    m = mount("--exports", str(config))
    stranger = user(STRANGER)
    for _ in range(3):
        assert stranger.do(os.stat, m.at("open/public")).st_size == 7
    config.write_text(entry % "+000")  # owners only
    os.kill(m.pid, signal.SIGHUP)
    wait_until(lambda: "reloaded" in m.log)
    told()
    assert stranger.error(os.stat, m.at("open/public")) == errno.ENOENT
    assert stranger.error(os.stat, m.at("open")) == errno.ENOENT


@pytest.mark.parametrize("top", [True, False])
@pytest.mark.parametrize("views", [f"{STRANGER}:{STRANGER}", f"{OTHER}:{OTHER} {STRANGER}:{STRANGER}"])
def test_a_hidden_directory_that_is_shown_from_now_on_is_there(
    views: str, top: bool, scene: str, mount: MakeMount, user: MakeUser
) -> None:
    """The kernel tells of a change of a directory without its name, which has been remembered as absent."""
    hidden = os.path.join(scene, "secret" if top else "open/secret")
    os.mkdir(hidden, 0o700)
    os.chown(hidden, OWNER, OWNER)
    m = mount("-o", f"{CLOAKED},default_permissions,views={views}", source=scene)
    stranger = user(STRANGER)
    shown = os.path.join(m.path, *([f"@{STRANGER}"] if " " in views else []), os.path.relpath(hidden, scene))
    assert stranger.error(os.stat, shown) == errno.ENOENT
    os.chown(hidden, STRANGER, STRANGER)
    told()
    assert stranger.error(os.stat, shown) == 0


def overwrite(path: str) -> None:
    write(path, b"other", flags=0)


def overwrite_later(path: str) -> None:
    """The bits come when the file is open already."""
    fd = os.open(path, os.O_WRONLY)
    os.chmod(path, 0o4755)
    os.write(fd, b"other")
    os.close(fd)


def empty(path: str) -> None:
    os.close(os.open(path, os.O_WRONLY | os.O_TRUNC))


def shorten(path: str) -> None:
    os.truncate(path, 1)


SQUASHED = "range_map=uid 0 2999 map 0 uid 3000 3001 squash 3001 uid 3002 4294967294 map 3002"
"""A set-id bit of a file of 3001 is not shown, so the kernel does not have it dropped."""


@pytest.mark.parametrize("options", ["", f",{SQUASHED}"])
@pytest.mark.parametrize("change", [overwrite, overwrite_later, empty, shorten])
def test_who_sees_a_file_because_of_its_set_id_bit(
    change: Callable[[str], None], options: str, scene: str, mount: MakeMount, user: MakeUser
) -> None:
    """The real tree drops the bit with the content, and no report of what the daemon itself does is read."""
    put(os.path.join(scene, "programs"), 0, stat.S_IFDIR | 0o755)
    put(os.path.join(scene, "programs/program"), OWNER, 0o4755)
    m = mount("-o", f"rw,no_root_squash,cloak_list=uid +400 3000 3999{options}")
    owner, other = user(OWNER), user(OTHER)
    told()
    for _ in range(3):
        assert other.do(os.stat, m.at("programs/program")).st_size == len(b"content")
    owner.do(change, m.at("programs/program"))
    assert not os.stat(m.real("programs/program")).st_mode & stat.S_ISUID
    assert other.error(os.stat, m.at("programs/program")) == errno.ENOENT


def set_behind(m: Mount, changer: User) -> None:
    changer.do(os.chmod, m.real("programs/program"), 0o4755)


def set_unreported(m: Mount, changer: User) -> None:
    """The queue of what is reported has no room for it."""
    most = int(Path("/proc/sys/fs/fanotify/max_queued_events").read_text())
    os.kill(m.pid, signal.SIGSTOP)
    try:
        for number in range(most + 1):
            os.close(os.open(m.real(f"open/{number}"), os.O_CREAT))
        changer.do(os.chmod, m.real("programs/program"), 0o4755)
    finally:
        os.kill(m.pid, signal.SIGCONT)


def set_by_another_path(m: Mount, changer: User) -> None:
    changer.do(os.chmod, m.at("again/program"), 0o4755)


_held: list[int] = []


def hold_for_writing(path: str) -> None:
    _held.append(os.open(path, os.O_WRONLY))


def write_held() -> None:
    os.write(_held[0], b"other")


@pytest.mark.parametrize("options", ["", f",{SQUASHED}"])
@pytest.mark.parametrize("set_bit", [set_behind, set_unreported, set_by_another_path])
def test_a_set_id_bit_that_comes_while_the_file_is_open_for_writing(
    set_bit: Callable[[Mount, User], None], options: str, scene: str, mount: MakeMount, user: MakeUser
) -> None:
    for name in ("programs", "again"):
        put(os.path.join(scene, name), 0, stat.S_IFDIR | 0o755)
    put(os.path.join(scene, "programs/program"), OWNER, 0o755)
    with attached(os.path.join(scene, "programs"), os.path.join(scene, "again"), "--bind"):
        m = mount("-o", f"rw,no_root_squash,cloak_list=uid +400 3000 3999{options}")
        other, changer = user(OTHER), user(OWNER)
        path = m.at("programs/program")
        with User(OWNER) as owner:
            owner.do(hold_for_writing, path)
            assert other.error(os.stat, path) == errno.ENOENT
            set_bit(m, changer)
            wait_until(lambda: not other.error(os.stat, path))
            told()
            for _ in range(3):
                assert other.do(os.stat, path).st_size == len(b"content")
            owner.do(write_held)
            assert not os.stat(m.real("programs/program")).st_mode & stat.S_ISUID
            assert other.error(os.stat, path) == errno.ENOENT


def test_a_file_that_turns_up_where_one_is_to_be_made(scene: str, base: str, mount: MakeMount, user: MakeUser) -> None:
    """When the kernel finds no such name, others put the file there. It is emptied, and loses its set-id bits."""
    for name in ("programs", "again"):
        put(os.path.join(scene, name), 0, stat.S_IFDIR | 0o777)
    program = put(os.path.join(base, "program"), OWNER, 0o4755)
    flag = Path(base, "flag")
    with attached(os.path.join(scene, "programs"), os.path.join(scene, "again"), "--bind"):
        with daemons_with(partial(alterations.make_late, str(flag))):
            m = mount("-o", "rw,no_root_squash,cloak_list=uid +400 3000 3999")
        owner, other = user(OWNER), user(OTHER)
        told()
        flag.touch()
        owner.start(write, m.at("programs/program"), b"other")
        try:
            wait_until(lambda: not flag.exists())
            os.rename(program, m.real("programs/program"))
            told()
            for _ in range(3):
                assert other.do(os.stat, m.at("again/program")).st_size == len(b"content")
        finally:
            flag.touch()
        assert owner.finish_within(60)
        assert not os.stat(m.real("programs/program")).st_mode & stat.S_ISUID
        assert other.error(os.stat, m.at("again/program")) == errno.ENOENT


@pytest.mark.parametrize("change", [["chmod", "0744"], ["setfacl", "-m", f"u:{OTHER}:---"]])
def test_who_may_not_search_any_more_when_a_slow_disk_has_answered(
    change: list[str], scene: str, base: str, mount: MakeMount, user: MakeUser
) -> None:
    """What a request found out of its directory when it came in does not hold after it has waited."""
    for name in ("file", "late"):
        put(os.path.join(scene, "open", name), OWNER, 0o644)
    flag = os.path.join(base, "flag")
    with daemons_with(partial(alterations.find_slowly, b"late", flag)):
        m = mount("-o", CLOAKED)
    other = user(OTHER)
    told()
    for name in ("file", "absent", "file"):
        other.error(os.stat, m.at("open", name))
    other.start(os.stat, m.at("open/late"))
    wait_until(lambda: os.path.exists(flag + ".asked"))
    subprocess.run([*change, m.real("open")], check=True)
    Path(flag).touch()
    with pytest.raises(PermissionError):
        other.answer_within(60)
