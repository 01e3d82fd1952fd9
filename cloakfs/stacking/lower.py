"""The cloakfs mount that a daemon's tree lies in, if there is one (`above` explains how the two work together)."""

import errno
from typing import TYPE_CHECKING

from .. import linux
from ..fuse.attach import MountError
from ..fuse.detach import KINDS
from ..identity import ServerId
from ..linux import mountinfo
from ..state.client import Conversation, DaemonError
from ..state.runtime import Mounted, all_mounted
from ..tree import calls
from .answers import Asked, NotAsked
from .upper import INSIDE, QUESTION

if TYPE_CHECKING:
    from ..tree.actor import Actor

# The errors by which a mount hides an object, or refuses a caller altogether.
_HIDDEN = (errno.ESTALE, errno.ENOENT, errno.EACCES)


def find_below(source: str) -> "LowerMount | None":
    """Return the cloakfs mount that `source` lies in, if any, after its daemon has let this process in as `INSIDE`.

    Raises:
        MountError: it does not let this process in, or cannot be asked.
    """
    try:
        fd = calls.find_top(source)
    except OSError as exc:
        raise MountError(f"{source}: {exc.strerror}") from exc
    try:
        place = mountinfo.by_id().get(mountinfo.id_of(fd))
        if place is None or place.kind not in KINDS:
            return None
        mount = next((mount for mount in all_mounted() if mount.device == place.device), None)
        if mount is None:
            raise MountError(f"{source}: lies in a cloakfs mount ({place.path}) that no daemon of this machine serves")
        return _lie_over(mount, fd)
    except (DaemonError, OSError) as exc:
        raise MountError(f"{source}: {exc.strerror if isinstance(exc, OSError) else exc}") from exc
    finally:
        calls.close(fd)


def _lie_over(mount: Mounted, source: int) -> "LowerMount":
    lower = Conversation(mount)
    try:
        if not lower.query({"method": "lie over"})["xattrs"]:
            raise MountError(
                f"{mount.target} has noxattr, but cloakfs asks a lower mount through extended attributes; "
                f"mount {mount.source} instead"
            )
        linux.act_for_nobody_as(INSIDE)
        return LowerMount(mount.target, lower, calls.fstat(source).st_dev)
    except BaseException:
        lower.close()
        raise


class LowerMount:
    """Asks the mount below.

    Args:
        path: its mount point.
        lower: the conversation in which its daemon was told that this one lies over it, which holds until it is closed.
        device: st_dev of what it shows.
    """

    def __init__(self, path: str, lower: Conversation, device: int) -> None:
        self.path = path
        self._lower = lower
        self._device = device

    def close(self) -> None:
        """End the conversation; the mount below is then a mount like any other again."""
        self._lower.close()

    def has(self, info: linux.Stat) -> bool:
        """Whether the object with this stat is in it. (Something else may be mounted on top.)"""
        return info.st_dev == self._device

    def shows(self, who: "Actor", fd: int, info: linux.Stat) -> bool:
        """Whether `who` may know of the object of the mount below that has this stat, and that `fd` (O_PATH) refers to.

        The session loop must not wait for the mount below, nor for anything that it waits for: there, `who` is `Asked`.

        Raises:
            OSError: the mount below does not answer.
            NotAsked: this is the session loop, and no thread has asked. That is a fault, and not the same as hidden: a
                caller that is told that an object is absent may make another one, or believe it lost.
        """
        if not linux.in_main_thread():
            try:
                self.ask(who.credentials, fd)
            except OSError as exc:
                return _is_shown(exc)
            return True
        answer = who.answer(info) if isinstance(who, Asked) else None
        if answer is None:
            raise NotAsked(f"nobody has asked {self.path} about its inode {info.st_ino}")
        return isinstance(answer, bytes) or _is_shown(answer)

    def makes(self, who: linux.Credentials, fd: int) -> tuple[ServerId, ServerId]:
        """In a thread: return owner and group, as the mount below shows them, of what `who` would make in a directory.

        Raises:
            OSError: the mount below does not answer, or does not show `who` the directory.
        """
        uid, gid = self.ask(who, fd).split()
        return ServerId(int(uid)), ServerId(int(gid))

    @staticmethod
    def ask(who: linux.Credentials, fd: int) -> bytes:
        """In a thread: return what the mount below tells `who` about the object `fd` (O_PATH); see `above.QUESTION`.

        Raises:
            OSError: the mount below does not answer, or does not show the object.
        """
        return calls.peek_xattr(who, fd, QUESTION)


def _is_shown(exc: OSError) -> bool:
    if exc.errno in _HIDDEN:
        return False
    raise exc
