"""The last known names of objects, whatever happens to names and in whatever order."""

import time
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from cloakfs.tree import registry
from cloakfs.tree.objects import Directory, Object

FILESYSTEM: Any = None
NAMES = [b"a", b"b"]
FILES, DIRECTORIES = 4, 2

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["move", "link", "leave", "unlist", "drop"]),
        st.integers(0, FILES - 1),
        st.integers(0, DIRECTORIES - 1),
        st.sampled_from(NAMES),
    ),
    max_size=40,
)


def names_of(obj: Object) -> list[tuple[Object, bytes]]:
    place: list[tuple[Object, bytes]] = [] if obj.parent is None else [(obj.parent, obj.name)]
    return place + list(obj.others)


@given(STEPS)
def test_every_name_is_found_and_nothing_else(steps: list[tuple[str, int, int, bytes]]) -> None:
    files = [Object(number, b"", FILESYSTEM) for number in range(FILES)]
    directories = [Directory(100 + number, b"", FILESYSTEM) for number in range(DIRECTORIES)]
    for what, which, where, name in steps:
        obj, directory = files[which], directories[where]
        if what == "move":
            registry.place(obj, directory, name)
        elif what == "link" and obj.parent is not None:  # as `Registry.found_again`
            registry.add_name(obj)
            registry.drop_name(obj, directory, name)
            registry.place(obj, directory, name)
        elif what == "leave":
            registry.leave(obj)
        elif what == "unlist":
            registry.unlist(directory, name)
        elif what == "drop":  # as `Registry.drop_if_unused`
            others, obj.others = obj.others, []
            for above, other in others:
                registry.end_name(obj, above, other)
            registry.leave(obj)
        for at in directories:
            have = [obj for obj in files for parent, _ in names_of(obj) if parent is at]
            assert at.pins == len(have)
            assert set(registry.within(at)) == set(have)
            for known in NAMES:
                here = {obj for obj in files if obj.parent is at and obj.name == known}
                found = registry.known_entry(at, known)
                assert (found in here) if here else found is None


def test_very_many_changed_names_make_nobody_wait() -> None:
    """All have the same directory: half of them another name there, half of them the same."""
    parent, other = Directory(1, b"", FILESYSTEM), Directory(2, b"", FILESYSTEM)
    for number in range(100_000):
        obj = Object(number + 3, b"", FILESYSTEM)
        registry.place(obj, parent, b"same" if number % 2 else b"%d" % number)
        if number % 4 == 1:
            registry.add_name(obj)
            registry.place(obj, other, b"%d" % number)
        else:
            registry.unlist(parent, obj.name)
    began = time.thread_time()
    for number in range(1000):
        assert registry.known_entry(parent, b"nothing") is None
        registry.known_entry(parent, b"same")
        assert registry.known_entry(parent, b"%d" % (2 * number)) is not None
    assert time.thread_time() - began < 0.5  # a thousand times as long, if all were looked at
