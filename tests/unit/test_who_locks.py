"""Where the locks of clients hold, in words."""

import pytest

from cloakfs.exportmode import Server
from cloakfs.reasons import who_locks


@pytest.mark.parametrize(
    ("real", "server", "local", "said"),
    [
        (True, Server.NONE, False, "on the real tree: "),
        (True, Server.KNFSD, False, "on the real tree: "),
        (False, Server.NONE, True, "within this mount alone (local_locks)"),
        (False, Server.KNFSD, True, "within this mount alone: NFSv3 is served"),
        (False, Server.GANESHA, True, "within this mount alone: so that it is known what clients "),
        (False, Server.NONE, False, "within this mount alone (the released pyfuse3 "),
        (False, Server.KNFSD, False, "within this mount alone (the released pyfuse3 "),
    ],
)
def test_who_locks(real: bool, server: Server, local: bool, said: str) -> None:
    assert who_locks(real, server, local=local).startswith(said)
