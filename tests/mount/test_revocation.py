"""What a change hides is forgotten before the system call returns, for everybody to whom it was ever told.

In the caller's own view of a mount, that is in other tests. Here, another view of the same mount, or another path to
the same directory, knew what one view changes. Each change is made, and looked at, a few times in a row.
"""

import errno
import os
import struct
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from tests.agents import User
from tests.mount import alterations
from tests.mount.conftest import Mount, daemons_with, told
from tests.mount.test_hung import Far
from tests.mount.test_invalidation import SECONDS, has_let_go, hold, stalled
from tests.waiting import wait_until

MakeMount = Callable[..., Mount]
MakeUser = Callable[..., User]
Look = tuple[Callable[[str], object], str]
"""What is tried, and on which path."""

__all__ = ["stalled"]  # a fixture

OWNER, OTHER = 4001, 4002
VIEWS = f"views=0:0 {OWNER}:{OWNER} {OTHER}:{OTHER}"
PLAIN = "no_root_squash"
CLOAKED = f"no_root_squash,cloak_list=uid +007 {OWNER} {OTHER}"
ACL = "system.posix_acl_access"
TIMES = 6


def acl(*entries: tuple[int, int, int]) -> bytes:
    """system.posix_acl_*: tag, permissions, id."""
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)


NONE = 2**32 - 1
REFUSES_OTHER = acl((1, 7, NONE), (2, 0, OTHER), (4, 5, NONE), (0x10, 7, NONE), (0x20, 5, NONE))
GRANTS_OTHER = acl((1, 7, NONE), (2, 7, OTHER), (4, 0, NONE), (0x10, 7, NONE), (0x20, 0, NONE))


def furnish(tree: str) -> None:
    """What the owner lets everybody see: p/file, p/sub and p/sub/inside, again and again."""
    with suppress(OSError):
        os.unlink(os.path.join(tree, "p/new"))
    with suppress(OSError):
        os.rename(os.path.join(tree, "p/new"), os.path.join(tree, "p/sub"))
    for path, mode in (("p", 0o755), ("p/sub", 0o777)):
        at = os.path.join(tree, path)
        with suppress(FileExistsError):
            os.mkdir(at)
        os.chown(at, OWNER, OWNER)
        with suppress(OSError):
            os.removexattr(at, ACL)
        os.chmod(at, mode)
    for path in ("p/file", "p/sub/inside"):
        at = os.path.join(tree, path)
        Path(at).write_text("content", encoding="ascii")
        os.chown(at, OWNER, OWNER)
        os.chmod(at, 0o644)


def opens(path: str) -> None:
    os.close(os.open(path, os.O_RDONLY))


def makes(path: str) -> None:
    os.mkdir(path)
    os.rmdir(path)


def fails(look: Look, top: str) -> int:
    """The errno, or 0."""
    call, path = look
    try:
        call(os.path.join(top, path))
    except OSError as exc:
        return exc.errno or -1
    return 0


FILE: list[Look] = [(os.stat, "p/file"), (opens, "p/file"), (os.listxattr, "p/file")]
SUB: list[Look] = [(os.stat, "p/sub"), (os.listdir, "p/sub"), (makes, "p/sub/made"), (os.stat, "p/sub/inside")]
ALL: list[Look] = [*FILE, *SUB, (os.listdir, "p")]


@dataclass
class Change:
    """What is arranged behind the mount, what is then done through which view, what fails afterwards, and how."""

    make: Callable[[str], object]
    looks: list[Look]
    error: int = errno.EACCES
    by: int = OWNER
    options: str = PLAIN
    arrange: Callable[[str], object] = str


def give_away(real: str) -> None:
    os.chown(f"{real}/p", OTHER, OTHER)
    os.chmod(f"{real}/p", 0o700)


CHANGES = {
    "chmod of a directory": Change(lambda at: os.chmod(f"{at}/p", 0o700), ALL),
    "the right to search": Change(lambda at: os.chmod(f"{at}/p", 0o754), [*FILE, *SUB]),
    "a directory is hidden": Change(lambda at: os.chmod(f"{at}/p", 0o750), ALL, errno.ENOENT, options=CLOAKED),
    "chown": Change(lambda at: os.chown(f"{at}/p", OWNER, OWNER), ALL, by=0, arrange=give_away),
    "setfacl": Change(lambda at: os.setxattr(f"{at}/p", ACL, REFUSES_OTHER), ALL),
    "an ACL is removed": Change(
        lambda at: os.removexattr(f"{at}/p", ACL),
        ALL,
        arrange=lambda real: os.setxattr(f"{real}/p", ACL, GRANTS_OTHER),
    ),
    "a file is hidden": Change(lambda at: os.chmod(f"{at}/p/file", 0o640), FILE, errno.ENOENT, options=CLOAKED),
    "rename": Change(lambda at: os.rename(f"{at}/p/file", f"{at}/p/new"), FILE, errno.ENOENT),
    "rename of a directory": Change(lambda at: os.rename(f"{at}/p/sub", f"{at}/p/new"), SUB, errno.ENOENT),
    "unlink": Change(lambda at: os.unlink(f"{at}/p/file"), FILE, errno.ENOENT),
    "unlink where something is hidden": Change(
        lambda at: os.unlink(f"{at}/p/file"), FILE, errno.ENOENT, options=CLOAKED
    ),
    "rmdir": Change(
        lambda at: os.rmdir(f"{at}/p/sub"),
        SUB[:2],
        errno.ENOENT,
        arrange=lambda real: os.unlink(f"{real}/p/sub/inside"),
    ),
    "replaced by what is hidden": Change(
        lambda at: os.rename(f"{at}/p/secret", f"{at}/p/file"),
        FILE,
        errno.ENOENT,
        options=CLOAKED,
        arrange=lambda real: make_secret(f"{real}/p/secret"),
    ),
}


def make_secret(path: str) -> None:
    Path(path).touch()
    os.chmod(path, 0o600)
    os.chown(path, OWNER, OWNER)


@contextmanager
def acting_as(uid: int) -> Iterator[None]:
    """Make this process act as another user."""
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)


def survivors(
    change: Change, real: str, mine: str, its: str, uid: int = 0, error: Callable[[Look, str], int] = fails
) -> Counter[tuple[str, str]]:
    """What does not fail as it should after the change, and how often.

    Args:
        change: the change.
        real: the real tree.
        mine: where the change is made, as `uid`.
        its: where that is tried, by `error`.
    """
    found = Counter[tuple[str, str]]()
    for look in change.looks:
        for _ in range(TIMES):
            furnish(real)
            change.arrange(real)
            there = [f"{mine}/p/{name}" for name in os.listdir(f"{real}/p")]
            for one in ((os.stat, "p/file"), look):
                wait_until(lambda one=one: not error(one, its))  # type: ignore[misc]
            with acting_as(uid):
                wait_until(lambda there=there: all(map(os.path.exists, there)))  # type: ignore[misc]
                change.make(mine)
            if error(look, its) != change.error:
                found[look[0].__name__, look[1]] += 1
    return found


@pytest.mark.parametrize("change", CHANGES)
def test_what_one_view_takes_away_is_gone_in_the_others(change: str, tree: str, mount: MakeMount) -> None:
    what = CHANGES[change]
    furnish(tree)
    m = mount("-o", f"{what.options},{VIEWS}")
    assert not survivors(what, m.source, m.at(f"@{what.by}"), m.at(f"@{OTHER}"))


def test_what_somebody_uses_in_a_directory_is_not_found_there_any_more(
    tree: str, mount: MakeMount, user: MakeUser
) -> None:
    """The kernel does not drop it with the name of the directory, which the next LOOKUP brings back."""
    furnish(tree)
    with daemons_with(partial(alterations.invalidate_slowly, b"sub")):
        m = mount("-o", f"{PLAIN},{VIEWS}")
    owner, other, its = user(OWNER), user(OTHER), m.at(f"@{OTHER}")
    told()
    other.do(os.chdir, f"{its}/p/sub")
    other.do(os.stat, f"{its}/p/sub")
    owner.do(os.chmod, m.at(f"@{OWNER}", "p"), 0o700)
    assert other.error(os.stat, f"{its}/p/sub") == errno.EACCES


def test_what_is_being_forgotten_already_is_waited_for(tree: str, base: str, mount: MakeMount, user: MakeUser) -> None:
    """A change behind the mount has begun it, and nobody has waited for that."""
    furnish(tree)
    begun = f"{base}/begun"
    with daemons_with(partial(alterations.invalidate_slowly, b"file", begun)):
        m = mount("-o", f"{PLAIN},{VIEWS}")
    owner, other, its = user(OWNER), user(OTHER), m.at(f"@{OTHER}")
    told()
    for _ in range(2):
        other.do(os.stat, f"{its}/p/file")
        owner.do(os.stat, m.at(f"@{OWNER}", "p/file"))
    os.chmod(f"{tree}/p", 0o700)
    wait_until(lambda: os.path.exists(begun))
    os.chmod(f"{tree}/p", 0o755)
    owner.do(os.chmod, m.at(f"@{OWNER}", "p"), 0o700)
    assert other.error(os.stat, f"{its}/p/file") == errno.EACCES


@pytest.fixture
def twice(tree: str) -> Iterator[str]:
    """The same directory at two places of the tree."""
    furnish(tree)
    again = os.path.join(tree, "again")
    os.mkdir(again)
    subprocess.run(["mount", "--bind", tree, again], check=True)
    yield tree
    subprocess.run(["umount", "--lazy", again], check=True)


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_taken_away_by_one_path_is_gone_by_the_other(
    change: str, twice: str, mount: MakeMount, user: MakeUser
) -> None:
    """The kernel knows the two as different directories of one view, that of each caller."""
    what = CHANGES[change]
    m = mount("-o", what.options)
    other = user(OTHER)
    for mine, its in ((m.at("again"), m.path), (m.path, m.at("again"))):
        assert not survivors(what, m.source, mine, its, what.by, lambda look, top: other.do(fails, look, top))


def test_changes_that_cross_in_two_views_do_not_wait_for_one_another(tree: str, mount: MakeMount) -> None:
    """Each holds the lock that the other needs."""
    furnish(tree)
    names = [f"p/{number}" for number in range(100)]
    for name in names:
        Path(tree, name).touch()
        os.chown(os.path.join(tree, name), OWNER, OWNER)
    m = mount("-o", f"{PLAIN},{VIEWS}")
    tops = m.at("@0"), m.at(f"@{OWNER}")
    for top in tops:
        for name in names:
            os.stat(os.path.join(top, name))

    def remove(top: str, some: list[str]) -> None:
        for name in some:
            os.unlink(os.path.join(top, name))

    threads = [threading.Thread(target=remove, args=(top, names[n::2])) for n, top in enumerate(tops)]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - began < 15
    for top in tops:
        for name in names:
            with pytest.raises(FileNotFoundError):
                os.stat(os.path.join(top, name))


def test_who_keeps_a_lock_in_another_view_delays_a_change_by_a_moment(
    tree: str, base: str, mount: MakeMount, user: MakeUser, stalled: Far
) -> None:
    """And nobody else at all."""
    furnish(tree)
    m = mount("-o", f"{PLAIN},{VIEWS}")
    attacker, owner, root = user(OTHER), user(OWNER), user(0)
    mine, its = m.at(f"@{OWNER}"), m.at(f"@{OTHER}")
    attacker.do(os.stat, f"{its}/p/file")
    attacker.do(os.stat, f"{its}/p/sub/inside")
    attacker.do(hold, f"{its}/p", os.path.join(stalled.path, "10000"))
    wait_until(lambda: os.path.exists(os.path.join(base, "flag.asked")), SECONDS)
    owner.start(os.rename, f"{mine}/p/sub", f"{mine}/p/new")
    root.do_within(SECONDS, os.listdir, m.at("@0/p"))
    assert owner.finish_within(SECONDS)
    owner.do_within(SECONDS, os.unlink, f"{mine}/p/file")
    owner.do_within(SECONDS, os.chmod, f"{mine}/p", 0o700)
    assert not attacker.do(has_let_go), "nothing was held"
    Path(base, "flag").touch()
    wait_until(lambda: attacker.do(has_let_go), SECONDS)
    assert attacker.error(os.stat, f"{its}/p/file") == errno.EACCES
