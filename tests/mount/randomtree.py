"""Trees whose objects have random owners, groups and modes."""

import os
import random
import struct
from collections.abc import Sequence

_NONE = 2**32 - 1


def make_tree(
    top: str,
    chance: random.Random,
    *,
    files: int,
    owners: Sequence[tuple[int, int]],
    modes: Sequence[int],
    named_groups: Sequence[int],
) -> list[str]:
    """Make so many files and directories, some in others, some with an ACL; return their paths."""
    directories, paths = [""], []
    for number in range(files):
        path = os.path.join(chance.choice(directories), f"{number:02}")
        paths.append(path)
        if chance.random() < 0.4 and path.count("/") < 4:
            os.mkdir(os.path.join(top, path))
            directories.append(path)
        else:
            with open(os.path.join(top, path), "wb"):
                pass
    for path in paths:
        real = os.path.join(top, path)
        os.chown(real, *chance.choice(owners))
        mode = chance.choice(modes) if chance.random() < 0.8 else chance.randrange(0o10000)
        # Most directories can be searched: else no caller gets far.
        os.chmod(real, mode | 0o111 if path in directories and chance.random() < 0.6 else mode)
        if chance.random() < 0.2:
            os.setxattr(real, "system.posix_acl_access", _acl(chance, named_groups))
    return paths


def _acl(chance: random.Random, named_groups: Sequence[int]) -> bytes:
    """Return an ACL that names a user and these groups (linux/posix_acl_xattr.h)."""
    named = [(8, group) for group in named_groups]
    entries = [(1, _NONE), (2, chance.choice([1001, 1002])), (4, _NONE), *named, (0x10, _NONE), (0x20, _NONE)]
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", tag, chance.randrange(8), of) for tag, of in entries)
