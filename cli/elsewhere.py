"""Commands of another package, which may be missing, and costs nothing until one of them is called."""

import importlib

import click

from .common import fail


class Elsewhere(click.Command):
    """A command of which only the name and one line of help are known here.

    Args:
        name: the name of the command.
        module: the module that has a command of this name.
        extra: the extra of cloakfs that installs what the module needs.
        line: the line of help.
    """

    def __init__(self, name: str, module: str, extra: str, line: str) -> None:
        super().__init__(name, help=line)
        self._module = module
        self._extra = extra

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: object
    ) -> click.Context:
        """Return the context of the real command, with which click then continues."""
        return self.real().make_context(info_name, args, parent, **extra)

    def real(self) -> click.Command:
        """Return the real command; if it is not installed, end this one."""
        try:
            module = importlib.import_module(self._module)
        except ModuleNotFoundError as exc:
            fail(f"{self.name}: {exc.name} is not installed (pip install 'cloakfs[{self._extra}]')", 1)
        command: click.Command = getattr(module, str(self.name))
        return command
