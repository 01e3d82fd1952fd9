"""A position in a text of exports.d, and the ways of moving it forward."""

import re
from bisect import bisect_right

from .errors import ExportsError, ExportsWarning, Location, shown

_SPACE = frozenset(" \t\r\v\f")
BLANK = re.compile(r"(?:[ \t\r\v\f]+|\\\n)*+")
_BLANK_LINES = re.compile(r"(?:[ \t\r\v\f\n]+|\\\n|#[^\n]*)*+")
_OCTAL = re.compile(r"\\[0-3][0-7]{2}")
_SPECIAL = ' \t\r\v\f\n\0"\\\\'  # in a class of a pattern: what ends a run of plain characters in a string
_PLAIN_IN_QUOTES = re.compile(r'[^\n\0"\\]+')
WORD = re.compile(r'[^ \t\r\v\f\n,()="#\\]+')


class Scanner:
    """A position in a text, and the ways of moving it forward."""

    def __init__(self, text: str, file: str) -> None:
        self.text = text
        self.file = file
        self.pos = 0
        self.warnings: list[ExportsWarning] = []
        self._lines = [0, *(match.end() for match in re.finditer("\n", text))]

    def location(self, pos: int | None = None) -> Location:
        """Return a position, by default the present one, as a location."""
        at = self.pos if pos is None else pos
        line = bisect_right(self._lines, at)
        return Location(self.file, line, at - self._lines[line - 1] + 1)

    def warn(self, location: Location, message: str) -> None:
        """Record a warning about a place."""
        self.warnings.append(ExportsWarning(location, message))

    def peek(self) -> str:
        """Return the next character, or "" at the end of the text."""
        return self.text[self.pos : self.pos + 1]

    def at_end(self) -> bool:
        """Return whether the logical line ends at this position, perhaps with a comment."""
        return self.peek() in ("", "\n", "#")

    def at_space(self) -> bool:
        """Return whether white space follows, or a backslash that continues the logical line."""
        return self.peek() in _SPACE or self.text.startswith("\\\n", self.pos)

    def skip(self, pattern: re.Pattern[str]) -> str:
        """Move past the text that matches pattern at this position, and return it."""
        match = pattern.match(self.text, self.pos)
        if match is None:
            return ""
        self.pos = match.end()
        return match.group()

    def next_entry(self) -> bool:
        """Move to the next logical line that is not empty; return whether there is one."""
        self.skip(_BLANK_LINES)
        return self.pos < len(self.text)

    def unexpected(self, expected: str) -> ExportsError:
        """Return an error that says what stands at this position instead of what was expected."""
        at = self.peek()
        if at == "":
            problem = "the text ends here"
        elif at == "\n":
            problem = "the line ends here"
        elif at == "#":
            problem = "a comment begins here"
        elif at == "\\":
            problem = "a backslash that neither ends its line nor begins an octal escape"
        else:
            word = WORD.match(self.text, self.pos)
            problem = f"unexpected {shown(word.group() if word else at)}"
        return ExportsError(self.location(), problem, expected)

    def string(self, stops: str) -> str:
        """Return the string that begins at this position and extends to white space or to one of stops.

        As in exports(5), double quotes may surround any part of it, and ``\\040`` stands for a byte.
        Bytes that are not UTF-8 become lone surrogates, as file names do elsewhere in Python.
        """
        data = bytearray()
        unquoted = re.compile(f"[^{_SPECIAL}{re.escape(stops)}]+")
        quoted = False
        opened = self.location()
        while True:
            character = self.peek()
            if character in ("", "\n") or (quoted and self.text.startswith("\\\n", self.pos)):
                if quoted:
                    raise ExportsError(opened, "a quoted string is not closed on its line", 'a closing "')
                break
            if not quoted and (character in stops or self.at_space()):
                break
            plain = (_PLAIN_IN_QUOTES if quoted else unquoted).match(self.text, self.pos)
            if plain:
                self._add(plain.group(), data)
                continue
            escape = _OCTAL.match(self.text, self.pos)
            if character == "\0" or (escape and escape.group() == "\\000"):
                raise ExportsError(self.location(), "a NUL character", "a string without")
            if escape:
                data.append(int(escape.group()[1:], 8))
                self.pos = escape.end()
            elif character == "\\":
                raise self.unexpected("three octal digits after it, such as \\040")
            else:
                quoted = not quoted
                opened = self.location()
                self.pos += 1
        return data.decode("utf-8", "surrogateescape")

    def _add(self, plain: str, data: bytearray) -> None:
        """Add a run of plain characters, which is here, to a string."""
        try:
            data += plain.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError as exc:
            self.pos += exc.start
            raise self.unexpected("text") from None
        self.pos += len(plain)
