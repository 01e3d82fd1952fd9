"""The pyfuse3 operations, one module per family. The decisions are made by `view` and `tree.visibility`."""

from collections.abc import Sequence

from pyfuse3 import InodeT

from ..fuse.loop import last_request
from .attributes import AttributeOperations
from .data import DataOperations
from .directories import DirectoryOperations
from .locks import LockOperations
from .xattrs import XattrOperations


class Filesystem(AttributeOperations, DirectoryOperations, DataOperations, LockOperations, XattrOperations):
    """A real tree, seen through views."""

    async def forget(self, inode_list: Sequence[tuple[InodeT, int]]) -> None:
        """Note that the kernel dropped references. This request has no answer."""
        last_request.is_forget = True
        self.references.dropped(inode_list)


__all__ = ["Filesystem"]
