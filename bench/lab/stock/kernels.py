"""Stock kernels: Debian's packages, downloaded and unpacked, but not installed."""

import glob
import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from typing import Self

from .setup import CACHE, NoLaboratory, run

KERNELS = {"6.1": "linux-image-amd64", "6.12": "linux-image-6.12-amd64"}
"""By version of Linux: the package of Debian 12 that depends on the newest kernel of that version."""


@dataclass(frozen=True, slots=True)
class StockKernel:
    """A kernel that can be booted.

    Attributes:
        directory: where `vmlinuz` and `modules` are.
        release: such as `6.1.0-56-amd64`.
    """

    directory: str
    release: str

    @classmethod
    def cached(cls, version: str) -> Self | None:
        """Return the kernel of this version if it has been fetched before."""
        directory = os.path.join(CACHE, "kernels", version)
        found = glob.glob(os.path.join(directory, "modules", "*"))
        return cls(directory, os.path.basename(found[0])) if found else None

    @classmethod
    def fetched(cls, version: str) -> Self:
        """Return the kernel of this version; fetch it first if that was never done.

        It stays as it is then, so that later runs can be compared. Remove its directory to get a newer one.

        Raises:
            NoLaboratory: it cannot be downloaded or unpacked.
        """
        if kernel := cls.cached(version):
            return kernel
        directory = os.path.join(CACHE, "kernels", version)
        os.makedirs(os.path.dirname(directory), exist_ok=True)
        with tempfile.TemporaryDirectory(dir=os.path.dirname(directory)) as place:
            package = _downloaded(KERNELS[version], place)
            _unpack(package, os.path.join(place, "kernel"))
            shutil.rmtree(directory, ignore_errors=True)
            os.rename(os.path.join(place, "kernel"), directory)
        kernel = cls.cached(version)
        if kernel is None:
            raise NoLaboratory(f"{KERNELS[version]} has no kernel modules")
        return kernel

    @property
    def vmlinuz(self) -> str:
        """The path of the kernel itself."""
        return os.path.join(self.directory, "vmlinuz")

    @property
    def modules(self) -> str:
        """The directory with the kernel's modules and `modules.dep`."""
        return os.path.join(self.directory, "modules", self.release)


def load_order(modules_dep: str, wanted: list[str]) -> list[str]:
    """Return the files of modules and of what they need, in the order in which they can be loaded.

    What is not in modules.dep is built into the kernel.

    Args:
        modules_dep: the content of that file.
        wanted: the names of modules.
    """
    needs = {}
    for line in modules_dep.splitlines():
        file, _, rest = line.partition(":")
        needs[re.sub(r"\.ko$", "", os.path.basename(file))] = (file, rest.split())
    order: dict[str, None] = {}
    for name in wanted:
        if name in needs:
            file, below = needs[name]
            order.update(dict.fromkeys([*reversed(below), file]))  # the deepest need is the last of the line
    return list(order)


def _downloaded(name: str, place: str) -> str:
    """Download the package that this one depends on; return its path."""
    try:
        package = _newest(name)
        run("apt-get", "-o", "APT::Sandbox::User=root", "download", "-qq", package, cwd=place)
    except NoLaboratory:  # the lists may be old, or not there
        run("apt-get", "update", "-qq")
        package = _newest(name)
        run("apt-get", "-o", "APT::Sandbox::User=root", "download", "-qq", package, cwd=place)
    (path,) = glob.glob(os.path.join(place, "*.deb"))
    return path


def _newest(name: str) -> str:
    said = run("apt-cache", "depends", name)
    found = re.search(r"^ *\|?Depends: (linux-image-\S+)$", said, re.MULTILINE)
    if found is None:
        raise NoLaboratory(f"apt has no package {name}")
    return found[1]


def _unpack(package: str, directory: str) -> None:
    """Make `vmlinuz`, and `modules/RELEASE` with modules that insmod(8) of busybox can load."""
    root = os.path.join(os.path.dirname(package), "root")
    run("dpkg-deb", "-x", package, root)
    library = "lib" if os.path.isdir(os.path.join(root, "lib", "modules")) else "usr/lib"
    (modules,) = glob.glob(os.path.join(root, library, "modules", "*"))
    if packed := glob.glob(os.path.join(modules, "**", "*.ko.xz"), recursive=True):
        run("xz", "--decompress", *packed)
    release = os.path.basename(modules)
    run("depmod", "-b", os.path.join(root, os.path.dirname(library)), release)
    os.makedirs(os.path.join(directory, "modules"))
    shutil.move(os.path.join(root, "boot", f"vmlinuz-{release}"), os.path.join(directory, "vmlinuz"))
    shutil.move(modules, os.path.join(directory, "modules", release))
