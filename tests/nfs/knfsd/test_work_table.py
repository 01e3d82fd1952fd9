"""Through cloakfs, each caller can do what it can do through an export of the bare tree, and with the same result."""

import os
import shutil
from collections.abc import Callable, Iterator

import pytest

from cloakfs.nfs.plan import mount_name
from tests.agents import User
from tests.nfs.knfsd.fixtures import Service, sh
from tests.nfs.knfsd.worktable import (
    CALLERS,
    CLOAK,
    MAP,
    RESULTS,
    Entry,
    Table,
    all_works,
    check,
    chosen,
    compared,
    make_accounts,
    prepare_all,
    squash,
    squash_range,
)

VIEWS = "views = " + " ".join(caller.user for caller in CALLERS.values())

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

CELLS, TRIED = chosen(ENTRIES, SAMPLE)


class Exports:
    """Exports of entries and of bare trees, each made when it is wanted, and all kept until the end."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._mounted: list[str] = []
        self._bare: dict[str, str] = {}
        self._entries: dict[str, str] = {}

    def bare(self, options: str) -> str:
        """Return the tree that is exported as it is, with these options."""
        if options not in self._bare:
            versions = {version for name, version in CELLS if TRIED[name].bare == options}
            tree = self._bare[options] = f"/tree/table-bare{len(self._bare)}"
            prepare_all(tree, versions, CALLERS)
            sh("exportfs", "-o", f"rw,insecure,no_subtree_check,fsid={5000 + len(self._bare)},{options}", f"*:{tree}")
        return self._bare[options]

    def of(self, name: str) -> str:
        """Return the tree of an entry that is served."""
        if name not in self._entries:
            versions = {version for tried, version in CELLS if tried == name}
            tree = self._entries[name] = f"/tree/table{len(self._entries)}"
            prepare_all(tree, versions, TRIED[name].callers)
            self._write()
        return self._entries[name]

    def _write(self) -> None:
        lines = (f"{tree} *(insecure,rw,{TRIED[name].options})\n" for name, tree in self._entries.items())
        self._service.write("table", "".join(lines))
        self._service.take_over()

    def mount(self, path: str, version: str) -> str:
        """Mount an export as a client; return where."""
        at = f"/client/table/{version}{path}"
        os.makedirs(at)
        sh("mount", "-t", "nfs", "-o", f"vers={version},soft,timeo=100", f"127.0.0.1:{path}", at)
        self._mounted.append(at)
        return at

    def close(self) -> None:
        for at in self._mounted:
            sh("umount", "-i", "-l", at)
        for tree in self._bare.values():
            sh("exportfs", "-u", f"*:{tree}")
        os.unlink("/tmp/exports.d/table.exports")
        self._service.take_over()
        for tree in (*self._bare.values(), *self._entries.values()):
            shutil.rmtree(tree)


@pytest.fixture(scope="module")
def exports(service: Service) -> Iterator[Exports]:
    make_accounts()
    made = Exports(service)
    yield made
    made.close()


@pytest.fixture(scope="module")
def through_bare() -> dict[tuple[str, str], Table]:
    """What came of the works through bare exports, by their options and the version: they are done once."""
    return {}


@pytest.mark.parametrize(("name", "version"), CELLS)
def test_all_works_as_through_an_export_of_the_bare_tree(
    name: str,
    version: str,
    exports: Exports,
    through_bare: dict[tuple[str, str], Table],
    user: Callable[..., User],
    record_property: Callable[[str, object], None],
) -> None:
    entry = TRIED[name]
    if (entry.bare, version) not in through_bare:
        tree = exports.bare(entry.bare)
        place = exports.mount(tree, version)
        places = {label: f"{place}/{version}/{label}" for label in CALLERS}
        through_bare[entry.bare, version] = all_works(places, f"{tree}/{version}", user)
    expected = through_bare[entry.bare, version]
    tree = exports.of(name)
    place = exports.mount(f"/srv/cloakfs/{mount_name(tree, '*')}", version)
    views = {label: f"@{caller.user}/" if "views" in entry.options else "" for label, caller in entry.callers.items()}
    places = {label: f"{place}/{view}{version}/{label}" for label, view in views.items()}
    found = all_works(places, f"{tree}/{version}", user, entry.offset)
    record_property(RESULTS, compared("knfsd", version, name, found, expected))
    check(entry, found, expected)
