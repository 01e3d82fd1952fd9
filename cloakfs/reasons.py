"""The rules behind a decision, in words: for `cloakfs explain`, `table`, `status` and `exposure`.

Permissions are checked by the daemon, which has the real tree check them as the identity that the caller has on the
server; with `default_permissions`, the kernel compares what is shown (mode bits, ids and ACLs) with the ids and groups
of the process that calls, as well. `who_checks` says which of them does.
"""

from .cloak import Verdict
from .exportmode import Server
from .identity import Caller, ClientId, ServerId
from .mapping import Kind
from .policy import Attrs, Policy, is_built_in
from .view import View


def plugin_rule(policy: Policy) -> str:
    """Return what stands in place of a rule where a plug-in decides."""
    return f"plug-in {policy.options.policy}"


def lower_rule(mount: str) -> str:
    """Return what stands in place of a rule where the lower mount, which is at `mount`, hides an object."""
    return f"hidden by the lower mount, {mount}"


def forward_rule(policy: Policy, kind: Kind, client_id: ClientId) -> str:
    """Return what decides the server id of a caller's `client_id`: a definition, or why none applies."""
    if not policy.forwards_by_mapping:
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
    if not policy.shows_by_mapping:
        return plugin_rule(policy)
    definition = policy.ids[kind].reverse_definition_of(server_id)
    if definition is not None:
        return str(definition)
    return "in no definition: nobody" if policy.ids[kind].closed else "unchanged"


def reason_of(
    policy: Policy, caller: Caller, attrs: Attrs, verdicts: list[Verdict], *, is_root: bool, is_shown: bool
) -> str:
    """Return why `caller` sees an object, or does not, in words.

    Args:
        policy: the policy.
        caller: the identity, in server ids.
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
    if caller.uid == attrs.uid:
        return "owners see their own files"
    if caller.uid in policy.cloak.exempt:
        return f"server uid {caller.uid} is exempt"
    return "; ".join(map(describe, verdicts)) or "no definition selects it"


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


def difference(view: View, groups: str | None) -> str:
    """Return why the kernel may come to another result than the daemon; "" if it provably does not.

    Where it does not, the kernel refuses nothing that the daemon would grant, except to a squashed root without
    capabilities, or with group 0. It may grant root what the daemon then refuses.

    Args:
        view: any of the mount's views.
        groups: the option `groups=`; None if it is not given.
    """
    if view.fixed is not None:
        return "a fixed view has ids and groups of its own"
    if view.lower is not None:
        return "the lower mount has ids of its own"
    if not view.maps_by_tables:
        return "the plug-in decides about ids, groups and modes"
    if not all(ids.keeps_ids() for ids in view.policy.ids.values()):
        return "ids are mapped"
    if groups not in (None, "proc"):
        return f"groups={groups} gives callers other groups than their processes have"
    return ""


def who_checks(view: View, groups: str | None, *, by_kernel: bool, exported: bool, has_unseen: bool = False) -> str:
    """Return one line that says who checks permissions in a mount.

    Args:
        view: any of its views.
        groups: the option `groups=`; None if it is not given.
        by_kernel: whether it has `default_permissions`.
        exported: whether an NFS server exports it, which decides about `default_permissions`.
        has_unseen: whether there are callers whose groups and capabilities the daemon cannot see.
    """
    checks = _who_checks(view, groups, by_kernel=by_kernel, exported=exported)
    if exported or not has_unseen:
        return checks
    return (
        f"{checks}; callers in other pid namespaces, whom the daemon cannot see, have their primary group alone, "
        "and as root no capabilities"
    )


def _who_checks(view: View, groups: str | None, *, by_kernel: bool, exported: bool) -> str:
    if exported:
        return "checked by the daemon, and by the kernel for its NFS server" if by_kernel else "checked by the daemon"
    differs = difference(view, groups)
    if by_kernel and differs:
        return f"checked by the daemon and the kernel, which may refuse what the daemon would grant: {differs}"
    if by_kernel:
        return "checked by the daemon and the kernel, by the same ids and groups"
    if differs:
        return f"checked by the daemon alone: {differs}"
    return "checked by the daemon alone; the kernel could, too, by the same ids and groups (default_permissions)"


def who_locks(real: bool, server: Server, *, local: bool) -> str:
    """Return in words where the locks of clients hold (fcntl(2), flock(2)).

    Args:
        real: whether they are locks on the real files.
        server: what exports the mount.
        local: whether it has `local_locks`.
    """
    if real:
        return "on the real tree: they hold for other mounts and exports of it, too, and for programs on it"
    if local and server is Server.KNFSD:
        return "within this mount alone: NFSv3 is served, whose locks the kernel refuses on a mount with real ones"
    if local and server is Server.GANESHA:
        return "within this mount alone: so that it is known what clients of nfs-ganesha have locked when it ends"
    return f"within this mount alone ({'local_locks' if local else 'the released pyfuse3 passes none on'})"


def passthrough_in_words(why_not: str) -> str:
    """Return in words which files the kernel reads and writes by itself.

    Args:
        why_not: why none, or none on one file system; "" if nothing is in the way.
    """
    return f"no file ({why_not})" if why_not else "files opened only for writing, and large ones opened for reading"
