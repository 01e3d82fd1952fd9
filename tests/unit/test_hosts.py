"""Host names of clients are looked up, and nothing else is; and which clients this machine itself is."""

import socket

import pytest

from cloakfs.config.parse import parse
from cloakfs.config.values import host_of
from cloakfs.nfs import hosts


@pytest.mark.parametrize("text", ["lab", "lab.example.org", "10-0-0-1.example.org", "a_b"])
def test_a_host_name(text: str) -> None:
    assert host_of(text) == text


@pytest.mark.parametrize(
    "text",
    ["*", "*.example.org", "n[a-c].example.org", "lab?", "@office", "10.1.2.3", "10.0.0.0/8", "10.0.0.0/255.0.0.0",
     "::1", "2001:db8::/32", "gss/krb5", "1.2.3", "la b"],
)  # fmt: skip
def test_no_host_name(text: str) -> None:
    assert host_of(text) is None


def test_names_that_cannot_be_resolved_are_named_with_their_place() -> None:
    text = "/a localhost(ro) no-such-host.invalid(ro)\n/b *.invalid(ro) @no-such-group(ro)\n/c no-such-host.invalid\n"
    entries, _ = parse(text, "x.exports")
    said = [str(remark) for remark in hosts.unresolved(entries)]
    assert [text.partition(": ")[0] for text in said] == ["x.exports:1:18", "x.exports:3:4"]
    assert all("no-such-host.invalid: this host name cannot be resolved (" in text for text in said)


def test_a_label_that_is_too_long_is_no_host_name() -> None:
    assert hosts.problem("a" * 64 + ".example.org") == "not a host name"


@pytest.mark.parametrize(
    ("client", "own"),
    [
        ("*", "127.0.0.1"),
        ("127.0.0.0/8", "127.0.0.1"),
        ("127.0.0.0/255.0.0.0", "127.0.0.1"),
        ("0.0.0.0/0", "127.0.0.1"),
        ("127.0.0.1", "127.0.0.1"),
        ("localhost", "127.0.0.1"),
        ("198.51.100.0/24", None),
        ("198.51.100.1", None),
        ("2001:db8::/32", None),
        ("@office", None),
        ("*.example.org", None),
        ("no-such-host.invalid", None),
    ],
)
def test_which_client_this_machine_is(client: str, own: str | None) -> None:
    found = hosts.own_address(client)
    assert found == own or (client == "localhost" and found == "::1")


def test_an_address_of_this_machine_is_found_in_its_network() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect(("198.51.100.1", 9))
        except OSError:
            pytest.skip("this machine has no route to other machines")
        own = asking.getsockname()[0]
    assert hosts.own_address(f"{own}/24") == own
    assert hosts.own_address(own) == own
