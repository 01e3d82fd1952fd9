"""Counting in the guest: a program marks where counting begins and ends, and the plugin of qemu writes the counts."""

import ctypes
from collections.abc import Callable
from typing import TypeVar

from .weights import Counts

T = TypeVar("T")

LIBRARY = "/run/mark.so"
"""In the guest: mark.c, built."""


class Marks:
    """The marks of one process in the guest, and of those that it forks."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(LIBRARY)
        self._number = 0

    def next(self) -> int:
        """Number the counts that are written from now on, for `counts_by_number`; return the number."""
        self._library.mark_next()
        self._number += 1
        return self._number

    def counted(self, do: Callable[[], T]) -> tuple[T, int]:
        """Call a function while instructions are counted; return what it returns, and the switches between tasks."""
        before = _switches()
        self._library.mark_reset()
        result = do()
        self._library.mark_write()
        return result, _switches() - before


def counts_by_number(written: str) -> dict[int, tuple[int, int, int]]:
    """Return what the plugin wrote: by number, instructions in user mode and in the kernel, and copied bytes.

    A last line that is not complete yet is left out.
    """
    complete = written[: written.rfind("\n") + 1]
    found = {}
    for line in complete.splitlines():
        number, user, kernel, copied = map(int, line.split())
        found[number] = (user, kernel, copied)
    return found


def with_switches(counted: tuple[int, int, int], switches: int) -> Counts:
    """Join the counts of the plugin and the switches, which the guest's kernel counts."""
    user, kernel, copied = counted
    return Counts(user, kernel, copied, switches)


def _switches() -> int:
    """Return how often the guest's only processor has switched between tasks since it was booted."""
    with open("/proc/stat", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("ctxt "))
