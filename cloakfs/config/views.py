"""The items of `views=`: which identities get a fixed view."""

import re

from ..mapping import MAX_ID
from .values import ID, are_ids

EXPECTED_VIEW = "a user name, uid, uid:gid, uid:gid:gid+gid or low-high"
_VIEW_RANGE = re.compile(rf"({ID})-({ID})")
_VIEW_IDS = re.compile(rf"{ID}(?::{ID}(?::{ID}(?:\+{ID})*)?)?")
_USER = re.compile(r"[A-Za-z_][A-Za-z0-9_.@-]*\$?")


def is_view(text: str) -> bool:
    """Is this an item of `views=`?"""
    ends = _VIEW_RANGE.fullmatch(text)
    if ends:
        return int(ends[1]) <= int(ends[2]) <= MAX_ID
    if _VIEW_IDS.fullmatch(text):
        return are_ids(text)
    return _USER.fullmatch(text) is not None
