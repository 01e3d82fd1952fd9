"""Mounts on top of each other: of the same tree, of others, of something else, and of themselves."""

import contextlib
import errno
import os
import signal
import subprocess
from collections.abc import Callable, Iterator

import pytest

from cloakfs.linux import mountinfo, process
from tests.agents import User, names, read, write
from tests.waiting import wait_until

from .conftest import Mount, is_mounted, run, unmount
from .fuseconnections import nobody_waits_for_ever
from .usersmounts import as_users_mount

NULL = "rw,no_root_squash"
SECONDS = 60.0
"""So long nothing may take; each of it takes milliseconds."""


@pytest.fixture(autouse=True)
def _released(base: str) -> Iterator[None]:
    with nobody_waits_for_ever(base):
        yield


def kinds_at(path: str) -> list[str]:
    return [place.kind for place in mountinfo.by_id().values() if place.path == path]


def ended(pid: int) -> bool:
    """Wait for a daemon's end, and that of all its threads: until then, its session is open."""
    held = process.held(pid)
    if held is None:
        return True
    try:
        return process.ends(held, SECONDS)
    finally:
        os.close(held)


def stop(mount: Mount) -> None:
    """SIGTERM, and once that was heard, another one: what is still in use is cut off."""
    pid = mount.pid
    os.kill(pid, signal.SIGTERM)
    wait_until(lambda: "asked to stop" in mount.log)
    os.kill(pid, signal.SIGTERM)
    assert ended(pid)


@pytest.fixture
def two(base: str, tree: str) -> tuple[Mount, Mount]:
    """Two mounts at one place: the second, of another tree, on top of the first."""
    path = os.path.join(base, "view")
    other = os.path.join(base, "other")
    os.mkdir(path)
    os.mkdir(other)
    write(os.path.join(tree, "below"), b"")
    write(os.path.join(other, "above"), b"")
    run("mount", tree, path, "-o", NULL)
    run("mount", other, path, "-o", NULL)
    return Mount(tree, path), Mount(other, path)


# -- the end of a daemon touches nothing but its own mount -----------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_one_below_ends_and_the_one_above_stays(
    two: tuple[Mount, Mount], user: Callable[..., User], number: signal.Signals
) -> None:
    below, above = two
    if number == signal.SIGTERM:
        stop(below)
    else:
        pid, reaper = below.pid, below.reaper
        os.kill(pid, number)
        assert ended(pid)
        assert ended(reaper)
    assert kinds_at(above.path) == ["fuse.cloakfs", "fuse.cloakfs"]
    someone = user(2001)
    someone.do_within(SECONDS, names, above.path)
    assert someone.do(names, above.path) == ["above"]
    if number == signal.SIGTERM:
        assert "fuse.cloakfs is mounted on top and stays" in below.log
    run("umount", above.path)
    assert kinds_at(above.path) == ["fuse.cloakfs"]


def test_the_one_above_ends_and_the_one_below_is_seen(two: tuple[Mount, Mount], user: Callable[..., User]) -> None:
    below, above = two
    pid = above.pid
    os.kill(pid, signal.SIGTERM)
    assert ended(pid)
    assert kinds_at(below.path) == ["fuse.cloakfs"]
    someone = user(2001)
    someone.do_within(SECONDS, names, below.path)
    assert someone.do(names, below.path) == ["below"]


def test_umount_waits_for_the_daemon_of_the_one_on_top(two: tuple[Mount, Mount]) -> None:
    below, above = two
    pids = above.pid, below.pid
    for pid, left in zip(pids, (1, 0), strict=True):
        run("umount", below.path)
        assert not os.path.exists(f"/proc/{pid}") or ended(pid)
        assert len(kinds_at(below.path)) == left


def test_another_file_system_on_top_stays(base: str, mount: Callable[..., Mount]) -> None:
    m = mount("-o", NULL)
    subprocess.run(["mount", "-t", "tmpfs", "none", m.path], check=True)
    try:
        stop(m)
        assert kinds_at(m.path) == ["fuse.cloakfs", "tmpfs"]
        assert "tmpfs is mounted on top and stays" in m.log
    finally:
        unmount(m.path)
        # The reaper does this itself if it comes to it only now.
        wait_until(
            lambda: not subprocess.run(["umount", "-q", m.path], check=False).returncode or not is_mounted(m.path)
        )
        assert kinds_at(m.path) == []


def test_what_was_mounted_there_after_an_unmount_stays(base: str, tree: str, user: Callable[..., User]) -> None:
    """Somebody unmounts it lazily and mounts something else, while a file is still open: the daemon lives on."""
    path = os.path.join(base, "view")
    os.mkdir(path)
    run("mount", tree, path, "-o", NULL)
    m = Mount(tree, path)
    pid = m.pid
    someone = user(2001)
    someone.do(write, os.path.join(path, "file"), b"x")
    fd = someone.do(os.open, os.path.join(path, "file"), os.O_RDONLY)
    run("umount", "--lazy", path)
    subprocess.run(["mount", "-t", "tmpfs", "none", path], check=True)
    try:
        os.kill(pid, signal.SIGTERM)
        someone.do(os.close, fd)
        assert ended(pid)
        assert kinds_at(path) == ["tmpfs"]
    finally:
        unmount(path)


def test_a_mount_that_was_moved_is_found(base: str, tree: str) -> None:
    path, elsewhere = os.path.join(base, "view"), os.path.join(base, "elsewhere")
    os.mkdir(path)
    os.mkdir(elsewhere)
    run("mount", tree, path, "-o", NULL)
    pid = Mount(tree, path).pid
    # Below a shared mount, as systemd has them, the kernel moves nothing: in a namespace of its own, then.
    if subprocess.run(["mount", "--move", path, elsewhere], check=False, capture_output=True).returncode:
        pytest.skip("mounts are shared here: they cannot be moved")
    os.kill(pid, signal.SIGTERM)
    assert ended(pid)
    assert not is_mounted(elsewhere)


# -- what umount says ------------------------------------------------------------------------------


def test_umount_with_a_bind_mount_left_over_says_so_at_once(base: str, tree: str) -> None:
    path, bound = os.path.join(base, "view"), os.path.join(base, "bound")
    os.mkdir(path)
    os.mkdir(bound)
    run("mount", tree, path, "-o", NULL)
    pid = Mount(tree, path).pid
    subprocess.run(["mount", "--bind", path, bound], check=True)
    done = run("umount", path, check=False)
    assert done.returncode == 1
    why = f"its daemon (process {pid}) continues: the same view is also mounted at {bound}"
    assert done.stderr == f"cloakfs: {path}: unmounted, but {why}\n"
    assert not is_mounted(path)
    again = run("mount", tree, path, "-o", NULL, check=False)
    assert again.returncode == 1
    assert f"(process {pid}) still serves {bound}; unmount that first" in again.stderr
    assert run("umount", bound).stderr == ""
    assert ended(pid)


def test_umount_lazy_says_who_goes_on_and_mount_why_it_cannot(base: str, tree: str, user: Callable[..., User]) -> None:
    path = os.path.join(base, "view")
    os.mkdir(path)
    run("mount", tree, path, "-o", NULL)
    pid = Mount(tree, path).pid
    someone = user(2001)
    someone.do(os.chdir, path)
    said = run("umount", "--lazy", path).stderr
    assert f"detached; its daemon (process {pid}) serves processes that still use it" in said
    again = run("mount", tree, path, "-o", NULL, check=False)
    assert again.returncode == 1
    assert f"(process {pid}) still serves processes that have files open" in again.stderr
    someone.do(os.chdir, "/")
    assert ended(pid)
    assert run("umount", path, check=False).stderr == f"cloakfs: {path}: not a cloakfs mount\n"


# -- over itself -----------------------------------------------------------------------------------


def walk_about(top: str) -> None:
    """What made the daemon wait for itself: paths through "..", and several levels at once."""
    subprocess.run(["mkdir", "-p", f"{top}/a/b/c"], check=True, timeout=SECONDS)
    os.chdir(f"{top}/a/b/c")
    assert sorted(os.listdir("../../..")) == ["a", "file", "sub"]
    assert os.path.samefile("../../..", top)
    assert os.getcwd() == f"{top}/a/b/c"
    write("../../../a/new", b"x")
    os.rename("../../b", "../../../moved")
    os.chdir(top)
    assert read("a/new") == b"x"
    assert names("sub") == ["inside"]
    os.rmdir("moved/c")
    os.rmdir("moved")
    os.chdir("/")


def look_around(top: str) -> None:
    """By handle, after the kernel forgot the way: the daemon has to find it by ".."."""
    fd = os.open(f"{top}/a", os.O_RDONLY | os.O_DIRECTORY)
    os.fchdir(fd)
    os.close(fd)
    assert sorted(os.listdir("..")) == ["a", "file", "sub"]
    os.chdir("/")


CLOAKED = "rw,no_root_squash,cloak_list=uid +077 0 10000"


@pytest.mark.parametrize("options", [NULL, CLOAKED])
@pytest.mark.parametrize("below", ["", "x/y"])
def test_a_mount_over_its_own_source(base: str, tree: str, user: Callable[..., User], options: str, below: str) -> None:
    source = os.path.join(tree, below).rstrip("/")
    os.makedirs(source, exist_ok=True)
    os.chmod(source, 0o777)
    write(os.path.join(source, "file"), b"")
    sub = os.path.join(source, "sub")
    os.mkdir(sub)
    subprocess.run(["mount", "-t", "tmpfs", "none", sub], check=True)
    write(os.path.join(sub, "inside"), b"")
    run("mount", source, tree, "-o", options)
    try:
        someone = user(2001)
        someone.do_within(SECONDS, walk_about, tree)
        someone.do_within(SECONDS, look_around, tree)
        # What is mounted in the view is the view's, and not the tree's.
        someone.do_within(SECONDS, os.mkdir, f"{tree}/later")
        subprocess.run(["mount", "-t", "tmpfs", "none", f"{tree}/later"], check=True, timeout=SECONDS)
        someone.do_within(SECONDS, os.stat, f"{tree}/later")
        unmount(f"{tree}/later")
        someone.do_within(SECONDS, names, f"{tree}/later")
    finally:
        run("umount", tree)
    assert read(os.path.join(source, "a", "new")) == b"x"
    assert os.stat(os.path.join(source, "a", "new")).st_uid == 2001
    subprocess.run(["umount", sub], check=True)


# -- a view inside of its own source ---------------------------------------------------------------


def enter_and_stay(top: str) -> None:
    os.makedirs(f"{top}/loop/below/deep")
    os.chdir(f"{top}/loop/below/deep")


def loop_is_known(top: str) -> bool:
    """Before, anybody might know the directory: the kernel has to forget it first."""
    return "loop" in os.listdir(top) or os.path.exists(f"{top}/loop")


def look_where_it_leads_back(top: str) -> None:
    assert sorted(os.listdir(top)) == ["beside"]
    for name in ("loop", "loop/beside", "loop/below"):
        try:
            os.stat(f"{top}/{name}")
        except OSError as exc:
            assert exc.errno in (errno.EACCES, errno.ENOENT), exc  # noqa: PT017
        else:
            raise AssertionError(name)
    os.mkdir(f"{top}/beside/new")
    os.rmdir(f"{top}/beside/new")


def climb() -> None:
    """From below what is covered; it may fail, but it must return."""
    for path in (".", "..", "../..", "../../.."):
        with contextlib.suppress(OSError):
            os.stat(path)
            os.listdir(path)


@pytest.mark.parametrize("options", [NULL, CLOAKED])
def test_a_bind_mount_of_the_view_inside_its_own_source_leads_nowhere(
    mount: Callable[..., Mount], user: Callable[..., User], options: str
) -> None:
    m = mount("-o", options)
    someone, standing = user(2001), user(2001)
    someone.do(os.mkdir, m.at("beside"))
    standing.do(enter_and_stay, m.path)
    subprocess.run(["mount", "--bind", m.path, m.real("loop")], check=True, timeout=SECONDS)

    def is_known() -> object:
        someone.start(loop_is_known, m.path)
        return someone.answer_within(SECONDS)

    wait_until(lambda: not is_known())
    someone.do_within(SECONDS, look_where_it_leads_back, m.path)
    standing.do_within(SECONDS, climb)
    someone.do_within(SECONDS, look_where_it_leads_back, m.path)
    subprocess.run(["umount", m.real("loop")], check=True, timeout=SECONDS)
    someone.do_within(SECONDS, os.stat, m.at("loop", "below", "deep"))
    standing.do(os.chdir, "/")


# -- what users mount ------------------------------------------------------------------------------


def make_private(path: str) -> None:
    """A directory that nobody else sees, so that the kernel has to ask about its name each time."""
    os.makedirs(f"{path}/below")
    os.chmod(path, 0o700)


@pytest.mark.parametrize("what", ["the view", "a user's"])
def test_a_mount_counts_from_the_moment_it_is_there_to_the_moment_it_is_gone(
    mount: Callable[..., Mount], user: Callable[..., User], what: str
) -> None:
    m = mount("-o", CLOAKED)
    someone = user(2001)
    someone.do(make_private, m.at("place"))
    for _ in range(20):
        with contextlib.ExitStack() as stack:
            if what == "the view":
                subprocess.run(["mount", "--bind", m.path, m.real("place")], check=True, timeout=SECONDS)
                stack.callback(subprocess.run, ["umount", m.real("place")], check=True, timeout=SECONDS)
            else:  # which would never be answered
                stack.enter_context(as_users_mount(os.fsencode(m.real("place")), 2002, words=b",allow_other"))
            someone.start(os.stat, m.at("place"))
            with pytest.raises(PermissionError):
                someone.answer_within(SECONDS)
            someone.start(names, m.path)
            assert "place" not in someone.answer_within(SECONDS)
        someone.do_within(SECONDS, os.stat, m.at("place", "below"))


def look_until(path: str, flag: str) -> int:
    """Look at a name until the flag is there; how often it led somewhere."""
    found = 0
    while not os.path.exists(flag):
        with contextlib.suppress(PermissionError):
            os.stat(path)
            found += 1
    return found


def test_a_mount_that_comes_and_goes_all_the_time_is_never_asked(
    base: str, mount: Callable[..., Mount], user: Callable[..., User]
) -> None:
    """It would not answer: whatever is asked of it would be waited for for ever."""
    m = mount("-o", CLOAKED)
    flag = os.path.join(base, "flag")
    lookers = [user(2001) for _ in range(3)]
    lookers[0].do(make_private, m.at("place"))
    for looker, name in zip(lookers, ("place", "place/below", "place/.."), strict=True):
        looker.start(look_until, m.at(name), flag)
    place = os.fsencode(m.real("place"))
    for _ in range(300):
        with as_users_mount(place, 2002, words=b",allow_other"):
            pass
    write(flag, b"")
    for looker in lookers:
        assert looker.answer_within(SECONDS) > 0


def test_what_lies_below_a_users_mount_does_not_ask_it(mount: Callable[..., Mount], user: Callable[..., User]) -> None:
    m = mount("-o", CLOAKED)
    standing = user(2001)
    standing.do(enter_and_stay, m.path)
    with as_users_mount(os.fsencode(m.real("loop")), 2002, words=b",allow_other"):
        standing.do_within(SECONDS, climb)
        standing.do_within(SECONDS, names, m.path)
    standing.do_within(SECONDS, os.stat, m.at("loop", "below", "deep"))
    standing.do(os.chdir, "/")


def test_what_the_administrator_mounts_is_there_at_once(mount: Callable[..., Mount], user: Callable[..., User]) -> None:
    """Also if users mount and unmount all the time."""
    m = mount("-o", NULL)
    someone = user(2001)
    for number in range(5):
        place = m.real(str(number))
        os.mkdir(place)
        with as_users_mount(os.fsencode(m.real("0")), 2002):
            subprocess.run(["mount", "-t", "tmpfs", "none", place], check=True)
            try:
                write(os.path.join(place, "inside"), b"")
                someone.do_within(SECONDS, os.stat, m.at(str(number), "inside"))
                assert str(number) in someone.do(names, m.path)
            finally:
                subprocess.run(["umount", "--lazy", place], check=True)
