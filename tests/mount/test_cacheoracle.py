"""What the daemon says about its own rules (`cacheoracle`): nothing as they are, and something if one is broken."""

import contextlib
import inspect
import itertools
import os
import stat
import struct
import time
from collections.abc import Callable, Iterator
from functools import partial

import pyfuse3
import pytest

from cloakfs.filesystem import Filesystem
from cloakfs.identity import Caller, ServerId
from cloakfs.tuning import Tuning
from tests.agents import User
from tests.mount import cacheoracle
from tests.mount.brokenrules import WEAKENED
from tests.mount.cacheoracle import CheckedFilesystem, Tree, violations
from tests.mount.conftest import Mount, daemons_with, told
from tests.mount.loopfs import filesystem
from tests.mount.test_audience import GROUP, INSIDE, look, scene
from tests.mount.test_caching import CLOAKED, OTHER, OWNER, put
from tests.mount.test_stateful import POLICIES, TwoTrees, search, world
from tests.mount.test_watcher import SHARES

MakeMount = Callable[..., Mount]
MakeUser = Callable[..., User]

READERS = {"own-watch": {}, "watcher": {"shared": True}, "watcher later": {"later": True}}
"""Who reads what is changed: arguments of `cacheoracle.install`."""

__all__ = ["scene"]  # a fixture


@pytest.fixture
def tree(base: str) -> Iterator[str]:
    """A real tree on a file system of its own: what others change on the same one keeps the daemon from checking."""
    with filesystem("tmpfs", base) as top:
        yield top


_NO_ID = 0xFFFFFFFF  # of an entry of an ACL that has none


def use(m: Mount, owner: User, member: User, other: User) -> None:
    """Do what each of the rules is for."""
    owner.do(look, m.at("homes/owner"))
    other.error(os.stat, m.at("homes/owner"))
    other.do(os.listdir, m.at("homes"))
    owner.error(os.stat, m.at("absent"))
    member.do(os.chdir, m.at("shared"))
    other.do(os.stat, m.at("listed"))
    other.do(os.stat, m.at("open/file"))
    for _ in range(2):
        member.do(os.stat, "own")
        member.error(os.getxattr, "own", "system.posix_acl_access")
        owner.do(os.stat, m.at("listed/file"))
        other.error(os.stat, m.at("listed/file"))
    owner.error(os.stat, m.at("shared/own"))
    for _ in range(2):
        violations(m)  # waits: entries are not kept while something in their directory is being invalidated
        member.do(os.stat, m.at("homes/fourth/club/own"))
        member.do(os.listdir, m.at("team"))
        member.error(os.stat, m.at("team/absent"))
    member.do(os.open, m.at("team/private"), os.O_CREAT | os.O_WRONLY, 0o600)
    violations(m)
    owner.do(os.chdir, m.at("homes/second"))
    for _ in range(2):
        violations(m)
        owner.do(os.stat, "private")
        member.do(os.listdir, m.at("homes/second"))
        member.error(os.stat, m.at("homes/second/absent"))
    os.chmod(m.real("homes/second"), 0o755)
    violations(m)
    other.do(os.stat, m.at("homes/second"))
    other.do(os.chdir, m.at("moved"))
    other.do(os.stat, "file")
    owner.do(os.stat, m.at("moved/file"))
    owner.do(os.rename, m.at("moved"), m.at("homes/owner/moved"))
    for _ in range(2):
        for path in INSIDE:
            owner.do(os.stat, m.at("homes/owner", path))
    violations(m)
    owner.do(os.rename, m.at("homes/owner/work/vault"), m.at("open/moved"))
    owner.do(os.rename, m.at("homes/owner/secret"), m.at("open/secret"))
    for path in ("moved/file", "secret"):
        owner.do(os.stat, m.at("open", path))
    violations(m)
    for path in ("", "secret"):
        owner.do(os.stat, m.at("homes/third/shown", path))
    owner.do(os.rename, m.at("homes/third/shown"), m.at("open/shown"))
    time.sleep(0.2)  # until a second thread goes on with what is below, if one waits before it invalidates the name
    for path in ("", "secret"):
        owner.do(os.stat, m.at("open/shown", path))
    violations(m)
    owner.do(os.chmod, m.at("open/file"), 0o600)
    os.rename(m.real("homes/owner/work/secret"), m.real("homes/owner/work/renamed"))
    told()


def furnish(m: Mount) -> None:
    """Add what `scene` does not have."""
    os.chmod(m.source, 0o777)
    put(m.real("shared"), OTHER, stat.S_IFDIR | 0o770, gid=GROUP)
    put(m.real("shared/own"), OWNER, 0o600)
    put(m.real("team"), OTHER, stat.S_IFDIR | 0o770, gid=GROUP)
    put(m.real("team/file"), OTHER, 0o660, gid=GROUP)
    put(m.real("homes/fourth"), OWNER, stat.S_IFDIR | 0o700)
    put(m.real("homes/fourth/club"), OTHER, stat.S_IFDIR | 0o770, gid=GROUP)
    put(m.real("homes/fourth/club/own"), OWNER, 0o600)
    put(m.real("homes/third"), OWNER, stat.S_IFDIR | 0o700)
    put(m.real("homes/third/shown"), OWNER, stat.S_IFDIR | 0o755)
    put(m.real("homes/third/shown/secret"), OWNER, 0o600)
    put(m.real("homes/second"), OWNER, stat.S_IFDIR | 0o700)
    put(m.real("homes/second/private"), OWNER, 0o600)
    put(m.real("homes/second/hidden"), OTHER, 0o640, gid=GROUP)
    put(m.real("moved"), OWNER, stat.S_IFDIR | 0o755)
    put(m.real("moved/file"), OWNER, 0o644)
    put(m.real("open"), OWNER, stat.S_IFDIR | 0o755)
    put(m.real("open/file"), OWNER, 0o644)
    put(m.real("listed"), OWNER, stat.S_IFDIR | 0o745, gid=GROUP)  # who is in the group may not search it
    put(m.real("listed/file"), OWNER, 0o644)
    told()


@pytest.mark.parametrize("rule", WEAKENED)
def test_a_rule_that_is_broken(rule: str, scene: str, mount: MakeMount, user: MakeUser) -> None:
    code, complaint = WEAKENED[rule]
    with daemons_with(code, cacheoracle.install):
        m = mount("-o", CLOAKED)
    furnish(m)
    with contextlib.suppress(OSError):  # such a daemon may answer anything
        use(m, user(OWNER), user(OWNER, OWNER, [GROUP]), user(OTHER))
    found = violations(m)
    assert any(complaint in line for line in found), found


def test_all_replies_are_checked() -> None:
    """Each operation that tells the kernel of an object."""
    for name in vars(pyfuse3.Operations):
        operation = getattr(Filesystem, name)
        if callable(operation) and "EntryAttributes" in str(inspect.signature(operation).return_annotation):
            assert name in vars(CheckedFilesystem), name


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("words", ["", ",default_permissions"])
def test_rules_that_hold(words: str, reader: str, scene: str, mount: MakeMount, user: MakeUser) -> None:
    with daemons_with(partial(cacheoracle.install, **READERS[reader]), tuning=Tuning(housekeeping_seconds=0.05)):
        m = mount("-o", CLOAKED + words)
    furnish(m)
    use(m, user(OWNER), user(OWNER, OWNER, [GROUP]), user(OTHER))
    assert not violations(m)
    assert (SHARES in m.log) == (reader == "watcher later")


def test_the_machine_stops_at_a_violation() -> None:
    code, complaint = WEAKENED["who learns of it is in the audience"]
    with world(POLICIES["identity"], kind="tmpfs", altered=[code, cacheoracle.install]) as made:

        class Here(TwoTrees):
            world = made

        machine = Here()
        try:
            machine.furnish((1, 2, 3), (0o755, 0o755, 0o644))
            with pytest.raises(AssertionError, match=complaint):
                machine.one_after_the_other_sees_what_the_model_says()
        finally:
            with contextlib.suppress(AssertionError):
                machine.teardown()  # which checks as well


@pytest.mark.timeout(0)
def test_two_trees_while_answers_and_events_are_late() -> None:
    search("identity", examples=2, steps=20, seed=1, kind="tmpfs", delays=True)


def test_it_knows_who_may_search(tree: str, user: MakeUser) -> None:
    """It derives this from modes and ACLs, and must not come to another result than the kernel."""
    other = user(OTHER, OTHER, [GROUP])
    who = Caller(ServerId(OTHER), ServerId(OTHER), frozenset({ServerId(OTHER), ServerId(GROUP)}))
    directory = os.path.join(tree, "directory")
    os.mkdir(directory)
    owners = itertools.product((OTHER, OWNER), (0, GROUP), (GROUP, 777))
    for (named_user, gid, named_group), bits in itertools.product(owners, itertools.product((0, 1), repeat=5)):
        os.chown(directory, 0, gid)
        # acl(5): of the owner, a user, the group, a group, the mask, and of all others.
        tags, ids = (0x01, 0x02, 0x04, 0x08, 0x10, 0x20), (_NO_ID, named_user, _NO_ID, named_group, _NO_ID, _NO_ID)
        entries = list(zip(tags, (7, *bits), ids, strict=True))
        acl = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)
        os.setxattr(directory, "system.posix_acl_access", acl)
        assert Tree(tree).may_search(who, "directory") == other.do(os.access, directory, os.X_OK), entries
