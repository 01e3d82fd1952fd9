"""Versions of what is kept on disk or told to other processes, which may belong to another version of cloakfs.

Each format has a number of its own, in the module that knows the format. It rises whenever whoever knows the format of
before would misread the new one. What 0.1.0 wrote has no number, and counts as 0.
"""


class VersionError(Exception):
    """A version that this cloakfs does not know was met; the text is one line that says where, and what to do."""


def is_known(found: object, newest: int) -> bool:
    """Is this one of the versions up to `newest`? None, as 0.1.0 has it, is one.

    Args:
        found: what stands in the place of the version, whatever that is.
        newest: the version that this cloakfs itself writes.
    """
    return found is None or (type(found) is int and 0 <= found <= newest)


def refusal(place: str, found: object, newest: int, way_out: str) -> str:
    """One line for whoever meets a version that is not known."""
    return f"{place}: version {found!r} is not known to this cloakfs, whose own is {newest}; {way_out}"
