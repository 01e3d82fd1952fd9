"""What is for some users alone: homes, as on a login host, each of mode 0700, and the directory of a group."""

import os

from .tree import BLOCK, OWNER, RIGHTS, WORKER, Rights, Sizes, make_directory, make_file, make_many

HOME, TEAM = "home", "team"
"""The kinds of files, beside those that `tree` knows."""

USERS = 20
"""Their server ids begin with the worker's."""

MEMBERS = 2
"""So many of them, the worker first, are in the group of the team."""

TEAM_GID = WORKER + USERS - 1
"""The group's server id, which peers map like those of the users."""

DIRECTORIES = tuple(os.path.join("src", f"part-{i}", *["sub"] * (i % 5)) for i in range(10))
"""Where a user's files are, below the project: up to six levels deep."""


def rights_of(kind: str, user: int = 0) -> Rights:
    """Return owner and modes of files of this kind; in homes and the team, of those of one user. The worker is 0."""
    if kind == TEAM:
        return Rights(WORKER + user, TEAM_GID, 0o2770, 0o660)
    return Rights(WORKER + user, WORKER + user, 0o700, 0o600) if kind == HOME else RIGHTS[kind]


def groups_of(kind: str) -> list[int]:
    """Return in which groups, beside their own, users are who work on files of this kind: their server ids."""
    return [TEAM_GID] if kind == TEAM else []


def place_of(kind: str, user: int = 0) -> str:
    """Return the directory in which a user works, relative to the top of the tree."""
    return os.path.join("home", f"user-{user:02}", "project") if kind == HOME else kind


def names(files: int) -> list[str]:
    """Return the names of a user's files, so many in each directory, relative to the project."""
    return [os.path.join(directory, f"file-{i:02}") for directory in DIRECTORIES for i in range(files)]


def prepare_homes(tree: str, sizes: Sizes, *, many: bool) -> None:
    """Fill `home`: all users may list it, but only the owner of a home gets into it.

    Args:
        tree: its top.
        sizes: how much.
        many: with the files for `ls -lR`, in the worker's home.
    """
    make_directory(os.path.join(tree, "home"), Rights(OWNER, OWNER, 0o755, 0o644))
    for user in range(USERS):
        rights, project = rights_of(HOME, user), os.path.join(tree, place_of(HOME, user))
        for name in names(sizes.others if user else sizes.own):
            path = os.path.join(project, name)
            _make_directories(os.path.dirname(path), rights)
            make_file(path, rights, BLOCK)
        make_directory(os.path.join(project, "own"), rights)  # where the user makes files
    if many:
        make_many(os.path.join(tree, place_of(HOME), "many"), rights_of(HOME), sizes.directories, sizes.per_directory)


def _make_directories(path: str, rights: Rights) -> None:
    if not os.path.isdir(path):
        _make_directories(os.path.dirname(path), rights)
        make_directory(path, rights)
