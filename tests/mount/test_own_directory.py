"""Changes in a directory that only its owner may change: they take few requests, and show nobody anything more."""

import errno
import os
import stat
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.agents import User, names, read, write
from tests.mount.conftest import Mount, told
from tests.mount.test_caching import CLOAKED, requests

OWNER, STRANGER = 3001, 3002

MakeMount = Callable[..., Mount]
MakeUser = Callable[..., User]

pytestmark = pytest.mark.usefixtures("figures_at_once")


@pytest.fixture
def home(tree: str) -> Path:
    """A directory that its owner alone may enter, with a file, a directory with a file, and a stranger's file."""
    home = Path(tree, "home")
    for path in (home, home / "inside"):
        path.mkdir(0o700)
        os.chown(path, OWNER, OWNER)
    for name, uid in (("file", OWNER), ("other", OWNER), ("inside/file", OWNER), ("hidden", STRANGER)):
        (home / name).write_text(name)
        (home / name).chmod(0o600)
        os.chown(home / name, uid, uid)
    return home


def taken(m: Mount, who: User, call: Callable[..., object], *args: object) -> Counter[str]:
    """Return the requests that a call takes, without FORGET and what `requests` itself takes."""
    before = requests(m)
    who.do(call, *args)
    found = requests(m) - before
    del found["statfs"], found["forget"]
    return found


def warm(mount: MakeMount, user: MakeUser) -> tuple[Mount, User, str]:
    """Mount; return the mount, the owner of the home, and its path, once the kernel and the daemon know both."""
    m, owner = mount("-o", CLOAKED), user(OWNER)
    told()
    owner.do(exercise, m.at("home"))
    return m, owner, m.at("home")


def exercise(top: str) -> None:
    write(f"{top}/warm", b"")
    os.rename(f"{top}/warm", f"{top}/warmer")
    os.unlink(f"{top}/warmer")
    for name in ("file", "other", "inside/file"):
        os.stat(f"{top}/{name}")


def test_a_rename_is_one_request_and_what_is_known_stays_known(home: Path, mount: MakeMount, user: MakeUser) -> None:
    m, owner, _ = warm(mount, user)
    owner.do(os.chdir, m.at("home"))
    # The kernel looks up what a rename may replace, whatever it knows of it (fuse_dentry_revalidate).
    steps: list[tuple[str, Callable[..., object], tuple[object, ...], dict[str, int]]] = [
        ("to a new name", os.rename, ("file", "moved"), {"lookup": 1, "rename": 1}),
        ("by its new name", os.stat, ("moved",), {"getattr": 1}),  # the ctime has changed
        ("onto another file", os.rename, ("moved", "other"), {"lookup": 1, "rename": 1}),
        ("by that name", os.stat, ("other",), {"getattr": 1}),
        ("of a directory", os.rename, ("inside", "within"), {"lookup": 1, "rename": 1}),
        ("what is below", os.stat, ("within/file",), {}),
    ]
    for what, call, args, most in steps:
        found = taken(m, owner, call, *args)
        assert not found - Counter(most), f"{what}: {dict(found)}"
    assert owner.do(read, "other") == b"file"
    assert owner.do(names, ".") == ["other", "within"]
    assert sorted(os.listdir(home)) == ["hidden", "other", "within"]


def test_nobody_else_sees_what_was_renamed(home: Path, mount: MakeMount, user: MakeUser) -> None:
    _, owner, top = warm(mount, user)
    stranger = user(STRANGER)
    for new in ("one", "two", "three"):
        owner.do(os.rename, f"{top}/file", f"{top}/{new}")
        owner.do(os.stat, f"{top}/{new}")
        for name in (new, "file", "hidden"):
            assert stranger.error(os.stat, f"{top}/{name}") == errno.ENOENT
        owner.do(os.rename, f"{top}/{new}", f"{top}/file")


def test_what_is_given_away_after_a_rename_is_hidden(home: Path, mount: MakeMount, user: MakeUser) -> None:
    _, owner, top = warm(mount, user)
    owner.do(os.rename, f"{top}/file", f"{top}/moved")
    owner.do(os.stat, f"{top}/moved")
    os.chown(home / "moved", STRANGER, STRANGER)
    told()
    assert owner.error(os.stat, f"{top}/moved") == errno.ENOENT
    assert "moved" not in owner.do(names, top)
    os.chown(home / "moved", OWNER, OWNER)
    told()
    assert owner.do(read, f"{top}/moved") == b"file"


def test_after_the_directory_is_opened_to_others_the_new_name_counts(
    home: Path, mount: MakeMount, user: MakeUser
) -> None:
    _, owner, top = warm(mount, user)
    stranger = user(STRANGER)
    owner.do(os.rename, f"{top}/file", f"{top}/moved")
    owner.do(os.stat, f"{top}/moved")
    owner.do(os.chmod, top, 0o755)
    assert stranger.do(names, top) == ["hidden"]
    assert stranger.error(os.stat, f"{top}/moved") == errno.ENOENT
    owner.do(os.chmod, f"{top}/moved", 0o644)
    assert stranger.do(read, f"{top}/moved") == b"file"
    owner.do(os.rename, f"{top}/moved", f"{top}/again")
    assert stranger.do(read, f"{top}/again") == b"file"
    assert stranger.error(os.stat, f"{top}/moved") == errno.ENOENT


def test_names_that_are_hidden_are_in_the_way(home: Path, mount: MakeMount, user: MakeUser) -> None:
    _, owner, top = warm(mount, user)
    assert owner.error(os.rename, f"{top}/file", f"{top}/hidden") == errno.EACCES
    assert owner.error(os.rename, f"{top}/hidden", f"{top}/mine") == errno.ENOENT
    assert owner.error(os.rename, f"{top}/inside", f"{top}/hidden") == errno.EACCES
    assert owner.error(os.rename, f"{top}/inside", f"{top}/file") == errno.ENOTDIR
    assert owner.error(os.rename, f"{top}/file", f"{top}/inside") == errno.EISDIR
    assert owner.error(os.rmdir, f"{top}/file") == errno.ENOTDIR
    assert owner.error(os.unlink, f"{top}/inside") == errno.EISDIR
    assert owner.error(os.rmdir, f"{top}/inside") == errno.ENOTEMPTY
    assert owner.error(os.rmdir, f"{top}/hidden") == errno.ENOENT
    assert (home / "hidden").read_text() == "hidden"
    assert (home / "file").read_text() == "file"


def test_directories_are_made_and_removed(home: Path, mount: MakeMount, user: MakeUser) -> None:
    m, owner, _ = warm(mount, user)
    owner.do(os.chdir, m.at("home"))
    owner.do(os.mkdir, "warm")
    owner.do(os.rmdir, "warm")
    assert not taken(m, owner, os.mkdir, "new", 0o750) - Counter({"lookup": 1, "mkdir": 1})
    info = os.stat(home / "new")
    assert (info.st_uid, info.st_gid, stat.S_IMODE(info.st_mode)) == (OWNER, OWNER, 0o750)
    assert not taken(m, owner, os.rmdir, "new") - Counter({"rmdir": 1})
    assert owner.error(os.stat, "new") == errno.ENOENT


def test_hard_links_are_renamed(home: Path, mount: MakeMount, user: MakeUser) -> None:
    """One of several names is moved; onto another name of the same file, nothing happens (rename(2))."""
    _, owner, top = warm(mount, user)
    owner.do(os.link, f"{top}/file", f"{top}/second")
    owner.do(os.rename, f"{top}/second", f"{top}/third")
    owner.do(os.rename, f"{top}/third", f"{top}/file")
    assert owner.do(names, top) == ["file", "inside", "other", "third"]
    owner.do(os.unlink, f"{top}/third")
    owner.do(os.rename, f"{top}/other", f"{top}/file")
    assert owner.do(read, f"{top}/file") == b"other"
