"""What becomes of each mount of a service when its configuration has changed."""

from dataclasses import replace

import pytest

from cloakfs.config.errors import Location
from cloakfs.config.parse import parse_options
from cloakfs.nfs.plan import Mount, PlanChange, compare


def mount(name: str, options: str = "rw") -> Mount:
    return Mount(name, f"/srv/{name}", f"/data/{name}", "*", "", parse_options(options)[0], Location("x.exports", 1, 1))


def difference(old: list[Mount], new: list[Mount], dead: tuple[str, ...] = ()) -> dict[str, list[str]]:
    """What happens to which mounts, without what happens to none."""
    found = compare({m.name: m for m in old}, new, {m.name for m in old} - set(dead))
    assert found.changed == {m.path for m in (*found.added, *found.reloaded, *found.reread, *found.renewed)}
    named = {what: [m.name for m in getattr(found, what)] for what in PlanChange.__slots__}
    return {what: names for what, names in named.items() if names}


def test_mounts_that_come_and_go() -> None:
    assert difference([], [mount("a"), mount("b")]) == {"added": ["a", "b"]}
    assert difference([mount("a"), mount("b"), mount("c")], [mount("b")]) == {"removed": ["a", "c"]}
    assert difference([mount("a")], [mount("b"), mount("a")]) == {"added": ["b"]}


def test_what_moves_in_the_file_stays_as_it_is() -> None:
    moved = replace(mount("a"), location=Location("y.exports", 7, 1))
    assert difference([mount("a")], [moved]) == {}
    assert difference([mount("a")], [moved], dead=("a",)) == {}


@pytest.mark.parametrize(
    ("before", "after", "what"),
    [
        ("rw", "rw, cloak_list = uid +077 0 -1", ["reloaded"]),
        ("rw, all_squash", "rw, root_squash", ["renewed", "withdrawn"]),
        ("rw", "ro", ["renewed"]),
        ("rw", "rw, subtree_check", ["renewed", "withdrawn"]),
        ("rw", "rw, mp", ["renewed"]),
        ("rw, policy = x.py:P", "rw, policy = x.py:P", ["reread"]),
        ("rw, policy = x.py:P", "rw, policy = x.py:Q", ["reloaded"]),
        ("rw, policy = x.py:P", "rw", ["reloaded"]),
        ("rw", "rw", []),
    ],
)
def test_new_options(before: str, after: str, what: list[str]) -> None:
    assert difference([mount("a", before)], [mount("a", after)]) == {name: ["a"] for name in what}


def test_a_daemon_that_is_dead_cannot_reload() -> None:
    old, new = mount("a", "rw"), mount("a", "rw, cloak_list = uid +077 0 -1")
    assert difference([old], [new], dead=("a",)) == {"renewed": ["a"]}
    plugged = mount("a", "rw, policy = x.py:P")
    assert difference([plugged], [plugged], dead=("a",)) == {}


def test_a_mount_is_withdrawn_as_it_was() -> None:
    old, new = mount("a", "rw, all_squash"), mount("a", "rw")
    found = compare({"a": old}, [new], {"a"})
    assert (found.withdrawn, found.renewed) == ((old,), (new,))
