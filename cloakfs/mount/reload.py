"""Reloads the options and the plug-in of a mount (SIGHUP): all changes or, if anything is wrong, none."""

import logging
from dataclasses import fields

import trio

from .. import linux
from ..background.systemd import Supervisor
from ..config.options import RELOADABLE, Options
from ..filesystem import Filesystem
from ..fuse.attach import MountError
from ..messages import shell_word
from ..plugin.loader import PolicyError, is_in_file, load_policy
from ..state.runtime import PublishedState
from .publication import Publisher
from .reread import as_json, read_apart
from .settings import Settings

log = logging.getLogger(__name__)

FIXED_BY_THE_MOUNT = tuple(field.name for field in fields(Options) if field.name not in RELOADABLE)
"""Fields of `Options` that a reload cannot change; a reload applies all other fields."""

_WORDS = {"read_only": "ro or rw"}  # fields that are not called like the option


class Reloader:
    """Reloads the options of a mount while it is served.

    Args:
        settings: of the mount.
        filesystem: its operations.
        published: what other processes read.
        publisher: publishes what follows from the options.
        supervisor: is notified of each reload.
    """

    def __init__(
        self,
        settings: Settings,
        filesystem: Filesystem,
        published: PublishedState,
        publisher: Publisher,
        supervisor: Supervisor,
    ) -> None:
        self._settings = settings
        self._filesystem = filesystem
        self._published = published
        self._publisher = publisher
        self._supervisor = supervisor
        self._requested = trio.Event()

    def request(self) -> None:
        """Have the options reloaded soon."""
        self._requested.set()

    async def run(self) -> None:
        """Reload whenever that was requested, for ever."""
        while True:
            await self._requested.wait()
            self._requested = trio.Event()
            self._supervisor.reloading()
            status = "the reload failed; see the log"
            try:
                status = await self._reload()
            finally:
                self._supervisor.ready(status)

    async def _reload(self) -> str:
        """Apply changed options and a changed plug-in: all changes or, if anything is wrong, none.

        Others are served while the options are read, which takes long if there are many definitions.

        Returns:
            one line that says which.
        """
        reread = self._settings.reread
        if reread is None and not is_in_file(self._settings.options.policy):
            log.warning("%s: nothing to reload: the options came from the command line", self._settings.target)
            return "nothing to reload: the options came from the command line"
        try:
            if reread is not None:
                options, published = await trio.to_thread.run_sync(
                    linux.apart, read_apart, reread, abandon_on_cancel=True
                )
            else:
                options = self._settings.options
                published = as_json(options)
            self._refuse_what_takes_a_new_mount(options)
            linux.act_as_daemon()  # a plug-in's code runs
            policy = load_policy(options.policy, options, self._settings.policy_dir)
        except (MountError, PolicyError, OSError, RuntimeError) as exc:
            log.error("not reloaded, the old configuration stays in force: %s", exc)  # noqa: TRY400  (one line)
            self._published.not_reloaded(str(exc))
            return f"not reloaded, the old configuration stays in force: {exc}"
        await self._filesystem.views.use(policy)
        self._filesystem.reader.use(options.prefetch, options.prefetch_limits)
        self._filesystem.probing.use(options)
        self._filesystem.cache.reset()
        log.info("%s: reloaded", self._settings.target)
        log_exempt(self._settings.target, options)
        self._published.reloaded(published)
        self._publisher.rules()
        return f"reloaded; serving {self._settings.source} at {self._settings.target}"

    def _refuse_what_takes_a_new_mount(self, options: Options) -> None:
        """Refuse a reload that needs a new mount, so that half of a change is never in force.

        Raises:
            MountError: an option has changed that a running daemon cannot change.
        """
        now, target = self._settings.options, self._settings.target
        changed = [name for name in FIXED_BY_THE_MOUNT if getattr(options, name) != getattr(now, name)]
        if changed:
            words = ", ".join(_WORDS.get(name, name) for name in changed)
            hint = f"cloakfs umount {shell_word(target)}, and mount it again"
            raise MountError(f"{words}: only a new mount can change this ({hint})")


def log_exempt(target: str, options: Options) -> None:
    """Log from which server uids nothing is hidden, if there are any."""
    if options.exempt:
        uids = ", ".join(map(str, options.exempt))
        log.warning("%s: nothing is hidden from server uid %s (exempt)", target, uids)
