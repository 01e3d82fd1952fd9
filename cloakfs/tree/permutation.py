"""A keyed permutation of inode numbers: nobody without the key can tell what one number says of another.

ext4 gives new files the next free inode numbers, so that a gap between two of his own would tell a caller how many
files others have made in between. The permutation is a Feistel network with two halves of 23 bits, whose rounds are
BLAKE2 under keys of the mount. Six rounds cannot be distinguished from a random permutation by fewer than about 2^23
numbers (Patarin, "Security of Random Feistel Schemes with 5 or More Rounds", CRYPTO 2004).
"""

import hashlib

BITS = 46
"""How many bits a number has, before and after."""

_HALF = BITS // 2
_LOW = (1 << _HALF) - 1
_BYTES = 3
_ROUNDS = 6


class Permutation:
    """Permutes numbers from 0 to 2^46 - 1.

    Args:
        secret: of the mount.
    """

    def __init__(self, secret: bytes) -> None:
        # A copy of a hash that has its key already takes half as long as a new one.
        self._rounds = [
            hashlib.blake2b(bytes([number]), key=secret, digest_size=_BYTES, person=b"inode numbers")
            for number in range(_ROUNDS)
        ]

    def shown(self, number: int) -> int:
        """Return what clients see of this number."""
        left, right = number >> _HALF, number & _LOW
        for keyed in self._rounds:
            mixed = keyed.copy()
            mixed.update(right.to_bytes(_BYTES, "little"))
            left, right = right, left ^ int.from_bytes(mixed.digest(), "little") & _LOW
        return left << _HALF | right

    def real(self, number: int) -> int:
        """Return the number of which clients see this."""
        left, right = number >> _HALF, number & _LOW
        for keyed in reversed(self._rounds):
            mixed = keyed.copy()
            mixed.update(left.to_bytes(_BYTES, "little"))
            left, right = right ^ int.from_bytes(mixed.digest(), "little") & _LOW, left
        return left << _HALF | right
