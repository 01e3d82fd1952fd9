"""The positions of directory entries as clients see them (d_off, telldir(3), cookies of NFS): a keyed permutation.

A real position is a hash of the name on ext4, so that a caller that guesses a hidden name could compare it with what
the same name gets in a directory of its own. On tmpfs and others, positions are counted, so that gaps would show how
many entries are hidden, and where.

A position has 63 bits (off_t is signed). They are encrypted by a Feistel network with halves of 32 and 31 bits, whose
rounds are AES under keys of the mount; the directory is part of each block. Six rounds cannot be distinguished from a
random permutation by fewer than about 2^31 positions of one directory (Patarin, "Security of Random Feistel Schemes
with 5 or More Rounds", CRYPTO 2004). Positions are the same after a restart, and need no memory.
"""

import hashlib
import sys
from array import array
from collections.abc import Sequence

from ..linux.aes import BLOCK, Aes

END = (1 << 63) - 1
"""The real position of the end of any directory."""

_ROUNDS = 6
_LOW = 31

# How many positions are encrypted in one step: as one number, with a block for each, which has the position, or a half
# of it, in its lower 64 bits, and the directory in the others.
_AT_ONCE = 1024


def _in_each(bits: int) -> int:
    return int.from_bytes(bits.to_bytes(BLOCK, "little") * _AT_ONCE, "little")


_LOWS, _HIGHS, _DIRECTORIES = _in_each((1 << _LOW) - 1), _in_each((1 << 32) - 1), _in_each(((1 << 64) - 1) << 64)


class Positions:
    """Translates positions in the directories of one mount.

    0, the beginning, is not translated. (NFS reserves 1 and 2 as well. One position in 2^61 becomes one of these.)

    Args:
        secret: of the mount.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._rounds = [
            Aes(hashlib.blake2b(bytes([number]), key=secret, digest_size=BLOCK, person=b"positions").digest())
            for number in range(_ROUNDS)
        ]

    def tweak(self, handle: bytes) -> int:
        """Return what distinguishes the positions of the directory with this handle from those of others."""
        digest = hashlib.blake2b(handle, key=self._secret, digest_size=8, person=b"directory").digest()
        return int.from_bytes(digest, "little")

    def shown(self, tweak: int, positions: Sequence[int]) -> list[int]:
        """Return what clients see of real positions (from 1 to `END`) of a directory."""
        return self._translate(tweak, positions, range(_ROUNDS))

    def real(self, tweak: int, position: int) -> int:
        """Return the real position, given the one that clients see."""
        return self._translate(tweak, [position], range(_ROUNDS)[::-1])[0]

    def _translate(self, tweak: int, positions: Sequence[int], rounds: range) -> list[int]:
        done: list[int] = []
        for start in range(0, len(positions), _AT_ONCE):
            done += self._translate_some(tweak, positions[start : start + _AT_ONCE], rounds)
        return done

    def _translate_some(self, tweak: int, positions: Sequence[int], rounds: range) -> list[int]:
        size = len(positions) * BLOCK
        blocks = array("Q", (0, tweak)) * len(positions)
        blocks[::2] = array("Q", positions)
        number = int.from_bytes(_little(blocks).tobytes(), "little")
        directories = number & _DIRECTORIES
        low, high = number & _LOWS | directories, number >> _LOW & _HIGHS | directories
        for which in rounds:
            encrypt = self._rounds[which].encrypt
            if which % 2:
                low ^= int.from_bytes(encrypt(high.to_bytes(size, "little")), "little") & _LOWS
            else:
                high ^= int.from_bytes(encrypt(low.to_bytes(size, "little")), "little") & _HIGHS
        number = (high & _HIGHS) << _LOW | low & _LOWS
        return _little(array("Q", number.to_bytes(size, "little")))[::2].tolist()


def _little(numbers: "array[int]") -> "array[int]":
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers
