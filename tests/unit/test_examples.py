from pathlib import Path

import pytest

from cloakfs.cloak import CloakList
from cloakfs.config.options import Options
from cloakfs.config.parse import parse
from cloakfs.config.render import format_exports
from cloakfs.mapping import MAX_ID, IdMap, Kind

FOLDER = Path(__file__).parents[2] / "examples" / "exports.d"
EXAMPLES = sorted(FOLDER.glob("*.exports"))

# The check has something to say about this one of the paper's, which maps uids and leaves gids as they are.
WARNED = {"paper-figure-1.exports"}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_every_example_parses_and_prints_and_says_for_whom_it_is(path: Path) -> None:
    text = path.read_text("utf-8")
    exports, warnings = parse(text, path.name)
    assert exports
    assert bool(warnings) == (path.name in WARNED)
    assert parse(format_exports(exports))[0] == exports
    assert "# For " in text


def paper(name: str) -> Options:
    """The options of an example printed in the paper; all of them export one path to one domain."""
    (export,), _ = parse((FOLDER / f"paper-{name}.exports").read_text("utf-8"))
    assert (export.path, export.client, export.options.read_only) == ("/home", "*.example.com", False)
    return export.options


def table(name: str, kind: Kind) -> IdMap:
    return IdMap([d for d in paper(name).range_map if d.kind == kind])


def test_the_papers_range_map() -> None:
    uids, gids = table("range-map", "uid"), table("range-map", "gid")
    # "client UIDs 100-250 will be mapped to server UIDs 12314-12464"
    assert [uids.forward(id_) for id_ in (99, 100, 175, 250, 251)] == [65534, 12314, 12389, 12464, 65534]
    assert [uids.reverse(id_) for id_ in (12313, 12314, 12464, 12465)] == [65534, 100, 250, 65534]
    # "client GIDs 100-200 be squashed to server GID 6000"
    assert [gids.forward(id_) for id_ in (99, 100, 150, 200, 201)] == [65534, 6000, 6000, 6000, 65534]
    assert gids.reverse(6000) == 100


@pytest.mark.parametrize("kind", ["uid", "gid"])
def test_the_papers_root_squash(kind: Kind) -> None:
    ids = table("root-squash", kind)
    # The others stay who they are, and what is nobody's is not shown as root's.
    assert [ids.forward(id_) for id_ in (0, 1, MAX_ID)] == [65534, 1, MAX_ID]
    assert [ids.reverse(id_) for id_ in (65534, 0, 1)] == [65534, 0, 1]


@pytest.mark.parametrize("kind", ["uid", "gid"])
def test_the_papers_all_squash(kind: Kind) -> None:
    ids = table("all-squash", kind)
    assert {ids.forward(id_) for id_ in (0, 1, 65534, MAX_ID)} == {65534}
    definition = ids.definition_of(MAX_ID)
    assert definition is not None
    assert str(definition) == f"{kind} 0 -1 squash -2"


def test_the_papers_cloak_list() -> None:
    cloaks = CloakList(paper("cloak-list").cloak_list)
    # "files on the server owned by UIDs 500-1000 cannot be seen or accessed by any user other than the owner"
    assert cloaks.visible(0o777, 500, 1, 500, {1})
    assert not cloaks.visible(0o777, 1000, 1, 1001, {1})
    assert cloaks.visible(0, 499, 1, 7, {1})
    # "only visible if there is world access to them, or if there is group access to them and the user listing
    # the file belongs to the group of the file"
    assert cloaks.visible(0o604, 7, 100, 8, set())
    assert cloaks.visible(0o640, 7, 200, 8, {200})
    assert not cloaks.visible(0o640, 7, 200, 8, {100})
    assert not cloaks.visible(0o600, 7, 100, 8, {100})


def test_the_papers_figure_1() -> None:
    uids = table("figure-1", "uid")
    clients = [100, 400, 450, 500, 800, 999, 0, 99, 101, 501, 1000]
    assert [uids.forward(id_) for id_ in clients] == [10, 200, 250, 300, 517, 517, *[65534] * 5]
    assert [uids.reverse(id_) for id_ in (10, 200, 300, 517, 11, 518)] == [100, 400, 500, 800, 65534, 65534]
    # Groups have no definitions in the figure.
    assert not [d for d in paper("figure-1").range_map if d.kind == "gid"]


def test_each_department_gets_a_block_of_its_own() -> None:
    exports, _ = parse((FOLDER / "two-departments.exports").read_text("utf-8"))
    servers = [IdMap([d for d in e.options.range_map if d.kind == "uid"]).forward(1234) for e in exports]
    assert servers == [20234, 30234]
    physics, chemistry = (CloakList(e.options.cloak_list) for e in exports)
    assert not physics.visible(0o600, 30234, 30000, 20234, {20000})
    assert physics.visible(0o600, 20235, 20000, 20234, {20000})
    assert not chemistry.visible(0o700, 20234, 20000, 30234, {30000})
