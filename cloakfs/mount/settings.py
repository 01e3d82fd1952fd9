"""The settings of one mount, and what follows from them alone."""

from collections.abc import Callable
from dataclasses import dataclass

from ..config.options import Options
from ..fuse.attach import MountError, MountOptions
from ..linux import ownfiles
from ..tuning import STANDARD, Tuning
from .reaper import RestartPlan


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of one mount.

    Attributes:
        source: absolute path of the real tree.
        target: absolute path of the mount point.
        options: the options of the export.
        mount_options: the options of mount(8).
        policy_dir: the directory that a relative `policy=` file is relative to.
        reread: reads the options again from their origin, for SIGHUP, in another process (so it can be pickled); None
            if they cannot be read again (a plug-in is still read again).
        restart_plan: how to mount again if the daemon dies; None if that is not wanted.
        log: the file to which standard error goes; None in the foreground.
        supervised: systemd may have started the daemon, and expects notifications (sd_notify(3)).
        tuning: times and bounds.
    """

    source: str
    target: str
    options: Options
    mount_options: MountOptions
    policy_dir: str = "."
    reread: Callable[[], Options] | None = None
    restart_plan: RestartPlan | None = None
    log: str | None = None
    supervised: bool = False
    tuning: Tuning = STANDARD

    @property
    def covers_its_source(self) -> bool:
        """Whether the mount covers the real tree itself."""
        return f"{self.source}/".startswith(f"{self.target}/")

    @property
    def lies_over_the_tree(self) -> bool:
        """Whether unmounting uncovers the tree itself at the mount point. (It may be bind-mounted there, too.)"""
        return self.covers_its_source or ownfiles.samefile(self.source, self.target)

    @property
    def group_words(self) -> str | None:
        """Where callers' groups come from, as `groups=` says; /proc has none for threads of the kernel's NFS server.

        Raises:
            MountError: the options want them from there nevertheless.
        """
        words = self.options.groups
        if self.mount_options.export_mode.knfsd and words == "proc":
            raise MountError("groups=proc: the kernel's NFS server shows no groups; use groups=database, none or gids")
        return "database" if self.mount_options.export_mode.knfsd and words is None else words
