"""The source package that is built: pv, as Debian has it; small, plain C, with a configure script by autoconf."""

import hashlib
import io
import os
import tarfile

from ..debiansource import NoSource, download
from ..tree import generated_package
from .experiment import Unavailable

NAME = "pv 1.6.20"
_FILE = "pv_1.6.20.orig.tar.bz2"
_SHA256 = "e831951eff0718fba9b1ef286128773b9d0e723e1fbfae88d5a3188814fdc603"
_CACHE = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", "..", ".cache", "sources"))

# For --quick: one check by the compiler, of which configure scripts make several hundred.
_CONFIGURE = b"""#!/bin/sh -e
echo 'int main(void) { return 0; }' >conftest.c
cc -o conftest conftest.c
./conftest
rm -f conftest conftest.c
"""


def package() -> bytes:
    """Return the package, from the cache if it is there.

    Raises:
        Unavailable: it can be had neither from the cache nor from Debian.
    """
    path = os.path.join(_CACHE, _FILE)
    if not os.path.exists(path):
        os.makedirs(_CACHE, exist_ok=True)
        try:
            download("pv", _CACHE)
        except NoSource as exc:
            raise Unavailable(f"{exc}; put {_FILE} into {_CACHE}") from exc
    try:
        with open(path, "rb") as file:
            content = file.read()
    except FileNotFoundError as exc:
        raise Unavailable(f"this Debian has no {_FILE}; put it into {_CACHE}") from exc
    if hashlib.sha256(content).hexdigest() != _SHA256:
        raise Unavailable(f"{path}: not the expected file; remove it")
    return content


def tiny_package() -> bytes:
    """Return a package that is built within a second, and has a configure script nevertheless."""
    out = io.BytesIO(generated_package(2))
    with tarfile.open(fileobj=out, mode="r:gz") as archive:
        members = {member.name: archive.extractfile(member).read() for member in archive}  # type: ignore[union-attr]
    members["package/configure"] = _CONFIGURE
    members["package/Makefile"] += b"clean:\n\trm -f program *.o\n"
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:bz2") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(content), 0o755 if name.endswith("configure") else 0o644
            archive.addfile(info, io.BytesIO(content))
    return out.getvalue()
