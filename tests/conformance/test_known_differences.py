"""The list of known differences is complete, and the documentation repeats it."""

from __future__ import annotations

from .harness import CHECKOUT, known_differences

MARKERS = ("<!-- known differences -->\n", "<!-- end of known differences -->\n")


def test_each_case_is_listed_once_and_has_a_reason() -> None:
    known = known_differences()
    assert len({(one.suite, one.case) for one in known}) == len(known)
    for one in known:
        assert one.bare != one.mounted
        assert one.reason.strip().endswith(".")


def test_the_documentation_has_the_list() -> None:
    text = (CHECKOUT / "docs" / "conformance.md").read_text(encoding="utf-8")
    table = text.partition(MARKERS[0])[2].partition(MARKERS[1])[0]
    columns = [("Suite", "Case", "Backing", "Mounted", "Reason"), ("---",) * 5]
    columns += [(one.suite, f"`{one.case}`", one.bare, one.mounted, one.reason) for one in known_differences()]
    assert table.splitlines() == [f"| {' | '.join(cells)} |" for cells in columns]
