"""Where the kernel checks permissions with what is shown, it takes nobody for an owner who is none."""

from hypothesis import example, given
from hypothesis import strategies as st

from cloakfs.exports import Options
from cloakfs.mapping import MAX_ID, IdMap, RangeDef, Squash
from cloakfs.nfs.knfsd import another_like_root
from cloakfs.policy import Policy
from cloakfs.view import Asker, View
from tests.property.test_mapping_laws import IDS, ids, lists, squashes


def shown(table: IdMap, client: int, stored: int) -> int:
    """The owner that the client's user `client` is shown for a file of the server's user `stored`."""
    uid, _ = Asker(client, 0, table.forward(client), 0).recognise(stored, 1, table.reverse(stored), 1)
    return uid


@given(lists, ids, squashes, ids)
def test_the_kernel_knows_the_owner_as_the_daemon_does(
    defs: list[RangeDef], nobody: int, squash: Squash, stored: int
) -> None:
    table = IdMap(defs, nobody=nobody, squash=squash)
    for client in IDS:
        if client:  # root is let in, or kept out, by other means
            assert (shown(table, client, stored) == client) == (table.forward(client) == stored), client


@given(lists, ids, squashes, ids)
def test_answers_that_cross_make_no_owner_but_of_what_is_shown_as_somebodys_else(
    defs: list[RangeDef], nobody: int, squash: Squash, stored: int
) -> None:
    """What one is shown, another may be checked with: only ids that stand for several owners can be mistaken."""
    table = IdMap(defs, nobody=nobody, squash=squash)
    for one in IDS:
        seen = shown(table, one, stored)
        for other in IDS:
            if other and seen == other < MAX_ID - 1 and table.forward(other) != stored:
                assert seen == table.reverse(stored)
                assert table.forward(table.reverse(stored)) != stored


@given(lists, ids, squashes, ids)
def test_what_is_shown_alike_is_the_same_for_everybody(
    defs: list[RangeDef], nobody: int, squash: Squash, stored: int
) -> None:
    groups = [RangeDef("gid", d.rm_low, d.rm_high, d.action, d.lc_low) for d in defs]
    options = Options(range_map=(*defs, *groups), anonuid=nobody, anongid=nobody, squash=squash)
    view = View(Policy(options))
    if view.is_shown_alike(stored, stored):
        table = IdMap(defs, nobody=nobody, squash=squash)
        plain = view.client_ids(stored, stored)
        for client in IDS:
            server = table.forward(client)
            assert Asker(client, client, server, server).recognise(stored, stored, *plain) == plain, client


@example([RangeDef("uid", 0, 1, "map", 2), RangeDef("uid", 1, 3, "map", 0)], 0, "root")  # 3, inside of the second
@given(lists, ids, squashes)
def test_who_stands_for_root_is_what_root_is(defs: list[RangeDef], nobody: int, squash: Squash) -> None:
    table = IdMap(defs, nobody=nobody, squash=squash)
    like = another_like_root(Options(range_map=tuple(defs), anonuid=nobody, squash=squash))
    if like is None:
        assert table.forward(0) == 0 or not any(table.forward(id_) == table.forward(0) for id_ in IDS if id_)
    else:
        assert like != 0
        assert table.forward(like) == table.forward(0) != 0


@given(st.sampled_from([("none", 0), ("root", 65534), ("all", 65534)]))
def test_without_a_map(case: tuple[Squash, int]) -> None:
    squash, like = case
    assert another_like_root(Options(squash=squash)) == (like or None)
