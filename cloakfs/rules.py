"""The rules behind a decision, in words: for `cloakfs explain`, `table` and `exposure`. Pure."""

from .caller import Caller
from .cloak import Verdict
from .ids import ClientId, ServerId
from .mapping import Kind
from .policy import Attrs, Policy, is_built_in


def plugin_rule(policy: Policy) -> str:
    """Return what stands in place of a rule where a plug-in decides."""
    return f"plug-in {policy.options.policy}"


def forward_rule(policy: Policy, kind: Kind, client_id: ClientId) -> str:
    """Return what decides the server id of a caller's `client_id`: a definition, or why none applies."""
    if not is_built_in(policy, "forward"):
        return plugin_rule(policy)
    definition = policy.ids[kind].definition_of(client_id)
    if definition is not None:
        return str(definition)
    if policy.ids[kind].closed:
        return "in no definition: nobody"
    if policy.options.squash == "all":
        return "all_squash: nobody"
    return "root_squash: nobody" if client_id == 0 and policy.options.squash == "root" else "unchanged"


def reverse_rule(policy: Policy, kind: Kind, server_id: ServerId) -> str:
    """Return what decides the client id that stands for the `server_id` of a file."""
    if not (is_built_in(policy, "show") and is_built_in(policy, "client_id")):
        return plugin_rule(policy)
    definition = policy.ids[kind].reverse_definition_of(server_id)
    if definition is not None:
        return str(definition)
    return "in no definition: nobody" if policy.ids[kind].closed else "unchanged"


def reason_of(
    policy: Policy, who: Caller, attrs: Attrs, verdicts: list[Verdict], *, is_root: bool, is_shown: bool
) -> str:
    """Return why `who` sees an object, or does not, in words.

    Args:
        policy: the policy.
        who: the identity, in server ids.
        attrs: the attributes of the object.
        verdicts: what `CloakList.judge` says of it.
        is_root: whether it is the root of the export.
        is_shown: whether the policy said what it looks like.
    """
    if not is_shown:
        return f"{plugin_rule(policy)} failed"
    if is_root:
        return "the root of an export is always visible"
    if not is_built_in(policy, "visible"):
        return plugin_rule(policy)
    if not policy.hides:
        return "nothing is hidden: there is no cloak_list"
    if who.uid == attrs.uid:
        return "owners see their own files"
    if who.uid in policy.cloak.exempt:
        return f"server uid {who.uid} is exempt"
    if not verdicts:
        return "no definition selects it"
    return "; ".join(map(describe, verdicts))


def describe(verdict: Verdict) -> str:
    """Return a verdict in words: the definition, what it does, and the bits that decide it."""
    met = [
        f"{what} {''.join(letter for letter, bit in zip('rwx', (4, 2, 1), strict=True) if bits & bit)}"
        for what, bits in (("group", verdict.hit_group), ("other", verdict.hit_other))
        if bits
    ]
    specials = zip(("setuid", "setgid", "sticky"), (4, 2, 1), strict=True)
    met += [name for name, bit in specials if verdict.hit_special & bit]
    does = "shows" if verdict.visible else "hides"
    return f"{verdict.definition} {does} it ({', '.join(met) or 'no bit of the mask'} met)"
