"""What the kernel may remember, and how it is made to forget what is no longer true."""

from collections.abc import Callable

from ..kernelcache.policy import Fact, Terms, facts, tree_mount
from ..tree.nodes import Nodes
from ..tree.objects import NOBODY, Object
from ..tree.passages import Passages
from ..tuning import STANDARD, Tuning
from ..views import Views
from .audience import Audiences
from .changes import Changes
from .forget import Forgetting
from .listings import Listings
from .remember import Remembering


class KernelCache:
    """What the kernel remembers of one mount.

    The methods of the parts that operations need are attributes here: using one costs one call, not two.

    Args:
        nodes: the objects.
        views: the views that the mount offers.
        passages: is told of directories that change.
        terms: what the rules about what may be remembered depend on.
        on_attributes, on_change: see `Forgetting`.
        tuning: times and bounds.

    Attributes:
        checks_above: see `ExportMode.subtree_check`.
        forgetter: tells the kernel what to forget.
    """

    def __init__(
        self,
        nodes: Nodes,
        views: Views,
        passages: Passages,
        terms: Terms,
        *,
        on_attributes: Callable[[Object | None], None] = lambda _: None,
        on_change: Callable[[Object | None], None] = lambda _: None,
        tuning: Tuning = STANDARD,
    ) -> None:
        mode = terms.mode
        forgetting = Forgetting(nodes, passages, mode, tuning)
        audiences = Audiences(nodes, forgetting, mode)
        remembering = Remembering(nodes, forgetting, audiences, terms)
        listings = Listings(nodes, forgetting, audiences, remembering)
        changes = Changes(nodes, views, passages, forgetting, audiences, remembering, listings)
        if mode.subtree_check:
            nodes.registry.on_moved = audiences.strayed
            nodes.registry.audience_of_restored = NOBODY  # what counts is whom the kernel has let through since
        forgetting.on_attributes, forgetting.on_change = on_attributes, on_change
        self._nodes, self._views, self._terms = nodes, views, terms
        self.checks_above = mode.subtree_check
        self.forgetter = forgetting.forgetter

        self.of_name = remembering.of_name
        self.of_object = remembering.of_object
        self.of_absence = remembering.of_absence
        self.keeps_content = remembering.keeps_content
        self.is_known_to_all = remembering.is_known_to_all
        self.is_known_to = remembering.is_known_to

        self.begin_listing = listings.begin
        self.check_entry = listings.check_entry
        self.end_listing = listings.end
        self.keeps_listing = listings.keeps
        self.check_reader = listings.check_reader
        self.of_private_absence = listings.of_absence

        self.tell = audiences.tell
        self.tell_passer = audiences.tell_passer
        self.is_ready = audiences.is_ready
        self.make_ready = audiences.make_ready
        self.is_remembered_for_others = audiences.is_remembered_for_others

        self.forget = forgetting.forget
        self.forgotten = forgetting.forgotten
        self.forget_attributes = forgetting.forget_attributes
        self.forget_listing = forgetting.forget_listing
        self.forget_pages = forgetting.forget_pages
        self.forget_everything = forgetting.forget_everything
        self.note_hidden = forgetting.note_hidden
        self.note_absent_xattr = forgetting.note_absent_xattr
        self.forget_absent_xattrs = forgetting.forget_absent_xattrs
        self.lacks_xattr = forgetting.lacks_xattr
        self.keep_forgetting = forgetting.keep_forgetting

        self.watch = changes.watch
        self.follow = changes.follow
        self.follow_mounts = changes.follow_mounts
        self.find_moved = changes.find_moved
        self.changed = changes.changed
        self.emptied = changes.emptied
        self.removed = changes.removed
        self.moved = changes.moved

    def report(self) -> list[Fact]:
        """Return what the kernel may remember at present, for people."""
        filesystems = self._nodes.mounts.filesystems
        tree = [tree_mount(mounted, filesystems) for mounted in filesystems]
        return facts(self._terms, self._views.any(), tree)
