"""The views that one mount offers: a view for each caller, one fixed view, or several as `@NAME` directories."""

import os
import pwd
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from . import linux
from .caller import Caller
from .config.views import Ids, Range, User, ViewItem
from .ids import ClientId, ServerId
from .policy import Policy
from .tree.index import Index
from .tree.nodes import MAX_VIEWS
from .view import View

if TYPE_CHECKING:
    from .below import Below

REFRESH_SECONDS = 30.0
"""How long a change in the user database may take to reach a view that is named by user."""


class ViewError(ValueError):
    """A view cannot be made; the text is one line that says why."""


@dataclass(frozen=True, slots=True)
class Identity:
    """The identity of one requested view: its label and its server ids."""

    label: str
    who: Caller
    by_user: bool


def user_identity(user: str) -> Identity:
    """Return the identity that the server's user database gives a user name or uid.

    Raises:
        ViewError: there is no such user.
    """
    if os.geteuid() == 0:  # in the daemon, whose threads act for callers
        linux.act_as_daemon()
    try:
        entry = pwd.getpwuid(int(user)) if user.isdecimal() else pwd.getpwnam(user)
    except KeyError:
        raise ViewError(f"view {user}: no such user in the user database (UID:GID[:GID,GID…] needs none)") from None
    groups = frozenset(map(ServerId, os.getgrouplist(entry.pw_name, entry.pw_gid)))
    who = Caller(ServerId(entry.pw_uid), ServerId(entry.pw_gid), groups)
    return Identity(entry.pw_name, who, by_user=True)


def resolve(item: ViewItem) -> Identity | Range:
    """Return the identity that an item of `views=` means here; a range of uids is returned as it is.

    The identities of a range are made on demand.

    Raises:
        ViewError: the item names a user that does not exist.
    """
    match item:
        case User(name):
            return user_identity(name)
        case Ids(uid, gid, groups):
            return Identity(item.label, Caller(uid, gid, frozenset([gid, *groups])), by_user=False)
        case Range():
            return item


def accounts_of(item: ViewItem) -> list[User | Ids]:
    """Return the single identities that an item of `views=` stands for: for a range, the existing accounts in it."""
    if isinstance(item, Range):
        return [
            User(name) for name in sorted({entry.pw_name for entry in pwd.getpwall() if ServerId(entry.pw_uid) in item})
        ]
    try:
        resolve(item)
    except ViewError:
        return []
    return [item]


class Views:
    """The views of one mount.

    Args:
        policy: the policy that all views look through.
        items: the fixed views; if there are none, every caller has a view of its own.
        entrants: client uids that may enter every fixed view.
        for_all: whether everybody may enter them.
        index: stores the numbers of views.
        checked: whether the kernel checks permissions against the attributes that are shown.
        below: the cloakfs mount in which the tree lies, if any.

    Attributes:
        policy: the policy in force.
        below: see above.
        top: whether the views are `@NAME` directories, so that the root of the mount only lists them.
        fixed: whether the views are fixed.
        get: returns the view with a number, or None if this mount does not have it (yet). Every request asks.

    Raises:
        ViewError: an item is wrong, or two of them have the same name.
    """

    def __init__(
        self,
        policy: Policy,
        items: tuple[ViewItem, ...],
        entrants: frozenset[ClientId],
        index: Index,
        *,
        for_all: bool = False,
        checked: bool = False,
        below: "Below | None" = None,
    ) -> None:
        self.policy = policy
        self._for_all = for_all
        self._checked = checked
        self.below = below
        self._entrants = entrants
        self._index = index
        resolved = [resolve(item) for item in items]
        self._ranges = [item for item in resolved if isinstance(item, Range)]
        identities = [item for item in resolved if isinstance(item, Identity)]
        self.top = bool(self._ranges) or len(identities) > 1
        self.fixed = bool(items)
        self._numbers: dict[str, int] = {}
        self._views: dict[int, View] = {}
        self.get = self._views.get
        self._by_user: dict[int, ServerId] = {}  # view number -> uid in the database
        if not identities and not self._ranges:
            self._views[0] = self._view(None)
        for identity in identities:
            if identity.label in self._numbers:
                raise ViewError(f"two views are called @{identity.label}")
            self._add(identity)

    def _add(self, identity: Identity) -> int:
        number = self._index.view(identity.label) if self.top else 0
        if number > MAX_VIEWS:
            raise ViewError(f"more than {MAX_VIEWS} views on one mount")
        self._views[number] = self._view(identity.who)
        self._numbers[identity.label] = number
        if identity.by_user:
            self._by_user[number] = identity.who.uid
        return number

    def _view(self, fixed: Caller | None) -> View:
        return View(
            self.policy,
            fixed,
            self._entrants,
            for_all=self._for_all,
            checked=self._checked,
            below=self.below,
            act_as_daemon=linux.act_as_daemon,
        )

    def any(self) -> View:
        """Return one of the views, to find out what holds for all; one for each caller if none has been made yet."""
        return next(iter(self._views.values()), None) or self._view(None)

    def use(self, policy: Policy) -> None:
        """Use another policy from now on, also for handles given out before."""
        self.policy = policy
        self._views.update({number: self._view(view.fixed) for number, view in self._views.items()})

    def labels(self, client_uid: ClientId) -> list[str]:
        """Return the sorted names (without @) of the views that a process with this uid may enter."""
        return sorted(label for label, number in self._numbers.items() if self._views[number].admits(client_uid))

    def number(self, label: str) -> int:
        """Return the number of a view that `labels` returned."""
        return self._numbers[label]

    def label(self, number: int) -> str | None:
        """Return the name (without @) of the view with this number; None if there is no such view (yet)."""
        return next((label for label, known in self._numbers.items() if known == number), None)

    async def find(self, label: str, client_uid: ClientId) -> int | None:
        """Return the number of the view called `label`, which is made on first access if a range allows it.

        The result is None if there is no such view, or a process with this uid may not enter it.
        """
        number = self._numbers.get(label)
        if number is None and self._ranges:
            import trio  # noqa: PLC0415  (half of the time that commands without an event loop take to start)

            try:
                identity = await trio.to_thread.run_sync(user_identity, label)
            except ViewError:
                return None
            allowed = any(identity.who.uid in uids for uids in self._ranges)
            view = self._view(identity.who)
            if identity.label != label or not allowed or not view.admits(client_uid):
                return None
            number = self._numbers.get(label)  # another request may have made it meanwhile
            if number is None:
                linux.act_as_daemon()
                number = self._add(identity)
        if number is None or not self._views[number].admits(client_uid):
            return None
        return number

    async def revive(self, number: int) -> View | None:
        """Return the view with this number if an earlier run made it from a range that is still allowed."""
        label = self._index.view_label(number)
        if label is not None and await self.find(label, ClientId(0)) == number:
            return self._views[number]
        return None

    async def keep_fresh(self, changed: Callable[[], None]) -> None:
        """Follow the user database for ever: call `changed` when the ids or groups of a view named by user change."""
        import trio  # noqa: PLC0415  (as above)

        while True:
            await trio.sleep(REFRESH_SECONDS)
            for number, uid in list(self._by_user.items()):
                before = self._views[number].fixed
                assert before is not None
                try:
                    now = (await trio.to_thread.run_sync(user_identity, str(uid))).who
                except (ViewError, OSError):
                    # The user is gone, or the database does not answer: in doubt, the view loses its groups.
                    now = before._replace(groups=frozenset({before.gid}))
                self._views[number].fixed = now
                if now != before:
                    changed()
