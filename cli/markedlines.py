"""Lines that a command adds to an administrator's file, marked so that the command can remove exactly them again.

The line that begins them carries a digest, so that the command notices if they were edited.
"""

import hashlib
import re
from collections.abc import Sequence

from cloakfs.messages import UserError

_BEGIN = "# begin cloakfs session setup "
_END = "# end cloakfs session setup"
_begin = re.compile(rf"^{_BEGIN}([0-9a-f]{{12}}): .*\n", re.MULTILINE)
_end = re.compile(rf"^{_END}(?:\n|\Z)", re.MULTILINE)


class EditedError(UserError, ValueError):
    """The marked lines are not those that were added; `line` is the number of the line with the mark."""

    def __init__(self, line: int) -> None:
        super().__init__("the marked lines were edited by hand; restore them, or delete them yourself")
        self.line = line


def marked(text: str) -> list[str] | None:
    """Return the lines between the marks, if they are as they were added; None if there are no marks.

    Raises:
        EditedError: the marked lines were edited, or one of the two marks is missing, or there are more.
    """
    found = _find(text)
    return None if found is None else text[found[0].end() : found[1].start()].split("\n")[:-1]


def without(text: str) -> str:
    """Return the text without the marked lines: exactly what it was before they were added.

    Raises:
        EditedError: as in `marked`.
    """
    found = _find(text)
    if found is None:
        return text
    begin, end = found
    before, after = text[: begin.start()], text[end.end() :]
    if not end[0].endswith("\n"):  # nor did the text that they were added to
        before = before.removesuffix("\n")
    return before + after


def _find(text: str) -> tuple[re.Match[str], re.Match[str]] | None:
    begins, ends = list(_begin.finditer(text)), list(_end.finditer(text))
    if not begins and not ends:
        return None
    marks = sorted((*begins, *ends), key=re.Match.start)
    if [mark.re for mark in marks] != [_begin, _end]:
        raise EditedError(text.count("\n", 0, marks[-1].start()) + 1)
    begin, end = marks
    if _digest(text[begin.end() : end.start()]) != begin[1]:
        raise EditedError(text.count("\n", 0, begin.start()) + 1)
    return begin, end


def with_added(text: str, lines: Sequence[str]) -> str:
    """Return the text, which has no marked lines, with these lines at its end.

    The last line ends like that of the text: this tells `without` whether the text ended with a line feed.
    """
    body = "".join(f"{line}\n" for line in lines)
    begin = f'{_BEGIN}{_digest(body)}: do not edit; "cloakfs session setup --remove" removes this\n'
    if text and not text.endswith("\n"):
        return f"{text}\n{begin}{body}{_END}"
    return f"{text}{begin}{body}{_END}\n"


def _digest(body: str) -> str:
    return hashlib.sha256(body.encode("utf-8", "surrogateescape")).hexdigest()[:12]
