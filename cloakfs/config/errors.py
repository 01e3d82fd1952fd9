"""Places in a text of exports.d, and the errors and warnings about them."""

from dataclasses import dataclass

from ..messages import UserError


@dataclass(frozen=True, slots=True)
class Location:
    """A place in a text; line and column (in characters) begin at 1."""

    file: str
    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"


@dataclass(frozen=True, slots=True)
class Remark:
    """A message about an entry: why it cannot be served, or what may be a mistake."""

    location: Location
    message: str

    def __str__(self) -> str:
        return f"{self.location}: {self.message}"


class ExportsError(UserError, ValueError):
    """A text that violates the grammar: where, what is wrong, and what was expected instead."""

    def __init__(self, location: Location, problem: str, expected: str) -> None:
        self.location = location
        self.problem = problem
        self.expected = expected
        self.message = f"{problem}; expected {expected}"
        super().__init__(f"{location}: {self.message}")


@dataclass(frozen=True, slots=True)
class ExportsWarning:
    """Something that conforms to the grammar but probably does not do what its author wants."""

    location: Location
    message: str

    def __str__(self) -> str:
        return f"{self.location}: warning: {self.message}"


def shown(text: str) -> str:
    """Return text for a message: quoted, on one line, and truncated if it is long."""
    return repr(text if len(text) <= 60 else text[:60] + "…")
