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


@example([("full", 1), ("batch", [0, 1])], False)  # in the middle of a batch
@given(STEPS, st.booleans())
def test_what_was_given_stays_given_whenever_the_disk_is_full(steps: list[tuple[str, Any]], behind: bool) -> None:
    """Each number names one object for ever; what is not `behind` names it after the end of the process, too."""
    given: dict[int, bytes] = {}  # number -> handle
    views: dict[str, int] = {}
    removed: set[bytes] = set()

    def note(number: int, handle: bytes) -> None:
        assert given.setdefault(number, handle) == handle
        assert list(given.values()).count(handle) == 1 or handle in removed

    with tempfile.TemporaryDirectory() as place:
        index = Index(f"{place}/i", behind=behind)
        index.claim(1, b"\1\0\0\0root")
        index._db = failing = Failing(index._db)  # type: ignore[assignment]
        for what, which in steps:
            with contextlib.suppress(Unstored):
                match what:
                    case "object" | "made":
                        handle = b"\1\0\0\0handle %d" % which
                        if handle not in removed and (what == "object" or handle not in given.values()):
                            call = index.object if what == "object" else index.made
                            number = call(handle, 1, b"name")
                            if number is not None:
                                note(number, handle)
                    case "batch":
                        handles = [b"\1\0\0\0handle %d" % one for one in which]
                        new = {}
                        with index.batch():
                            for handle in handles:
                                if handle not in removed:
                                    with contextlib.suppress(Unstored):
                                        new[index.object(handle, 1, b"name")] = handle
                        for number, handle in new.items():
                            note(number, handle)
                    case "moved" | "remove" if given:
                        number = sorted(given)[which % len(given)]
                        if what == "moved":
                            index.moved(number, which, b"moved")
                        elif given[number] not in removed:
                            removed.add(given[number])
                            index.remove(number)
                    case "view":
                        assert views.setdefault(str(which), index.view(str(which))) == index.view(str(which))
                    case "commit":
                        index.commit()
                    case "room":
                        index.require_room()
                        assert behind or index.trouble is None
                    case "full":
                        failing.left = which if failing.left is None else None
            for number, handle in given.items():
                if handle not in removed:
                    found = index.find(number)
                    assert found is not None
                    assert found[0] == handle
        if behind:
            failing.left = None
        index.close()
        with contextlib.closing(Index(f"{place}/i")) as index:
            assert [index.object(handle, 1, b"name") for handle in given.values() if handle not in removed] == [
                number for number, handle in given.items() if handle not in removed
            ]
            assert all(index.view(label) == number for label, number in views.items())
            assert index.object(b"\1\0\0\0another", 1, b"name") not in given
