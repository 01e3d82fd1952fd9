"""A request that was let in."""

from typing import NamedTuple

from .. import linux
from ..tree.door import Subject
from ..tree.objects import Object
from ..view import Asker, View


class Entered(NamedTuple):
    """A request that was let in: the view, who it is served as, and the object it names.

    `fd` (O_PATH) is good until the next await.
    """

    number: int
    view: View
    who: Subject
    obj: Object
    fd: int
    info: linux.Stat
    asker: Asker | None = None  # where the kernel checks permissions with what is shown
    has_searched: bool = False  # the caller has just found something in this directory

    @property
    def credentials(self) -> linux.Credentials:
        """What system calls for the caller are made with."""
        return self.who.credentials
