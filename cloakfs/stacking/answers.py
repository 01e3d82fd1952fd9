"""What the lower mount answered about a caller: a thread queries it, because the session loop must not wait for it.

An answer is valid for one request, one caller and one object: it is held with the caller that the request is served as
(`AnsweredActor`), by st_dev and st_ino, and is never used for another request.
"""

from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

from .. import linux
from ..tree import calls
from ..tree.actor import Actor
from ..tree.objects import Object
from ..tree.prefault import Prefaulted
from ..view import LowerMount


class LowerAnswers(NamedTuple):
    """The answers of the lower mount to one caller: for each object, the text, or the error."""

    credentials: linux.Credentials
    of: dict[tuple[int, int], bytes | OSError]


class AnsweredActor(Actor):
    """A caller for which a thread has queried the lower mount."""

    __slots__ = ("_answers", "lacks")

    def __init__(self, who: Actor, answers: LowerAnswers) -> None:
        caller = who.caller
        super().__init__(caller.uid, caller.gid, lambda: caller)
        self._answers = answers
        self.lacks = who.lacks

    def answer(self, info: linux.Stat) -> bytes | OSError | None:
        """Return the answer about the object with this stat; None if there was no query for it, or for this caller."""
        return (
            self._answers.of.get((info.st_dev, info.st_ino)) if self._answers.credentials == self.credentials else None
        )


class Unanswered(Exception):
    """The session loop would itself have to query the lower mount: nothing is shown, and the fault is logged."""


def query(lower: LowerMount, credentials: linux.Credentials, fds: Iterable[int]) -> LowerAnswers:
    """In a thread: query the lower mount, as this caller, about those of the objects `fds` (O_PATH) that lie in it."""
    answers = LowerAnswers(credentials, {})
    for fd in fds:
        try:
            info, _ = calls.statx_fd(fd)
        except OSError:
            continue  # the session loop will get the same error
        if lower.contains(info):
            try:
                answers.of[info.st_dev, info.st_ino] = lower.query(credentials, fd)
            except OSError as exc:
                answers.of[info.st_dev, info.st_ino] = exc
    return answers


class Query:
    """The query to the lower mount that a thread makes after it has prefaulted an object (`Prefaulter.prefault`).

    Args:
        lower: the lower mount.
        who: the caller; its groups are looked up at once, which only the session loop may do.
        listed: descriptors (O_PATH) of further objects; they stay open while the request is being served.
    """

    def __init__(self, lower: LowerMount, who: Actor, listed: Collection[int]) -> None:
        self._lower = lower
        self._who = who.credentials
        self._listed = listed
        self.answers = LowerAnswers(self._who, {})

    def after(self, prefault: Callable[[], Prefaulted], obj: Object, root: Object) -> Callable[[], Prefaulted]:
        """Return a function that calls `prefault`, then asks about all objects that decide whether `obj` is visible."""
        numbers = _objects_to_query(obj, root)

        def work() -> Prefaulted:
            found = prefault()
            opened = [found.opened[number][1] for number in numbers if number in found.opened]
            self.answers = query(self._lower, self._who, [*opened, *self._listed])
            return found

        return work


def _objects_to_query(obj: Object, root: Object) -> list[int]:
    """Return the numbers of the objects about which `Visibility` needs the lower mount's answer; the `root` lies in it.

    The lower mount itself checks what is above its objects. For a hard link, the directories are checked one by one.
    """
    numbers: list[int] = []
    todo = [obj]
    while todo:
        at = todo.pop()
        is_in_lower = at.filesystem is root.filesystem
        if is_in_lower and at.number not in numbers:
            numbers.append(at.number)
        if at.parent is not None and (at.others or not is_in_lower):
            todo += [at.parent, *(parent for parent, _ in at.others)]
    return numbers
