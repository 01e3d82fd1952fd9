"""The pyfuse3 operations, one module per family. They make no decisions themselves: see `view` and `door`."""

import logging
from collections.abc import Sequence

from pyfuse3 import InodeT

from .. import linux
from .attributes import Attributes
from .data import Data
from .directories import Directories
from .xattrs import ExtendedAttributes

log = logging.getLogger(__name__)


class Filesystem(Attributes, Directories, Data, ExtendedAttributes):
    """A real tree, seen through views."""

    async def forget(self, inode_list: Sequence[tuple[InodeT, int]]) -> None:
        """Note that the kernel dropped references. This request has no answer."""
        for inode, count in inode_list:
            try:
                self.nodes.forget(inode, count)
            except Exception as exc:
                linux.act_as_daemon()
                if self.requests.is_news("forget", exc):
                    log.exception("forget(%r, %r) failed", inode, count)


__all__ = ["Filesystem"]
