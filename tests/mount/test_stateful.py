"""Random operations by several callers, through a mount and on a second real tree by the server's identities.

After every step a caller's listings, lookups, attributes and ACLs, and what the operation said, have to agree with the
second tree, less what the oracle (`tests/mount/oracle.py`) says is hidden. Callers take turns; at the end each looks.

The suite tries the same few sequences each time; `scripts/campaign machine` tries new ones, for as many steps as one
likes.
"""

import contextlib
import errno
import fcntl
import itertools
import json
import os
import shutil
import stat
import struct
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import ClassVar

import hypothesis
import pyfuse3
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from cloakfs import linux
from cloakfs.state.runtime import RUN_DIR, STATE_DIR
from cloakfs.tuning import STANDARD, Tuning
from tests.agents import User
from tests.altered import Alteration
from tests.mount import cacheoracle, oracle
from tests.mount.conftest import Mount, daemons_with, mounted, run, told
from tests.mount.loopfs import filesystem
from tests.mount.oracle import Cloak, Look, Map, Outcome, Request, Rules, Survey
from tests.waiting import let_expire, wait_until

EXAMPLES, STEPS = 6, 25

MAPS = (
    Map("uid", 0, 0, "map", 0),
    Map("uid", 11001, 11009, "map", 1001),
    Map("gid", 0, 0, "map", 0),
    Map("gid", 12001, 12009, "map", 2001),
)
# A second id that nobody has: of two callers, the kernel would take one for the owner of what the other one has made.
SQUASHED = (
    Map("uid", 0, 0, "map", 0),
    Map("uid", 11001, 11001, "squash", 1001),
    Map("uid", 11009, 11009, "squash", 1001),
    Map("uid", 11002, 11008, "map", 1002),
)
WILD = 777  # an id that no definition names

ACCESS_ACL = "system.posix_acl_access"

# Attributes that are not the same for all are remembered for 2 ms, in ticks of the kernel's clock.
AN_INSTANT = 0.012

POLICIES = {
    "not-cloaked": Rules(MAPS),
    "owners-only": Rules(MAPS, (Cloak("uid", "+000", 1001, 1003),)),
    "others-and-group": Rules(MAPS, (Cloak("uid", "+077", 0, 1009), Cloak("gid", "-002", 2002, 2009))),
    "by-group": Rules(MAPS, (Cloak("gid", "+070", 2001, 2002), Cloak("gid", "-400", 2003, 2003))),
    "special-bits": Rules(MAPS, (Cloak("uid", "-600", 1001, 1001), Cloak("uid", "+107", 1002, 1009))),
    "identity": Rules((), (Cloak("uid", "+070", 11001, 11002), Cloak("uid", "+007", 11003, 65534))),
    "exempt": Rules(MAPS, (Cloak("uid", "+077", 0, 1009), Cloak("gid", "-002", 2002, 2009)), exempt=(0, 1003)),
    "checked-by-the-kernel": Rules(
        (), (Cloak("uid", "+070", 11001, 11002), Cloak("uid", "+007", 11003, 65534)), checked=True
    ),
    # The set-id bits by which others see a file are not shown, so that the kernel does not have them dropped.
    "hidden-set-id": Rules(
        (*SQUASHED, *MAPS[2:]), (Cloak("uid", "+600", 1001, 1001), Cloak("uid", "+604", 1002, 1009))
    ),
}


# uid, gid, supplementary groups, as the client's machine has them.
CALLERS = [
    (0, 0, ()),
    (11001, 12001, (12002,)),
    (11002, 12002, ()),
    (11003, 12003, (12001, 12002, WILD)),
    (65534, 65534, ()),
]
UIDS = [0, 11001, 11002, 11003, 65534, WILD]
GIDS = [0, 12001, 12002, 12003, 65534, WILD]


@dataclass
class Party:
    """One caller: a process that uses the mount, and one with the mapped identity that uses the model."""

    rules: Rules
    ids: tuple[int, int, tuple[int, ...]]
    client: User = field(init=False)
    server: User = field(init=False)

    def __post_init__(self) -> None:
        self.client = User(*self.ids)
        self.who = self.rules.who(*self.ids)
        self.server = User(self.who.uid, self.who.gid, self.who.groups - {self.who.gid})


@dataclass
class World:
    """What is made once for all sequences of one policy."""

    rules: Rules
    mount: Mount
    model: str
    parties: list[Party]
    views: bool  # each caller through a fixed view of its own, of one mount
    checked: bool  # the daemon checks what the kernel remembers
    delays: bool  # some of its replies are held back, and it hears of changes behind the mount late
    passes: bool  # the kernel reads and writes some files by itself
    reported: int = 0  # how many violations were found so far
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def wait_for_daemon(self) -> None:
        """Wait until the daemon knows of what was changed behind its back, and what the kernel keeps briefly has gone.

        One that checks itself answers statfs(2) only then, and checks everything each time.
        """
        if self.checked:
            os.statvfs(self.mount.path)
            let_expire(AN_INSTANT)
        else:
            told(self.mount.path)


@contextlib.contextmanager
def world(
    rules: Rules,
    *,
    views: bool = False,
    kind: str = "",
    altered: Sequence[Alteration] = (),
    tuning: Tuning = STANDARD,
    delays: bool = False,
) -> Iterator[World]:
    """Both trees, on a new file system of this kind (see `loopfs`), else on that of the temporary directory.

    The daemon is altered like this, with `cacheoracle` for example.
    """
    base = tempfile.mkdtemp(prefix="cloakfs-test-")
    os.chmod(base, 0o755)
    parties: list[Party] = []
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, base)
        top = stack.enter_context(filesystem(kind, base)) if kind else base
        made = [os.path.join(top, "real"), os.path.join(top, "model"), os.path.join(base, "mnt")]
        for path in made:
            os.mkdir(path, 0o755)
        real, model, point = made
        options = rules.options
        if views:
            items = (f"{uid}:{gid}" + ":" * bool(more) + "+".join(map(str, more)) for uid, gid, more in CALLERS)
            options += f",views={' '.join(items)}"
        key = Mount(real, point).key
        stack.callback(shutil.rmtree, os.path.join(STATE_DIR, key), ignore_errors=True)
        stack.callback(Path(RUN_DIR, f"{key}.log").unlink, missing_ok=True)
        stack.enter_context(daemons_with(*altered, tuning=tuning))
        with mounted(real, point, "-o", options) as mount:
            try:
                parties += [Party(rules, ids) for ids in CALLERS]
                (status,) = json.loads(run("status", mount.path, "--json").stdout)
                passes = not status["passthrough"].startswith("no file")
                yield World(rules, mount, model, parties, views, checked=bool(altered), delays=delays, passes=passes)
            finally:
                for party in parties:
                    party.client.close()
                    party.server.close()


@dataclass
class Held:
    """Something that one caller has open on both trees."""

    party: Party
    client_fd: int
    server_fd: int
    flags: int


paths = st.lists(st.sampled_from("ab"), min_size=1, max_size=3).map("/".join)
# Not sticky and set-id at once: when its owner writes to such a file, FUSE's kernel asks for both to be dropped, as a
# chmod(2) would.
modes = st.one_of(
    st.sampled_from(
        [0o644, 0o600, 0o666, 0o755, 0o700, 0o777, 0o2770, 0o770, 0o660, 0o4755, 0o2775, 0o1777, 0o111, 0o040, 0o004, 0]
    ),
    st.integers(0, 0o7777).map(lambda mode: mode & ~0o1000 if mode & 0o6000 else mode),
)
callers = st.integers(0, len(CALLERS) - 1)
targets = st.sampled_from(["a", "b", "a/b", "b/a", "a/a/b", ".", "nowhere"])
flags = st.sampled_from(
    [
        os.O_RDONLY,
        os.O_WRONLY,
        os.O_RDWR,
        os.O_WRONLY | os.O_APPEND,
        os.O_WRONLY | os.O_TRUNC,
        os.O_RDONLY | os.O_TRUNC,
        os.O_WRONLY | os.O_CREAT,
        os.O_RDWR | os.O_CREAT | os.O_APPEND,
        os.O_WRONLY | os.O_CREAT | os.O_EXCL,
        os.O_WRONLY | os.O_CREAT | os.O_TRUNC,
        os.O_RDONLY | os.O_CREAT,
        os.O_RDONLY | os.O_DIRECTORY,
        os.O_RDONLY | os.O_NOFOLLOW,
        os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW,
    ]
)
permissions = st.integers(0, 7)
changes = st.one_of(
    st.builds(Request, st.just("chmod"), paths, mode=modes),
    st.builds(Request, st.just("rename"), paths, paths, flags=st.sampled_from([0, 2])),
    st.builds(Request, st.just("link"), paths, paths),
)
owners = st.sampled_from([(1001, 2001), (1002, 2002), (11001, 12001), (11003, 2), (99, 99)])


def acl(entries: list[tuple[int, int, int]]) -> bytes:
    """system.posix_acl_*: tag, permissions, id."""
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)


class TwoTrees(RuleBasedStateMachine):
    """The mount and the model, in a directory of their own for each sequence."""

    world: ClassVar[World]
    steps: ClassVar[Iterator[int]] = itertools.count()
    """Counts the steps of all sequences of this process."""

    def __init__(self) -> None:
        super().__init__()
        world = self.world
        name = f"run{next(world.numbers)}"
        self.name = name
        self.real, self.model = (os.path.join(at, name) for at in (world.mount.source, world.model))
        for path in (self.real, self.model):
            os.mkdir(path)
            os.chmod(path, 0o777)
            os.chown(path, 99, 99)  # everybody sees it until somebody changes it, through a link to "."
        self.held: list[Held] = []
        self.done: list[str] = []  # what was done, in case that it cannot be done again
        self.looks = 0
        if world.views:
            world.wait_for_daemon()

    def top(self, party: Party) -> str:
        """Where the caller finds the tree."""
        view = [f"@{party.ids[0]}"] if self.world.views else []
        return os.path.join(self.world.mount.path, *view, self.name)

    def teardown(self) -> None:
        try:
            self.compare(self.world.parties)
            self._check_what_is_remembered()
        finally:
            for held in self.held:
                self._close(held)
            for path in (self.real, self.model):
                shutil.rmtree(path)

    def look(self, party: Party) -> Look:
        return Look(self.world.rules, party.who, self.model)

    # -- requests

    def ask(self, caller: int, request: Request, on_server: Request | None = None, *, unmapped: bool = False) -> None:
        """Make a request through the mount and on the model, where it may read differently, and compare.

        One that follows a protected link is not made (`oracle.PROTECTED_SYMLINKS`).
        """
        with contextlib.suppress(oracle.Protected):
            self._ask(caller, request, on_server, unmapped=unmapped)

    def _ask(self, caller: int, request: Request, on_server: Request | None, *, unmapped: bool) -> None:
        party = self.world.parties[caller]
        self.done.append(f"{party.ids[0]}: {request}")
        on_server = on_server or request
        if request.name == "open" and self._is_fifo(party, request):
            return  # what a FIFO of a mount leads to is not the real tree's
        if request.name == "chmod" and self._may_drop_set_id(party, request):
            kept = oracle.keeping_hidden_bits(self.world.rules, self.model, request, stat.S_ISVTX)
            expected: Outcome = oracle.outcome(self.model, kept)  # by root
            also: frozenset[int] = frozenset()
        else:
            expected, also = party.server.do(oracle.on_model, self.look(party), on_server, unmapped=unmapped)
        got = party.client.do(oracle.outcome, self.top(party), request)
        assert got == expected or (expected[0] and got[0] in also), (
            f"{party.ids}: {request}: {_said(got)}, expected {_said(expected)}"
        )
        if self.world.views:
            self.world.wait_for_daemon()  # what one view changed is behind the others' backs

    def _is_fifo(self, party: Party, request: Request) -> bool:
        try:
            place = Look(Rules(), party.who, self.model).walk(request.path, follow=True)
        except OSError:
            return False
        return place.info is not None and stat.S_ISFIFO(place.info.st_mode)

    def _may_drop_set_id(self, party: Party, request: Request) -> bool:
        """A mount cannot tell a chmod(2) that drops the set-id bits from what the kernel does before a write."""
        try:
            place = party.server.do(self.look(party).walk, request.path, follow=True)
        except (oracle.Hidden, OSError):
            return False
        if place.info is None or not stat.S_ISREG(place.info.st_mode) or party.who.uid in (0, place.info.st_uid):
            return False
        before = stat.S_IMODE(place.info.st_mode)
        hidden = self.world.rules.hidden_bits(place.info)
        by_write = before & ~hidden & (0o6000 if before & stat.S_IXGRP else stat.S_ISUID)
        return bool(
            by_write
            and before & ~(request.mode | hidden) & ~stat.S_ISVTX == by_write
            and not request.mode & ~before
            and party.server.do(os.access, place.path, os.W_OK)
        )

    @initialize(owners=st.tuples(callers, callers, callers), kinds=st.tuples(modes, modes, modes))
    def furnish(self, owners: tuple[int, int, int], kinds: tuple[int, int, int]) -> None:
        """Two directories and a file of somebody's."""
        for name, owner, mode in zip(("a", "b", "a/b"), owners, kinds, strict=True):
            who = self.world.parties[owner].who
            for root in (self.real, self.model):
                path = os.path.join(root, name)
                if "/" in name:
                    with open(path, "wb") as file:
                        file.write(b"content")
                else:
                    os.mkdir(path)
                os.chown(path, who.uid, who.gid)
                os.chmod(path, mode)
        for caller in range(len(CALLERS)):
            self._hold(caller, "a/b", os.O_PATH)

    @rule(caller=callers, name=st.sampled_from(["mkdir", "mkdir", "mkfifo"]), path=paths, mode=modes)
    def make(self, caller: int, name: str, path: str, mode: int) -> None:
        self.ask(caller, Request(name, path, mode=mode))

    @rule(caller=callers, path=paths, text=targets)
    def symlink(self, caller: int, path: str, text: str) -> None:
        self.ask(caller, Request("symlink", path, text))

    @rule(caller=callers, path=paths, flags=flags, mode=modes, data=st.binary(max_size=5))
    def open(self, caller: int, path: str, flags: int, mode: int, data: bytes) -> None:
        self.ask(caller, Request("open", path, flags=flags, mode=mode & 0o777, value=data))

    @rule(caller=callers, path=paths, size=st.integers(0, 9))
    def truncate(self, caller: int, path: str, size: int) -> None:
        self.ask(caller, Request("truncate", path, mode=size))

    @rule(caller=callers, name=st.sampled_from(["unlink", "rmdir"]), path=paths)
    def remove(self, caller: int, name: str, path: str) -> None:
        self.ask(caller, Request(name, path))

    @rule(caller=callers, old=paths, new=paths)
    def link(self, caller: int, old: str, new: str) -> None:
        self.ask(caller, Request("link", old, new))

    @rule(caller=callers, old=paths, new=paths, flags=st.sampled_from([0, 0, 1, 2]))
    def rename(self, caller: int, old: str, new: str, flags: int) -> None:
        self.ask(caller, Request("rename", old, new, flags=flags))

    @rule(caller=callers, path=paths, mode=modes)
    def chmod(self, caller: int, path: str, mode: int) -> None:
        self.ask(caller, Request("chmod", path, mode=mode))

    @rule(
        caller=st.sampled_from([0, 0, 1, 2, 3, 4]),
        name=st.sampled_from(["chown", "lchown"]),
        path=paths,
        uid=st.sampled_from([-1, *UIDS]),
        gid=st.sampled_from([-1, *GIDS]),
    )
    def chown(self, caller: int, name: str, path: str, uid: int, gid: int) -> None:
        rules = self.world.rules
        server_uid, server_gid = (
            (-1 if uid < 0 else rules.server("uid", uid)),
            (-1 if gid < 0 else rules.server("gid", gid)),
        )
        if uid == gid == -1:
            return  # drops set-id bits, and for a mount looks like a chmod(2) that drops the sticky bit, too
        request = Request(name, path, ids=(uid, gid))
        mapped = replace(request, ids=(server_uid or 0, server_gid or 0))
        self.ask(caller, request, mapped, unmapped=None in (server_uid, server_gid))

    @rule(
        caller=callers,
        path=paths,
        which=st.sampled_from(["access", "access", "default"]),
        user=st.sampled_from(UIDS),
        group=st.sampled_from(GIDS),
        bits=st.tuples(permissions, permissions, permissions, permissions, permissions, permissions),
    )
    def setfacl(self, caller: int, path: str, which: str, user: int, group: int, bits: tuple[int, ...]) -> None:
        rules = self.world.rules
        server_user, server_group = rules.server("uid", user), rules.server("gid", group)

        def value(uid: int, gid: int) -> bytes:
            none = 2**32 - 1
            tags = [(1, none), (2, uid), (4, none), (8, gid), (0x10, none), (0x20, none)]
            return acl([(tag, perm, entry_id) for (tag, entry_id), perm in zip(tags, bits, strict=True)])

        request = Request("setxattr", path, f"system.posix_acl_{which}", value=value(user, group))
        mapped = replace(request, value=value(server_user or 0, server_group or 0))
        self.ask(caller, request, mapped, unmapped=None in (server_user, server_group))

    @rule(caller=callers, path=paths, which=st.sampled_from(["access", "default"]))
    def forget_acl(self, caller: int, path: str, which: str) -> None:
        self.ask(caller, Request("removexattr", path, f"system.posix_acl_{which}"))

    @rule(caller=callers, path=paths, name=st.sampled_from(["touch", "utime", "access", "readlink", "list", "lstat"]))
    def other(self, caller: int, path: str, name: str) -> None:
        self.ask(caller, Request(name, path))

    @rule(request=st.one_of(changes, st.builds(Request, st.just("lchown"), paths, ids=owners)))
    def behind(self, request: Request) -> None:
        """The server's root changes something on the real tree itself."""
        self.done.append(f"behind: {request}")
        assert oracle.outcome(self.real, request) == oracle.outcome(self.model, request)
        self.world.wait_for_daemon()

    @precondition(lambda self: self.world.delays)
    @rule(looker=callers, changer=st.one_of(st.none(), callers), request=changes)
    def change_while_somebody_looks(self, looker: int, changer: int | None, request: Request) -> None:
        """Answers and changes cross. What the one who looks finds may be either."""
        if looker == changer:
            looker = (looker + 1) % len(CALLERS)
        party = self.world.parties[looker]
        self.done.append(f"while {party.ids[0]} looks, {'behind' if changer is None else ''}: {request}")
        party.client.start(_glance, self.top(party), oracle.everything(self.model))
        try:
            if changer is None:
                assert oracle.outcome(self.real, request) == oracle.outcome(self.model, request)
            else:
                self.ask(changer, request)
        finally:
            party.client.answer_within(60)
        self.world.wait_for_daemon()

    @rule(path=st.sampled_from("ab"), ids=owners)
    def give_away_the_top(self, path: str, ids: tuple[int, int]) -> None:
        """Which hides all below at one stroke, or shows it again."""
        self.behind(Request("lchown", path, ids=ids))

    @precondition(lambda self: self.world.checked)
    @rule(
        caller=callers,
        tops=st.permutations("ab"),
        what=st.sampled_from(["a", "b", "b/a"]),
        flags=st.sampled_from([0, linux.RENAME_EXCHANGE]),
    )
    def publish(self, caller: int, tops: Sequence[str], what: str, flags: int) -> None:
        """Make something in a directory of one's own that nobody else knows, look at it, and take it out of there."""
        old, new = f"{tops[0]}/own/{what}", f"{tops[1]}/public"
        self.behind(Request("chmod", tops[0], mode=0o777))
        self.behind(Request("chmod", tops[1], mode=0o777))
        self.ask(caller, Request("mkdir", f"{tops[0]}/own", mode=0o700))
        self.ask(caller, Request("mkfifo", f"{tops[0]}/own/a", mode=0o600))
        self.ask(caller, Request("mkdir", f"{tops[0]}/own/b", mode=0o755))
        self.ask(caller, Request("mkdir", f"{tops[0]}/own/b/a", mode=0o700))
        if flags:
            self.ask(caller, Request("mkdir", new, mode=0o755))
        self._look_at_all(caller)
        self.ask(caller, Request("rename", old, new, flags=flags))
        self._look_at_all(caller)

    def _look_at_all(self, caller: int) -> None:
        party = self.world.parties[caller]
        for _ in range(2):
            party.client.do(_glance, self.top(party), oracle.everything(self.model))

    @precondition(lambda self: self.world.checked)
    @rule(
        changer=st.one_of(st.none(), callers),
        request=st.one_of(
            st.builds(
                Request,
                st.just("chmod"),
                st.sampled_from(["a", "b", "a/b"]),
                mode=st.sampled_from([0o700, 0o750, 0o711, 0o755, 0o007]),
            ),
            st.builds(Request, st.just("rename"), st.sampled_from("ab"), st.sampled_from(["a/a", "b/a", "a/b/b"])),
        ),
    )
    def make_private_or_public(self, changer: int | None, request: Request) -> None:
        """Open or shut a directory, or move it into another one: what is remembered below is for others then."""
        if changer is None:
            self.behind(request)
        else:
            self.ask(changer, request)

    @rule(
        owner=callers,
        top=st.sampled_from("ab"),
        kinds=st.tuples(st.booleans(), st.booleans()),
        how=st.sampled_from(["removed", "replaced", "moved", "exchanged"]),
        through=st.tuples(st.booleans(), st.booleans()),
        modes=st.tuples(modes, modes),
    )
    def make_again_what_is_held(
        self,
        owner: int,
        top: str,
        kinds: tuple[bool, bool],
        how: str,
        through: tuple[bool, bool],
        modes: tuple[int, int],
    ) -> None:
        """Whoever may keeps something open that loses its name, and looks at it, before and after another one gets it.

        Args:
            owner: who does all this, or for whom it is done behind the mount.
            top: the directory.
            kinds: whether it is a directory, and whether what gets its name is.
            how: it loses the name.
            through: whether that is done through the mount, and whether the name is made again through the mount.
            modes: of the two.
        """
        name, other = f"{top}/again", f"{top}/aside"
        self._do(None, Request("chmod", top, mode=0o777), *_removal(self.model, name), *_removal(self.model, other))
        self._make(None, owner, name, kinds[0], modes[0])
        self.world.wait_for_daemon()
        held = [one for caller in range(len(CALLERS)) if (one := self._open(caller, name, os.O_PATH)) is not None]
        try:
            for caller in range(len(CALLERS)):
                self._look_at_all(caller)
            by = owner if through[0] else None
            if how == "removed":
                self._do(by, *_removal(self.model, name))
            elif how == "moved":
                self._do(by, Request("rename", name, other))
            else:
                self._make(by, owner, other, kinds[1], modes[1])
                self._do(by, Request("rename", other, name, flags=linux.RENAME_EXCHANGE * (how == "exchanged")))
            self._look_at_held(held)
            if how in ("removed", "moved"):
                self._make(owner if through[1] else None, owner, name, kinds[1], modes[1])
                self._look_at_held(held)
            # Whoever sees what has the name now makes the daemon find it.
            self.compare(sorted(self.world.parties, key=lambda party: party is self.world.parties[owner]))
        finally:
            for one in held:
                self._close(one)

    def _do(self, caller: int | None, *requests: Request) -> None:
        """By a caller; or behind the mount, which is not told yet."""
        for request in requests:
            if caller is None:
                self.done.append(f"behind: {request}")
                assert oracle.outcome(self.real, request) == oracle.outcome(self.model, request)
            else:
                self.ask(caller, request)

    def _make(self, caller: int | None, owner: int, path: str, is_directory: bool, mode: int) -> None:
        """By a caller, or behind the mount for the owner; what is in the way stays."""
        if is_directory:
            made = Request("mkdir", path, mode=mode)
        else:
            made = Request("open", path, flags=os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode=mode & 0o777)
        self._do(caller, made)
        if caller is None:
            who = self.world.parties[owner].who
            self._do(None, Request("lchown", path, ids=(who.uid, who.gid)), Request("chmod", path, mode=mode))

    def _look_at_held(self, held: list[Held]) -> None:
        self.world.wait_for_daemon()
        for one in held:
            one.party.client.error(os.fstat, one.client_fd)

    @rule(
        writer=callers,
        changer=st.one_of(st.none(), callers),
        top=st.sampled_from("ab"),
        mode=st.sampled_from([0o4755, 0o2755, 0o6700]),
    )
    def write_to_what_has_become_set_id(self, writer: int, changer: int | None, top: str, mode: int) -> None:
        """The bits come while the file is open for writing, everybody looks, and they go with the content."""
        path = f"{top}/program"
        self.behind(Request("lchown", top, ids=(0, 0)))
        self.behind(Request("chmod", top, mode=0o777))
        self.ask(writer, Request("open", path, flags=os.O_WRONLY | os.O_CREAT, mode=0o755))
        held = self._open(writer, path, os.O_WRONLY)
        if held is None:
            return
        try:
            request = Request("chmod", path, mode=mode)
            if changer is None:
                self.behind(request)
            else:
                self.ask(changer, request)
            for looker in range(len(CALLERS)):
                self._look_at_all(looker)
            for user, fd in (held.party.server, held.server_fd), (held.party.client, held.client_fd):
                user.do(os.write, fd, b"other")
            self.done.append(f"{held.party.ids[0]} writes to {path}")
            self._note_dropped_set_group_id(held)
        finally:
            self._close(held)

    @precondition(lambda self: len(self.held) < 8)
    @rule(
        caller=callers,
        which=st.integers(0, 20),
        flags=st.sampled_from(
            [os.O_RDONLY, os.O_RDONLY | os.O_DIRECTORY, os.O_PATH, os.O_RDWR, os.O_RDWR | os.O_APPEND]
        ),
    )
    def hold(self, caller: int, which: int, flags: int) -> None:
        """Keep something open, whatever becomes of it."""
        there = oracle.everything(self.model)
        self._hold(caller, there[which % len(there)] if there else "a", flags)

    def _hold(self, caller: int, path: str, flags: int) -> None:
        held = self._open(caller, path, flags)
        if held is not None:
            self.held.append(held)

    def _held(self, which: int) -> Held:
        return self.held[which % len(self.held)]

    def _ask_by_held(self, held: Sequence[Held], call: Callable[..., object], *args: object) -> None:
        """Call a function with the descriptors that one caller holds, in both trees, and compare what that says."""
        party = held[0].party
        what = f"{party.ids[0]}: {call.__name__}{args} by descriptor {[*map(self.held.index, held)]}"
        self.done.append(what)
        expected = party.server.do(_outcome_of, call, *(it.server_fd for it in held), *args)
        got = party.client.do(_outcome_of, call, *(it.client_fd for it in held), *args)
        assert got == expected, f"{what}: {got}, expected {expected}"
        if self.world.views:
            self.world.wait_for_daemon()  # what one view changed is behind the others' backs

    def _note_dropped_set_group_id(self, held: Held) -> None:
        """Where files pass, a write drops a set-group-ID bit that came while they were open (docs/limits.md)."""
        written = held.party.server.do(os.fstat, held.server_fd)
        if not self.world.passes or written.st_mode & (stat.S_ISGID | stat.S_IXGRP) != stat.S_ISGID:
            return
        for path in oracle.everything(self.model):
            at = os.path.join(self.model, path)
            if os.path.samestat(os.lstat(at), written):
                if os.lstat(os.path.join(self.real, path)).st_mode == written.st_mode & ~stat.S_ISGID:
                    os.chmod(at, stat.S_IMODE(written.st_mode) & ~stat.S_ISGID)
                return

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 7), data=st.binary(min_size=1, max_size=5))
    def write(self, which: int, data: bytes) -> None:
        held = self._held(which)
        self._ask_by_held([held], os.write, data)
        self._note_dropped_set_group_id(held)

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 7), size=st.integers(0, 9))
    def truncate_by_descriptor(self, which: int, size: int) -> None:
        self._ask_by_held([self._held(which)], os.ftruncate, size)

    @precondition(lambda self: self.held and hasattr(pyfuse3, "FileLock"))
    @rule(
        which=st.integers(0, 7),
        kind=st.sampled_from(["fcntl", "OFD", "flock"]),
        how=st.sampled_from([fcntl.F_RDLCK, fcntl.F_WRLCK, fcntl.F_WRLCK, fcntl.F_UNLCK]),
        start=st.integers(0, 3),
        length=st.integers(0, 3),
    )
    def lock(self, which: int, kind: str, how: int, start: int, length: int) -> None:
        """Without waiting. (Locks on directories hold in one view alone.)"""
        held = self._held(which)
        if stat.S_ISREG(held.party.server.do(os.stat, held.server_fd).st_mode):
            self._ask_by_held([held], _lock, kind, how, start, length)

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 7), into=st.integers(0, 7), size=st.integers(0, 9), at=st.integers(0, 5))
    def copy(self, which: int, into: int, size: int, at: int) -> None:
        """By copy_file_range(2), from one file that a caller has open into another one."""
        source, target = self._held(which), self._held(into)
        if source.party is target.party:
            self._ask_by_held([source, target], os.copy_file_range, size, 0, at)

    @staticmethod
    def _close(held: Held) -> None:
        held.party.client.do(os.close, held.client_fd)
        held.party.server.do(os.close, held.server_fd)

    def _open(self, caller: int, path: str, flags: int) -> Held | None:
        """Open it in both trees; None if that fails, or is not to be tried."""
        party = self.world.parties[caller]
        request = Request("open", path, flags=flags)
        try:
            if self._is_fifo(party, request) or party.server.do(oracle.judge, self.look(party), request)[0]:
                return None
        except oracle.Protected:
            return None
        expected = party.server.error(_probe, os.path.join(self.model, path), flags)
        assert party.client.error(_probe, os.path.join(self.top(party), path), flags) == expected
        if expected:
            return None
        server_fd = party.server.do(os.open, os.path.join(self.model, path), flags)
        client_fd = party.client.do(os.open, os.path.join(self.top(party), path), flags)
        self.done.append(f"{party.ids[0]} holds {path}")
        return Held(party, client_fd, server_fd, flags)

    # -- what must agree after every step

    @invariant()
    def one_after_the_other_sees_what_the_model_says(self) -> None:
        """Each in turn, which leaves time for several times as many steps; at the end everybody looks."""
        next(self.steps)
        self.looks += 1
        self._check_what_is_remembered()
        self.compare([self.world.parties[self.looks % len(CALLERS)]])
        self._check_what_is_remembered()

    def _check_what_is_remembered(self) -> None:
        world = self.world
        if world.checked:
            found = cacheoracle.violations(world.mount)
            new, world.reported = found[world.reported :], len(found)
            assert not new, "\n".join([*new, "after:", *self.done])

    def compare(self, lookers: list[Party]) -> None:
        paths = oracle.everything(self.model)
        # What the server has is the same on both sides, down to the ids.
        real, model = oracle.survey(self.real, paths), oracle.survey(self.model, paths)
        differ = [f"{path!r}: {real[path]}, model {model[path]}" for path in ["", *paths] if real[path] != model[path]]
        assert not differ, "\n".join([*differ, "after:", *self.done])
        infos = {path: os.lstat(os.path.join(self.model, path)) for path in paths}
        top = os.lstat(self.model)
        for path, info in infos.items():
            if stat.S_ISREG(info.st_mode):
                assert _content(os.path.join(self.real, path)) == _content(os.path.join(self.model, path)), path
        reachable: set[str] = set()
        for party in lookers:
            seen: Survey = party.client.do(oracle.survey, self.top(party), paths)
            expected: Survey = party.server.do(oracle.expected, self.look(party), paths, infos)
            for path in ["", *paths]:
                assert self._in_client_ids(expected[path]) == seen[path], f"{party.ids} at {path!r}"
                if not seen[path][0].error:
                    reachable.add(path)
        let_expire(AN_INSTANT)
        for held in self.held:
            if stat.S_ISDIR(held.party.server.do(os.stat, held.server_fd).st_mode):
                self._check_above(held, infos)
            self._check_held(held, infos, reachable, shows_top=self.world.rules.shows(held.party.who, top))

    def _in_client_ids(self, found: oracle.Entry) -> oracle.Entry:
        """With the ids inside the ACL translated."""
        seen, listed = found
        if not seen.acl:
            return found
        rules = self.world.rules
        entries = []
        for tag, perm, entry_id in struct.iter_unpack("<HHI", seen.acl[4:]):
            kind = {2: "uid", 8: "gid"}.get(tag)
            entries.append((tag, perm, rules.client(kind, entry_id) if kind else entry_id))  # type: ignore[arg-type]
        return seen._replace(acl=acl(sorted(entries, key=lambda e: (e[0], e[2])))), listed

    def _check_above(self, held: Held, infos: dict[str, os.stat_result]) -> None:
        """Who holds a directory gets by ".." where the kernel has it, which is not asked for: that must be visible."""
        rules, who = self.world.rules, held.party.who
        tops = os.lstat(self.world.mount.source), os.lstat(self.model)
        inside = [info for path, info in infos.items() if all(rules.shows(who, infos[part]) for part in _parts(path))]
        visible = [tops[0], *([tops[1], *inside] if rules.shows(who, tops[1]) else [])]
        shown = {
            (
                info.st_mode & ~rules.hidden_bits(info),
                rules.client("uid", info.st_uid),
                rules.client("gid", info.st_gid),
            )
            for info in visible
            if stat.S_ISDIR(info.st_mode)
        }
        deadline = time.monotonic() + 60
        while True:
            try:
                above = held.party.client.do(os.stat, "..", dir_fd=held.client_fd)
            except OSError:
                return
            found = above.st_mode, above.st_uid, above.st_gid
            if found in shown:
                return
            # Another one who holds something may just have asked for it.
            assert time.monotonic() < deadline, f"{who} sees by '..' {found}, which is none of {shown}"
            let_expire(AN_INSTANT)

    def _check_held(
        self, held: Held, infos: dict[str, os.stat_result], reachable: set[str], *, shows_top: bool
    ) -> None:
        """An object by descriptor: visible by one of its places, or a file that this caller has open; else ESTALE."""
        rules, who = self.world.rules, held.party.who
        info = held.party.server.do(os.stat, held.server_fd)
        if info.st_nlink == 0 or info.st_ino == os.stat(self.model).st_ino:  # the top, by a link, is nobody's
            return
        places = [path for path, there in infos.items() if there.st_ino == info.st_ino]
        visible = [path for path in places if shows_top and all(rules.shows(who, infos[part]) for part in _parts(path))]
        has_open = stat.S_ISREG(info.st_mode) and any(
            other.party is held.party
            and not other.flags & os.O_PATH
            and held.party.server.do(os.stat, other.server_fd).st_ino == info.st_ino
            for other in self.held
        )
        client = held.party.client
        if not visible and not has_open:
            # The daemon may be told late that a file was closed.
            wait_until(lambda: client.error(os.stat, held.client_fd), every=0.001)
            error = client.error(os.stat, held.client_fd)
            assert error == errno.ESTALE, f"{who} still sees {places} by descriptor"
            if not held.flags & os.O_PATH:
                assert client.error(os.getxattr, held.client_fd, ACCESS_ACL) == errno.ESTALE
                if stat.S_ISDIR(info.st_mode):
                    assert client.error(_listed_anew, held.client_fd) == errno.ESTALE
            return
        try:
            # Once: the kernel may tell it from what it has just told another caller, and a moment later not any more.
            seen = client.do(os.stat, held.client_fd)
        except OSError as exc:
            if exc.errno == errno.ESTALE and not has_open and not reachable.intersection(visible):
                return  # nobody could look it up where it is now: it may be taken for hidden
            raise
        assert (seen.st_mode, seen.st_uid, seen.st_gid) == (
            info.st_mode & ~rules.hidden_bits(info),
            rules.client("uid", info.st_uid),
            rules.client("gid", info.st_gid),
        )
        if held.flags & os.O_PATH:
            return
        if stat.S_ISREG(info.st_mode):
            assert client.do(os.pread, held.client_fd, 1000, 0) == held.party.server.do(
                os.pread, held.server_fd, 1000, 0
            )
        elif stat.S_ISDIR(info.st_mode):
            prefix = f"{places[0]}/"
            names = held.party.server.do(_listed_anew, held.server_fd)
            assert sorted(client.do(_listed_anew, held.client_fd)) == sorted(
                name for name in names if rules.shows(who, infos[prefix + name])
            )


def _outcome_of(call: Callable[..., object], *args: object) -> tuple[int, object]:
    """The errno of a call, and what it returns otherwise."""
    try:
        return 0, call(*args)
    except OSError as exc:
        return exc.errno or -1, None


def _lock(fd: int, kind: str, how: int, start: int, length: int) -> None:
    """Lock these bytes of the file, or all of it (flock(2)), without waiting."""
    if kind == "flock":
        fcntl.flock(
            fd, {fcntl.F_RDLCK: fcntl.LOCK_SH, fcntl.F_WRLCK: fcntl.LOCK_EX}.get(how, fcntl.LOCK_UN) | fcntl.LOCK_NB
        )
    else:
        command = fcntl.F_SETLK if kind == "fcntl" else fcntl.F_OFD_SETLK
        fcntl.fcntl(fd, command, struct.pack("hhqqi4x", how, os.SEEK_SET, start, length, 0))


def _glance(top: str, paths: list[str]) -> None:
    """Look at everything while it may change."""
    for path in ("", *paths):
        for call in (os.lstat, os.listdir, oracle.acl_of):
            with contextlib.suppress(OSError):
                call(os.path.join(top, path))


def _removal(root: str, path: str) -> list[Request]:
    """The requests that remove what is there, if it is no directory with something in it."""
    try:
        info = os.lstat(os.path.join(root, path))
    except OSError:
        return []
    return [Request("rmdir" if stat.S_ISDIR(info.st_mode) else "unlink", path)]


def _probe(path: str, flags: int) -> None:
    os.close(os.open(path, flags))


def _listed_anew(fd: int) -> list[str]:
    """What is in the directory now; without rewinddir(3), btrfs tells what was in it when it was opened."""
    os.lseek(fd, 0, os.SEEK_SET)
    return os.listdir(fd)


def _parts(path: str) -> list[str]:
    """The path and those of all directories above it."""
    parts = path.split("/")
    return ["/".join(parts[: n + 1]) for n in range(len(parts))]


def _content(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _said(outcome: Outcome) -> str:
    return errno.errorcode[outcome[0]] if outcome[0] else f"success {outcome[1]!r}"


def search(
    policy: str,
    *,
    examples: int,
    steps: int,
    seed: int,
    kind: str = "",
    checked: bool = False,
    delays: bool = False,
) -> None:
    """Try so many sequences of up to so many steps; raises what the smallest one that fails raises.

    Args:
        policy: one of `ALL`.
        examples: how many sequences.
        steps: of each, at most.
        seed: decides which.
        kind: of the file system to make for it.
        checked: whether the daemon checks what the kernel remembers (`cacheoracle`).
        delays: whether replies and events are late at times, so that they cross changes; it is checked then, too.
    """
    rules = POLICIES["identity" if policy == "views" else policy]
    # Of eight seeds, four have the watcher read what is changed, as where several mounts show the same; two, later.
    readers = {"shared": seed // 2 % 2 == 1, "later": seed // 2 % 4 == 2}
    install = partial(cacheoracle.install, seed if delays else None, **readers)
    altered = [install] if checked or delays else []
    # With every other seed, all is forgotten little by little, while others go on; else what is little, at once.
    tuning = Tuning(names_at_once=1) if delays and seed % 2 else STANDARD
    with world(rules, views=policy == "views", kind=kind, altered=altered, tuning=tuning, delays=delays) as made:

        @hypothesis.seed(seed)
        class Here(TwoTrees):
            world = made

        chosen = settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
            database=None,
            derandomize=False,
        )
        run_state_machine_as_test(Here, settings=chosen)


ALL = (*POLICIES, "views")


@pytest.mark.timeout(0)
@pytest.mark.parametrize("policy", ALL)
def test_two_trees(policy: str) -> None:
    search(policy, examples=EXAMPLES, steps=STEPS, seed=ALL.index(policy))


def test_the_top_may_be_hidden() -> None:
    """By a change through a link to ".", and everything in it with it."""
    with world(POLICIES["others-and-group"]) as made:

        class Here(TwoTrees):
            world = made

        machine = Here()
        machine.furnish((0, 1, 2), (0o777, 0o777, 0o666))
        machine.remove(0, "rmdir", "b")
        machine.symlink(0, "b", ".")
        for mode in (0o777, 0, 0o711):
            machine.chmod(0, "b", mode)
            machine.make(1, "mkdir", "a/a", 0o755)
            machine.rename(2, "a/a", "b", 0)
            machine.one_after_the_other_sees_what_the_model_says()
            machine.compare(made.parties)
        machine.teardown()


def test_a_link_that_only_a_mount_follows(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine does not ask what becomes of a link that fs.protected_symlinks protects."""
    monkeypatch.setattr(oracle, "PROTECTED_SYMLINKS", True)
    os.mkdir(os.path.join(base, "tmp"))
    os.chmod(os.path.join(base, "tmp"), 0o1777)
    os.symlink(".", os.path.join(base, "tmp/link"))
    os.lchown(os.path.join(base, "tmp/link"), 1001, 2001)
    rules = POLICIES["not-cloaked"]
    owner, other = (Look(rules, rules.who(uid, 12001, ()), base) for uid in (11001, 11002))
    assert owner.walk("tmp/link", follow=True).info is not None
    assert other.walk("tmp/link", follow=False).info is not None
    with pytest.raises(oracle.Protected):
        other.walk("tmp/link", follow=True)
    os.chmod(os.path.join(base, "tmp"), 0o777)
    assert other.walk("tmp/link", follow=True).info is not None


@pytest.mark.parametrize("policy", ["others-and-group", "views"])
def test_what_is_held_is_made_again(policy: str) -> None:
    """Whichever way it loses its name: nobody is shown the name because of what had it before."""
    with world(POLICIES["identity" if policy == "views" else policy], views=policy == "views") as made:

        class Here(TwoTrees):
            world = made

        machine = Here()
        machine.furnish((0, 1, 2), (0o777, 0o777, 0o666))
        ways = itertools.product(["removed", "replaced", "moved", "exchanged"], [(False, False), (True, False)])
        for number, (how, through) in enumerate(ways):
            kinds = number % 3 == 0, number % 2 == 0
            machine.make_again_what_is_held(number % len(CALLERS), "a", kinds, how, through, (0o755, 0o700))
        machine.teardown()


def test_what_is_hidden_where_the_caller_may_not_write() -> None:
    """The kernel that checks permissions refuses mkdir(2) there as it would without the hidden directory."""
    with world(POLICIES["checked-by-the-kernel"]) as made:

        class Here(TwoTrees):
            world = made

        machine = Here()
        machine.furnish((0, 0, 1), (0o777, 0o777, 0o666))
        machine.make(1, "mkdir", "a/own", 0o700)
        machine.setfacl(0, "a", "access", 65534, 12002, (7, 1, 3, 3, 7, 7))
        machine.make(4, "mkdir", "a/own", 0o700)
        machine.make(4, "mkdir", "a/absent", 0o700)
        machine.teardown()
