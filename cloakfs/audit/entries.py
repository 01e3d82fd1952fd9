"""Finds the entries whose exposure is to be assessed: of exports.d files, or the one of a mount."""

import itertools
import os
from collections.abc import Iterable
from dataclasses import dataclass, field

from ..config import files
from ..config.errors import Location
from ..config.options import Export, Hides, Options
from ..config.viewitems import Ids, Range, ViewItem
from ..fuse.detach import KINDS
from ..linux import mountinfo
from ..messages import UserError
from ..nfs.plan import ServerKind
from ..policy import Policy
from ..state.client import Daemon
from ..state.runtime import Mounted
from ..tree import calls
from ..tree.views import ViewError, ViewIdentity, accounts_of, resolve
from ..view import View
from .entry import Entry
from .identities import claims, effective_groups, fixed_claims


@dataclass(slots=True)
class Entries:
    """The entries that can be assessed, and those that cannot, with the reason."""

    entries: list[Entry] = field(default_factory=list)
    refused: list[tuple[str, str]] = field(default_factory=list)


def of_files(paths: Iterable[str], server: ServerKind) -> Entries:
    """Return the entries of exports.d files, and of all `*.exports` files in folders.

    Args:
        paths: the files and folders.
        server: the server by which `cloakfs export` serves them.

    Raises:
        ExportsError: the first error in a file.
        OSError: a file cannot be read.
    """
    found = Entries()
    for path in paths:
        for file in files.files_of(path):
            for export in files.read(file)[0]:
                _add(found, export, None if export.options.groups == "proc" else server)
    return found


def of_mount(mount: Mounted) -> Entries:
    """Return the entries of a mount: one, or one for each of its fixed views, as its daemon applies them.

    Raises:
        DaemonError: the daemon cannot be asked.
    """
    found = Entries()
    with Daemon(mount) as daemon:
        export = Export(mount.source, mount.target, daemon.options, Location(mount.target, 1, 1))
        _add(found, export, None, mount.target)
    return found


def _add(found: Entries, export: Export, server: ServerKind | None, mounted_at: str = "") -> None:
    """Add the entries of one export, as `server` serves it, or of a mount."""
    options = export.options
    by_knfsd = server == "knfsd"
    name = f"{export.path} for {export.client}"
    if not options.by_ids_and_mode:
        found.refused.append((name, _no_tables(options)))
        return
    try:
        source = _tree_at(export.path)
    except NoTree as exc:
        found.refused.append((name, str(exc)))
        return
    policy = Policy(options)

    # They are to hold wherever the report is read, and for a path that also lies in the tree of another entry.
    file = os.path.abspath(export.location.file)
    words = () if mounted_at else ("--exports", file, "--client", export.client, "--source", source)

    def top(label: str) -> str:
        return os.path.join(mounted_at, label) if mounted_at and has_top else mounted_at

    def entry(label: str, view: View) -> Entry:
        caller = view.fixed
        claimed = (
            claims(policy, effective_groups(options, by_knfsd=by_knfsd), by_knfsd=by_knfsd)
            if caller is None
            else fixed_claims(caller)
        )
        return Entry(
            export.path, export.client, label, str(export.location), source, view, claimed, options.read_only,
            frozenset(options.view_access), server == "ganesha", top(label), words,
        )  # fmt: skip

    views = options.views
    if server == "ganesha" and not views:
        if options.squash != "all":
            found.refused.append((name, "nfs-ganesha cannot give every caller a view of its own"))
            return
        views = (Ids(options.anonuid, options.anongid),)  # as `nfs.plan` reads it
    has_top = len(options.views) > 1 or any(isinstance(item, Range) for item in options.views)
    if not views:
        found.entries.append(entry("", View(policy)))
    for item in itertools.chain.from_iterable(map(_single_views, views)):
        try:
            identity = resolve(item)
        except ViewError as exc:
            found.refused.append((name, str(exc)))
            continue
        assert isinstance(identity, ViewIdentity)
        view = View(policy, identity.caller, frozenset(options.view_access), for_all=server == "ganesha")
        found.entries.append(entry(f"@{identity.label}", view))


def _no_tables(options: Options) -> str:
    """Return why it cannot be found out from ids and modes alone who sees what."""
    if options.has_plugin:
        return f"policy={options.policy} is code, and no table that could be taken apart"
    return f"{', '.join(options.hiding(Hides.MORE))} goes by more than ids and modes, which are all that is surveyed"


def _single_views(item: ViewItem) -> Iterable[ViewItem]:
    """Return the fixed views that an item of `views` stands for: those of all accounts in a range, or itself."""
    return accounts_of(item) if isinstance(item, Range) else [item]


class NoTree(UserError):
    """There is no tree that could be looked at; the text is one line that says why."""


def _tree_at(path: str) -> str:
    """Return the path of the tree, without symbolic links.

    Raises:
        NoTree: there is none, or it is the view of another mount.
    """
    try:
        fd = calls.find_top(path)
    except OSError as exc:
        raise NoTree(f"{path}: {exc.strerror}") from exc
    try:
        place = mountinfo.by_id().get(mountinfo.id_of(fd))
        if place is not None and place.kind in KINDS:
            raise NoTree(f"{path} lies in the cloakfs mount {place.path}, which decides as well")
        return os.fsdecode(calls.path_of(fd))
    finally:
        calls.close(fd)
