"""Looks at every object of a tree once, and counts what is alike."""

import errno
import os
import random
import stat
from collections.abc import Callable, Iterator

from .. import acl
from ..fuse.detach import KINDS
from ..identity import ServerId
from ..linux import ROOT, Credentials, Stat, mountinfo
from ..tree import calls
from ..tree.filesystems import PLAIN_KINDS
from .identities import ALL
from .survey import (
    EXECUTE,
    MOST_LEFT_OUT,
    NO_ANCESTRY,
    READ,
    WRITE,
    AccessAttrs,
    Ancestry,
    Bucket,
    BucketKey,
    Grants,
    Survey,
)

_ACL = "system.posix_acl_access"
_MOST_AREAS = 1000
_OTHER_AREAS = "…"
_REPORT_EVERY = 1000


def survey(source: str, sample: int | None, progress: Callable[[int], None]) -> Survey:
    """Return what the tree at `source` consists of.

    Args:
        source: the root of the tree; symbolic links below it are not followed.
        sample: look at no more than this many names of each directory, chosen at random; None for all of them.
        progress: called now and then with the number of names that have been looked at.

    Raises:
        OSError: the root cannot be examined. What cannot be examined below it is in `Survey.left_out`.
    """
    return _Walk(source, sample, progress).walk()


class _Walk:
    def __init__(self, source: str, sample: int | None, progress: Callable[[int], None]) -> None:
        self._survey = Survey(source)
        self._sample = sample
        self._progress = progress
        self._random = random.Random(0)  # the same sample each time
        # By the id of the mount, which may be read-only, and by whether objects are immutable.
        self._kinds: dict[tuple[int, AccessAttrs, bool], int] = {}
        self._read_only: set[int] = set()
        self._ancestries: dict[Ancestry, int] = {}
        self._areas: set[str] = set()
        self._mounts: dict[int, str | None] = {}
        self._without_acls: set[int] = set()

    def walk(self) -> Survey:
        with calls.as_others():
            self._walk()
        self._progress(self._survey.examined)
        return self._survey

    def _walk(self) -> None:
        top = calls.find_top(self._survey.source)
        try:
            info, mount = calls.statx_fd(top)
            self._refused(mount)  # the root is not
            kind = self._kind(top, info, mount)
            self._count("", NO_ANCESTRY, kind, info, "")
            ancestry = self._ancestry(Ancestry(NO_ANCESTRY, kind))
            opened = calls.open(ROOT, top, os.O_RDONLY | os.O_DIRECTORY)
        finally:
            calls.close(top)
        # One open descriptor for each directory on the way to the present one.
        below: list[tuple[int, int, str, Iterator[bytes]]] = [(opened, ancestry, "", self._names(opened))]
        try:
            while below:
                directory, ancestry, path, names = below[-1]
                name = next(names, None)
                if name is None:
                    calls.close(directory)
                    below.pop()
                    continue
                at = os.path.join(path, os.fsdecode(name))
                try:
                    inside = self._look(directory, ancestry, at, name)
                except FileNotFoundError:
                    self._survey.names -= 1  # just deleted
                except OSError as exc:
                    self._survey.failed += 1
                    self._leave_out(at, exc.strerror or str(exc))
                else:
                    if inside is not None:
                        below.append((*inside, at, self._names(inside[0])))
        finally:
            for directory, *_ in below:
                calls.close(directory)

    def _names(self, directory: int) -> Iterator[bytes]:
        """Yield the names in a directory, or a sample of them."""
        chosen: list[bytes] = []
        met = 0
        while batch := calls.getdents(ROOT, directory):
            for name, _, _ in batch:
                if name in (b".", b".."):
                    continue
                self._survey.names += 1
                met += 1
                if self._sample is None:
                    yield name
                elif met <= self._sample:
                    chosen.append(name)
                elif (at := self._random.randrange(met)) < self._sample:
                    chosen[at] = name
        yield from chosen

    def _look(self, directory: int, ancestry: int, path: str, name: bytes) -> tuple[int, int] | None:
        """Look at one object; if it is a directory, return a descriptor for reading it, and the way to it.

        Raises:
            OSError: it cannot be examined.
        """
        fd = calls.find(ROOT, directory, name)
        try:
            info, mount = calls.statx_fd(fd)
            if (reason := self._refused(mount)) is not None:
                self._leave_out(path, reason)
                return None
            kind = self._kind(fd, info, mount)
            area = self._area(path, is_directory=self._survey.kinds[kind].is_directory)
            self._count(area, ancestry, kind, info, path)
            if not self._survey.kinds[kind].is_directory:
                return None
            return calls.open(ROOT, fd, os.O_RDONLY | os.O_DIRECTORY), self._ancestry(Ancestry(ancestry, kind))
        finally:
            calls.close(fd)

    def _refused(self, mount: int) -> str | None:
        """Return why no caller is led to objects on a mount (`tree.mounts`)."""
        if mount not in self._mounts:
            place = mountinfo.by_id().get(mount)
            refused = place is not None and (place.kind in KINDS or place.mounter != 0)
            self._mounts[mount] = "on a mount that is not part of the tree" if refused else None
            if place is not None and not refused and place.kind not in PLAIN_KINDS:
                self._survey.by_mode_alone = False
            if place is not None and "ro" in place.words.split(","):
                self._read_only.add(mount)
        return self._mounts[mount]

    def _area(self, path: str, *, is_directory: bool) -> str:
        top, slash, _ = path.partition("/")
        if not (slash or is_directory):
            return ""
        if top not in self._areas and len(self._areas) >= _MOST_AREAS:
            return _OTHER_AREAS
        self._areas.add(top)
        return top

    def _kind(self, fd: int, info: Stat, mount: int) -> int:
        """Return the number of the object's kind; the kernel is asked once for each.

        That a file is immutable (chattr(1)) does not show in its attributes, but then not even root can write to it.
        """
        kind = AccessAttrs(info.st_mode, info.st_uid, info.st_gid, self._acl(fd, info))
        is_immutable = mount not in self._read_only and not calls.access(ROOT, fd, WRITE)
        key = mount, kind, is_immutable
        number = self._kinds.get(key)
        if number is None:
            number = self._kinds[key] = len(self._survey.kinds)
            self._survey.kinds.append(kind)
            self._survey.grants.append(_grants(fd, kind))
        return number

    def _acl(self, fd: int, info: Stat) -> bytes:
        if info.st_dev in self._without_acls:
            return b""
        try:
            return calls.peek_xattr(ROOT, fd, _ACL)
        except OSError as exc:
            if exc.errno == errno.EOPNOTSUPP:
                if not stat.S_ISLNK(info.st_mode):
                    self._without_acls.add(info.st_dev)
            elif exc.errno not in (errno.ENODATA, errno.ELOOP):
                raise
            return b""

    def _ancestry(self, ancestry: Ancestry) -> int:
        number = self._ancestries.setdefault(ancestry, len(self._ancestries))
        if number == len(self._survey.ancestries):
            self._survey.ancestries.append(ancestry)
        return number

    def _count(self, area: str, ancestry: int, kind: int, info: Stat, path: str) -> None:
        found = self._survey.found.setdefault(BucketKey(area, ancestry, kind), Bucket())
        found.names += 1
        if self._survey.kinds[kind].is_file:
            found.size += info.st_size
        if info.st_size > found.largest:
            found.largest, found.example = info.st_size, path
        if ancestry != NO_ANCESTRY:
            self._survey.examined += 1
            if self._survey.examined % _REPORT_EVERY == 0:
                self._progress(self._survey.examined)

    def _leave_out(self, path: str, reason: str) -> None:
        self._survey.missing += 1
        if len(self._survey.left_out) < MOST_LEFT_OUT:
            self._survey.left_out.append((path, reason))


def _grants(fd: int, kind: AccessAttrs) -> Grants:
    """Return what the kernel grants each kind of caller on the object that `fd` (O_PATH) refers to."""
    users, groups = acl.named(kind.acl)
    own = {ServerId(0), kind.uid, *map(ServerId, users)}
    of_groups = {kind.gid, *map(ServerId, groups)}
    stranger = ALL.other_than(own)
    strange = ALL.other_than(of_groups)
    assert stranger is not None
    assert strange is not None

    def granted(uid: ServerId, *gids: ServerId) -> int:
        credentials = Credentials(uid, strange, gids)
        return sum(mode for mode in (READ, WRITE, EXECUTE) if calls.access(credentials, fd, mode))

    return Grants(
        {uid: granted(uid) for uid in own},
        {gid: granted(stranger, gid) for gid in of_groups},
        granted(stranger),
    )
