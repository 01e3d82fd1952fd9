"""The last known names of objects: which directory each is in, and which objects each directory has.

An object's last known place is in the directory's `children`, or in its `strays` if something has happened to that name
since. Its further names are in `further` of their directories. So each is found at once, however many have changed.

This module does not verify that the names are still true (`locate` does). Each name pins the directory that it is in; a
directory that has lost a name may be unused, and `registry` then drops it.
"""

from itertools import chain

from .objects import NEVER, Directory, Object, as_directory

# How many further names of a file to remember; one with more may have to be looked up again to be used by handle.
_MAX_OTHER_NAMES = 16


def place(obj: Object, parent: Directory, name: bytes) -> Directory | None:
    """Record that `obj` is now `name` in `parent`; return the directory it was in, which has one name less by that."""
    before = leave(obj) if obj.parent is not None or isinstance(obj, Directory) else None
    parent.pins += 1
    obj.parent, obj.name, obj.checked = parent, name, NEVER
    if parent.children is None:
        parent.children = {}
    replaced = parent.children.get(name)
    if replaced is not None:
        _stray(parent, name, replaced)  # until it is found elsewhere, or nowhere
    parent.children[name] = obj
    return before


def leave(obj: Object) -> Directory | None:
    """Record that `obj` has no place now; return the directory it was in, which has one name less by that."""
    if isinstance(obj, Directory):
        obj.trusted = -1
        if obj.passage is not None:
            obj.passage.is_void = True
    parent, obj.parent = obj.parent, None
    if parent is not None:
        if parent.children is not None and parent.children.get(obj.name) is obj:
            del parent.children[obj.name]
        if parent.strays:
            same = parent.strays.get(obj.name, {})
            same.pop(obj, None)
            if not same:
                parent.strays.pop(obj.name, None)
        parent.pins -= 1
    return parent


def is_entry(obj: Object, parent: Object, name: bytes) -> bool:
    """Whether `obj` is the last object that was found as `name` in `parent`, and nothing has happened to that name."""
    return parent.children is not None and parent.children.get(name) is obj


def unlist(parent: Object, name: bytes) -> None:
    """Record that something happened to this name: it leads nowhere, or to an object that has yet to be found there.

    What was found there keeps this as its last known place, which is verified before anybody relies on it.
    """
    children = parent.children
    if children is not None and name in children:
        obj = children.pop(name)
        obj.checked = NEVER
        _stray(as_directory(parent), name, obj)


def entry(parent: Object, name: bytes) -> Object | None:
    """Return the last object whose last known place this is, also if something has happened to the name since."""
    there = (parent.children or {}).get(name)
    if there is None:
        there = next(reversed((parent.strays or {}).get(name, {})), None)
    return there


def part(obj: Object, parent: Directory) -> Directory | None:
    """If `parent` was thought to be below `obj`, undo that as outdated: no directory can be below itself.

    It must be done before `obj` is placed in `parent`. Returns the directory that has no place any more.
    """
    if not isinstance(obj, Directory) or not obj.pins:
        return None
    at: Directory | None = parent
    while at is not None and at.parent is not obj:
        at = at.parent
    if at is not None:
        leave(at)
    return at


def _stray(parent: Directory, name: bytes, obj: Object) -> None:
    if parent.strays is None:
        parent.strays = {}
    parent.strays.setdefault(name, {})[obj] = None


def end_name(obj: Object, parent: Directory, name: bytes) -> None:
    """Note that this is not among the further names of `obj` any more."""
    parent.pins -= 1
    if parent.further is not None and (parent, name) not in obj.others:
        parent.further.discard((name, obj))


def within(directory: Object) -> list[Object]:
    """Return the objects known to have, or to have had, a name in this directory: perhaps too many, never too few."""
    return [
        *(directory.children or {}).values(),
        *chain.from_iterable((directory.strays or {}).values()),
        *(obj for _, obj in directory.further or ()),
    ]


def add_name(obj: Object) -> None:
    """Make the present place of the file `obj`, which is about to get another one, one of its further names."""
    assert obj.parent is not None
    rare = obj.rarely()
    if rare.others is None:
        rare.others = []
    parent = obj.parent
    rare.others.append((parent, obj.name))
    parent.pins += 1
    if parent.further is None:
        parent.further = set()
    parent.further.add((obj.name, obj))


def drop_name(obj: Object, parent: Directory, name: bytes) -> None:
    """Remove this name, about to be its place, from the further names of `obj`, or the oldest if there are too many."""
    others = [*obj.others]
    outdated = others.index((parent, name)) if (parent, name) in others else 0
    if (parent, name) in others or len(others) > _MAX_OTHER_NAMES:
        ended = others.pop(outdated)
        obj.others = others
        end_name(obj, *ended)
