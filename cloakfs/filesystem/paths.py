"""Where an object is in the mount, in words."""

import os

from ..tree.nodes import Nodes
from ..tree.objects import Object
from ..views import Views


def known_path(
    nodes: Nodes, views: Views, mountpoint: str, number: int, obj: Object, name: bytes | None = None
) -> str | None:
    """Return the last known path of an object, or of `name` in it, in the view with this number; None if unknown."""
    names = [] if name is None else [name]
    at = obj
    while at is not nodes.root:
        if at.parent is None:
            return None
        names.append(at.name)
        at = at.parent
    if views.top and number:
        names.append(b"@" + os.fsencode(views.label(number) or "?"))
    return os.path.join(mountpoint, *(os.fsdecode(part) for part in reversed(names)))
