"""Through a fixed view and nfs-ganesha, its caller can do what it can do through a Ganesha that exports the bare tree.

The clients are the kernel's, as in test_work_table.py, and the servers machines of their own.
"""

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace

import pytest

from cloakfs.nfs.plan import mount_name
from tests.agents import User
from tests.mount.conftest import COMMAND
from tests.mount.loopfs import filesystem
from tests.nfs.knfsd.fixtures import sh
from tests.nfs.knfsd.ganeshahost import GaneshaHost
from tests.nfs.knfsd.worktable import (
    ANN,
    CALLERS,
    CHGRP,
    CLOAK,
    MAP,
    RESULTS,
    TEAM,
    Caller,
    Entry,
    Table,
    all_works,
    check,
    chosen,
    compared,
    make_accounts,
    prepare_all,
    squash,
)

BY_ACL = "ACL"
"""A bare Ganesha knows the mode bits alone, so that it lets this caller write only as a member of the group."""


def squashed(caller: Caller) -> str:
    """The same as `all_squash` for a bare Ganesha."""
    gid = TEAM if caller.in_team else caller.uid
    return f"All_Squash; Anonymous_Uid = {caller.uid}; Anonymous_Gid = {gid}"


def views(options: str = "") -> str:
    return "views = " + " ".join(caller.user for caller in CALLERS.values()) + options


ROOT_SQUASH = "Root_Squash"

ENTRIES = {
    "views": Entry(views(), ROOT_SQUASH),
    "views, cloak_list": Entry(views(f", {CLOAK}"), ROOT_SQUASH),
    "views, range_map, cloak_list": Entry(views(f", {MAP}, {CLOAK}"), ROOT_SQUASH),
    **{
        f"all_squash ({name})": Entry(
            f"{squash(caller)}, {CLOAK}", ROOT_SQUASH if name == BY_ACL else squashed(caller), only=name
        )
        for name, caller in CALLERS.items()
    },
}

SAMPLE = [("views, cloak_list", "4.2")]
CELLS, TRIED = chosen(ENTRIES, SAMPLE)

PER_CALLER = (CLOAK, "no_root_squash", "subtree_check", "no_client_cache", MAP)
"""Options of entries that Ganesha cannot serve unless they are fixed views."""


class Exports:
    """The exports, on two machines: of the bare trees, and of entries, which are added when they are wanted.

    The trees lie on ext4: Ganesha 6 exports no tmpfs.
    """

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._top = self._stack.enter_context(filesystem("ext4", "/tmp", "trees", mib=64))
        self._bare, self._cloak = GaneshaHost("bare", 1), GaneshaHost("cloak", 2)
        self._mounted: list[str] = []
        squashes = enumerate({entry.bare for entry in TRIED.values()})
        self._bare_trees = {squash: f"{self._top}/bare{n}" for n, squash in squashes}
        self._trees: dict[str, str] = {}
        for tree in self._bare_trees.values():
            self._fill(tree, CALLERS)
        self._bare.serve_bare({tree: squash for squash, tree in self._bare_trees.items()})
        os.makedirs("/tmp/ganesha.d")

    @staticmethod
    def _fill(tree: str, callers: dict[str, Caller]) -> None:
        prepare_all(tree, {version for _, version in CELLS}, callers)

    def mount_bare(self, squash: str, version: str) -> tuple[str, str]:
        """Return the tree that is exported as it is, and where it is mounted."""
        tree = self._bare_trees[squash]
        return tree, self._mount(self._bare, tree, version)

    def mount(self, name: str, version: str) -> tuple[str, dict[str, str]]:
        """Mount the views of an entry; return its tree, and where the callers' directories are."""
        if name not in self._trees:
            self._serve(name)
        tree = self._trees[name]
        path, places = f"/{mount_name(tree, '*')}", {}
        for label, caller in TRIED[name].callers.items():
            view = f"{path}/@{caller.user}" if "views" in TRIED[name].options else path
            places[label] = f"{self._mount(self._cloak, view, version)}/{version}/{label}"
        return tree, places

    def _serve(self, name: str) -> None:
        is_up = bool(self._trees)
        tree = self._trees[name] = f"{self._top}/ganesha{len(self._trees)}"
        self._fill(tree, TRIED[name].callers)
        with open("/tmp/ganesha.d/x.exports", "a", encoding="ascii") as file:
            file.write(f"{tree} *(insecure,rw,{TRIED[name].options})\n")
        how = ["reload"] if is_up else ["up", "/tmp/ganesha.d", "--server", "ganesha", "--protocols", "3,4"]
        self._cloak.sh(*COMMAND, "export", *how)

    def _mount(self, host: GaneshaHost, path: str, version: str) -> str:
        at = f"/client/{host.name}/{version}{path}"
        host.mount(path, version, at, "soft", "timeo=100")
        self._mounted.append(at)
        return at

    def close(self) -> None:
        for at in self._mounted:
            sh("umount", "-i", "-l", at)
        self._cloak.sh(*COMMAND, "export", "down")
        log = self._cloak.sh("cat", "/run/cloakfs/export-default.log")
        self._cloak.close()
        self._bare.close()
        self._stack.close()
        assert "Traceback" not in log, log


@pytest.fixture(scope="module")
def exports() -> Iterator[Exports]:
    make_accounts()
    made = Exports()
    yield made
    made.close()


@pytest.fixture(scope="module")
def expected() -> dict[tuple[str, str], Table]:
    """What comes of the works without cloakfs, by squash and version: they are done once."""
    return {}


def without(exports: Exports, squash: str, version: str, user: Callable[..., User]) -> Table:
    """What comes of the works through a bare Ganesha."""
    tree, place = exports.mount_bare(squash, version)
    places = {name: f"{place}/{version}/{name}" for name in CALLERS}
    return all_works(places, f"{tree}/{version}", user, in_team=[BY_ACL])


def unknown_group(found: Table) -> Table:
    """Return what comes of `chgrp` to a group that the client names where all are squashed.

    It is no group of the server, for any caller: EINVAL, as docs/exports.md says. A bare Ganesha lets the owner do it.
    """
    return {
        key: replace(outcome, error="EINVAL", owner=(ANN, TEAM)) for key, outcome in found.items() if key[0] == CHGRP
    }


@pytest.mark.parametrize(("name", "version"), CELLS)
def test_all_works_as_through_a_bare_ganesha(
    name: str,
    version: str,
    exports: Exports,
    expected: dict[tuple[str, str], Table],
    user: Callable[..., User],
    record_property: Callable[[str, object], None],
) -> None:
    entry = TRIED[name]
    if (entry.bare, version) not in expected:
        expected[entry.bare, version] = without(exports, entry.bare, version, user)
    bare = expected[entry.bare, version]
    tree, places = exports.mount(name, version)
    found = all_works(places, f"{tree}/{version}", user, entry.offset)
    record_property(RESULTS, compared("Ganesha", version, name, found, bare))
    if "all_squash" in name:
        bare = bare | unknown_group(found)
    check(entry, found, bare)


def test_entries_with_a_view_for_each_caller_are_refused() -> None:
    with open("/tmp/refused.exports", "w", encoding="ascii") as file:
        for number, options in enumerate(PER_CALLER):
            file.write(f"/tree{number} *(rw,{options})\n")
    done = subprocess.run(
        [*COMMAND, "export", "plan", "/tmp/refused.exports", "--server", "ganesha"],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2, done
    assert done.stderr.count("cannot give every caller a view of its own") == len(PER_CALLER), done
