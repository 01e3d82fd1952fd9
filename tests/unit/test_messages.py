"""Whoever may name a directory must not decide what root runs who pastes a suggested command."""

import ast
import os
import re
import subprocess
from pathlib import Path

from hypothesis import example, given, settings
from hypothesis import strategies as st

from cloakfs.messages import printable, shell_word

TOP = Path(__file__).parents[2]

_COMMAND = re.compile(
    r"(?:(?<!the )\bcloakfs (?:umount|events|status|mount|explain|table|trace|prune|metrics)|\bumount|\bfuser|\brm|\bln"
    r"|\bchmod \S+|\bchown \S+|\bcat|\becho \S+)(?: -\S+)* \"?$"
)
_QUOTED = ("shell_word(",)
_OURS = {"_LOCK", "_MOUNT_TABLE"}  # constants


def _words_of_commands() -> list[tuple[str, str]]:
    """Return what f-strings of the program put behind the name of a command, each with its place."""
    found = []
    for folder in ("cli", "cloakfs"):
        for path in sorted((TOP / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if not isinstance(node, ast.JoinedStr):
                    continue
                before = ""
                for part in node.values:
                    if isinstance(part, ast.Constant):
                        before = str(part.value)
                    elif isinstance(part, ast.FormattedValue) and _COMMAND.search(before):
                        found.append((f"{path.relative_to(TOP)}:{part.lineno}", ast.unparse(part.value)))
                        before = ""
    return found


def test_paths_in_suggested_commands_are_quoted() -> None:
    found = _words_of_commands()
    assert len(found) > 8
    assert [(at, word) for at, word in found if not word.startswith(_QUOTED) and word not in _OURS] == []


_NAMES = [
    b"/srv/a b",
    b"/srv/$(touch x)",
    b"/srv/it's",
    b"/srv/a\nb",
    b"/srv/\xff",
    b"/srv/a;b",
    rb"/srv/\n",
    b"~",
    b"!!",
]


@given(st.lists(st.binary(min_size=1) | st.text(min_size=1).map(lambda text: text.encode("utf-8", "replace"))))
@example(_NAMES)
@settings(max_examples=15, deadline=None)
def test_a_word_is_what_the_shell_reads(names: list[bytes]) -> None:
    names = [name.replace(b"\0", b"x") for name in names]
    words = [shell_word(os.fsdecode(name)) for name in names]
    assert list(map(printable, words)) == words, "the message that they are in changes nothing of them"
    done = subprocess.run(["bash", "-c", f"printf '%s\\0' {' '.join(words)}"], capture_output=True, check=True)
    assert done.stdout.split(b"\0")[:-1] == (names or [b""])
