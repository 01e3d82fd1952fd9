"""cloakfs over cloakfs: it works, or it is refused; nobody loses a file in it."""

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.agents import User, names, read, write

from .conftest import Mount, is_mounted, run
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


@pytest.mark.parametrize(
    ("below", "above"),
    [
        (OPEN, OPEN),
        (OPEN, "rw"),
        (OPEN, f"{OPEN},cloak_list=uid +000 2000 2999"),
        (f"{OPEN},range_map=uid 0 map 0 uid 2000 2999 map 20000 gid 0 map 0 gid 2000 2999 map 20000", OPEN),
    ],
)
def test_over_one_that_shows_root_everything(
    mount: Callable[..., Mount], user: Callable[..., User], below: str, above: str
) -> None:
    lower = mount("-o", below)
    upper = mount("-o", above, source=lower.path)
    for uid in (2001, 2002):
        user(uid).do_within(SECONDS, work, upper.path)


@pytest.mark.parametrize(
    ("how", "below", "bound"),
    [
        ("cloak_list=uid +000 2000 2999", "", False),
        ("policy={}/plug.py:P", "inside", True),
        ("root_squash", "", False),
        ("views=0:0", "", False),
    ],
)
def test_over_any_other_is_refused(
    base: str, tree: str, mount: Callable[..., Mount], how: str, below: str, *, bound: bool
) -> None:
    Path(base, "plug.py").write_text(PLUG_IN)
    Path(tree, "inside").mkdir()
    view = os.path.join(base, "view")
    os.mkdir(view)
    lower = mount("-o", f"{OPEN},{how.format(base)}")
    place = lower.path
    if bound:
        place = os.path.join(base, "bound")
        os.mkdir(place)
        subprocess.run(["mount", "--bind", lower.path, place], check=True, timeout=SECONDS)
    try:
        source = os.path.join(place, below).rstrip("/")
        done = run("mount", source, view, "-o", OPEN, check=False)
        assert done.returncode == 1
        assert done.stderr == (
            f"cloakfs: {source}: lies in a cloakfs mount ({place}) that does not show root everything; "
            f"mount {tree} instead\n"
        )
        assert not is_mounted(view)
    finally:
        if bound:
            subprocess.run(["umount", place], check=True, timeout=SECONDS)
