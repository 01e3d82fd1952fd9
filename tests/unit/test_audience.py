"""Who may be told of a directory while the kernel remembers names in it."""

from typing import Any

import pytest

from cloakfs.filesystem.audience import Audiences
from cloakfs.tree.objects import ALL, NOBODY, Object

NOTHING: Any = None  # these questions are about the object alone


@pytest.mark.parametrize(
    ("audience", "hearer", "is_ready"),
    [(5, 5, True), (5, 6, False), (5, ALL, False), (5, NOBODY, True), (ALL, 5, False), (ALL, ALL, False)],
)
def test_only_its_audience_is_told_before_the_names_are_forgotten(audience: int, hearer: int, is_ready: bool) -> None:
    """With an audience of all, they are just being forgotten."""
    directory = Object(2, b"handle", NOTHING)
    directory.audience = audience
    directory.remembers_names = True
    audiences = Audiences(NOTHING, NOTHING)
    assert audiences.is_ready(0, directory, hearer) is is_ready
    assert audiences.is_remembered_for_others(0, directory, hearer) is not is_ready
