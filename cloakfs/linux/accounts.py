"""Whether the user database knows an account, or only fails to say so: the module `pwd` does not tell these apart."""

import ctypes
import os

from .libc import libc

_BUFFER_BYTES = 1 << 20  # more than any record has
_PASSWD_BYTES = 256  # struct passwd has 48 where a pointer has 64 bits


def is_account(user: str) -> bool:
    """Whether the user database has this user name, or uid in decimal (getpwnam_r(3)).

    Raises:
        OSError: it fails to say: a directory service cannot be reached, for example.
    """
    record = ctypes.create_string_buffer(_PASSWD_BYTES)
    buffer = ctypes.create_string_buffer(_BUFFER_BYTES)
    found = ctypes.c_void_p()
    rest = record, buffer, ctypes.c_size_t(len(buffer)), ctypes.byref(found)
    if user.isdecimal():
        code = libc.getpwuid_r(ctypes.c_uint32(int(user)), *rest)
    else:
        code = libc.getpwnam_r(os.fsencode(user), *rest)
    if code:
        raise OSError(code, os.strerror(code))
    return found.value is not None
