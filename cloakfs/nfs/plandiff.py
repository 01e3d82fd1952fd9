"""What happens to the mounts of a service if another plan takes the place of its plan."""

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, replace

from ..config.options import Options
from . import root
from .plan import Mount

# The options that a daemon applies on a reload; any other change needs a new mount.
RELOADABLE = (
    "range_map", "cloak_list", "exempt", "policy", "squash", "anonuid", "anongid", "prefetch", "prefetch_limits",
    "probe_alarm", "probe_delay", "other",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Difference:
    """How the mounts of one plan become those of another. Mounts that stay as they are do not appear.

    Attributes:
        added: mounts that are new.
        removed: mounts that go, as they were.
        reloaded: mounts whose daemons can apply their new options.
        reread: mounts with the same options, whose daemons read a plug-in again, because its file may have changed.
        renewed: mounts that are made anew, with the new options.
        withdrawn: those of `renewed`, as they were, that must not be exported while they are replaced: the daemon
            relies on something that the server does with callers, and that will change.
    """

    added: tuple[Mount, ...]
    removed: tuple[Mount, ...]
    reloaded: tuple[Mount, ...]
    reread: tuple[Mount, ...]
    renewed: tuple[Mount, ...]
    withdrawn: tuple[Mount, ...]

    @property
    def changed(self) -> frozenset[str]:
        """The paths of all mounts that are new, or that were told to change."""
        return frozenset(mount.path for mount in (*self.added, *self.reloaded, *self.reread, *self.renewed))


def compare(old: Mapping[str, Mount], new: Iterable[Mount], running: Container[str]) -> Difference:
    """Return what becomes of the mounts `old`, by name, if `new` take their place.

    Args:
        old: the mounts that are served.
        new: the mounts that are wanted, each with a name of its own.
        running: the names of those of `old` whose daemon runs; it can be told to reload.
    """
    wanted = {mount.name: mount for mount in new}
    kept = [(old[name], mount) for name, mount in wanted.items() if name in old]
    live = [(before, mount) for before, mount in kept if before.name in running and _suffices_reload(before, mount)]
    told = {mount.name for _, mount in live}
    renewed = [(before, mount) for before, mount in kept if before != mount and mount.name not in told]
    return Difference(
        added=tuple(mount for name, mount in wanted.items() if name not in old),
        removed=tuple(before for name, before in old.items() if name not in wanted),
        reloaded=tuple(mount for before, mount in live if before != mount),
        reread=tuple(mount for before, mount in live if before == mount and mount.options.policy is not None),
        renewed=tuple(mount for _, mount in renewed),
        withdrawn=tuple(before for before, mount in renewed if _is_trusted_anew(before, mount)),
    )


def _suffices_reload(old: Mount, new: Mount) -> bool:
    """Whether a reload suffices for the difference, without a new mount."""
    return (
        _without_reloadable(old.options) == _without_reloadable(new.options)
        and not _is_trusted_anew(old, new)
        and old.condition == new.condition
    )


def _is_trusted_anew(old: Mount, new: Mount) -> bool:
    """Whether the daemon relies on something else that the server does with callers: see `Guard._mount_options`.

    It may make all of them one (`root.everybody`), or another one, or check the directories above (subtree_check).
    """
    before, after = old.options, new.options
    return root.everybody(before) != root.everybody(after) or root.checks_subtree(before) != root.checks_subtree(after)


def _without_reloadable(options: Options) -> Options:
    plain = Options()
    return replace(options, **{name: getattr(plain, name) for name in RELOADABLE})
