"""What each caller holds when a mount is replaced, and when a file with a delegation changes behind the mount.

This makes rows of the table that `scripts/campaign table` writes. What is tried for one caller by default is in
test_held_files.py and test_delegations.py.
"""

import contextlib
import errno
import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.mount.conftest import COMMAND
from tests.nfs.knfsd.fixtures import EXPORTS, Service, Share, exported, nfs_mounted, sh
from tests.nfs.knfsd.test_delegations import FOR_LONG, SOON, exists, mode, read, seen
from tests.nfs.knfsd.test_held_files import kill_daemon, lock_error, renew, replaced
from tests.nfs.knfsd.worktable import (
    CALLERS,
    DELEGATED,
    HELD,
    VERSIONS,
    Holding,
    Row,
    check_rows,
    is_full,
    make_accounts,
    make_shared_file,
    start,
)
from tests.waiting import wait_until

pytestmark = pytest.mark.skipif(not is_full(), reason="only with CLOAKFS_NFS_TABLE=full (scripts/campaign table)")

V4 = VERSIONS[1:]
CLOAK = "cloak_list = uid +007 0 -1"
CONTENT = "." * 20

CHANGES: dict[str, tuple[Callable[[str], object], Callable[[str], object], object]] = {
    "content": (lambda path: Path(path).write_text("NEW data"), read, "NEW data"),
    "mode": (lambda path: os.chmod(path, 0o644), mode, 0o644),
    "removed": (os.unlink, exists, False),
}
"""How a file is changed behind the mount, what a client looks at, and what it is to see."""
assert set(CHANGES) == set(DELEGATED)

Record = Callable[[str, object], None]


def make_files(tree: str) -> None:
    """Make a file for each thing that each caller is to hold, by each version."""
    make_accounts()
    os.chmod(tree, 0o777)
    for what, version, label in itertools.product(("held", *CHANGES), VERSIONS, CALLERS):
        make_shared_file(f"{tree}/{what}-{version}-{label}", CONTENT)


# -- files that are held open ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def tree(service: Service) -> Iterator[Share]:
    with exported(service, f"rw,{CLOAK}", make_files) as made:
        made.expect_errors = True  # its daemon is killed
        yield made


@pytest.fixture(scope="module")
def holdings(tree: Share) -> Iterator[list[Holding]]:
    """A file held open, and locked, by each caller and version."""
    with contextlib.ExitStack() as stack:
        made = []
        for version in VERSIONS:
            place = stack.enter_context(nfs_mounted(tree, version, "nosharecache,hard"))
            for label in CALLERS:
                name = f"held-{version}-{label}"
                made.append(Holding(start(label), version, label, f"{place}/{name}", tree.real(name)))
                stack.callback(made[-1].close)
        yield made


def down_and_up(_: Share) -> None:
    for what in (("down",), ("up", EXPORTS)):
        sh(*COMMAND, "export", *what, timeout=600)


HOW = dict(zip(HELD, (kill_daemon, renew, down_and_up), strict=True))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", HOW)
def test_files_that_are_held_open(tree: Share, holdings: list[Holding], how: str, record_property: Record) -> None:
    replaced(lambda: HOW[how](tree), tree)
    outcomes = {holding: holding.outcome() for holding in holdings}
    with contextlib.closing(start("owner")) as other, nfs_mounted(tree, "4.2", "nosharecache,actimeo=0") as place:
        for holding in holdings:
            at = os.path.join(place, os.path.basename(holding.path))
            # Who reads may have a delegation, with which the client keeps locks to itself; this is the same client.
            is_told = holding.version in V4 and holding.caller != "other"
            if is_told and other.do(lock_error, at) not in (errno.EAGAIN, errno.EACCES):
                outcomes[holding] += ", without its lock"
    rows = [
        Row("knfsd", holding.version, "cloak_list", how, holding.caller, outcome, "ok", outcome == "ok")
        for holding, outcome in outcomes.items()
    ]
    check_rows(rows, record_property)


# -- changes under a delegation --------------------------------------------------------------------


def delegations() -> int:
    """How many there are on the whole server."""
    return sum(states.read_text().count("type: deleg") for states in Path("/proc/fs/nfsd/clients").glob("*/states"))


def under_a_delegation(what: str, label: str, seen_at: str, real: str) -> str:
    """Have a caller get a delegation of a file, and change it behind the mount; return what comes of it."""
    change, look, wanted = CHANGES[what]
    with contextlib.closing(start(label)) as who:
        before = delegations()

        def is_delegated() -> bool:
            if delegations() > before:
                return True
            who.do(os.read, who.do(os.open, seen_at, os.O_RDONLY), 10)
            return False

        try:
            wait_until(is_delegated, FOR_LONG, every=0.05)
        except AssertionError:
            return "no delegation"
        change(real)
        return "ok" if seen(who, look, seen_at, wanted) < SOON else "not seen"


@pytest.fixture(scope="module")
def bare(service: Service) -> Iterator[str]:
    path = "/tree/held-bare"
    os.makedirs(path)
    make_files(path)
    sh("exportfs", "-o", "rw,insecure,no_subtree_check,fsid=5555", f"*:{path}")
    yield path
    sh("exportfs", "-u", f"*:{path}")
    shutil.rmtree(path)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("version", V4)
def test_changes_behind_the_mount(version: str, tree: Share, bare: str, record_property: Record) -> None:
    rows = []
    with nfs_mounted(tree, version, "actimeo=0,nosharecache") as through:
        at = f"/client/bare-{version}"
        os.makedirs(at)
        sh("mount", "-t", "nfs", "-o", f"vers={version},soft,actimeo=0,nosharecache", f"127.0.0.1:{bare}", at)
        try:
            for what, label in itertools.product(CHANGES, CALLERS):
                name = f"{what}-{version}-{label}"
                expected = under_a_delegation(what, label, f"{at}/{name}", f"{bare}/{name}")
                found = under_a_delegation(what, label, f"{through}/{name}", tree.real(name))
                same = found == expected == "ok"
                rows.append(Row("knfsd", version, "cloak_list", DELEGATED[what], label, found, expected, same))
        finally:
            sh("umount", "-i", "-l", at)
    check_rows(rows, record_property)
