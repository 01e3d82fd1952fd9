"""The pyfuse3 operations, one module per family. They make no decisions themselves: see `view` and `visibility`."""

from collections.abc import Sequence

from pyfuse3 import InodeT

from ..fuse.loop import last_request
from .attributes import Attributes
from .data import Data
from .directories import Directories
from .xattrs import ExtendedAttributes


class Filesystem(Attributes, Directories, Data, ExtendedAttributes):
    """A real tree, seen through views."""

    async def forget(self, inode_list: Sequence[tuple[InodeT, int]]) -> None:
        """Note that the kernel dropped references. This request has no answer."""
        last_request.is_forget = True
        self.references.dropped(inode_list)


__all__ = ["Filesystem"]
