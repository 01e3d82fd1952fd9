"""The names of options: which exist, which have values, and which set the same thing."""

# The limits of prefetch: options and the names of their fields in `Limits`, first those in bytes, then the counts.
BYTES = {"prefetch_window": "window", "prefetch_file": "file", "prefetch_total": "total"}
COUNTS = {"prefetch_files": "files", "prefetch_cursors": "cursors"}
LIMITS = BYTES | COUNTS

# Options without a value; those on one line set the same thing.
_FLAGS = (
    "ro rw",
    "root_squash no_root_squash",
    "all_squash no_all_squash",
    "no_client_cache",
    "secure insecure",
    "sync async",
    "wdelay no_wdelay",
    "hide nohide",
    "crossmnt nocrossmnt",
    "subtree_check no_subtree_check",
    "auth_nlm secure_locks no_auth_nlm insecure_locks",
    "acl no_acl",
    "pnfs no_pnfs",
    "nordirplus",
    "security_label",
    "sign_fh",
)
_VALUES = (
    *("range_map", "cloak_list", "exempt", "groups", "policy", "views", "view_access"),
    *("prefetch", *LIMITS),
    *("probe_alarm", "probe_delay"),
    *("anonuid", "anongid", "fsid", "sec", "xprtsec", "reexport"),
    "refer replicas",
)
PERHAPS_VALUES = ("mountpoint mp",)  # a value is allowed, not required

FLAG_FAMILY = {name: family for family in _FLAGS for name in family.split()}
FAMILY = {name: family for family in (*_FLAGS, *_VALUES, *PERHAPS_VALUES) for name in family.split()}
# In exports(5), the last of two contradicting options wins. These options are an exception: exports(5) combines several
# sec, xprtsec and fsid with a meaning that Options cannot express, and to drop one of two lists would be a guess.
ONCE = {*_VALUES} - {"anonuid", "anongid", "refer replicas"}
