"""What the kernel may remember, and making it forget when that stops being true."""

from ..tree.nodes import Nodes
from ..tree.passages import Passages
from ..views import Views
from .changes import Changes
from .forget import Forgetting
from .remember import Remembering


class KernelCache:
    """What the kernel remembers of one mount.

    What operations need of the parts is the part's own method: one call, not two.

    Args:
        nodes: the objects.
        views: what is offered.
        passages: what is told of directories that change.
        exported: a server of the kernel exports the mount: requests come by handle, without any LOOKUP.
        gated: the kernel itself keeps everybody else out of the only, fixed, view.
        forgetful: directories change with every answer (`no_client_cache`).

    Attributes:
        forgetter: tells the kernel.
    """

    def __init__(
        self,
        nodes: Nodes,
        views: Views,
        passages: Passages,
        *,
        exported: bool = False,
        gated: bool = False,
        forgetful: bool = False,
    ) -> None:
        forgetting = Forgetting(nodes, passages)
        remembering = Remembering(nodes, forgetting, exported=exported, gated=gated or views.top, forgetful=forgetful)
        changes = Changes(nodes, views, passages, forgetting, remembering)
        self.forgetter = forgetting.forgetter

        self.of_name = remembering.of_name
        self.of_object = remembering.of_object
        self.of_absence = remembering.of_absence
        self.keeps_content = remembering.keeps_content
        self.is_known_to_all = remembering.is_known_to_all

        self.forget = forgetting.forget
        self.forget_attributes = forgetting.forget_attributes
        self.forget_pages = forgetting.forget_pages
        self.forget_everything = forgetting.forget_everything
        self.keep_forgetting = forgetting.keep_forgetting

        self.watch = changes.watch
        self.follow = changes.follow
        self.follow_mounts = changes.follow_mounts
        self.changed = changes.changed
        self.removed = changes.removed
        self.moved = changes.moved
