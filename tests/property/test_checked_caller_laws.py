"""Where the kernel checks permissions by the attributes shown, it never takes anybody for the owner who is not."""

import struct

import pytest
from hypothesis import example, given

from cloakfs.config.options import Options
from cloakfs.identity import Caller
from cloakfs.mapping import MAX_ID, IdMap, RangeDef, Squash
from cloakfs.nfs import root
from cloakfs.policy import Attrs, Policy
from cloakfs.view import KernelCheckedCaller, View
from tests.property.test_mapping_laws import IDS, ids, lists, squashes


def checked(defs: list[RangeDef], nobody: int, squash: Squash) -> View:
    """A view that the kernel checks with, whose users and groups are mapped alike."""
    groups = [RangeDef("gid", d.rm_low, d.rm_high, d.action, d.lc_low) for d in defs]
    options = Options(range_map=(*defs, *groups), anonuid=nobody, anongid=nobody, squash=squash)
    return View(Policy(options), checked=True)


def shown(view: View, client: int, stored: int) -> tuple[int, int]:
    """The owner and group that the client's user `client` is shown for a file of the server's `stored`."""
    server = view.server_ids(client, client)
    return KernelCheckedCaller(client, client, *server).recognise(stored, stored, *view.client_ids(stored, stored))


@given(lists, ids, squashes, ids)
def test_the_kernel_knows_the_owner_as_the_daemon_does(
    defs: list[RangeDef], nobody: int, squash: Squash, stored: int
) -> None:
    view = checked(defs, nobody, squash)
    for client in IDS:
        if client:  # root is let in, or kept out, by other means
            for seen, server in zip(shown(view, client, stored), view.server_ids(client, client), strict=True):
                assert (seen == client) == (server == stored), client


@given(lists, ids, squashes, ids)
def test_answers_that_cross_make_nobody_an_owner(
    defs: list[RangeDef], nobody: int, squash: Squash, stored: int
) -> None:
    """What one is shown, another may be checked with. No id that is shown is anybody's but the owner's."""
    view = checked(defs, nobody, squash)
    for one in IDS:
        for seen in shown(view, one, stored):
            for other in IDS:
                if other and seen == other < MAX_ID - 1:  # MAX_ID stands for strangers
                    assert view.server_ids(other, other)[0] == stored


def granting(*named: int) -> bytes:
    """An ACL that grants everything to these users and groups of the server."""
    entries = (struct.pack("<HHI", tag, 7, id_) for tag in (2, 8) for id_ in named)
    return struct.pack("<I", 2) + b"".join(entries)


def granted(value: bytes) -> list[set[int]]:
    """The users and the groups to which an ACL grants something."""
    entries = list(struct.iter_unpack("<HHI", value[4:]))
    return [{id_ for tag, bits, id_ in entries if tag == kind and bits} for kind in (2, 8)]


def checked_caller(view: View, client: int) -> KernelCheckedCaller:
    return KernelCheckedCaller(client, client, *view.server_ids(client, client))


@given(lists, ids, squashes, ids, ids)
def test_acl_entries_grant_to_whom_they_name(
    defs: list[RangeDef], nobody: int, squash: Squash, stored: int, other: int
) -> None:
    """Also where several client ids are one on the server; and what one is shown grants nothing to others."""
    view = checked(defs, nobody, squash)
    for client in IDS:
        if client:  # root is let in, or kept out, by other means
            for seen in granted(view.acl_out(granting(stored, other), checked_caller(view, client))):
                for id_ in IDS:
                    named = view.server_ids(id_, id_)[0] in (stored, other)
                    assert named or id_ not in seen, (client, id_)
                    assert id_ != client or named == (id_ in seen), client
    assert granted(view.acl_out(granting(stored)))[0] <= {view.counterpart("uid", stored)}  # whoever asks


@given(lists, ids, squashes, ids, ids)
def test_an_acl_that_is_shown_alike_is_the_same_for_everybody(
    defs: list[RangeDef], nobody: int, squash: Squash, stored: int, other: int
) -> None:
    """The kernel may keep it, and give it to other callers."""
    view = checked(defs, nobody, squash)
    if view.shows_acl_alike(granting(stored, other)):
        assert (
            len({view.acl_out(granting(stored, other), checked_caller(view, client)) for client in IDS if client}) == 1
        )


@given(lists, ids, squashes, ids)
def test_a_fixed_view_is_entered_by_whom_it_is(
    defs: list[RangeDef], nobody: int, squash: Squash, identity: int
) -> None:
    table = IdMap(defs, nobody=nobody, squash=squash)
    who = Caller(identity, identity, frozenset({identity}))
    view = View(checked(defs, nobody, squash).policy, who)
    for client in IDS:
        if client and view.admits(client):
            assert table.counterpart(client, "forward") == identity


@given(lists, ids, squashes, ids)
def test_a_set_id_program_runs_as_whose_it_is_and_nobody_else_can_plant_it(
    defs: list[RangeDef], nobody: int, squash: Squash, stored: int
) -> None:
    view = checked(defs, nobody, squash)
    told = view.show(Attrs("f", 0o106755, stored, stored))
    assert told is not None
    mode, uid, _, _ = told
    if mode & 0o6000:
        assert mode & 0o6000 == 0o6000  # both kinds are mapped alike
        assert view.server_ids(uid, uid)[0] == stored
        assert {client for client in IDS if view.server_ids(client, client)[0] == stored} <= {uid}


@given(lists, ids, squashes, ids)
def test_what_is_shown_alike_is_the_same_for_everybody(
    defs: list[RangeDef], nobody: int, squash: Squash, stored: int
) -> None:
    view = checked(defs, nobody, squash)
    if view.is_shown_alike(stored, stored):
        table = IdMap(defs, nobody=nobody, squash=squash)
        plain = view.client_ids(stored, stored)
        for client in IDS:
            for group in IDS:
                if not (client and group == 0 and table.forward(0) != 0):  # the kernel's server replaces root's group
                    servers = table.forward(client), table.forward(group)
                    assert KernelCheckedCaller(client, group, *servers).recognise(stored, stored, *plain) == plain, (
                        client,
                        group,
                    )


@given(lists, ids, squashes, ids, ids)
def test_a_uid_becomes_the_same_one_with_any_group(
    defs: list[RangeDef], nobody: int, squash: Squash, client: int, group: int
) -> None:
    view = checked(defs, nobody, squash)
    assert view.server_uid(client) == view.server_ids(client, group)[0]


def test_root_s_files_are_shown_alike_where_root_is_squashed() -> None:
    """They are most of a system's files."""
    assert checked([], 65534, "root").is_shown_alike(0, 0)
    assert not checked([RangeDef("uid", 5, 5, "map", 6)], 65534, "root").is_shown_alike(0, 0)


@example([RangeDef("uid", 0, 1, "map", 2), RangeDef("uid", 1, 3, "map", 0)], 0, "root")  # 3, inside of the second
@given(lists, ids, squashes)
def test_who_stands_for_root_is_what_root_is_or_nobody(defs: list[RangeDef], nobody: int, squash: Squash) -> None:
    view = checked(defs, nobody, squash)
    options = view.policy.options
    ids = view.policy.ids["uid"]
    if squash == "all" and not defs:
        expected = (options.anonuid, options.anongid)
        assert root.single_identity(options) == expected
        assert root.words(options) == ["all_squash", f"anonuid={expected[0]}", f"anongid={expected[1]}"]
        assert root.keeps_identity(options)
        assert {ids.forward(id_) for id_ in (*IDS, expected[0])} == {expected[0]}  # so nobody is served as another
        return
    assert root.single_identity(options) is None
    if ids.forward(0) == 0:
        assert root.words(options) == ["no_root_squash"]
        return
    stand_in = root.stand_in(options, "uid")
    assert root.words(options) == ["root_squash", f"anonuid={stand_in}", f"anongid={root.stand_in(options, 'gid')}"]
    assert 0 < stand_in <= MAX_ID
    alike = any(ids.forward(id_) == ids.forward(0) for id_ in IDS if id_)
    assert root.keeps_identity(options) == (ids.forward(stand_in) == ids.forward(0))
    assert root.keeps_identity(options) or not alike
    nobodies = [id_ for id_ in IDS if id_ and ids.counterpart(id_, "forward") is None]
    if not alike and any(ids.forward(id_) for id_ in nobodies):  # where nobody is root, root is not made nobody
        assert ids.counterpart(stand_in, "forward") is None


@pytest.mark.parametrize("squash", ["root", "all"])
def test_without_a_map(squash: Squash) -> None:
    assert root.words(Options(squash=squash)) == [f"{squash}_squash", "anonuid=65534", "anongid=65534"]
    assert root.words(Options(squash="none")) == ["no_root_squash"]
