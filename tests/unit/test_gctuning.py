"""The garbage collector looks at what has been known for long only while no request waits."""

import gc
import math
import weakref
from collections.abc import Iterator

import pytest

from cloakfs.mount import gctuning


class _Circle:
    """Refers to itself, so that only the collector can free it."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(gctuning, "_last", -math.inf)
    before, often = list(gc.callbacks), gc.get_threshold()
    gctuning.freeze_survivors()
    yield
    gc.callbacks[:] = before
    gc.set_threshold(*often)
    gc.unfreeze()


def test_survivors_are_not_looked_at_again() -> None:
    lasting = [[number] for number in range(1000)]
    gc.collect()
    assert gc.get_freeze_count() >= len(lasting)
    looked_at = gc.get_objects()
    assert not any(one in looked_at for one in lasting[:3])


def test_no_collection_looks_at_many() -> None:
    """Everybody waits for it."""
    most, looked_at = 0, 0

    def count(phase: str, _: dict[str, int]) -> None:
        nonlocal most, looked_at
        if phase == "start":
            looked_at = len(gc.get_objects())  # all that are not set aside
            most = max(most, looked_at)

    gc.callbacks.append(count)
    lasting = [[number] for number in range(200_000)]
    assert 0 < most < 20_000
    assert len(lasting) == 200_000


def test_new_circles_are_found() -> None:
    gc.collect()
    circle = weakref.ref(_Circle())
    gc.collect()
    assert circle() is None


def test_old_circles_are_found_when_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    circle = _Circle()
    gc.collect()
    gone = weakref.ref(circle)
    del circle
    gc.collect()
    assert gone() is not None, "it was set aside"
    gctuning.collect_if_due()
    assert gone() is None
    assert gc.get_freeze_count() > 0, "what has survived is set aside again"
    again = _Circle()
    gc.collect()
    gone = weakref.ref(again)
    del again
    gctuning.collect_if_due()
    assert gone() is not None, "not again so soon"
    monkeypatch.setattr(gctuning, "_EVERY_SECONDS", 0.0)
    gctuning.collect_if_due()
    assert gone() is None
