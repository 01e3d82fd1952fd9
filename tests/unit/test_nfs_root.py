"""What the kernel's NFS server does with callers before they reach a mount."""

import pytest

from cloakfs.config.parse import parse_options
from cloakfs.nfs import root


@pytest.mark.parametrize(
    ("text", "is_checked"),
    [
        ("rw", False),
        ("no_subtree_check", False),
        ("subtree_check", True),
        ("subtree_check,views=7", True),
        ("subtree_check,no_subtree_check", False),
        ("no_subtree_check,subtree_check", True),
        ("subtree_check,all_squash", False),  # everybody is one caller anyway
        ("subtree_check,all_squash,range_map=uid 5 map 6", True),
    ],
)
def test_the_directories_above_are_checked_where_the_entry_says_so(text: str, is_checked: bool) -> None:
    assert root.checks_subtree(parse_options(text)[0]) is is_checked
