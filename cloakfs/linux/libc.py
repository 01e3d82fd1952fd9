"""How system calls are made: libc's wrappers, the numbers of calls without a wrapper, and errors as `OSError`."""

import ctypes
import os
from collections.abc import Callable

libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
syscall: Callable[..., int] = libc.syscall

# x86-64 and the generic table (arm64, riscv64) differ; both are in the kernel's unistd.h.
_NUMBERS = {
    "x86_64": {
        "setgroups": 116, "setfsuid": 122, "setfsgid": 123, "capget": 125, "capset": 126,
        "getdents64": 217, "name_to_handle_at": 303, "open_by_handle_at": 304, "renameat2": 316,
        "unshare": 272, "open_tree": 428, "fsopen": 430, "fsconfig": 431, "fsmount": 432,
        "close_range": 436, "faccessat2": 439, "mount_setattr": 442,
    },
    "aarch64": {
        "setgroups": 159, "setfsuid": 151, "setfsgid": 152, "capget": 90, "capset": 91,
        "getdents64": 61, "name_to_handle_at": 264, "open_by_handle_at": 265, "renameat2": 276,
        "unshare": 97, "open_tree": 428, "fsopen": 430, "fsconfig": 431, "fsmount": 432,
        "close_range": 436, "faccessat2": 439, "mount_setattr": 442,
    },
}  # fmt: skip
NR = {name: ctypes.c_long(nr) for name, nr in _NUMBERS[os.uname().machine].items()}

AT_EMPTY_PATH = 0x1000


def check(result: int, *path: object) -> int:
    """Turn libc's -1 into an OSError."""
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), *path)
    return result
