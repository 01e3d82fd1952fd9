"""What is mounted where, as this process sees it."""

import os


def by_id() -> dict[int, tuple[str, str]]:
    """Mount id -> (mount point, file-system type), in the order of mounting, from proc_pid_mountinfo(5)."""
    mounts = {}
    with open("/proc/self/mountinfo", "rb") as file:
        for line in file:
            fields, _, rest = line.partition(b" - ")
            words = fields.split()
            # White space and backslashes are octal escapes, all other bytes are themselves.
            path = words[4].decode("unicode_escape").encode("latin-1")
            mounts[int(words[0])] = (os.fsdecode(path), rest.split()[0].decode())
    return mounts


def by_path() -> dict[str, str]:
    """Mount point -> type of what is mounted there last."""
    return dict(by_id().values())
