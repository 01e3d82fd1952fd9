"""The index finds each object by its handle again, whatever order the database sorts handles in."""

import contextlib
import struct
import tempfile

import hypothesis.strategies as st
from hypothesis import given

from cloakfs.tree.index import Index

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
