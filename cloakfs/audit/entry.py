"""One entry of exports.d, or a mount: a tree, who looks at it, and through which view. Pure."""

from dataclasses import dataclass

from ..identity import ClientId
from ..view import View
from .identities import Claims


@dataclass(frozen=True, slots=True)
class Entry:
    """What one client specification is given.

    Attributes:
        path: the tree, as the entry names it.
        client: who may mount it, as in exports(5).
        label: the name of a fixed view; "" for a view per caller.
        place: where this is configured.
        source: the root of the tree.
        view: the view through which its callers look.
        claims: what they can become.
        read_only: whether nothing can be changed.
        entrants: client uids that may enter a fixed view besides root and its own identity.
        for_all: whether all callers may enter a fixed view, as with nfs-ganesha.
        top: the path below which `cloakfs explain` finds the tree; "" for `source`.
        explain_words: the options with which `explain` finds this entry.
    """

    path: str
    client: str
    label: str
    place: str
    source: str
    view: View
    claims: Claims
    read_only: bool
    entrants: frozenset[ClientId] = frozenset()
    for_all: bool = False
    top: str = ""
    explain_words: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The entry in a few words."""
        return f"{self.path} for {self.client}" + (f", view {self.label}" if self.label else "")
