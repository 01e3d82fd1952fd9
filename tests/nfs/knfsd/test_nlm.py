"""Locks of NFSv3 when the threads of the server are restarted: lockd ends with them, and clients claim their locks.

The client is made by hand: with an NFSv3 mount, the guest's lockd would go on.
"""

import os
import struct
from collections.abc import Callable
from pathlib import Path

from tests.agents import User
from tests.nfs.knfsd.fixtures import Share, nfs_mounted
from tests.nfs.nfs3 import Client
from tests.nfs.rpc import Connection, opaque
from tests.processes import kill
from tests.waiting import wait_until

ANN = 1000
GRANTED, DENIED, IN_GRACE = 0, 1, 4
RECOVERY = 90.0

_PORTMAP, _NLM, _LOCK = 100000, 100021, 2
_STATE = Path("/var/lib/nfs/state")
_MONITORED = Path("/var/lib/nfs/sm")


def prepare(tree: str) -> None:
    os.chmod(tree, 0o1777)
    Path(tree, "locked").write_text("x")
    os.chmod(Path(tree, "locked"), 0o666)


def lock(file: bytes, host: str, *, reclaim: bool = False) -> int:
    """Ask lockd for a lock on a whole file, as the only process of a host; return its answer (nlm4_stats)."""
    with Connection("127.0.0.1", 111, 0, 0) as portmapper:
        arguments = struct.pack("!4I", _NLM, 4, 6, 0)
        (port,) = struct.unpack("!I", portmapper.call(_PORTMAP, 2, 3, arguments))
    wanted = opaque(host.encode()) + opaque(file) + opaque(host.encode()) + struct.pack("!IQQ", len(host), 0, 0)
    arguments = opaque(b"1234") + struct.pack("!II", 0, 1) + wanted + struct.pack("!Ii", reclaim, 3)
    with Connection("127.0.0.1", port, ANN, ANN) as lockd:
        return int(struct.unpack_from("!I", lockd.call(_NLM, 4, _LOCK, arguments), 8)[0])


def test_clients_are_told_and_claim_their_locks(share: Callable[..., Share]) -> None:
    tree = share("rw", prepare)
    tree.expect_errors = True
    client = Client("127.0.0.1", ANN, ANN)
    file = client.walk(client.mount(tree.path), "locked")
    client.close()
    Path("/proc/fs/lockd/nlm_end_grace").write_text("Y")  # if the guest has only just started
    assert lock(file, "lab") == GRANTED
    assert lock(file, "other") == DENIED
    assert os.listdir(_MONITORED)
    state = _STATE.read_bytes()
    who = User(ANN)
    with nfs_mounted(tree, "4.2") as place:
        held = who.do(os.open, f"{place}/held", os.O_RDWR | os.O_CREAT)  # which makes a restart necessary
        before = tree.pid
        kill(before)
        # By another state, clients know that lockd has forgotten their locks. Its grace period is not that of nfsd,
        # which may end as soon as all NFSv4 clients have claimed.
        wait_until(lambda: not os.listdir(_MONITORED) and _STATE.read_bytes() != state, RECOVERY)
        assert lock(file, "other") == IN_GRACE
        # (Here it does not last: the client is the server itself, whose restart it reports to its own lockd.)
        assert lock(file, "lab", reclaim=True) == GRANTED
        who.do(os.close, held)
    who.close()
