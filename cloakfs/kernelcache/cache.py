"""What the kernel may cache of a mount, and how it is invalidated: the interface of this package.

A reply is made in this order. The caller is noted as a viewer of the object (`note_viewer`), and admitted to a
directory (`admit`). Then the reply gets its timeouts (`entry`, `attributes`, `negative`, `acl`, `opening`). A request
that has changed something reports it (`changed`, `linked`, `removed`, `moved`), and waits for the invalidation before
the reply. The order in which names, attributes and subtrees are invalidated is decided inside this package.
"""

from collections.abc import Callable, Generator
from typing import Any

from ..background.tasks import Tasks
from ..monitoring import Counters
from ..tree.nodes import Nodes
from ..tree.objects import NO_VIEWER, Object, Viewer
from ..tree.registry import unlist
from ..tree.views import Views
from ..tree.visibility import AccessPaths
from ..tuning import STANDARD, Tuning
from .audience import Audiences
from .cachepolicy import Fact, MountTraits, facts, tree_mount
from .changes import Changes
from .complete import CompleteDirectories
from .invalidation import Invalidation
from .notifier import InThread
from .sharedwatch import SharedWatch
from .timeouts import Timeouts
from .watch import Watch


class Pending:
    """An invalidation that has to be complete before the reply is sent. It is to be awaited.

    Raises:
        Stale: from the await: a process holds the lock of a directory, so that a name could not be invalidated yet.
    """

    def __init__(self, wait: Callable[..., Any], *args: object) -> None:
        self._wait = wait
        self._args = args

    def __await__(self) -> Generator[Any, None, None]:
        yield from self._wait(*self._args).__await__()


class KernelCache:
    """What the kernel caches of one mount.

    Args:
        nodes: the objects.
        views: the views that the mount offers.
        access_paths: is informed of directories that change.
        traits: what the rules about timeouts depend on.
        counters: count how many replies may be cached.
        on_attributes, on_change: are called when an object may have changed behind the mount (`Invalidation`).
        tuning: times and bounds.

    Attributes:
        subtree_check: of the `ExportMode`.
        complete_directories: those of which the kernel may cache all entries, for READDIR.
        invalidation: invalidates what the kernel caches. Only this package, and tests, use it directly.
        entry, attributes, negative, acl, opening: the timeouts of a reply, and whether pages may be cached: methods of
            `Timeouts`.
        is_known_to: whether the kernel may answer a caller about an object from its cache (`Timeouts.is_known_to`).
        may_list: whether a listing may show a caller more than a name (`Audiences.may_list`).
        viewer_of: as which audience of an object a caller counts (`Audiences.viewer_of`).
        changed, removed, moved: are to be awaited after a change, before the reply: methods of `Changes`.
        lacks_xattr, note_absent_xattr, clear_absent_xattrs: methods of `Invalidation`.
    """

    def __init__(
        self,
        nodes: Nodes,
        views: Views,
        access_paths: AccessPaths,
        traits: MountTraits,
        counters: Counters | None = None,
        *,
        on_attributes: Callable[[Object | None], None] = lambda _: None,
        on_change: Callable[[Object | None], None] = lambda _: None,
        tuning: Tuning = STANDARD,
    ) -> None:
        mode = traits.mode
        self._nodes, self._views, self._traits = nodes, views, traits
        self.subtree_check = mode.subtree_check
        self.invalidation = invalidation = Invalidation(nodes, access_paths, mode, tuning)
        invalidation.on_attributes, invalidation.on_change = on_attributes, on_change
        self._audiences = audiences = Audiences(nodes, invalidation, mode, of_groups=traits.knows_members)
        self._timeouts = timeouts = Timeouts(nodes, invalidation, audiences, traits, counters or Counters())
        self.complete_directories = complete_directories = CompleteDirectories(nodes, invalidation, audiences, timeouts)
        self._changes = changes = Changes(
            nodes, views, access_paths, invalidation, audiences, timeouts, complete_directories
        )
        if mode.subtree_check:
            nodes.registry.on_moved = audiences.relocated
            nodes.registry.audience_of_restored = NO_VIEWER  # what counts is who has passed it since
        timeouts.of_complete_directory = complete_directories.of_negative
        timeouts.on_entry = complete_directories.check_new
        # Requests call these often, and one call takes less time than two.
        self.entry = timeouts.entry
        self.attributes = timeouts.attributes
        self.negative = timeouts.negative
        self.acl = timeouts.acl
        self.opening = timeouts.opening
        self.is_known_to = timeouts.is_known_to
        self.may_list = audiences.may_list
        self.viewer_of = audiences.viewer_of
        self.changed, self.removed, self.moved = changes.changed, changes.removed, changes.moved
        # What objects were seen not to have, until a change is reported: cached by the daemon, not by the kernel.
        self.lacks_xattr = invalidation.lacks_xattr
        self.note_absent_xattr = invalidation.note_absent_xattr
        self.clear_absent_xattrs = invalidation.clear_absent_xattrs

    # -- who knows of an object --------------------------------------------------------------------

    def note_viewer(self, number: int, obj: Object, viewer: Viewer) -> Pending | None:
        """Note that a caller knows of the object, since its request names the nodeid, or is about to learn of it.

        To be called before it is found out whether the caller may see the object; with `subtree_check`, after that.
        Attributes that are cached for another viewer are invalidated at once.

        Args:
            number: of the view.
            obj: the object.
            viewer: the client uid, or the group that it stands for (`viewer_of`); `NO_VIEWER` (the daemon itself) or
                `ALL_VIEWERS` (an upper daemon).

        Returns:
            with `subtree_check`: what has to be invalidated before the caller may pass the directory. The request is
            then to begin once more.
        """
        if not self.subtree_check:
            self._audiences.record(number, obj, viewer)
            return None
        subtree = self._audiences.record_passing(number, obj, viewer)
        return None if subtree is None else Pending(self.invalidation.invalidated, subtree)

    def admit(self, number: int, obj: Object, viewer: Viewer) -> Pending | None:
        """Admit a caller to the directory `obj`, which it has looked up by name.

        Returns:
            what has to be invalidated before the reply; the name is then to be looked up once more. It must not be
            awaited while the kernel holds the lock of that directory for this request.
        """
        if self._audiences.is_ready(number, obj, viewer):
            return None
        return Pending(self._audiences.make_ready, number, obj, viewer)

    # -- what has changed --------------------------------------------------------------------------

    def linked(self, obj: Object) -> None:
        """Note that a request has made another name of `obj`. A policy may hide that, and not the old one."""
        self.invalidation.invalidate(obj)

    def has_no_name(self, obj: Object) -> None:
        """Note that an object was removed, which nobody has reported: its name is invalidated."""
        parent = obj.parent
        if parent is not None and (parent.children or {}).get(obj.name) is obj:
            self.invalidation.invalidate_name(parent, obj.name, parent.ever_cached_in)
            unlist(parent, obj.name)

    def invalidate(self, obj: Object, *, pages_in: int | None = None) -> None:
        """Invalidate the attributes of an object; with `pages_in`, its pages as well, in that view alone.

        (Pages that the kernel has because it wrote them, although the file now contains something else.)
        """
        if pages_in is None:
            self.invalidation.invalidate_attributes(obj)
        else:
            self.invalidation.invalidate_pages(pages_in, obj)

    async def confirm_content(self, number: int, obj: Object, in_thread: InThread) -> None:
        """Wait until neither pages nor attributes of a file are cached that were changed before now, by whomever.

        Nor are names: a file may be locked so that another one can be replaced. For some time from then on, pages and
        attributes of the file are only invalidated if it is changed again.

        Args:
            number: of the view.
            obj: the file, which is open.
            in_thread: waits for a call in a thread, because it may have to wait for a page that is being read.
        """
        is_known = obj.filesystem.watched and not self._nodes.registry.twins(obj) and await self._changes.catch_up()
        if not is_known:
            self.invalidation.invalidate_pages(number, obj)
        await self.invalidation.settled()
        await self.invalidation.notifier.confirm(self._nodes.nodeid(number, obj), in_thread)

    # -- for as long as the mount is there ---------------------------------------------------------

    def attach(self, session: int) -> None:
        """Note the descriptor of the FUSE session, to which notifications are written."""
        self.invalidation.notifier.session = self.invalidation.notifier.device = session

    def watch(self, watch: Watch | SharedWatch) -> None:
        """Have changes behind the mount reported, on the file systems that report them."""
        self._changes.watch(watch)

    @property
    def is_reading_all_changes(self) -> bool:
        """Whether this process reads all changes of its file systems itself."""
        return self._changes.is_reading_all

    @property
    def has_stale_notes(self) -> bool:
        """Whether to note anew what the kernel may know (`Changes.has_stale_notes`)."""
        return self._changes.has_stale_notes

    def check_watcher(self) -> None:
        """Leave a watcher that has stopped. This is to be called every second."""
        self._changes.check_watcher()

    async def share_changes(self, make: Callable[[], SharedWatch]) -> bool:
        """Have the watcher report changes from now on (`Changes.share`)."""
        return await self._changes.share(make)

    def run(self, tasks: Tasks) -> None:
        """Start what goes on in the background."""
        tasks.supervise("invalidating what the kernel caches", self.invalidation.run)
        tasks.supervise("watching mounts", self._changes.follow_mounts)
        tasks.supervise("finding what was moved", self._changes.find_moved)
        tasks.supervise("watching changes", self._changes.follow)

    def reset(self) -> None:
        """Invalidate everything: the policy has changed, for example."""
        self._audiences.reset()
        self._timeouts.clear()
        self.invalidation.invalidate_everything()

    def report(self) -> list[Fact]:
        """Return what the kernel may cache at present, for `cloakfs status`."""
        filesystems = self._nodes.mounts.filesystems
        tree = [tree_mount(mounted, filesystems) for mounted in filesystems]
        return facts(self._traits, self._views.any(), tree)
