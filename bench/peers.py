"""The peers that are measured: the bare tree, other file systems mounted over one, and cloakfs with various options."""

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from cli.common import OWN_COMMAND
from cloakfs.linux import mountinfo
from cloakfs.state.client import socket_of
from cloakfs.state.runtime import RUN_DIR, STATE_DIR, mount_key

from .clone import module_command
from .homes import USERS
from .job import Work
from .tree import OWNER, WORKER

BARE = "bare"
BINDFS = "bindfs"
UNCACHED = "bindfs, caches off"
FLOOR = "pyfuse3 alone"
STOCK = "cloakfs stock loop"
NULL = "cloakfs null"
BOTH = "cloakfs map+cloak"
FEW, MANY = f"{BOTH} 10", f"{BOTH} 1000"
CHECKED = f"{MANY}, default_permissions"
FIXED = "cloakfs fixed view"
PLAIN = f"{FIXED}, noxattr"
SESSION = "cloakfs session"
TRACED = f"{BOTH}, traced"

SHIFT = 50000
"""Peers that map ids add this to each of them for their clients."""

_PATIENCE = 20.0


class Skipped(Exception):
    """A peer does not work on this machine; the text says why."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A directory to work in.

    Attributes:
        name: its name in tables.
        tree: the real tree behind it.
        path: where the work is done.
        uid: the user who does the work.
        daemon: the process that serves it; None if the kernel serves it alone.
        status: the file in which a cloakfs daemon publishes its state.
    """

    name: str
    tree: str
    path: str
    uid: int = WORKER
    daemon: int | None = None
    status: str | None = None


def definitions(count: int, *, maps: bool = True, cloaks: bool = True) -> str:
    """Return options with `count` range-map and `count` cloak definitions, half for users and half for groups.

    The users with homes, of whom the worker and the owner are the first, fall to the last of each, so that mode bits
    decide: the others' show public files, the group's show private ones to the worker, who owns neither,
    and no definition shows a home to anyone but its owner.
    """
    range_map, cloak_list = [], []
    last = WORKER + USERS - 1
    for kind in ("uid", "gid"):
        for i in range(count // 2 - 1):
            range_map.append(f"{kind} {100000 + 10 * i} {100009 + 10 * i} map {200000 + 10 * i}")
            cloak_list.append(f"{kind} +077 {200000 + 10 * i} {200009 + 10 * i}")
        range_map.append(f"{kind} {WORKER + SHIFT} {last + SHIFT} map {WORKER}")
        cloak_list.append(f"{kind} +077 {WORKER} {last}")
    options = [f"range_map={' '.join(range_map)}"] if maps else []
    return ",".join([*options, f"cloak_list={' '.join(cloak_list)}"] if cloaks else options)


Start = Callable[[contextlib.ExitStack, str, str, str], Callable[[], Peer]]
"""Begins to mount (stack, name, tree, mount point); returns a function that waits for it. Both may raise Skipped."""


def _bare(stack: contextlib.ExitStack, name: str, tree: str, at: str) -> Callable[[], Peer]:
    return lambda: Peer(name, tree, tree)


def _mount8(stack: contextlib.ExitStack, name: str, tree: str, at: str, *arguments: str) -> Callable[[], Peer]:
    stack.callback(unmount, at)
    done = subprocess.run(["mount", *arguments, at], capture_output=True, text=True, check=False)
    if done.returncode:
        raise Skipped(" ".join(done.stderr.split()) or f"mount: exit status {done.returncode}")
    return lambda: Peer(name, tree, at)


def _bind(stack: contextlib.ExitStack, name: str, tree: str, at: str) -> Callable[[], Peer]:
    return _mount8(stack, name, tree, at, "--bind", tree)


def _overlay(stack: contextlib.ExitStack, name: str, tree: str, at: str) -> Callable[[], Peer]:
    upper, work = f"{tree}-upper", f"{tree}-work"
    for path in (upper, work):
        os.mkdir(path)
    options = f"lowerdir={tree},upperdir={upper},workdir={work}"
    return _mount8(stack, name, tree, at, "-t", "overlay", "overlay", "-o", options)


def _bindfs(*options: str) -> Start:
    """Debian's bindfs, mapping the same users and groups."""

    def start(stack: contextlib.ExitStack, name: str, tree: str, at: str) -> Callable[[], Peer]:
        if not shutil.which("bindfs"):
            raise Skipped("bindfs is not installed (apt install bindfs)")
        servers = range(WORKER, WORKER + USERS)
        ids = [f"{sign}{server}/{sign}{server + SHIFT}" for sign in ("", "@") for server in servers]
        command = ["bindfs", "-f", f"--map={':'.join(ids)}", *options, tree, at]
        return _foreground(stack, Peer(name, tree, at, WORKER + SHIFT), command)

    return start


def _floor(stack: contextlib.ExitStack, name: str, tree: str, at: str) -> Callable[[], Peer]:
    """What pyfuse3 costs by itself (`floor`)."""
    return _foreground(stack, Peer(name, tree, at), module_command("bench.floor", tree, at))


def _foreground(stack: contextlib.ExitStack, peer: Peer, command: list[str]) -> Callable[[], Peer]:
    """Start a file system that serves until SIGTERM; return a function that waits for it."""
    # It has a session of its own: Ctrl-C is for the benchmark, which then ends it.
    process = subprocess.Popen(command, start_new_session=True)

    def stop() -> None:
        unmount(peer.path)
        process.terminate()
        process.wait(_PATIENCE)

    stack.callback(stop)

    def wait() -> Peer:
        deadline = time.monotonic() + _PATIENCE
        while not is_mounted(peer.path):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{peer.name} did not mount (exit status {process.returncode})")
            time.sleep(0.01)
        return replace(peer, daemon=process.pid)

    return wait


def mounting(options: str, *more: str, uid: int = WORKER + SHIFT, cloakfs: Sequence[str] = OWN_COMMAND) -> Start:
    """Return what mounts with these options, by this command of cloakfs."""

    def start(stack: contextlib.ExitStack, name: str, tree: str, at: str) -> Callable[[], Peer]:
        key = mount_key(tree, at)
        status = os.path.join(RUN_DIR, f"{key}.json")
        daemon: list[int] = []  # a pidfd, once it is there
        command = [*cloakfs, "mount", tree, at, *more, "-o", options]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)

        def stop() -> None:
            process.wait(_PATIENCE)
            unmount(at)
            for fd in daemon:
                if not select.select([fd], [], [], _PATIENCE)[0]:
                    signal.pidfd_send_signal(fd, signal.SIGKILL)
                os.close(fd)
            shutil.rmtree(os.path.join(STATE_DIR, key), ignore_errors=True)
            for left in (status, socket_of(key), os.path.join(RUN_DIR, f"{key}.log")):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(left)

        stack.callback(stop)

        def wait() -> Peer:
            _, said = process.communicate()
            if process.returncode:
                raise RuntimeError(f"{name}: {' '.join(said.split())}")
            with open(status, encoding="utf-8") as file:
                pid = int(json.load(file)["pid"])
            daemon.append(os.pidfd_open(pid))
            return Peer(name, tree, at, uid, pid, status)

        return wait

    return start


def _in_session(mount: Start, view: str) -> Start:
    """One of several views, bind-mounted elsewhere as a login does (docs/sessions.md)."""

    def start(stack: contextlib.ExitStack, name: str, tree: str, at: str) -> Callable[[], Peer]:
        wait_for_mount = mount(stack, name, tree, at)

        def wait() -> Peer:
            peer = wait_for_mount()
            path = f"{at}-session"
            os.mkdir(path)
            stack.callback(unmount, path)
            subprocess.run(["mount", "--bind", os.path.join(at, view), path], check=True)
            return replace(peer, path=path)

        return wait

    return start


def _traced(mount: Start) -> Start:
    """Return a start that has `cloakfs trace` print all requests to /dev/null as well."""

    def start(stack: contextlib.ExitStack, name: str, tree: str, at: str) -> Callable[[], Peer]:
        wait_for_mount = mount(stack, name, tree, at)

        def run(*command: str, read: int | None = None, write: int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
            process = subprocess.Popen(
                command, stdin=read, stdout=write, stderr=subprocess.DEVNULL, start_new_session=True
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            return process

        def wait() -> Peer:
            peer = wait_for_mount()
            records, theirs = os.pipe()
            with open(records, "rb") as printed:
                with open(theirs, "wb") as out:
                    trace = run(*OWN_COMMAND, "trace", at, "--json", write=out.fileno())
                deadline = time.monotonic() + _PATIENCE
                while not select.select([printed], [], [], 0.01)[0] and time.monotonic() < deadline:
                    os.statvfs(at)
                if not os.read(records, 1):
                    raise RuntimeError(f"{name}: cloakfs trace ended (exit status {trace.wait()})")
                run("cat", read=printed.fileno())
            return peer

        return wait

    return start


PEERS: dict[str, Start] = {
    BARE: _bare,
    "bind mount": _bind,
    "overlayfs": _overlay,
    BINDFS: _bindfs(),
    UNCACHED: _bindfs("-o", "attr_timeout=0,entry_timeout=0,negative_timeout=0"),
    FLOOR: _floor,
    STOCK: mounting("no_root_squash", uid=WORKER, cloakfs=module_command("bench.stockloop")),
    NULL: mounting("no_root_squash", uid=WORKER),
    "cloakfs map": mounting(definitions(2, cloaks=False)),
    "cloakfs cloak": mounting(definitions(2, maps=False), uid=WORKER),
    BOTH: mounting(definitions(2)),
    TRACED: _traced(mounting(definitions(2))),
    FEW: mounting(definitions(10)),
    f"{BOTH} 100": mounting(definitions(100)),
    MANY: mounting(definitions(1000)),
    CHECKED: mounting(f"{definitions(1000)},default_permissions"),
    FIXED: mounting(f"{definitions(2)},default_permissions", "--view", f"{WORKER}:{WORKER}"),
    PLAIN: mounting(f"{definitions(2)},default_permissions,noxattr", "--view", f"{WORKER}:{WORKER}"),
    SESSION: _in_session(
        mounting(definitions(2), "--view", f"{WORKER}:{WORKER}", "--view", f"{OWNER}:{OWNER}"), f"@{WORKER}"
    ),
}
"""Every peer, in the order of the tables."""

VARIANTS = {"cloakfs map", "cloakfs cloak", TRACED, FEW, f"{BOTH} 100", SESSION}
"""These differ only in works that look up or stat single files; they need not do the others."""

_FOR_ONE = {FIXED, PLAIN, SESSION}
"""Views of the worker alone."""


def does(peer: str, work: Work) -> bool:
    """Whether this work is for that peer."""
    if peer == FLOOR:
        return work.table.startswith("file by file")  # for more files it may not get the descriptors
    return peer not in (_FOR_ONE if work.users else ()) and (work.thorough or peer not in VARIANTS)


def is_mounted(path: str) -> bool:
    """Whether something is mounted at this path."""
    return path in mountinfo.by_path()


def unmount(path: str) -> None:
    """Unmount what is mounted there, if anything; a worker that was just killed may keep it busy for a moment."""
    deadline = time.monotonic() + _PATIENCE
    while is_mounted(path):
        lazy = ["-l"] if time.monotonic() > deadline else []
        done = subprocess.run(["umount", *lazy, path], capture_output=True, text=True, check=False)
        if done.returncode:
            if lazy:
                raise RuntimeError(f"{path} cannot be unmounted: {done.stderr}")
            time.sleep(0.02)


DISKS = {"tmpfs": (), "ext4": ("mkfs.ext4", "-q", "-F"), "xfs": ("mkfs.xfs", "-q", "-f"), "btrfs": ("mkfs.btrfs", "-q")}
"""The kinds of file systems on which trees are made, with what makes them."""

_DISK_BYTES = 2 << 30


def place(stack: contextlib.ExitStack, base: str, name: str, disk: str = "tmpfs") -> tuple[str, str]:
    """Make a file system for one peer; return its tree, which is empty, and a mount point beside it.

    It is in memory, or of the kind `disk`, on a loop device whose image is in memory, so that no disk is waited for.

    Each peer has one of its own, because a cloakfs daemon watches the file system of its tree (fanotify(7)): on a
    common one, each file that one peer creates would wake the daemons of all others.
    """
    directory = os.path.join(base, "".join(char if char.isalnum() else "-" for char in name))
    os.mkdir(directory)
    stack.callback(os.rmdir, directory)
    stack.callback(unmount, directory)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=755", "cloakfs-bench", directory], check=True)
    top = directory
    if DISKS[disk]:
        image, top = os.path.join(directory, "image"), os.path.join(directory, "disk")
        with open(image, "wb") as file:
            file.truncate(_DISK_BYTES)
        subprocess.run([*DISKS[disk], image], check=True, stdout=subprocess.DEVNULL)
        os.mkdir(top)
        stack.callback(unmount, top)
        subprocess.run(["mount", "-o", "loop", image, top], check=True)
        os.chmod(top, 0o755)
    tree, at = os.path.join(top, "tree"), os.path.join(directory, "mnt")
    for path in (tree, at):
        os.mkdir(path)
    return tree, at
