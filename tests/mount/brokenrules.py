"""Rules of a daemon about what the kernel may cache, broken one by one: `cacheoracle` has to find each."""

from functools import partial

import pyfuse3

from cloakfs.cloak import Condition
from cloakfs.filesystem import directories
from cloakfs.kernelcache import timeouts
from cloakfs.kernelcache.audience import Audiences
from cloakfs.kernelcache.changes import Changes
from cloakfs.kernelcache.complete import CompleteDirectories
from cloakfs.kernelcache.interest import InterestTable
from cloakfs.kernelcache.invalidation import Invalidation
from cloakfs.kernelcache.notifier import Notifier
from cloakfs.kernelcache.timeouts import Timeouts
from cloakfs.tree.actor import Actor
from tests.altered import Alteration, replace
from tests.mount import alterations, cacheoracle


def broken(owner: object, name: str, answer: object = True) -> Alteration:
    """A rule that always comes to the same answer."""
    return partial(alterations.answer_always, owner, name, answer)


def below_a_name_that_is_invalidated_late() -> None:
    alterations.answer_always(Notifier, "is_idle", True)
    cacheoracle.invalidate_late(b"shown", 0.4)


def all_may_search() -> None:
    alterations.answer_always(timeouts, "world_may", True)


def listings_show_all() -> None:
    alterations.answer_always(directories, "is_entry_visible", True)


def anybody_is_a_member() -> None:
    alterations.answer_always(Actor, "has_group", True)


def the_watcher_is_not_told() -> None:
    replace(cacheoracle, "CheckedWatch", cacheoracle.CheckedSharedWatch)
    alterations.answer_always(InterestTable, "note", None)


WEAKENED: dict[str, tuple[Alteration, str]] = {
    "who learns of it is in the audience": (broken(Audiences, "record", None), "is told of"),
    "what was cached for one is invalidated first": (broken(Audiences, "is_ready"), "hidden from"),
    "all callers with a uid get there": (broken(Timeouts, "is_reached_by"), "hidden from"),
    "all members of a group see it": (broken(Condition, "surely_admits_members"), "hidden from"),
    "who stands for a group is a member": (anybody_is_a_member, "is told of"),
    "what a member makes is seen by all": (broken(CompleteDirectories, "check_new", None), "hides something"),
    "audiences are extended to ancestors": (broken(Audiences, "_exceeds_parent", False), "hidden from"),
    "all callers see it": (broken(Timeouts, "same_for_all"), "hidden from"),
    "all callers may search it": (all_may_search, "may not search"),
    "nothing is hidden": (broken(Timeouts, "of_negative", 10.0), "a view that hides something"),
    "what is moved is invalidated": (partial(alterations.do_nothing, Changes, "moved"), "hidden from"),
    "changes through the mount": (partial(alterations.do_nothing, Changes, "changed"), "hidden from"),
    "a listing shows what is seen": (listings_show_all, "is listed"),
    "all entries are shown": (broken(CompleteDirectories, "_shows"), "a view that hides something"),
    "nothing is cached below a name that is invalidated late": (below_a_name_that_is_invalidated_late, "hidden from"),
    "an ACL is cached with the attributes": (broken(Timeouts, "acl", None), "the ACL of"),
    "what the kernel knows is noted for the watcher": (the_watcher_is_not_told, "leads elsewhere"),
    "changes behind the mount": (broken(Changes, "_handle_event", False), "leads elsewhere"),
}
"""Rules; what breaks each; and what is to be found then."""

if hasattr(pyfuse3.FileInfo, "cache_readdir"):
    WEAKENED["entries are invalidated"] = (
        broken(Invalidation, "invalidate_listing", None),
        "the kernel keeps the entry",
    )
