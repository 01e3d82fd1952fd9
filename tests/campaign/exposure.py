"""Measures what `cloakfs exposure` takes for a large tree: time, and memory.

A tree of many users' homes lies on a tmpfs. Each user has ten directories of several modes, with a hundred files of
several modes in each, one of them with an ACL. Two entries export it; for --diff, they are compared with two others.
With --mixed, files and directories have any owner and mode, so that hardly two of them are alike.
"""

import argparse
import contextlib
import json
import os
import random
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.mount.conftest import COMMAND

FIRST_USER = 3000
IN_EACH = 100  # files in a directory
DIRECTORIES = 10  # in a home
FILE_MODES = (0o600, 0o640, 0o644, 0o664, 0o755)
DIRECTORY_MODES = (0o700, 0o750, 0o755)

MAPPED = "range_map = uid 1000 9999 map 1000 gid 1000 9999 map 1000"
CLOAKED = "cloak_list = uid +077 1000 9999"
ENTRIES = {
    "old": "{tree} lab.example.org(rw, {mapped}, {cloaked}) 10.0.0.0/8(ro, {cloaked})\n",
    "new": "{tree} lab.example.org(rw, {mapped}) 10.0.0.0/8(rw, {cloaked})\n",
}

# What the command may take for a million files (docs/exposure.md).
MOST_MIB = 500
MOST_SECONDS = 300  # of processor time


def make_tree(top: str, files: int, *, mixed: bool) -> None:
    """Make homes with so many files."""
    chance = random.Random(1)
    for home in range(files // (DIRECTORIES * IN_EACH)):
        uid = FIRST_USER + home
        for directory in range(DIRECTORIES):
            path = os.path.join(top, f"{home:04}", f"{directory:02}")
            os.makedirs(path)
            for number in range(IN_EACH):
                owner = (uid, uid) if not mixed else (chance.randrange(3000, 4000), chance.randrange(3000, 4000))
                fd = os.open(os.path.join(path, f"{number:03}"), os.O_CREAT | os.O_WRONLY)
                os.write(fd, b"text")
                os.fchown(fd, *owner)
                os.fchmod(fd, chance.randrange(0o1000) if mixed else FILE_MODES[number % len(FILE_MODES)])
                os.close(fd)
            _give(path, uid, chance.randrange(0o1000) if mixed else DIRECTORY_MODES[directory % len(DIRECTORY_MODES)])
            os.setxattr(os.path.join(path, "000"), "system.posix_acl_access", _acl(uid + 1))
        _give(os.path.dirname(path), uid, 0o755)


def _acl(uid: int) -> bytes:
    """An ACL by which a further user may read."""
    none = 2**32 - 1
    entries = [(1, 6, none), (2, 4, uid), (4, 4, none), (0x10, 4, none), (0x20, 0, none)]
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)


def _give(path: str, uid: int, mode: int) -> None:
    os.chown(path, uid, uid)
    os.chmod(path, mode)


def measure(*arguments: str) -> dict[str, float]:
    """Run `cloakfs exposure` with these arguments; return what it took."""
    began = time.monotonic()
    with subprocess.Popen([*COMMAND, "exposure", *arguments], stdout=subprocess.DEVNULL) as process:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode not in (0, 3):
        raise SystemExit(f"exposure: the command failed with status {process.returncode}")
    return {
        "seconds": time.monotonic() - began,
        "seconds of processor time": usage.ru_utime + usage.ru_stime,
        "MiB": usage.ru_maxrss / 1024,
    }


def main() -> int:
    """Run the campaign; the exit status is 1 if the command took too much."""
    parser = argparse.ArgumentParser(prog="scripts/campaign exposure", description=__doc__)
    parser.add_argument("--files", type=int, default=1_000_000)
    parser.add_argument("--mixed", action="store_true", help="any owners and modes")
    parser.add_argument("--json", action="store_true")
    words = parser.parse_args()
    figures: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(prefix="cloakfs-campaign-") as base, contextlib.ExitStack() as stack:
        tree = os.path.join(base, "tree")
        os.mkdir(tree)
        subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=755,nr_inodes=0", "cloakfs-campaign", tree], check=True)
        stack.callback(subprocess.run, ["umount", tree], check=True)
        make_tree(tree, words.files, mixed=words.mixed)
        if not words.json:
            print(f"exposure: {words.files:,} files", flush=True)
        for name, text in ENTRIES.items():
            Path(base, f"{name}.exports").write_text(text.format(tree=tree, mapped=MAPPED, cloaked=CLOAKED))
        old, new = (os.path.join(base, f"{name}.exports") for name in ENTRIES)
        for arguments in ((old,), ("--diff", old, new), ("--html", os.path.join(base, "page.html"), old)):
            what = " ".join(word for word in arguments if not word.startswith(base)) or "report"
            figures[what] = measure(*arguments)
            if not words.json:
                print(
                    f"{what}: " + ", ".join(f"{figure:.0f} {unit}" for unit, figure in figures[what].items()),
                    flush=True,
                )
    if words.json:
        print(json.dumps(figures))
    return int(
        any(taken["MiB"] > MOST_MIB or taken["seconds of processor time"] > MOST_SECONDS for taken in figures.values())
    )


if __name__ == "__main__":
    sys.exit(main())
