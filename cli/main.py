"""The command group `cloakfs`."""

import os
import sys

import click

from .background import remember_inherited
from .bench import bench
from .check import check
from .explain import explain
from .export import export
from .mount import mount
from .output import run
from .prefetch import prefetch
from .status import status
from .table import table
from .umount import umount

# Exit statuses (docs/commands.md): 0 done, 1 it cannot be done, or told, 2 the command line or a configuration is
# wrong.


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="cloakfs")
def cloakfs() -> None:
    """Give each caller of a shared tree a view of its own."""


for command in (mount, umount, status, export, check, explain, table, bench, prefetch):
    cloakfs.add_command(command)


def main() -> None:
    """Run the command; `cloakfs SOURCE MOUNTPOINT …`, as mount(8)'s FUSE helper calls it, means `cloakfs mount`."""
    remember_inherited()
    if len(sys.argv) > 1 and os.sep in sys.argv[1] and not sys.argv[1].startswith("-"):
        sys.argv.insert(1, "mount")
    run(cloakfs)


if __name__ == "__main__":
    main()
