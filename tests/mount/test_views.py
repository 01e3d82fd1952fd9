"""Fixed views: one identity for all requests, and only for callers that may enter."""

import errno
import grp
import os
import pwd
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from cloakfs import linux
from cloakfs.config.options import Options
from cloakfs.config.viewitems import Ids
from cloakfs.config.viewitems import User as UserItem
from cloakfs.identity import Caller, ServerId
from cloakfs.linux import userdatabase
from cloakfs.linux.libc import libc
from cloakfs.policy import Policy
from cloakfs.tree import views as views_module
from cloakfs.tree.index import Index
from cloakfs.tree.views import DatabaseError, ViewIdentity, Views, user_identity
from cloakfs.tuning import STANDARD, Tuning
from tests.agents import User, names, read, write
from tests.mount import alterations
from tests.mount.conftest import Mount, daemons_with, run, told
from tests.mount.test_trees import by_handle, handle_of
from tests.waiting import wait_in_loop, wait_until

ALICE, BOB, CAROL = 4001, 4002, 4003
CLOAK = "cloak_list=uid +000 4001 4003"


@pytest.fixture
def homes(tree: str) -> str:
    """One private file of each, and one for everybody."""
    for uid in (ALICE, BOB):
        path = os.path.join(tree, str(uid))
        Path(path).write_text(f"of {uid}")
        os.chown(path, uid, uid)
        os.chmod(path, 0o600)
    os.mkdir(os.path.join(tree, "shared"), 0o777)
    os.chmod(os.path.join(tree, "shared"), 0o777)
    return tree


@pytest.fixture
def account() -> Iterator[Callable[..., str]]:
    """Makes accounts in the user database of this machine, and removes them."""
    made = []

    def make(name: str, uid: int, *groups: str) -> str:
        subprocess.run(["useradd", "--no-create-home", "--uid", str(uid), name], check=True)
        made.append(("userdel", name))
        for group in groups:
            subprocess.run(["groupadd", group], check=True)
            made.insert(0, ("groupdel", group))
            subprocess.run(["usermod", "--append", "--groups", group, name], check=True)
        return name

    yield make
    # Asked for before `user` by the tests: userdel refuses while a process of that user runs.
    for command in reversed(made):
        subprocess.run(command, check=True, capture_output=True)


def test_one_view_is_the_mount_itself(homes: str, mount: Callable[..., Mount], user: Callable[..., User]) -> None:
    m = mount("--view", f"{ALICE}:{ALICE}", "-o", CLOAK)
    alice, bob, root = user(ALICE), user(BOB), user(0)
    for permitted in (alice, root):
        assert permitted.do(names, m.path) == [str(ALICE), "shared"]
        assert permitted.do(read, m.at(str(ALICE))) == b"of 4001"
    for call in (os.stat, os.listdir, os.chdir):
        assert bob.error(call, m.path) == errno.EACCES
    assert bob.error(read, m.at(str(ALICE))) == errno.EACCES
    assert bob.error(os.mkdir, m.at("x")) == errno.EACCES


def test_new_files_belong_to_the_identity(homes: str, mount: Callable[..., Mount], user: Callable[..., User]) -> None:
    m = mount("--view", f"{ALICE}:7:8,9")
    user(0).do(write, m.at("shared", "made-by-root"), b"")
    info = os.stat(m.real("shared", "made-by-root"))
    assert (info.st_uid, info.st_gid) == (ALICE, 7)


def test_the_groups_of_the_identity_count(homes: str, mount: Callable[..., Mount], user: Callable[..., User]) -> None:
    write(os.path.join(homes, "for-group-9"), b"group")
    os.chown(os.path.join(homes, "for-group-9"), BOB, 9)
    os.chmod(os.path.join(homes, "for-group-9"), 0o640)
    m = mount("--view", f"{ALICE}:7:8,9")
    # The process itself is in no group.
    assert user(ALICE, 7).do(read, m.at("for-group-9")) == b"group"
    n = mount("--view", f"{ALICE}:7:8")
    assert user(ALICE, 7, [9]).error(read, n.at("for-group-9")) == errno.EACCES


def test_several_views_side_by_side(homes: str, mount: Callable[..., Mount], user: Callable[..., User]) -> None:
    m = mount("--view", f"{ALICE}:{ALICE}", "--view", f"{BOB}:{BOB}", "-o", CLOAK)
    alice, bob, carol, root = user(ALICE), user(BOB), user(CAROL), user(0)
    assert root.do(names, m.path) == [f"@{ALICE}", f"@{BOB}"]
    assert alice.do(names, m.path) == [f"@{ALICE}"]
    assert carol.do(names, m.path) == []
    assert alice.do(names, m.at(f"@{ALICE}")) == [str(ALICE), "shared"]
    assert root.do(names, m.at(f"@{BOB}")) == [str(BOB), "shared"]
    for stranger in (bob, carol):
        for path in (m.at(f"@{ALICE}"), m.at(f"@{ALICE}", str(ALICE)), m.at("@nobody-knows")):
            assert stranger.error(os.stat, path) == errno.EACCES
    assert root.error(os.stat, m.at("@nobody-knows")) == errno.ENOENT
    assert root.error(os.stat, m.at("plain")) == errno.ENOENT
    for call in (os.mkdir, os.rmdir, os.unlink, write):
        arguments = (b"",) if call is write else ()
        assert root.error(call, m.at("@new"), *arguments) in (errno.EROFS, errno.ENOENT, errno.EISDIR)


def test_views_have_nothing_in_common(homes: str, mount: Callable[..., Mount], user: Callable[..., User]) -> None:
    m = mount("--view", f"{ALICE}:{ALICE}", "--view", f"{BOB}:{BOB}")
    write(m.real("shared", "file"), b"x")
    os.chmod(m.real("shared", "file"), 0o666)
    root = user(0)
    a, b = m.at(f"@{ALICE}", "shared"), m.at(f"@{BOB}", "shared")
    assert root.do(os.stat, f"{a}/file").st_ino != root.do(os.stat, f"{b}/file").st_ino
    assert root.error(os.link, f"{a}/file", f"{b}/other") == errno.EXDEV
    assert root.error(os.rename, f"{a}/file", f"{b}/other") == errno.EXDEV
    assert root.do(read, f"{b}/file") == b"x"


def test_a_handle_does_not_cross_views(homes: str, mount: Callable[..., Mount], user: Callable[..., User]) -> None:
    m = mount("--view", f"{ALICE}:{ALICE}", "--view", f"{BOB}:{BOB}")
    root = user(0)
    of_alice = root.do(handle_of, m.at(f"@{ALICE}", str(ALICE)))
    of_bob = root.do(handle_of, m.at(f"@{BOB}", str(BOB)))
    assert root.do(by_handle, m.path, of_alice) == b"of 4001"
    # The same object's number under the other view's, with either generation (fuse: nodeid, then generation).
    crossed = of_alice[:4] + of_bob[4:8] + of_alice[8:]
    mixed = {crossed, of_alice[:-4] + of_bob[-4:]} - {of_alice, of_bob}
    assert mixed
    for forged in mixed:
        assert root.error(by_handle, m.path, forged) == errno.ESTALE


def test_listed_uids_may_enter(homes: str, mount: Callable[..., Mount], user: Callable[..., User]) -> None:
    m = mount("--view", f"{ALICE}:{ALICE}", "-o", f"{CLOAK},view_access={CAROL}")
    carol = user(CAROL)
    assert carol.do(read, m.at(str(ALICE))) == b"of 4001"
    carol.do(write, m.at("shared", "by-carol"), b"")
    assert os.stat(m.real("shared", "by-carol")).st_uid == ALICE
    assert user(BOB).error(os.listdir, m.path) == errno.EACCES


def test_the_client_side_identity_enters(homes: str, mount: Callable[..., Mount], user: Callable[..., User]) -> None:
    m = mount("--view", f"{ALICE}:{ALICE}", "-o", f"{CLOAK},range_map=uid 9001 9003 map {ALICE} gid 0 -1 map 0")
    assert user(9001).do(read, m.at(str(ALICE))) == b"of 4001"
    assert user(9001).do(os.stat, m.at(str(ALICE))).st_uid == 9001
    assert user(ALICE).error(os.listdir, m.path) == errno.EACCES


def test_views_named_by_user(
    homes: str, account: Callable[..., str], mount: Callable[..., Mount], user: Callable[..., User]
) -> None:
    name = account("cloakfs-t1", ALICE, "cloakfs-g1")
    gid = pwd.getpwnam(name).pw_gid
    m = mount("--view", name, "-o", CLOAK)
    root = user(0)
    root.do(write, m.at("shared", "new"), b"")
    assert os.stat(m.real("shared", "new")).st_gid == gid
    assert user(ALICE, gid).do(read, m.at(str(ALICE))) == b"of 4001"


@pytest.mark.timeout(120)
def test_a_view_named_by_user_follows_the_user_database(
    homes: str,
    account: Callable[..., str],
    mount: Callable[..., Mount],
    user: Callable[..., User],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is granted and what is taken away, with the next look at the database; nobody has to open anything again."""
    seconds = STANDARD.view_seconds / 10
    name = account("cloakfs-t1", ALICE, "cloakfs-g1", "cloakfs-g2")
    subprocess.run(["usermod", "--groups", "cloakfs-g1", name], check=True)
    for group in ("cloakfs-g1", "cloakfs-g2"):
        path = os.path.join(homes, "shared", group)
        write(path, b"x")
        os.chown(path, BOB, grp.getgrnam(group).gr_gid)
        os.chmod(path, 0o040)
    with daemons_with(tuning=Tuning(view_seconds=seconds)):
        m = mount("--view", name, "--view", f"{BOB}:{BOB}")
    alice = user(ALICE, pwd.getpwnam(name).pw_gid)
    alice.do(os.chdir, m.at(f"@{name}", "shared"))

    def readable() -> list[str]:
        return [group for group in ("cloakfs-g1", "cloakfs-g2") if alice.error(read, group) == 0]

    assert readable() == ["cloakfs-g1"]
    subprocess.run(["usermod", "--groups", "cloakfs-g2", name], check=True)
    wait_until(lambda: readable() == ["cloakfs-g2"])


def test_a_view_follows_the_ids_of_its_user(base: str, account: Callable[..., str]) -> None:
    name = account("cloakfs-t1", ALICE, "cloakfs-g1")
    own, group = pwd.getpwnam(name).pw_gid, grp.getgrnam("cloakfs-g1").gr_gid
    index = Index(os.path.join(base, "nodes.sqlite"))
    views = Views(Policy(Options()), (UserItem(name),), frozenset(), index)
    clock = MockClock()

    async def after_the_stated_time() -> tuple[int, int, frozenset[int]]:
        view = views.get(0)
        assert view is not None
        before = view.fixed
        await wait_all_tasks_blocked()
        clock.jump(STANDARD.view_seconds)
        end = time.monotonic() + 60
        while view.fixed is before:  # until the thread that asks the database has answered
            assert time.monotonic() < end, "nothing was refreshed"
            await trio.lowlevel.checkpoint()
        assert view.fixed is not None
        return view.fixed.uid, view.fixed.gid, view.fixed.groups

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            changes: list[None] = []
            nursery.start_soon(views.follow_user_database, partial(changes.append, None), STANDARD.view_seconds)
            subprocess.run(["usermod", "--uid", "4009", name], check=True)
            assert await after_the_stated_time() == (4009, own, frozenset({own, group}))
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(views_module, "user_identity", Mock(side_effect=DatabaseError("down")))
                assert await after_the_stated_time() == (4009, own, frozenset({own}))
            assert await after_the_stated_time() == (4009, own, frozenset({own, group}))
            assert len(changes) == 3  # what the kernel remembers of the view has to be forgotten
            nursery.cancel_scope.cancel()

    try:
        trio.run(main, clock=clock)
    finally:
        index.close()


def test_a_database_has_its_time_for_each_of_very_many_users(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Views keep their groups while it answers, however long it takes for all, and lose them if it stops answering."""
    hangs, over = threading.Event(), threading.Event()

    def user_identity(user: str) -> ViewIdentity:
        if hangs.is_set():
            over.wait(60)
        return ViewIdentity(
            user, Caller(ServerId(5), ServerId(6), frozenset(map(ServerId, (6, 7)))), by_user=True, user=user
        )

    monkeypatch.setattr(views_module, "user_identity", user_identity)
    monkeypatch.setattr(views_module, "_PATIENCE_SECONDS", 1.0)
    index = Index(os.path.join(base, "nodes.sqlite"))
    users = [f"u{number}" for number in range(200)]
    views = Views(Policy(Options()), tuple(map(UserItem, users)), frozenset(), index)
    fixed = [view for _, _, view in views.after(0)]
    assert len(fixed) == len(users)

    freshened = 0

    def slow(user: str) -> ViewIdentity:
        nonlocal freshened
        time.sleep(0.05)
        freshened += 1
        return user_identity(user)

    def with_groups() -> int:
        return sum(view.fixed is not None and 7 in view.fixed.groups for view in fixed)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(views.follow_user_database, lambda: None, 0.1)
            monkeypatch.setattr(views_module, "user_identity", slow)  # it takes 2.5 s for all of them
            await wait_in_loop(lambda: freshened >= len(users))
            assert with_groups() == len(users)
            hangs.set()
            await wait_in_loop(lambda: not with_groups(), 30, every=0.05)
            nursery.cancel_scope.cancel()

    try:
        trio.run(main)
    finally:
        over.set()
        index.close()


def test_another_policy_is_in_force_in_all_views_at_once(base: str) -> None:
    """Others are served while very many views are made, by the policy that was in force."""
    index = Index(os.path.join(base, "nodes.sqlite"))
    items = tuple(Ids(ServerId(number), ServerId(number), ()) for number in range(5000, 7000))
    views = Views(Policy(Options()), items, frozenset(), index)
    new = Policy(Options())
    in_force: list[set[int]] = []

    async def watch() -> None:
        while True:
            in_force.append({id(view.policy) for _, _, view in views.after(0)})
            await trio.lowlevel.checkpoint()

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            await views.use(new)
            assert {view.policy for _, _, view in views.after(0)} == {new}
            nursery.cancel_scope.cancel()

    try:
        old = id(views.policy)
        trio.run(main)
    finally:
        index.close()
    assert len(in_force) > 10
    assert in_force == [{old}] * len(in_force)


@pytest.mark.parametrize("which", ["single", "several", "range"])
@pytest.mark.timeout(120)
def test_a_view_is_withdrawn_with_its_account_and_comes_back_with_it(
    which: str,
    homes: str,
    account: Callable[..., str],
    mount: Callable[..., Mount],
    user: Callable[..., User],
) -> None:
    """Nobody gets in, by name or by what is open already, nor from what the kernel remembers."""
    name = account("cloakfs-t1", ALICE)
    words = {"single": [name], "several": [name, f"{BOB}:{BOB}"], "range": [f"{ALICE}-{ALICE}"]}[which]
    with daemons_with(tuning=Tuning(view_seconds=0.3)):
        m = mount(*(word for view in words for word in ("--view", view)))
    top = m.path if which == "single" else m.at(f"@{name}")
    root, alice = user(0), user(ALICE)
    alice.do(os.chdir, top)
    fd = alice.do(os.open, f"{top}/{ALICE}", os.O_RDONLY)
    assert root.do(read, f"{top}/{ALICE}") == b"of 4001"

    def is_withdrawn() -> bool:
        return all(caller.error(os.stat, path) for caller in (root, alice) for path in (top, f"{top}/{ALICE}"))

    try:
        subprocess.run(["userdel", "--force", name], check=True, capture_output=True)
        wait_until(is_withdrawn)
        assert alice.error(os.listdir, ".") == errno.ESTALE
        assert alice.error(os.stat, str(ALICE)) in (errno.ESTALE, errno.ENOENT)
        assert alice.error(read, str(ALICE)) in (errno.ESTALE, errno.ENOENT)
        assert root.error(write, f"{top}/new", b"") != 0
        assert alice.error(os.pread, fd, 100, 0) in (0, errno.ESTALE)
        assert alice.error(os.fstat, fd) == errno.ESTALE
        if which != "single":
            assert f"@{name}" not in root.do(names, m.path)
        if which == "several":
            assert user(BOB).do(os.stat, m.at(f"@{BOB}")).st_mode
    finally:
        subprocess.run(["useradd", "--no-create-home", "--uid", str(ALICE), name], check=True)
    wait_until(lambda: root.error(read, f"{top}/{ALICE}") == 0)
    assert "withdrawn" in m.log
    alice.do(os.close, fd)


def test_a_database_that_fails_is_not_one_that_does_not_know_a_user(monkeypatch: pytest.MonkeyPatch) -> None:
    assert userdatabase.is_account("root")
    assert userdatabase.is_account("0")
    assert not userdatabase.is_account("no-such-user-here")
    monkeypatch.setattr(libc, "getpwnam_r", lambda *args: errno.ECONNREFUSED)
    with pytest.raises(DatabaseError, match="Connection refused"):
        user_identity("no-such-user-here")
    assert user_identity("root").caller.uid == 0


def test_a_range_of_users_makes_views_on_first_access(
    homes: str, account: Callable[..., str], mount: Callable[..., Mount], user: Callable[..., User]
) -> None:
    account("cloakfs-t1", ALICE)
    account("cloakfs-t2", BOB)
    account("cloakfs-t9", 4999)
    m = mount("--view", "4001-4100", "-o", CLOAK)
    alice, bob, root = user(ALICE), user(BOB), user(0)
    assert root.do(names, m.path) == []
    assert bob.error(os.stat, m.at("@cloakfs-t1")) == errno.EACCES
    assert root.do(names, m.path) == []  # not even that made one
    assert alice.do(read, m.at("@cloakfs-t1", str(ALICE))) == b"of 4001"
    assert alice.do(names, m.path) == ["@cloakfs-t1"]
    assert root.do(names, m.at("@cloakfs-t2")) == [str(BOB), "shared"]
    assert root.do(names, m.path) == ["@cloakfs-t1", "@cloakfs-t2"]
    for outside in ("@cloakfs-t9", "@root", f"@{ALICE}"):
        assert root.error(os.stat, m.at(outside)) == errno.ENOENT


@pytest.mark.parametrize("view", ["no-such-user-here", "1:2:3:4", "9-3", "1:x", "-5", "1001:-1"])
def test_a_wrong_view_is_one_clear_line(view: str, tree: str, base: str) -> None:
    path = os.path.join(base, "mnt")
    os.mkdir(path)
    done = run("mount", tree, path, f"--view={view}", check=False)
    assert done.returncode in (1, 2)
    assert view in done.stderr
    assert done.stderr.count("\n") == 1


def test_the_same_view_twice(tree: str, base: str) -> None:
    path = os.path.join(base, "mnt")
    os.mkdir(path)
    done = run("mount", tree, path, "--view", "5:5", "--view", "5:6", check=False)
    assert (done.returncode, done.stderr) == (1, "cloakfs: two views are called @5\n")


def test_a_list_of_very_many_views_is_made_in_slices(
    tree: str, base: str, mount: Callable[..., Mount], user: Callable[..., User]
) -> None:
    """It is complete, and no turn of the session loop looks at more than a part of the views."""
    numbers = range(10_000, 15_000)
    exports = Path(base, "x.exports")
    exports.write_text(f"{tree} *(rw,views = {' '.join(f'{number}:{number}' for number in numbers)})\n")
    with daemons_with(partial(alterations.count_views_checked, f"{base}/longest")):
        m = mount("--exports", str(exports))
    assert user(14_999).do(os.listdir, m.path) == ["@14999"]
    assert user(9_999).do(os.listdir, m.path) == []
    assert sorted(user(0).do(os.listdir, m.path)) == [f"@{number}" for number in numbers]
    assert 0 < int(Path(base, "longest").read_text()) < len(numbers) / 2


@pytest.mark.parametrize("how", ["by another name", "by another view", "by handle", "made and changed by another name"])
@pytest.mark.parametrize("there", ["", "shared/"])
def test_a_hidden_file_that_becomes_visible_is_found_by_all_its_names(
    how: str, there: str, homes: str, mount: Callable[..., Mount], user: Callable[..., User]
) -> None:
    """Its absence is remembered, and what is reported of the change names one of them, or none."""
    m = mount("--view", f"{ALICE}:{ALICE}", "--view", f"{BOB}:{BOB}", "-o", f"cloak_list=uid +007 {ALICE} {BOB}")
    alice, bob = user(ALICE), user(BOB)
    file = f"{there}other"
    if not how.startswith("made"):
        os.link(f"{homes}/{BOB}", f"{homes}/{file}")
    told()
    for name in (str(BOB), file):
        assert not alice.do(os.path.lexists, m.at(f"@{ALICE}", name))
    if how.startswith("made"):
        os.link(f"{homes}/{BOB}", f"{homes}/shared/new")
        os.chmod(f"{homes}/shared/new", 0o644)
        file = str(BOB)
    elif how == "by another name":
        os.chmod(f"{homes}/{BOB}", 0o644)
    elif how == "by another view":
        bob.do(os.chmod, m.at(f"@{BOB}", str(BOB)), 0o644)
    else:
        top = os.open(homes, os.O_RDONLY)
        path = os.open(f"{homes}/{BOB}", os.O_PATH)
        fd = linux.open_by_handle(top, linux.name_to_handle(path)[0], os.O_RDONLY)
        os.fchmod(fd, 0o644)
        for one in (top, path, fd):
            os.close(one)
    told()
    assert alice.do(os.path.lexists, m.at(f"@{ALICE}", file))
    assert alice.do(os.path.lexists, m.at(f"@{ALICE}", str(BOB)))
