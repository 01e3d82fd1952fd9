"""A table, for a terminal or for the documentation."""

from dataclasses import dataclass, field

from rich import box
from rich.table import Table
from rich.text import Text


@dataclass
class Sheet:
    """A table: cells in `**` are emphasized."""

    title: str
    head: list[str]
    rows: list[list[str]] = field(default_factory=list)

    def markdown(self) -> str:
        """Return the table in Markdown, for the documentation."""
        lines = [self.head, ["---"] * len(self.head), *self.rows]
        return "\n".join([f"\n**{self.title}**\n", *(f"| {' | '.join(line)} |" for line in lines)])

    def table(self) -> Table:
        """Return the table for a terminal."""
        table = Table(*self.head, title=self.title, title_justify="left", box=box.SIMPLE_HEAD)
        for row in self.rows:
            table.add_row(*(_terminal(cell) for cell in row))
        return table


def _terminal(cell: str) -> Text:
    parts = cell.split("**")
    return Text.assemble(*((part, "bold" if at % 2 else "") for at, part in enumerate(parts)))
