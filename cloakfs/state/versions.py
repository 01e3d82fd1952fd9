"""Versions of formats on disk, or between processes, which may belong to different versions of cloakfs.

Each format has a version number of its own, in the module that knows the format. The number rises whenever code for
the previous format would misread the new one. The formats of 0.1.0 have no number, which counts as 0.
"""

from ..messages import UserError


class VersionError(UserError):
    """A version that this cloakfs does not know was met; the text is one line that says where, and what to do."""


def is_known(found: object, newest: int) -> bool:
    """Whether this is one of the versions up to `newest`, or None, as for 0.1.0.

    Args:
        found: what was found in the place of the version; it may be anything.
        newest: the version that this cloakfs itself writes.
    """
    return found is None or (type(found) is int and 0 <= found <= newest)


def version_problem(place: str, found: object, newest: int, hint: str) -> str:
    """Return one line that reports an unknown version."""
    return f"{place}: version {found!r} is not known to this cloakfs, which uses {newest}; {hint}"
