"""The part that `explain` and `table` share: which tree to look at, with which options, and as which caller."""

import errno
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import NoReturn, TypeVar

import click

from cloakfs.config import files
from cloakfs.config.errors import ExportsError
from cloakfs.config.options import Export, Options
from cloakfs.config.parse import parse_options
from cloakfs.config.viewitems import User, parse_view
from cloakfs.fuse.attach import MountError, split_mount_options
from cloakfs.identity import Caller, ClientCaller, ClientId
from cloakfs.linux import mountinfo
from cloakfs.plugin.loader import PolicyError, load_policy
from cloakfs.policy import Policy
from cloakfs.stacking.lower import find_lower
from cloakfs.state.client import Daemon, DaemonError
from cloakfs.state.runtime import Mounted, dead, mounted
from cloakfs.tree.views import ViewError, ViewIdentity, resolve, user_identity
from cloakfs.view import View

from .common import entry_for, fail, note, working_directory
from .completion import a_directory, a_file
from .exits import FAILED, WRONG

_F = TypeVar("_F", bound=Callable[..., object])


def tree_options(command: _F) -> _F:
    """Add the options that say which tree a command looks at, and how."""
    for option in (
        click.option(
            "--source",
            metavar="DIR",
            shell_complete=a_directory,
            help="With -o or --exports: the directory that would be mounted.",
        ),
        click.option("--client", metavar="CLIENT", help="With --exports: the entry for this client."),
        click.option(
            "--exports",
            metavar="FILE",
            shell_complete=a_file,
            help="Take the options from this exports.d file, or a folder of them.",
        ),
        click.option("-o", "words", multiple=True, metavar="OPTIONS", help="Options, as for `cloakfs mount`."),
    ):
        command = option(command)
    return command


@dataclass(frozen=True, slots=True)
class ViewedPath:
    """A place in a tree, and the view through which to look at it.

    Attributes:
        source: the root of the export, on the server.
        names: the components of the path below it.
        options: the options of the export.
        view: a caller view, or the fixed view that the path leads through.
    """

    source: str
    names: list[str]
    options: Options
    view: View

    @property
    def path(self) -> str:
        """The path on the server."""
        return os.path.join(self.source, *self.names)


def viewed_path(
    path: str,
    words: tuple[str, ...],
    exports: str | None,
    client: str | None,
    source: str | None,
    *,
    follow: bool = False,
) -> ViewedPath:
    """Find the tree and the view that a command line refers to; end the command if there are none.

    Args:
        path: a path below a mount, or on the server.
        words: the option -o.
        exports: the option --exports.
        client: the option --client.
        source: the option --source.
        follow: also follow a symbolic link at the end of the path.
    """
    if os.geteuid() != 0:
        fail("only root can act as another user", FAILED)
    if exports is not None and words:
        fail("-o and --exports exclude each other: give one of them", WRONG)
    try:
        return _viewed_path(path, words, exports, client, source, follow=follow)
    except (ExportsError, MountError, PolicyError, ViewError) as exc:
        fail(str(exc), WRONG)
    except OSError as exc:
        fail(f"{exc.filename or path}: {exc.strerror}", FAILED)


def _viewed_path(
    path: str, words: tuple[str, ...], exports: str | None, client: str | None, source: str | None, *, follow: bool
) -> ViewedPath:
    is_tree_given = source is not None or exports is not None
    place = _place(path, mounted(), follow=follow, any_mount=not is_tree_given)
    if source is not None and place.mount is not None:
        fail("--source is only for a path outside all mounts", WRONG)
    if place.mount is None and not is_tree_given:
        _refuse_outside(path)
    rules = _rules(path, place, words, exports, client, source)
    lower = find_lower(rules.root) if place.mount is not None else None  # from now on, the lower mount shows everything
    top = place.mount.target if place.mount is not None and place.is_below_mount else rules.root
    if not _inside(place.path, top):
        fail(f"{path}: not below {top}", WRONG)
    names = _names(place.path, top)
    options, policy = rules.options, rules.policy
    if policy is None:
        policy = load_policy(options.policy, options, rules.policy_dir)
    fixed = None
    if place.is_below_mount:
        if options.views:
            fixed = _view(path, options, names)
        names = _real_names(path, rules.root, names, follow=follow)
    entrants = frozenset(options.view_access)
    return ViewedPath(
        rules.root, names, options, View(policy, fixed, entrants, lower=lower, not_its_failure=DaemonError)
    )


def _refuse_outside(path: str) -> NoReturn:
    """End the command for a path that is in no mount, when nothing else says which tree is meant."""
    died = next((dead_one.path for dead_one in dead() if _inside(os.path.abspath(path), dead_one.path)), None)
    if died is not None:
        fail(f"{path}: the daemon of the mount at {died} has died, so that no caller sees anything there", FAILED)
    fail(f"{path}: not in a mount; give its options with --exports FILE, or -o OPTIONS and --source DIR", WRONG)


@dataclass(frozen=True, slots=True)
class _PathInMount:
    """A path, and the mount that it is below; for a path in the real tree, the mount that shows it."""

    path: str
    mount: Mounted | None
    is_below_mount: bool


@dataclass(frozen=True, slots=True)
class _Rules:
    """What decides what is seen of a tree.

    Attributes:
        root: the root of the export, on the server.
        options: the options of the export.
        policy: the policy in force; None if it has yet to be loaded.
        policy_dir: the directory that a relative `policy=` file is relative to.
    """

    root: str
    options: Options
    policy: Policy | None
    policy_dir: str


def _rules(
    path: str, place: _PathInMount, words: tuple[str, ...], exports: str | None, client: str | None, source: str | None
) -> _Rules:
    """Return the rules of a file (`--exports`), of `-o`, or else those of the mount."""
    mount = place.mount
    root = mount.source if mount is not None else os.path.realpath(source) if source is not None else None
    if exports is not None:
        entries, _ = files.read(exports)
        if root is None:
            root = _source_above(path, place, entries, exports)
        return _Rules(root, entry_for(entries, exports, root, client), None, files.policy_dir(exports))
    assert root is not None
    if mount is None or words:
        options, _ = parse_options(split_mount_options(",".join(words))[1])
        return _Rules(root, options, None, working_directory())
    options, policy = _in_force(mount)
    return _Rules(root, _as_remounted(mount, options), policy, working_directory())


def _source_above(path: str, place: _PathInMount, entries: Iterable[Export], exports: str) -> str:
    """Return the deepest directory of an entry that this place is in; end the command if there is none."""
    sources = [real for entry in entries if _inside(place.path, real := os.path.realpath(entry.path))]
    if not sources:
        fail(f"{exports}: no entry for {path} or a directory above it", WRONG)
    return max(sources, key=len)


def _real_names(path: str, root: str, names: list[str], *, follow: bool) -> list[str]:
    """Return where names that were looked up in a mount are on the real tree; end the command if that is outside."""
    real = _resolve(os.path.join(root, *names), follow=follow)
    if not _inside(real, root):
        fail(f"{path}: a symbolic link leads to {real}, which is not below {root}", FAILED)
    return _names(real, root)


def _in_force(mount: Mounted) -> tuple[Options, Policy]:
    """Return a mount's options and policy in force, whatever is on disk.

    This ends the command if only the daemon knows them, but does not answer.
    """
    if mount.unknown:
        fail(f"{mount.target}: {mount.unknown}", FAILED)
    try:
        daemon = Daemon(mount)
    except DaemonError as exc:
        options, _ = parse_options(mount.options)
        if options.has_plugin:
            fail(f"{exc}; only the daemon can ask its plug-in (-o policy=… asks the one on disk)", FAILED)
        note(f"{exc}; using the options that it published last")
        return options, Policy(options)
    return daemon.options, daemon.policy


def _as_remounted(mount: Mounted, options: Options) -> Options:
    """Return the options with ro or rw as the kernel now has it: `remount` does not ask the daemon."""
    words = next((place.words for place in mountinfo.by_id().values() if place.device == mount.device), None)
    return options if words is None else replace(options, read_only="ro" in words.split(","))


def _place(path: str, mounts: dict[str, Mounted], *, follow: bool, any_mount: bool) -> _PathInMount:
    # The path is first compared as text, because the question may be about a mount that does not answer.
    lexical = os.path.abspath(path)
    mount = _deepest(lexical, mounts)
    if mount is not None:
        return _PathInMount(lexical, mount, is_below_mount=True)
    real = _resolve(lexical, follow=follow)
    mount = _deepest(real, mounts)
    if mount is not None:
        return _PathInMount(real, mount, is_below_mount=True)
    return _PathInMount(real, _mount_of(real, mounts) if any_mount else None, is_below_mount=False)


def _names(path: str, top: str) -> list[str]:
    below = os.path.relpath(path, top)
    return [] if below == "." else below.split(os.sep)


def _resolve(path: str, *, follow: bool) -> str:
    if follow:
        return os.path.realpath(path)
    return os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))


def _inside(path: str, directory: str) -> bool:
    return path == directory or path.startswith(directory.rstrip("/") + "/")


def _deepest(path: str, mounts: dict[str, Mounted]) -> Mounted | None:
    return max((m for m in mounts.values() if _inside(path, m.target)), key=lambda m: len(m.target), default=None)


def _mount_of(path: str, mounts: dict[str, Mounted]) -> Mounted | None:
    """Return the mount that shows a path of the real tree; end the command if there are several."""
    found = [m for m in mounts.values() if _inside(path, m.source)]
    if len(found) > 1:
        below = " or ".join(sorted(m.target for m in found))
        fail(f"{path}: shown by several mounts; give the path below {below}", WRONG)
    return found[0] if found else None


def _view(path: str, options: Options, names: list[str]) -> Caller:
    """Return the identity of the fixed view that the path leads through, and remove its name from `names`."""
    items = [resolve(item) for item in options.views]
    if len(items) == 1 and isinstance(items[0], ViewIdentity):
        return items[0].caller
    if not names or not names[0].startswith("@"):
        fail(f"{path}: not below one of the mount's views (@NAME)", WRONG)
    label = names.pop(0)[1:]
    for item in items:
        if isinstance(item, ViewIdentity):
            if item.label == label:
                return item.caller
            continue
        identity = user_identity(label)
        if identity.label == label and identity.caller.uid in item:
            return identity.caller
    raise FileNotFoundError(errno.ENOENT, "no such view", f"@{label}")


def parse_client_caller(text: str) -> ClientCaller:
    """Return the caller that `--as` means, in client ids: a user's ids on this machine are taken as client ids."""
    who = parse_caller("--as", text)
    return ClientCaller(ClientId(who.uid), ClientId(who.gid), frozenset(map(ClientId, who.groups)))


def parse_caller(option: str, text: str) -> Caller:
    """Return the identity meant by USER or UID:GID[:GID,GID…]; end the command if there is none."""
    item = parse_view(text.replace(",", "+"))
    if item is None and ":" not in text:
        item = User(text)  # a user database may know names that exports.d does not
    try:
        who = resolve(item) if item is not None else None
    except ViewError as exc:
        fail(f"{option} {str(exc).removeprefix('view ')}", WRONG)
    if not isinstance(who, ViewIdentity):
        fail(f"{option} {text}: expected USER or UID:GID[:GID,GID…]", WRONG)
    return who.caller
