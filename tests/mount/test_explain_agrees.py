"""Compares what `cloakfs explain` says with what happens to a caller who tries it, in random trees.

The suite tries the same 1,440 cases each time; `scripts/campaign explain` tries new ones, as many as one likes.
"""

import contextlib
import errno
import itertools
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import pytest

from cloakfs.audit import explain
from cloakfs.config.options import Options
from cloakfs.identity import ClientCaller, ClientId
from cloakfs.state.client import Daemon
from cloakfs.state.runtime import mounted
from cloakfs.view import View
from tests.agents import User

from .conftest import Mount
from .randomtree import make_tree
from .test_stateful import CALLERS, POLICIES

MakeMount = Callable[..., Mount]

FILES = 48

OWNERS = [(1001, 2001), (1002, 2002), (11001, 12001), (11003, 2), (0, 0), (99, 99), (65534, 65534)]
MODES = [0o755, 0o700, 0o750, 0o711, 0o644, 0o640, 0o604, 0o600, 0o4755, 0o2770, 0o1777, 0o111, 0o040, 0o004, 0]


class Met(NamedTuple):
    """What somebody meets at the end of a path: an error, or the attributes and what is permitted (4 r, 2 w, 1 x)."""

    error: int
    attributes: tuple[int, int, int] | None = None
    permissions: int = 0


def try_it(top: str, paths: list[str]) -> list[Met]:
    return [try_path(os.path.join(top, path)) for path in paths]


def try_path(path: str) -> Met:
    try:
        info = os.lstat(path)
    except OSError as exc:
        return Met(exc.errno or errno.EIO)
    bits = sum(bit for bit in (os.R_OK, os.W_OK, os.X_OK) if os.access(path, bit))
    return Met(0, (info.st_mode, info.st_uid, info.st_gid), bits)


def explained(root: str, options: Options, view: View, who: ClientCaller, path: str) -> Met:
    """What the caller (client ids) is going to meet there, as the steps of an explanation say."""
    server = explain.identify(view, who, options.groups).server
    assert server is not None
    steps = explain.walk(root, path.split("/"), view, server)
    for above, step in itertools.pairwise(steps):
        if not above.permissions & explain.EXECUTE:
            return Met(errno.EACCES)
        if not step.visible:
            return Met(errno.ENOENT)
    return Met(0, steps[-1].shown, explain.permissions(steps, read_only=False))


def agree(m: Mount, chance: random.Random, trees: int = 1) -> Counter[int]:
    """Try all files of so many trees as everybody; how often each error was met, 0 for none."""
    met_by_error: Counter[int] = Counter()
    with Daemon(mounted()[m.path]) as daemon:
        view = View(daemon.policy)
        for number in range(trees):
            top = os.path.join(m.source, str(number))
            os.mkdir(top)
            os.chmod(top, 0o755)
            made = make_tree(top, chance, files=FILES, owners=OWNERS, modes=MODES, named_groups=(2002,))
            paths = [os.path.join(str(number), path) for path in made]
            for uid, gid, groups in CALLERS:
                with contextlib.closing(User(uid, gid, groups)) as user:
                    tried = user.do(try_it, m.path, paths)
                who = ClientCaller(ClientId(uid), ClientId(gid), frozenset(map(ClientId, groups)))
                for path, met in zip(paths, tried, strict=True):
                    assert met == explained(m.source, daemon.options, view, who, path), (who, path)
                    met_by_error[met.error] += 1
            shutil.rmtree(top)
    return met_by_error


@pytest.mark.parametrize("policy", POLICIES)
def test_explain_and_the_mount_agree(mount: MakeMount, policy: str) -> None:
    met_by_error = agree(mount("-o", POLICIES[policy].options), random.Random(policy))
    # Each kind of case was there.
    assert met_by_error[0] > 20
    assert met_by_error[errno.EACCES] > 2
    assert policy == "not-cloaked" or met_by_error[errno.ENOENT] > 2
