"""What the mount below has answered a caller: a thread asks on behalf of the session loop, which must not wait for it.

An answer is valid for one request, one caller and one object: it is kept with the caller that the request is served as
(`Asked`), by st_dev and st_ino, and is never used for another request.
"""

from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

from .. import linux
from ..tree import calls
from ..tree.actor import Actor
from ..tree.objects import Object
from ..tree.prefault import Prefaulted
from ..view import LowerTree


class Answers(NamedTuple):
    """The answers of the mount below to one caller: for each object, the text, or the error."""

    who: linux.Credentials
    of: dict[tuple[int, int], bytes | OSError]


class Asked(Actor):
    """A caller on whose behalf a thread has asked the mount below."""

    __slots__ = ("_answers", "lacks")

    def __init__(self, who: Actor, answers: Answers) -> None:
        caller = who.caller
        super().__init__(caller.uid, caller.gid, lambda: caller)
        self._answers = answers
        self.lacks = who.lacks

    def answer(self, info: linux.Stat) -> bytes | OSError | None:
        """Return the answer about the object with this stat; None if nobody has asked, or not for this caller."""
        return self._answers.of.get((info.st_dev, info.st_ino)) if self._answers.who == self.credentials else None


class NotAsked(Exception):
    """The session loop would itself have to ask the mount below: nothing is shown, and the fault is logged."""


def ask(below: LowerTree, who: linux.Credentials, fds: Iterable[int]) -> Answers:
    """In a thread: ask, as this caller, about the objects that `fds` (O_PATH) refer to, if in the mount below."""
    answers = Answers(who, {})
    for fd in fds:
        try:
            info, _ = calls.statx_fd(fd)
        except OSError:
            continue  # the session loop will get the same error
        if below.has(info):
            try:
                answers.of[info.st_dev, info.st_ino] = below.ask(who, fd)
            except OSError as exc:
                answers.of[info.st_dev, info.st_ino] = exc
    return answers


class Asking:
    """The questions that a thread asks when it looks at an object (`Nodes.prefault`).

    Args:
        below: the mount below.
        who: the caller; its groups are looked up here, which only the session loop may do.
        listed: descriptors (O_PATH) of further objects; they stay open while the request is being served.
    """

    def __init__(self, below: LowerTree, who: Actor, listed: Collection[int]) -> None:
        self._below = below
        self._who = who.credentials
        self._listed = listed
        self.answers = Answers(self._who, {})

    def after(self, look: Callable[[], Prefaulted], obj: Object, root: Object) -> Callable[[], Prefaulted]:
        """Return a function that calls `look`, and then asks about all objects that decide whether `obj` is visible."""
        numbers = _asked_about(obj, root)

        def work() -> Prefaulted:
            found = look()
            opened = [found.opened[number][1] for number in numbers if number in found.opened]
            self.answers = ask(self._below, self._who, [*opened, *self._listed])
            return found

        return work


def _asked_about(obj: Object, root: Object) -> list[int]:
    """Return the numbers of the objects about which `Visibility` asks the mount below, where the `root` lies.

    The mount below itself judges what is above its objects. For a hard link, the directories are judged one by one.
    """
    numbers: list[int] = []
    todo = [obj]
    while todo:
        at = todo.pop()
        is_in_it = at.filesystem is root.filesystem
        if is_in_it and at.number not in numbers:
            numbers.append(at.number)
        if at.parent is not None and (at.others or not is_in_it):
            todo += [at.parent, *(parent for parent, _ in at.others)]
    return numbers
