"""What is measured: the bare tree, bindfs, and cloakfs with different policies."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

from cloakfs.mounted import RUN_DIR, STATE_DIR, mount_key

WORKER, OWNER = 1500, 1501
"""Server ids: who works, and whose the files are."""

_SHIFT = 50000
"""What the mapped peers' clients have to add."""

_PATIENCE = 10.0


@dataclass(frozen=True, slots=True)
class Peer:
    """A directory to work in, who works there, and the daemon behind it (None: the kernel alone)."""

    name: str
    path: str
    uid: int
    daemon: int | None


def definitions(count: int) -> str:
    """`count` range-map and `count` cloak definitions, half for users and half for groups.

    Worker and owner fall to the last of each. The owner's files are visible because of their "other" bits, which
    have to be looked at, whereas owners would see their own files in any case.
    """
    maps, cloaks = [], []
    for kind in ("uid", "gid"):
        for i in range(count // 2 - 1):
            maps.append(f"{kind} {100000 + 10 * i} {100009 + 10 * i} map {200000 + 10 * i}")
            cloaks.append(f"{kind} +007 {200000 + 10 * i} {200009 + 10 * i}")
        maps.append(f"{kind} {WORKER + _SHIFT} {OWNER + _SHIFT} map {WORKER}")
        cloaks.append(f"{kind} +007 {WORKER} {OWNER}")
    return f"range_map={' '.join(maps)},cloak_list={' '.join(cloaks)}"


def _is_mounted(path: str) -> bool:
    with open("/proc/self/mounts", encoding="utf-8") as mounts:
        return any(line.split()[1] == path for line in mounts)


@contextlib.contextmanager
def bindfs(name: str, source: str, target: str, *, cached: bool) -> Iterator[Peer]:
    """Debian's bindfs, mapping the same two users and groups."""
    ids = [f"{at}{server}/{at}{server + _SHIFT}" for at in ("", "@") for server in (WORKER, OWNER)]
    command = ["bindfs", "-f", f"--map={':'.join(ids)}"]
    if not cached:
        command += ["-o", "attr_timeout=0,entry_timeout=0,negative_timeout=0"]
    # In sessions of their own: Ctrl-C is for the benchmark, which then ends them.
    process = subprocess.Popen([*command, source, target], start_new_session=True)
    try:
        deadline = time.monotonic() + _PATIENCE
        while not _is_mounted(target):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"bindfs did not mount (exit status {process.returncode})")
            time.sleep(0.01)
        yield Peer(name, target, WORKER + _SHIFT, process.pid)
    finally:
        _unmount(["umount", target], target)
        process.terminate()
        process.wait(_PATIENCE)


@contextlib.contextmanager
def cloakfs(name: str, source: str, target: str, options: str, uid: int) -> Iterator[Peer]:
    """cloakfs with the given options."""
    command = [sys.executable, "-m", "cloakfs_cli.main"]
    key = mount_key(source, target)
    try:
        subprocess.run([*command, "mount", source, target, "-o", options], check=True, start_new_session=True)
        with open(os.path.join(RUN_DIR, f"{key}.json"), encoding="utf-8") as file:
            pid = int(json.load(file)["pid"])
        yield Peer(name, target, uid, pid)
    finally:
        _unmount([*command, "umount", target], target)
        shutil.rmtree(os.path.join(STATE_DIR, key), ignore_errors=True)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(RUN_DIR, f"{key}.log"))


def _unmount(command: list[str], target: str) -> None:
    """Unmount; a worker that was just ended may be in there for a moment."""
    deadline = time.monotonic() + _PATIENCE
    while _is_mounted(target):
        done = subprocess.run(command, capture_output=True, text=True, check=False, start_new_session=True)
        if done.returncode and time.monotonic() > deadline:
            raise RuntimeError(f"{target} cannot be unmounted: {done.stderr}")
        time.sleep(0.01)


def all_peers(stack: contextlib.ExitStack, work: str, source: str) -> list[Peer]:
    """Every peer at once, over the same tree, until `stack` is closed."""

    def place(name: str) -> str:
        path = os.path.join(work, name)
        os.mkdir(path)
        return path

    peers = [Peer("bare", source, WORKER, None)]
    if shutil.which("bindfs"):
        peers.append(stack.enter_context(bindfs("bindfs, caches 0", source, place("bindfs-0"), cached=False)))
        peers.append(stack.enter_context(bindfs("bindfs, default", source, place("bindfs"), cached=True)))
    peers.append(stack.enter_context(cloakfs("cloakfs, null", source, place("null"), "no_root_squash", WORKER)))
    for count in (10, 100, 1000):
        options, target = definitions(count), place(f"policy-{count}")
        peers.append(stack.enter_context(cloakfs(f"cloakfs, {count}", source, target, options, WORKER + _SHIFT)))
    return peers
