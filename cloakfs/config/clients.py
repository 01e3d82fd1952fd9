"""Which texts may name a client: exports(5), "Machine Name Formats"."""

import re
from ipaddress import ip_address, ip_network

EXPECTED_CLIENT = "a host name, a wildcard, an address, a network, @netgroup or *"
_HOST = re.compile(r"(?:[A-Za-z0-9_.*?-]|\[[A-Za-z0-9_!^-]+\])+")
_NETGROUP = re.compile(r"@[!-~]+")


def is_client(text: str) -> bool:
    """Whether it is a host name, wildcard, address, network, netgroup or a security flavor of GSS."""
    if text.startswith("@"):
        return _NETGROUP.fullmatch(text) is not None
    if "/" in text:
        return text in ("gss/krb5", "gss/krb5i", "gss/krb5p") or _is_network(text)
    if ":" in text or text.strip("0123456789.") == "":
        return _is_address(text)
    return _HOST.fullmatch(text) is not None


def _is_address(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True


def _is_network(text: str) -> bool:
    try:
        network = ip_network(text, strict=False)
    except ValueError:
        return False
    mask = text.partition("/")[2]
    # Python would also accept an inverted mask such as 0.0.0.255, which exports(5) applies as it is.
    return mask.isdigit() or mask == str(network.netmask)


def host_of(text: str) -> str | None:
    """Return the host whose name a client specification is; None for all other kinds (an address has no name)."""
    is_other = text.startswith("@") or any(char in text for char in "/:*?[") or text.strip("0123456789.") == ""
    return None if is_other or not is_client(text) else text
