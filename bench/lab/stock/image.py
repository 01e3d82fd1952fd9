"""The image of the guest's root: programs of the host, and the clone's virtual environment, in an ext4 file system.

The guest gets it as an NVDIMM, so that it never waits for the host when it reads. The sources of the clone are not in
it, but in what is booted (`initramfs.py`): the image need not be made again when they change.
"""

import glob
import hashlib
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ...clone import ROOT
from .setup import CACHE, GUEST_PACKAGES, NoLaboratory, run

_FORMAT = 1
"""Of images; another one makes all anew."""

_ENVIRONMENT = os.path.join(ROOT, ".venv")

_NOT_NEEDED = re.compile(r"/usr/share/(doc|info|lintian|locale|man)/")

# Of a Python that is not Debian's: what belongs to virtual environments, or to nobody.
_NOT_OF_PYTHON = ("site-packages", "test", "config-*")


@dataclass(frozen=True, slots=True)
class DebianPackage:
    """An installed package.

    Attributes:
        version: its version.
        depends: alternatives for each package that it needs.
        provides: other names of it.
        is_essential: whether Debian requires it on each machine.
    """

    version: str
    depends: tuple[tuple[str, ...], ...]
    provides: tuple[str, ...]
    is_essential: bool


def installed() -> dict[str, DebianPackage]:
    """Return the installed packages by name."""
    fields = ("Package", "Version", "Pre-Depends", "Depends", "Provides", "Essential")
    said = run("dpkg-query", "-W", "-f", "\t".join(f"${{{field}}}" for field in fields) + "\n")
    return parse_packages(said)


def parse_packages(said: str) -> dict[str, DebianPackage]:
    """Return packages by name, from lines of dpkg-query with name, version, what they need and provide, and `yes`."""
    found = {}
    for line in said.splitlines():
        name, version, *needs, provides, essential = line.split("\t")
        found[name] = DebianPackage(
            version,
            tuple(_names(need.split("|")) for field in needs for need in field.split(",") if need.strip()),
            _names(provides.split(",")),
            essential == "yes",
        )
    return found


def _names(words: Iterable[str]) -> tuple[str, ...]:
    """Return the names in words such as `libc6 (>= 2.36)` and `python3:any`."""
    return tuple(word.split("(")[0].strip().partition(":")[0] for word in words if word.strip())


def closure(packages: Mapping[str, DebianPackage], wanted: Iterable[str]) -> list[str]:
    """Return these packages, the essential ones, and all that they need, sorted."""
    providers: dict[str, list[str]] = {}
    for name, package in packages.items():
        for other in (name, *package.provides):
            providers.setdefault(other, []).append(name)
    found: set[str] = set()
    to_do = [*wanted, *(name for name, package in packages.items() if package.is_essential)]
    while to_do:
        name = to_do.pop()
        if name in found or name not in packages:
            continue
        found.add(name)
        to_do += [
            provider for needed in packages[name].depends for one in needed for provider in providers.get(one, [])
        ]
    return sorted(found)


def made_image() -> str:
    """Return the path of the image; make it first if there is none, or not of the present packages and environment.

    Raises:
        NoLaboratory: it cannot be made.
    """
    packages = installed()
    names = closure(packages, GUEST_PACKAGES)
    stamp = _stamp({name: packages[name].version for name in names})
    path, stamp_path = os.path.join(CACHE, "root.ext4"), os.path.join(CACHE, "root.stamp")
    if os.path.exists(path) and _read(stamp_path) == stamp:
        return path
    os.makedirs(CACHE, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as place:
        new = os.path.join(place, "root.ext4")
        _make(names, new)
        os.rename(new, path)  # a guest that runs keeps the old one
    with open(stamp_path, "w", encoding="ascii") as file:
        file.write(stamp)
    return path


def _stamp(versions: Mapping[str, str]) -> str:
    """Return what differs if the image would."""
    inputs = [
        str(_FORMAT), sys.base_prefix, ROOT,
        *(_read(os.path.join(_ENVIRONMENT, name)) for name in ("pyfuse3", "installed", "pyvenv.cfg")),
        *(f"{name} {version}" for name, version in versions.items()),
    ]  # fmt: skip
    return hashlib.sha256("\n".join(inputs).encode()).hexdigest()


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except FileNotFoundError:
        return ""


def _files(names: Iterable[str]) -> list[str]:
    """Return the paths of the packages, and what their installation has made beside them."""
    listed = [line for line in run("dpkg-query", "-L", *names).splitlines() if line.startswith("/") and line != "/."]
    found = dict.fromkeys(_canonical(path) for path in listed if not _NOT_NEEDED.match(f"{path}/"))
    for directory in ("/usr/bin", "/usr/sbin"):
        with os.scandir(directory) as entries:  # alternatives, such as awk, belong to no package
            found.update({e.path: None for e in entries if e.is_symlink() and "alternatives" in os.readlink(e.path)})
    links = [path for path in ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32") if os.path.islink(path)]
    return [*links, *(path for path in found if os.path.lexists(path))]


def _canonical(path: str) -> str:
    """Return the path without symbolic links on the way: packages name `/bin/ls`, which is in `/usr/bin`."""
    return os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))


def _make(names: Iterable[str], path: str) -> None:
    """Make the image in an empty directory, where what goes into it is collected first."""
    root, list_path = os.path.join(os.path.dirname(path), "root"), os.path.join(os.path.dirname(path), "files")
    os.mkdir(root)
    with open(list_path, "w", encoding="utf-8") as file:
        file.writelines(f"{found.lstrip('/')}\0" for found in _files(names))
    whole = ["/etc", _ENVIRONMENT]
    excluded = [f"--exclude={_ENVIRONMENT.lstrip('/')}/share/*", "--exclude=etc/ssh", "--exclude=etc/shadow*"]
    if sys.base_prefix != "/usr":  # otherwise it is Debian's
        library = os.path.join("lib", f"python{sys.version_info.major}.{sys.version_info.minor}")
        for pattern in ("bin/python3*", library, "lib/libpython*"):
            whole += glob.glob(os.path.join(sys.base_prefix, pattern))
        excluded += [f"--exclude={os.path.join(sys.base_prefix, library, name)[1:]}" for name in _NOT_OF_PYTHON]
    pack = shlex.join(["tar", "-C", "/", "--create", "--no-recursion", "--null", f"--files-from={list_path}"])
    pack_whole = shlex.join(["tar", "-C", "/", "--create", *excluded, *(name.lstrip("/") for name in whole)])
    unpack = shlex.join(["tar", "-C", root, "--extract", "--keep-directory-symlink"])
    for command in (pack, pack_whole):
        # Not with pipefail: tar fails because a file has changed, which does not matter.
        run("sh", "-c", f"{command} 2>/dev/null | {unpack}")
    for name in ("proc", "sys", "dev", "run", "tmp", "srv", "mnt", "root", "home", "var/lib", "var/tmp"):
        os.makedirs(os.path.join(root, name), exist_ok=True)
    mib = int(run("du", "--summarize", "--block-size=1M", root).split()[0])
    size = (mib * 5 // 4 + 127) // 64 * 64  # inodes, and rounding
    try:
        run("mke2fs", "-q", "-t", "ext4", "-b", "4096", "-m", "0", "-O", "^has_journal", "-d", root, path, f"{size}M")
    except NoLaboratory as exc:
        raise NoLaboratory(f"the image cannot be made: {exc}") from exc
