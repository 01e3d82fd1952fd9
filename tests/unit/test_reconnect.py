"""What a thread of the NFS server may ask, and for how long, while the kernel reconnects a handle on it."""

import time

import pytest

from cloakfs.filesystem.reconnect import HandleReconnection

CHILD, PARENT, OTHER = 7, 5, 9


@pytest.fixture
def begun() -> HandleReconnection:
    made = HandleReconnection()
    made.begin(100, CHILD, PARENT)
    return made


def test_the_steps_in_their_order(begun: HandleReconnection) -> None:
    assert begun.is_getattr_step(100, CHILD)
    assert begun.sought_child(100, PARENT) == CHILD
    assert not begun.finish(100, PARENT, b"name"), "it has not been found yet"
    begun.found(100, b"name")
    assert begun.is_getattr_step(100, PARENT)
    assert begun.finish(100, PARENT, b"name")
    # Once.
    assert not begun.finish(100, PARENT, b"name")
    assert not begun.is_getattr_step(100, CHILD)
    assert begun.sought_child(100, PARENT) is None


def test_for_these_directories_and_this_thread_alone(begun: HandleReconnection) -> None:
    begun.found(100, b"name")
    assert not begun.is_getattr_step(100, OTHER)
    assert begun.sought_child(100, CHILD) is None
    assert not begun.finish(100, OTHER, b"name")
    assert not begun.finish(100, PARENT, b"other")
    assert not begun.finish(100, PARENT, b"")
    assert not begun.is_getattr_step(101, CHILD)
    assert begun.sought_child(101, PARENT) is None
    assert not begun.finish(101, PARENT, b"name")


def test_anything_else_ends_it(begun: HandleReconnection) -> None:
    begun.end(100)
    assert not begun.is_getattr_step(100, CHILD)
    begun.end(100)


def test_it_does_not_last(begun: HandleReconnection, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 6)
    assert not begun.is_getattr_step(100, CHILD)
    begun.found(100, b"name")
    assert not begun.finish(100, PARENT, b"name")


def test_a_thread_that_cannot_be_told_from_others_may_nothing() -> None:
    made = HandleReconnection()
    made.begin(0, CHILD, PARENT)
    assert not made.is_getattr_step(0, CHILD)
