"""Linux system calls that Python lacks, and what the kernel reports in /proc; nothing about views or callers.

The system calls themselves are exported as names of this package.
"""

from .capabilities import (
    CAP_SETFCAP,
    CAP_SETUID,
    CAP_SYS_ADMIN,
    CAP_SYS_RESOURCE,
    FILE_CAPABILITIES,
    effective_capabilities,
    raised,
    set_effective_capabilities,
)
from .credentials import (
    ANY_CREDENTIALS,
    FEW_GROUPS,
    MOST_LONG,
    ROOT,
    Credentials,
    act_as_daemon,
    as_daemon,
    set_daemon_credentials,
)
from .mounting import (
    MNT_DETACH,
    MS_BIND,
    MS_DIRSYNC,
    MS_NOATIME,
    MS_NODEV,
    MS_NODIRATIME,
    MS_NOEXEC,
    MS_NOSUID,
    MS_NOSYMFOLLOW,
    MS_POSIXACL,
    MS_RDONLY,
    MS_RELATIME,
    MS_REMOUNT,
    MS_SYNCHRONOUS,
    clone_tree,
    clone_writable,
    detach_mount,
    kernel_version,
    may_delegate_writing,
    may_lease,
    mount,
    umount,
)
from .syscalls import (
    AT_HANDLE_FID,
    FALLOC_FL_KEEP_SIZE,
    FMODE_EXEC,
    RENAME_EXCHANGE,
    RENAME_NOREPLACE,
    RWF_NOWAIT,
    SpecialTime,
    Stat,
    btrfs_top,
    fallocate,
    fstat,
    getdents,
    is_append_only,
    may_access,
    name_to_handle,
    open_by_handle,
    renameat2,
    require_access,
    statx,
    statx_if_there,
    utimens,
    xfs_uuid,
)
from .threads import apart, in_main_thread, umask

__all__ = [
    "ANY_CREDENTIALS", "AT_HANDLE_FID", "CAP_SETFCAP", "CAP_SETUID", "CAP_SYS_ADMIN", "CAP_SYS_RESOURCE",
    "FALLOC_FL_KEEP_SIZE", "FEW_GROUPS", "FILE_CAPABILITIES", "FMODE_EXEC", "MNT_DETACH", "MOST_LONG", "MS_BIND",
    "MS_DIRSYNC", "MS_NOATIME", "MS_NODEV", "MS_NODIRATIME", "MS_NOEXEC", "MS_NOSUID", "MS_NOSYMFOLLOW",
    "MS_POSIXACL", "MS_RDONLY", "MS_RELATIME", "MS_REMOUNT", "MS_SYNCHRONOUS", "RENAME_EXCHANGE",
    "RENAME_NOREPLACE", "ROOT", "RWF_NOWAIT", "Credentials", "SpecialTime", "Stat", "act_as_daemon", "apart",
    "as_daemon", "btrfs_top", "clone_tree", "clone_writable", "detach_mount", "effective_capabilities", "fallocate",
    "fstat", "getdents", "in_main_thread", "is_append_only", "kernel_version", "may_access",
    "may_delegate_writing", "may_lease", "mount",
    "name_to_handle", "open_by_handle", "raised", "renameat2", "require_access", "set_daemon_credentials",
    "set_effective_capabilities", "statx", "statx_if_there", "umask", "umount", "utimens", "xfs_uuid",
]  # fmt: skip
