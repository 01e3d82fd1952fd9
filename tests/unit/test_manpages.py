"""The manual pages leave nothing out, and are what man(1) expects."""

import re
import shutil
import subprocess
from pathlib import Path

import click
import pytest

from cli.main import cloakfs
from cloakfs.config.optionnames import FAMILY
from cloakfs.policy import Policy
from package import manpages

COMMANDS = list(manpages.leaves(cloakfs, "cloakfs"))
CONTEXT = click.Context(cloakfs)

pytestmark = pytest.mark.skipif(
    not (shutil.which("pandoc") and shutil.which("groff")), reason="needs pandoc and groff (scripts/setup --test)"
)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The pages by name."""
    return {page.name: page for page in manpages.write(tmp_path_factory.mktemp("man"))}


def shown(page: Path) -> str:
    """What man(1) shows of a page, without hyphenation; groff must not complain."""
    source = ".hy 0\n.de hy\n..\n" + page.read_text(encoding="utf-8")
    done = subprocess.run(
        ["groff", "-k", "-t", "-man", "-Tutf8", "-P-c", "-P-b", "-P-u", "-rLL=300n", "-ww"],
        input=source, capture_output=True, text=True, check=True, encoding="utf-8",
    )  # fmt: skip
    # The rows of a table cannot always be filled. (groff 1.22 says "can't", 1.23 "cannot".)
    said = done.stderr.splitlines()
    assert [line for line in said if "can't break line" not in line and "cannot break line" not in line] == []
    return done.stdout


def sections(text: str) -> dict[str, str]:
    """The text below each heading of the first or second level, by heading."""
    parts = re.split(r"^ {0,3}(\S.*)$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_there_is_a_page_for_each(pages: dict[str, Path]) -> None:
    assert sorted(pages) == ["cloakfs-policy.7", "cloakfs.8", "cloakfs.exports.5"]


@pytest.mark.parametrize("name", ["cloakfs.8", "cloakfs.exports.5", "cloakfs-policy.7"])
def test_a_page_is_indexed_by_its_name_and_has_no_markdown_left(pages: dict[str, Path], name: str) -> None:
    text = shown(pages[name])
    about = sections(text)["NAME"].strip().splitlines()
    assert len(about) == 1
    assert about[0].startswith(f"{name.rpartition('.')[0]} - ")
    for left in "```", "](", "**", "|--":
        assert left not in text.replace("/**", ""), left


def test_every_command_has_a_section_with_every_option(pages: dict[str, Path]) -> None:
    found = sections(shown(pages["cloakfs.8"]))
    for path, command in COMMANDS:
        usage = " ".join([*path, *command.collect_usage_pieces(CONTEXT)]).replace("…", "...")
        assert usage in found["SYNOPSIS"]
        holders = [text for text in found.values() if f"\n       {usage}\n" in text and text != found["SYNOPSIS"]]
        assert len(holders) == 1, usage
        for param in command.params:
            if isinstance(param, click.Option):
                record = param.get_help_record(CONTEXT)
                assert record is not None
                words = re.sub(r"\s+", " ", holders[0])
                for part in record:
                    assert re.sub(r"\s+", " ", part.replace("…", "...")) in words.replace("…", "..."), part


def test_every_section_about_a_command_is_about_one_that_exists(pages: dict[str, Path]) -> None:
    about = [heading for heading in sections(shown(pages["cloakfs.8"])) if heading.startswith("cloakfs ")]
    about = [heading for heading in about if not heading.endswith("(8)")]  # the footer
    names = set(cloakfs.list_commands(CONTEXT))
    assert {heading.split()[1] for heading in about} == names
    assert len(about) == len(names)


def test_options_of_mount_are_in_the_page_of_the_command(pages: dict[str, Path]) -> None:
    text = sections(shown(pages["cloakfs.8"]))["cloakfs mount SOURCE MOUNTPOINT"]
    for word in "suid", "dev", "default_permissions", "knfsd", "ganesha", "noxattr", "record=FILE":
        assert re.search(rf"\b{word}\b", text), word


def test_every_option_of_exports_d_is_in_its_page(pages: dict[str, Path]) -> None:
    text = shown(pages["cloakfs.exports.5"])
    missing = [name for name in FAMILY if not re.search(rf"(?<![\w-]){name}(?![\w-])", text)]
    assert missing == []


def test_every_method_of_a_policy_is_in_its_page(pages: dict[str, Path]) -> None:
    text = shown(pages["cloakfs-policy.7"])
    hooks = [name for name, value in vars(Policy).items() if callable(value) and not name.startswith("_")]
    assert "visible" in hooks
    assert [name for name in hooks if f"{name}(" not in text] == []
