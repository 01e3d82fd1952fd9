"""Measures what very many known files cost: memory, listing them, and how long changes above them make others wait.

Ann's files lie below a directory of hers, half of them for all users and half for her alone, so that the kernel
caches all of them. She lists and stats all. Then the directory is changed through the mount and behind it, while Bob
looks his own file up 1,000 times a second, and each time a name that is new to the kernel, in the directory that
Ann's is in. The longest of his waits is reported beside the longest without any change. With --json, figures come as
one object.
"""

import argparse
import contextlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from cloakfs.state.runtime import STATE_DIR
from tests.agents import User
from tests.mount.conftest import Mount, mounted

ANN, BOB = 3001, 3002
OPTIONS = "no_root_squash,cloak_list=uid +077 3000 3999"
IN_EACH = 1000  # files in a directory
FIRST = 10_000  # files of each kind, with which the time of a listing is compared
MODES = {"public": 0o755, "private": 0o700}
LASTING = 6.0  # seconds for which Bob looks
NO_CHANGE = "no change"

# Targets (docs/performance.md): how long others may wait, and how much memory a daemon may take for so many files.
MOST_SECONDS = 0.020
MOST_MIB = {1_000_000: 450}


def make_files(tree: str, name: str, number: int, mode: int) -> None:
    """A directory with so many files of Ann's, in directories of a thousand each."""
    top = os.path.join(tree, name)
    os.mkdir(top)
    made = [top]
    for begin in range(0, number, IN_EACH):
        directory = os.path.join(top, f"{begin:07}")
        os.mkdir(directory)
        made.append(directory)
        for at in range(begin, min(begin + IN_EACH, number)):
            fd = os.open(os.path.join(directory, f"{at:07}"), os.O_CREAT | os.O_WRONLY, mode & 0o666)
            os.fchown(fd, ANN, ANN)
            os.fchmod(fd, mode & 0o666)
            os.close(fd)
    for path in made:
        os.chown(path, ANN, ANN)
        os.chmod(path, mode)


def list_all(top: str) -> float:
    """List and stat all that is below, as Ann; return how many microseconds each took.

    The paths are relative: an absolute one takes a request for each name that not all callers may know of.
    """
    began, count = time.monotonic(), 0
    for _, _, names, directory in os.fwalk(top):
        for name in names:
            os.lstat(name, dir_fd=directory)
            count += 1
    return (time.monotonic() - began) * 1e6 / count


def look(path: str, directory: str, seconds: float) -> dict[str, float]:
    """Look up a file, and new names in a directory, again and again, as Bob; return the longest that each took."""
    until, number = time.monotonic() + seconds, 0
    longest = {"of a file": 0.0, "of a new name beside it": 0.0}
    while time.monotonic() < until:
        number += 1
        for what, where in zip(longest, (path, f"{directory}/{until:f}-{number}"), strict=True):
            began = time.monotonic()
            os.path.lexists(where)
            longest[what] = max(longest[what], time.monotonic() - began)
        time.sleep(0.001)
    return longest


def mib(mount: Mount) -> float:
    """Return the memory of the daemon that is not shared with others (RssAnon), in MiB."""
    for line in Path(f"/proc/{mount.pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) / 1024
    raise AssertionError("the kernel does not say")


def measure(mount: Mount, tree: str, files: int, *, changes: bool) -> dict[str, float]:
    """Return the figures, by what they are of; without `changes`, only what can be known before any."""
    figures: dict[str, float] = {}
    bobs = mount.at("bob", "file")
    with User(ANN) as ann, User(BOB) as bob:

        def watch(what: str, change: Callable[[], object]) -> None:
            bob.start(look, bobs, mount.path, LASTING)
            time.sleep(0.5)
            change()
            for lookup, seconds in bob.answer_within(LASTING + 60).items():
                figures[f"longest wait in ms, {what}, {lookup}"] = seconds * 1000

        for name in MODES:
            figures[f"µs/file, first listing of 10,000, {name}"] = ann.do(list_all, mount.at(f"first-{name}"))
        before = mib(mount)
        for name in MODES:
            figures[f"µs/file, first listing, {name}"] = ann.do(list_all, mount.at("ann", name))
        figures["MiB"] = mib(mount)
        figures["MiB per 100,000 files"] = (figures["MiB"] - before) * 100_000 / files
        if not changes:
            return figures
        watch(NO_CHANGE, lambda: None)
        top = mount.at("ann")

        def behind() -> None:
            for at in range(1000):
                os.chmod(os.path.join(tree, "ann/public/0000000", f"{at:07}"), 0o640)

        all_changes: list[tuple[str, str, Callable[[], object]]] = [  # what, where the files are before, the change
            ("chmod of a directory above all", "ann", lambda: ann.do(os.chmod, top, 0o700)),
            ("chmod back", "ann", lambda: ann.do(os.chmod, top, 0o755)),
            ("rename of that directory", "ann", lambda: ann.do(os.rename, top, f"{top}-2")),
            ("rename back, behind the mount", "ann-2", lambda: os.rename(f"{tree}/ann-2", f"{tree}/ann")),
            ("1,000 changes behind the mount", "ann", behind),
        ]
        for what, where, change in all_changes:
            for name in MODES:  # so that there is something to invalidate
                ann.do(list_all, mount.at(where, name))
            watch(what, change)
    return figures


def main() -> int:
    """Run the campaign."""
    parser = argparse.ArgumentParser(prog="scripts/campaign many", description=__doc__)
    parser.add_argument("--files", type=int, default=100_000)
    parser.add_argument("--on", default=None, help="a directory on the file system to try (default: $TMPDIR)")
    parser.add_argument("--no-changes", action="store_true", help="only list all files, and report the memory")
    parser.add_argument("--json", action="store_true")
    words = parser.parse_args()
    base = tempfile.mkdtemp(prefix="cloakfs-campaign-", dir=words.on)
    os.chmod(base, 0o755)
    tree, path = os.path.join(base, "real"), os.path.join(base, "mnt")
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, base)
        for directory in (tree, path, f"{tree}/ann", f"{tree}/bob"):
            os.mkdir(directory)
        os.chmod(tree, 0o777)
        Path(tree, "bob", "file").touch()
        for name, mode in MODES.items():
            make_files(tree, f"first-{name}", FIRST, mode)
            make_files(f"{tree}/ann", name, words.files // 2, mode)
        for name, uid in (("ann", ANN), ("bob", BOB)):
            for at in (f"{tree}/{name}/file", f"{tree}/{name}"):
                if os.path.exists(at):
                    os.chown(at, uid, uid)
        os.chmod(f"{tree}/bob", 0o700)
        stack.callback(shutil.rmtree, os.path.join(STATE_DIR, Mount(tree, path).key), ignore_errors=True)
        mount = stack.enter_context(mounted(tree, path, "-o", OPTIONS))
        figures = measure(mount, tree, words.files, changes=not words.no_changes)
    if words.json:
        print(json.dumps(figures))
    else:
        print(f"many: {words.files:,} files")
        for what, figure in figures.items():
            print(f"{what}: {figure:.1f}")
    waits = [figure for what, figure in figures.items() if what.startswith("longest wait") and NO_CHANGE not in what]
    return int(
        any(wait > MOST_SECONDS * 1000 for wait in waits) or figures["MiB"] > MOST_MIB.get(words.files, float("inf"))
    )


if __name__ == "__main__":
    sys.exit(main())
