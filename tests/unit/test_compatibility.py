"""What cloakfs takes from the memory of pyfuse3's objects is where it looks for it."""

import ctypes
import re
from pathlib import Path

import pyfuse3
import pytest
from pyfuse3 import EntryAttributes, InodeT, ReaddirToken

from cloakfs.fuse import compatibility
from cloakfs.fuse.attach import MountError


class Elsewhere(ctypes.Structure):
    """An entry with the same fields, which lie where a pointer leads to."""

    _fields_ = (("st_ino", ctypes.c_uint64), ("st_mode", ctypes.c_uint32))


class Small:
    """An entry that has no memory for fields at all."""

    __slots__ = ()
    st_ino = property(lambda _: 0, lambda _, value: None)


class Token:
    """As large as nothing that is known."""

    __slots__ = ("buf", "buf_start", "more", "req", "size")


class EntryThatOffers(Small):
    """As of pyfuse3 with the patch in contrib/pyfuse3."""

    __slots__ = ()
    nodeid = 0


class TokenThatOffers(Token):
    """The same."""

    __slots__ = ()
    ctx = None


def test_the_patches_are_for_the_version_that_is_installed() -> None:
    top = Path(__file__).parents[2]
    (version,) = re.findall(r"pyfuse3==(\S+)", (top / "contrib/pyfuse3/README.md").read_text())
    assert f"pyfuse3=={version}" in (top / "constraints.txt").read_text().splitlines()


def test_this_pyfuse3_is_supported() -> None:
    compatibility.check()


@pytest.mark.parametrize(
    ("token", "entry", "problem"),
    [
        (ReaddirToken, Elsewhere, "a listing could not leave out nodeids"),
        (ReaddirToken, Small, "a listing could not leave out nodeids"),
        (Token, EntryAttributes, "the caller of a listing could not be found out"),
    ],
)
def test_another_layout_is_refused(token: type, entry: type, problem: str) -> None:
    with pytest.raises(MountError) as caught:
        compatibility.check(token, entry)
    said = str(caught.value)
    assert said.startswith(f"pyfuse3 {pyfuse3.__version__} ({pyfuse3.__file__}): {problem}, because ")
    assert said.endswith("install one of these (pip install 'pyfuse3>=3.4,<3.6')")


def test_a_setattr_whose_flags_cannot_be_found_is_refused() -> None:
    with pytest.raises(MountError, match="times that are set to the present would be taken for times of the caller's"):
        compatibility.check(container_type=None)


def test_the_flags_of_a_setattr_stand_after_the_inode() -> None:
    container = pyfuse3._Container()  # type: ignore[attr-defined]
    words = (ctypes.c_uint64 * compatibility._CONTAINER_WORDS).from_address(id(container) + compatibility._WHERE)
    assert compatibility._flags_in(container, InodeT(7)) == 0  # it is about no inode at all
    words[6] = 7
    words[9] = 1 << 40 | compatibility._ATIME_NOW  # an int, and after it another field
    assert compatibility._flags_in(container, InodeT(7)) == compatibility._ATIME_NOW
    assert compatibility._flags_in(container, InodeT(8)) == 0
    words[6], words[-1] = 0, 7
    assert compatibility._flags_in(container, InodeT(7)) == 0  # there is no room for flags


def test_what_pyfuse3_offers_is_not_looked_for_in_its_memory() -> None:
    compatibility.check(TokenThatOffers, EntryThatOffers)


def test_an_entry_that_is_only_a_name_bears_no_nodeid() -> None:
    entry = compatibility.name_only(77, 4)
    assert compatibility._nodeid_of(entry).value == 0
    assert entry.st_mode == 0o040000
