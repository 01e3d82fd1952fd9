"""What the kernel may remember of a mount, and how it is made to forget what is no longer true: all that others use.

An answer is made in this order: whoever asks is noted as a viewer of the object (`note_viewer`), and let in on a
directory (`admit`); then the answer says how long the kernel may remember it (`entry`, `attributes`, `absent`, `acl`,
`opening`). A request that has changed something says so (`changed`, `linked`, `removed`, `moved`), and waits for that
before it is answered. In which order the kernel forgets names, attributes and what is below them is nobody else's
concern.
"""

from collections.abc import Callable, Generator
from typing import Any

from ..background.tasks import Tasks
from ..monitoring import Counters
from ..tree.nodes import Nodes
from ..tree.objects import NOBODY, Object
from ..tree.views import Views
from ..tree.visibility import AccessPaths
from ..tuning import STANDARD, Tuning
from .audience import Audiences
from .changes import Changes
from .complete import Listings
from .invalidation import Invalidation
from .policy import Fact, Terms, facts, tree_mount
from .timeouts import Timeouts
from .watch import Watch


class Pending:
    """Something that the kernel has to forget before an answer may tell anybody anything. It is to be awaited.

    Raises:
        Stale: from the await: somebody keeps a lock, so that the kernel could not be made to forget a name yet.
    """

    def __init__(self, wait: Callable[..., Any], *args: object) -> None:
        self._wait = wait
        self._args = args

    def __await__(self) -> Generator[Any, None, None]:
        yield from self._wait(*self._args).__await__()


class KernelCache:
    """What the kernel remembers of one mount.

    Args:
        nodes: the objects.
        views: the views that the mount offers.
        access_paths: is informed of directories that change.
        terms: what the rules about what may be remembered depend on.
        counters: count for how many answers anything may be remembered.
        on_attributes, on_change: see `Invalidation`.
        tuning: times and bounds.

    Attributes:
        checks_above: see `ExportMode.subtree_check`.
        listings: the directories of which the kernel may keep all entries; for READDIR: see `Listings`.
        invalidation: makes the kernel forget. Only the parts of the cache, and tests, use it directly.
        entry, attributes, absent, acl, opening: how long an answer may be remembered, and whether pages may: see the
            methods of `Timeouts`.
        is_known_to: whether the kernel may tell a caller of an object without asking (`Timeouts.is_known_to`).
        may_list: whether a listing may tell a caller more than a name (`Audiences.may_list`).
        changed, removed, moved: are to be awaited after a change, before the answer: see the methods of `Changes`.
        lacks_xattr, note_absent_xattr, forget_absent_xattrs: see `Invalidation`.
    """

    def __init__(
        self,
        nodes: Nodes,
        views: Views,
        access_paths: AccessPaths,
        terms: Terms,
        counters: Counters | None = None,
        *,
        on_attributes: Callable[[Object | None], None] = lambda _: None,
        on_change: Callable[[Object | None], None] = lambda _: None,
        tuning: Tuning = STANDARD,
    ) -> None:
        mode = terms.mode
        self._nodes, self._views, self._terms = nodes, views, terms
        self._watch: Watch | None = None
        self.checks_above = mode.subtree_check
        self.invalidation = invalidation = Invalidation(nodes, access_paths, mode, tuning)
        invalidation.on_attributes, invalidation.on_change = on_attributes, on_change
        self._audiences = audiences = Audiences(nodes, invalidation, mode)
        self._timeouts = timeouts = Timeouts(nodes, invalidation, audiences, terms, counters or Counters())
        self.listings = listings = Listings(nodes, invalidation, audiences, timeouts)
        self._changes = changes = Changes(nodes, views, access_paths, invalidation, audiences, timeouts, listings)
        if mode.subtree_check:
            nodes.registry.on_moved = audiences.strayed
            nodes.registry.audience_of_restored = NOBODY  # what counts is whom the kernel has let through since
        timeouts.of_complete = listings.of_absence
        # Requests ask for these often, and one call takes less time than two.
        self.entry = timeouts.entry
        self.attributes = timeouts.attributes
        self.absent = timeouts.absent
        self.acl = timeouts.acl
        self.opening = timeouts.opening
        self.is_known_to = timeouts.is_known_to
        self.may_list = audiences.may_list
        self.changed, self.removed, self.moved = changes.changed, changes.removed, changes.moved
        # What objects were seen not to have, until a change is reported. It is known here, and not in the kernel.
        self.lacks_xattr = invalidation.lacks_xattr
        self.note_absent_xattr = invalidation.note_absent_xattr
        self.forget_absent_xattrs = invalidation.forget_absent_xattrs

    # -- who is told -------------------------------------------------------------------------------

    def note_viewer(self, number: int, obj: Object, viewer: int) -> Pending | None:
        """Note that a caller evidently was told of the object, since it asks by nodeid, or is about to be told.

        To be called before it is found out whether the caller may see the object; where the kernel checks the
        directories above (`checks_above`), after that. Attributes that are remembered for others are forgotten at once.

        Args:
            number: of the view.
            obj: the object.
            viewer: the client uid, `NOBODY` (the daemon itself) or `ALL` (a daemon above).

        Returns:
            with `checks_above`: what has to be forgotten before the caller is let through the directory. The request is
            then to begin once more.
        """
        if not self.checks_above:
            self._audiences.tell(number, obj, viewer)
            return None
        below = self._audiences.tell_passer(number, obj, viewer)
        return None if below is None else Pending(self.invalidation.forgotten, below)

    def admit(self, number: int, obj: Object, viewer: int) -> Pending | None:
        """Let a caller in on the directory `obj`, which it has looked up by name.

        Returns:
            what has to be forgotten before the caller is told of it; the name is then to be looked up once more. It
            must not be awaited while the kernel holds the lock of that directory for this request.
        """
        if self._audiences.is_ready(number, obj, viewer):
            return None
        return Pending(self._audiences.make_ready, number, obj, viewer)

    # -- what has changed --------------------------------------------------------------------------

    def linked(self, obj: Object) -> None:
        """Note that a request has made another name of `obj`. A policy may hide that, and not the old one."""
        self.invalidation.forget(obj)

    def forget(self, obj: Object, *, pages_in: int | None = None) -> None:
        """Have the kernel forget the attributes of an object; with `pages_in`, in that view alone, but its pages, too.

        (Those that the kernel has because it wrote them, although the file now contains something else.)
        """
        if pages_in is None:
            self.invalidation.forget_attributes(obj)
        else:
            self.invalidation.forget_pages(pages_in, obj)

    # -- for as long as the mount is there ---------------------------------------------------------

    def attach(self, session: int) -> None:
        """Note the descriptor of the FUSE session, by which the kernel is told to ask for names again."""
        self.invalidation.notifier.session = self.invalidation.notifier.device = session

    def watch(self, watch: Watch) -> None:
        """Have changes behind the mount reported, on the file systems that report them."""
        self._watch = watch
        self._changes.watch(watch)

    def run(self, tasks: Tasks) -> None:
        """Start what goes on in the background."""
        tasks.supervise("invalidating what the kernel caches", self.invalidation.keep_forgetting)
        tasks.supervise("watching mounts", self._changes.follow_mounts)
        tasks.supervise("finding what was moved", self._changes.find_moved)
        if self._watch is not None:
            tasks.supervise("watching changes", self._changes.follow, self._watch)

    def reset(self) -> None:
        """Have everything forgotten: the policy has changed, for example."""
        self._timeouts.forget_views()
        self.invalidation.forget_everything()

    def report(self) -> list[Fact]:
        """Return what the kernel may remember at present, for people."""
        filesystems = self._nodes.mounts.filesystems
        tree = [tree_mount(mounted, filesystems) for mounted in filesystems]
        return facts(self._terms, self._views.any(), tree)
