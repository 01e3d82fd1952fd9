"""Computed numbers: each leads back to what it was computed from, and none says anything of another."""

import contextlib
import itertools
import struct
import tempfile

import hypothesis.strategies as st
import pytest
from hypothesis import given

from cloakfs.tree import index as index_module
from cloakfs.tree.computed import COMPUTED, ComputedNumbers
from cloakfs.tree.filesystems import MountedFilesystem
from cloakfs.tree.index import Index
from cloakfs.tree.permutation import BITS, Permutation

SECRETS = st.binary(min_size=32, max_size=32)
PREFIX = b"\1\0\0\0"


@given(SECRETS, st.lists(st.integers(0, (1 << BITS) - 1), unique=True, max_size=50))
def test_each_number_is_shown_as_one_of_its_own(secret: bytes, numbers: list[int]) -> None:
    permutation = Permutation(secret)
    shown = [permutation.shown(number) for number in numbers]
    assert len(set(shown)) == len(numbers)
    assert all(0 <= number < 1 << BITS for number in shown)
    assert [permutation.real(number) for number in shown] == numbers


def test_neighbours_are_not_shown_as_neighbours() -> None:
    permutation = Permutation(bytes(32))
    shown = [permutation.shown(number) for number in range(1000)]
    assert min(abs(one - other) for one, other in itertools.pairwise(shown)) > 1 << 20
    assert {number & 1 for number in shown} == {0, 1}
    assert Permutation(bytes(31) + b"\1").shown(1) != shown[1]


def ext4(inode: int, generation: int, mount: bytes = PREFIX) -> bytes:
    return mount + struct.pack("=III", 1, inode, generation)


def btrfs(inode: int, generation: int, volume: int = 5) -> bytes:
    return PREFIX + struct.pack("=IQQI", 0x4D, inode, volume, generation)


def numbers_of(kind: str, root: bytes) -> ComputedNumbers:
    return ComputedNumbers(MountedFilesystem(1, kind, "/tree", -1), root, "identity", bytes(32))


@given(st.sets(st.tuples(st.integers(1, 2**32 - 1), st.integers(0, 2**32 - 1)), max_size=30))
def test_ext4(files: set[tuple[int, int]]) -> None:
    numbers = numbers_of("ext4", ext4(2, 0))
    packed = {numbers.packed(ext4(*file)) for file in files}
    assert len(packed) == len({(inode, generation & 0x3FFF) for inode, generation in files})
    for one in packed:
        assert one is not None
        assert one > 0
        number = numbers.number(one)
        assert COMPUTED <= number < 2 * COMPUTED
        assert numbers.packed_of(number) == one
    for inode, generation in files:
        assert numbers.packed(ext4(inode, generation, b"\2\0\0\0")) is None, "another mount"
        assert numbers.packed(ext4(inode, generation) + b"\0") is None
        assert numbers.packed(PREFIX + b"\2\0\0\0" + ext4(inode, generation)[8:]) is None, "another type"


@given(st.integers(1, 2**64 - 1), st.integers(0, 2**32 - 1), st.sampled_from([5, 256]))
def test_btrfs(inode: int, generation: int, volume: int) -> None:
    """An object of another subvolume has no such number, nor one whose inode number is too large."""
    numbers = numbers_of("btrfs", btrfs(256, 7))
    expected = inode if volume == 5 and inode < COMPUTED else None
    assert numbers.packed(btrfs(inode, generation, volume)) == expected


def test_numbers_of_views_depend_on_their_names_alone_and_are_never_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    labels = [f"user {number}" for number in range(40)]
    found: list[dict[str, int]] = []
    with tempfile.TemporaryDirectory() as place:
        for attempt, order in enumerate((labels, labels[::-1])):
            path = f"{place}/{attempt}"
            with contextlib.closing(Index(path, secret=bytes(32))) as index:
                index.claim(1, ext4(2, 0), computed=True)
                found.append({label: index.view(label) for label in order})
            with contextlib.closing(Index(path, secret=bytes(32))) as index:
                assert index.is_computed
                assert {label: index.view(label) for label in labels} == found[-1]
        assert found[0] == found[1]  # none of these collide
        monkeypatch.setattr(index_module, "MAX_VIEWS", 20)
        with contextlib.closing(Index(f"{place}/small", secret=bytes(32))) as index:
            index.claim(1, ext4(2, 0), computed=True)
            assert {index.view(label) for label in labels[:20]} == set(range(1, 21))
            assert index.view("one too many") == 21
