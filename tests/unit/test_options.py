"""Each option of exports.d is known in all places that have to know it.

Whoever adds an option adds a row to the tables here. Then the tests say which place does not know it yet.
"""

import ast
import itertools
import re
from dataclasses import dataclass, fields, replace
from pathlib import Path

import pytest

from cloakfs.config.errors import Location
from cloakfs.config.optionnames import FAMILY, ONCE
from cloakfs.config.options import RELOADABLE, Export, Hides, Options, option
from cloakfs.config.parse import parse_options
from cloakfs.config.render import format_export, format_options
from cloakfs.exportmode import LOCAL
from cloakfs.identity import Caller, ServerId
from cloakfs.kernelcache.cachepolicy import CacheCase, MountTraits, TreeMount, evaluate, facts
from cloakfs.nfs.plan import plan
from cloakfs.policy import Attrs, Policy
from cloakfs.reasons import reason_of
from cloakfs.view import View
from tests.property.test_exports_text import FIELDS

TOP = Path(__file__).parents[2]
DOCUMENT = (TOP / "docs/exports.md").read_text()
NAMES = [field.name for field in fields(Options)]

GIVEN = {
    "read_only": "rw",
    "squash": "all_squash",
    "anonuid": "anonuid=5",
    "anongid": "anongid=5",
    "range_map": "range_map = uid 1 9 map 1001",
    "cloak_list": "cloak_list = uid +000 0 -1",
    "exempt": "exempt = 5",
    "no_client_cache": "no_client_cache",
    "groups": "groups=database",
    "policy": "policy=x.py:X",
    "views": "views = ann",
    "view_access": "view_access = 5",
    "prefetch": "prefetch=off",
    "prefetch_limits": "prefetch_total=5M",
    "probe_alarm": "probe_alarm=off",
    "probe_delay": "probe_delay=5",
    "other": "sec=krb5",
}
"""For each field of `Options`, an option that sets it, in the form in which it is printed."""

HIDDEN = {"cloak_list": ("secret", "uid +000 0 -1 hides it (no bit of the mask met)")}
"""For each option that hides something by itself: a name that the one in `GIVEN` hides in `OTHERS`, and the reason."""

ANN = Caller(ServerId(1), ServerId(1), frozenset({ServerId(1)}))
OTHERS = Attrs("secret", 0o100644, ServerId(2), ServerId(2))


@dataclass(frozen=True, slots=True)
class WithNames(Options):
    """Options as they would be if another one hid objects by their names."""

    hide_names: tuple[str, ...] = option((), hides=Hides.MORE, reloads=True)


BY_NAMES = WithNames(hide_names=("secret",))


@dataclass(frozen=True, slots=True)
class WithSet(Options):
    """Options as they would be if another one hid objects by a set of something."""

    hide_all_of: set[str] = option(set, hides=Hides.MORE, reloads=True)  # noqa: RUF009  (as in `Options`)


@dataclass(frozen=True, slots=True)
class WithLevels(Options):
    """Options as they would be if another one hid what lies deeper in the tree than so many levels."""

    hide_below: int | None = option(None, hides=Hides.MORE, reloads=True)


def given(name: str) -> Options:
    return parse_options(GIVEN[name], read_only=True)[0]


def export(options: Options) -> Export:
    return Export("/x", "*", options, Location("f", 1, 1))


def warnings(options: Options) -> str:
    return " ".join(map(str, plan([export(options)], "knfsd", "/srv").warnings))


def hiding(*by: Hides) -> set[str]:
    return {field.name for field in fields(Options) if field.metadata["hides"] in by}


def test_the_tables_are_complete() -> None:
    assert GIVEN.keys() == set(NAMES)
    assert HIDDEN.keys() == hiding(Hides.IDS_AND_MODE, Hides.MORE)


@pytest.mark.parametrize("name", NAMES)
def test_an_option_is_read_and_printed(name: str) -> None:
    options = given(name)
    assert getattr(options, name) != getattr(Options(), name)
    assert GIVEN[name] in format_options(options).split(",")
    assert re.sub(r"\\\n\s*", "", GIVEN[name]) in re.sub(r"\\\n\s*", "", format_export(export(options)))


@pytest.mark.parametrize("name", sorted(FAMILY))
def test_an_option_is_documented(name: str) -> None:
    """Ours have a heading of their own, and those of exports(5) are in the section about these."""
    _, _, others = DOCUMENT.partition("\n## Other options of exports(5)\n")
    headings = "\n".join(line for line in DOCUMENT.splitlines() if line.startswith("###"))
    of_others, _, _ = others.partition("\n## ")
    assert re.search(rf"`[^`]*\b{name}\b[^`]*`", headings + of_others)


def test_which_options_are_given_once_is_documented() -> None:
    _, _, errors = DOCUMENT.partition("\n## Errors\n")
    found = re.search(r"defines an order:\s([^.]*)\.", errors)
    assert found is not None
    assert set(re.findall(r"`([^`]*)`", found[1])) == ONCE


def test_the_text_of_each_option_is_tried() -> None:
    assert FIELDS.keys() == set(NAMES)


def telling_names(option_text: str) -> set[str]:
    """Return names by which a policy might hide objects: of words in the option, and of texts in the policy's code."""
    tree = ast.parse((TOP / "cloakfs/policy.py").read_text())
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    words = {word for word in {*texts, *re.findall(r"[\w.-]+", option_text)} if word and len(word) < 20}
    return {"secret", "other", *words, *(f"a{word}" for word in words), *(f"{word}a" for word in words)}


ATTRIBUTES = [
    (mode, ServerId(uid), ServerId(gid))
    for mode, uid, gid in itertools.product((0o100000, 0o100644, 0o100777), (1, 2, 3), (1, 2, 3))
]


@pytest.mark.parametrize("name", sorted(set(NAMES) - hiding(Hides.IDS_AND_MODE, Hides.MORE, Hides.PLUG_IN)))
def test_what_hides_nothing_hides_nothing(name: str) -> None:
    """Where this fails for an option, `hides` of its field is wrong, and nobody would be warned."""
    policy = Policy(given(name))
    for at, (mode, uid, gid) in itertools.product(telling_names(GIVEN[name]), ATTRIBUTES):
        assert policy.visible(ANN, Attrs(at, mode, uid, gid)), at


@pytest.mark.parametrize("name", sorted(hiding(Hides.IDS_AND_MODE)))
@pytest.mark.parametrize("who", [ANN, Caller(ServerId(3), ServerId(2), frozenset({ServerId(2)}))])
def test_what_goes_by_ids_and_mode_goes_by_nothing_else(name: str, who: Caller) -> None:
    """Such a view asks the cloak_list alone (`View.cloak`), and so must see no less than the policy hides."""
    policy, cloak = Policy(given(name)), View(Policy(given(name))).cloak
    assert cloak is not None
    for mode, uid, gid in ATTRIBUTES:
        admitted = cloak.condition(mode, uid, gid).admits(who.uid, who.groups.__contains__)
        for at in telling_names(GIVEN[name]):
            assert policy.visible(who, Attrs(at, mode, uid, gid)) == admitted, at


@pytest.mark.parametrize("options", [given("cloak_list"), given("policy"), BY_NAMES], ids=["rule", "plug-in", "names"])
def test_clients_that_share_a_cache_are_warned_of(options: Options) -> None:
    """Whatever hides something from some callers, one user of a client may be shown what is another's."""
    assert options.may_hide
    assert "keeps one cache for all of them" in warnings(options)


def test_an_option_is_given_if_its_value_is_not_the_default() -> None:
    assert not WithLevels().may_hide
    assert not WithSet().may_hide
    assert WithSet(hide_all_of={"a"}).may_hide
    assert WithLevels(hide_below=0).may_hide
    assert not WithLevels(hide_below=0).by_ids_and_mode
    assert Policy(WithLevels(hide_below=0)).hides


def test_nothing_is_hidden_otherwise() -> None:
    for name in set(NAMES) - hiding(Hides.IDS_AND_MODE, Hides.MORE, Hides.PLUG_IN):
        options = given(name)
        assert not options.may_hide
        assert options.by_ids_and_mode
        assert not Policy(options).hides
        assert "keeps one cache for all of them" not in warnings(options)


@pytest.mark.parametrize("options", [given("cloak_list"), BY_NAMES], ids=["rule", "names"])
def test_a_view_knows_that_something_is_hidden(options: Options) -> None:
    view = View(Policy(options))
    assert view.hides
    assert view.policy_hides
    found = evaluate(CacheCase(MountTraits(mode=LOCAL), view, TreeMount("/x", "ext4")))
    assert (found.negative, found.negative_at_top) == (0, 0)


def test_what_is_hidden_by_more_than_ids_and_modes_is_not_cached() -> None:
    view = View(Policy(BY_NAMES))
    assert not BY_NAMES.by_ids_and_mode
    assert view.cloak is view.sole_cloak is view.cloak_by_ids is None
    assert not view.same_for_all(OTHERS)
    assert not view.policy.same_for_all(OTHERS)
    found = evaluate(CacheCase(MountTraits(mode=LOCAL), view, TreeMount("/x", "ext4")))
    assert (found.names, found.names_for_one, found.attributes, found.attributes_for_one) == (0, 0, 0, 0)
    assert found.negative_if_complete == 0
    assert not View(Policy(BY_NAMES), ANN).is_steady


@pytest.mark.parametrize("fixed", [None, ANN])
def test_status_says_why_not(fixed: Caller | None) -> None:
    said = facts(MountTraits(fixed=fixed is not None), View(Policy(BY_NAMES), fixed), [TreeMount("/x", "ext4")])
    reasons = {fact.reason for fact in said}
    assert "who sees what does not follow from ids and modes alone" in reasons
    assert not any("plug-in" in reason for reason in reasons)


@pytest.mark.parametrize("name", sorted(HIDDEN))
def test_a_reason_is_given(name: str) -> None:
    policy = Policy(given(name))
    hidden, reason = HIDDEN[name]
    attrs = replace(OTHERS, name=hidden)
    assert not policy.visible(ANN, attrs)
    verdicts = policy.cloak.judge(attrs.mode, attrs.uid, attrs.gid, ANN.uid, ANN.groups)
    assert reason_of(policy, ANN, attrs, verdicts, is_root=False, is_shown=True) == reason


def test_what_a_reload_changes() -> None:
    """The others are of the mount itself."""
    assert set(NAMES) - set(RELOADABLE) == {"read_only", "groups", "views", "view_access", "no_client_cache"}


@pytest.mark.parametrize(
    ("pattern", "allowed"),
    [
        (r"\.cloak_list\b", {"config", "policy.py"}),
        (r"options\.policy is\b|\b(not|if|and|or) (\w+\.)*options\.policy\b", {"config"}),
        (r"\bis_built_in\(", {"policy.py", "view.py", "reasons.py", "mount"}),
        (r"\bcloak is (not )?None.*(lower|forwards_by_mapping)", set()),
    ],
)
def test_no_code_concludes_from_single_options(pattern: str, allowed: set[str]) -> None:
    """What is hidden, and by what, is asked of `Options`, `Policy` and `View`: see CONTRIBUTING.md."""
    sources = [*(TOP / "cloakfs").rglob("*.py"), *(TOP / "cli").rglob("*.py")]
    users = {path.relative_to(TOP) for path in sources if re.search(pattern, path.read_text())}
    assert {str(path) for path in users if path.parts[1] not in allowed} == set()
