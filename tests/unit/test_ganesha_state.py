"""What is read of an nfs-ganesha's locks in /proc, and of its records of clients."""

import fcntl
import os
import struct
from pathlib import Path

from cloakfs.nfs import ganeshastate

FDINFO = """\
pos:\t0
flags:\t02100002
mnt_id:\t61
lock:\t1: OFDLCK  ADVISORY  WRITE -1 07:1f:1234 0 EOF
lock:\t2: OFDLCK  ADVISORY  READ -1 00:2d:9223372036854775807 3 4
lock:\t3: LEASE   ACTIVE    WRITE 9 00:30:3 0 EOF
"""


def test_locks() -> None:
    assert ganeshastate.locked_devices(FDINFO.splitlines()) == {"7:31", "0:45"}
    assert ganeshastate.locked_devices(["lock", "flags:\t0100000"]) == set()


def test_locks_of_a_process(tmp_path: Path) -> None:
    info = os.stat(tmp_path)
    device = f"{os.major(info.st_dev)}:{os.minor(info.st_dev)}"
    with open(tmp_path / "file", "w") as file:
        before = ganeshastate.locked_by(os.getpid())
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))  # see fcntl(2)
        assert ganeshastate.locked_by(os.getpid()) == before | {device}
    assert ganeshastate.locked_by(os.getpid()) == before
    assert ganeshastate.locked_by(1 << 30) == set()


def _records(recovery: Path, *names: str, link: str = "") -> None:
    for name in names:
        (recovery / "v4recov" / name / "a client").mkdir(parents=True)
    if link:
        (recovery / "v4recov" / "host").symlink_to(link)


def _names(recovery: Path) -> list[str]:
    return sorted(os.listdir(recovery / "v4recov"))


def test_a_server_that_has_never_run(tmp_path: Path) -> None:
    assert not ganeshastate.is_in_grace(str(tmp_path))
    ganeshastate.skip_next_grace(str(tmp_path))
    ganeshastate.remove_old_records(str(tmp_path))


def test_after_the_grace_time(tmp_path: Path) -> None:
    _records(tmp_path, "host.new", link="host.new")
    assert not ganeshastate.is_in_grace(str(tmp_path))
    ganeshastate.remove_old_records(str(tmp_path))
    assert _names(tmp_path) == ["host", "host.new"]
    ganeshastate.skip_next_grace(str(tmp_path))
    assert _names(tmp_path) == ["host.new"]
    ganeshastate.remove_old_records(str(tmp_path))
    assert _names(tmp_path) == []


def test_in_the_grace_time(tmp_path: Path) -> None:
    """A server that ends meanwhile leaves the record of the one before, from which its clients have yet to claim."""
    _records(tmp_path, "host.old", "host.new", link="host.old")
    assert ganeshastate.is_in_grace(str(tmp_path))
    ganeshastate.skip_next_grace(str(tmp_path))
    assert _names(tmp_path) == ["host", "host.new", "host.old"]
    ganeshastate.remove_old_records(str(tmp_path))
    assert _names(tmp_path) == ["host", "host.old"]
    assert not ganeshastate.is_in_grace(str(tmp_path))
