"""Host names of clients: whether they can be resolved, and which of the clients this machine itself is."""

import socket
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

from ..config.errors import Remark
from ..config.options import Export
from ..config.values import host_of

_AT_ONCE = 16
_DISCARD_PORT = 9  # nothing is sent


def addresses_of(host: str) -> set[IPv4Address | IPv6Address]:
    """Return the addresses of a host, from /etc/hosts, DNS or whatever nsswitch.conf(5) says.

    Raises:
        OSError: the name cannot be resolved.
    """
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return {ip_address(str(info[4][0]).partition("%")[0]) for info in found}


def unresolved(entries: Iterable[Export]) -> list[Remark]:
    """Return a remark on each entry for a host whose name cannot be resolved at present; no server would export it.

    Waits for DNS; names are looked up several at a time.
    """
    entries = list(entries)
    names = sorted({host for entry in entries if (host := host_of(entry.client))})
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        said = dict(zip(names, threads.map(problem, names), strict=True))
    return [
        Remark(
            entry.location,
            f"{entry.client}: this host name cannot be resolved ({why}), and no server exports anything to it; "
            "correct it, or give its address",
        )
        for entry in entries
        if (host := host_of(entry.client)) and (why := said[host])
    ]


def problem(host: str) -> str | None:
    """Return why a host name cannot be resolved at present, in a few words; None if it can. Waits for DNS."""
    try:
        addresses_of(host)
    except UnicodeError:
        return "not a host name"
    except OSError as exc:
        return exc.strerror or str(exc)
    return None


def own_address(client: str) -> str | None:
    """Return an address from which this machine itself is the client that a specification of exports(5) admits.

    It is None if there is none, and for a netgroup or wildcard, which only the server can tell. Waits for DNS.
    """
    if client == "*":
        return "127.0.0.1"
    networks: list[IPv4Network | IPv6Network] = []
    try:
        networks.append(ip_network(client, strict=False))
    except ValueError:
        if host_of(client) is None:
            return None
        try:
            networks += [ip_network(address) for address in addresses_of(client)]
        except (OSError, UnicodeError):
            return None
    return next((own for network in networks if (own := _own_in(network))), None)


def _own_in(network: IPv4Network | IPv6Network) -> str | None:
    """Return an address of this machine in a network: the one from which it would send to that network."""
    family = socket.AF_INET if network.version == 4 else socket.AF_INET6
    loopback = ip_address("127.0.0.1" if network.version == 4 else "::1")
    to = loopback if loopback in network else network[1] if network.num_addresses > 1 else network[0]
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((str(to), _DISCARD_PORT))
            own = ip_address(probe.getsockname()[0])
    except OSError:
        return None  # no route, or not this family
    return str(own) if own in network else None
