"""What is read of the NFSv4 state in /proc/fs/nfsd/clients, and of the server's records of clients."""

import hashlib
import os
import sqlite3
from collections.abc import Sequence
from pathlib import Path

import pytest
import trio

from cloakfs.fuse.detach import KINDS
from cloakfs.linux import mountinfo
from cloakfs.nfs import nfsdrestart, nfsdstate

INFO = """\
clientid: 0x9cf859236b080159
address: "192.0.2.7:970"
status: confirmed
seconds from last renew: 6
name: "Linux NFSv4.2 lab\\x22\\x5cx"
minor version: 2
Implementation domain: "kernel.org"
callback state: UP
"""

STATES = """\
- 0x1: { type: open, access: rw, deny: --, superblock: "00:20:2", filename: "/h4.2", owner: "open id:\\x00" }
- 0x2: { type: deleg, access: r, superblock: "00:2f:9223372036854775807", filename: "superblock: x" }
- 0x3: { type: lock, superblock: "103:01:3", filename: "/h4.2", owner: "lock id:\\x00" }
"""


def test_a_client() -> None:
    client = nfsdstate.parse(INFO, STATES)
    assert client == nfsdstate.Client(b'Linux NFSv4.2 lab"\\x', "192.0.2.7:970", frozenset({"0:32", "0:47", "259:1"}))


def test_a_client_that_holds_nothing() -> None:
    assert nfsdstate.parse(INFO, "").devices == frozenset()
    assert nfsdstate.parse("", "") == nfsdstate.Client(b"", "?", frozenset())


def test_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of nfsdcld, of nfsdcltrack, and of the kernel itself."""
    folder, pointer, cld, track = (tmp_path / name for name in ("v4recovery", "pointer", "cld", "track"))
    folder.mkdir()
    pointer.write_text(f"{folder}\n")
    (folder / hashlib.md5(b"legacy").hexdigest()).mkdir()
    for path, table, name in ((cld, "rec-0000000000000002", b"by nfsdcld"), (track, "clients", b"by nfsdcltrack")):
        database = sqlite3.connect(path)
        database.execute(f'CREATE TABLE "{table}" (id BLOB PRIMARY KEY)')
        database.execute("CREATE TABLE grace (current INTEGER)")
        database.execute(f'INSERT INTO "{table}" VALUES (?)', (name,))
        database.commit()
        database.close()
    monkeypatch.setattr(nfsdstate, "_LEGACY", str(pointer))
    monkeypatch.setattr(nfsdstate, "_DATABASES", (str(cld), str(tmp_path / "absent"), str(track)))
    known = [b"legacy", b"by nfsdcld", b"by nfsdcltrack"]
    assert nfsdstate.unrecorded([*known, b"other"]) == {b"other"}
    os.rename(cld, tmp_path / "away")
    assert nfsdstate.unrecorded(known) == {b"by nfsdcld"}
    cld.write_text("not a database")
    assert nfsdstate.unrecorded(known) == {b"by nfsdcld"}


PATH = "/srv/cloakfs/it"


class Noted:
    """What was noted, what is mounted, and what clients hold."""

    def __init__(self, made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made = made
        self.table: list[mountinfo.Place] = []
        self.held: frozenset[str] = frozenset()
        monkeypatch.setattr(nfsdstate, "_MADE", str(made))
        monkeypatch.setattr(mountinfo, "by_id", lambda: dict(enumerate(self.table)))
        monkeypatch.setattr(nfsdstate, "clients", lambda: [nfsdstate.Client(b"x", "192.0.2.7", self.held)])

    def mounts(self, *places: tuple[str, str], kind: str = KINDS[0]) -> None:
        self.table = [mountinfo.Place(path, kind, 1, device, 0, "rw") for path, device in places]

    def notes(self, *places: tuple[str, str]) -> None:
        """They are mounted, and exported."""
        self.mounts(*places)
        nfsdstate.note_mounts(path for path, _ in places)

    def left(self) -> Sequence[str]:
        return sorted(os.listdir(self.made))


@pytest.fixture
def noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Noted:
    return Noted(tmp_path / "made", monkeypatch)


def test_mounts_that_were_replaced(noted: Noted) -> None:
    assert nfsdstate.lost_mounts() == {}
    for device in ("0:50", "0:51", "0:52"):
        noted.notes((PATH, device))
    noted.held = frozenset({"0:50", "0:52", "0:99"})
    assert nfsdstate.lost_mounts() == {"0:50": PATH}
    assert noted.left() == ["0:50", "0:52"]  # nobody holds anything of the second


def test_a_replaced_mount_that_is_still_mounted_elsewhere(noted: Noted) -> None:
    """A bind mount of it keeps it in the table: its daemon has ended nevertheless."""
    noted.notes((PATH, "0:50"))
    noted.notes((PATH, "0:51"))
    noted.held = frozenset({"0:50"})
    noted.mounts((PATH, "0:51"), ("/mnt/b", "0:50"))
    assert nfsdstate.lost_mounts() == {"0:50": PATH}
    noted.mounts((PATH, "0:50"), (PATH, "0:51"))
    assert nfsdstate.lost_mounts() == {"0:50": PATH}


def test_files_that_nobody_could_claim_yet(noted: Noted) -> None:
    """Nothing is mounted at the path, or something that is not exported from there: it is not forgotten."""
    noted.notes((PATH, "0:50"))
    noted.held = frozenset({"0:50"})
    noted.mounts()
    assert nfsdstate.lost_mounts() == {}
    noted.mounts((PATH, "0:51"))
    assert nfsdstate.lost_mounts() == {}
    noted.notes((PATH, "0:51"))
    assert nfsdstate.lost_mounts() == {"0:50": PATH}


def test_the_number_of_another_file_system(noted: Noted) -> None:
    """The number of a mount that is gone has been given to a file system of somebody else."""
    noted.notes((PATH, "0:50"))
    noted.notes((PATH, "0:51"))
    noted.held = frozenset({"0:50"})
    noted.table += [mountinfo.Place("/mnt/other", "tmpfs", 1, "0:50", 0, "rw")]
    assert nfsdstate.lost_mounts() == {}
    assert noted.left() == ["0:51"]


# -- starting and restarting the server, alone -----------------------------------------------------


def test_one_service_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nfsdrestart, "RUN_DIR", str(tmp_path))
    monkeypatch.setattr(nfsdrestart, "_LOCK", str(tmp_path / "nfsd.lock"))
    order = []

    async def second() -> None:
        async with nfsdrestart.exclusive(20.0):
            order.append("second")

    async def first() -> None:
        async with trio.open_nursery() as nursery, nfsdrestart.exclusive(0):
            nursery.start_soon(second)
            with pytest.raises(nfsdrestart.Busy, match=r"nfsd\.lock"):
                async with nfsdrestart.exclusive(0):
                    pass
            await trio.sleep(0.3)
            order.append("first")

    trio.run(first)
    assert order == ["first", "second"]
