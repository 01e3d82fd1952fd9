"""A service whose reloads are made to fail, and all that can be seen of it: from the machine, and by clients."""

import contextlib
import ctypes
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from cloakfs.linux import mountinfo
from cloakfs.nfs.plan import mount_name
from cloakfs.state.runtime import RUN_DIR, STATE_DIR, mount_key, mounted
from cloakfs.tuning import Tuning
from tests.altered import command_with
from tests.mount.conftest import COMMAND, told
from tests.nfs import reloadfaults
from tests.nfs.wire import Refused, Wire
from tests.waiting import wait_until

CLIENT = "127.0.0.0/8"
PORT = 2049
OWNER, OTHER = 3001, 3002

_CLONE_NEWNET = 0x40000000
TREES = ("keep", "live", "renew", "gone", "new")
_ALIKE = "insecure,all_squash,anonuid=3001,anongid=3001"
_OLD = {
    "keep": f"rw,{_ALIKE}",
    "live": f"rw,{_ALIKE},cloak_list = uid +077 0 -1",
    "renew": f"rw,{_ALIKE}",
    "gone": f"rw,{_ALIKE}",
}
_NEW = {
    "keep": _OLD["keep"],
    "live": f"rw,{_ALIKE}",
    "renew": f"ro,{_ALIKE}",
    "new": f"rw,{_ALIKE}",
}


def run(*arguments: str, command: tuple[str, ...] = COMMAND) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*command, *arguments], capture_output=True, text=True, check=False, timeout=150)


@contextmanager
def in_new_network() -> Iterator[None]:
    """Have this thread, and all it starts, in a network of its own."""
    libc = ctypes.CDLL(None, use_errno=True)
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    if libc.unshare(_CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "unshare")
    try:
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        yield
    finally:
        assert libc.setns(before, 0) == 0
        os.close(before)


@dataclass
class Reloads:
    """A service that is up with the old entries; use it as a context manager.

    Attributes:
        server: which one, as for `--server`.
        is_up: whether it goes up with the context, and down with it.
        name: its name.
    """

    server: str
    is_up: bool = True
    name: str = "test-reload"
    base: str = field(init=False)

    def __enter__(self) -> "Reloads":
        self.base = tempfile.mkdtemp(prefix="cloakfs-test-")
        os.chmod(self.base, 0o755)
        os.mkdir(self.entries)
        for tree in TREES:
            os.mkdir(self.tree(tree))
            os.chmod(self.tree(tree), 0o777)
            for name, mode in (("open", 0o644), ("private", 0o600)):
                file = Path(self.tree(tree), name)
                file.write_text(f"{tree} {name}")
                os.chmod(file, mode)
                os.chown(file, OTHER, OTHER)
        self.write(_OLD)
        if self.is_up:
            done = self.up()
            assert done.returncode == 0, done
        return self

    def __exit__(self, *exc: object) -> None:
        done = run("export", "down", "--name", self.name)
        log = Path(f"{RUN_DIR}/export-{self.name}.log").read_text()
        left = self.left()
        keys = [mount_key(self.tree(tree), self.mount(tree)) for tree in TREES]
        if not left:
            shutil.rmtree(self.base)
        for key in keys:
            shutil.rmtree(f"{STATE_DIR}/{key}", ignore_errors=True)
            with suppress(FileNotFoundError):
                os.unlink(f"{RUN_DIR}/{key}.log")
        shutil.rmtree(f"{STATE_DIR}/export-{self.name}", ignore_errors=True)
        with suppress(FileNotFoundError):
            os.unlink(f"{RUN_DIR}/export-{self.name}.log")
        assert not left
        assert done.returncode == (0 if self.is_up else 1), done
        assert "Traceback" not in log, log

    @property
    def entries(self) -> str:
        return os.path.join(self.base, "exports.d")

    @property
    def root(self) -> str:
        return os.path.join(self.base, "mounts")

    @property
    def order(self) -> str:
        """The file of `reloadfaults.install`."""
        return os.path.join(self.base, "fault")

    def tree(self, name: str) -> str:
        return os.path.join(self.base, name)

    def mount(self, tree: str, client: str = CLIENT) -> str:
        return os.path.join(self.root, mount_name(self.tree(tree), client))

    def write(self, entries: dict[str, str], client: str = CLIENT) -> None:
        text = "".join(f"{self.tree(tree)} {client}({options})\n" for tree, options in entries.items())
        Path(self.entries, "x.exports").write_text(text)

    def up(self) -> subprocess.CompletedProcess[str]:
        return run(
            "export", "up", self.entries, "--server", self.server, "--root", self.root, "--name", self.name,
            command=command_with(partial(reloadfaults.install, self.order), tuning=Tuning(served_seconds=1.0)),
        )  # fmt: skip

    def down(self) -> subprocess.CompletedProcess[str]:
        return run("export", "down", "--name", self.name)

    def left(self) -> list[str]:
        """Return what there is of the service: mounts, processes, directories and files."""
        words = ["pgrep", "-af", f"{self.base}/|export-{self.name}/"]
        processes = subprocess.run(words, capture_output=True, text=True, check=False).stdout.splitlines()
        places = [self.root, f"{RUN_DIR}/export-{self.name}"]
        state = f"{STATE_DIR}/export-{self.name}/"
        return [
            *(path for path in mountinfo.by_path() if path.startswith((f"{self.base}/", state))),
            *processes,
            *filter(os.path.exists, places),
        ]

    def reload(self) -> subprocess.CompletedProcess[str]:
        return run("export", "reload", "--name", self.name)

    def status(self) -> dict[str, Any]:
        return dict(json.loads(run("export", "status", "--json", "--name", self.name).stdout))

    def seen(self) -> dict[str, Any]:
        """Return all that can be seen of what is served: the tables, the mounts, and what a client finds."""
        status = self.status()
        run_dir = f"{RUN_DIR}/export-{self.name}"
        there = mountinfo.by_path()
        record = json.loads(Path(f"{run_dir}/service.json").read_text())
        return {
            "server": status["problem"],
            "table": {mount["path"]: (mount["options"], mount["problem"]) for mount in status["mounts"]},
            "pids": {mount["path"]: mount["pid"] for mount in status["mounts"]}
            == {path: daemon.pid for path, daemon in mounted().items() if path.startswith(self.root)},
            "daemons": {path: daemon.options for path, daemon in mounted().items() if path.startswith(self.root)},
            "mounts": sorted(path for path in there if path.startswith(self.root)),
            "directories": sorted(os.listdir(self.root)),
            "entries": sorted(name for name in os.listdir(run_dir) if name.endswith(".exports")),
            "record": sorted(path for path, _ in record["exports"]),
            "clients": {tree: self.client(tree) for tree in TREES},
        }

    def client(self, tree: str) -> list[object]:
        """Return what a client finds in the export of a tree: contents, and what comes of a change; or the errors."""
        told()
        path = self.mount(tree) if self.server == "knfsd" else f"/{os.path.basename(self.mount(tree))}"
        found: list[object] = []
        try:
            with Wire(PORT, version=4) as wire:
                handle = wire.root()
                for part in filter(None, path.split("/")):
                    handle = wire.lookup(handle, os.fsencode(part))
                for name in (b"open", b"private"):
                    try:
                        found.append(wire.read(wire.lookup(handle, name)))
                    except Refused as exc:
                        found.append(exc.status)
                try:
                    wire.setattr_mode(handle, 0o777)
                    found.append("changed")
                except Refused as exc:
                    found.append(exc.status)
        except Refused as exc:
            found.append(exc.status)
        except OSError as exc:
            found.append(type(exc).__name__)
        return found

    def settled(self, wanted: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Return what is seen as soon as it is what is wanted, or after so long."""
        seen: list[dict[str, Any]] = []

        def is_wanted() -> bool:
            seen[:] = [self.seen()]
            return seen[0] == wanted

        with contextlib.suppress(AssertionError):
            wait_until(is_wanted, seconds, every=0.2)
        return seen[0]

    def old(self) -> None:
        self.write(_OLD)

    def new(self) -> None:
        self.write(_NEW)

    def both(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what is seen of the old entries and of the new ones, after a reload to these and back."""
        old = self.seen()
        self.fail_at(0, "error")
        self.new()
        done = self.reload()
        assert done.returncode == 0, done
        self.steps()
        new = self.seen()
        assert all(old[what] != new[what] for what in ("table", "daemons", "mounts", "entries", "record", "clients"))
        self.old()
        assert self.reload().returncode == 0
        assert self.seen() == old
        return old, new

    def fail_at(self, step: int, fault: str, victim: str = "-", *, kind: str = "") -> None:
        """Have a step fail from now on: the one with this number among those whose description begins like this."""
        with suppress(FileNotFoundError):
            os.unlink(f"{self.order}.steps")
        Path(self.order).write_text(f"{step}\n{fault}\n{victim}\n{kind}")

    def victim(self, fault: str) -> str:
        """Return what is in the command line of the processes that a fault kills."""
        return f"export-{self.name}/ganesha.conf" if fault == "server" else self.mount("keep")

    def steps(self) -> list[str]:
        """Return what was done since `fail_at`, and end its effect."""
        os.unlink(self.order)
        with suppress(FileNotFoundError):
            return Path(f"{self.order}.steps").read_text().splitlines()
        return []
