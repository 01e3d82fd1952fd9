"""A request that was admitted: by which caller, in which view, and about which object."""

import os
import stat
from dataclasses import dataclass
from functools import lru_cache

from .. import linux
from ..identity import ServerId
from ..view import KernelCheckedCaller, View
from .actor import MOST_IDENTITIES, Actor
from .objects import Descriptor, Object, Viewer
from .visibility import may_without_groups, world_may

SET_ID = stat.S_ISUID | stat.S_ISGID
"""The bits of a mode that make a program run as its owner, or its group."""

# The permissions that open(2) takes, by O_ACCMODE; 0 for mode 3, which differs between file systems.
_BITS_OF_ACCESS = (os.R_OK, os.W_OK, os.R_OK | os.W_OK, 0)


@lru_cache(MOST_IDENTITIES)
def _without_groups(uid: ServerId, gid: ServerId, lacks: int = 0, *, or_daemon: bool = False) -> linux.Credentials:
    return linux.Credentials(uid, gid, (), lacks, or_daemon)


@dataclass(slots=True)  # which is made, and read, in half the time that a NamedTuple takes
class Request:
    """A request that was admitted.

    Attributes:
        number: of the view.
        view: the view.
        who: the identity that it is served as.
        obj: the object that it names by its nodeid; for a request with a name, the directory.
        fd: refers to the object (O_PATH, or open, if a client has just opened it or lists it).
        info: the stat of the object.
        viewer: who learns the answer (`kernelcache.audience`).
        checked_caller: set where the kernel checks permissions against what is shown.
        has_searched: whether the caller has just found something in this directory.
        has_acl: whether the object has an ACL; None if that is not known.
        pin: holds `fd` open for as long as there is this request; without, `fd` is valid until the next await.
        waits: whether calls on the object should be made in a thread (`TreeMounts.waits`).
        holds: whether a call on the object may keep it locked until a client lets go (`MountedFilesystem.held`).
        in_thread: whether a thread goes on with it. By the time that it makes a system call, the rest may be outdated.
    """

    number: int
    view: View
    who: Actor
    obj: Object
    fd: int
    info: linux.Stat
    viewer: Viewer
    checked_caller: KernelCheckedCaller | None = None
    has_searched: bool = False
    has_acl: bool | None = None
    pin: Descriptor | None = None
    waits: bool = False
    holds: bool = False
    in_thread: bool = False

    @property
    def credentials(self) -> linux.Credentials:
        """The credentials with which system calls for the caller are made."""
        return self.who.credentials

    def credentials_for(self, bits: int) -> linux.Credentials:
        """Return as whom to make a call that needs only `bits` on the object: if the caller surely may, not as it.

        Acting as the caller takes its groups, which are not cheap to find out. Nor is it cheap to switch, so the thread
        goes on with the credentials of its last call, if these suffice as well. In a thread, the kernel decides.
        """
        who, obj, info, has_acl = self.who, self.obj, self.info, self.has_acl
        if self.in_thread:
            return who.credentials
        cached = obj.descriptor
        if has_acl is None and cached is not None and cached.no_acl_at == info.st_ctime_ns:
            has_acl = False
        # For the owner, it is not worth a system call to find out whether there is an ACL.
        if (has_acl is not None or who.uid != info.st_uid) and world_may(bits, obj, self.fd, info, has_acl=has_acl):
            return linux.ANY_CREDENTIALS
        if may_without_groups(who, bits, obj, self.fd, info, has_acl=has_acl):
            return _without_groups(who.uid, who.gid, or_daemon=True)
        return who.credentials

    def credentials_for_names(self) -> linux.Credentials:
        """Return as whom to change names in the directory where only the right to do so counts.

        That is the caller, but without its groups, which are not cheap to find out, if it surely may. In a thread, the
        groups count.
        """
        who = self.who
        if not self.in_thread and may_without_groups(
            who, os.W_OK | os.X_OK, self.obj, self.fd, self.info, has_acl=self.has_acl
        ):
            return _without_groups(who.uid, who.gid, who.lacks)
        return who.credentials

    def credentials_to_write(self, flags: int) -> linux.Credentials:
        """Return as whom to open the file with these flags of open(2), and to write to it.

        That is the caller, but without its groups, if it surely may without them, and they play no part later on. They
        do where blocks are reserved for a group, and for S_ISGID, which a file loses if a stranger writes to it.
        """
        who, obj, info = self.who, self.obj, self.info
        bits = _BITS_OF_ACCESS[flags & os.O_ACCMODE] | (os.W_OK if flags & os.O_TRUNC else 0)
        if (
            bits
            and not (self.waits or self.in_thread)
            and not obj.filesystem.reserves_for_groups
            and stat.S_ISREG(info.st_mode)
            and not info.st_mode & SET_ID
            and info.st_gid == who.gid  # in this group it is whatever its other groups, if anybody sets S_ISGID
            and may_without_groups(who, bits, obj, self.fd, info, has_acl=self.has_acl)
        ):
            return _without_groups(who.uid, who.gid, who.lacks)
        return who.credentials

    def credentials_for_mode(self, mode: int) -> linux.Credentials:
        """Return as whom to set the mode: its owner, without its groups, which count for S_ISGID alone (chmod(2))."""
        who, before = self.who, self.info
        is_owner = who.uid == before.st_uid and self.obj.filesystem.has_posix_rules
        if is_owner and not self.in_thread and not (mode | before.st_mode) & stat.S_ISGID:
            return _without_groups(who.uid, who.gid, who.lacks)
        return who.credentials
