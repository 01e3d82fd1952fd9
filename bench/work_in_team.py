"""Work in the directory of a group (mode 2770): two members at once, on files of both, as teams use a file server."""

import os
from collections.abc import Callable
from functools import partial

from .homes import MEMBERS, TEAM, rights_of
from .job import Job, JobInputs, Make, append_one, create_one, each, list_one, read_one
from .tree import BLOCK, Sizes, make_directory, make_file


def prepare_team(tree: str, sizes: Sizes) -> None:
    """Fill `team`, whose members own its files in turns."""
    directory = os.path.join(tree, TEAM)
    make_directory(directory, rights_of(TEAM)._replace(uid=0))
    for number, name in enumerate(_names(sizes)):
        make_file(os.path.join(directory, name), rights_of(TEAM, number % MEMBERS), BLOCK)


def _names(sizes: Sizes) -> list[str]:
    return [f"file-{number:03}" for number in range(sizes.shared)]


def _each(do: Callable[[str], object], inputs: JobInputs) -> Job:
    return Job(each(do, _names(inputs.sizes)))


def _list_and_stat(_: JobInputs) -> Job:
    return Job(partial(list_one, "."))


def _append(inputs: JobInputs) -> Job:
    """Append a line to files of both, which are cut again afterwards."""
    names = _names(inputs.sizes)

    def cut() -> None:
        for name in names:
            os.truncate(name, len(BLOCK))

    return Job(each(append_one, names), after=cut)


def _create_rename_unlink(inputs: JobInputs) -> Job:
    names = [f"new-{inputs.client}-{number}" for number in range(inputs.sizes.batch)]
    os.umask(0)

    def batch() -> int:
        for name in names:
            create_one(name, rights_of(TEAM).file)
        for name in names:
            os.rename(name, f"to-{name}")
        for name in names:
            os.unlink(f"to-{name}")
        return len(names)

    return Job(batch, warm=False)


WORK: dict[str, tuple[str, Make]] = {
    "stat": ("files", partial(_each, os.stat)),
    "list+stat": ("files", _list_and_stat),
    "open+read+close": ("files", partial(_each, read_one)),
    "open+append+close": ("lines", _append),
    "create+rename+unlink": ("files", _create_rename_unlink),
}
"""What is done, with what is counted."""
