"""The source package that is built: pv, as Debian has it; small, plain C, with a configure script by autoconf."""

import contextlib
import hashlib
import http.client
import io
import os
import tarfile
import urllib.request

from cloakfs.files import replace

from ..tree import generated_package
from .experiment import Unavailable

NAME = "pv 1.6.20"
_FILE = "pv_1.6.20.orig.tar.bz2"
_SOURCE = f"https://deb.debian.org/debian/pool/main/p/pv/{_FILE}"
_SHA256 = "e831951eff0718fba9b1ef286128773b9d0e723e1fbfae88d5a3188814fdc603"
_CACHE = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", "..", ".cache", "sources"))
_SECONDS = 60.0

# For --quick: it asks the compiler one thing, as configure scripts do several hundred times.
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
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        content = file.read()
        if hashlib.sha256(content).hexdigest() == _SHA256:
            return content
    try:
        with urllib.request.urlopen(_SOURCE, timeout=_SECONDS) as answer:
            content = bytes(answer.read())
    except (OSError, http.client.HTTPException) as exc:
        raise Unavailable(f"{_SOURCE}: {exc}; put the file into {_CACHE}") from exc
    if hashlib.sha256(content).hexdigest() != _SHA256:
        raise Unavailable(f"{_SOURCE}: not the expected file")
    with contextlib.suppress(OSError):  # it is fetched again next time
        os.makedirs(_CACHE, exist_ok=True)
        replace(path, content)
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
