"""The calling thread's capabilities: what root may do that others may not (capabilities(7))."""

import contextlib
import ctypes
import struct
from collections.abc import Iterator

from .libc import NR, check, syscall

_CAP_HEADER = struct.pack("Ii", 0x20080522, 0)
CAP_SETUID = 7
CAP_SYS_ADMIN = 21
CAP_SYS_RESOURCE = 24
CAP_SETFCAP = 31

FILE_CAPABILITIES = sum(1 << number for number in (
    0,  # CAP_CHOWN
    1,  # CAP_DAC_OVERRIDE
    2,  # CAP_DAC_READ_SEARCH
    3,  # CAP_FOWNER
    4,  # CAP_FSETID
    9,  # CAP_LINUX_IMMUTABLE
    CAP_SYS_ADMIN,  # `trusted.` and `security.` attributes
    CAP_SYS_RESOURCE,  # quota, reserved blocks
    27,  # CAP_MKNOD
    28,  # CAP_LEASE
    CAP_SETFCAP,
    32,  # CAP_MAC_OVERRIDE
    33,  # CAP_MAC_ADMIN
))  # fmt: skip
"""What makes root more than the owner of root's files, as a bit mask (capabilities(7))."""


def effective_capabilities() -> int:
    """Return the calling thread's effective capabilities as a bit mask (capabilities(7))."""
    data = ctypes.create_string_buffer(24)
    check(syscall(NR["capget"], ctypes.create_string_buffer(_CAP_HEADER), data))
    words = struct.unpack("6I", data.raw)
    return int(words[0] | words[3] << 32)


def set_effective_capabilities(mask: int) -> None:
    """Set the calling thread's effective capabilities; the permitted and inheritable sets stay unchanged."""
    header = ctypes.create_string_buffer(_CAP_HEADER)
    data = ctypes.create_string_buffer(24)
    check(syscall(NR["capget"], header, data))
    words = list(struct.unpack("6I", data.raw))
    words[0] = mask & words[1]
    words[3] = mask >> 32 & words[4]
    check(syscall(NR["capset"], header, ctypes.create_string_buffer(struct.pack("6I", *words))))


@contextlib.contextmanager
def raised(*capabilities: int) -> Iterator[None]:
    """Raise these capabilities for the context; the daemon has dropped them, but may raise them again."""
    before = effective_capabilities()
    set_effective_capabilities(before | sum(1 << number for number in capabilities))
    try:
        yield
    finally:
        set_effective_capabilities(before)
