"""The lower mount: the cloakfs mount that a daemon's tree lies in, if any. (`upper` explains how the two cooperate.)"""

import errno

from .. import linux
from ..fuse.attach import MountError
from ..fuse.detach import KINDS
from ..identity import ServerId
from ..linux import mountinfo
from ..state.client import Conversation, DaemonError
from ..state.runtime import Mounted, all_mounted
from ..tree import calls
from ..tree.actor import Actor
from .answers import AnsweredActor, Unanswered
from .upper import QUERY_XATTR, UPPER

# The errors by which a mount hides an object, or refuses a caller altogether.
_HIDDEN = (errno.ESTALE, errno.ENOENT, errno.EACCES)


def find_lower(source: str) -> "LowerMountClient | None":
    """Return the cloakfs mount that `source` lies in, if any, after its daemon has admitted this process as `UPPER`.

    Raises:
        MountError: it does not admit this process, or does not answer.
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


def _lie_over(mount: Mounted, source: int) -> "LowerMountClient":
    lower = Conversation(mount)
    try:
        if not lower.query({"method": "lie over"})["xattrs"]:
            raise MountError(
                f"{mount.target} has noxattr, but cloakfs asks a lower mount through extended attributes; "
                f"mount {mount.source} instead"
            )
        linux.set_daemon_credentials(UPPER)
        return LowerMountClient(mount.target, lower, calls.fstat(source).st_dev)
    except BaseException:
        lower.close()
        raise


class LowerMountClient:
    """Queries the lower mount: the `LowerMount` of a view.

    Args:
        path: its mount point.
        conversation: with its daemon, which admits this one until it is closed.
        device: st_dev of the objects that it shows.
    """

    def __init__(self, path: str, conversation: Conversation, device: int) -> None:
        self.path = path
        self._conversation = conversation
        self._device = device

    def close(self) -> None:
        """End the conversation, and with it the admission to the lower mount."""
        self._conversation.close()

    def contains(self, info: linux.Stat) -> bool:
        """Whether the object with this stat is in it. (Something else may be mounted on top.)"""
        return info.st_dev == self._device

    def is_visible_to(self, who: Actor, fd: int, info: linux.Stat) -> bool:
        """Whether `who` may know of the lower mount's object that has this stat, and that `fd` (O_PATH) refers to.

        The session loop must not wait for the lower mount, nor for what that waits for: `who` is an `AnsweredActor`
        there.

        Raises:
            OSError: the lower mount does not answer.
            Unanswered: this is the session loop, and no thread has queried it. That is a fault, not the same as hidden:
                a caller that believes an object to be absent may make another one, or believe it lost.
        """
        if not linux.in_main_thread():
            try:
                self.query(who.credentials, fd)
            except OSError as exc:
                return _is_visible(exc)
            return True
        answer = who.answer(info) if isinstance(who, AnsweredActor) else None
        if answer is None:
            raise Unanswered(f"{self.path} was not queried about its inode {info.st_ino}")
        return isinstance(answer, bytes) or _is_visible(answer)

    def owner_of_new(self, credentials: linux.Credentials, fd: int) -> tuple[ServerId, ServerId]:
        """In a thread: return owner and group, as the lower mount shows them, of what `credentials` would make there.

        Raises:
            OSError: the lower mount does not answer, or does not show `credentials` the directory.
        """
        uid, gid = self.query(credentials, fd).split()
        return ServerId(int(uid)), ServerId(int(gid))

    @staticmethod
    def query(credentials: linux.Credentials, fd: int) -> bytes:
        """In a thread: return the answer of the lower mount to `credentials` about `fd` (O_PATH): `upper.QUERY_XATTR`.

        Raises:
            OSError: the lower mount does not answer, or does not show the object.
        """
        return calls.peek_xattr(credentials, fd, QUERY_XATTR)


def _is_visible(exc: OSError) -> bool:
    if exc.errno in _HIDDEN:
        return False
    raise exc
