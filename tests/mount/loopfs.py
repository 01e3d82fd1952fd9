"""File systems of several kinds for a real tree, which are removed again whatever happens."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from cloakfs import linux

MKFS = {
    "ext4": (["mkfs.ext4", "-q", "-F"], "e2fsprogs", 64),
    "xfs": (["mkfs.xfs", "-q", "-f"], "xfsprogs", 320),
    "btrfs": (["mkfs.btrfs", "-q", "-f"], "btrfs-progs", 128),
}


def require(kind: str) -> None:
    """Skip the test, with the reason, if the kernel or the tools do not support this kind."""
    with open("/proc/filesystems", encoding="utf-8") as known:
        if kind not in known.read().split():
            pytest.skip(f"this kernel has no {kind}")
    if kind in MKFS and not shutil.which(MKFS[kind][0][0]):
        pytest.skip(f"needs {MKFS[kind][0][0]} (Debian: {MKFS[kind][1]})")


def require_disk(path: str, why: str) -> None:
    """Skip the test, with the reason, if `path` is in memory, for example because of TMPDIR."""
    kind = subprocess.run(["stat", "-f", "-c", "%T", path], check=True, capture_output=True, text=True).stdout.strip()
    if kind in ("tmpfs", "ramfs"):
        pytest.skip(f"needs a disk, and {path} is on a {kind}: {why}")


def has_handles(path: str) -> bool:
    """Whether the kernel has handles for what is at `path`, or at least identifiers that it cannot decode."""
    fd = os.open(path, os.O_PATH)
    try:
        for flags in (0, linux.AT_HANDLE_FID):
            with contextlib.suppress(OSError):
                linux.name_to_handle(fd, flags)
                return True
    finally:
        os.close(fd)
    return False


def require_handles(path: str) -> None:
    """Skip the test, with the reason, if it has none."""
    if not has_handles(path):
        pytest.skip(f"this kernel has no handles, not even identifiers (AT_HANDLE_FID), for {path}")


@contextlib.contextmanager
def attached(source: str, target: str, *options: str) -> Iterator[str]:
    """Mount with mount(8) for the duration of a with block."""
    os.makedirs(target, exist_ok=True)
    subprocess.run(["mount", *options, source, target], check=True)
    try:
        yield target
    finally:
        # --lazy detaches the loop device, too, as soon as the last user is gone.
        subprocess.run(["umount", "--lazy", target], check=True)


@contextlib.contextmanager
def filesystem(
    kind: str, base: str, name: str = "", *, mib: int = 0, mkfs: tuple[str, ...] = (), images: str = ""
) -> Iterator[str]:
    """Make a new file system of this kind below `base`, with its image in `images` or `base`; return its root (0777).

    Kinds: ext4, xfs, btrfs, tmpfs, overlay, overlay-nfs (with nfs_export=on).
    """
    target = os.path.join(base, name or kind)
    with contextlib.ExitStack() as stack:
        if kind.startswith("overlay"):
            require("overlay")
            # Its layers need a file system that has handles and lies beside nothing else.
            below = stack.enter_context(filesystem("ext4", base, f"{name or kind}-layers"))
            for layer in ("lower", "upper", "work"):
                os.mkdir(os.path.join(below, layer))
            layers = f"lowerdir={below}/lower,upperdir={below}/upper,workdir={below}/work"
            extra = ",index=on,nfs_export=on" if kind == "overlay-nfs" else ",index=off,nfs_export=off"
            stack.enter_context(attached("overlay", target, "-t", "overlay", "-o", layers + extra))
        elif kind == "tmpfs":
            require(kind)
            stack.enter_context(attached("tmpfs", target, "-t", "tmpfs", "-o", f"size={mib or 64}m"))
        else:
            require(kind)
            command, _, least = MKFS[kind]
            image = os.path.join(images or base, f"{name or kind}.img")
            with open(image, "wb") as file:
                file.truncate((mib or least) << 20)
            subprocess.run([*command, *mkfs, image], check=True, capture_output=True)
            stack.enter_context(attached(image, target, "-o", "loop"))
        os.chmod(target, 0o777)
        yield target
