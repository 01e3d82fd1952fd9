"""A guest with a stock kernel: qemu emulates one processor, by software alone, and counts its instructions.

Its time is the number of instructions (`-icount`), one nanosecond each, so that timeouts do not depend on the machine.
"""

import os
import subprocess

from ...clone import ROOT
from ..shared import SharedDirectory
from .initramfs import archive
from .kernels import StockKernel

_HERE = os.path.dirname(os.path.abspath(__file__))
_MIB = 3072
_COUNTS = "counts"

# With these two, the kernel would copy and clear memory byte by byte, and qemu takes each for an instruction.
_PROCESSOR = "max,-erms,-fsrm"


class StockGuest(SharedDirectory):
    """One guest from boot to power-off. Use it as a context manager: whatever happens, its processes end.

    Args:
        kernel: what it boots.
        image: its root (`image.py`).
        command: shell text to run in it as root.
        mib: its memory, in which its files are as well.
    """

    def __init__(self, kernel: StockKernel, image: str, command: str, mib: int = _MIB) -> None:
        super().__init__("cloakfs-stock-", command)
        plugin, mark = (_built(os.path.join(_HERE, name), self.out) for name in ("counts.c", "mark.c"))
        with open(mark, "rb") as file:
            library = file.read()
        initramfs = os.path.join(self.out, "initramfs")
        with open(initramfs, "wb") as file:
            file.write(archive(kernel, library))
        image_bytes = os.path.getsize(image)
        with open(os.path.join(self.out, "qemu.log"), "wb") as log:
            self._process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", "qemu-system-x86_64",
                 "-nodefaults", "-no-user-config", "-nographic", "-no-reboot", "-seed", "1",
                 "-machine", "pc,usb=off,vmport=off,hpet=off,nvdimm=on", "-cpu", _PROCESSOR, "-smp", "1",
                 "-accel", "tcg,thread=single", "-icount", "shift=0,sleep=off",
                 "-m", f"{mib}M,slots=2,maxmem={mib + (image_bytes >> 20) + 1024}M",
                 "-object", f"memory-backend-file,id=image,share=off,readonly=on,mem-path={image},size={image_bytes}",
                 "-device", "nvdimm,memdev=image,unarmed=on",
                 "-virtfs", f"local,path={self.out},mount_tag=out,security_model=none",
                 "-plugin", f"{plugin},out={os.path.join(self.out, _COUNTS)}",
                 "-serial", f"file:{os.path.join(self.out, 'console')}",
                 "-kernel", kernel.vmlinuz, "-initrd", initramfs,
                 "-append", "console=ttyS0 quiet loglevel=3 panic=-1 nokaslr tsc=reliable random.trust_cpu=on "
                            f"lab.root={ROOT}"],
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                process_group=0,  # no session of its own, which would not have the priority of this one
            )  # fmt: skip

    def said(self) -> str:
        """Return what qemu, the kernel and the command have printed so far."""
        return self.read("qemu.log") + super().said()

    def counted(self) -> str:
        """Return what the plugin has written so far (`marks.counts_by_number`)."""
        return self.read(_COUNTS)


def _built(source: str, directory: str) -> str:
    """Build a shared library in a directory; return its path."""
    path = os.path.join(directory, os.path.basename(source).replace(".c", ".so"))
    subprocess.run(["cc", "-O2", "-Wall", "-shared", "-fPIC", "-o", path, source], check=True)
    return path
