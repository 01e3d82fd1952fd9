"""Why this machine would refuse to mount an entry of exports.d."""

import os

from .config.files import policy_dir
from .config.options import Export
from .policy import PolicyError, load_policy
from .views import ViewError, resolve


def refusals(entry: Export) -> list[str]:
    """What is not there: the directory, the plug-in, a user. (A plug-in is run.)"""
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
