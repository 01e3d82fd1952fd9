"""Changes that are made behind the mount or through it, and what is invalidated because of them."""

import contextlib
import errno
import logging
import os
import stat
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial

import trio

from .. import linux
from ..linux.fanotify import (
    FAN_ATTRIB,
    FAN_CLOSE_WRITE,
    FAN_CREATE,
    FAN_DELETE,
    FAN_MODIFY,
    FAN_MOVED_FROM,
    FAN_MOVED_TO,
    FAN_ONDIR,
    FAN_Q_OVERFLOW,
    OF_ITSELF,
    Event,
)
from ..tree import calls
from ..tree.actor import actor
from ..tree.filesystems import MountedFilesystem
from ..tree.locate import is_settled
from ..tree.nodes import Nodes
from ..tree.objects import Directory, Object
from ..tree.registry import ReportedPlace, known_entry, unlist
from ..tree.views import Views
from ..tree.visibility import AccessPaths, is_entry_visible, world_may
from ..view import View
from .audience import Audiences
from .cachepolicy import SHORT_SECONDS
from .complete import CompleteDirectories
from .interest import ANY_FILE
from .invalidation import Invalidation, PendingNames, SubtreeInvalidation
from .sharedwatch import SharedWatch
from .timeouts import Timeouts, may_search
from .watch import Watch, mounts_changed

log = logging.getLogger(__name__)

# For one batch of events, the names of at most this many hidden directories are looked up (in half a millisecond),
# since any user can change directories all the time. Negative dentries of others last for ABSENT_SECONDS at most.
_MAX_LOOKUPS = 16

# After the mounts have been looked at, this many times as long passes before they are looked at again.
_SHARE_OF_MOUNTS = 20
_SECONDS_OF_A_MOUNT = 0.003  # at least, for each mount of cloakfs

# Of an object that more views than this may know, it is not found out for each whether its identity may know it still.
_MAX_VIEWS = 16

# After this many steps, each with up to some 200 changes, a request that wants to know of all until now gives up.
_MOST_STEPS = 20
_MOST_SECONDS = 1.0  # likewise, if another process has to pass them on

# What was noted stays noted when the kernel forgets it. All is noted anew if it is this much, and so many times as many
# as there are objects.
_MOST_NOTES = 8192
_SHARE_OF_NOTES = 4

# Where the objects are that were reported as moved is found out in steps of so many seconds, unless a request needs it
# first. After each, this many times as long passes.
_STEP_SECONDS = 0.001
_SHARE_OF_STEPS = 20

_NAMES = FAN_CREATE | FAN_DELETE | FAN_MOVED_FROM | FAN_MOVED_TO


class Changes:
    """Has everything invalidated that is no longer true.

    Args:
        nodes: the objects.
        views: the views that the mount offers.
        access_paths: is informed of directories that change.
        invalidation: invalidates what the kernel caches.
        audiences: knows what may be cached for an audience of one.
        timeouts: knows what all callers may be shown.
        listings: knows of which directories all entries are shown to their audience.
    """

    def __init__(
        self,
        nodes: Nodes,
        views: Views,
        access_paths: AccessPaths,
        invalidation: Invalidation,
        audiences: Audiences,
        timeouts: Timeouts,
        complete_directories: CompleteDirectories,
    ) -> None:
        self._nodes = nodes
        self._views = views
        self._access_paths = access_paths
        self._invalidation = invalidation
        self._audiences = audiences
        self._timeouts = timeouts
        self._complete = complete_directories
        self._watch: Watch | SharedWatch | None = None
        self._watched: dict[int, list[MountedFilesystem]] = {}  # by the id that events carry
        self._reporting: list[MountedFilesystem] = []  # those that report, and all above which do
        self._lookups_left = 0  # how many more names may be looked up for this batch of events
        # Objects to be found unless a request finds them first: those that were moved, and all if events were lost.
        self._moved: set[Object] = set()
        self._lost: list[Object] = []
        self._any_moved = trio.Event()
        self._former: Watch | SharedWatch | None = None  # nobody reads from it any more
        self._following = trio.CancelScope()  # is left when there is another watch
        self._has_followed = False  # whether `follow` has run: what a failed run has read may not have been handled
        self._mounts = nodes.mounts.inside().below

    # -- made behind the mount ---------------------------------------------------------------------

    def watch(self, watch: Watch | SharedWatch) -> None:
        """Watch the file systems that report their changes."""
        self._watch = watch
        if isinstance(watch, SharedWatch):
            self._share(watch)
            for handle in self._known():
                watch.note(handle)
        for filesystem in sorted(self._nodes.mounts.filesystems, key=lambda it: len(it.path)):  # what is above first
            self._add(filesystem)
        self._nodes.mounts.on_new_filesystem.append(self._add)
        watch.on_own = self._handle_own
        self._access_paths.is_up_to_date = self._is_up_to_date

    @property
    def has_stale_notes(self) -> bool:
        """Whether most of what was noted for the watcher may be objects that the kernel has forgotten."""
        if not isinstance(self._watch, SharedWatch):
            return False
        return self._watch.notes > _MOST_NOTES + _SHARE_OF_NOTES * len(self._nodes.registry.by_number)

    @property
    def is_reading_all(self) -> bool:
        """Whether this process reads all changes itself."""
        return isinstance(self._watch, Watch)

    def check_watcher(self) -> None:
        """Leave a watcher that has stopped. This is to be called every second."""
        if isinstance(self._watch, SharedWatch):
            self._watch.check()

    async def share(self, make: Callable[[], SharedWatch]) -> bool:
        """Have the watcher report changes of all that the kernel may know, in place of the present watch.

        Returns:
            False if that has to be tried again: something was mounted meanwhile, or others change too much.

        Raises:
            OSError: there is no watcher, or it cannot watch what this process does.
            CalledProcessError: there is no watcher.
        """
        before, filesystems = self._watch, self._all_watched()

        def connect() -> SharedWatch:
            watch = make()
            try:
                for filesystem in filesystems:
                    watch.add(filesystem.fd)
            except OSError:
                watch.close()
                raise
            return watch

        watch = await trio.to_thread.run_sync(connect)
        former = [before] if isinstance(before, SharedWatch) else []
        self._share(watch, *former)
        await watch.note_known()
        # `before` has reported what happened until now; both report what happens since all was noted.
        is_done = await self.catch_up() and self._all_watched() == filesystems
        if is_done:
            watch.on_own = self._handle_own
            self._watch, self._former = watch, before
            self._following.cancel()
        else:
            watch.close()
        self._share(*([watch] if is_done else former))
        return is_done

    def _all_watched(self) -> list[MountedFilesystem]:
        return [filesystem for same in self._watched.values() for filesystem in same]

    def _share(self, *watches: SharedWatch) -> None:
        """Say what this mount's kernel may know, before it is told: changes of anything else are not reported."""

        def note(handle: bytes) -> None:
            for watch in watches:
                watch.note(handle)

        for watch in watches:
            watch.known = self._known
            watch.on_unwatched = self._set_unwatched
        registry = self._nodes.registry
        registry.on_known = self._invalidation.on_hidden = note
        self._invalidation.on_proof = partial(note, ANY_FILE)
        registry.on_found = self._confirm

    def _known(self) -> Iterator[bytes]:
        yield from self._nodes.registry.handles()
        for handle in self._invalidation.hidden():
            yield handle[4:]
        if self._invalidation.proven:
            yield ANY_FILE

    def _confirm(self, obj: Object, fd: int, info: linux.Stat) -> None:
        """Handle a change of a file by handle, or another hard link, after it was looked at, and before it was noted.

        Any other change names the directory in which the file was found, and is reported. So is one of a file that was
        just made through the mount: nobody knows its handle, or has linked it.
        """
        if obj.filesystem.stat(fd) != info or not is_settled(info):
            event = Event(FAN_ATTRIB, 0, b"", b"", obj.handle[4:])
            trio.lowlevel.current_trio_token().run_sync_soon(self._handle_event, event, obj.filesystem)

    def _set_unwatched(self, is_unwatched: bool) -> None:
        """Cache nothing for long while changes are not reported, or do so again."""
        for filesystem in self._reporting:
            filesystem.watched = not is_unwatched
        if is_unwatched:
            self._handle_overflow()

    def _add(self, filesystem: MountedFilesystem) -> None:
        assert self._watch is not None
        try:
            if filesystem.remote:
                raise OSError(errno.EOPNOTSUPP, "changes made on other machines are not reported")
            fsid = self._watch.add(filesystem.fd)
        except OSError as exc:
            log.info(
                "%s (%s): changes behind the mount are not reported (%s); they are seen within %g s",
                filesystem.path,
                filesystem.kind,
                exc.strerror or exc,
                SHORT_SECONDS,
            )
            return
        self._watched.setdefault(fsid, []).append(filesystem)
        # Which callers may know of something also depends on the directories above.
        filesystem.watched = all(
            other in self._reporting or other is filesystem
            for other in self._nodes.mounts.filesystems
            if filesystem.path.startswith(f"{other.path}/") or other is self._nodes.root.filesystem
        )
        if filesystem.watched:
            self._reporting.append(filesystem)
            filesystem.watched = not self._watch.is_interrupted

    async def follow(self) -> None:
        """Run for ever, invalidating what other processes change."""
        if self._has_followed:
            self._handle_overflow()
        self._has_followed = True
        while (watch := self._watch) is not None:
            if self._former is not None:
                self._former.close()
                self._former = None
            with trio.CancelScope() as self._following:
                while True:
                    self._handle_events(await watch.changes())

    def _is_up_to_date(self) -> bool:
        """Whether every change made until now has been handled, after handling what can be handled at once."""
        watch = self._watch
        if watch is None or watch.is_silent():
            return True
        try:
            events = watch.read()
            if events:  # of others
                self._handle_events(events)
        except BaseException:
            self._handle_overflow()
            raise
        return watch.has_read_all()

    async def catch_up(self) -> bool:
        """Handle all changes that others made until now, in steps between which other requests are answered.

        Returns:
            whether that is done; otherwise, others change so much that it would take too long.
        """
        steps, deadline = 0, trio.current_time() + _MOST_SECONDS
        while self._watch is not None and steps < _MOST_STEPS and trio.current_time() < deadline:
            if self._access_paths.is_up_to_date():
                return True
            steps += await self._watch.next_step()
        return False

    def _handle_overflow(self) -> None:
        """Invalidate everything, since events were lost: anything may have changed, and be anywhere."""
        self._invalidation.invalidate_everything()
        self._nodes.locator.lose_reports()
        self._lost = self._nodes.registry.objects()
        self._any_moved.set()

    def _handle_events(self, events: list[Event]) -> None:
        invalidated = False
        self._lookups_left = _MAX_LOOKUPS
        for event in events:
            if event.mask & FAN_Q_OVERFLOW:
                self._handle_overflow()
            for filesystem in self._watched.get(event.fsid, ()):
                invalidated |= self._handle_event(event, filesystem)
                if event.mask & (FAN_MOVED_FROM | FAN_MOVED_TO):
                    self._handle_move(event, filesystem)
        if invalidated:
            self._invalidation.begin_epoch()

    def _handle_own(self, event: Event) -> None:
        """Handle a change to a directory itself that this process has made, on behalf of any caller."""
        for filesystem in self._watched.get(event.fsid, ()):
            self._handle_access_paths(event, filesystem)

    def _handle_access_paths(self, event: Event, filesystem: MountedFilesystem) -> None:
        if event.mask & FAN_ONDIR and event.mask & OF_ITSELF:
            if not event.target:  # before Linux 5.17
                self._access_paths.invalidate()
            elif (directory := self._nodes.registry.by_handle(filesystem, event.target)) is not None:
                self._access_paths.changed(directory)

    def _handle_event(self, event: Event, filesystem: MountedFilesystem) -> bool:
        """Handle an event on this file system; return whether everything has to be invalidated because of it."""
        self._handle_access_paths(event, filesystem)
        parent = self._nodes.registry.by_handle(filesystem, event.directory)
        is_name = bool(event.mask & _NAMES)
        if event.target:
            target = self._nodes.registry.by_handle(filesystem, event.target)
        else:  # before Linux 5.17
            target = (parent.children or {}).get(event.name) if parent is not None else None
        if parent is not None and event.mask & (_NAMES | FAN_ATTRIB):
            self._invalidation.invalidate_attributes(parent)
            if event.name != b".":
                self._handle_name(event, parent, target)
        self._handle_listings(event, filesystem, target)
        if event.mask & FAN_ATTRIB and event.target:
            self._invalidation.invalidate_hidden(filesystem.number.to_bytes(4, "little") + event.target)
        if target is None:
            if event.mask & FAN_ONDIR and event.mask & OF_ITSELF and event.name == b".":
                self._invalidate_negative_by_handle(filesystem, event.target)
            return not event.target and bool(event.mask & FAN_ONDIR) and is_name
        self._invalidation.on_change(target)
        if event.mask & FAN_ATTRIB:
            self._invalidation.clear_absent_xattrs(target)
        if event.mask & FAN_ONDIR and event.mask & OF_ITSELF:
            if is_name or self._hides_from_any_viewer(target):
                self._invalidation.invalidate(target)  # everything below may be for others now, too
            self._invalidate_negative_of(target)
            return not event.target  # if the kernel does not report the target, it may have been another directory
        if event.mask & (_NAMES | FAN_ATTRIB):
            self._invalidation.invalidate(target)
        if event.mask & (FAN_MODIFY | FAN_CLOSE_WRITE):
            changed = self._invalidation.invalidate_content if event.mask & FAN_MODIFY else self._invalidation.closed
            changed(target)
        return False

    def _handle_move(self, event: Event, filesystem: MountedFilesystem) -> None:
        """Note where an object is that was renamed, after what was cached of its former place was invalidated."""
        if event.target:
            target = self._nodes.registry.by_handle(filesystem, event.target)
        else:  # before Linux 5.17
            parent = self._nodes.registry.by_handle(filesystem, event.directory)
            target = None if parent is None else known_entry(parent, event.name)
        if target is None:
            return
        if event.mask & FAN_MOVED_FROM:
            self._nodes.locator.renamed_away(target)
        if event.mask & FAN_MOVED_TO:
            self._nodes.locator.renamed_to(target, ReportedPlace(filesystem, event.directory, event.name))
        if target in self._nodes.registry.disconnected:
            self._moved.add(target)
            self._any_moved.set()

    async def find_moved(self) -> None:
        """Run for ever, finding out where objects are that were moved, so that no request has to wait for it."""
        while True:
            await self._any_moved.wait()
            began = trio.current_time()
            while (self._moved or self._lost) and trio.current_time() < began + _STEP_SECONDS:
                obj = (self._moved or self._lost).pop()
                is_known = self._nodes.registry.by_number.get(obj.number) is obj
                if is_known and not obj.filesystem.waits:
                    with contextlib.suppress(OSError):
                        self._nodes.locator.is_in_tree(obj)
            if not self._moved and not self._lost:
                self._nodes.registry.disconnected.pop(self._nodes.root, None)
                self._any_moved = trio.Event()
            await trio.sleep(_SHARE_OF_STEPS * (trio.current_time() - began))

    def _handle_name(self, event: Event, parent: Object, target: Object | None) -> None:
        """Invalidate a name that has changed, or leads to something that has."""
        named = (parent.children or {}).get(event.name)
        if named is not None and named is target and named.children:
            # `_handle_event` invalidates the name after what is below, if the change hides anything.
            self._invalidation.expire_name(parent, event.name)
        else:
            self._invalidation.invalidate_name(parent, event.name, parent.ever_cached_in)
        if event.mask & _NAMES:
            unlist(parent, event.name)

    def _handle_listings(self, event: Event, filesystem: MountedFilesystem, target: Object | None) -> None:
        """Invalidate the listings that have an entry which has changed, if the event does not name their directory.

        The kernel may have dropped the entry itself, so that the daemon knows no object for it.
        """
        if not event.mask & FAN_ATTRIB or not self._invalidation.proven:
            return
        if target is not None:
            for parent, _ in self._invalidation.names_of(target):
                self._invalidation.invalidate_listing(parent)
        elif event.mask & FAN_ONDIR and self._lookups_left:
            self._lookups_left -= 1
            place = self._nodes.locator.place_of(filesystem, event.target)
            if place is not None:
                self._invalidation.invalidate_listing(place[0])
        elif event.mask & FAN_ONDIR or (not event.name and calls.is_linked(filesystem.fd, event.target)):
            for directory in list(self._invalidation.proven):
                if directory.filesystem is filesystem:
                    self._invalidation.invalidate_listing(directory)

    def _invalidate_negative_by_handle(self, filesystem: MountedFilesystem, handle: bytes) -> None:
        """Invalidate the negative dentry of a hidden directory that has changed. The event does not name it."""
        own = self._views.get(0)
        if self._lookups_left and (own is None or own.fixed is not None):  # a caller view that hides has none
            self._lookups_left -= 1
            place = self._nodes.locator.place_of(filesystem, handle)
            if place is not None:
                parent, name = place
                self._invalidation.invalidate_name(parent, name, parent.ever_cached_in)

    def _invalidate_negative_of(self, directory: Object) -> None:
        """Invalidate the negative dentries of a directory that has changed: it may be visible now.

        In a caller view that hides anything, there are none.
        """
        for parent, name in self._invalidation.names_of(directory):
            for number in parent.ever_cached_in - directory.cached_in:
                view = self._views.get(number)
                if view is None or view.fixed is not None:
                    self._invalidation.invalidate_name(parent, name, (number,))

    def _hides_from_any_viewer(self, obj: Object) -> bool:
        """Whether any caller to whom the object was shown, in any view, may not know it as it is now."""
        try:
            fd = self._nodes.descriptors.fd(obj)
            info = obj.filesystem.stat(fd)
            if len(obj.ever_cached_in) > _MAX_VIEWS:
                view = self._views.any()
                return view.lower is not None or not self._is_shown_to_all(view, obj, fd, info)
            for number in obj.ever_cached_in:
                view_ = self._views.get(number)
                if view_ is None or self._hides_from_viewer(view_, obj, fd, info):
                    return True
        except OSError:
            return True
        return False

    async def follow_mounts(self) -> None:
        """Run for ever, invalidating what other processes mount something on."""
        async with contextlib.aclosing(mounts_changed()) as changes:
            async for _ in changes:
                began = trio.current_time()
                now = self._nodes.mounts.inside()
                # Also where there was such a mount before: meanwhile, it may have been gone, and another got its id.
                for path in now.excluded:
                    self._invalidate_excluded(path)
                if now.below != self._mounts:
                    self._invalidation.invalidate_everything()
                    self._mounts = now.below
                # A user who mounts and unmounts all the time must not make others wait, and neither must many daemons
                # that all look at the same table.
                took = trio.current_time() - began
                await trio.sleep(max(_SHARE_OF_MOUNTS * took, _SECONDS_OF_A_MOUNT * now.of_cloakfs))

    def _invalidate_excluded(self, path: str) -> None:
        """Invalidate a place where a user has mounted something: what was seen below it must not remain visible."""
        place = self._nodes.locator.at_path(path)
        if place is None:
            return
        parent, name = place
        self._invalidation.invalidate_name(parent, name, parent.ever_cached_in)
        child = known_entry(parent, name)
        if child is not None:
            self._invalidation.invalidate(child)

    # -- made through the mount --------------------------------------------------------------------

    async def changed(self, number: int, view: View, obj: Object, *, emptied_in: Object | None = None) -> None:
        """Handle a change of the mode, owner or ACL of `obj` by a request that has not been answered yet.

        What the change hides is invalidated in all views: no caller can see it any more, by whichever view, when the
        reply is sent.

        Args:
            number: of the view.
            view: the view.
            obj: what was changed.
            emptied_in: given if an open(2) with O_CREAT and O_TRUNC has emptied `obj`: the directory whose lock the
                kernel holds for this request. Otherwise, it must hold that of no directory that `obj` is in.
        """
        if emptied_in is not None:
            await self._emptied(number, emptied_in, obj)
            return
        if not isinstance(obj, Directory):
            await self._invalidate_what_is_hidden(number, view, obj)
            return
        # For this request, the kernel holds the lock of a directory whose mode, owner or ACL changes.
        with self._invalidation.notifier.suspended(self._nodes.nodeid(number, obj)):
            await self._invalidate_what_is_hidden(number, view, obj)

    async def _invalidate_what_is_hidden(self, number: int, view: View, obj: Object) -> None:
        waits: set[trio.Event] = set()
        invalidated: list[tuple[SubtreeInvalidation, PendingNames]] = []
        for one in (obj, *self._nodes.registry.twins(obj)):
            waits |= self._invalidate_listings_that_hide(view, one)
            if not one.ever_cached_in:
                continue
            if self._hides_from_any_viewer(one):
                invalidated.append(self._invalidation.invalidate(one))
            else:  # the kernel knows those of `obj` from the answer
                self._invalidation.invalidate_attributes(one, but=number if one is obj else None)
        for subtree, _ in invalidated:
            await subtree.done.wait()
            waits |= subtree.names
        for wait in waits:
            await wait.wait()
        for subtree, names in invalidated:
            await names.wait()
            # The kernel does not drop names in the directory that are in use, and the next LOOKUP of the directory
            # makes them valid again. So they are waited for, too, except where requests hold the lock that this needs.
            await self._wait_unless_suspended(subtree.own_names)

    def _invalidate_listings_that_hide(self, view: View, obj: Object) -> set[trio.Event]:
        """Invalidate the listings of complete directories that would not show an object as it is now."""
        proven = [parent for parent, _ in self._invalidation.names_of(obj) if parent.proof is not None]
        if not proven:
            return set()
        info = obj.filesystem.stat(self._nodes.descriptors.fd(obj))
        hiding = [parent for parent in proven if not self._complete.still_shows(view, parent, info)]
        return {wait for parent in hiding if (wait := self._invalidation.invalidate_listing(parent)) is not None}

    def _hides_from_viewer(self, view: View, obj: Object, fd: int, info: linux.Stat) -> bool:
        """Whether some caller must not see (any more) what is cached of `obj`, or of what is below it."""
        if view.lower is not None:
            return True  # the lower mount reports no changes; nothing is cached for long in such a view
        if view.fixed is not None:
            if not is_entry_visible(view, actor(view.fixed), obj.name, info, fd):
                return True
            return stat.S_ISDIR(info.st_mode) and not may_search(view.fixed, obj, fd, info)
        if obj.cached_for_one:
            return not self._audiences.is_still_visible(view, obj, fd, info)
        return not self._is_shown_to_all(view, obj, fd, info)

    def _is_shown_to_all(self, view: View, obj: Object, fd: int, info: linux.Stat) -> bool:
        """Whether all callers may know of the object and, if it is a directory, search it."""
        if obj is not self._nodes.root and not self._timeouts.same_for_all(view, obj.name, info, fd):
            return False
        return not stat.S_ISDIR(info.st_mode) or world_may(os.X_OK, obj, fd, info)

    async def _emptied(self, number: int, parent: Object, obj: Object) -> None:
        """Handle that an open(2) with O_CREAT and O_TRUNC, which has not been answered yet, has emptied `obj`.

        It lost its set-id bits, and others may know it because of them. For this request, the kernel holds the lock of
        the directory `parent`.
        """
        with self._invalidation.notifier.suspended(self._nodes.nodeid(number, parent)):
            waits: set[trio.Event] = set()
            for one in (obj, *self._nodes.registry.twins(obj)):
                waits |= self._invalidation.invalidate(one)[1].invalidated
            await self._wait_unless_suspended(waits)

    async def _wait_unless_suspended(self, waits: set[trio.Event]) -> None:
        """Wait for these events, except those about directories whose locks are held by requests that wait like this.

        Two of them that change the same directory, each through a view of its own, would wait for one another.
        """
        for wait in waits:
            if not self._invalidation.notifier.is_suspended(wait):
                await wait.wait()

    async def removed(self, number: int, names: Collection[tuple[Object, bytes]], obj: Object | None = None) -> None:
        """Handle that a request that has not been answered yet has removed names, or moved or replaced what had them.

        In the view of the request, the kernel knows by itself what becomes of the names, and holds the locks of their
        directories. In others, they are forgotten before the answer.

        Args:
            number: of the view.
            names: each with its directory.
            obj: what was removed or replaced, if it is known. It may have been the only name that all knew.
        """
        if obj is not None and obj.cached_in:
            if obj.filesystem.stat(self._nodes.descriptors.fd(obj)).st_nlink > 0:
                self._invalidation.invalidate(obj)
            else:
                self._invalidation.invalidate_attributes(obj, but=number)
        places: list[tuple[Object, bytes]] = []
        others: list[tuple[Object, bytes, frozenset[int]]] = []  # where other views may know the name
        for parent, name in names:
            for directory in (parent, *self._nodes.registry.twins(parent)):
                there = (directory.children or {}).get(name)
                numbers = (directory if there is None else there).ever_cached_in
                if directory is parent:
                    numbers -= {number}
                if numbers:
                    others.append((directory, name, numbers))
                places.append((directory, name))
        if not others:
            self._unlist(places)
            return
        with contextlib.ExitStack() as stack:
            for parent, _ in names:
                stack.enter_context(self._invalidation.notifier.suspended(self._nodes.nodeid(number, parent)))
            waits: set[trio.Event] = set()
            for directory, name, numbers in others:
                waits |= self._invalidation.invalidate_name(directory, name, numbers)
            self._unlist(places)
            await self._wait_unless_suspended(waits)

    def _unlist(self, places: Iterable[tuple[Object, bytes]]) -> None:
        for directory, name in places:
            unlist(directory, name)

    async def moved(self, number: int, view: View, obj: Object, before: Object, parent: Object) -> None:
        """Handle a rename of `obj` from `before` into `parent` by a request that has not been answered yet.

        `removed` handles what has become of the names.
        """
        for twin in self._nodes.registry.twins(obj):
            self._invalidation.invalidate(twin)  # nothing says where it is now
        await self._audiences.wait_for_subtree(obj)
        if stat.S_ISDIR(obj.filesystem.stat(self._nodes.descriptors.fd(obj)).st_mode):
            await self._audiences.extend_to_ancestors(number, obj)
        # The kernel moves the name with the object, with its timeout: within a directory, for the same audience.
        # (Once all may know it, it is not cached for its audience alone any more, but names in it may still be.)
        is_named_for_one = (obj.cached_for_one or obj.has_names_for_one) and before.has_names_for_one
        is_near = before is parent and view.sole_cloak is not None
        if self._invalidation.notifier.is_busy(self._nodes.nodeid(number, before)):
            # So it does with a pending name, because of an earlier move for example.
            for directory, name in self._invalidation.names_of(obj):
                self._invalidation.invalidate_name(directory, name, (number,))
        if obj.ever_cached_in <= {number} and (
            view.fixed is not None
            or is_near
            or (
                not is_named_for_one
                and self._timeouts.is_public(number, view, parent)
                and self._timeouts.same_by_name(view, obj)
            )
        ):
            return
        subtree, _ = self._invalidation.invalidate(obj)
        for one in [subtree, *map(self._invalidation.invalidate_subtree, self._nodes.registry.twins(obj))]:
            # It does not wait for names, which the kernel can drop only after the reply.
            await one.done.wait()
