"""What each caller of nfs-ganesha holds open when the mount of its view is replaced. See test_held_table.py."""

import contextlib
import itertools
import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cloakfs.nfs.plan import mount_name
from tests.mount.conftest import COMMAND
from tests.nfs.knfsd.ganeshahost import GaneshaHost
from tests.nfs.knfsd.worktable import (
    CALLERS,
    HELD,
    NOT_LOCKED,
    VERSIONS,
    Holding,
    Row,
    check_rows,
    is_full,
    make_accounts,
    make_shared_file,
    start,
)
from tests.waiting import wait_until

pytestmark = pytest.mark.skipif(not is_full(), reason="only with CLOAKFS_NFS_TABLE=full (scripts/campaign table)")

TREE = "/tree/held-ganesha"
ENTRIES = "/tmp/held.d"
SERVED = 120.0
"""How long it may take until all is served again, in seconds."""


class Held:
    """A service with a view for each caller, and what clients hold of it."""

    def __init__(self, host: GaneshaHost) -> None:
        self.host = host
        os.makedirs(TREE)
        os.chmod(TREE, 0o777)
        os.makedirs(ENTRIES)
        self.write("")
        self.up()
        self._stack = contextlib.ExitStack()
        self.holdings: list[tuple[Holding, bool]] = []
        for version, (label, caller) in itertools.product(VERSIONS, CALLERS.items()):
            at = f"/client/held/{version}/{label}"
            host.mount(f"/{mount_name(TREE, '*')}/@{caller.user}", version, at, "hard", "timeo=50", "nosharecache")
            self._stack.callback(subprocess.run, ["umount", "-i", "-l", at], check=False)
            for lock in (False, True) if version != "3" else (False,):
                self._hold(at, version, label, lock=lock)

    def _hold(self, at: str, version: str, label: str, *, lock: bool) -> None:
        name = f"{version}-{label}-{lock}"
        real = f"{TREE}/{name}"
        make_shared_file(real, "." * 20)
        self.holdings.append((Holding(start(label), version, label, f"{at}/{name}", real, lock=lock), lock))
        self._stack.callback(self.holdings[-1][0].close)

    def write(self, more: str) -> None:
        views = " ".join(caller.user for caller in CALLERS.values())
        Path(f"{ENTRIES}/x.exports").write_text(f"{TREE} *(insecure,rw,views = {views}{more})\n", encoding="ascii")

    def up(self) -> None:
        self.host.sh(*COMMAND, "export", "up", ENTRIES, "--server", "ganesha", "--protocols", "3,4")

    def down(self) -> None:
        self.host.sh(*COMMAND, "export", "down")

    def pids(self) -> list[int]:
        """The daemons of the views, once all of them are served."""
        wait_until(self._are_served, SERVED, every=0.2)
        return [m["pid"] for m in json.loads(self.host.sh(*COMMAND, "status", "--json", check=False))]

    def _are_served(self) -> bool:
        status = json.loads(self.host.sh(*COMMAND, "export", "status", "--json", check=False) or "{}")
        return bool(status) and not any(one["problem"] for one in (status, *status["mounts"]))

    def kill_daemons(self) -> None:
        before = self.pids()
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not set(before) & set(self.pids()), SERVED, every=0.2)

    def renew(self) -> None:
        self.write(", no_client_cache")
        assert "renewed" in self.host.sh(*COMMAND, "export", "reload")
        self.pids()

    def down_and_up(self) -> None:
        self.down()
        self.up()
        self.pids()

    def close(self) -> None:
        self._stack.close()
        self.down()


@pytest.fixture(scope="module")
def held() -> Iterator[Held]:
    make_accounts()
    host = GaneshaHost("held", 3)
    made = Held(host)
    yield made
    made.close()
    host.close()


HOW = dict(zip(HELD, (Held.kill_daemons, Held.renew, Held.down_and_up), strict=True))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("how", HOW)
def test_files_that_are_held_open(held: Held, how: str, record_property: Callable[[str, object], None]) -> None:
    """Each goes on, whether or not it is locked."""
    HOW[how](held)
    rows = []
    for holding, is_locked in held.holdings:
        outcome = holding.outcome()
        what = how if is_locked else NOT_LOCKED.format(how)
        rows.append(Row("Ganesha", holding.version, "views", what, holding.caller, outcome, "ok", outcome == "ok"))
    check_rows(rows, record_property)
