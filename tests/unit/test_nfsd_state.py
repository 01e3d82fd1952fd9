"""What is read of the NFSv4 state in /proc/fs/nfsd/clients, and of the server's records of clients."""

import hashlib
import os
import sqlite3
from pathlib import Path

import pytest

from cloakfs.linux import mountinfo
from cloakfs.nfs import nfsdstate

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


def test_mounts_that_are_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nfsdstate, "_MADE", str(tmp_path / "made"))
    assert nfsdstate.lost_mounts() == {}
    here = next(place.path for place in mountinfo.by_id().values())
    nfsdstate.note_mounts([here])
    (noted,) = os.listdir(tmp_path / "made")
    held = nfsdstate.Client(b"x", "192.0.2.7", frozenset({noted, "0:99999"}))
    monkeypatch.setattr(nfsdstate, "clients", lambda: [held])
    for device in ("0:99999", "0:99998"):
        (tmp_path / "made" / device).write_text("/srv/cloakfs/it")
    assert nfsdstate.lost_mounts() == {"0:99999": "/srv/cloakfs/it"}
    assert sorted(os.listdir(tmp_path / "made")) == sorted([noted, "0:99999"])  # nobody holds anything of the third
