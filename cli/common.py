"""What the commands share."""

import glob
import json
import os
import sys
from dataclasses import dataclass
from typing import NoReturn

import click

from cloakfs.daemon import RUN_DIR


def fail(text: str, status: int) -> NoReturn:
    """End with one clear line: status 1 for what cannot be done, 2 for what was asked wrongly."""
    click.echo(f"cloakfs: {text}", err=True)
    sys.exit(status)


@dataclass(frozen=True, slots=True)
class Mounted:
    """A mount that a daemon on this machine serves."""

    pid: int
    source: str
    target: str
    options: str
    policy_dir: str


def mounted() -> dict[str, Mounted]:
    """The mounts of this machine by mount point, as their daemons tell."""
    found = {}
    for path in glob.glob(os.path.join(glob.escape(RUN_DIR), "*.json")):
        try:
            with open(path, encoding="utf-8") as file:
                told = json.load(file)
            mount = Mounted(**{name: told[name] for name in Mounted.__dataclass_fields__})
        except (OSError, ValueError, KeyError, TypeError):
            continue  # it just ended
        found[mount.target] = mount
    return found
