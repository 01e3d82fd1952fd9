"""Who writes keeps nobody else waiting, and writes as itself."""

import os
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.agents import User
from tests.mount import alterations
from tests.mount.conftest import Mount, daemons_with
from tests.mount.loopfs import filesystem, require_disk

MakeMount = Callable[..., Mount]
MakeUser = Callable[..., User]

ANN, BOB = 3001, 3002
GROUP = 4001
LONG_SECONDS = 60.0


def rewrite(path: str, mib: int) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for _ in range(mib):
        os.write(fd, b"x" * (1 << 20))
    os.close(fd)


def test_a_close_that_takes_long(base: str, mount: MakeMount, user: MakeUser) -> None:
    """ext4 sends a file that was emptied and written again to the disk when it is closed."""
    require_disk(base, "what is in memory is closed at once")
    marks = os.path.join(base, "marks")
    os.mkdir(marks)
    os.chmod(marks, 0o777)  # whoever the daemon acts as
    begun, go = os.path.join(marks, "begun"), os.path.join(marks, "go")
    Path(base, "real", "file").touch()
    with daemons_with(partial(alterations.close_slowly, begun, go)):
        m, ann, bob = mount("-o", "no_root_squash"), user(ANN), user(BOB)
        try:
            ann.do(rewrite, m.at("large"), 3)
            while not os.path.exists(begun):
                pass
            bob.do_within(LONG_SECONDS, os.stat, m.at("file"))
            ann.do_within(LONG_SECONDS, rewrite, m.at("small"), 1)
            assert not os.path.exists(go)
        finally:
            Path(go).touch()


def make_set_gid_and_write(path: str) -> int:
    """S_ISGID says nothing of execution here, and stays if whoever writes is in the group (chmod(2))."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        os.chown(path, -1, GROUP)
        os.chmod(path, 0o2664)
        os.write(fd, b"content")
        return stat.S_IMODE(os.fstat(fd).st_mode)
    finally:
        os.close(fd)


def test_a_write_by_a_member_of_the_group_leaves_set_gid(base: str, mount: MakeMount, user: MakeUser) -> None:
    with filesystem("tmpfs", base) as tree:  # where files are made without the caller's groups
        os.mkdir(os.path.join(tree, "own"), 0o755)
        os.chown(os.path.join(tree, "own"), ANN, ANN)
        m, ann = mount("-o", "no_root_squash", source=tree), user(ANN, ANN, [GROUP])
        expected = ann.do(make_set_gid_and_write, os.path.join(tree, "own/bare"))
        assert ann.do(make_set_gid_and_write, m.at("own/file")) == expected == 0o2664
