"""Runs tests/heads/inguest in a guest that reaches a small Ceph cluster on this machine."""

import os
import shlex
import sys

import pytest

from bench.clone import ROOT
from bench.lab import cephcluster
from bench.lab.cephcluster import GUEST_ADDRESS, CephCluster
from bench.lab.guest import DRIVERS, Guest, inside, missing_kernel
from tests.heads.inguest.heads import KILL_REQUEST
from tests.waiting import wait_until

_SECONDS = os.environ.get("CLOAKFS_HEADS_SECONDS", "")
"""Set by scripts/campaign heads: all tests run, and those that work for some time work for so long."""

_EACH_SECONDS = 240 + 3 * float(_SECONDS or 0)
_ALL_SECONDS = 1200 + 6 * _EACH_SECONDS * bool(_SECONDS)
"""The short form takes some five minutes on a machine that has nothing else to do."""

_COMMAND = f"""\
export CLOAKFS_HEADS_SECONDS={shlex.quote(_SECONDS)}
ip addr add {GUEST_ADDRESS} dev vec0 && ip link set vec0 up || exit
cd {shlex.quote(ROOT)} || exit
{shlex.quote(sys.executable)} -m pytest -q -rA -p no:cacheprovider --timeout={_EACH_SECONDS:g} tests/heads/inguest
"""


@pytest.mark.timeout(_ALL_SECONDS + 60)
def test_two_heads_of_one_cephfs() -> None:
    if inside():
        pytest.skip("boots a guest, which cannot be done in a guest")
    if why := cephcluster.missing() or missing_kernel():
        pytest.skip(why)
    with (
        CephCluster() as cluster,
        Guest(_COMMAND, drivers=(*DRIVERS, "libceph", "ceph"), enter=cluster.enter, network=cluster.network) as guest,
    ):
        request = os.path.join(guest.out, KILL_REQUEST)

        def has_ended() -> bool:
            if os.path.exists(request):
                cluster.restart_metadata_server()
                os.unlink(request)
            return not guest.is_running()

        wait_until(has_ended, _ALL_SECONDS, every=0.1)
        said = guest.said()
        print(said)
        assert guest.read("status").strip() == "0", said[-10000:]
        assert " passed" in said
