"""Complete directories: all their entries are shown to their audience, which is one caller or one group.

A listing from the first entry to the last proves it: the audience sees each entry whatever else it is, and no file
has a second name, by which it could become hidden without an event about this one. The proof ends when an entry changes
or is added (`Invalidation.invalidate_listing`), unless that entry is shown in the same way. What an only caller makes
there belongs to it, so the proof holds for that, too; what a member of a group makes is checked.

While there is a proof, the kernel may cache two things of the directory for this caller:

- *Negative dentries*: there is no hidden name from which the time of a reply could distinguish an absent one.
- *The entries*, where pyfuse3 supports it (contrib/pyfuse3). The kernel caches them with the directory, returns them on
  descriptors that OPENDIR has opened with FOPEN_CACHE_DIR, and adds to them what READDIR returns there. So the daemon
  decides at each OPENDIR who gets at them, and checks permission each time. If it has to reply on such a descriptor
  without a proof, or to another caller, it invalidates the entries again. Until then, another member of a group could
  be given what only this one sees, so for groups they are not cached.

None of this is done for directories that others know: an entry that one caller sees could then be shown to another one
for a moment.
"""

import stat

from .. import linux
from ..identity import ClientId, ServerId
from ..tree import calls
from ..tree.nodes import Nodes
from ..tree.objects import CompletenessProof, Object, Viewer, as_directory, is_limited
from ..tree.request import Request
from ..view import View
from .audience import Audiences
from .invalidation import Invalidation
from .timeouts import Timeouts


class CompleteDirectories:
    """The complete directories of one mount.

    Args:
        nodes: the objects.
        invalidation: invalidates what the kernel caches.
        audiences: knows what is shown to a caller whatever its groups.
        timeouts: knows what the kernel caches, and for how long it may.

    Attributes:
        invalidate: ends the proof of a directory (`Invalidation.invalidate_listing`).
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
        self.invalidate = invalidation.invalidate_listing
        self._audiences = audiences
        self._timeouts = timeouts

    # -- the proof ---------------------------------------------------------------------------------

    def begin(self, at: Request) -> CompletenessProof | None:
        """Return what a listing that begins with the first entry may prove, or has proven; None if nothing."""
        directory = at.obj
        if not self._can_prove(at):
            return None
        proof, viewer = directory.proof, self._viewer(at)
        if proof is None or not proof.is_proven or proof.audience != viewer:
            self._invalidation.invalidate_listing(directory)
            proof = as_directory(directory).proof = CompletenessProof(viewer)
            self._invalidation.proven.add(directory)
            self._invalidation.on_proof()
        return proof

    def _viewer(self, at: Request) -> Viewer:
        """Return as which audience of the directory the viewer counts."""
        return self._audiences.viewer_of(at.obj, at.viewer, at.who)

    def _can_prove(self, at: Request) -> bool:
        directory, viewer = at.obj, self._viewer(at)
        rules = self._timeouts.rules_for(at.view, directory.filesystem)
        return (
            (rules.listings or rules.negative_if_complete > 0)
            and at.number == 0
            and directory.audience == viewer
            and is_limited(viewer)
            and self._timeouts.is_known_to(0, directory, viewer)
            and self._timeouts.is_reached_by(viewer, at, directory)
            # Changes in a directory that are made by another path to it are not reported.
            and sum(other.device == directory.filesystem.device for other in self._nodes.mounts.filesystems) == 1
        )

    def check_entry(self, at: Request, proof: CompletenessProof, name: bytes) -> None:
        """Let a listing prove nothing if this entry is not shown to its audience, whatever the groups."""
        if proof.is_proven or at.obj.proof is not proof or name in (b".", b".."):
            return
        try:
            info, _ = calls.statx(linux.ROOT, at.fd, name)
        except OSError:
            is_shown = False
        else:
            # Changes of a file system that is mounted there are not reported as changes in this directory, if at all.
            is_here = info.st_dev == at.info.st_dev
            is_shown = is_here and proof.audience == self._viewer(at) and self._shows(at.view, proof, info)
        if not is_shown:
            self._invalidation.invalidate_listing(at.obj)

    @staticmethod
    def end(directory: Object, proof: CompletenessProof) -> None:
        """Note that the listing has come to the last entry. If it was dropped meanwhile, this proves nothing."""
        if directory.proof is proof:
            proof.is_proven = True

    def _shows(self, view: View, proof: CompletenessProof, info: linux.Stat) -> bool:
        is_single = info.st_nlink <= 1 or stat.S_ISDIR(info.st_mode)
        uid = view.server_uid(ClientId(proof.audience)) if proof.audience >= 0 else ServerId(-1)
        return is_single and self._audiences.is_visible_to(view, proof.audience, uid, info)

    def still_shows(self, view: View, directory: Object, info: linux.Stat) -> bool:
        """Whether the proof of `directory` still holds if one entry now has this stat."""
        return directory.proof is None or self._shows(view, directory.proof, info)

    def check_new(self, at: Request, info: linux.Stat) -> None:
        """End the proof if an entry like this, which the caller may just have made, is not shown to all members."""
        if not self.still_shows(at.view, at.obj, info):
            self._invalidation.invalidate_listing(at.obj)

    # -- what rests on it --------------------------------------------------------------------------

    def _is_proven(self, at: Request) -> bool:
        proof = at.obj.proof
        return (
            proof is not None
            and proof.is_proven
            and proof.audience == at.obj.audience == self._viewer(at)
            and self._timeouts.is_known_to(at.number, at.obj, proof.audience)
        )

    def _is_busy(self, directory: Object) -> bool:
        return self._invalidation.notifier.is_busy(self._nodes.nodeid(0, directory))

    def of_negative(self, at: Request, name: bytes) -> float:
        """Return the timeout of a negative dentry in a directory, for its audience."""
        directory = at.obj
        seconds = self._timeouts.rules_for(at.view, directory.filesystem).negative_if_complete
        if (
            not seconds
            or not self._is_proven(at)
            or self._is_busy(directory)
            or not self._audiences.may_search(
                directory.audience, at.who.uid, directory, at.fd, at.info, has_acl=at.has_acl
            )
            or not self._invalidation.note_negative(0, directory, name, at.viewer)
        ):
            return 0.0
        as_directory(directory).has_names_for_one = True
        return seconds

    def may_cache_entries(self, at: Request) -> tuple[bool, bool]:
        """Return whether the kernel may cache the entries of a directory that is being opened, for its caller.

        The second value is whether it may use those that it has. The first time, they are invalidated instead.
        """
        directory = at.obj
        may = self._timeouts.rules_for(at.view, directory.filesystem).listings
        if not may or not self._is_proven(at) or self._is_busy(directory):
            return False, False
        assert directory.proof is not None
        if directory.proof.audience < 0:
            return False, False
        had, directory.proof.is_in_kernel = directory.proof.is_in_kernel, True
        return True, had

    def check_reader(self, at: Request) -> None:
        """Invalidate the cached entries if need be; to be called before a reply that the kernel adds to them."""
        if not self._is_proven(at):
            self._invalidation.notifier.invalidate_listing(self._nodes.nodeid(at.number, at.obj))
