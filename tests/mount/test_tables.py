"""The papers' tables through a real mount by real uids."""

import csv
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.agents import User, read
from tests.mount.conftest import Mount

DATA = Path(__file__).parent.parent / "data"
UIDS = {"joe": 3001, "ezk": 3002}
GIDS = {"src": 3101, "fac": 3102}
GROUPS = {"joe": ["src"], "ezk": ["src", "fac"]}

FILES = list(csv.DictReader((DATA / "table1.csv").read_text().splitlines()))
CELLS = list(csv.DictReader((DATA / "table2.csv").read_text().splitlines()))
MASKS = list(dict.fromkeys(cell["mask"] for cell in CELLS))


# Where the scanned table contradicts the paper's own algorithm, which is what counts:
# mask, caller, file, the algorithm's cell, the scan's.
KNOWN_DIFFERENCES = {
    ("+070", "joe", "E8", "-", "A"),
    ("-007", "ezk", "J2", "A", "v"),
    ("-007", "joe", "E5", "A", "v"),
    ("-007", "joe", "E9", "v", "-"),
    ("-070", "joe", "E6", "v", "-"),
    ("-070", "joe", "E8", "A", "-"),
    ("-070", "joe", "E9", "v", "-"),
    ("-077", "joe", "E6", "v", "-"),
    ("-077", "joe", "E9", "v", "-"),
    ("-077", "joe", "E10", "v", "-"),
    ("-004", "joe", "E7", "-", "A"),
    ("-004", "joe", "E8", "-", "A"),
}


def test_the_tables_are_complete() -> None:
    assert len(FILES) == 10
    assert len(CELLS) == 110
    differing = {
        (cell["mask"], cell["caller"], cell["file"], cell["algorithm"], cell["scanned"])
        for cell in CELLS
        if cell["algorithm"] != cell["scanned"]
    }
    assert differing == KNOWN_DIFFERENCES


def look(path: str) -> str:
    """What the one who calls this can do with a file: "A", "v" or "-" [SZ Table 2]."""
    try:
        os.lstat(path)
    except FileNotFoundError:
        return "-"
    return "A" if any(os.access(path, mode) for mode in (os.R_OK, os.W_OK, os.X_OK)) else "v"


@pytest.mark.parametrize("mask", MASKS)
def test_table_2(mask: str, tree: str, mount: Callable[..., Mount], user: Callable[..., User]) -> None:
    for file in FILES:
        path = os.path.join(tree, file["file"])
        Path(path).write_text("")
        os.chown(path, UIDS[file["user"]], GIDS[file["group"]])
        os.chmod(path, int(file["mode"], 8))
    m = mount("-o", f"range_map=uid 0 -1 map 0 gid 0 -1 map 0,cloak_list=uid {mask} 3001 3002")
    for name, uid in UIDS.items():
        caller = user(uid, GIDS[GROUPS[name][0]], [GIDS[group] for group in GROUPS[name]])
        cells = {cell["file"]: cell for cell in CELLS if cell["mask"] == mask and cell["caller"] == name}
        listed = caller.do(os.listdir, m.path)
        for path, cell in cells.items():
            seen = caller.do(look, m.at(path))
            assert seen == cell["algorithm"], (mask, name, path)
            assert (path in listed) == (seen != "-"), (mask, name, path)


FIGURE_1 = "range_map=uid 100 map 10 uid 400 500 map 200 uid 800 999 squash 517 gid 0 -1 map 0,anonuid=65534"
FORWARD = {
    **{100: 10, 400: 200, 450: 250, 500: 300, 800: 517, 999: 517},
    **dict.fromkeys((0, 99, 101, 501, 1000), 65534),
}
REVERSE = {10: 100, 200: 400, 300: 500, 517: 800, 9: 65534, 11: 65534, 199: 65534, 301: 65534, 518: 65534, 0: 65534}


def test_figure_1(tree: str, mount: Callable[..., Mount], user: Callable[..., User]) -> None:
    for server in REVERSE:
        path = os.path.join(tree, f"owned-by-{server}")
        Path(path).write_text("")
        os.chown(path, server, 0)
    m = mount("-o", FIGURE_1)
    for client, server in FORWARD.items():
        caller = user(client, 7)
        caller.do(os.mkdir, m.at(f"made-by-{client}"))
        assert os.stat(os.path.join(tree, f"made-by-{client}")).st_uid == server, client
    for server, client in REVERSE.items():
        assert os.stat(m.at(f"owned-by-{server}")).st_uid == client, server
    assert read(m.at("owned-by-10")) == b""
