"""Sequences of small records that are held as numbers, since there may be 100,000 of them.

To make as many objects takes a tenth of a second or more, also to read them from another process or to free them, and
Python does nothing else meanwhile. Arrays take as long as it takes to copy some megabytes.
"""

from __future__ import annotations

from abc import abstractmethod
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import compress
from typing import Generic, Self, TypeVar, overload

T = TypeVar("T")


class Columns(Sequence[T], Generic[T]):
    """A sequence of records, each of which is made anew whenever it is read.

    It equals every sequence of equal records.
    """

    __slots__ = ("columns",)

    types = ""
    """The types of the numbers that make a record, as of `array`."""

    def __init__(self, records: Iterable[T] = ()) -> None:
        self.columns = tuple([array(kind) for kind in self.types])
        for record in records:
            for column, number in zip(self.columns, self._packed(record), strict=True):
                column.append(number)

    @staticmethod
    @abstractmethod
    def _packed(record: T) -> tuple[int, ...]:
        """Return the numbers that make a record."""

    @staticmethod
    @abstractmethod
    def _unpacked(numbers: Sequence[int]) -> T:
        """Return the record that these numbers make."""

    def having(self, column: int, number: int) -> Self:
        """Return the records that have this number in this column (from 0), without making them."""
        part = type(self)()
        if self.columns[column].count(number) == len(self):
            part.columns = self.columns
            return part
        has_it = [other == number for other in self.columns[column]]
        part.columns = tuple(
            array(kind, compress(numbers, has_it)) for kind, numbers in zip(self.types, self.columns, strict=True)
        )
        return part

    def __len__(self) -> int:
        return len(self.columns[0])

    @overload
    def __getitem__(self, at: int) -> T: ...
    @overload
    def __getitem__(self, at: slice) -> Self: ...
    def __getitem__(self, at: int | slice) -> T | Self:
        if isinstance(at, slice):
            part = type(self)()
            part.columns = tuple(column[at] for column in self.columns)
            return part
        return self._unpacked([column[at] for column in self.columns])

    def __iter__(self) -> Iterator[T]:
        return map(self._unpacked, zip(*self.columns, strict=True))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, type(self)):
            return self.columns == other.columns
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(_equal, self, other))

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))


def _equal(one: object, other: object) -> bool:
    return one == other
