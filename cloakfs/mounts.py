"""What is mounted where, as this process sees it."""

import os
import select
from collections.abc import AsyncGenerator

import trio


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


async def changes() -> AsyncGenerator[None, None]:
    """Something was mounted or unmounted somewhere, for ever (proc_pid_mounts(5))."""
    with open("/proc/self/mountinfo", "rb") as table, select.epoll() as poll:
        poll.register(table, select.EPOLLPRI)
        while True:
            await trio.lowlevel.wait_readable(poll.fileno())
            poll.poll(0)
            yield
