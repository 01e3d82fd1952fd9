"""Answers GETATTR of the directories that callers pass over NFS as before, as long as nothing has changed.

With subtree_check, the kernel's server has the kernel check at each request of a client whether the caller may pass the
directories above. What only one caller knows of, the kernel may not decide by itself, so it asks for the attributes of
the uppermost such directory, a home for example: one request for each of the client's, which are half of all.
"""

from typing import NamedTuple

from pyfuse3 import EntryAttributes, InodeT, RequestContext

from .. import linux
from ..exportmode import ExportMode
from ..kernelcache.cache import KernelCache
from ..tree.actor import DAEMON
from ..tree.nodes import OBJECT_BITS, Nodes
from ..tree.objects import Directory
from ..tree.request import Request
from ..tree.views import Views
from ..tree.visibility import AccessPaths
from ..view import View

MOST = 1000
"""How many answers are kept, one for each directory; the one that was noted first gives way."""


class _LastAnswer(NamedTuple):
    """What an answer was based on, and the answer.

    Attributes:
        uid, gid: of the request.
        view: by which the caller was judged.
        directory: what it is about.
        info: its stat.
        state: `Passing._state`.
        entry: the answer, which the kernel may not cache.
    """

    uid: int
    gid: int
    view: View
    directory: Directory
    info: linux.Stat
    state: tuple[int, int, int]
    entry: EntryAttributes


class Passing:
    """The last answer for each directory.

    Args:
        nodes: the objects.
        views: the views that the mount offers.
        cache: knows for whom the kernel has cached something.
        access_paths: knows whether a directory above has changed.
        mode: how the mount is exported.
    """

    def __init__(
        self, nodes: Nodes, views: Views, cache: KernelCache, access_paths: AccessPaths, mode: ExportMode
    ) -> None:
        self._nodes = nodes
        self._views = views
        self._cache = cache
        self._access_paths = access_paths
        self._is_always_new = mode.no_client_cache  # the times in an answer
        self._answers: dict[InodeT, _LastAnswer] = {}

    def _state(self) -> tuple[int, int, int]:
        """Return what is another value once anything but the directory itself has changed that an answer depends on."""
        return self._nodes.registry.epoch, self._access_paths.changes, self._cache.invalidation.epoch

    def answer(self, inode: InodeT, ctx: RequestContext) -> EntryAttributes | None:
        """Return the answer to this request if the same caller had it before and nothing has changed since."""
        last = self._answers.get(inode)
        if last is None or last.uid != ctx.uid or last.gid != ctx.gid:
            return None
        directory, number = last.directory, inode >> OBJECT_BITS
        if self._views.get(number) is not last.view:
            self._answers.clear()  # the policy has changed, and that of before may be large
            return None
        if (
            self._nodes.known_as(inode) is not directory
            or directory.audience != last.uid
            or (directory.rare is not None and directory.rare.ctime_ahead)
            or directory.filesystem.slow_until > 0
            or not self._access_paths.is_up_to_date()  # first: it takes note of what has changed until now
            or self._state() != last.state
            or self._nodes.registry.disconnected
            or not self._cache.is_known_to(number, directory, directory.audience)
            or directory.filesystem.stat(self._nodes.descriptors.fd(directory)) != last.info
            or self._cache.note_viewer(number, directory, directory.audience) is not None
        ):
            return None
        return last.entry

    def note(self, inode: InodeT, ctx: RequestContext, at: Request, entry: EntryAttributes) -> None:
        """Note an answer that is the same for this caller the next time, whatever its groups are then."""
        directory, uid = at.obj, ctx.uid
        if (
            entry.attr_timeout == 0
            and not self._is_always_new
            and isinstance(directory, Directory)
            and uid
            and at.who is not DAEMON
            and at.who.known is None  # its groups played no part
            and at.viewer == directory.audience == uid
            and at.view.cloak_by_ids is not None
            and at.view.lower is None
            and not at.waits
            and self._cache.is_known_to(at.number, directory, at.viewer)
        ):
            if len(self._answers) >= MOST:
                del self._answers[next(iter(self._answers))]
            self._answers[inode] = _LastAnswer(uid, ctx.gid, at.view, directory, at.info, self._state(), entry)
