"""Attaching a FUSE session to a directory, and taking it off again.

The daemon makes the mount(2) itself and hands libfuse the open session (`/dev/fd/N`). So MS_POSIXACL can be set,
with which the kernel leaves the umask to the file system: only the real tree knows whether a default ACL takes
its place.
"""

import logging
import os
import select
import stat
from collections.abc import Iterator
from dataclasses import dataclass

from . import linux
from .linux import loopdevice, mountinfo
from .unmount import KINDS, detach, detach_dead

log = logging.getLogger(__name__)

_FLAGS = {
    "nosuid": linux.MS_NOSUID,
    "nodev": linux.MS_NODEV,
    "noexec": linux.MS_NOEXEC,
    "sync": linux.MS_SYNCHRONOUS,
    "dirsync": linux.MS_DIRSYNC,
    "noatime": linux.MS_NOATIME,
    "nodiratime": linux.MS_NODIRATIME,
    "relatime": linux.MS_RELATIME,
}
_CLEARED = {"suid": "nosuid", "dev": "nodev", "exec": "noexec", "async": "sync", "atime": "noatime"}
# What mount(8), systemd and libfuse's helper say to each other.
_IGNORED = frozenset({"defaults", "auto", "noauto", "nofail", "user", "nouser", "users", "owner", "group", "_netdev",
                      "allow_other"})  # fmt: skip


class MountError(Exception):
    """A mount cannot be made; the text is one line that says why and what to do."""


@dataclass(frozen=True, slots=True)
class MountOptions:
    """The words of `-o` that are mount(8)'s, not an export's.

    Attributes:
        flags: for mount(2); without `suid` and `dev`, set-id bits and devices are without effect.
        default_permissions: let the kernel check the mode bits that are shown, too.
        knfsd: the kernel's NFS server will export the mount; implies default_permissions.
        ganesha: nfs-ganesha will: the mount gets an identity that outlives it.
        stock_loop: answer with pyfuse3's own session loop, for comparison.
        xattrs: there are extended attributes; not with `noxattr`, unless `knfsd` needs ACLs.
        record: file that gets a line for each READ.
        dev_refused: `dev` was asked for without `default_permissions`, and is not in `flags`.
    """

    flags: int
    default_permissions: bool
    knfsd: bool = False
    ganesha: bool = False
    stock_loop: bool = False
    xattrs: bool = True
    record: str | None = None
    dev_refused: bool = False

    @property
    def is_exported(self) -> bool:
        """Is it for a server alone? Then the kernel itself keeps local users out (`attach`)."""
        return self.knfsd or self.ganesha


def split_mount_options(text: str) -> tuple[MountOptions, str]:
    """Take mount(8)'s words out of an option string.

    Returns:
        those words, and the rest with every remaining word in its old column.
    """
    names = {"nosuid", "nodev"}
    default_permissions = knfsd = ganesha = stock_loop = False
    record = None
    xattrs = True
    rest = list(text)
    for start, end in _items(text):
        word = text[start:end].strip()
        if word in _FLAGS:
            names.add(word)
        elif word in _CLEARED:
            names.discard(_CLEARED[word])
        elif word == "default_permissions":
            default_permissions = True
        elif word == "knfsd":
            # It answers ACCESS, and shares a file that somebody has open, by the kernel's own check.
            default_permissions = knfsd = True
        elif word == "ganesha":
            ganesha = True
        elif word == "stock_loop":
            stock_loop = True
        elif word == "noxattr":
            xattrs = False
        elif word.startswith("record="):
            record = word.removeprefix("record=")
        elif not (word in _IGNORED or word.startswith(("x-", "X-", "comment="))):
            continue
        comma = end if end < len(text) else start - 1
        rest[start:end] = " " * (end - start)
        if 0 <= comma < len(text) and rest[comma] == ",":
            rest[comma] = " "
    # A word taken from the very end leaves the comma before it, if that was not taken already.
    left = "".join(rest)
    if left.rstrip().endswith(","):
        left = left.rstrip()[:-1]
    # Of a device that a process opens, the kernel asks the file system nothing, and without default_permissions it
    # asks nobody: whoever sees the device could open it.
    dev_refused = "nodev" not in names and not default_permissions
    if dev_refused:
        names.add("nodev")
    flags = 0
    for name in names:
        flags |= _FLAGS[name]
    return MountOptions(
        flags, default_permissions, knfsd, ganesha, stock_loop, xattrs or knfsd, record, dev_refused
    ), left


def _items(text: str) -> Iterator[tuple[int, int]]:
    start = 0
    quoted = False
    for at, char in enumerate(text):
        if char == '"':
            quoted = not quoted
        elif char == "," and not quoted:
            yield start, at
            start = at + 1
    yield start, len(text)


@dataclass(frozen=True, slots=True)
class Attached:
    """A mount of our own. It is known by what it is, not by its path: others may mount on top, unmount, or move it.

    Attributes:
        session: the descriptor of its FUSE session.
        target: where it was mounted.
        mount_id: the mount's number; the kernel uses the numbers of mounts that are gone again.
        device: st_dev of its file system as `mountinfo.Place` has it, which is no other's until the session has ended.
    """

    session: int
    target: str
    mount_id: int
    device: str

    def has_ended(self) -> bool:
        """Is the file system mounted nowhere any more (or was it aborted)? Nothing is waited for."""
        session = select.poll()
        session.register(self.session, 0)  # for POLLERR alone
        return bool(session.poll(0))

    def detach(self) -> None:
        """Take it off the tree at once; who has it open keeps it until they close it. The session must not have ended.

        What is mounted on top of it would come off with it: then both stay.
        """
        self._detach(self._place())

    def detach_dead(self) -> None:
        """The same after the session was closed, when the number and the device may be those of another mount."""
        place = self._place()
        if place is None:
            return
        if self._cover(place):
            self._detach(place)
        else:
            detach_dead(place.path, self.mount_id)

    def _place(self) -> mountinfo.Place | None:
        place = mountinfo.by_id().get(self.mount_id)
        return place if place is not None and place.device == self.device and place.kind in KINDS else None

    def _cover(self, place: mountinfo.Place) -> mountinfo.Place | None:
        """What is mounted right on top of it."""
        others = mountinfo.by_id().values()
        return next((other for other in others if (other.parent, other.path) == (self.mount_id, place.path)), None)

    def _detach(self, place: mountinfo.Place | None) -> None:
        if place is None:
            return  # somebody else unmounted it
        cover = self._cover(place)
        if cover is None:
            detach(place.path)
        else:
            log.warning(
                "%s: %s is mounted on top and stays; what it hides does not answer any more "
                "(umount %s twice takes both away)",
                place.path,
                cover.kind,
                place.path,
            )


def attach(source: str, target: str, words: MountOptions, *, read_only: bool, image: str) -> Attached:
    """Mount a new FUSE session on `target`.

    Without `allow_other` the kernel refuses every process with a real, effective or saved id that is not root's. So
    local users do not get into a mount that is exported, where each would be served as the client's user of the same
    number. Servers come as root: both knfsd and nfs-ganesha put on a caller's identity with the file-system ids alone.

    Args:
        source: what is told as the source.
        target: the mount point.
        words: mount(8)'s options.
        read_only: refuse changes.
        image: file of the block device that identifies the mount, if `words` ask for one.

    Raises:
        MountError: no /dev/fuse, or the kernel refused the mount.
    """
    try:
        session = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    except OSError as exc:
        raise MountError(f"/dev/fuse: {exc.strerror}; is the fuse module loaded? (modprobe fuse)") from exc
    mode = stat.S_IFMT(os.stat(target).st_mode)
    data = f"fd={session},rootmode={mode:o},user_id=0,group_id=0"
    if not words.is_exported:
        data += ",allow_other"
    if words.default_permissions:
        data += ",default_permissions"
    flags = words.flags | linux.MS_POSIXACL | (linux.MS_RDONLY if read_only else 0)
    device = _identity(image) if words.ganesha else None
    before = mountinfo.by_id()
    try:
        if device is None:
            linux.mount(source, target, KINDS[0], flags, data)
        else:
            linux.mount(device[0], target, KINDS[1], flags, data)
    except OSError as exc:
        os.close(session)
        raise MountError(f"{target}: {exc.strerror}") from exc
    finally:
        if device is not None:
            os.close(device[1])
    number, place = _top(target)
    if place is None or number in before or place.kind not in KINDS:
        os.close(session)
        raise MountError(f"{target}: somebody else mounted or unmounted there at the same moment; look what is there")
    return Attached(session, target, number, place.device)


def _top(target: str) -> tuple[int, mountinfo.Place | None]:
    """The mount that one gets to at `target`; its file system is not asked anything."""
    fd = os.open(target, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        number = mountinfo.id_of(fd)
    finally:
        os.close(fd)
    return number, mountinfo.by_id().get(number)


def _identity(image: str) -> tuple[str, int] | None:
    """A block device for the mount and a descriptor of it; None if there are no loop devices."""
    try:
        loopdevice.identify(image)
        return loopdevice.attach(image)
    except OSError as exc:
        log.warning(
            "no loop device (%s; modprobe loop?): clients of nfs-ganesha have to mount anew after a restart",
            exc.strerror,
        )
        return None
