"""The views that one mount offers: a view for each caller, one fixed view, or several as `@NAME` directories."""

import logging
import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from .. import linux
from ..config.viewitems import Ids, Range, User, ViewItem
from ..identity import Caller, ClientId, ServerId
from ..linux import userdatabase
from ..messages import UserError
from ..policy import Policy
from ..view import LowerMount, View
from .index import MAX_VIEWS, Index

if TYPE_CHECKING:
    import trio

# The database is queried again after this part of the time that a change may take, and has the rest to answer.
_PART = 2 / 3
_PATIENCE_SECONDS = 5.0  # since its last answer, about any user: there may be thousands of queries
_THREADS = 4

# How many views are made, or checked, before others are served.
_AT_ONCE = 100

log = logging.getLogger(__name__)


class ViewError(UserError, ValueError):
    """A view cannot be made; the text is one line that says why."""


class DatabaseError(ViewError):
    """The user database fails to say whether there is such a user."""


@dataclass(frozen=True, slots=True)
class ViewIdentity:
    """The identity of one requested view: its label and its server ids, and how to find it in the user database."""

    label: str
    caller: Caller
    by_user: bool
    user: str = ""
    of_range: bool = False


def user_identity(user: str) -> ViewIdentity:
    """Return the identity that the server's user database gives a user name or uid.

    Raises:
        ViewError: there is no such user.
        DatabaseError: the database fails to say.
    """
    try:
        entry = userdatabase.getpwuid(int(user)) if user.isdecimal() else userdatabase.getpwnam(user)
    except KeyError:
        try:
            userdatabase.is_account(user)
        except OSError as exc:
            raise DatabaseError(f"view {user}: the user database fails to say whose it is ({exc.strerror})") from None
        raise ViewError(f"view {user}: no such user in the user database (UID:GID[:GID,GID…] needs none)") from None
    groups = frozenset(map(ServerId, userdatabase.getgrouplist(entry.pw_name, entry.pw_gid)))
    caller = Caller(ServerId(entry.pw_uid), ServerId(entry.pw_gid), groups)
    return ViewIdentity(entry.pw_name, caller, by_user=True, user=user)


def resolve(item: ViewItem) -> ViewIdentity | Range:
    """Return the identity that an item of `views=` means; a range of uids is returned as it is.

    The identities of a range are made on demand.

    Raises:
        ViewError: the item names a user that does not exist.
    """
    match item:
        case User(name):
            return user_identity(name)
        case Ids(uid, gid, groups):
            return ViewIdentity(item.label, Caller(uid, gid, frozenset([gid, *groups])), by_user=False)
        case Range():
            return item


def accounts_of(item: ViewItem) -> list[User | Ids]:
    """Return the single identities that an item of `views=` stands for: for a range, the existing accounts in it."""
    if isinstance(item, Range):
        return [
            User(name)
            for name in sorted({entry.pw_name for entry in userdatabase.getpwall() if ServerId(entry.pw_uid) in item})
        ]
    try:
        resolve(item)
    except ViewError:
        return []
    return [item]


_USUAL_SECONDS = 10.0
"""How long the numbers that the accounts of ranges usually have are remembered at least."""

_USUAL_SHARE = 20
"""And for how many times as long as it took to ask for the accounts."""


class Views:
    """The views of one mount.

    Args:
        policy: the policy of all views.
        items: the fixed views; if there are none, every caller has a view of its own.
        entrants: client uids that may enter every fixed view.
        for_all: whether all callers may enter them.
        index: stores the numbers of views.
        checked: whether the kernel checks permissions against the attributes that are shown.
        lower: the cloakfs mount in which the tree lies, if any.

    Attributes:
        policy: the policy in force.
        lower: the cloakfs mount in which the tree lies, if any.
        top: whether the views are `@NAME` directories, so that the root of the mount only lists them.
        fixed: whether the views are fixed.
        get: returns the view with a number, or None if this mount does not have it (yet). Every request calls it.

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
        lower: LowerMount | None = None,
    ) -> None:
        self.policy = policy
        self._for_all = for_all
        self._checked = checked
        self.lower = lower
        self._entrants = entrants
        self._index = index
        resolved = [resolve(item) for item in items]
        self._ranges = [item for item in resolved if isinstance(item, Range)]
        identities = [item for item in resolved if isinstance(item, ViewIdentity)]
        self.top = bool(self._ranges) or len(identities) > 1
        self.fixed = bool(items)
        self._numbers: dict[str, int] = {}
        self._labels: dict[int, str] = {}  # the same, by number
        self._order: list[int] = []  # the numbers, sorted
        self._views: dict[int, View] = {}
        self.get = self._views.get
        self._by_user: dict[int, ViewIdentity] = {}  # by the number of the view
        self._withdrawn: dict[int, View] = {}  # those whose account is gone, likewise
        self._unsure: set[int] = set()  # those about whose account the database gives no answer
        self._asking: set[trio.CancelScope] = set()  # the questions to the database that wait for an answer
        self._usual: dict[int, str] = {}  # `_usual_label`
        self._usual_until = -math.inf
        self._answered = 0.0  # when it answered last (`trio.current_time`)
        if not identities and not self._ranges:
            self._views[0] = self._view(policy, None)
        for identity in identities:
            if identity.label in self._numbers:
                raise ViewError(f"two views are called @{identity.label}")
            self._add(identity)

    def _add(self, identity: ViewIdentity) -> int:
        number = self._index.view(identity.label) if self.top else 0
        if number > MAX_VIEWS:
            raise ViewError(f"more than {MAX_VIEWS} views on one mount")
        self._withdrawn.pop(number, None)
        self._open(number, identity.label, self._view(self.policy, identity.caller))
        if identity.by_user:
            self._by_user[number] = identity
        return number

    def _open(self, number: int, label: str, view: View) -> None:
        self._views[number] = view
        self._numbers[label] = number
        if number not in self._labels:
            insort(self._order, number)
        self._labels[number] = label

    def _view(self, policy: Policy, fixed: Caller | None) -> View:
        return View(
            policy,
            fixed,
            self._entrants,
            for_all=self._for_all,
            checked=self._checked,
            lower=self.lower,
            act_as_daemon=linux.act_as_daemon,
        )

    def any(self) -> View:
        """Return one of the views, to find out what holds for all; one for each caller if none has been made yet."""
        return next(iter((self._views or self._withdrawn).values()), None) or self._view(self.policy, None)

    async def use(self, policy: Policy) -> None:
        """Use another policy, also for handles given out before. It is in force in all views when this returns.

        Others are served before that, by the policy that was in force.
        """
        import trio  # noqa: PLC0415  (half of the time that commands without an event loop take to start)

        ready: dict[int, View] = {}
        for number, view in [*self._views.items(), *self._withdrawn.items()]:
            if len(ready) % _AT_ONCE == 0:
                await trio.sleep(0)
            ready[number] = self._view(policy, view.fixed)
        self.policy = policy
        for views in self._views, self._withdrawn:
            for number, view in views.items():  # some may have come, or changed, meanwhile
                new = ready.get(number)
                views[number] = new if new is not None and new.fixed == view.fixed else self._view(policy, view.fixed)

    def __contains__(self, label: str) -> bool:
        """Whether there is a view called `label` (yet)."""
        return label in self._numbers

    def after(self, number: int) -> Iterator[tuple[int, str, View]]:
        """Yield the views with larger numbers: number, name (without @) and view, in the order of their numbers.

        Numbers never change; views may come and go during the iteration.
        """
        while (at := bisect_right(self._order, number)) < len(self._order):
            number = self._order[at]
            yield number, self._labels[number], self._views[number]

    def label(self, number: int) -> str | None:
        """Return the name (without @) of the view with this number; None if there is no such view (yet)."""
        return self._labels.get(number)

    async def find(self, label: str, client_uid: ClientId) -> int | None:
        """Return the number of the view called `label`, which is made on first access if a range allows it.

        The result is None if there is no such view, or a process with this uid may not enter it.
        """
        number = self._numbers.get(label)
        if number is None and self._ranges:
            import trio  # noqa: PLC0415  (as above)

            try:
                identity = replace(await trio.to_thread.run_sync(user_identity, label), of_range=True)
            except ViewError:
                return None
            allowed = any(identity.caller.uid in uids for uids in self._ranges)
            view = self._view(self.policy, identity.caller)
            if identity.label != label or not allowed or not view.admits(client_uid):
                return None
            number = self._numbers.get(label)  # another request may have made it meanwhile
            if number is None:
                number = self._add(identity)
        if number is None or not self._views[number].admits(client_uid):
            return None
        return number

    async def revive(self, number: int) -> View | None:
        """Return the view with this number if an earlier run made it from a range that is still allowed."""
        label = self._index.view_label(number)
        if label is None and self._ranges and self._index.is_computed:
            label = await self._usual_label(number)
        if label is not None and await self.find(label, ClientId(0)) == number:
            return self._views[number]
        return None

    async def _usual_label(self, number: int) -> str | None:
        """Return whose view usually has this number, if the account is in a range: clients may have it from elsewhere.

        The user database is asked for all accounts, but seldom, since anybody may send any number.
        """
        import trio  # noqa: PLC0415  (as above)

        if (now := trio.current_time()) >= self._usual_until:
            self._usual_until = math.inf  # others do not ask meanwhile
            try:
                accounts = await trio.to_thread.run_sync(
                    lambda: [str(user) for item in self._ranges for user in accounts_of(item)]
                )
                self._usual = {self._index.usual_view(label): label for label in accounts}
            finally:
                took = trio.current_time() - now
                self._usual_until = now + took + max(_USUAL_SECONDS, _USUAL_SHARE * took)
        return self._usual.get(number)

    async def follow_user_database(self, changed: Callable[[], None], seconds: float) -> None:
        """Follow the user database for ever, and call `changed` when what a view named by user shows has changed.

        A view whose account is gone is withdrawn: no caller gets anything from it until there is such an account again.
        If the database fails to say, the view stays, but loses the supplementary groups.

        Args:
            changed: called after each such change.
            seconds: how long a change in the user database may take to reach a view that is named by user.
        """
        import trio  # noqa: PLC0415  (as above)

        threads = trio.CapacityLimiter(_THREADS)
        while True:
            await trio.sleep(seconds * _PART)
            self._answered = trio.current_time()
            async with trio.open_nursery() as impatient:
                impatient.start_soon(self._lose_patience)
                async with trio.open_nursery() as nursery:
                    for count, (number, identity) in enumerate(list(self._by_user.items())):
                        if count % _AT_ONCE == 0:
                            await trio.sleep(0)
                        nursery.start_soon(self._refresh, number, identity, threads, changed)
                impatient.cancel_scope.cancel()

    async def _lose_patience(self) -> None:
        """Give up all questions to the user database, for ever, whenever it has answered none of them for long."""
        import trio  # noqa: PLC0415  (as above)

        while True:
            await trio.sleep_until(self._answered + _PATIENCE_SECONDS)
            if trio.current_time() >= self._answered + _PATIENCE_SECONDS:
                self._answered = trio.current_time()
                for question in self._asking:
                    question.cancel()

    async def _refresh(
        self, number: int, identity: ViewIdentity, threads: "trio.CapacityLimiter", changed: Callable[[], None]
    ) -> None:
        import trio  # noqa: PLC0415  (as above)

        before = self._views.get(number)
        now: ViewIdentity | None = None
        failure: str | None = "in time"
        with trio.CancelScope() as question:
            self._asking.add(question)
            try:
                now = await trio.to_thread.run_sync(
                    user_identity, identity.user, limiter=threads, abandon_on_cancel=True
                )
                failure = None
            except (DatabaseError, OSError) as exc:
                failure = str(exc)
            except ViewError:
                failure = None
            finally:
                self._asking.discard(question)
            self._answered = trio.current_time()
        if failure is not None:
            if number not in self._unsure:
                self._unsure.add(number)
                log.warning("view %s: the user database gives no answer (%s): it stays, without supplementary groups "
                            "until there is one", identity.label, failure)  # fmt: skip
            if before is not None and before.fixed is not None:
                self._give(before, before.fixed._replace(groups=frozenset({before.fixed.gid})), changed)
            return
        self._unsure.discard(number)
        if now is None or not self._is_still(identity, now):
            if before is not None:
                log.warning("view %s: there is no such account any more: withdrawn", identity.label)
                self._withdraw(number, identity, changed)
        elif before is not None:
            self._give(before, now.caller, changed)
        elif number in self._withdrawn:
            log.warning("view %s: there is such an account again", identity.label)
            view = self._withdrawn.pop(number)
            view.fixed = now.caller
            self._open(number, identity.label, view)
            changed()

    def _is_still(self, before: ViewIdentity, found: ViewIdentity) -> bool:
        """Whether what the database says of a user is about the one that the view was made for."""
        if self.top and found.label != before.label:
            return False
        return not before.of_range or any(found.caller.uid in uids for uids in self._ranges)

    def _withdraw(self, number: int, identity: ViewIdentity, changed: Callable[[], None]) -> None:
        self._withdrawn[number] = self._views.pop(number)
        self._numbers.pop(identity.label, None)
        if self._labels.pop(number, None) is not None:
            del self._order[bisect_left(self._order, number)]
        changed()

    @staticmethod
    def _give(view: View, caller: Caller, changed: Callable[[], None]) -> None:
        if view.fixed != caller:
            view.fixed = caller
            changed()
