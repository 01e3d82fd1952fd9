"""What a view does with its policy's answers: right, wrong, or none at all."""

import logging
import struct
from collections.abc import Callable
from typing import Any

import pytest

from cloakfs import view as view_module
from cloakfs.config.options import Options
from cloakfs.config.parse import parse_options
from cloakfs.identity import Caller, ClientCaller, ClientId, ServerId
from cloakfs.mapping import MAX_ID, Kind
from cloakfs.policy import Attrs, Policy
from cloakfs.view import KernelCheckedCaller, View

ANN = Caller(1001, 1001, frozenset({1001, 50}))
FILE = Attrs("f", 0o100640, 1001, 50, nlink=3)
DIRECTORY = Attrs("d", 0o040755, 1002, 50, nlink=3)


def view(text: str = "", **kwargs: Any) -> View:
    return View(Policy(parse_options(text)[0]), **kwargs)


def with_methods(**methods: Callable[..., Any]) -> View:
    """A caller view through a policy with these methods in place of its own."""
    return View(type("P", (Policy,), {name: staticmethod(method) for name, method in methods.items()})())


def fail(*args: object) -> Any:
    raise KeyError(args)


# -- the built-in policy ---------------------------------------------------------------------------


def test_a_caller_view_maps_whoever_comes_and_lets_everybody_in() -> None:
    mapped = view("range_map=uid 1000 1999 map 20000 gid 1000 1999 map 20000 gid 50 map 60")
    assert mapped.admits(12345)
    assert mapped.identify(ANN) == Caller(20001, 20001, frozenset({20001, 60}))


def test_a_fixed_view_is_one_identity_and_lets_in_root_it_and_the_entrants() -> None:
    fixed = view("range_map=uid 1 map 1001", fixed=ANN, entrants=frozenset({33}))
    assert fixed.identify(Caller(5, 5, frozenset({5}))) is ANN
    assert [uid for uid in (0, 1, 2, 33, 1001) if fixed.admits(uid)] == [0, 1, 33]


def test_the_server_makes_all_callers_of_an_all_squash_export_the_anonymous_one() -> None:
    squashed = view("all_squash,anonuid=7,anongid=8")
    assert [uid for uid in (0, 7, 8, 65534) if squashed.is_squashed_caller(ClientId(uid))] == [7]


def test_without_cloaking_all_is_visible_with_its_real_link_count() -> None:
    plain = view()
    assert not plain.hides
    assert plain.visible(ANN, DIRECTORY)
    assert plain.show(DIRECTORY) == (0o040755, 1002, 50, 3)


def test_with_cloaking_directories_have_one_link() -> None:
    cloaked = view("cloak_list=uid +077 1000 1999,range_map=uid 1 map 1001")
    assert cloaked.hides
    assert cloaked.visible(ANN, FILE)
    assert not cloaked.visible(Caller(7, 7, frozenset({7})), FILE)
    assert cloaked.show(FILE) == (0o100640, 1, 50, 3)
    assert cloaked.show(DIRECTORY) == (0o040755, 65534, 50, 1)


def test_ids_to_store_and_to_tell() -> None:
    mapped = view("anonuid=9,range_map=uid 1 map 1001")
    assert mapped.server_id("uid", 1) == 1001
    assert mapped.server_id("uid", 2) is None
    assert mapped.client_id("uid", 1001) == 1
    assert mapped.client_id("uid", 1002) == 9
    assert mapped.client_id("gid", 1002) == 1002


def acl(uid: int, gid: int) -> bytes:
    entries = [(1, 6, MAX_ID + 1), (2, 4, uid), (4, 4, MAX_ID + 1), (8, 4, gid), (16, 4, MAX_ID + 1)]
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)


def test_acls_go_through_the_maps_of_their_kinds() -> None:
    mapped = view("range_map=uid 1 map 1001 gid 2 map 2002")
    assert mapped.acl_in(acl(1, 2)) == acl(1001, 2002)
    assert mapped.acl_out(acl(1001, 2002)) == acl(1, 2)
    assert mapped.acl_out(acl(7, 8)) == acl(65534, 65534)
    for value in (acl(3, 2), acl(1, 3)):
        with pytest.raises(ValueError, match="has no counterpart"):
            mapped.acl_in(value)


def test_an_identity_without_a_client_id_lets_in_root_and_the_entrants_alone() -> None:
    """Nobody does not equal nobody."""
    for text in ("range_map=uid 1 map 1002", "range_map=uid 0 -1 squash -2", "all_squash", "all_squash,anonuid=1001"):
        fixed = view(text, fixed=ANN, entrants=frozenset({33}))
        assert [uid for uid in (0, 1, 33, 1001, 65534, MAX_ID) if fixed.admits(uid)] == [0, 33], text


def test_a_plug_ins_nobody_enters_no_fixed_view() -> None:
    known = {1001: 1}
    mapped = with_methods(
        client_id=lambda kind, i: known.get(i, 65534),
        forward=lambda caller: caller._replace(uid=1001 if caller.uid == 1 else 65534),
    ).policy
    assert [uid for uid in (0, 1, 65534) if View(mapped, ANN).admits(uid)] == [0, 1]
    assert [uid for uid in (0, 1, 65534) if View(mapped, ANN._replace(uid=1002)).admits(uid)] == [0]
    # Shown as they are, but forward makes somebody else of it.
    moved = with_methods(forward=lambda caller: caller._replace(uid=caller.uid + 1)).policy
    assert [uid for uid in (0, 1000, 1001) if View(moved, ANN).admits(uid)] == [0]


def test_what_the_kernel_checks_with_takes_nobody_for_somebody() -> None:
    checked = view("range_map=uid 1 map 1001 gid 2 map 2002", checked=True)
    assert [checked.client_id("uid", i) for i in (1001, 7, 0, 65534)] == [1, MAX_ID, MAX_ID, MAX_ID]
    # An ACL entry of a stranger grants nothing: clients can claim any id.
    kept = struct.unpack_from("<HHI", checked.acl_out(acl(7, 2002)), 12)
    assert kept == (2, 0, MAX_ID)
    assert checked.acl_out(acl(1001, 2002)) == acl(1, 2)
    # root_squash leaves what is root's as it is.
    squashed = view("root_squash", checked=True)
    assert [squashed.client_id("uid", i) for i in (0, 5, 65534)] == [0, 5, 65534]
    assert squashed.client_id("gid", 0) == 0
    # Who comes with root's group is squashed only where root is.
    assert view("range_map=uid 0 map 0", checked=True).client_id("gid", 0) == MAX_ID
    assert view("all_squash", checked=True).client_id("uid", 5) == MAX_ID


def test_what_an_acl_grants_to_the_identity_of_many_is_granted_to_each_of_them() -> None:
    squashed = view("all_squash,anonuid=7,anongid=8", checked=True)
    everybody = KernelCheckedCaller(ClientId(7), ClientId(8), ServerId(7), ServerId(8))
    assert squashed.acl_out(acl(7, 8), everybody) == acl(7, 8)
    assert not squashed.shows_acl_alike(acl(7, 8))  # other callers would be told otherwise
    assert squashed.shows_acl_alike(acl(1, 2))
    in_range = view("range_map=uid 800 899 squash 7 gid 8 map 8", checked=True)
    assert in_range.acl_out(
        acl(7, 8), KernelCheckedCaller(ClientId(850), ClientId(8), ServerId(7), ServerId(8))
    ) == acl(850, 8)
    assert not in_range.shows_acl_alike(acl(7, 8))
    assert in_range.shows_acl_alike(acl(1, 8))
    # A plug-in may show anything: what does not name the caller grants it nothing.
    odd = View(with_methods(client_id=lambda kind, i: 5).policy, checked=True)
    shown = odd.acl_out(acl(1, 2), KernelCheckedCaller(ClientId(5), ClientId(5), ServerId(9), ServerId(9)))
    assert [bits for tag, bits, _ in struct.iter_unpack("<HHI", shown[4:]) if tag in (2, 8)] == [0, 0]
    assert not odd.shows_acl_alike(acl(1, 2))
    broken = View(with_methods(client_id=fail).policy, checked=True)
    assert broken.client_id("uid", 5) == MAX_ID
    own = View(with_methods(client_id=lambda kind, i: 65534 if i > 9 else i).policy, checked=True)
    assert own.show(Attrs("f", 0o100644, 5, 10)) == (0o100644, 5, MAX_ID, 1)


@pytest.mark.parametrize(
    ("text", "uid", "gid", "shown"),
    [
        ("no_root_squash", 0, 0, 0o6755),
        ("no_root_squash", 65534, 65534, 0o6755),
        ("root_squash", 1000, 1000, 0o6755),
        ("root_squash", 0, 0, 0o755),  # the client's root is somebody else
        ("root_squash", 65534, 1000, 0o2755),  # so is root
        ("all_squash", 1000, 65534, 0o755),
        ("range_map=uid 1 map 1001", 1001, 50, 0o6755),
        ("range_map=uid 1 map 1001", 1002, 0, 0o755),
        ("range_map=uid 800 999 squash 517", 517, 50, 0o2755),
        ("range_map=uid 1 map 1001 uid 0 squash 1001", 1001, 50, 0o2755),
        ("range_map=gid 5 squash -2", 1001, 5, 0o4755),
        ("range_map=uid 0 squash -2", 65534, 50, 0o2755),
    ],
)
def test_set_id_bits_are_shown_where_they_mean_what_they_say(text: str, uid: int, gid: int, shown: int) -> None:
    def mode_of(kind: int) -> int:
        told = view(text).show(Attrs("f", kind | 0o6755, uid, gid))
        assert told is not None
        return told[0] & 0o7777

    assert mode_of(0o100000) == shown
    assert mode_of(0o040000) == shown | 0o2000  # new files have the directory's group, which runs nothing


@pytest.mark.parametrize(
    ("how", "uid", "gid", "shown"),
    [
        ({}, 1001, 2001, 0o6755),
        ({"entrants": frozenset({7})}, 1001, 2001, 0o755),
        ({"for_all": True}, 1001, 2001, 0o755),
        ({"for_all": True}, 1001, 2002, 0o755),  # a further group of the identity
        ({"for_all": True}, 1002, 2001, 0o4755),
        ({"for_all": True}, 1001, 2003, 0o2755),
    ],
)
def test_set_id_bits_of_an_identity_that_several_callers_have(
    how: dict[str, Any], uid: int, gid: int, shown: int
) -> None:
    fixed = Caller(1001, 2001, frozenset({2001, 2002}))
    told = View(Policy(parse_options("rw")[0]), fixed, **how).show(Attrs("f", 0o106755, uid, gid))
    assert told is not None
    assert told[0] & 0o7777 == shown


def test_set_id_bits_of_plug_ins_that_say_who_is_who() -> None:
    own = with_methods(client_id=lambda kind, i: i)
    assert own.show(Attrs("f", 0o106755, 5, 6)) == (0o100755, 5, 6, 1)
    moved = with_methods(show=lambda attrs: Attrs("f", attrs.mode, 7, attrs.gid))
    assert moved.show(Attrs("f", 0o106755, 5, 6)) == (0o102755, 7, 6, 1)


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view_module, "_MOST_KNOWN", 3)
    monkeypatch.setattr(view_module, "_MOST_GROUPS", 10)


@pytest.mark.usefixtures("little_memory")
def test_what_is_remembered_of_ids_has_a_bound_and_changes_no_answer() -> None:
    mapped = view("range_map=uid 1 9 map 1001")
    memories: list[dict[Any, Any]] = [mapped._identified, mapped._forwarded, mapped._shown, mapped._alike]
    for client in (*range(1, 10), *range(1, 10)):
        server = 1000 + client
        assert mapped.identify(Caller(client, 5, frozenset({5}))) == Caller(server, 5, frozenset({5}))
        assert mapped.server_ids(client, 5) == (server, 5)
        assert mapped.client_ids(server, 5) == (client, 5)
        assert mapped.is_shown_alike(server, 5)
        assert not mapped.is_shown_alike(MAX_ID, 5)  # everybody else's
        assert all(1 <= len(memory) <= 3 for memory in memories)


def test_a_plug_in_may_answer_what_it_was_asked_about() -> None:
    for answer in (with_methods(forward=lambda caller: caller), with_methods(forward=lambda c: c._replace(uid=7))):
        who = answer.identify(ClientCaller(5, 6, frozenset({6})))
        assert type(who) is Caller, "as whom it is served, no longer who asks"


@pytest.mark.usefixtures("little_memory")
def test_the_groups_of_all_who_are_remembered_have_a_bound() -> None:
    plain = view()
    for uid, amount in enumerate((4, 4, 4, 20, 1, 1, 9, 2), 1):
        caller = ClientCaller(uid, 1, frozenset(range(1, amount + 1)))
        assert plain.identify(caller) == Caller(*caller)
        assert caller in plain._identified
        groups = [len(known.groups) for known in plain._identified]
        assert plain._groups == sum(groups)
        assert sum(groups) <= 10 or groups == [20]


def test_who_was_asked_about_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    mapped = view("range_map=uid 1 map 1001")
    asked = []

    def forward(caller: Caller) -> Caller:
        asked.append(caller)
        return Policy.forward(mapped.policy, caller)

    monkeypatch.setattr(mapped.policy, "forward", forward)
    one, other = (Caller(1, gid, frozenset({gid})) for gid in (1, 2))
    for caller in (one, other, one, other):
        assert mapped.identify(caller) == caller._replace(uid=1001)
        assert mapped.server_ids(caller.uid, caller.gid) == (1001, caller.gid)
    assert sorted(asked) == [one, one, other, other]  # once each, by each of the two ways


def test_over_another_cloakfs_mount_anything_may_be_hidden_and_no_promise_holds() -> None:
    lower: Any = object()
    over = view(lower=lower)
    assert over.hides
    assert not over.policy_hides
    assert over.visible(ANN, DIRECTORY)  # as far as the policy goes
    assert over.show(DIRECTORY) == (0o040755, 1002, 50, 1)
    promising = with_methods(visible=lambda caller, attrs: True, same_for_all=lambda attrs: True)
    assert promising.same_for_all(FILE)
    assert not View(promising.policy, lower=lower).same_for_all(FILE)


# -- policies of others ----------------------------------------------------------------------------


def test_a_policy_shows_mode_and_ids_but_no_other_type() -> None:
    masked = with_methods(show=lambda attrs: Attrs("other", 0o120000 | 0o1755, 5, 6, nlink=99))
    assert masked.hides  # it may fail to show something
    assert masked.visible(ANN, FILE)
    assert masked.show(FILE) == (0o100000 | 0o1755, 5, 6, 3)


def test_a_policy_maps_ids_by_its_own_client_id() -> None:
    assert with_methods(client_id=lambda kind, server_id: 5).show(FILE) == (0o100640, 5, 5, 3)


def test_a_primary_group_always_counts() -> None:
    grouped = with_methods(forward=lambda caller: (caller.uid, 77, [50]))
    assert grouped.identify(ANN) == Caller(1001, 77, frozenset({50, 77}))


@pytest.mark.parametrize("answer", [None, (1, 2), 5, (1, 2, 3), (-1, 2, ()), (1, MAX_ID + 1, ()), ("1", 2, ())])
def test_whoever_is_nobody_in_particular_sees_nothing(answer: object) -> None:
    assert with_methods(forward=lambda caller: answer).identify(ANN) is None


@pytest.mark.parametrize("answer", [None, 5, Attrs("f", 0o644, -1, 5), Attrs("f", 0o644, 5, MAX_ID + 1)])
def test_what_cannot_be_shown_is_hidden(answer: object) -> None:
    broken = with_methods(show=lambda attrs: answer)
    assert broken.show(FILE) is None
    assert not broken.visible(ANN, FILE)


@pytest.mark.parametrize("answer", ["1", -1, 2**40, 1.5, None])
def test_ids_that_are_none(answer: object) -> None:
    broken = with_methods(server_id=lambda kind, i: answer, client_id=lambda kind, i: answer)
    assert broken.server_id("uid", 1) is None
    assert broken.client_id("uid", 1) == 65534
    assert broken.show(FILE) is None
    assert not broken.visible(ANN, FILE)


@pytest.mark.parametrize("cause", [KeyError("x"), SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
def test_a_failure_of_any_kind_hides(cause: BaseException) -> None:
    def raising(*args: object) -> Any:
        raise cause

    assert not with_methods(visible=raising).visible(ANN, FILE)
    assert with_methods(show=raising).show(FILE) is None
    assert with_methods(forward=raising).identify(ANN) is None
    assert with_methods(server_id=raising).server_id("gid", 1) is None
    failing = with_methods(client_id=raising)
    assert not failing.visible(ANN, FILE)
    assert failing.client_id("gid", 5) == 65534


def test_an_answer_that_cannot_be_a_truth_value_hides() -> None:
    class Undecided:
        def __bool__(self) -> bool:
            raise TypeError

    assert not with_methods(visible=lambda caller, attrs: Undecided()).visible(ANN, FILE)


def test_only_a_promise_of_the_plug_ins_own_holds_for_all() -> None:
    promising = with_methods(visible=lambda caller, attrs: True, same_for_all=lambda attrs: attrs.name == "f")
    assert promising.same_for_all(FILE)
    assert not promising.same_for_all(DIRECTORY)
    assert not with_methods(visible=lambda caller, attrs: True).same_for_all(FILE)
    assert not view().same_for_all(FILE)  # others know what the built-in policy answers, and for how long


@pytest.mark.parametrize("promise", [fail, lambda attrs: None, lambda attrs: 1, lambda attrs: "no"])
def test_a_promise_that_is_none_is_not_relied_on(promise: Callable[..., Any]) -> None:
    assert not with_methods(same_for_all=promise).same_for_all(FILE)


def test_a_plug_in_that_breaks_the_built_in_mapping_hides_all_until_it_works() -> None:
    policy = type("P", (Policy,), {})()
    good, policy.ids = policy.ids, {}
    broken = View(policy)
    assert broken.forwards_by_mapping
    assert broken.identify(ANN) is None
    assert broken.identify(ANN) is None
    policy.ids = good
    assert broken.identify(ANN) == ANN


def test_what_is_not_the_policys_failure_is_raised_on(caplog: pytest.LogCaptureFixture) -> None:
    def away(*args: object) -> Any:
        raise TimeoutError

    for methods in ({"visible": away}, {"show": away}, {"client_id": away}):
        with pytest.raises(TimeoutError):
            View(with_methods(**methods).policy, not_its_failure=TimeoutError).visible(ANN, FILE)
    with pytest.raises(TimeoutError):
        View(with_methods(forward=away).policy, not_its_failure=TimeoutError).identify(ANN)
    assert caplog.records == []
    # Nothing else is.
    assert not View(with_methods(visible=fail).policy, not_its_failure=TimeoutError).visible(ANN, FILE)
    assert len(caplog.records) == 1


def test_a_fixed_view_with_a_failing_policy_lets_in_root_and_entrants_only() -> None:
    failing = with_methods(client_id=fail)
    fixed = View(failing.policy, ANN, frozenset({33}))
    assert [uid for uid in (0, 33, 1001, 65534) if fixed.admits(uid)] == [0, 33]


def test_a_cause_is_told_once_whatever_its_text(caplog: pytest.LogCaptureFixture) -> None:
    failing = with_methods(visible=fail)
    for number in range(5):
        assert not failing.visible(ANN, Attrs(f"f{number}", 0o100644, 1, 1))
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert record.getMessage().startswith("policy P: visible(Caller(uid=1001,")
    assert record.exc_info is not None
    # Another method, and another line, is another cause.
    assert failing.server_id("uid", 1) == 1
    both = with_methods(visible=fail, server_id=fail)
    both.visible(ANN, FILE)
    both.server_id("uid", 1)
    assert len(caplog.records) == 3


def test_another_line_is_another_cause_though_the_same_one_led_there(caplog: pytest.LogCaptureFixture) -> None:
    def visible(caller: Caller, attrs: Attrs) -> bool:
        return deeper(attrs.name)

    def deeper(name: str) -> bool:
        if name == "f":
            raise ValueError
        raise ValueError

    failing = with_methods(visible=visible)
    for attrs in (FILE, DIRECTORY, FILE, DIRECTORY):
        failing.visible(ANN, attrs)
    assert len(caplog.records) == 2


def test_the_plug_in_is_called_as_the_configuration_calls_it(caplog: pytest.LogCaptureFixture) -> None:
    policy = type("P", (Policy,), {"visible": staticmethod(fail)})(Options(policy="lab.py:Lab"))
    assert not View(policy).visible(ANN, FILE)
    assert caplog.records[0].getMessage().startswith("policy lab.py:Lab: visible(")


def test_there_is_an_end_to_telling(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view_module, "_MAX_CAUSES", 1)
    failing = with_methods(visible=fail, server_id=fail)
    assert not failing.visible(ANN, FILE)
    assert failing.server_id("uid", 1) is None
    assert len(caplog.records) == 1


def test_only_a_plug_in_is_entered_as_the_daemon() -> None:
    entered: list[str] = []

    def visible(_who: Caller, _attrs: Attrs) -> bool:
        return entered == ["daemon"]  # before it was asked

    plug_in = View(with_methods(visible=visible).policy, act_as_daemon=lambda: entered.append("daemon"))
    assert plug_in.visible(ANN, FILE)
    built_in = View(Policy(), act_as_daemon=lambda: entered.append("for nothing"))
    assert built_in.visible(ANN, FILE)
    assert entered == ["daemon"]


def test_a_stranger_in_an_acl_is_never_called_by_the_callers_id() -> None:
    """However large it is: Python has one object for each small number alone."""
    caller = KernelCheckedCaller(ClientId(100_000), ClientId(100_001), ServerId(7), ServerId(8))
    kinds: tuple[tuple[Kind, int, int], ...] = ("uid", 100_000, 7), ("gid", 100_001, 8)
    for kind, own, server in kinds:
        assert caller.named(kind, ServerId(9), ClientId(int(f"{own}"))) is None
        assert caller.named(kind, ServerId(9), ClientId(50)) == 50
        assert caller.named(kind, ServerId(server), ClientId(50)) == own
