"""A request that had to wait is served by the policy in force when it continues."""

from types import SimpleNamespace
from typing import Any

import pytest
import trio
from pyfuse3 import InodeT

from cloakfs.exportmode import LOCAL
from cloakfs.filesystem.callers import Callers
from cloakfs.policy import Policy
from cloakfs.tree.objects import Stale
from cloakfs.view import View


def served(later: View | None) -> tuple[Any, list[View]]:
    """What `Callers.served` says, and whom it asked, if the view becomes `later` while the user database is asked."""
    now: list[View | None] = [View(Policy())]
    asked = []

    async def who(view: View, _: object) -> str:
        asked.append(view)
        await trio.lowlevel.checkpoint()
        now[0] = later
        return f"by {len(asked)}"

    views: Any = SimpleNamespace(get=lambda number: now[0], top=False)
    nodes: Any = SimpleNamespace(view_of=lambda inode: 0)
    others: Any = SimpleNamespace(threads=())
    groups: Any = SimpleNamespace(by_user=True)  # so that the user database is asked
    callers: Any = Callers(nodes, views, groups, others, others, None, LOCAL)
    callers._who_by_groups = who
    return trio.run(callers.served, InodeT(1), SimpleNamespace(uid=7)), asked


def test_the_new_policy_decides() -> None:
    later = View(Policy())
    answer, asked = served(later)
    assert answer == (0, later, "by 2", 7)
    assert asked[1] is later


def test_a_view_that_is_gone_is_stale() -> None:
    with pytest.raises(Stale):
        served(None)
