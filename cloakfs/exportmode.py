"""How a mount is exported: where requests come from then, and what that allows the kernel to cache."""

from dataclasses import dataclass
from enum import Enum


class Server(Enum):
    """What exports a mount."""

    NONE = "none"
    KNFSD = "knfsd"
    GANESHA = "ganesha"


@dataclass(frozen=True, slots=True)
class ExportMode:
    """How one mount is exported, for as long as it is there.

    Attributes:
        server: what exports it; only that is let in then.
        all_squash: the kernel's server makes all callers one (all_squash of exports(5)).
        subtree_check: the kernel's server has the kernel check, at each request, whether the caller may search the
            directories above (subtree_check of exports(5)).
        no_client_cache: every directory is shown as changed just now [SZ §3.2].
        kernel_gate: the mount is one fixed view, and the kernel itself lets no other caller in: the top directory is
            shown as the identity's alone.
    """

    server: Server = Server.NONE
    all_squash: bool = False
    subtree_check: bool = False
    no_client_cache: bool = False
    kernel_gate: bool = False

    @property
    def is_exported(self) -> bool:
        """Whether a server exports it."""
        return self.server is not Server.NONE

    @property
    def knfsd(self) -> bool:
        """Whether the kernel's server does: then requests come by handle, without any LOOKUP."""
        return self.server is Server.KNFSD

    @property
    def ganesha(self) -> bool:
        """Whether nfs-ganesha does, which acts as root, and keeps files open that no client has open."""
        return self.server is Server.GANESHA

    @property
    def passes_handles(self) -> bool:
        """Whether one caller's file handle may come back from another caller."""
        return self.knfsd and not self.all_squash

    @property
    def gated(self) -> bool:
        """Whether a check that is not cached keeps all other callers out of a fixed view before its first name."""
        return self.kernel_gate or self.ganesha


LOCAL = ExportMode()
"""No server exports the mount."""
