"""Over NFS, the client's uid is named; no caller is, where the server does not know who sent a handle."""

import errno
import os
import struct
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from cloakfs.state.client import Watcher
from cloakfs.state.runtime import mounted
from tests.agents import User, names
from tests.mount.test_probing import stat_all
from tests.nfs import nfs3
from tests.nfs.knfsd.fixtures import VERSIONS, Share
from tests.waiting import wait_until

OWNER = 1003
_JUKEBOX = 10008
PROBERS = dict(zip(VERSIONS, (1001, 1002), strict=True))


def prepare(tree: str) -> None:
    for number in range(8):
        Path(tree, f"hidden{number}").touch(0o600)
        os.chown(f"{tree}/hidden{number}", OWNER, OWNER)
    Path(tree, "public").touch()


def events(share: Share) -> list[dict[str, Any]]:
    with Watcher(mounted()[share.path]) as watcher:
        return watcher.fetch()


def test_who_is_named(share: Callable[..., Share], mount_nfs: Callable[..., str], user: Callable[..., User]) -> None:
    tree = share(f"rw,probe_alarm=5/h,probe_delay=200,cloak_list = uid +077 {OWNER} {OWNER}", prepare)
    for count, (version, uid) in enumerate(PROBERS.items(), 1):
        place = mount_nfs(tree, version)
        other = user(1009)
        assert other.do(names, place) == ["public"]
        other.do(os.stat, f"{place}/public")
        assert other.do(stat_all, place, "absent", 8) == {errno.ENOENT}
        assert user(uid).do(stat_all, place, "hidden", 8) == {errno.ENOENT}
        wait_until(lambda count=count: len(events(tree)) >= count)  # type: ignore[misc]
        event = events(tree)[-1]
        assert (event["client"], event["handles"]) == ({"uid": uid}, 0)
        assert event["path"].startswith(f"{tree.path}/hidden")
        if version == "4.2":  # with version 3, a client waits for 5 s
            slow = user(uid)
            assert slow.do(stat_all, place, "other", 3) == {errno.ENOENT}  # it was told to ask again later
            with closing(nfs3.Client("127.0.0.1", uid, uid)) as client:
                root = client.mount(tree.path)
                answers = {client.lookup(root, f"{kind}{number}")[0] for kind in ("hidden", "new") for number in (1, 2)}
                assert _JUKEBOX in answers
                assert answers <= {nfs3.NOENT, _JUKEBOX}
    with closing(nfs3.Client("127.0.0.1", 1005, 1005)) as client:
        handle = client.walk(client.mount(tree.path), "public")
        assert client.getattr(handle)[0] == nfs3.OK
        for number in range(8):
            guessed = handle[:-12] + struct.pack("=III", 0, 1_000_000 + number, 7)
            assert client.getattr(guessed)[0] == nfs3.STALE
    wait_until(lambda: len(events(tree)) == 3)
    assert (events(tree)[-1]["client"], events(tree)[-1]["lookups"]) == (None, 0)
    assert events(tree)[-1]["handles"] > 5
