"""The examples for systemd and fstab use only commands and options that exist."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import click
import pytest

from cli.main import cloakfs
from cloakfs.config.parse import parse_options
from cloakfs.fuse.attach import split_mount_options

TOP = Path(__file__).parents[2]
UNITS = sorted((TOP / "examples" / "systemd").glob("*.service"))
COMMAND = "/usr/local/bin/cloakfs"


def settings(text: str) -> dict[str, list[str]]:
    """Section.Name -> the values that it is given, one after the other."""
    found: dict[str, list[str]] = {}
    section = ""
    for line in text.splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif line and not line.startswith("#"):
            name, equals, value = line.partition("=")
            assert equals, line
            found.setdefault(f"{section}.{name}", []).append(value)
    return found


def mount_unit() -> str:
    """The one that docs/nfs.md shows."""
    found = re.search(
        r"```\n(\[Unit\].*?Type=fuse\.cloakfs.*?)```", (TOP / "docs" / "nfs.md").read_text("utf-8"), re.DOTALL
    )
    assert found
    return found[1]


def parsed(words: list[str]) -> tuple[str, dict[str, object]]:
    """The command that a command line calls, and its parameters; click raises what it does not know."""
    command: click.Command = cloakfs
    context = click.Context(command)
    path = []
    while isinstance(command, click.Group):
        name, found, words = command.resolve_command(context, words)
        assert name is not None
        assert found is not None
        command = found
        path.append(name)
        context = click.Context(command, info_name=name, parent=context)
    # Options that show something and exit have no place in a unit.
    command.parse_args(context, list(words))
    return " ".join(path), context.params


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_units_are_told_when_the_mounts_answer_and_everybody_sees_them(unit: Path) -> None:
    found = settings(unit.read_text("utf-8"))
    assert found["Service.Type"] == ["notify"]
    # Of what has systemd give the service a mount namespace of its own, nothing.
    names = {name.removeprefix("Service.") for name in found if name.startswith("Service.")}
    assert not [
        name for name in names if name.startswith(("Protect", "Private", "ReadOnly", "ReadWrite", "Inaccessible"))
    ]


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_units_call_what_there_is(unit: Path) -> None:
    found = settings(unit.read_text("utf-8"))
    called = {}
    for name, values in found.items():
        if name.startswith("Service.Exec"):
            (value,) = values
            program, *words = shlex.split(value)
            if program == "/bin/kill":
                assert words == ["-HUP", "$MAINPID"]
                continue
            assert program == COMMAND
            called[name.removeprefix("Service.")] = parsed(words)
    command, up = called["ExecStart"]
    if "metrics" in unit.name:
        assert command == "metrics"
        assert up["listen"]  # or else it would print them and end
        return
    if unit.name == "cloakfs@.service":
        assert (command, up["foreground"], up["words"]) == ("mount", True, ("${OPTIONS}",))
        assert set(re.findall(r"^#   (\w+)=", unit.read_text("utf-8"), re.MULTILINE)) == {
            "SOURCE",
            "MOUNTPOINT",
            "OPTIONS",
        }
        assert found["Service.Restart"] == ["on-failure"]  # an orderly unmount is none
        assert found["Service.WatchdogSec"]
        return
    assert command == "export up"
    assert up["foreground"] is True  # or else it would not tell when it is ready
    assert up["server"] == ("ganesha" if "ganesha" in unit.name else "knfsd")
    command, reload = called["ExecReload"]
    assert command == "export reload"
    assert reload["name"] == up["name"]


def test_the_mount_unit_and_the_line_of_fstab_mean_the_same() -> None:
    text = (TOP / "docs" / "nfs.md").read_text("utf-8")
    (line,) = re.findall(r"^/srv/real .* fuse\.cloakfs .*$", text, re.MULTILINE)
    source, target, kind, words, *_ = line.split()
    unit = {name.partition(".")[2]: values for name, values in settings(mount_unit()).items()}
    assert ([source], [target], [kind]) == (unit["What"], unit["Where"], unit["Type"])
    unescaped = re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), words)
    of_fstab, of_unit = (parse_options(split_mount_options(each)[1])[0] for each in (unescaped, unit["Options"][0]))
    assert of_fstab == of_unit
    assert of_unit.cloak_list


def test_systemd_accepts_them(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs systemd-analyze (apt install systemd)")
    for unit in UNITS:
        # A command that is here, as cloakfs need not be installed; it is looked for.
        (tmp_path / unit.name).write_text(unit.read_text("utf-8").replace(COMMAND, "/bin/true"), "utf-8")
    (tmp_path / "export.mount").write_text(mount_unit(), "utf-8")
    for path in tmp_path.iterdir():
        done = subprocess.run(
            ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(path)],
            capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
        assert (done.returncode, done.stdout + done.stderr) == (0, ""), path
