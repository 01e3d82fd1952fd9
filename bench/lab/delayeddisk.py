"""A disk in the guest's memory that takes a given time for each command: Linux's scsi_debug."""

import contextlib
import glob
import os
import time
from collections.abc import Iterator

from .nfshost import sh

_MODULE = "scsi_debug"
_DISKS = "/sys/bus/pseudo/drivers/scsi_debug/adapter0/host*/target*/*/block/*"
_PATIENCE = 20.0


@contextlib.contextmanager
def delayed_disk(mib: int, microseconds: int) -> Iterator[str]:
    """Make an empty disk, for as long as it is needed; give its device, such as `/dev/sda`.

    Args:
        mib: size.
        microseconds: how long each command takes, beside what the guest needs for it.

    Raises:
        RuntimeError: the guest's kernel has no such disk.
    """
    with open("/proc/cmdline", encoding="utf-8") as file:
        (folder,) = (word.partition("=")[2] for word in file.read().split() if word.startswith("lab.modules="))
    module = next(glob.iglob(f"/host{folder}/**/{_MODULE}.ko", recursive=True), None)
    if module is None:
        raise RuntimeError(f"the guest's kernel has no {_MODULE}")
    sh("insmod", module, f"dev_size_mb={mib}", f"ndelay={microseconds * 1000}")
    try:
        yield _appeared()
    finally:
        sh("rmmod", _MODULE)


def _appeared() -> str:
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline:
        for disk in glob.iglob(_DISKS):
            device = f"/dev/{os.path.basename(disk)}"
            if os.path.exists(device):
                return device
        time.sleep(0.05)
    raise RuntimeError(f"the disk of {_MODULE} has not appeared")
