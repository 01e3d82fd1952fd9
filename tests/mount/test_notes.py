"""What is noted for those who trace of an object that is hidden, at moments that no request can be made to hit.

There is no mount here; `test_trace.py` looks at what requests note.
"""

import os
from collections.abc import Callable
from typing import Any

import pytest

from cloakfs import linux
from cloakfs.identity import Caller, ServerId
from cloakfs.tree.actor import Actor, actor
from cloakfs.tree.nodes import Nodes
from cloakfs.tree.notes import Hidden, Notes, noting
from cloakfs.tree.objects import Object
from cloakfs.tree.visibility import Visibility, is_entry_visible
from cloakfs.view import View
from tests.mount.test_visibility import OTHER, OWNER, POLICY, go_down, make_visibility, visibility

__all__ = ["make_visibility", "visibility"]  # fixtures

HIDES = "uid +007 1 9999"
LOWER = "hidden by the lower mount, /lower"


@pytest.fixture
def other() -> Actor:
    uid = ServerId(OTHER)
    return actor(Caller(uid, uid, frozenset({uid})))


def noted(call: Callable[[], object]) -> list[Hidden]:
    notes = Notes()
    token = noting.set(notes)
    try:
        call()
    finally:
        noting.reset(token)
    return notes.hidden


class Lower:
    """A lower mount that has, and shows, only some objects."""

    path = "/lower"

    def __init__(self, has: list[Object], shows: list[Object]) -> None:
        self._has = has
        self._shows = shows

    def contains(self, info: os.stat_result) -> bool:
        return any(obj.inode == (info.st_dev, info.st_ino) for obj in self._has)

    def is_visible_to(self, _who: Actor, _fd: int, info: os.stat_result) -> bool:
        return any(obj.inode == (info.st_dev, info.st_ino) for obj in self._shows)


def test_what_was_judged_by_its_name_is_noted_once(visibility: Visibility, nodes: Nodes, other: Actor) -> None:
    _, obj = go_down(visibility, nodes, 1)
    fd = nodes.descriptors.fd(obj)
    view = View(POLICY)

    def by_name() -> None:
        assert not is_entry_visible(view, other, obj.name, linux.fstat(fd), fd)

    def by_name_and_then_itself() -> None:
        by_name()
        visibility.note_hidden(view, other, obj)

    for call, of in ((by_name, None), (by_name_and_then_itself, obj)):
        (hidden,) = noted(call)
        assert (hidden.name, hidden.obj) == (obj.name, of)
        assert HIDES in hidden.reason


def test_the_first_one_that_is_hidden_is_the_reason(
    visibility: Visibility, nodes: Nodes, tree: str, other: Actor
) -> None:
    _, above, obj = go_down(visibility, nodes, 2)
    os.chown(tree, OWNER, OWNER)
    os.chmod(tree, 0o700)  # this mount's own policy shows the root to all callers

    def reasons() -> list[Object | None]:
        return [hidden.obj for hidden in noted(lambda: visibility.note_hidden(View(POLICY), other, obj))]

    assert reasons() == [obj]
    os.chmod(f"{tree}/0/1", 0o755)
    assert reasons() == [above]
    os.chmod(f"{tree}/0", 0o755)
    assert reasons() == []


def test_of_what_has_left_the_tree_nothing_is_noted(
    visibility: Visibility, nodes: Nodes, base: str, tree: str, other: Actor
) -> None:
    _, _, obj = go_down(visibility, nodes, 2)
    os.chmod(f"{tree}/0/1", 0o755)
    os.rename(f"{tree}/0/1", f"{base}/outside")
    assert not visibility.is_visible(View(POLICY), other, obj, linux.fstat(nodes.descriptors.fd(obj)))
    assert obj.parent is None
    assert noted(lambda: visibility.note_hidden(View(POLICY), other, obj)) == []
    os.rename(f"{base}/outside", f"{tree}/0/1")


def test_the_lower_mount_is_the_reason_where_it_hides(
    visibility: Visibility, nodes: Nodes, tree: str, other: Actor
) -> None:
    """It judges the directories above together with the object."""
    _, above, obj = go_down(visibility, nodes, 2)

    def reasons(has: list[Object], shows: list[Object]) -> list[tuple[Object | None, bool]]:
        lower: Any = Lower(has, shows)
        found = noted(lambda: visibility.note_hidden(View(POLICY, lower=lower), other, obj))
        return [(hidden.obj, hidden.reason == LOWER) for hidden in found]

    assert reasons([obj, above], []) == [(obj, True)]
    assert reasons([obj, above], [obj]) == [(obj, False)]
    assert reasons([], []) == [(obj, False)]
    os.chmod(f"{tree}/0/1", 0o755)
    assert reasons([obj, above], []) == [(obj, True)]
    assert reasons([obj, above], [obj]) == [(above, False)]
    assert reasons([above], []) == [(above, True)]
    os.chmod(f"{tree}/0", 0o755)
    assert reasons([obj, above], [obj]) == []
    assert reasons([above], []) == [(above, True)]
    assert reasons([], []) == []
