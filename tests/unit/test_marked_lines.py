"""Lines added to an administrator's file can be removed exactly, and are not touched if somebody has edited them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.markedlines import EditedError, marked, with_added, without

LINES = ["session required one.so", "", "# end of two"]


@given(st.text(alphabet="a# \t\r\n\f\x85\u2028"), st.lists(st.sampled_from(LINES)))
def test_removing_gives_back_the_text(text: str, lines: list[str]) -> None:
    added = with_added(text, lines)
    assert added.startswith(text)
    assert marked(added) == lines
    assert without(added) == text
    assert without(text) == text
    assert marked(text) is None


@given(st.sampled_from(["", "a", "a\n"]), st.sampled_from(["b\n", "\nb", "b"]))
def test_what_others_add_around_it_stays(text: str, more: str) -> None:
    added = with_added(text, LINES)
    assert without(f"c\n{added}") == f"c\n{text}"
    if added.endswith("\n"):
        assert without(added + more) == text + more


def _edits() -> dict[str, str]:
    text = with_added("above\n", LINES) + "below\n"
    begin, end = text.index("# begin"), text.rindex("# end cloakfs")
    return {
        "a line changed": text.replace("one.so", "two.so"),
        "a line added": text[:end] + "more\n" + text[end:],
        "no end": text[:end] + "below\n",
        "no begin": text[:begin] + text[text.index("\n", begin) + 1 :],
        "twice": text + text,
        "the wrong way round": text[end:] + text[:end],
    }


@pytest.mark.parametrize("how", _edits())
def test_edited_lines_are_refused(how: str) -> None:
    text = _edits()[how]
    for ask in (marked, without):
        with pytest.raises(EditedError) as refused:
            ask(text)
        line = text.split("\n")[refused.value.line - 1]
        assert line.startswith(("# begin cloakfs", "# end cloakfs"))
