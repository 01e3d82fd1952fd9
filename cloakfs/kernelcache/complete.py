"""Of which directories all entries are known to be shown to the one caller that was told of them.

A listing from the first entry to the last proves it: each entry is one that this caller sees whatever its groups are,
and a file has no second name, by which it could become hidden without a word about this one. Whatever changes an entry
or adds one ends the proof (`Invalidation.forget_listing`), unless the entry is still shown in this way. What the caller
itself makes there belongs to it, so the proof holds for that, too.

While there is a proof, the kernel may remember two things of the directory for this caller:

- *Absent names*: the directory has no hidden name from which the time of an answer could distinguish them.
- *The entries*, where pyfuse3 can say so (contrib/pyfuse3). The kernel keeps them with the directory. It gives them to
  whoever reads a descriptor that OPENDIR returned with a flag for this (FOPEN_CACHE_DIR), and adds to them what it is
  answered there. So the daemon decides at each OPENDIR who gets at them, and checks permission each time. If it has to
  answer on such a descriptor without a proof, or to somebody else, it makes the kernel forget the entries again.

In directories that more callers know, none of this is done: an entry that one of them sees could then be given to
another one for a moment.
"""

import os
import stat

from .. import linux
from ..identity import ClientId
from ..tree import calls
from ..tree.nodes import Nodes
from ..tree.objects import CompleteDirectory, Object, as_directory
from ..tree.request import Request
from ..tree.visibility import uid_may
from ..view import View
from .audience import Audiences
from .invalidation import Invalidation
from .timeouts import Timeouts


class Listings:
    """Knows of which directories of one mount all entries are shown to their audience.

    Args:
        nodes: the objects.
        invalidation: makes the kernel forget.
        audiences: knows what is shown to a caller whatever its groups.
        timeouts: knows what the kernel remembers, and for how long it may.

    Attributes:
        forget: see `Invalidation.forget_listing`.
    """

    def __init__(
        self,
        nodes: Nodes,
        invalidation: Invalidation,
        audiences: Audiences,
        timeouts: Timeouts,
    ) -> None:
        self._nodes = nodes
        self._invalidation = invalidation
        self.forget = invalidation.forget_listing
        self._audiences = audiences
        self._timeouts = timeouts

    # -- the proof ---------------------------------------------------------------------------------

    def begin(self, at: Request) -> CompleteDirectory | None:
        """Return what a listing that begins with the first entry may prove, or has proven; None if nothing."""
        directory = at.obj
        if not self._can_prove(at):
            return None
        listing = directory.listing
        if listing is None or not listing.is_proven or listing.audience != at.viewer:
            self._invalidation.forget_listing(directory)
            listing = as_directory(directory).listing = CompleteDirectory(at.viewer)
            self._invalidation.listed.add(directory)
        return listing

    def _can_prove(self, at: Request) -> bool:
        directory = at.obj
        times = self._timeouts.times(at.view, directory.filesystem)
        return (
            (times.listings or times.absent_if_complete > 0)
            and at.number == 0
            and directory.audience == at.viewer >= 0
            and self._timeouts.is_known_to(0, directory, at.viewer)
            and self._timeouts.reaches(at, directory)
            # What is done in a directory by its other path is not reported.
            and sum(other.device == directory.filesystem.device for other in self._nodes.mounts.filesystems) == 1
        )

    def check_entry(self, at: Request, listing: CompleteDirectory, name: bytes) -> None:
        """Let a listing prove nothing if this entry is not shown to its audience, whatever the groups."""
        if listing.is_proven or at.obj.listing is not listing or name in (b".", b".."):
            return
        try:
            info, _ = calls.statx(linux.ROOT, at.fd, name)
        except OSError:
            is_shown = False
        else:
            # Changes of a file system that is mounted there are not reported as changes in this directory, if at all.
            is_here = info.st_dev == at.info.st_dev
            is_shown = is_here and listing.audience == at.viewer and self._shows(at.view, listing, info)
        if not is_shown:
            self._invalidation.forget_listing(at.obj)

    @staticmethod
    def end(directory: Object, listing: CompleteDirectory) -> None:
        """Note that the listing has come to the last entry. If it was dropped meanwhile, this proves nothing."""
        if directory.listing is listing:
            listing.is_proven = True

    def _shows(self, view: View, listing: CompleteDirectory, info: linux.Stat) -> bool:
        is_single = info.st_nlink <= 1 or stat.S_ISDIR(info.st_mode)
        return is_single and self._audiences.sees(view, view.server_uid(ClientId(listing.audience)), info)

    def still_shows(self, view: View, directory: Object, info: linux.Stat) -> bool:
        """Whether what is known of all entries of `directory` holds for one that now has this stat."""
        return directory.listing is None or self._shows(view, directory.listing, info)

    # -- what rests on it --------------------------------------------------------------------------

    def _is_proven(self, at: Request) -> bool:
        listing = at.obj.listing
        return (
            listing is not None
            and listing.is_proven
            and listing.audience == at.viewer == at.obj.audience
            and self._timeouts.is_known_to(at.number, at.obj, at.viewer)
        )

    def _is_busy(self, directory: Object) -> bool:
        return self._invalidation.notifier.is_busy(self._nodes.nodeid(0, directory))

    def of_absence(self, at: Request, name: bytes) -> float:
        """Return how long to remember, for the audience of a directory, that nothing in it has this name."""
        directory = at.obj
        seconds = self._timeouts.times(at.view, directory.filesystem).absent_if_complete
        if (
            not seconds
            or not self._is_proven(at)
            or self._is_busy(directory)
            or not uid_may(at.who.uid, os.X_OK, directory, at.fd, at.info)
            or not self._invalidation.note_absence(0, directory, name, at.viewer)
        ):
            return 0.0
        as_directory(directory).remembers_names = True
        return seconds

    def keeps(self, at: Request) -> tuple[bool, bool]:
        """Return whether the kernel may keep the entries of a directory that is being opened, for whoever opens it.

        The second value is whether it may use those that it has. The first time, it is made to forget them instead.
        """
        directory = at.obj
        may = self._timeouts.times(at.view, directory.filesystem).listings
        if not may or not self._is_proven(at) or self._is_busy(directory):
            return False, False
        assert directory.listing is not None
        had, directory.listing.is_in_kernel = directory.listing.is_in_kernel, True
        return True, had

    def check_reader(self, at: Request) -> None:
        """To be called before an answer of which the kernel keeps the entries: it is made to forget them if need be."""
        if not self._is_proven(at):
            self._invalidation.notifier.listing(self._nodes.nodeid(at.number, at.obj))
