"""The names of options: which there are, which have values, and which set the same thing."""

# What prefetch keeps to: options by the names of `Limits`, those in bytes, and those that are counts.
BYTES = {"prefetch_window": "window", "prefetch_file": "file", "prefetch_total": "total"}
COUNTS = {"prefetch_files": "files", "prefetch_cursors": "cursors"}
LIMITS = BYTES | COUNTS

# Options without a value, one line for those that set the same thing.
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
    *("range_map", "cloak_list", "groups", "policy", "views", "view_access"),
    *("prefetch", *LIMITS),
    *("anonuid", "anongid", "fsid", "sec", "xprtsec", "reexport"),
    "refer replicas",
)
PERHAPS_VALUES = ("mountpoint mp",)  # a value is allowed, not required

FLAG_FAMILY = {name: family for family in _FLAGS for name in family.split()}
FAMILY = {name: family for family in (*_FLAGS, *_VALUES, *PERHAPS_VALUES) for name in family.split()}
# exports(5) lets the last of two contradicting options win. Not so these: it adds up sec, xprtsec and fsid,
# with a meaning for each that Options cannot express, and of two lists dropping one would be a guess.
ONCE = {*_VALUES} - {"anonuid", "anongid", "refer replicas"}
