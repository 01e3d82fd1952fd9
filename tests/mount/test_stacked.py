"""cloakfs over cloakfs: nobody loses a file, and nobody gets past the lower mount (see test_stacked_views.py)."""

import contextlib
import errno
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cloakfs.stacking.upper import UPPER
from cloakfs.state.runtime import mounted as all_told
from tests.agents import User, names, read, write
from tests.waiting import wait_until

from .conftest import Mount, is_mounted, mounted, run, told
from .fuseconnections import nobody_waits_for_ever

OPEN = "rw,no_root_squash"
SECONDS = 60.0
"""So long nothing may take; each of it takes milliseconds."""

PLUG_IN = """
class P:
    def visible(self, caller, attrs):
        return True
"""


@pytest.fixture(autouse=True)
def _released(base: str) -> Iterator[None]:
    with nobody_waits_for_ever(base, 200.0):
        yield


def work(top: str) -> None:
    """What one user does among files that are nobody else's business."""
    me = os.getuid()
    os.umask(0o077)
    own, file, moved = f"{top}/{me}", f"{top}/{me}/file", f"{top}/{me}/moved"
    os.mkdir(own)
    write(file, b"mine")
    assert read(file) == b"mine"
    os.rename(file, moved)
    os.chmod(moved, 0o640)
    assert os.stat(moved).st_mode & 0o7777 == 0o640
    assert os.stat(moved).st_uid == me
    assert names(own) == ["moved"]
    os.link(moved, file)
    os.unlink(moved)
    assert names(own) == ["file"]
    assert read(file) == b"mine"


MAPPED = "range_map=uid 0 map 0 uid 2000 2999 map 20000 gid 0 map 0 gid 2000 2999 map 20000"


@pytest.mark.parametrize(
    ("below", "above"),
    [
        (OPEN, OPEN),
        (OPEN, "rw"),
        (OPEN, f"{OPEN},cloak_list=uid +000 2000 2999"),
        (f"{OPEN},{MAPPED}", OPEN),
        (f"{OPEN},cloak_list=uid +000 2000 2999", OPEN),
        ("rw,cloak_list=uid +000 0 -1", "rw"),
        ("rw,default_permissions,cloak_list=uid +000 0 -1", "rw,default_permissions"),
        (f"rw,{MAPPED},cloak_list=uid +000 20000 20999", "rw,cloak_list=uid +000 2000 2999"),
        ("rw,policy={base}/plug.py:P", "rw,policy={base}/plug.py:P"),
    ],
)
def test_nobody_loses_a_file(
    base: str, mount: Callable[..., Mount], user: Callable[..., User], below: str, above: str
) -> None:
    Path(base, "plug.py").write_text(PLUG_IN)
    lower = mount("-o", below.format(base=base))
    upper = mount("-o", above.format(base=base), source=lower.path)
    for uid in (2001, 2002):
        user(uid).do_within(SECONDS, work, upper.path)
        assert user(uid).do(names, f"{upper.path}/{uid}") == ["file"]
    for uid in (2001, 2002):
        assert os.stat(f"{lower.source}/{uid}/file").st_uid in (uid, uid + 18000)


def test_in_a_fixed_view_is_who_may_enter(mount: Callable[..., Mount], user: Callable[..., User]) -> None:
    lower = mount("-o", f"{OPEN},views=2001:2001 2002:2002")
    upper = mount("-o", OPEN, source=lower.at("@2001"))
    user(2001).do_within(SECONDS, work, upper.path)
    for uid in (2002, 3000):
        someone = user(uid)
        assert someone.error(os.stat, upper.path) == errno.EACCES
        assert someone.error(os.stat, upper.at("2001")) == errno.EACCES
        assert someone.error(os.mkdir, upper.at("mine")) == errno.EACCES


def test_over_one_over_another(mount: Callable[..., Mount], user: Callable[..., User]) -> None:
    ground = mount("-o", "rw,cloak_list=uid +000 2000 2001")
    middle = mount("-o", "rw,cloak_list=uid +000 2002 2003", source=ground.path)
    top = mount("-o", "rw,cloak_list=uid +000 2004 2005", source=middle.path)
    users = [user(uid) for uid in (2000, 2002, 2004, 2006)]
    for someone in users:
        someone.do_within(SECONDS, work, top.path)
    seen = [someone.do(names, top.path) for someone in users]
    assert seen == [["2000", "2006"], ["2002", "2006"], ["2004", "2006"], ["2006"]]
    assert os.listdir(top.path) == ["2006"]  # root is squashed in all of them
    assert users[1].error(os.rename, top.at("2002"), top.at("2000")) == errno.EACCES
    assert users[1].error(os.mkdir, top.at("2004")) == errno.EEXIST


def test_what_the_one_below_squashes_is_hidden_from_its_maker_by_the_one_above(
    mount: Callable[..., Mount], user: Callable[..., User]
) -> None:
    lower = mount("-o", "rw,all_squash")
    upper = mount("-o", f"{OPEN},cloak_list=uid +000 0 -1", source=lower.path)
    someone = user(2001)
    assert someone.error(os.mkdir, upper.at("mine")) == errno.EACCES  # so it is not made
    assert os.listdir(lower.source) == []
    user(65534).do_within(SECONDS, work, upper.path)


def test_a_directory_of_one_below(base: str, mount: Callable[..., Mount], user: Callable[..., User]) -> None:
    lower = mount("-o", "rw,cloak_list=uid +007 2000 2999")
    os.mkdir(lower.real("inside"), 0o755)
    os.mkdir(lower.real("inside/there"))
    os.chmod(lower.real("inside/there"), 0o777)
    os.chown(lower.real("inside"), 2001, 2001)
    bound = os.path.join(base, "bound")
    os.mkdir(bound)
    subprocess.run(["mount", "--bind", lower.path, bound], check=True, timeout=SECONDS)
    with contextlib.ExitStack() as stack:
        stack.callback(subprocess.run, ["umount", "--lazy", bound], check=True, timeout=SECONDS)
        upper = mount("-o", OPEN, source=f"{bound}/inside")
        someone, owner = user(2002), user(2001)
        someone.do_within(SECONDS, work, upper.at("there"))
        owner.do(os.chmod, lower.at("inside"), 0o700)
        assert owner.do(names, upper.path) == ["there"]
        # It is the lower one that hides it, and all that is below.
        assert someone.error(os.stat, upper.path) == errno.EACCES
        assert someone.error(os.stat, upper.at("there")) != 0
        assert someone.error(os.listdir, upper.at("there/2002")) != 0
    run("umount", upper.path)


def test_over_itself(base: str, tree: str, user: Callable[..., User]) -> None:
    """Both lie where the tree is."""
    with mounted(tree, tree, "-o", "rw,cloak_list=uid +000 2000 2999"), contextlib.ExitStack() as stack:
        view = os.path.join(base, "view")
        os.mkdir(view)
        stack.enter_context(mounted(tree, view, "-o", OPEN))
        for uid in (2001, 2002):
            user(uid).do_within(SECONDS, work, view)
            assert user(uid).do(names, view) == [str(uid)]


def test_what_lies_on_top_of_the_one_below_is_hidden_with_what_is_above_it(
    base: str, mount: Callable[..., Mount], user: Callable[..., User]
) -> None:
    lower = mount("-o", "rw,cloak_list=uid +007 2000 2999")
    os.makedirs(lower.real("a/b"))
    told()  # what is mounted on a name is detached when the name is forgotten (docs/limits.md)
    place = lower.at("a/b")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=777", "none", place], check=True, timeout=SECONDS)
    with contextlib.ExitStack() as stack:
        stack.callback(subprocess.run, ["umount", "--lazy", place], check=False, timeout=SECONDS)
        view = os.path.join(base, "view")
        os.mkdir(view)
        upper = stack.enter_context(mounted(lower.path, view, "-o", OPEN))
        someone = user(2002)
        someone.do_within(SECONDS, work, upper.at("a/b"))
        kept = someone.do(os.open, upper.at("a/b/2002"), os.O_RDONLY)
        assert someone.do(names, kept) == ["file"]
        os.chown(lower.real("a"), 2001, 2001)
        os.chmod(lower.real("a"), 0o700)
        told()
        assert someone.error(os.listdir, kept) == errno.ESTALE
        someone.close()


def test_a_reload_of_the_one_below_is_in_force_at_once(
    base: str, tree: str, mount: Callable[..., Mount], user: Callable[..., User]
) -> None:
    exports = Path(base, "it.exports")
    exports.write_text(f"{tree} *({OPEN})")
    lower = mount("--exports", str(exports))
    callers = mount("-o", OPEN, source=lower.path)
    fixed = mount("-o", f"{OPEN},views=2002:2002", source=lower.path)
    owner, someone = user(2001), user(2002)
    owner.do(os.mkdir, callers.at("open"), 0o755)
    owner.do(write, callers.at("open/file"), b"content")
    kept = [(upper, someone.do(os.open, upper.at("open"), os.O_RDONLY)) for upper in (callers, fixed)]
    for upper, _ in kept:
        assert someone.do(read, upper.at("open/file")) == b"content"
    exports.write_text(f"{tree} *({OPEN},cloak_list=uid +000 2000 2999)")
    os.kill(lower.pid, signal.SIGHUP)
    wait_until(lambda: all_told()[lower.path].reloads == 1)
    for upper, directory in kept:
        assert someone.error(os.stat, upper.at("open")) == errno.ENOENT
        assert someone.error(os.stat, upper.at("open/file")) == errno.ENOENT
        assert someone.error(os.listdir, directory) == errno.ESTALE
        assert someone.do(names, upper.path) == []
    assert owner.do(read, callers.at("open/file")) == b"content"


def test_when_the_one_below_ends_nothing_is_shown(mount: Callable[..., Mount], user: Callable[..., User]) -> None:
    lower = mount("-o", "rw,cloak_list=uid +007 2000 2999")
    upper = mount("-o", OPEN, source=lower.path)
    upper.expect_errors = True
    someone = user(2001)
    someone.do_within(SECONDS, work, upper.path)
    os.kill(lower.pid, signal.SIGKILL)
    wait_until(lambda: not is_mounted(lower.path))
    assert someone.error(os.stat, upper.at("2001")) in (errno.ENOTCONN, errno.ECONNABORTED)
    assert someone.error(os.listdir, upper.path) in (errno.ENOTCONN, errno.ECONNABORTED)
    run("umount", upper.path)


def test_only_a_daemon_that_lies_over_it_is_let_in(mount: Callable[..., Mount], user: Callable[..., User]) -> None:
    lower = mount("-o", f"{OPEN},cloak_list=uid +000 2000 2999")
    user(2001).do(os.mkdir, lower.at("hidden"))
    forger = user(*UPPER[:2])
    assert forger.error(os.stat, lower.at("hidden")) == errno.ENOENT
    upper = mount("-o", OPEN, source=lower.path)
    assert forger.error(os.stat, lower.at("hidden")) == errno.ENOENT
    assert forger.do(names, lower.path) == []
    # Nor does it do anything for a caller with these ids.
    assert forger.error(os.stat, upper.path) == errno.EACCES
    assert forger.error(os.stat, upper.at("hidden")) == errno.EACCES
    assert forger.error(os.mkdir, upper.at("new")) == errno.EACCES
    assert user(0).error(os.stat, upper.at("hidden")) == errno.ENOENT
    with pytest.raises(FileNotFoundError):
        os.stat(lower.at("hidden"))


def test_over_one_without_extended_attributes_is_refused(base: str, mount: Callable[..., Mount]) -> None:
    lower = mount("-o", f"{OPEN},noxattr")
    view = os.path.join(base, "view")
    os.mkdir(view)
    done = run("mount", lower.path, view, "-o", OPEN, check=False)
    assert done.returncode == 1
    assert done.stderr == (
        f"cloakfs: {lower.path} has noxattr, but cloakfs asks a lower mount through extended attributes; "
        f"mount {lower.source} instead\n"
    )
    assert not is_mounted(view)


def test_explain_says_which_of_them_hides(mount: Callable[..., Mount], user: Callable[..., User]) -> None:
    lower = mount("-o", "rw,cloak_list=uid +000 2000 2001")
    upper = mount("-o", "rw,cloak_list=uid +000 2002 2003", source=lower.path)
    for uid in (2000, 2002):
        user(uid).do(os.mkdir, upper.at(str(uid)))
    for who, path, status, reason in (
        (2000, "2000", 0, "nothing"),
        (2002, "2000", 3, f"hidden by the lower mount, {lower.path}"),
        (2000, "2002", 3, "uid +000 2002 2003 hides it"),
    ):
        done = run("explain", upper.at(path), "--as", f"{who}:{who}", "--json", check=False)
        assert done.returncode == status, done.stderr
        assert status == 0 or reason in done.stdout


@pytest.mark.parametrize("how", ["cloak_list=uid +077 0 9999", "knfsd,no_root_squash"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_one_inside_of_the_tree_leads_nowhere(
    base: str, tree: str, mount: Callable[..., Mount], user: Callable[..., User], how: str, when: str
) -> None:
    """It would hide from root what callers make; and what is exported would be open to every local user."""
    other = os.path.join(base, "other")
    os.mkdir(other, 0o777)
    os.chmod(other, 0o777)
    Path(other, "secret").touch()
    inside, view = os.path.join(tree, "inside"), os.path.join(base, "view")
    os.mkdir(inside)
    os.mkdir(view)
    with contextlib.ExitStack() as stack:
        if when == "before":
            stack.enter_context(mounted(other, inside, "-o", f"rw,{how}"))
        stack.enter_context(mounted(tree, view, "-o", OPEN))
        if when == "after":
            stack.enter_context(mounted(other, inside, "-o", f"rw,{how}"))
        someone = user(2001)
        for path in ("inside", "inside/secret", "inside/new"):
            assert someone.error(os.stat, f"{view}/{path}") in (errno.EACCES, errno.ENOENT)
        assert someone.error(write, f"{view}/inside/new", b"lost") in (errno.EACCES, errno.ENOENT)
        assert someone.do(names, view) == []
        someone.do_within(SECONDS, work, view)
    assert os.listdir(other) == ["secret"]
