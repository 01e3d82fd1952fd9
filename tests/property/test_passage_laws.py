"""A cached path to a directory admits exactly those whom every directory on it admits."""

from hypothesis import given
from hypothesis import strategies as st

from cloakfs.caller import Caller
from cloakfs.cloak import Condition
from cloakfs.tree.door import subject
from cloakfs.tree.passages import Passage

IDS = st.integers(0, 3)
conditions = st.builds(Condition, IDS, IDS, st.booleans(), st.booleans(), st.frozensets(IDS, max_size=2)).filter(
    lambda one: not one.admits_all
)
callers = st.builds(lambda uid, gid, more: Caller(uid, gid, more | {gid}), IDS, IDS, st.frozensets(IDS))


@given(st.lists(st.none() | conditions, max_size=12), callers)
def test_a_passage_admits_whom_all_directories_on_it_admit(way: list[Condition | None], who: Caller) -> None:
    passage = Passage(None, None)
    for condition in way:
        passage = passage.below(condition)
    met = [condition is None or condition.admits(who.uid, who.groups.__contains__) for condition in way]
    assert passage.admits(subject(who)) is all(met)


@given(st.lists(conditions, min_size=1, max_size=4, unique=True), st.integers(0, 3))
def test_a_condition_is_not_put_on_a_passage_twice(near: list[Condition], again: int) -> None:
    beginning = passage = Passage(None, None)
    for condition in near:
        passage = passage.below(condition)
    assert passage.below(near[again % len(near)]) is passage
    assert passage.below(None) is passage
    assert passage.beginning is beginning
