"""What the guest boots from: busybox, its first process, the kernel's modules, and the present sources of the clone."""

import compileall
import io
import os
import stat
import tarfile
from collections.abc import Iterable, Mapping

from ...clone import ROOT
from .kernels import StockKernel, load_order

MODULES = (
    "virtio_pci", "9pnet_virtio", "9p", "overlay", "nfit", "nd_pmem", "crc32c_generic", "ext4",
    "fuse", "loop", "nfsd", "nfs", "nfsv3", "nfsv4",
)  # fmt: skip
"""What the guest loads, with what they need: first for its own start, then for NFS."""

_SOURCES = ("cloakfs", "cli", "bench")
_HERE = os.path.dirname(os.path.abspath(__file__))
_BUSYBOX = "/bin/busybox"


def archive(kernel: StockKernel, mark: bytes) -> bytes:
    """Return the archive for a kernel.

    Args:
        kernel: it.
        mark: the library by which programs mark what is counted.
    """
    with open(os.path.join(kernel.modules, "modules.dep"), encoding="ascii") as file:
        order = load_order(file.read(), list(MODULES))
    files = {
        "init": (0o755, _content(os.path.join(_HERE, "init"))),
        "inside": (0o644, _content(os.path.join(_HERE, "inside"))),
        "mark.so": (0o755, mark),
        "clone.tar": (0o644, _clone()),
        "bin/busybox": (0o755, _content(_BUSYBOX)),
        "modules/order": (0o644, "".join(f"{os.path.basename(name)}\n" for name in order).encode()),
    }
    for name in order:
        files[f"modules/{os.path.basename(name)}"] = (0o644, _content(os.path.join(kernel.modules, name)))
    return newc(("bin", "modules"), files)


def newc(directories: Iterable[str], files: Mapping[str, tuple[int, bytes]]) -> bytes:
    """Return an archive in the format "newc" of cpio(1), which Linux unpacks.

    Args:
        directories: made first.
        files: by name: mode and content.
    """
    entries = [(name, stat.S_IFDIR | 0o755, b"") for name in directories]
    entries += [(name, stat.S_IFREG | mode, content) for name, (mode, content) in files.items()]
    entries.append(("TRAILER!!!", 0, b""))
    out = io.BytesIO()
    for number, (name, mode, content) in enumerate(entries, 1):
        path = name.encode() + b"\0"
        # inode, mode, uid, gid, links, time, size, four device numbers, length of the name, checksum
        fields = (number, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(path), 0)
        out.write(b"070701" + b"".join(b"%08X" % field for field in fields))
        out.write(path + b"\0" * (-(110 + len(path)) % 4))
        out.write(content + b"\0" * (-len(content) % 4))
    return out.getvalue()


def _content(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _clone() -> bytes:
    """Return a tar archive of the sources, with bytecode: to compile them takes long in the guest."""
    for name in _SOURCES:
        compileall.compile_dir(os.path.join(ROOT, name), quiet=2)
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name in _SOURCES:
            tar.add(os.path.join(ROOT, name), os.path.join(ROOT, name).lstrip("/"), filter=_wanted)
    return out.getvalue()


def _wanted(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
    info.uid = info.gid = 0
    info.uname = info.gname = "root"
    return None if info.name == os.path.join(ROOT, "bench", "results").lstrip("/") else info
