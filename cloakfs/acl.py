"""Translates ids inside POSIX ACL extended attributes (the kernel's `struct posix_acl_xattr_entry`, acl(5))."""

import struct
from collections.abc import Callable
from typing import TypeVar

XATTRS = frozenset({b"system.posix_acl_access", b"system.posix_acl_default"})

_VERSION = struct.pack("<I", 2)
_ENTRY = struct.Struct("<HHI")
_USER, _GROUP = 0x02, 0x08

_From = TypeVar("_From")
_To = TypeVar("_To", bound=int)


def translate(
    value: bytes,
    uid: Callable[[_From], _To | None],
    gid: Callable[[_From], _To | None],
    *,
    distinct: bool = False,
    stranger: _To | None = None,
) -> bytes:
    """Return `value` with the ids of its named users and groups passed through `uid` and `gid`.

    Args:
        value: the extended attribute as the kernel returns it.
        uid: maps the id of a named user; returns None if it has no counterpart.
        gid: the same for a named group.
        distinct: refuse two named entries that become the same (on write, the kernel would use only the first).
        stranger: the id for a named entry without a counterpart, which gets no permissions; with None, refuse it.

    Raises:
        ValueError: `value` is not a version 2 ACL, or an id has no counterpart, or two entries became the same.
    """
    if value[:4] != _VERSION or (len(value) - 4) % _ENTRY.size:
        raise ValueError("not a POSIX ACL of version 2")
    entries = []
    for tag, granted, entry_id in _ENTRY.iter_unpack(value[4:]):
        perm = granted
        mapped = entry_id if tag not in (_USER, _GROUP) else uid(entry_id) if tag == _USER else gid(entry_id)
        if mapped is None:
            if stranger is None:
                raise ValueError(f"{'user' if tag == _USER else 'group'} {entry_id} has no counterpart")
            mapped, perm = stranger, 0
        entries.append((tag, perm, mapped))
    named = [(tag, entry_id) for tag, _, entry_id in entries if tag in (_USER, _GROUP)]
    if distinct and len(set(named)) < len(named):
        raise ValueError("two entries are mapped to the same id on the server")
    # acl(5) requires the order of the tags' numbers, and of the ids of named entries, which mapping may have changed.
    entries.sort(key=lambda entry: (entry[0], entry[2]))
    return _VERSION + b"".join(_ENTRY.pack(*entry) for entry in entries)


def named(value: bytes) -> tuple[frozenset[int], frozenset[int]]:
    """Return the ids of the users and of the groups that an ACL, as the kernel returns it, names."""
    found: dict[int, set[int]] = {_USER: set(), _GROUP: set()}
    for tag, _, entry_id in _ENTRY.iter_unpack(value[4:]):
        if tag in found:
            found[tag].add(entry_id)
    return frozenset(found[_USER]), frozenset(found[_GROUP])
