"""The index finds each object by its handle again, whatever order the database sorts handles in."""

import contextlib
import sqlite3
import struct
import tempfile
from typing import Any

import hypothesis.strategies as st
from hypothesis import example, given

from cloakfs.tree.index import Index, Unstored

WORDS = st.integers(0, 2**32 - 1) | st.integers(0, 3)
LIKE_TMPFS = st.builds(lambda *words: struct.pack("<5I", 1, 1, *words), WORDS, WORDS, WORDS)
LIKE_EXT4 = st.builds(lambda *words: struct.pack("<4I", 1, 1, *words), WORDS, WORDS)
HANDLES = LIKE_TMPFS | LIKE_EXT4 | st.binary(min_size=8, max_size=132)


@given(st.lists(HANDLES, unique=True, max_size=20), st.booleans())
def test_each_handle_has_a_number_of_its_own_and_is_found_by_it(handles: list[bytes], behind: bool) -> None:
    with tempfile.TemporaryDirectory() as place, contextlib.closing(Index(f"{place}/i", behind=behind)) as index:
        made = [index.made(handle, 1, b"name") for handle in handles[::2]]
        numbers = {index.object(handle, 1, b"name"): handle for handle in handles}
        assert len(numbers) == len(handles)
        assert {number for number in made if number} <= set(numbers)
        assert {number: index.find(number) for number in numbers} == {
            number: (handle, 1, b"name") for number, handle in numbers.items()
        }
        index.commit()
        assert dict(index.after(0, 100)) == numbers
        assert [index.object(handle, 1, b"name") for handle in numbers.values()] == list(numbers)


class Failing:
    """A connection on which writes fail once `left` have succeeded, and until it is None again."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self.left: int | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._db, name)

    def execute(self, statement: str, values: tuple[object, ...] = ()) -> sqlite3.Cursor:
        if self.left is not None and statement.startswith(("INSERT", "UPDATE", "DELETE", "COMMIT")):
            self.left -= 1
            if self.left < 0:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                full = sqlite3.OperationalError("database or disk is full")
                full.sqlite_errorcode = sqlite3.SQLITE_FULL
                raise full
        return self._db.execute(statement, values)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["object", "made", "moved", "remove", "view"]), st.integers(0, 9)),
        st.tuples(st.just("batch"), st.lists(st.integers(0, 9), max_size=4)),
        st.tuples(st.sampled_from(["commit", "room"]), st.just(0)),
        st.tuples(st.just("full"), st.integers(0, 5)),
    ),
    max_size=40,
)


class Recorded:
    """An index on a disk that can be full, and what it has given.

    Attributes:
        given: the handle of each number.
        views: the number of each view.
        removed: the handles of objects that were removed.
    """

    def __init__(self, path: str, *, behind: bool) -> None:
        self.given: dict[int, bytes] = {}
        self.views: dict[str, int] = {}
        self.removed: set[bytes] = set()
        self._behind = behind
        self._index = Index(path, behind=behind)
        self._index.claim(1, b"\1\0\0\0root")
        self._index._db = self._disk = Failing(self._index._db)  # type: ignore[assignment]

    def object(self, which: int) -> None:
        if handle_of(which) not in self.removed:
            self._note(self._index.object(handle_of(which), 1, b"name"), handle_of(which))

    def made(self, which: int) -> None:
        if handle_of(which) not in {*self.removed, *self.given.values()}:
            number = self._index.made(handle_of(which), 1, b"name")
            if number is not None:
                self._note(number, handle_of(which))

    def batch(self, which: list[int]) -> None:
        new = {}
        with self._index.batch():
            for handle in map(handle_of, which):
                if handle not in self.removed:
                    with contextlib.suppress(Unstored):
                        new[self._index.object(handle, 1, b"name")] = handle
        for number, handle in new.items():
            self._note(number, handle)

    def moved(self, which: int) -> None:
        if self.given:
            self._index.moved(self._one_of(which), which, b"moved")

    def remove(self, which: int) -> None:
        if self.given and self.given[self._one_of(which)] not in self.removed:
            self.removed.add(self.given[self._one_of(which)])
            self._index.remove(self._one_of(which))

    def view(self, which: int) -> None:
        label = str(which)
        assert self.views.setdefault(label, self._index.view(label)) == self._index.view(label)

    def commit(self, _: int) -> None:
        self._index.commit()

    def room(self, _: int) -> None:
        self._index.require_room()
        assert self._behind or self._index.trouble is None

    def full(self, which: int) -> None:
        """Let the disk be full after some writes, or have room again."""
        self._disk.left = which if self._disk.left is None else None

    def _one_of(self, which: int) -> int:
        return sorted(self.given)[which % len(self.given)]

    def _note(self, number: int, handle: bytes) -> None:
        assert self.given.setdefault(number, handle) == handle
        assert list(self.given.values()).count(handle) == 1 or handle in self.removed

    def alive(self) -> dict[int, bytes]:
        return {number: handle for number, handle in self.given.items() if handle not in self.removed}

    def check(self) -> None:
        for number, handle in self.alive().items():
            found = self._index.find(number)
            assert found is not None
            assert found[0] == handle

    def close(self) -> None:
        """Close the index; what is stored only then has room."""
        if self._behind:
            self._disk.left = None
        self._index.close()


def handle_of(which: int) -> bytes:
    return b"\1\0\0\0handle %d" % which


@example([("full", 1), ("batch", [0, 1])], False)  # in the middle of a batch
@given(STEPS, st.booleans())
def test_what_was_given_stays_given_whenever_the_disk_is_full(steps: list[tuple[str, Any]], behind: bool) -> None:
    """Each number names one object for ever; what is not `behind` names it after the end of the process, too."""
    with tempfile.TemporaryDirectory() as place:
        recorded = Recorded(f"{place}/i", behind=behind)
        for what, which in steps:
            with contextlib.suppress(Unstored):
                getattr(recorded, what)(which)
            recorded.check()
        recorded.close()
        with contextlib.closing(Index(f"{place}/i")) as index:
            alive = recorded.alive()
            assert [index.object(handle, 1, b"name") for handle in alive.values()] == list(alive)
            assert all(index.view(label) == number for label, number in recorded.views.items())
            assert index.object(b"\1\0\0\0another", 1, b"name") not in recorded.given
