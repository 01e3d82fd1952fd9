"""Which versions are known, whatever is found in their place."""

import pytest

from cloakfs.state.versions import is_known, version_problem


@pytest.mark.parametrize("found", [None, 0, 1, 2])
def test_none_and_whatever_was_before_are_known(found: object) -> None:
    assert is_known(found, 2)


@pytest.mark.parametrize("found", [3, -1, True, 1.0, "1", [], {}])
def test_what_is_newer_or_no_version_is_not(found: object) -> None:
    assert not is_known(found, 2)


def test_a_problem_is_one_line_with_place_value_and_hint() -> None:
    assert (
        version_problem("/some/file", "x\n", 2, "go away")
        == "/some/file: version 'x\\n' is not known to this cloakfs, which uses 2; go away"
    )
