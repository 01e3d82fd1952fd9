"""Who checks permissions, in words: the daemon, and with `default_permissions` the kernel as well.

The daemon has the real tree check them, as the identity that the caller has on the server. The kernel compares what is
shown (mode bits, ids and ACLs) with the ids and groups of the process that calls.
"""

from .policy import is_built_in
from .view import View


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
    if view.below is not None:
        return "the mount below has ids of its own"
    if not (view.forwards_by_mapping and view.shows_by_mapping and is_built_in(view.policy, "server_id")):
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
