"""nfs-ganesha's configuration as text. (That the server understands it, tests/nfs/test_ganesha_process.py tests.)"""

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cloakfs.nfs.ganesha import GaneshaExport, render
from cloakfs.nfs.server import ServerError

GOLDEN = Path(__file__).parent / "golden"

ANN = GaneshaExport(1, "/state/exports/1", "/home/@ann", "*", False, ("sys",), (2**62, 1))
BEN = GaneshaExport(2, "/state/exports/2", "/home/@ben", "10.1.0.0/16", True, ("sys", "krb5p"), (2**63 - 1, 0))
ODD = GaneshaExport(65535, "/state/exports/65535", "/it's #1; {größe}", "@staff", False, ("none",), (0, 3))


def rendered(*exports: GaneshaExport, **more: Any) -> str:
    given = {"state_dir": "/state", "port": 2049, "bind_addr": None, "protocols": (4,), **more}
    return render(exports, **given)


@pytest.mark.parametrize(
    ("name", "exports", "more"),
    [
        ("ganesha-none.conf", (), {}),
        ("ganesha-views.conf", (ODD, BEN, ANN), {"protocols": (3, 4), "mount_port": 892, "bind_addr": "192.0.2.1"}),
    ],
)
def test_golden(name: str, exports: tuple[GaneshaExport, ...], more: dict[str, Any]) -> None:
    text = rendered(*exports, **more)
    if os.environ.get("CLOAKFS_GOLDEN") == "write":
        (GOLDEN / name).write_text(text)
    assert text == (GOLDEN / name).read_text()


@pytest.mark.parametrize(("release", "is_known"), [(0, False), (4, False), (6, True), (9, True)])
def test_a_release_is_told_only_what_it_knows(release: int, is_known: bool) -> None:
    assert ("allow_set_io_flusher_fail = true;" in rendered(ANN, release=release)) == is_known


def test_the_order_of_exports_makes_no_difference() -> None:
    assert rendered(ANN, BEN, ODD) == rendered(ODD, ANN, BEN)


def clients(text: str) -> str | None:
    """What stands for a client of exports(5); None if nothing, so that everybody is let in."""
    found = re.search(r"Clients = (.*?);", rendered(replace(ANN, clients=text)))
    return found[1] if found else None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("*", None),
        ("192.0.2.1", "192.0.2.1"),
        ("192.0.2.1/32", "192.0.2.1"),
        ("10.1.2.3/16", "10.1.0.0/16"),
        ("10.1.0.0/255.255.0.0", "10.1.0.0/16"),
        ("0.0.0.0/0", "0.0.0.0/1, 128.0.0.0/1"),  # 0.0.0.0 would be everybody, by IPv6, too
        ("::/0", "::/1, 8000::/1"),
        ("2001:db8::1", "2001:db8::1"),
        ("2001:DB8:0::/32", "2001:db8::/32"),
        ("::1/128", "::1"),
        ("fe80::/99", "fe80::/99"),
        ("host.example.org", "host.example.org"),
        ("my-host", "my-host"),
        ("*.example.org", "*.example.org"),
        ("host[1-3]?", "host[1-3]?"),
        ("?*.example.org", "?*.example.org"),
        ("@staff.group-1", "@staff.group-1"),
    ],
)
def test_clients(text: str, expected: str | None) -> None:
    assert clients(text) == expected


@pytest.mark.parametrize(
    "text",
    ["0.0.0.0", "0.0.0.0/32", "10.0.0.0/33", "1.2.3", "2001:db8::/100", "2001:db8::/127", "gss/krb5", "@", "@9to5",
     "?host", "?", "2host", "a;b", 'a"b', "*;", "* x", "a b", "", "größe", "host\n}"],
)  # fmt: skip
def test_clients_that_would_mean_something_else(text: str) -> None:
    with pytest.raises(ServerError):
        clients(text)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"export_id": 0}, "export_id 0"),
        ({"export_id": 65536}, "export_id 65536"),
        ({"filesystem_id": (-1, 0)}, "filesystem_id -1"),
        ({"filesystem_id": (0, 2**63)}, "filesystem_id 9223372036854775808"),
        ({"pseudo": "/"}, "need a name below /"),
        ({"pseudo": "home"}, "not an absolute path"),
        ({"pseudo": "/a/../b"}, "need a name below /"),
        ({"pseudo": '/a"b'}, "cannot express"),
        ({"pseudo": "/a\\b"}, "cannot express"),
        ({"pseudo": "/a\nb"}, "cannot express"),
        ({"pseudo": "/a\udcffb"}, "UTF-8"),
        ({"path": "mnt"}, "not an absolute path"),
        ({"path": '/a"; } EXPORT {'}, "cannot express"),
        ({"security": ()}, "(none)"),
        ({"security": ("sys", "spkm")}, "spkm"),
    ],
)
def test_what_cannot_be_expressed(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ServerError, match=re.escape(said)) as refused:
        rendered(replace(ANN, **change))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"port": 0}, "port 0"),
        ({"port": 65536}, "port 65536"),
        ({"protocols": (3, 4), "mount_port": 0}, "port 0"),
        ({"protocols": ()}, "only 3 and 4"),
        ({"protocols": (2, 4)}, "only 3 and 4"),
        ({"bind_addr": "localhost"}, "not an address"),
        ({"bind_addr": "192.0.2.1; }"}, "not an address"),
        ({"state_dir": '/a"b'}, "cannot express"),
    ],
)
def test_what_the_server_cannot_be_told(more: dict[str, Any], said: str) -> None:
    with pytest.raises(ServerError, match=re.escape(said)):
        rendered(ANN, **more)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"export_id": 1}, "export_id 1"),
        ({"pseudo": "/home/@ann/"}, "pseudo path /home/@ann"),
        ({"filesystem_id": (2**62, 1)}, "filesystem_id 4611686018427387904.1"),
    ],
)
def test_no_two_exports_share_what_tells_them_apart(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ServerError, match=re.escape(said)):
        rendered(ANN, replace(BEN, **change))
