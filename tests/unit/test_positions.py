"""Positions of directory entries as clients see them."""

import itertools
import random

import pytest

from cloakfs.linux.aes import Aes
from cloakfs.tree.positions import END, Positions

SECRET = bytes(range(32))


@pytest.fixture(scope="module")
def positions() -> Positions:
    return Positions(SECRET)


def test_aes() -> None:
    """FIPS 197, appendix C.1; each block by itself."""
    plain, encrypted = "00112233445566778899aabbccddeeff", "69c4e0d86a7b0430d8cdb78070b4c55a"
    assert Aes(bytes(range(16))).encrypt(bytes.fromhex(plain * 3)).hex() == encrypted * 3


def test_positions_of_this_version(positions: Positions) -> None:
    """Clients go on with them after an upgrade: another result needs a new key, at least, and a word to users."""
    assert positions.shown(positions.tweak(b"handle"), [1, 2, END]) == [
        4029451374454769008,
        1942551127619060272,
        1619787210012308665,
    ]


@pytest.mark.parametrize("count", [1, 2, 1023, 1024, 1025, 3000])
def test_each_position_is_found_again(count: int, positions: Positions) -> None:
    chance = random.Random(count)
    real = [1, 2, 3, END, END - 1, *(chance.randrange(1, END) for _ in range(count))][:count]
    tweak = positions.tweak(b"handle")
    shown = positions.shown(tweak, real)
    assert [Positions(SECRET).real(tweak, position) for position in shown[-50:]] == real[-50:]
    assert len(set(shown)) == len(set(real))
    assert all(2 < position <= END for position in shown)


def test_positions_depend_on_all_bits_the_directory_and_the_mount(positions: Positions) -> None:
    """About half of the bits change with any bit of what they depend on."""
    tweak = positions.tweak(b"handle")
    real = list(range(1, 1001))
    shown = positions.shown(tweak, real)
    others = [
        positions.shown(positions.tweak(b"other"), real),
        Positions(SECRET[::-1]).shown(tweak, real),
        *(positions.shown(tweak, [position ^ 1 << bit for position in real]) for bit in range(10, 63)),
    ]
    for other in others:
        changed = sum((one ^ another).bit_count() for one, another in zip(shown, other, strict=True))
        assert 0.47 < changed / (63 * len(real)) < 0.53
    assert 0.45 < sum(one < another for one, another in itertools.pairwise(shown)) / len(real) < 0.55
