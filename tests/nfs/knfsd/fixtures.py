"""Fixtures of the tests that run in the guest."""

import pytest

__all__ = ["x"]


@pytest.fixture
def x() -> int:
    return 3
