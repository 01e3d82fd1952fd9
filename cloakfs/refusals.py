"""The reasons why this machine would refuse to mount entries of exports.d."""

import os
from collections.abc import Iterable

from .config.errors import Remark
from .config.files import policy_dir
from .config.options import Export
from .policy import PolicyError, load_policy
from .views import ViewError, resolve


def refusals(entries: Iterable[Export]) -> list[Remark]:
    """Return what is missing: directories, plug-ins, users. (This runs the plug-ins.)"""
    # A problem with a directory is reported once, however many clients it is for.
    said: dict[tuple[str, int, str], Remark] = {}
    for entry in entries:
        for text in _refusals(entry):
            said.setdefault((entry.location.file, entry.location.line, text), Remark(entry.location, text))
    return list(said.values())


def _refusals(entry: Export) -> list[str]:
    said = []
    if not os.path.isdir(entry.path):
        said.append(f"{entry.path}: not a directory")
    try:
        load_policy(entry.options.policy, entry.options, policy_dir(entry.location.file))
    except PolicyError as exc:
        said.append(str(exc))
    for item in entry.options.views:
        try:
            resolve(item)
        except ViewError as exc:
            said.append(str(exc))
    return said
