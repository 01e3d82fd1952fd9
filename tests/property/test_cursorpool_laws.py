"""Compares the pool with a plain list of what was used, and checks what it promises to each file."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from cloakfs import streams
from cloakfs.streams import CursorPool

OWNERS = "abc"


class Books:
    """A pool, and a list of its cursors, the least recently used first, with its owner and whether it is a stream."""

    def __init__(self, size: int) -> None:
        self.pool: CursorPool[int] = CursorPool(size)
        self.owners: dict[int, str] = {}
        self.streams: set[int] = set()
        self.idle: set[int] = set()
        self.made = 0

    def use(self, cursor: int, owner: str, *, is_stream: bool) -> None:
        self.pool.use(owner, cursor, is_stream=is_stream)
        self.owners.pop(cursor, None)
        self.owners[cursor] = owner
        self.streams -= {cursor}
        self.idle -= {cursor}
        if is_stream:
            self.streams.add(cursor)

    def add(self, owner: str) -> None:
        streams = set(self.streams)
        candidates = self.candidates(owner)
        victim = self.pool.make_room(owner, self.idle.__contains__)
        if victim is None:
            assert not candidates
        else:
            assert victim in candidates
            self.check_promises(owner, victim, streams)
            self.remove(victim)
        self.made += 1
        self.use(self.made, owner, is_stream=False)

    def drop(self, owner: str) -> None:
        self.pool.drop(owner)
        for cursor in [cursor for cursor, whose in self.owners.items() if whose == owner]:
            self.remove(cursor)

    def remove(self, cursor: int) -> None:
        del self.owners[cursor]
        self.streams -= {cursor}
        self.idle -= {cursor}

    def candidates(self, owner: str) -> set[int]:
        """Who may have to give way; nobody if there is room."""
        if len(self.owners) < self.pool.size:
            return set()
        held = Counter(self.owners.values())
        for cursor in list(self.owners):
            if cursor in self.streams:
                if cursor not in self.idle:
                    break
                if held[self.owners[cursor]] > 1:
                    return {cursor}
                self.streams.remove(cursor)
        trials = Counter(whose for cursor, whose in self.owners.items() if cursor not in self.streams)
        if max(trials.values(), default=0) > max(trials[owner], 1):
            return {self.oldest(whose) for whose in trials if trials[whose] == max(trials.values())}
        part = self.pool.size // len({*held, owner})
        if held[owner] < part and trials[owner] < streams._AT_ONCE:
            return {self.oldest(whose) for whose in held if held[whose] == max(held.values())}
        return {self.oldest(owner)}

    def oldest(self, owner: str) -> int:
        own = [cursor for cursor, whose in self.owners.items() if whose == owner]
        return next((cursor for cursor in own if cursor not in self.streams), own[0])

    def check_promises(self, owner: str, victim: int, streams: set[int]) -> None:
        loser = self.owners[victim]
        held = Counter(self.owners.values())
        if loser == owner:
            return
        assert held[loser] > 1  # it keeps one
        if victim in streams - self.idle:
            assert held[loser] > self.pool.size // len({*held, owner}) > held[owner]

    def check(self) -> None:
        assert list(self.pool) == list(self.owners)
        assert len(self.pool) == len(self.owners) <= self.pool.size
        for owner in OWNERS:
            assert self.pool.of(owner) == {cursor for cursor, whose in self.owners.items() if whose == owner}


steps = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "add", "trial", "stream", "stream", "idle", "drop"]),
        st.sampled_from(OWNERS),
        st.integers(0, 100),
        st.integers(1, 4),
    ),
    max_size=40,
)


@given(st.integers(len(OWNERS), 12), steps)
def test_whatever_happens(size: int, stream: list[tuple[str, str, int, int]]) -> None:
    books = Books(size)
    for what, owner, which, times in stream:
        own = [cursor for cursor, whose in books.owners.items() if whose == owner]
        if what == "add":
            for _ in range(times):
                books.add(owner)
                books.check()
        elif what == "drop":
            books.drop(owner)
        elif what == "idle":
            books.idle |= {*list(books.owners)[:times]}
        elif own:
            books.use(own[which % len(own)], owner, is_stream=what == "stream")
        books.check()
