"""How much may be written before the kernel has a process that writes wait for the disk (balance_dirty_pages).

It lets all go on while there are fewer dirty pages than halfway between its two thresholds (Documentation/
admin-guide/sysctl/vm.rst, mm/page-writeback.c). A control group with a limit of memory has thresholds of its own, in
proportion to the memory that it may use for pages of files (cgroup-v2.rst, "Writeback").
"""

import contextlib
import os
import resource

from . import ownfiles

_PAGE = resource.getpagesize()

# By default, the kernel lets go on with 15 % of the memory that can be used for pages of files. This is safely below.
_SHARE_OF_GROUP = 0.05


class DirtyPages:
    """The dirty pages of the machine, and of the control groups that this process is in.

    Args:
        groups: where control groups (version 2) are mounted.
        own: the file that names that of this process (proc(5)).
    """

    def __init__(self, groups: str = "/sys/fs/cgroup", own: str = "/proc/self/cgroup") -> None:
        self._groups = _own_groups(groups, own)

    def room(self) -> int:
        """Return how many bytes all processes together may write now without having to wait; at least 0.

        Raises:
            OSError: /proc/vmstat cannot be read.
        """
        with ownfiles.open("/proc/vmstat", "rb") as file:
            pages = _numbers(file.read())
        freerun = (pages[b"nr_dirty_threshold"] + pages[b"nr_dirty_background_threshold"]) // 2
        rooms = [(freerun - pages[b"nr_dirty"] - pages[b"nr_writeback"]) * _PAGE]
        for group in self._groups:
            limit = _limit(group)
            if limit is not None:
                with contextlib.suppress(OSError):
                    rooms.append(_room_of_group(group, limit))
        return max(0, min(rooms))


def _own_groups(top: str, own: str) -> list[str]:
    """Return the folders of the control groups that this process is in, each of which may get a limit at any time."""
    try:
        with ownfiles.open(own, encoding="utf-8", errors="surrogateescape") as file:
            lines = file.read().splitlines()
    except OSError:
        return []
    inside = next((line.removeprefix("0::").strip("/") for line in lines if line.startswith("0::")), "")
    parts = inside.split("/") if inside else []
    return ["/".join([top, *parts[:count]]) for count in range(1, len(parts) + 1)]


def _limit(group: str) -> int | None:
    limits = []
    for name in ("memory.max", "memory.high"):
        with contextlib.suppress(OSError), ownfiles.open(f"{group}/{name}", encoding="ascii") as file:
            word = file.read().strip()
            if word != "max":
                limits.append(int(word))
    return min(limits, default=None)


def _room_of_group(group: str, limit: int) -> int:
    with ownfiles.open(f"{group}/memory.stat", "rb") as file:
        used = _numbers(file.read())
    return int((limit - used[b"anon"]) * _SHARE_OF_GROUP) - used[b"file_dirty"] - used[b"file_writeback"]


def _numbers(text: bytes) -> dict[bytes, int]:
    words = text.split()
    return dict(zip(words[::2], map(int, words[1::2]), strict=False))


def is_limited_by_itself(device: int) -> bool:
    """Whether the device with this st_dev has a threshold of its own (strict_limit, sysfs-class-bdi). True in doubt.

    Kernels before 6.2 do not say; there, file systems on disks have none.
    """
    path = f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/strict_limit"
    try:
        with ownfiles.open(path, encoding="ascii") as file:
            return file.read().strip() != "0"
    except FileNotFoundError:
        return False
    except OSError:
        return True
