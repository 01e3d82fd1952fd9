"""A loop device that gives a mount an identity of its own, which outlives the mount.

nfs-ganesha puts the identity of a file system into its file handles: the UUID that libblkid finds on its block device,
or else st_dev, which is new for each FUSE mount. So a mount that it exports is made with the type `fuseblk` on a loop
device, over a file that has nothing but the superblock of an ext2 file system with a UUID. (statfs(2)'s f_fsid would
do, too, but FUSE has none; `Filesystem_Id` is only what clients are shown.)
"""

import errno
import fcntl
import os
import struct
import uuid

from . import ownfiles

_SIZE = 64 * 1024
_UUID_AT = 1024 + 104

_LOOP_CTL_GET_FREE = 0x4C82
_LOOP_CONFIGURE = 0x4C0A
_LO_FLAGS_AUTOCLEAR = 4
_ATTEMPTS = 20


def identify(path: str) -> uuid.UUID:
    """Turn the file at `path` into an image with a random UUID, unless it is one already; return the UUID.

    Raises:
        OSError: it cannot be read or written.
    """
    try:
        with ownfiles.open(path, "rb") as file:
            data = file.read()
    except FileNotFoundError:
        data = b""
    if len(data) != _SIZE:
        identity = uuid.uuid4()
        # The superblock of ext4(5) begins at 1024. This one has no blocks, so it cannot be mounted.
        superblock = bytearray(1024)
        struct.pack_into("<H", superblock, 56, 0xEF53)
        superblock[104:120] = identity.bytes
        superblock[120:136] = b"cloakfs".ljust(16, b"\0")
        data = bytes(1024) + superblock + bytes(_SIZE - 2048)
        ownfiles.replace(path, data, durable=True)
    return uuid.UUID(bytes=data[_UUID_AT : _UUID_AT + 16])


def attach(path: str) -> tuple[str, int]:
    """Set up a loop device over the image at `path`; the device goes away with its last user.

    Returns:
        the path of the device, and a descriptor to close once it is mounted.

    Raises:
        OSError: this machine has no loop devices, or none is available.
    """
    image = ownfiles.open_fd(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        control = ownfiles.open_fd("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
        try:
            for attempt in range(_ATTEMPTS):
                device = f"/dev/loop{fcntl.ioctl(control, _LOOP_CTL_GET_FREE)}"
                loop = ownfiles.open_fd(device, os.O_RDWR | os.O_CLOEXEC)
                try:
                    # struct loop_config: fd, block size (the kernel's choice), then loop_info64: lo_flags.
                    config = struct.pack("=II52xI172x8x64x", image, 0, _LO_FLAGS_AUTOCLEAR)
                    fcntl.ioctl(loop, _LOOP_CONFIGURE, config)
                    # For minutes, libblkid trusts what it once read from a device, unless the device node changes.
                    ownfiles.utime(device)
                except BaseException as exc:
                    os.close(loop)
                    # Another process took the device.
                    if isinstance(exc, OSError) and exc.errno == errno.EBUSY and attempt + 1 < _ATTEMPTS:
                        continue
                    raise
                return device, loop
            raise AssertionError("the last attempt raises")
        finally:
            os.close(control)
    finally:
        os.close(image)
