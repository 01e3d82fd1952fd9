"""A request that was let in: who asks, in which view, and about which object."""

import stat
from typing import NamedTuple

from .. import linux
from ..view import Asker, View
from .door import Subject
from .objects import Object

SET_ID = stat.S_ISUID | stat.S_ISGID
"""The bits of a mode that make a program run as its owner, or its group."""


class Request(NamedTuple):
    """A request that was let in.

    Attributes:
        number: of the view.
        view: the view.
        who: the identity that it is served as.
        obj: the object that it names by its nodeid; for a request with a name, the directory.
        fd: refers (O_PATH) to the object, and is valid until the next await.
        info: the stat of the object.
        hearer: who learns the answer: see `audience`.
        asker: set where the kernel checks permissions against what is shown.
        has_searched: whether the caller has just found something in this directory.
    """

    number: int
    view: View
    who: Subject
    obj: Object
    fd: int
    info: linux.Stat
    hearer: int
    asker: Asker | None = None
    has_searched: bool = False

    @property
    def credentials(self) -> linux.Credentials:
        """The credentials with which system calls for the caller are made."""
        return self.who.credentials
