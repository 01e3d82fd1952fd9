"""How long a way through the code is: how many functions are called, and in how many files."""

from collections.abc import Iterable
from typing import NamedTuple


class Journey(NamedTuple):
    """What one request, or one command, takes.

    Attributes:
        calls: of cloakfs's functions; a coroutine that goes on is no call.
        files: in which they are.
        returns: how often the way leads into a file that it has left before.
    """

    calls: int
    files: int
    returns: int

    @classmethod
    def of(cls, files: Iterable[str]) -> "Journey":
        """Return the journey that calls functions in these files, one after the other."""
        calls = list(files)
        left: set[str] = set()
        returns, at = 0, ""
        for file in calls:
            if file != at:
                returns += file in left
                left.add(at)
                at = file
        return cls(len(calls), len(set(calls)), returns)

    def is_longer_than(self, most: "Journey") -> bool:
        """Whether it takes more of anything."""
        return any(mine > allowed for mine, allowed in zip(self, most, strict=True))
