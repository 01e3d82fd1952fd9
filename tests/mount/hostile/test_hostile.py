"""While an unprivileged user attacks the mount, another user gets correct answers, and soon enough.

The latency is only reported; the tests assert that no answer is wrong, nothing is lost, and nobody waits for ever.
"""

import os
import time
from collections.abc import Callable, Iterator

import pytest

from tests.agents import User, write
from tests.mount.conftest import Mount, told
from tests.mount.hostile import victim
from tests.mount.hostile.attacks import ATTACKS, BY_ROOT
from tests.mount.hostile.conftest import REPORT
from tests.mount.hostile.peers import OTHERS, SECONDS
from tests.mount.hostile.victim import Watch, look_after

ATTACKER = 6666
FOREVER = 60.0
GROUPS = {"many groups": range(20_000, 25_000)}
"""What the attacker is in besides."""


@pytest.fixture(scope="module")
def watcher() -> Iterator[User]:
    with User(victim.UID, victim.GID) as one:
        yield one


def under_attack(arena: Mount, watcher: User, base: str, name: str, attack: Callable[[str, float], int]) -> Watch:
    """Make the victim work during the attack."""
    own = arena.at("shared", name.replace(" ", "-"))
    stop = os.path.join(base, "stop")
    with User(ATTACKER, groups=GROUPS.get(name, ())) as attacker, User(0) as root:
        attacker.do(os.mkdir, own, 0o755)
        attacker.do(write, f"{own}/secret", b"secret", mode=0o600)
        told()
        watcher.start(look_after, arena.path, stop, f"{own}/secret")
        try:
            done = (root if name in BY_ROOT else attacker).do(attack, own, time.monotonic() + SECONDS)
        finally:
            write(stop, b"")
        watch: Watch = watcher.answer_within(200)
        # What is hidden from the attacker is still hidden.
        private = arena.at("victim", "private")
        assert not attacker.do(os.path.lexists, private)
        assert "private" not in attacker.do(os.listdir, arena.at("victim"))
    REPORT.append((name, done, watch))
    return watch


ALL = {**ATTACKS, "many groups": ATTACKS["names of the shared directory"]}


@pytest.mark.parametrize("name", list(ALL))
def test_the_other_user_gets_right_answers(arena: Mount, watcher: User, base: str, name: str) -> None:
    watch = under_attack(arena, watcher, base, name, ALL[name])
    assert watch.wrong == []
    assert len(watch.seconds) >= 10
    assert max(watch.seconds) < FOREVER
    for path in victim.what_is_there():
        with open(arena.real("victim", path), "rb") as file:
            assert file.read() == victim.content(path)
    assert sorted(os.listdir(arena.real("victim"))) == victim.what_is_there()


COMPARED = ["nothing", "deeper than a path", "the lock above hidden homes"]


@pytest.mark.skipif(not OTHERS, reason="for a report alone, with CLOAKFS_ATTACK_SECONDS")
@pytest.mark.parametrize("name", COMPARED)
def test_the_same_without_cloakfs(other_arena: tuple[str, str], watcher: User, base: str, name: str) -> None:
    """For the report: what each attack costs the other user on the bare tree, and through bindfs."""
    kind, top = other_arena
    own, stop = os.path.join(top, "shared", name.replace(" ", "-")), os.path.join(base, "stop")
    with User(ATTACKER) as attacker:
        attacker.do(os.mkdir, own, 0o755)
        watcher.start(look_after, top, stop, None)
        try:
            done = attacker.do(ATTACKS[name], own, time.monotonic() + SECONDS)
        finally:
            write(stop, b"")
        watch: Watch = watcher.answer_within(200)
    REPORT.append((f"{name} ({kind})", done, watch))
    assert watch.wrong == []
