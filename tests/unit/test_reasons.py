"""The words for a decision name the definition or option that made it."""

import pytest

from cloakfs.config.parse import parse_options
from cloakfs.identity import Caller, ClientCaller, ClientId, ServerId
from cloakfs.mapping import MAX_ID
from cloakfs.policy import Attrs, Policy
from cloakfs.reasons import forward_rule, lower_rule, passthrough_in_words, reason_of, reverse_rule

ANN = Caller(ServerId(1001), ServerId(50), frozenset({ServerId(50)}))


def policy(text: str) -> Policy:
    return Policy(parse_options(text)[0])


class Plugin(Policy):
    """Decides all by itself."""

    def forward(self, caller: ClientCaller) -> Caller:
        return ANN

    def visible(self, caller: Caller, attrs: Attrs) -> bool:
        return True

    def show(self, attrs: Attrs) -> Attrs:
        return attrs


@pytest.mark.parametrize(
    ("text", "client_id", "rule"),
    [
        ("range_map=uid 1 9 map 1001", 5, "uid 1 9 map 1001"),
        ("range_map=uid 1 9 map 1001", 10, "in no definition: nobody"),
        ("all_squash", 5, "all_squash: nobody"),
        ("rw", 0, "root_squash: nobody"),
        ("rw", 5, "unchanged"),
        ("no_root_squash", 0, "unchanged"),
    ],
)
def test_what_decides_a_server_id(text: str, client_id: int, rule: str) -> None:
    assert forward_rule(policy(text), "uid", ClientId(client_id)) == rule


@pytest.mark.parametrize(
    ("text", "server_id", "rule"),
    [
        ("range_map=uid 1 9 map 1001", 1005, "uid 1 9 map 1001"),
        ("range_map=uid 1 9 map 1001", 5, "in no definition: nobody"),
        ("rw", 5, "unchanged"),
    ],
)
def test_what_decides_a_client_id(text: str, server_id: int, rule: str) -> None:
    assert reverse_rule(policy(text), "uid", ServerId(server_id)) == rule


@pytest.mark.parametrize(
    ("text", "mode", "uid", "reason"),
    [
        ("rw", 0o100600, 1002, "nothing is hidden: there is no cloak_list"),
        ("cloak_list=uid +077 0 -1", 0o100600, 1001, "owners see their own files"),
        ("cloak_list=uid +077 0 -1,exempt=1001", 0o100600, 1002, "server uid 1001 is exempt"),
        ("cloak_list=uid +077 0 -1,exempt=1001", 0o100600, 1001, "owners see their own files"),
        ("cloak_list=uid +077 5", 0o100600, 1002, "no definition selects it"),
        ("cloak_list=uid +077 0 -1", 0o100644, 1002, "uid +077 0 -1 shows it (group r, other r met)"),
        ("cloak_list=uid +077 0 -1", 0o100600, 1002, "uid +077 0 -1 hides it (no bit of the mask met)"),
        (
            "cloak_list=uid -700 0 -1 gid +070 50",
            0o107070,
            1002,
            "uid -700 0 -1 hides it (setuid, setgid, sticky met); gid +070 50 shows it (group rwx met)",
        ),
    ],
)
def test_why_somebody_sees_an_object_or_does_not(text: str, mode: int, uid: int, reason: str) -> None:
    of = policy(text)
    attrs = Attrs("f", mode, ServerId(uid), ServerId(50))
    verdicts = of.cloak.judge(mode, attrs.uid, attrs.gid, ANN.uid, ANN.groups)
    assert reason_of(of, ANN, attrs, verdicts, is_root=False, is_shown=True) == reason
    assert reason_of(of, ANN, attrs, verdicts, is_root=True, is_shown=True) == (
        "the root of an export is always visible"
    )


def test_a_plug_in_is_named_where_it_decides() -> None:
    of = Plugin(parse_options("policy=x.py:X")[0])
    attrs = Attrs("f", 0o100644, ServerId(1), ServerId(1))
    assert forward_rule(of, "uid", ClientId(MAX_ID)) == "plug-in x.py:X"
    assert reverse_rule(of, "uid", ServerId(0)) == "plug-in x.py:X"
    assert reason_of(of, ANN, attrs, [], is_root=False, is_shown=True) == "plug-in x.py:X"
    assert reason_of(of, ANN, attrs, [], is_root=False, is_shown=False) == "plug-in x.py:X failed"


def test_a_lower_mount_is_named_where_it_hides() -> None:
    assert lower_rule("/lower") == "hidden by the lower mount, /lower"


def test_which_files_pass_through() -> None:
    assert passthrough_in_words("") == "files opened only for writing, and large ones opened for reading"
    assert passthrough_in_words("passthrough=off") == "no file (passthrough=off)"
