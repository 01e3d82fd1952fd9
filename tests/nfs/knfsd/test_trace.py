"""`cloakfs trace` over NFS: it names users of the client, not threads of the server, and says why."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

from click import unstyle

from cli.trace import line
from cloakfs.tracerecords import Record
from tests.agents import User, names, read
from tests.mount.conftest import told
from tests.mount.test_trace import HIDES, MakeWatching, watching
from tests.nfs.knfsd.fixtures import VERSIONS, Share

__all__ = ["watching"]

ANN, BEN = 1001, 1002
ANNS = 20001
CLOAKED = (
    "rw,no_client_cache,range_map = uid 1000 1999 map 20000 gid 1000 1999 map 20000,cloak_list = uid +077 20000 20999"
)


def prepare(tree: str) -> None:
    os.makedirs(os.path.join(tree, "home", "inner"))
    for name, mode in (("secret", 0o600), ("shown", 0o604), ("home", 0o755), ("home/inner", 0o755)):
        path = os.path.join(tree, name)
        if not os.path.isdir(path):
            Path(path).write_text("text\n")
        os.chown(path, ANNS, ANNS)
        os.chmod(path, mode)


def asked_by(records: list[Record]) -> set[tuple[int, int]]:
    """The client and server uids of all requests that were made for a user."""
    return {(record["client"]["uid"], record["server"]["uid"]) for record in records if not record["inside"]}


def test_the_user_of_the_client_and_the_reason(
    share: Callable[..., Share],
    mount_nfs: Callable[..., str],
    user: Callable[..., User],
    watching: MakeWatching,
) -> None:
    tree = share(CLOAKED, prepare)
    ann, ben = user(ANN), user(BEN)
    secret = f"{tree.path}/secret"
    hidden = [{"path": secret, "reason": HIDES}]
    for version in VERSIONS:
        place = mount_nfs(tree, version, "noac")
        ben.do(names, place)
        seen = watching(tree)
        assert ben.error(os.stat, f"{place}/secret") == errno.ENOENT
        # The daemon may look at what it refused.
        records = [record for record in seen.records() if not record["inside"]]
        found = [record for record in records if record["operation"] == "lookup"]
        assert {record["command"] for record in records} == {"nfsd"}
        assert asked_by(records) == {(BEN, 20002)}
        assert found
        for record in found:
            assert (record["path"], record["error"], record["hidden"]) == (secret, "ENOENT", hidden)
        assert f" {BEN}:{BEN} → 20002:20002 nfsd[" in line(found[0])
        assert unstyle(line(found[0])).endswith(f"; hidden: {HIDES}")

        assert ben.do(names, place) == ["home", "shown"]
        listings = [record for record in seen.records() if record["operation"] == "readdir"]
        assert [record["hidden"] for record in listings if record["hidden"]] == [hidden]
        assert ann.do(read, f"{place}/secret") == b"text\n"
        assert asked_by([record for record in seen.records() if record["path"] == secret]) == {(ANN, ANNS)}

        # By handle: what is above is hidden.
        fd = ben.do(os.open, f"{place}/home/inner", os.O_RDONLY)
        os.chmod(tree.real("home"), 0o700)
        told(tree.path)
        seen.records()
        assert ben.error(os.listdir, fd) == errno.ESTALE
        stale = [record for record in seen.records() if record["error"] == "ESTALE" and not record["inside"]]
        assert stale
        for record in stale:
            assert (record["client"], record["path"]) == ({"uid": BEN, "gid": BEN}, f"{tree.path}/home/inner")
            assert record["hidden"] == [{"path": f"{tree.path}/home", "reason": HIDES}]
        ben.do(os.close, fd)
        os.chmod(tree.real("home"), 0o755)
