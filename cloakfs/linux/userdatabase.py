"""The user database, queried as the daemon (`linux.ownfiles`): it is files, or sockets of directory services.

The functions are those of pwd, grp and os, with their names.
"""

import ctypes
import grp
import os
import pwd

from .credentials import as_daemon
from .libc import libc

getgrgid = as_daemon(grp.getgrgid)
getgrouplist = as_daemon(os.getgrouplist)
getpwall = as_daemon(pwd.getpwall)
getpwnam = as_daemon(pwd.getpwnam)
getpwuid = as_daemon(pwd.getpwuid)
struct_passwd = pwd.struct_passwd

_BUFFER_BYTES = 1 << 20  # more than any record has
_PASSWD_BYTES = 256  # struct passwd has 48 where a pointer has 64 bits


@as_daemon
def is_account(user: str) -> bool:
    """Whether the user database has this user name, or uid in decimal (getpwnam_r(3)).

    The module pwd does not distinguish a missing account from a failure.

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
