"""Of which trees NFSv4 clients with delegations are late to see changes, and the demand to turn these off."""

import pytest

from cloakfs.config.errors import Location
from cloakfs.config.options import Options
from cloakfs.linux import mountinfo
from cloakfs.nfs import knfsd
from cloakfs.nfs.plan import Mount

MOUNTED = {
    "/": "ext4",
    "/net": "nfs4",
    "/net/local": "xfs",
    "/data": "xfs",
    "/data/far": "ceph",
    "/srv/cloakfs/it": "fuse",
}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    places = {
        number: mountinfo.Place(path, kind, 0, f"0:{number}", 0, "rw")
        for number, (path, kind) in enumerate(MOUNTED.items())
    }
    monkeypatch.setattr(mountinfo, "by_id", lambda: places)
    monkeypatch.setattr(knfsd, "may_lease", lambda: True)
    monkeypatch.setattr(knfsd, "_threads", lambda: 0)


def said_of(tree: str) -> list[str]:
    mount = Mount("it", "/srv/cloakfs/it", tree, "*", "", Options(), Location("x.exports", 1, 1))
    return [remark.message for remark in knfsd.late_changes([mount], {tree: tree}.get)]


@pytest.mark.parametrize("tree", ["/home", "/net/local", "/net/local/x", "/data/near", "/network"])
def test_reported(tree: str, machine: None) -> None:
    assert said_of(tree) == []


@pytest.mark.parametrize(
    ("tree", "kinds"),
    [("/net", "nfs4"), ("/net/x", "nfs4"), ("/data", "ceph"), ("/data/far/x", "ceph"), ("/", "ceph, nfs4")],
)
def test_not_reported(tree: str, kinds: str, machine: None) -> None:
    (said,) = said_of(tree)
    assert said.startswith(f"/srv/cloakfs/it: {kinds} does not report changes")
    assert "sysctl fs.leases-enable=0" in said


def test_without_delegations(machine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knfsd, "_threads", lambda: 8)
    monkeypatch.setattr(knfsd, "_versions", lambda: [3])
    assert said_of("/net") == []
    monkeypatch.setattr(knfsd, "_versions", lambda: [3, 4])
    assert said_of("/net")
    monkeypatch.setattr(knfsd, "may_lease", lambda: False)
    assert said_of("/net") == []
