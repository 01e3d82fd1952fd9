"""A cached path to a directory admits exactly those whom every directory on it admits, until one of them changes."""

from hypothesis import given
from hypothesis import strategies as st

from cloakfs.cloak import Condition
from cloakfs.identity import Caller, ServerId
from cloakfs.tree.accesspath import AccessPath
from cloakfs.tree.actor import actor

IDS = st.integers(0, 3)
conditions = st.builds(Condition, IDS, IDS, st.booleans(), st.booleans(), st.frozensets(IDS, max_size=2)).filter(
    lambda one: not one.admits_all
)
callers = st.builds(lambda uid, gid, more: Caller(uid, gid, more | {gid}), IDS, IDS, st.frozensets(IDS))


@given(st.lists(st.none() | conditions, max_size=12), st.integers(1, 8), callers)
def test_a_path_admits_whom_all_directories_on_it_admit(some: list[Condition | None], times: int, who: Caller) -> None:
    way = some * times
    access_path = AccessPath(None, None)
    for condition in way:
        access_path = AccessPath(access_path, condition)
    met = [condition is None or condition.admits(who.uid, who.groups.__contains__) for condition in way]
    assert access_path.admits(actor(who)) is all(met)


@given(st.lists(conditions, min_size=1, max_size=8, unique=True))
def test_a_condition_need_not_be_met_twice(some: list[Condition]) -> None:
    asked: list[str] = []

    class Counting(Condition):
        def admits(self, uid, has_group):  # type: ignore[no-untyped-def]
            asked.append("")
            return True

    access_path = AccessPath(None, None)
    for condition in [Counting(it.owner, it.group, it.in_group, it.outside, it.exempt) for it in some] * 50:
        access_path = AccessPath(access_path, condition)
    assert access_path.admits(actor(Caller(ServerId(1), ServerId(1), frozenset())))
    assert len(asked) == len(some)


class _Tree:
    """Access paths of a tree in which each directory has the number of the one above it, and which of them are void."""

    def __init__(self, above: list[int]) -> None:
        self.above = above
        self.access_paths = [AccessPath(None, None)]
        for one in above:
            self.access_paths.append(AccessPath(self.access_paths[one], None))

    def way(self, number: int) -> list[int]:
        return [number, *self.way(self.above[number - 1])] if number else [0]


trees = st.integers(1, 12).flatmap(
    lambda size: st.tuples(*(st.integers(0, number) for number in range(size))).map(lambda above: _Tree(list(above)))
)


@given(trees, st.data())
def test_a_path_holds_until_a_directory_on_it_changes(tree: _Tree, data: st.DataObject) -> None:
    numbers = st.integers(0, len(tree.above))
    changes, void = 0, set[int]()
    for _ in range(20):
        number = data.draw(numbers)
        if data.draw(st.booleans()):
            assert tree.access_paths[number].holds(changes) is void.isdisjoint(tree.way(number))
        else:
            tree.access_paths[number].is_void = is_void = data.draw(st.booleans())
            (void.add if is_void else void.discard)(number)
            # It may hold again only after the whole path was checked.
            changes += 1
    for number, access_path in enumerate(tree.access_paths):
        assert access_path.is_used is (number in tree.above)
