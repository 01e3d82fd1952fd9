"""The documents: links lead somewhere, and what they name of the code is there."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

TOP = Path(__file__).parents[2]
DOCUMENTS = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "changes/**/*.md", "contrib/**/*.md", "examples/**/*.md")
    for path in TOP.glob(pattern)
)
RECORDS = [path for path in sorted((TOP / "docs/decisions").glob("*.md")) if path.name != "README.md"]
PARTS = ("Context.", "Decision.", "Consequences.", "Code.")

_CODE_BLOCK = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[(?:[^\]]|\][^(])*?\]\(([^)\s]+)\)")


def prose(path: Path) -> str:
    return _CODE_BLOCK.sub("", path.read_text(encoding="utf-8"))


@cache
def anchors(path: Path) -> frozenset[str]:
    """What GitHub makes of the headings of a document, and those that it defines itself."""
    text = prose(path)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    made = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return frozenset(made | set(re.findall(r'<a (?:id|name)="([^"]+)">', text)))


def links(path: Path) -> Iterator[str]:
    for target in _LINK.findall(prose(path)):
        if "://" not in target and not target.startswith("mailto:"):
            yield target


def is_there(path: Path, target: str) -> bool:
    """Whether the target of a link in a document exists; in a change fragment, it is relative to the change notes."""
    name, _, anchor = target.partition("#")
    base = TOP if path.match("changes/*/*.md") else path.parent
    linked = (base / name).resolve() if name else path
    return linked.exists() and (not anchor or anchor in anchors(linked))


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(TOP)))
def test_links(path: Path) -> None:
    assert [target for target in links(path) if not is_there(path, target)] == []


@pytest.mark.parametrize(
    "path", [TOP / "CONTRIBUTING.md", TOP / "docs/design.md", *RECORDS], ids=lambda path: path.stem
)
def test_what_is_named_of_the_code(path: Path) -> None:
    """Files, below the top or cloakfs/, and methods."""
    named = re.findall(r"`([^`\s]+)`", prose(path))
    files = [name for name in named if re.fullmatch(r"[\w./]+(\.(py|md|toml)|\w/)", name) and name != "dist/"]
    assert [name for name in files if not ((TOP / name).exists() or (TOP / "cloakfs" / name).exists())] == []
    members = [name for name in named if re.fullmatch(r"[A-Z]\w+\.\w+", name) and name not in files]
    assert [name for name in members if not _is_member(*name.split("."))] == []


def _is_member(owner: str, name: str) -> bool:
    return any(
        re.search(rf"^class {owner}\b", text, re.MULTILINE)
        and re.search(rf"^ +(async )?def {name}\b|\bself\.{name}\b|^    {name}: ", text, re.MULTILINE)
        for text in sources()
    )


@cache
def sources() -> list[str]:
    return [path.read_text(encoding="utf-8") for path in (TOP / "cloakfs").rglob("*.py")]


def test_every_record_is_listed_once() -> None:
    listed = [target for target in links(TOP / "docs/decisions/README.md") if "/" not in target]
    assert sorted(listed) == [path.name for path in RECORDS]


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_a_record_has_its_parts(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert tuple(re.findall(r"^\*\*(\w+\.)\*\*", text, re.MULTILINE)) == PARTS
    assert len(text.splitlines()) <= 60
    (title,) = re.findall(r"^# (.*)$", text, re.MULTILINE)
    listed = " ".join((TOP / "docs/decisions/README.md").read_text(encoding="utf-8").split())
    assert f"- [{title}]({path.name}): " in listed
