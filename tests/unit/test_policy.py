"""The built-in policy, and how plug-ins take its place."""

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloakfs.config.options import Options
from cloakfs.config.parse import parse_options
from cloakfs.identity import Caller
from cloakfs.mapping import MAX_ID
from cloakfs.plugin.loader import PolicyError, load_policy
from cloakfs.policy import Attrs, Policy, is_built_in

FILE, DIRECTORY = 0o100000, 0o040000

ids = st.integers(0, MAX_ID)
callers = st.builds(
    lambda uid, gid, more: Caller(uid, gid, frozenset({gid, *more})), ids, ids, st.sets(st.integers(0, 5000))
)
Write = Callable[[str], str]


def options(text: str) -> Options:
    return parse_options(text)[0]


@pytest.fixture
def plugin(tmp_path: Path) -> Write:
    """Writes the file of a plug-in and gives back what `policy=` says for its class P."""

    def write(code: str) -> str:
        (tmp_path / "plug.py").write_text(
            f"from cloakfs.identity import Caller\nfrom cloakfs.policy import Policy\n{code}", "utf-8"
        )
        return f"{tmp_path}/plug.py:P"

    return write


# -- the built-in policy ---------------------------------------------------------------------------


def test_without_options_root_is_squashed_and_nothing_hidden() -> None:
    policy = Policy()
    assert policy.options == Options()
    assert not policy.hides
    assert policy.forward(Caller(0, 0, frozenset({0, 7}))) == Caller(65534, 65534, frozenset({65534, 7}))
    assert policy.forward(Caller(5, 6, frozenset({6, 7}))) == Caller(5, 6, frozenset({6, 7}))


def test_groups_that_map_to_nobody_are_dropped_but_the_primary_one_stays() -> None:
    policy = Policy(options("anongid=99,range_map=gid 1 10 map 101"))
    assert policy.forward(Caller(5, 1, frozenset({1, 2, 11}))) == Caller(5, 101, frozenset({101, 102}))
    assert policy.forward(Caller(5, 11, frozenset({11, 12, 2}))) == Caller(5, 99, frozenset({99, 102}))


@given(callers)
def test_the_identity_is_its_own_primary_group_and_never_gains_groups(caller: Caller) -> None:
    policy = Policy(options("range_map=gid 0 999 map 5000 gid 1000 2000 squash 77"))
    who = policy.forward(caller)
    assert who.gid in who.groups
    assert len(who.groups) <= len(caller.groups)
    assert 65534 not in who.groups - {who.gid}


def test_ids_are_shown_and_stored_through_the_map() -> None:
    policy = Policy(options("anonuid=99,range_map=uid 1 10 map 101"))
    attrs = Attrs("f", FILE | 0o640, 105, 3000, size=9, nlink=2, mtime_ns=1)
    assert policy.show(attrs) == Attrs("f", FILE | 0o640, 5, 3000, size=9, nlink=2, mtime_ns=1)
    assert policy.show(Attrs("f", FILE, 1, 0)).uid == 99
    assert policy.server_id("uid", 5) == 105
    assert policy.server_id("uid", 11) is None
    assert policy.client_id("uid", 105) == 5
    assert policy.client_id("gid", 105) == 105


def test_the_cloak_list_decides_what_is_visible() -> None:
    policy = Policy(options("cloak_list=uid +077 1000 1999"))
    assert policy.hides
    who = Caller(1001, 50, frozenset({50, 51}))
    assert policy.visible(who, Attrs("f", FILE | 0o600, 1001, 0))
    assert not policy.visible(who, Attrs("f", FILE | 0o600, 1002, 51))
    assert policy.visible(who, Attrs("f", FILE | 0o640, 1002, 51))
    assert not policy.same_for_all(Attrs("f", FILE | 0o640, 1002, 51))
    assert policy.same_for_all(Attrs("f", FILE | 0o644, 1002, 51))
    assert policy.same_for_all(Attrs("f", FILE | 0o600, 2000, 51))


def test_nothing_is_hidden_from_exempt_callers() -> None:
    policy = Policy(options("cloak_list=uid +000 1000 1999,exempt=0 34"))
    private = Attrs("f", FILE | 0o644, 1001, 1001)
    assert [policy.visible(Caller(uid, 5, frozenset({5})), private) for uid in (0, 34, 1001, 35)] == [
        True, True, True, False,
    ]  # fmt: skip
    assert not policy.same_for_all(private)
    assert not Policy(options("exempt=0")).hides


# -- access ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("uid", "gid", "mode", "granted"),
    [
        (1, 9, FILE | 0o754, 7),  # the owner
        (1, 9, FILE | 0o077, 0),  # the owner's bits alone count for the owner
        (2, 5, FILE | 0o754, 5),  # the group
        (2, 5, FILE | 0o707, 0),
        (2, 9, FILE | 0o754, 4),  # the others
        (0, 0, FILE | 0o000, 6),  # root
        (0, 0, FILE | 0o001, 7),
        (0, 0, DIRECTORY, 7),
    ],
)
def test_access_to_what_is_about_to_be_made_follows_its_mode(uid: int, gid: int, mode: int, granted: int) -> None:
    attrs = Attrs("new", mode, 1, 5)
    who = Caller(uid, gid, frozenset({gid}))
    assert [asked for asked in range(8) if attrs.accessible(who, asked)] == [
        asked for asked in range(8) if asked & ~granted == 0
    ]


def test_access_to_what_exists_is_the_kernels_answer() -> None:
    asked = []

    def kernel(caller: Caller, mode: int) -> bool:
        asked.append((caller, mode))
        return mode == 4

    who = Caller(1, 1, frozenset({1}))
    attrs = Attrs("f", FILE, 1, 1, _access=kernel)
    assert attrs.accessible(who, 4)
    assert not attrs.accessible(who, 2)
    assert asked == [(who, 4), (who, 2)]


# -- plug-ins --------------------------------------------------------------------------------------


def test_no_plugin() -> None:
    given_options = options("cloak_list=uid +000 0 -1")
    policy = load_policy(None, given_options)
    assert type(policy) is Policy
    assert policy.options is given_options
    assert is_built_in(policy, "visible")


def test_a_small_class_takes_over_what_it_defines(plugin: Write) -> None:
    spec = plugin("class P:\n    def visible(self, caller, attrs):\n        return attrs.name != 'x'\n")
    policy = load_policy(spec, options("range_map=uid 1 10 map 101"))
    who = Caller(1, 1, frozenset({1}))
    assert policy.hides
    assert policy.visible(who, Attrs("y", FILE, 2, 2))
    assert not policy.visible(who, Attrs("x", FILE, 2, 2))
    assert not policy.same_for_all(Attrs("y", FILE, 2, 2))
    assert not is_built_in(policy, "visible")
    assert policy.forward(who).uid == 101
    assert is_built_in(policy, "forward")


def test_a_small_class_without_visible_leaves_hiding_to_the_cloak_list(plugin: Write) -> None:
    spec = plugin("class P:\n    def server_id(self, kind, client_id):\n        return 7\n")
    policy = load_policy(spec, Options())
    assert not policy.hides
    assert policy.same_for_all(Attrs("y", FILE, 2, 2))
    assert policy.server_id("uid", 1) == 7
    assert load_policy(spec, options("cloak_list=uid +000 0 -1")).hides


def test_a_class_with_visible_of_its_own_decides_about_exempt_callers_as_well(plugin: Write) -> None:
    spec = plugin("class P:\n    def visible(self, caller, attrs):\n        return False\n")
    policy = load_policy(spec, options("exempt=0"))
    assert not policy.visible(Caller(0, 0, frozenset({0})), Attrs("y", FILE, 2, 2))


def test_a_class_may_promise_that_an_answer_holds_for_all(plugin: Write) -> None:
    code = (
        "    def visible(self, caller, attrs):\n        return True\n"
        "    def same_for_all(self, attrs):\n        return attrs.name == 'a'\n"
    )
    for head in ("class P:\n", "class P(Policy):\n"):
        policy = load_policy(plugin(head + code), Options())
        assert policy.same_for_all(Attrs("a", FILE, 1, 1))
        assert not policy.same_for_all(Attrs("b", FILE, 1, 1))


def test_a_derived_class_is_asked_though_there_is_no_cloak_list(plugin: Write) -> None:
    spec = plugin("class P(Policy):\n    def visible(self, caller, attrs):\n        return False\n")
    policy = load_policy(spec, Options())
    assert policy.hides
    assert not policy.same_for_all(Attrs("y", FILE, 2, 2))
    assert not policy.visible(Caller(1, 1, frozenset({1})), Attrs("y", FILE, 2, 2))


def test_a_derived_class_that_hides_nothing_more_keeps_the_built_in_promises(plugin: Write) -> None:
    spec = plugin("class P(Policy):\n    def client_id(self, kind, server_id):\n        return 3\n")
    policy = load_policy(spec, Options())
    assert not policy.hides
    assert policy.same_for_all(Attrs("y", FILE, 2, 2))
    assert policy.show(Attrs("y", FILE, 2, 2)) == Attrs("y", FILE, 3, 3)


def test_a_constructor_gets_the_options_if_it_takes_them(plugin: Write) -> None:
    spec = plugin(
        "class P:\n"
        "    def __init__(self, options):\n        self.anonuid = options.anonuid\n"
        "    def server_id(self, kind, client_id):\n        return self.anonuid\n"
    )
    assert load_policy(spec, options("anonuid=42")).server_id("uid", 1) == 42


def test_an_installed_module(plugin: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin("class P:\n    def visible(self, caller, attrs):\n        return False\n")
    package = tmp_path / "some_site"
    package.mkdir()
    (tmp_path / "plug.py").rename(package / "policies.py")
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        policy = load_policy("some_site.policies:P", Options())
        assert not policy.visible(Caller(1, 1, frozenset({1})), Attrs("y", FILE, 1, 1))
    finally:
        for name in ("some_site", "some_site.policies"):
            sys.modules.pop(name, None)


def test_a_file_is_relative_to_the_given_directory_and_read_anew(plugin: Write, tmp_path: Path) -> None:
    for answer in (1, 2):  # within one second, and of the same length
        plugin(f"class P:\n    def server_id(self, kind, client_id):\n        return {answer}\n")
        assert load_policy("plug.py:P", Options(), str(tmp_path)).server_id("uid", 0) == answer
    assert not (tmp_path / "__pycache__").exists()


def test_a_file_may_define_dataclasses(plugin: Write) -> None:
    spec = plugin(
        "from dataclasses import dataclass\n"
        "@dataclass\nclass P:\n    limit: 'int' = 5\n"
        "    def server_id(self, kind, client_id):\n        return 1\n"
    )
    assert load_policy(spec, Options()).server_id("uid", 0) == 1


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("class P(:\n", "SyntaxError: invalid syntax"),
        ("class Q:\n    pass\n", "AttributeError: module 'cloakfs_policy_plug' has no attribute 'P'"),
        ("class P:\n    pass\n", "P has none of the methods forward, visible"),
        ("P = 3\n", "TypeError: 3 is not a callable object"),
        ("class P:\n    def __init__(self):\n        raise RuntimeError('two\\n lines')\n", "RuntimeError: two lines"),
        ("class P(Policy):\n    def __init__(self):\n        pass\n", "does not call super().__init__(options)"),
        ("raise SystemExit('enough')\n", "SystemExit: enough"),
        ("import no_such_module\n", "ModuleNotFoundError: No module named 'no_such_module'"),
    ],
)
def test_what_cannot_be_loaded_is_told_in_one_line(plugin: Write, code: str, says: str) -> None:
    spec = plugin(code)
    with pytest.raises(PolicyError, match=re.escape(says)) as caught:
        load_policy(spec, Options())
    assert str(caught.value).startswith(f"policy={spec}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("spec", ["/no/such/file.py:P", "no_such_package.module:P"])
def test_what_is_not_there_is_named(spec: str) -> None:
    with pytest.raises(PolicyError, match=r"no_such_package|No such file or directory: '/no/such/file\.py'"):
        load_policy(spec, Options())


@pytest.mark.parametrize("spec", ["file.py", "file.py:", "file.py:a-b"])
def test_a_name_without_class_is_refused(spec: str) -> None:
    with pytest.raises(PolicyError, match=r"expected FILE\.py:Class or package\.module:Class"):
        load_policy(spec, Options())
