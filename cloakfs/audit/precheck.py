"""The reasons why this machine would refuse to mount entries of exports.d."""

from collections.abc import Iterable

from ..config.errors import Remark
from ..config.files import policy_dir
from ..config.lint import key_of
from ..config.options import Export
from ..linux import ownfiles
from ..plugin.loader import PolicyError, load_policy
from ..tree.views import ViewError, resolve


def precheck(entries: Iterable[Export]) -> list[Remark]:
    """Return what is missing: directories, plug-ins, users. (This runs the plug-ins.)"""
    # A problem with a directory is reported once, however many clients it is for.
    said: dict[tuple[str, int, str], Remark] = {}
    for entry in entries:
        for text in _problems(entry):
            said.setdefault((entry.location.file, entry.location.line, text), Remark(entry.location, text))
    return list(said.values())


def aliases(entries: Iterable[Export]) -> list[Remark]:
    """Return a remark on each entry that shows a client the same directory as another one, by another path.

    It may be the path of a symbolic link or of a bind mount.
    """
    found = []
    first: dict[tuple[int, int, str], Export] = {}
    for entry in entries:
        path, client = key_of(entry)
        try:
            target = ownfiles.stat(entry.path)
        except OSError:
            continue  # `precheck` reports it
        other = first.setdefault((target.st_dev, target.st_ino, client), entry)
        if key_of(other)[0] != path:
            found.append(
                Remark(
                    entry.location,
                    f"{entry.path} is {other.path} by another path, which is exported to {other.client} already, at "
                    f"{other.location}: the client may choose, and a mount by --exports finds two entries; keep one",
                )
            )
    return found


def _problems(entry: Export) -> list[str]:
    said = []
    if not ownfiles.isdir(entry.path):
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
