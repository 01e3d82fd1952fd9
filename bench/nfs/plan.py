"""What is measured, as the host tells the guest, and what the guest tells the host of it."""

import json
from dataclasses import asdict, dataclass, field
from typing import Self

from ..over_nfs import BARE_EXPORT, EXPORTS, VERSIONS
from .work import Amounts, all_nfs_work

BARE = "bare"
BINDFS = "bindfs"

_PREFIX = "cloakfs export, "

OPTIONS: dict[str, str | None] = {
    BARE: EXPORTS[BARE_EXPORT],
    BINDFS: None,
    **{name.removeprefix(_PREFIX): options for name, options in EXPORTS.items() if name != BARE_EXPORT},
}
"""Every export, in the order of the tables: its options in exports.d; None: the tree, or bindfs, is exported itself."""

RESULTS = "results"
"""The file for records, one a line, in the directory that host and guest share."""


@dataclass(frozen=True, slots=True)
class NfsPlan:
    """What one guest measures.

    Attributes:
        works: names of pieces of work.
        exports: names of exports.
        versions: of NFS.
        repeat: how often each is measured.
        amounts: how much is done.
    """

    works: list[str] = field(default_factory=lambda: list(all_nfs_work(Amounts())))
    exports: list[str] = field(default_factory=lambda: list(OPTIONS))
    versions: list[str] = field(default_factory=lambda: list(VERSIONS))
    repeat: int = 3
    amounts: Amounts = field(default_factory=Amounts)

    def length(self) -> int:
        """Return how many records there will be if nothing fails."""
        return sum(len(self.works_with(name)) for name in self.exports) * len(self.versions) * self.repeat

    def works_with(self, export: str) -> list[str]:
        """Return the names of the pieces of work that are done through an export.

        Debian's bindfs answers everything with EIO once a file has been renamed through an export of it.
        """
        every = all_nfs_work(self.amounts)
        return [name for name in self.works if export != BINDFS or not every[name].renames]

    def text(self) -> str:
        """Return the plan for `parse`."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the plan that `text` has made."""
        fields = json.loads(text)
        return cls(**{**fields, "amounts": Amounts(**fields["amounts"])})


@dataclass(frozen=True, slots=True)
class Record:
    """One measurement, or why there is none.

    Attributes:
        work: its name.
        version: of NFS.
        export: its name.
        number: under which the plugin has written its counts.
        switches: from one task to another.
        requests: that the daemon has answered, by operation.
        failed: why there is no measurement; "" if there is one.
    """

    work: str
    version: str
    export: str
    number: int
    switches: int = 0
    requests: dict[str, int] = field(default_factory=dict)
    failed: str = ""


def parse_records(text: str) -> list[Record]:
    """Return the records of the lines that are complete."""
    return [Record(**json.loads(line)) for line in text[: text.rfind("\n") + 1].splitlines()]
