"""Commands of another package, which is there or not, and costs nothing before one of them is called."""

import importlib

import click

from .common import fail


class Elsewhere(click.Command):
    """A command of which only the name and one line are known here.

    Args:
        name: what it is called.
        module: has a command of that name.
        extra: of cloakfs, which brings whatever the module needs.
        line: of help.
    """

    def __init__(self, name: str, module: str, extra: str, line: str) -> None:
        super().__init__(name, help=line)
        self._module = module
        self._extra = extra

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: object
    ) -> click.Context:
        """The context is the real command's, which click then goes on with."""
        try:
            module = importlib.import_module(self._module)
        except ModuleNotFoundError as exc:
            fail(f"{self.name}: there is no {exc.name} (pip install 'cloakfs[{self._extra}]')", 1)
        command: click.Command = getattr(module, str(self.name))
        return command.make_context(info_name, args, parent, **extra)
