"""Makes the manual pages from the documents and from the help of the commands, with pandoc.

    python -m package.manpages DIRECTORY

The documents are written for readers of Markdown. Their links to each other become references to manual pages or to
the place where packages install documents, and tables of two columns become lists, which any width suits.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import click

from cli.main import cloakfs

TOP = Path(__file__).parents[1]
DOCUMENTS = "/usr/share/doc/cloakfs"

PAGES = {
    "commands.md": ("cloakfs", 8),
    "exports.md": ("cloakfs.exports", 5),
    "plug-ins.md": ("cloakfs-policy", 7),
}
"""Name and section of the manual page of each document that has one."""

_ABOUT = {
    "cloakfs.exports": "who gets which tree through cloakfs, and how it looks",
    "cloakfs-policy": "policies of your own for cloakfs: who sees what, and how",
}

_FILES = """
/etc/cloakfs/exports.d/*.exports
:   what `cloakfs export` serves; see **cloakfs.exports**(5)

/var/lib/cloakfs
:   the state that keeps file handles valid, in one directory for each mount; see `cloakfs prune`

/run/cloakfs
:   what running daemons publish, and their logs
"""


def leaves(command: click.Command, *path: str) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Yield each command that can be called, with the words that call it."""
    if isinstance(command, click.Group):
        context = click.Context(command)
        if command.invoke_without_command:
            yield path, command
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from leaves(found, *path, name)
    else:
        yield path, command


def _context(command: click.Command) -> click.Context:
    return click.Context(command, help_option_names=cloakfs.context_settings["help_option_names"])


def usage(path: tuple[str, ...], command: click.Command) -> str:
    """Return how a command is called, as Markdown in one line."""
    pieces = command.collect_usage_pieces(_context(command))
    return f"**{' '.join(path)}** " + escaped(" ".join(pieces))


def escaped(text: str) -> str:
    """Return text that is not Markdown as Markdown."""
    return re.sub(r"([\\`*_{}\[\]<>#|~^$])", r"\\\1", text)


def options(command: click.Command) -> str:
    """Return the options of a command as `--help` has them, as a definition list in Markdown."""
    context = _context(command)
    given = [param for param in command.get_params(context) if isinstance(param, click.Option)]
    records = (param.get_help_record(context) for param in given)
    return "".join(f"**{escaped(record[0])}**\n:   {escaped(record[1])}\n\n" for record in records if record)


def for_man(text: str, own: str) -> str:
    """Return a document without its title as Markdown for a manual page.

    Args:
        text: the document.
        own: the name of its file.
    """
    text = re.sub(r"\A# .*\n", "", text)
    text = re.sub(r"\[([^\]]+)\]\(([^)\s]+)\)", lambda link: _reference(link[1], link[2], own), text)
    return _outside_code(text)


def _reference(words: str, target: str, own: str) -> str:
    path, _, _ = target.partition("#")
    words = words.replace("\n", " ")
    if path in ("", own):
        return words
    if "://" in target:
        return f"{words} ({target})"
    if path in PAGES:
        name, section = PAGES[path]
        return f"{words} (**{name}**({section}))"
    return f"{words} ({os.path.normpath(os.path.join(DOCUMENTS, 'docs', path))})"


def _outside_code(text: str) -> str:
    """Turn tables of two columns into lists, except in blocks of code."""
    lines: list[str] = []
    code = False
    rows: list[list[str]] = []
    for line in [*text.splitlines(), ""]:
        if line.startswith("```"):
            code = not code
        if not code and line.startswith("|"):
            rows.append([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
            continue
        lines += _table(rows)
        rows = []
        lines.append(line)
    return "\n".join(lines)


def _table(rows: list[list[str]]) -> Iterator[str]:
    if rows and len(rows[0]) == 2:
        title = rows[0][0]
        if title:
            yield from (f"{title[:1].upper()}{title[1:]}:", "")
        for first, second in rows[2:]:
            yield from (first, f":   {second}", "")
    elif rows:
        # pandoc makes columns as wide as the dashes below their headings are many.
        widths = [min(max(len(row[column]) for row in rows), 60) for column in range(len(rows[0]))]
        yield "| " + " | ".join(rows[0]) + " |"
        yield "|" + "|".join("-" * max(width, 6) for width in widths) + "|"
        yield from ("| " + " | ".join(row) + " |" for row in rows[2:])


def commands_page() -> str:
    """Return cloakfs(8): docs/commands.md, with the options of each command below its heading."""
    intro, *sections = re.split(r"^## ", (TOP / "docs/commands.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    callable_ = list(leaves(cloakfs, "cloakfs"))
    parts = [
        f"# NAME\n\ncloakfs - {(cloakfs.help or '').rstrip('.').lower()}\n\n",
        "# SYNOPSIS\n\n" + "".join(f"| {usage(path, command)}\n" for path, command in callable_) + "\n",
        "# DESCRIPTION\n" + for_man(intro, "commands.md"),
        "\n# COMMANDS\n",
    ]
    for section in sections:
        heading, _, text = section.partition("\n")
        parts.append(f"\n## {escaped(heading)}\n")
        for path, command in callable_:
            if path == tuple(heading.split()[: len(path)]) or path[:2] == tuple(heading.split()):
                parts.append(f"\n{usage(path, command)}\n\n{options(command)}")
        parts.append(for_man(text, "commands.md"))
    parts.append(f"\n# FILES\n{_FILES}\n# SEE ALSO\n\n**cloakfs.exports**(5), **cloakfs-policy**(7), **exports**(5), ")
    parts.append(f"**mount**(8), **pam_namespace**(8), and the documents in {DOCUMENTS}\n")
    return "".join(parts)


def document_page(document: str) -> str:
    """Return the page of a document that is about one subject."""
    name, _ = PAGES[document]
    text = for_man((TOP / "docs" / document).read_text(encoding="utf-8"), document)
    # Its sections become those of the page.
    text = "\n".join(_raised(text.splitlines()))
    see = ", ".join(f"**{other}**({section})" for other, section in PAGES.values() if other != name)
    return f"# NAME\n\n{name} - {_ABOUT[name]}\n\n# DESCRIPTION\n\n{text}\n\n# SEE ALSO\n\n{see}\n"


def _raised(lines: list[str]) -> Iterator[str]:
    code = False
    for line in lines:
        code ^= line.startswith("```")
        yield line if code else re.sub("^##", "#", line)


def write(directory: Path) -> list[Path]:
    """Write all pages, and return their paths.

    Raises:
        subprocess.CalledProcessError: pandoc refuses one.
        FileNotFoundError: pandoc is not installed.
    """
    directory.mkdir(parents=True, exist_ok=True)
    made = []
    for document, (name, section) in PAGES.items():
        page = directory / f"{name}.{section}"
        about = (f"title={name.upper()}", f"section={section}", f"footer=cloakfs {version('cloakfs')}")
        subprocess.run(
            ["pandoc", "--standalone", "--from=markdown-smart-tex_math_dollars-citations", "--to=man",
             *(f"--metadata={one}" for one in about), f"--output={page}"],
            input=commands_page() if document == "commands.md" else document_page(document),
            text=True, check=True, encoding="utf-8",
        )  # fmt: skip
        made.append(page)
    return made


if __name__ == "__main__":
    for written in write(Path(sys.argv[1])):
        print(written)
