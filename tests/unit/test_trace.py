"""Tracing: which records are wanted, what is kept for a slow tracer, and that it costs nothing while nobody traces."""

import inspect
import json
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import trio
import trio.testing

from cli.trace import percentile
from cloakfs.filesystem import Filesystem, trace
from cloakfs.filesystem.operation import Requests, operation
from cloakfs.filesystem.trace import TooManyTracers, Tracers
from cloakfs.tracerecords import OPERATIONS, Record, TraceFilter
from cloakfs.tree.notes import Notes, noting

RECORD: Record = {
    "operation": "lookup",
    "path": "/mnt/a/b",
    "new_path": None,
    "client": {"uid": 1, "gid": 2},
    "error": None,
    "hidden": [],
}


@pytest.mark.parametrize(
    ("wanted", "record", "is_included"),
    [
        ({}, {}, True),
        ({"users": [1, 5]}, {}, True),
        ({"users": [2]}, {}, False),
        ({"users": [1]}, {"client": None}, False),
        ({"operations": ["open", "lookup"]}, {}, True),
        ({"operations": ["open"]}, {}, False),
        ({"errors": True}, {}, False),
        ({"errors": True}, {"error": "ENOENT"}, True),
        ({"hidden": True}, {"error": "ENOENT"}, False),
        ({"hidden": True}, {"hidden": [{}]}, True),
        ({"paths": ["/mnt/a"]}, {}, True),
        ({"paths": ["/mnt/a/b"]}, {}, True),
        ({"paths": ["/"]}, {}, True),
        ({"paths": ["/mnt/a/b/c"]}, {}, False),
        ({"paths": ["/mnt/a/bc", "/mnt/?/b"]}, {}, True),
        ({"paths": ["*/b"]}, {}, True),
        ({"paths": ["/mnt/A"]}, {}, False),
        ({"paths": ["/mnt"]}, {"path": "/mnt2/a"}, False),
        ({"paths": ["/mnt"]}, {"path": None}, False),
        ({"paths": ["/mnt/new"]}, {"new_path": "/mnt/new/name"}, True),
        ({"paths": ["/mnt/a"], "errors": True}, {}, False),
    ],
)
def test_conditions(wanted: dict[str, Any], record: Record, is_included: bool) -> None:
    parsed = TraceFilter.parse(wanted)
    assert parsed.includes(RECORD | record) is is_included
    assert TraceFilter.parse(json.loads(json.dumps(parsed.plain()))) == parsed


@pytest.mark.parametrize("odd", [{"users": 1}, {"users": ["1"]}, {"users": [True]}, {"paths": "/"}, {"other": 1}])
def test_odd_conditions(odd: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        TraceFilter.parse(odd)


def test_what_is_kept_is_bounded() -> None:
    async def play() -> None:
        switched: list[bool] = []
        all_of_them = Tracers(switched.append, 1000)
        with all_of_them.attach(TraceFilter()) as slow, all_of_them.attach(TraceFilter(errors=True)) as other:
            for number in range(100):
                all_of_them.publish(RECORD | {"number": number})
            told = json.loads(await slow.fetch())
            numbers = [record["number"] for record in told["records"]]
            assert 2 < len(numbers) < 10
            assert numbers == list(range(len(numbers)))
            assert told["dropped"] == 100 - len(numbers)
            all_of_them.publish(RECORD)
            assert json.loads(await slow.fetch()) == {"records": [RECORD], "dropped": 0}
            assert json.loads(await slow.fetch()) == {"records": [], "dropped": 0}
            assert json.loads(await other.fetch()) == {"records": [], "dropped": 0}
        assert switched == [True, False]
        all_of_them.publish(RECORD)

    trio.run(play, clock=trio.testing.MockClock(autojump_threshold=0))


def test_there_are_only_so_many() -> None:
    def attach(all_of_them: Tracers, more: int) -> None:
        with all_of_them.attach(TraceFilter()):
            if more:
                attach(all_of_them, more - 1)

    async def play() -> None:
        all_of_them = Tracers(lambda on: None, 1000)
        attach(all_of_them, trace.MOST_TRACERS - 1)
        with pytest.raises(TooManyTracers):
            attach(all_of_them, trace.MOST_TRACERS)
        attach(all_of_them, trace.MOST_TRACERS - 1)

    trio.run(play)


def test_the_operations_are_those_of_the_file_system() -> None:
    wrapped = {name for name, method in inspect.getmembers(Filesystem) if hasattr(method, "__wrapped__")}
    assert tuple(sorted(wrapped)) == OPERATIONS


@pytest.mark.parametrize(
    ("times", "percent", "expected"),
    [([7], 50, 7), ([3, 1, 2], 50, 2), ([1, 2], 50, 1), ([1, 2], 99, 2), (list(range(1, 201)), 99, 198)],
)
def test_percentiles(times: list[int], percent: int, expected: int) -> None:
    assert percentile(times, percent) == expected


# -- what it costs ---------------------------------------------------------------------------------


class Caller:
    """Stands for a request's context."""

    uid = 5


class Operations:
    """One operation that does nothing."""

    files: Any = None

    def __init__(self) -> None:
        self.requests = Requests()

    @operation
    async def getattr(self, inode: int, ctx: Any) -> int:
        return inode


def called(work: Callable[[], object]) -> list[str]:
    """The functions that the work calls, those of C included."""
    calls: list[str] = []

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            calls.append(frame.f_code.co_name)
        elif event == "c_call":
            calls.append(argument.__name__)

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


def test_while_nobody_traces_it_calls_nothing() -> None:
    operations = Operations()

    def request() -> None:
        with pytest.raises(StopIteration):
            operations.getattr(1, Caller()).send(None)

    request()
    made = called(request)
    # `get` finds out how many requests of the caller wait, the clock how long the answer takes; to look for a trace
    # takes no call.
    before = made[made.index("guarded") : made.index("getattr") + 1]
    assert before == ["guarded", "get", "perf_counter_ns", "getattr"]


def test_while_somebody_does_each_request_is_told_once() -> None:
    operations = Operations()
    seen: list[tuple[str, dict[str, Any]]] = []

    class Trace:
        async def answer(self, name: str, given: dict[str, Any], answer: Any) -> Any:
            seen.append((name, given))
            token = noting.set(Notes())
            try:
                return await answer
            finally:
                noting.reset(token)

    operations.requests.trace = Trace()  # type: ignore[assignment]
    ctx = Caller()
    for inode in (1, 2):
        with pytest.raises(StopIteration) as answered:
            operations.getattr(inode, ctx).send(None)
        assert answered.value.value == inode
    assert seen == [("getattr", {"inode": 1, "ctx": ctx}), ("getattr", {"inode": 2, "ctx": ctx})]
    assert operations.requests.counts() == {"getattr": 2}
