"""Every background task is started by `tasks`, and started again whatever happens to it."""

import ast
import logging
from pathlib import Path

import pytest
import trio
import trio.testing

import cloakfs
from cloakfs.background import tasks
from tests.mount.faults import POINTS

PACKAGE = Path(cloakfs.__file__).parent

# What runs beside the answering of requests without `tasks`: groups of tasks that somebody waits for.
WAITED_FOR = {
    "background/forkserver.py": 2,  # what a command says, and how it ends
    "filesystem/relookup.py": 1,
    "tree/views.py": 2,  # asking the user database, and giving it up
    "fuse/loop.py": 1,  # the workers of the session: whatever they raise is answered, or is the end of the session
    "mount/daemon.py": 1,  # the mount says that it was made; if it cannot, it was not
    "nfs/guard.py": 4,  # mounting and unmounting several
    "nfs/served.py": 2,  # asking several mounts
    "nfs/health.py": 2,  # a command asks several daemons and guards
}
STARTS = ("start_soon", "start", "spawn_system_task")


class Task:
    """Fails as often as there are failures, then returns."""

    def __init__(self, *failures: BaseException) -> None:
        self.failures = list(failures)
        self.begun: list[float] = []

    async def __call__(self) -> None:
        self.begun.append(trio.current_time())
        await trio.lowlevel.checkpoint()
        if self.failures:
            raise self.failures.pop(0)


def run(task: Task) -> None:
    trio.run(tasks.supervise, "the task", task, clock=trio.testing.MockClock(autojump_threshold=0))


def test_a_task_that_returns_is_done() -> None:
    task = Task()
    run(task)
    assert len(task.begun) == 1


@pytest.mark.parametrize(
    "failure",
    [
        OSError(24, "Too many open files"),
        MemoryError(),
        RuntimeError("can't start new thread"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
        ZeroDivisionError("an\nexception"),
        ExceptionGroup("two", [ValueError("one"), KeyError("other")]),
    ],
    ids=lambda failure: type(failure).__name__,
)
def test_a_task_that_fails_begins_anew(failure: Exception, caplog: pytest.LogCaptureFixture) -> None:
    task = Task(failure)
    run(task)
    assert len(task.begun) == 2
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert record.exc_info is None
    assert "\n" not in record.getMessage()
    assert record.getMessage().startswith("the task failed")


def test_the_backoff_grows_to_a_bound() -> None:
    task = Task(*[OSError(24, "") for _ in range(12)])
    run(task)
    backoffs = [round(later - earlier, 6) for earlier, later in zip(task.begun, task.begun[1:], strict=False)]
    assert backoffs[:4] == [0, 0.5, 1, 2]
    assert backoffs == sorted(backoffs)
    assert backoffs[-1] == tasks.LONGEST_BACKOFF_SECONDS


def test_the_same_failure_is_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    run(Task(*[OSError(24, "") for _ in range(20)]))  # about 80 seconds
    assert len(caplog.records) == 2


def test_the_end_is_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    async def end() -> None:
        async with trio.open_nursery() as nursery:
            started = tasks.Tasks(nursery)
            started.supervise("sleeping", trio.sleep_forever)
            started.once("sleeping, too", trio.sleep_forever)
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()

    trio.run(end)
    assert not caplog.records


def test_one_that_is_not_worth_it_is_not_done_again(caplog: pytest.LogCaptureFixture) -> None:
    task = Task(OSError(24, ""))
    trio.run(tasks.attempt, "reading ahead", task)
    assert len(task.begun) == 1
    assert len(caplog.records) == 1


def test_an_exception_that_cannot_be_told(caplog: pytest.LogCaptureFixture) -> None:
    class OddError(Exception):
        def __str__(self) -> str:
            raise ValueError

    run(Task(OddError()))
    assert "OddError" in caplog.records[0].getMessage()


def test_there_are_no_other_background_tasks() -> None:
    found: dict[str, int] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = str(path.relative_to(PACKAGE))
        if name == "background/tasks.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in STARTS):
                continue
            of = ast.unparse(node.func.value)
            if node.func.attr != "start" or "nursery" in of:
                found[name] = found.get(name, 0) + 1
    # accounts/groups.py: `DatabaseGroups._query` outlives the request that began it; it catches everything by itself.
    assert found == {**WAITED_FOR, "accounts/groups.py": 1}


def test_the_faults_of_the_mount_tests_hit_what_there_is() -> None:
    for point, (owner, name) in POINTS.items():
        assert callable(getattr(owner, name, None)), point
