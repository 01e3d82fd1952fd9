"""Messages to users: the base class of errors that are reported in one line, and names as they can be printed."""

import shlex


class UserError(Exception):
    """Something that a user can mend; the text is one line that says the problem and, if there is one, a hint.

    A command that does not deal with it prints this line, without a traceback, and ends with status 1.
    """


def printable(text: str) -> str:
    """Escape text for a terminal: file names may contain control characters, or bytes that are not UTF-8."""
    parts = []
    for char in text:
        if char.isprintable():
            parts.append(char)
        else:
            parts += [f"\\{byte:03o}" for byte in char.encode("utf-8", "surrogateescape")]
    return "".join(parts)


def shell_word(text: str) -> str:
    """Return text as a word that can be pasted into a shell (bash, zsh), whatever bytes a name has.

    Every path in a command that a message suggests goes through this: users that name a directory would otherwise
    decide what root runs.
    """
    if text.isprintable():
        return shlex.quote(text)
    return "$'" + printable(text.replace("\\", "\\\\").replace("'", "\\'")) + "'"
