"""Attaches a FUSE session to a directory, and detaches it again.

The daemon calls mount(2) itself and hands libfuse the open session (`/dev/fd/N`). This allows it to set MS_POSIXACL,
with which the kernel leaves the umask to the file system: only the real tree knows whether a default ACL replaces
the umask.
"""

import logging
import os
import select
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .. import linux
from ..exportmode import LOCAL, ExportMode, Server
from ..linux import loopdevice, mountinfo, ownfiles
from ..messages import UserError, shell_word
from .detach import KINDS, detach, detach_dead

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
    "nosymfollow": linux.MS_NOSYMFOLLOW,
}
_CLEARED = {
    "suid": "nosuid", "dev": "nodev", "exec": "noexec", "async": "sync", "atime": "noatime", "diratime": "nodiratime",
    "norelatime": "relatime", "symfollow": "nosymfollow",
}  # fmt: skip
# mount(8) of util-linux 2.38 keeps `suid` and `dev` from its helpers, as they are its defaults; that of 2.41 does not.
# These are the same by names that both pass on. It also reorders options, so the one that withholds wins, wherever it
# stands.
_PASSED_ON = {"setid": "nosuid", "devices": "nodev"}
# Options that mount(8), systemd and libfuse's helper use among themselves; and what libfuse has options for and a
# cloakfs mount always does: all users may use it, it may be made over a directory with content, and it is unmounted
# when its daemon dies.
_IGNORED = frozenset({"defaults", "auto", "noauto", "nofail", "user", "nouser", "users", "owner", "group", "_netdev",
                      "allow_other", "nonempty", "auto_unmount",
                      # Of mount(8), too, and without a meaning in FUSE: the real tree keeps times and versions.
                      "strictatime", "nostrictatime", "lazytime", "nolazytime", "iversion", "noiversion", "silent",
                      "loud", "mand", "nomand"})  # fmt: skip
_IGNORED_BEGINNINGS = ("x-", "X-", "comment=")
_SWITCHES = frozenset({"default_permissions", "knfsd", "all_squashed", "subtree_checked", "ganesha", "noxattr",
                       "local_locks", "remount", "restart"})  # fmt: skip
_VALUES = frozenset({"record", "fsname", "exports", "client", "restarted", "log", "passthrough"})


class MountError(UserError):
    """A mount cannot be made; the text is one line that says why and what to do."""


@dataclass(frozen=True, slots=True)
class MountOptions:
    """The options after `-o` that belong to mount(8), not to an export.

    Attributes:
        flags: the flags for mount(2); without `suid` and `dev`, set-id bits and devices have no effect.
        default_permissions: let the kernel check the shown mode bits as well.
        export_mode: how a server will export the mount. The kernel's server implies default_permissions; for
            nfs-ganesha, the mount gets an identity that outlives it.
        xattrs: support extended attributes; False with `noxattr`, unless `knfsd` needs ACLs.
        record: the file that gets a line for each READ.
        dev_refused: `dev` was given without `default_permissions`, and is not in `flags`.
        fsname: the source that the mount table shows instead of the real tree.
        exports: the exports.d file from which the options of the export come, as with `--exports`.
        client: the entry in that file, as with `--client`.
        remount: change an existing mount (`remount`).
        restart: mount again if the daemon dies.
        restarts: how many times that has happened (`restarted=N`, which the reaper alone gives).
        log: where the log of a mount in the background goes: a file, or `syslog`.
        local_locks: let the kernel handle locks, which then hold within this mount alone. So it is for nfs-ganesha:
            what clients have locked is found out from the kernel (`nfs.ganeshastate.locked_by`).
        passthrough: whether the kernel reads and writes files by itself where it can: `auto` or `off`.
        given: the single words, as they were given; also those that belong to an export.
    """

    flags: int
    default_permissions: bool
    export_mode: ExportMode = LOCAL
    xattrs: bool = True
    record: str | None = None
    dev_refused: bool = False
    fsname: str | None = None
    exports: str | None = None
    client: str | None = None
    remount: bool = False
    restart: bool = False
    restarts: int = 0
    log: str | None = None
    local_locks: bool = False
    passthrough: str = "auto"
    given: tuple[str, ...] = ()


def split_mount_options(text: str) -> tuple[MountOptions, str]:
    """Take the options of mount(8) out of an option string.

    Returns:
        those options, and the rest of the string with every remaining word in its original column.
    """
    words = _Words()
    taken = [(start, end) for start, end in _items(text) if words.take(text[start:end].strip())]
    switches, values = words.switches, words.values
    knfsd = "knfsd" in switches
    server = Server.KNFSD if knfsd else Server.GANESHA if "ganesha" in switches else Server.NONE
    # This server relies on the kernel's own check to answer ACCESS, and to share a file that is open.
    default_permissions = knfsd or "default_permissions" in switches
    # When a process opens a device, the file system gets no request, and without default_permissions it checks
    # nothing: every caller that sees the device could open it.
    flags = words.flags()
    dev_refused = not flags & linux.MS_NODEV and not default_permissions
    if dev_refused:
        flags |= linux.MS_NODEV
    return MountOptions(
        flags,
        default_permissions,
        ExportMode(server, knfsd and "all_squashed" in switches, knfsd and "subtree_checked" in switches),
        knfsd or "noxattr" not in switches,
        values.get("record"),
        dev_refused,
        values.get("fsname"),
        values.get("exports"),
        values.get("client"),
        "remount" in switches,
        "restart" in switches,
        int(restarted) if (restarted := values.get("restarted", "")).isdecimal() else 0,
        values.get("log"),
        server is Server.GANESHA or "local_locks" in switches,
        values.get("passthrough", "auto"),
        tuple(words.given),
    ), _without(text, taken)


class _Words:
    """The words of an option string, sorted by what they are.

    Attributes:
        given: all of them, in their order.
        switches: those that are on or off, and are not flags.
        values: the values of those that have one.
    """

    def __init__(self) -> None:
        self.given: list[str] = []
        self.switches: set[str] = set()
        self.values: dict[str, str] = {}
        self._set = {"nosuid", "nodev"}  # flags, as the last word about each left them
        self._named: set[str] = set()

    def take(self, word: str) -> bool:
        """Note a word; return whether it belongs to mount(8), or has no meaning, rather than to an export."""
        name, _, value = word.partition("=")
        if word:
            self.given.append(word)
        if word in _FLAGS:
            self._set.add(word)
            self._named.add(word)
        elif word in _CLEARED:
            self._set.discard(_CLEARED[word])
        elif word in _SWITCHES or word in _PASSED_ON:
            self.switches.add(word)
        elif name in _VALUES and value:
            self.values[name] = value.strip('"')
        else:
            return is_ignored(word)
        return True

    def flags(self) -> int:
        """Return the flags for mount(2). A flag that withholds something wins over the name that mount(8) passes on."""
        cleared = {_PASSED_ON[word] for word in self.switches & _PASSED_ON.keys()} - self._named
        return flags_of(self._set - cleared)


def _without(text: str, taken: Iterable[tuple[int, int]]) -> str:
    """Return an option string with blanks in place of these items, and of a comma for each."""
    rest = list(text)
    for start, end in taken:
        rest[start:end] = " " * (end - start)
        comma = end if end < len(text) else start - 1
        if 0 <= comma < len(text) and rest[comma] == ",":
            rest[comma] = " "
    # An item removed from the very end leaves the comma before it, unless that was already removed.
    left = "".join(rest)
    return left.rstrip()[:-1] if left.rstrip().endswith(",") else left


def is_ignored(word: str) -> bool:
    """Whether an option makes no difference to a mount, and is for others."""
    return word in _IGNORED or word.startswith(_IGNORED_BEGINNINGS)


def flags_of(words: Iterable[str]) -> int:
    """Return the flags for mount(2) among these words, such as those of `mountinfo.Place`."""
    flags = 0
    for word in words:
        flags |= _FLAGS.get(word, 0)
    return flags


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
    """A mount made by this daemon, identified not by its path: others may mount on top of it, unmount or move it.

    Attributes:
        session: the descriptor of its FUSE session.
        target: where it was mounted.
        mount_id: the id of the mount; the kernel reuses the ids of mounts that are gone.
        device: st_dev of its file system in the form of `mountinfo.Place`; unique until the session has ended.
    """

    session: int
    target: str
    mount_id: int
    device: str

    def has_ended(self) -> bool:
        """Whether the file system is no longer mounted anywhere, or was aborted. Does not wait."""
        session = select.poll()
        session.register(self.session, 0)  # for POLLERR alone
        return bool(session.poll(0))

    def is_on_top(self) -> bool:
        """Whether its path leads to it: it is still mounted, and nothing else on top of it."""
        at_target = (number for number, place in reversed(mountinfo.by_id().items()) if place.path == self.target)
        return next(at_target, None) == self.mount_id

    def detach(self) -> None:
        """Detach the mount at once; processes that have it open can use it until they close it.

        The session must not have ended. A mount on top would be detached with this one, so in that case both stay.
        """
        self._detach(self._place())

    def detach_dead(self) -> None:
        """Detach it after the session was closed, when another mount may have reused the id and the device."""
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
        """Return the mount directly on top of this one."""
        others = mountinfo.by_id().values()
        return next((other for other in others if (other.parent, other.path) == (self.mount_id, place.path)), None)

    def _detach(self, place: mountinfo.Place | None) -> None:
        if place is None:
            return  # another process unmounted it
        cover = self._cover(place)
        if cover is None:
            detach(place.path)
        else:
            log.warning(
                "%s: %s is mounted on top and stays; the mount below it does not answer any more "
                "(umount %s twice unmounts both)",
                place.path,
                cover.kind,
                shell_word(place.path),
            )


def attach(source: str, target: str, mount_options: MountOptions, *, read_only: bool, image: str) -> Attached:
    """Mount a new FUSE session on `target`.

    Without `allow_other`, the kernel refuses every process with a real, effective or saved id that is not root's. This
    keeps local users out of an exported mount, where each would be served as the client's user of the same number.
    Servers run as root: both knfsd and nfs-ganesha assume a caller's identity with the file-system ids alone.

    Args:
        source: the source that the mount table shows.
        target: the mount point.
        mount_options: the options of mount(8).
        read_only: refuse changes.
        image: the file of the block device that identifies the mount, if `mount_options` demand one.

    Raises:
        MountError: there is no /dev/fuse, or the kernel refused the mount.
    """
    try:
        session = ownfiles.open_fd("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    except OSError as exc:
        raise MountError(f"/dev/fuse: {exc.strerror}; is the fuse module loaded? (modprobe fuse)") from exc
    mode = stat.S_IFMT(ownfiles.stat(target).st_mode)
    data = f"fd={session},rootmode={mode:o},user_id=0,group_id=0"
    if not mount_options.export_mode.is_exported:
        data += ",allow_other"
    if mount_options.default_permissions:
        data += ",default_permissions"
    # Where the kernel's server may grant delegations, the daemon has them recalled by an open for writing that gets as
    # far as its refusal (`filesystem.recall`). The mount alone is read-only then; the file system is not.
    keeps_writable = read_only and mount_options.export_mode.knfsd and linux.may_lease()
    flags = mount_options.flags | linux.MS_POSIXACL | (linux.MS_RDONLY if read_only and not keeps_writable else 0)
    device = _identity(image) if mount_options.export_mode.ganesha else None
    before = mountinfo.by_id()
    try:
        if device is None:
            linux.mount(mount_options.fsname or source, target, KINDS[0], flags, data)
        else:
            linux.mount(device[0], target, KINDS[1], flags, data)
    except OSError as exc:
        os.close(session)
        raise MountError(f"{target}: {exc.strerror}") from exc
    finally:
        if device is not None:
            os.close(device[1])
    number, place = _top(target)
    if keeps_writable and number not in before:
        linux.mount("none", target, "", mount_options.flags | linux.MS_RDONLY | linux.MS_REMOUNT | linux.MS_BIND, "")
    if place is None or number in before or place.kind not in KINDS:
        os.close(session)
        raise MountError(
            f"{target}: another process mounted or unmounted there at the same moment; check what is there"
        )
    return Attached(session, target, number, place.device)


def _top(target: str) -> tuple[int, mountinfo.Place | None]:
    """Return the id of the topmost mount at `target` and its entry, without a request to its file system."""
    fd = ownfiles.open_fd(target, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        number = mountinfo.id_of(fd)
    finally:
        os.close(fd)
    return number, mountinfo.by_id().get(number)


def _identity(image: str) -> tuple[str, int] | None:
    """Return a block device for the mount and a descriptor of it; None if there are no loop devices."""
    try:
        loopdevice.identify(image)
        return loopdevice.attach(image)
    except OSError as exc:
        log.warning(
            "no loop device (%s; modprobe loop?): clients of nfs-ganesha have to mount again after a restart",
            exc.strerror,
        )
        return None
