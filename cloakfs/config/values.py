"""Which texts may name a client (exports(5), "Machine Name Formats"), and which may be the value of an option.

These are values that are one string: the form of each, and its description in messages.
"""

import re
from collections.abc import Callable
from ipaddress import ip_address, ip_network

from ..identity import ClientId, ServerId
from ..mapping import MAX_ID
from ..prefetch import HEURISTICS
from ..probes import Rate
from .optionnames import BYTES, COUNTS

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


UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_SIZE = re.compile(r"([1-9][0-9]{0,9})([KMG]?)")
_MOST_BYTES = 1 << 40
_COUNT = re.compile(r"[1-9][0-9]{0,6}")
_MOST_MILLISECONDS = 5000

ID = r"(?:0|[1-9][0-9]{0,9})"
_NUMBER = re.compile(ID)
_GIDS = re.compile(rf"{ID}(?::{ID})*")
_UUID = re.compile(r"(?:[:.-]*[0-9A-Fa-f]){32}[:.-]*")

_FLAVORS = ("sys", "unix", "krb5", "krb5i", "krb5p", "none", "null")
_TRANSPORTS = ("none", "tls", "mtls")
_REEXPORTS = ("auto-fsidnum", "predefined-fsidnum", "none")

EXPECTED_ID = f"a number from 0 to {MAX_ID}"
_EXPECTED_SIZE = "a number of bytes up to 1024G, such as 65536, 64K or 4M"
_EXPECTED_COUNT = "a number from 1 to 9999999"
_EXPECTED_RATE = "a number from 1 to 9999 and /s, /min or /h, such as 60/min, or off"
_EXPECTED_LOCATION = "/path@host, with no other @ in it (the server takes the first one for the end of the path)"
_EXPECTED_DELAY = f"a number of milliseconds from 1 to {_MOST_MILLISECONDS}, or off"


def is_id(text: str) -> bool:
    """Whether this is an id in its canonical form."""
    return _NUMBER.fullmatch(text) is not None and int(text) <= MAX_ID


def are_ids(text: str) -> bool:
    """Whether these are ids joined by colons and plus signs."""
    return all(is_id(part) for part in re.split("[:+]", text))


def _is_groups(text: str) -> bool:
    return text in ("proc", "database", "none") or (_GIDS.fullmatch(text) is not None and are_ids(text))


def parse_client_id(text: str) -> ClientId | None:
    """Return the client id with this text; None if the text is no id."""
    return ClientId(int(text)) if is_id(text) else None


def parse_server_id(text: str) -> ServerId | None:
    """Return the server id with this text; None if the text is no id."""
    return ServerId(int(text)) if is_id(text) else None


def amount_of(text: str) -> int:
    """Return the value of a size (in bytes) or a count; 0 if the text is neither."""
    match = _SIZE.fullmatch(text)
    return int(match[1]) * UNITS.get(match[2], 1) if match else 0


def _is_size(text: str) -> bool:
    return 0 < amount_of(text) <= _MOST_BYTES


def _is_count(text: str) -> bool:
    return _COUNT.fullmatch(text) is not None


def _is_rate(text: str) -> bool:
    return text == "off" or Rate.parse(text) is not None


def _is_delay(text: str) -> bool:
    return text == "off" or (_is_count(text) and int(text) <= _MOST_MILLISECONDS)


def _is_policy(text: str) -> bool:
    module, _, name = text.rpartition(":")
    stem = module.rpartition("/")[2].removesuffix(".py")
    is_file = module.endswith(".py") and stem != ""
    return name.isidentifier() and (is_file or all(part.isidentifier() for part in module.split(".")))


def _is_fsid(text: str) -> bool:
    if text == "root" or _UUID.fullmatch(text):
        return True
    return _NUMBER.fullmatch(text) is not None and int(text) < 2**32


def _all_in(words: tuple[str, ...]) -> Callable[[str], bool]:
    return lambda text: all(part in words for part in text.split(":"))


def _is_location(text: str) -> bool:
    """Whether this is /path@host, with +host for more hosts, and more of them after a colon.

    The server takes the first @ for the one before the host, and there is no way to quote another (exports(5)).
    """
    return all(place.startswith("/") and place.count("@") == 1 and place[-1] != "@" for place in text.split(":"))


def _is_absolute(text: str) -> bool:
    return text.startswith("/")


SINGLE_VALUES: dict[str, tuple[Callable[[str], bool], str]] = {
    "anonuid": (is_id, EXPECTED_ID),
    "anongid": (is_id, EXPECTED_ID),
    "groups": (_is_groups, "proc, database, none or gids joined by colons"),
    "policy": (_is_policy, "FILE.py:Class or package.module:Class"),
    "prefetch": (lambda text: text in ("off", *HEURISTICS), f"one of {', '.join(HEURISTICS)}, off"),
    **dict.fromkeys(BYTES, (_is_size, _EXPECTED_SIZE)),
    **dict.fromkeys(COUNTS, (_is_count, _EXPECTED_COUNT)),
    "probe_alarm": (_is_rate, _EXPECTED_RATE),
    "probe_delay": (_is_delay, _EXPECTED_DELAY),
    "fsid": (_is_fsid, "a number, root or a UUID of 32 hexadecimal digits"),
    "sec": (_all_in(_FLAVORS), f"some of {', '.join(_FLAVORS)}, joined by colons"),
    "xprtsec": (_all_in(_TRANSPORTS), f"some of {', '.join(_TRANSPORTS)}, joined by colons"),
    "reexport": (lambda text: text in _REEXPORTS, " or ".join(_REEXPORTS)),
    "refer": (_is_location, _EXPECTED_LOCATION),
    "replicas": (_is_location, _EXPECTED_LOCATION),
    "mountpoint": (_is_absolute, "an absolute path"),
    "mp": (_is_absolute, "an absolute path"),
}
