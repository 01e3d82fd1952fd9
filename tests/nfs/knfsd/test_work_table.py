"""Through cloakfs, each caller can do what it can do through an export of the bare tree, and with the same result."""

import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from cloakfs.nfs.plan import mount_name
from tests.agents import User
from tests.nfs.knfsd.fixtures import Service, sh
from tests.nfs.knfsd.worktable import CALLERS, TEAM, WORKS, Caller, Outcome, make_accounts, outcomes, prepare

VERSIONS = ("3", "4.0", "4.2")
CLOAK = "cloak_list = uid +077 0 -1"
OFFSET = 10000
MAP = f"range_map = uid {OFFSET + 1000} {OFFSET + 1999} map 1000 gid {OFFSET + 1000} {OFFSET + 1999} map 1000"
VIEWS = "views = " + " ".join(caller.user for caller in CALLERS.values())


def squash(caller: Caller) -> str:
    return f"all_squash,anonuid={caller.uid},anongid={TEAM if caller.in_team else caller.uid}"


def squash_range(caller: Caller) -> str:
    """A range in which the caller's client ids are not the first, under which the server shows them to others."""
    ids = f"{OFFSET + 1000} {OFFSET + 1999} squash {caller.uid}"
    return f"range_map = uid {ids} gid {ids}"


@dataclass(frozen=True)
class Entry:
    """An entry, and the options of the bare export that it is compared with."""

    options: str
    bare: str = "root_squash,sync"
    only: str = ""  # the caller, if it is for one

    @property
    def offset(self) -> int:
        return OFFSET if "range_map" in self.options else 0


ENTRIES = {
    "cloak_list": Entry(CLOAK),
    "no_root_squash": Entry("no_root_squash", bare="no_root_squash,sync"),
    "no_root_squash, cloak_list": Entry(f"no_root_squash, {CLOAK}", bare="no_root_squash,sync"),
    "subtree_check": Entry(f"subtree_check, {CLOAK}"),
    "no_client_cache": Entry(f"no_client_cache, {CLOAK}"),
    "range_map": Entry(MAP),
    "range_map, cloak_list": Entry(f"{MAP}, {CLOAK}"),
    "views": Entry(f"{VIEWS}, {CLOAK}"),
    **{
        f"all_squash ({name})": Entry(f"{squash(caller)}, {CLOAK}", squash(caller), only=name)
        for name, caller in CALLERS.items()
    },
    **{
        f"squash ({name})": Entry(f"{squash_range(caller)}, {CLOAK}", only=name)
        for name, caller in CALLERS.items()
        if not caller.in_team  # a range of groups is one group
    },
}

SAMPLE = [
    ("cloak_list", "3"),
    ("cloak_list", "4.2"),
    ("range_map, cloak_list", "4.0"),
    ("views", "4.2"),
    ("all_squash (group)", "3"),
    ("all_squash (ACL)", "4.2"),
    ("squash (ACL)", "3"),
]
"""What is tried by default: one of each kind of view, and each version."""

IS_FULL = os.environ.get("CLOAKFS_NFS_TABLE") == "full"
CELLS = list(itertools.product(ENTRIES, VERSIONS)) if IS_FULL else SAMPLE
TRIED = {name: entry for name, entry in ENTRIES.items() if name in dict(CELLS)}


def _callers(entry: Entry) -> dict[str, Caller]:
    return {name: caller for name, caller in CALLERS.items() if entry.only in ("", name)}


mounted: list[str] = []


def _mount(path: str, version: str) -> str:
    at = f"/client/table/{version}{path}"
    os.makedirs(at)
    sh("mount", "-t", "nfs", "-o", f"vers={version},soft,timeo=100", f"127.0.0.1:{path}", at)
    mounted.append(at)
    return at


@pytest.fixture(scope="module")
def exported(service: Service) -> Iterator[dict[str, str]]:
    """The paths of the exports: of each kind of entry, and of each bare tree by its options."""
    make_accounts()
    paths: dict[str, str] = {}
    lines, number = [], itertools.count(1)
    bare = {entry.bare for entry in TRIED.values()}
    for name in (*bare, *TRIED):
        tree = f"/tree/table{next(number)}"
        callers = CALLERS if name in bare else _callers(TRIED[name])
        for version, (label, caller) in itertools.product(VERSIONS, callers.items()):
            prepare(f"{tree}/{version}/{label}", caller)
        if name in bare:
            sh("exportfs", "-o", f"rw,insecure,no_subtree_check,fsid={5000 + len(paths)},{name}", f"*:{tree}")
            paths[name] = tree
        else:
            lines.append(f"{tree} *(insecure,rw,{TRIED[name].options})\n")
            paths[name] = f"/srv/cloakfs/{mount_name(tree, '*')}"
        paths[f"tree of {name}"] = tree
    service.write("table", "".join(lines))
    service.take_over()
    yield paths
    for place in mounted:
        sh("umount", "-i", "-l", place)
    mounted.clear()
    for name in bare:
        sh("exportfs", "-u", f"*:{paths[name]}")
    os.unlink("/tmp/exports.d/table.exports")
    service.take_over()
    for name in (*bare, *TRIED):
        shutil.rmtree(paths[f"tree of {name}"])


Table = dict[tuple[str, str], Outcome]


def _work(
    tree: str, place: str, version: str, callers: dict[str, Caller], user: Callable[..., User], entry: Entry | None
) -> Table:
    """What came of each work of each caller, through the export that is mounted at `place`."""
    offset = entry.offset if entry else 0
    table = {}
    for label, caller in callers.items():
        worker = user(offset + caller.uid, offset + caller.uid, [offset + TEAM] if caller.in_team else [])
        view = f"@{caller.user}" if entry and "views" in entry.options else ""
        seen = os.path.join(place, view, version, label)
        for work, outcome in outcomes(worker, seen, f"{tree}/{version}/{label}"):
            table[work, label] = outcome
        worker.close()
    return table


@pytest.fixture(scope="module")
def through_bare() -> dict[tuple[str, str], Table]:
    """What came of the works through bare exports, by their options and the version: they are done once."""
    return {}


@pytest.mark.parametrize(("name", "version"), CELLS)
def test_all_works_as_through_an_export_of_the_bare_tree(
    name: str,
    version: str,
    exported: dict[str, str],
    through_bare: dict[tuple[str, str], Table],
    user: Callable[..., User],
) -> None:
    entry = TRIED[name]
    callers = _callers(entry)
    if (entry.bare, version) not in through_bare:
        place = _mount(exported[entry.bare], version)
        through_bare[entry.bare, version] = _work(
            exported[f"tree of {entry.bare}"], place, version, CALLERS, user, None
        )
    expected = through_bare[entry.bare, version]
    place = _mount(exported[name], version)
    found = _work(exported[f"tree of {name}"], place, version, callers, user, entry)
    wrong = [
        f"{work} by {caller}: {outcome}, bare: {expected[work, caller]}"
        for (work, caller), outcome in found.items()
        if outcome != expected[work, caller]
    ]
    assert not wrong, "\n".join(wrong)
    assert len(found) == len(WORKS) * len(callers)
