"""Where the kernel checks permissions, it caches ACLs; it gives them to all callers that have the object open.

So does a kernel without the fix of CVE-2026-68149 in every mount. With any other, the tests without
`default_permissions` cannot fail.
"""

import errno
import os
import stat
import struct
import subprocess
from collections.abc import Callable

import pytest

from tests.agents import User
from tests.mount.conftest import Mount, told
from tests.mount.test_caching import OTHER, OWNER, STRANGER, put, requests
from tests.waiting import wait_until

MakeMount = Callable[..., Mount]
MakeUser = Callable[..., User]

ACCESS = "system.posix_acl_access"
CLOAKED = "rw,no_root_squash,cloak_list=uid +007 3000 3999"
"""Files of these owners are seen by those to whom the mode bits of all others give something."""

CHECKED = f"{CLOAKED},default_permissions"

NOBODY = 0xFFFFFFFF


def acl(reader: int) -> bytes:
    """For its owner and this user alone."""
    entries = ((1, 7, NOBODY), (2, 5, reader), (4, 0, NOBODY), (0x10, 5, NOBODY), (0x20, 0, NOBODY))
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)


@pytest.mark.parametrize("options", [CLOAKED, CHECKED], ids=["", "default_permissions"])
@pytest.mark.parametrize("behind", [False, True], ids=["through the mount", "behind the mount"])
@pytest.mark.parametrize("kind", ["file", "directory", "where it stands"])
@pytest.mark.parametrize("has_acl", [True, False], ids=["an ACL", "no ACL"])
def test_of_what_is_hidden_now(
    has_acl: bool, kind: str, behind: bool, options: str, tree: str, mount: MakeMount, user: MakeUser
) -> None:
    """Somebody has opened it while it was public. Its owner looks at the ACL when it is not any more."""
    put(os.path.join(tree, "all"), OWNER, stat.S_IFDIR | 0o755)
    real = put(os.path.join(tree, "all/it"), OWNER, 0o644 if kind == "file" else stat.S_IFDIR | 0o755)
    m, owner, other = mount("-o", options), user(OWNER), user(OTHER)
    at = m.at("all/it")
    if kind == "where it stands":
        other.do(os.chdir, at)
        mine: int | str = "."
    else:
        mine = other.do(os.open, at, os.O_RDONLY)
    if behind:
        if has_acl:
            os.setxattr(real, ACCESS, acl(STRANGER))
        os.chmod(real, 0o750)
        told(m.path)
    else:
        if has_acl:
            owner.do(os.setxattr, at, ACCESS, acl(STRANGER))
        owner.do(os.chmod, at, 0o750)
    assert other.error(os.stat, at) == errno.ENOENT
    assert other.error(os.getxattr, mine, ACCESS) == errno.ESTALE
    for _ in range(3):
        if has_acl:
            assert owner.do(os.getxattr, at, ACCESS) == os.getxattr(real, ACCESS)
        else:
            assert owner.error(os.getxattr, at, ACCESS) == errno.ENODATA
        assert other.error(os.getxattr, mine, ACCESS) == errno.ESTALE


@pytest.mark.usefixtures("figures_at_once")
@pytest.mark.parametrize("where", ["home", "all"])
def test_with_the_attributes_they_are_kept_and_forgotten(
    where: str, tree: str, mount: MakeMount, user: MakeUser
) -> None:
    put(os.path.join(tree, where), OWNER, stat.S_IFDIR | (0o755 if where == "all" else 0o700))
    real = put(os.path.join(tree, where, "file"), OWNER, 0o644)
    m, owner = mount("-o", CHECKED), user(OWNER)
    owner.do(os.chdir, m.at(where))
    fd = owner.do(os.open, "file", os.O_RDONLY)
    for reader in (None, STRANGER, OTHER):
        if reader is not None:
            os.setxattr(real, ACCESS, acl(reader))
            os.chmod(real, 0o655)
            told(m.path)

        def is_kept(reader: int | None = reader) -> bool:
            before = requests(m)
            for _ in range(20):
                owner.do(os.stat, "file")
                if reader is None:
                    assert owner.error(os.getxattr, fd, ACCESS) == errno.ENODATA
                else:
                    assert owner.do(os.getxattr, fd, ACCESS) == os.getxattr(real, ACCESS)
            return (requests(m) - before)["getxattr"] == 0

        wait_until(is_kept)  # it is invalidated once more, some time after the daemon heard of it
    os.removexattr(real, ACCESS)
    told(m.path)
    assert owner.error(os.getxattr, fd, ACCESS) == errno.ENODATA


def test_a_permission_that_an_acl_gives(tree: str, mount: MakeMount, user: MakeUser) -> None:
    """What the kernel does not keep it asks for."""
    put(os.path.join(tree, "shared"), 4001, stat.S_IFDIR | 0o700)
    real = put(os.path.join(tree, "shared/file"), 4001, 0o644)
    os.setxattr(os.path.dirname(real), ACCESS, acl(OTHER))
    m, other, stranger = mount("-o", CHECKED), user(OTHER), user(STRANGER)
    for _ in range(3):
        assert other.do(os.stat, m.at("shared/file")).st_uid == 4001
        assert stranger.error(os.stat, m.at("shared/file")) == errno.EACCES
    subprocess.run(["setfacl", "-m", f"u:{STRANGER}:rx", os.path.dirname(real)], check=True)
    told(m.path)
    assert stranger.do(os.stat, m.at("shared/file")).st_uid == 4001
