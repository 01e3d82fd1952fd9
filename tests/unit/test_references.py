"""What docstrings and comments refer to is there: a dotted name in backticks is one of a module, or of a class.

Whoever renames something finds its uses by the type checker, but not what is said of it elsewhere.
"""

import ast
import io
import itertools
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

_REFERENCE = re.compile(r"`([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+)(?:\(\))?`")

_OTHERS = {
    "EntryAttributes", "ReaddirToken", "click", "pyfuse3", "trio",  # of libraries
    "pids", "security",  # of the kernel: `pids.max`, `security.capability`
}  # fmt: skip
_NO_REFERENCES = {"mount.fuse.cloakfs"}

Members = dict[str, set[str]]


def defined(body: Iterable[ast.stmt]) -> Iterator[str]:
    """Yield the names that these statements of a module or a class bind, without those inside of functions."""
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield statement.name
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            yield from ((name.asname or name.name).partition(".")[0] for name in statement.names)
        elif isinstance(statement, ast.If | ast.Try | ast.With):
            yield from defined(
                [*statement.body, *getattr(statement, "orelse", ()), *getattr(statement, "finalbody", ())]
            )
        else:
            stored = (node for node in ast.walk(statement) if isinstance(node, ast.Name))
            yield from (node.id for node in stored if isinstance(node.ctx, ast.Store))


def attributes(of_class: ast.ClassDef) -> Iterator[str]:
    """Yield what the class defines, what its methods store in `self`, and its slots; a base is `<` and its name."""
    yield from defined(of_class.body)
    for node in ast.walk(of_class):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            yield node.attr
    for base in of_class.bases:
        yield "<" + re.split(r"\[", ast.unparse(base))[0].rpartition(".")[2]
    for statement in of_class.body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__slots__":
            yield from map(str, ast.literal_eval(statement.value))


def members(sources: dict[str, str]) -> Members:
    """Return what modules, packages and classes have, by their names; the sources by their paths."""
    found: Members = {}
    for path, code in sources.items():
        *folders, file = path.removesuffix(".py").split("/")
        module = folders.pop() if file == "__init__" else file
        tree = ast.parse(code)
        found.setdefault(module, set()).update(defined(tree.body))
        if folders:
            found.setdefault(folders[-1], set()).add(module)
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, set()).update(attributes(node))
    return found


def has(known: Members, owner: str, name: str) -> bool:
    """Whether the module or class, or a base of it, has this attribute. What a base from elsewhere has is not known."""
    bases = [member[1:] for member in known[owner] if member[0] == "<"]
    return name in known[owner] or any(base in known and has(known, base, name) for base in bases)


def stale(known: Members, code: str) -> list[str]:
    """Return the references of a file that lead nowhere. One that begins with a variable of the file is not judged."""
    variables = {node.id for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)}
    variables |= {node.arg for node in ast.walk(ast.parse(code)) if isinstance(node, ast.arg)}
    found = []
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        if token.type not in (tokenize.STRING, tokenize.COMMENT):
            continue
        for reference in _REFERENCE.findall(token.string):
            parts = reference.split(".")
            if reference in _NO_REFERENCES:
                continue
            if parts[0] in known:
                leads = all(has(known, *pair) for pair in itertools.pairwise(parts) if pair[0] in known)
            else:
                leads = parts[0] in _OTHERS | sys.stdlib_module_names | variables
            if not leads:
                found.append(reference)
    return found


def sources() -> dict[str, str]:
    paths = (path for room in ("cloakfs", "cli") for path in (ROOT / room).rglob("*.py"))
    return {str(path.relative_to(ROOT)): path.read_text("utf-8") for path in paths}


def test_what_is_referred_to_is_there() -> None:
    code = sources()
    known = members(code)
    assert {path: found for path in code if (found := stale(known, code[path]))} == {}


SMALL = {
    "cloakfs/tree/nodes.py": (
        "from .index import Index\nLIMIT = 1\nclass Base:\n    size: int = 0\nclass Nodes(Base):\n"
        "    __slots__ = ('fd',)\n    def get(self): self.last = 1\n"
    ),
    "cloakfs/tree/__init__.py": "",
}


@pytest.mark.parametrize(
    ("reference", "leads"),
    [
        ("nodes.LIMIT", True),
        ("nodes.Nodes.get()", True),
        ("tree.nodes", True),
        ("Nodes.size", True),
        ("Nodes.fd", True),
        ("Nodes.last", True),
        ("os.path.join", True),
        ("at.fd", True),
        ("nodes.limit", False),
        ("nodes.Nodes.put", False),
        ("Nodes.set", False),
        ("links.is_entry", False),
    ],
)
def test_what_leads_nowhere(reference: str, leads: bool) -> None:
    known = members(SMALL)
    for code in (f'"""See `{reference}`."""\nat = 1\n', f"at = 1  # see `{reference}`\n"):
        assert stale(known, code) == ([] if leads else [reference.removesuffix("()")])
