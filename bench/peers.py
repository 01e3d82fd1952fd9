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

from cloakfs.daemon import RUN_DIR, STATE_DIR, mount_key

SERVER_ID = 1500
"""Whose files are used; ids of the server."""

CLIENT_ID = 51500
"""The same user as the mapped peers know it."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A directory to work in, who works there, and the daemon behind it (None: the kernel alone)."""

    name: str
    path: str
    uid: int
    daemon: int | None


def definitions(count: int) -> str:
    """A policy of `count` range-map and `count` cloak definitions; the caller's are the last."""
    others = count - 1
    uids = [f"uid {100000 + i} map {200000 + i}" for i in range(others)]
    cloaks = [f"uid +007 {200000 + i}" for i in range(others)]
    return (
        f"range_map={' '.join(uids)} uid {CLIENT_ID} map {SERVER_ID} gid 0 -1 map 0,"
        f"cloak_list={' '.join(cloaks)} uid +077 {SERVER_ID}"
    )


@contextlib.contextmanager
def bindfs(name: str, source: str, target: str, *, cached: bool) -> Iterator[Peer]:
    """Debian's bindfs, mapping one user."""
    command = ["bindfs", "-f", f"--map={SERVER_ID}/{CLIENT_ID}"]
    if not cached:
        command += ["-o", "attr_timeout=0,entry_timeout=0,negative_timeout=0"]
    process = subprocess.Popen([*command, source, target])
    try:
        while not os.path.ismount(target):
            if process.poll() is not None:
                raise RuntimeError(f"bindfs ended with {process.returncode}")
            time.sleep(0.01)
        yield Peer(name, target, CLIENT_ID, process.pid)
    finally:
        subprocess.run(["umount", target], check=False)
        process.wait(10)


@contextlib.contextmanager
def cloakfs(name: str, source: str, target: str, options: str, uid: int) -> Iterator[Peer]:
    """cloakfs with the given options."""
    command = [sys.executable, "-m", "cloakfs_cli.main"]
    subprocess.run([*command, "mount", source, target, "-o", options], check=True)
    key = mount_key(source, target)
    try:
        with open(os.path.join(RUN_DIR, f"{key}.json"), encoding="utf-8") as file:
            pid = int(json.load(file)["pid"])
        yield Peer(name, target, uid, pid)
    finally:
        subprocess.run([*command, "umount", target], check=False)
        shutil.rmtree(os.path.join(STATE_DIR, key), ignore_errors=True)


@contextlib.contextmanager
def all_peers(work: str, source: str) -> Iterator[list[Peer]]:
    """Every peer at once, over the same tree."""
    with contextlib.ExitStack() as stack:

        def place(name: str) -> str:
            path = os.path.join(work, name)
            os.mkdir(path)
            return path

        peers = [Peer("bare", source, SERVER_ID, None)]
        if shutil.which("bindfs"):
            peers.append(stack.enter_context(bindfs("bindfs, caches 0", source, place("bindfs-0"), cached=False)))
            peers.append(stack.enter_context(bindfs("bindfs, default", source, place("bindfs"), cached=True)))
        peers.append(stack.enter_context(cloakfs("cloakfs, null", source, place("null"), "no_root_squash", SERVER_ID)))
        for count in (10, 100, 1000):
            name = f"cloakfs, {count}"
            peers.append(
                stack.enter_context(cloakfs(name, source, place(f"policy-{count}"), definitions(count), CLIENT_ID))
            )
        yield peers
