"""A request that was let in."""

import stat
from typing import NamedTuple

from .. import linux
from ..tree.door import Subject
from ..tree.objects import Object
from ..view import Asker, View

SET_ID = stat.S_ISUID | stat.S_ISGID
"""The bits of a mode that make a program run as its owner, or its group."""


class Entered(NamedTuple):
    """A request that was let in: the view, who it is served as, and the object that it names.

    `fd` (O_PATH) is valid until the next await.
    """

    number: int
    view: View
    who: Subject
    obj: Object
    fd: int
    info: linux.Stat
    hearer: int  # who learns the answer: see `audience`
    asker: Asker | None = None  # set where the kernel checks permissions against what is shown
    has_searched: bool = False  # the caller has just found something in this directory

    @property
    def credentials(self) -> linux.Credentials:
        """The credentials with which system calls for the caller are made."""
        return self.who.credentials
