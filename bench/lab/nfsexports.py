"""Exports of the NFS server in the laboratory's guest, bare and through cloakfs, and clients that mount them."""

import contextlib
import os
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import count

from cli.common import OWN_COMMAND
from cloakfs.nfs.plan import mount_name
from cloakfs.state.client import Conversation
from cloakfs.state.runtime import mounted

from .nfshost import sh

_ROOT = "/srv/cloakfs"
_PATIENCE = 20.0


class NfsExports:
    """The server, which has to run, exports trees themselves or cloakfs over them.

    Args:
        base: a directory of its own, which exists.
        service: the name of the service of cloakfs.
    """

    def __init__(self, base: str, service: str) -> None:
        self._base = base
        self._folder = os.path.join(base, "exports.d")
        self._service = service
        self._numbers = count()
        self._up = False

    @contextlib.contextmanager
    def serve(self, tree: str, ways: Sequence[str | None]) -> Iterator[list[str]]:
        """Export a tree in several ways at once; give the path of each export for clients.

        Args:
            tree: the tree.
            ways: the options of cloakfs for each; None: the tree itself is exported.
        """
        with contextlib.ExitStack() as stack:
            # Each export has a path of its own.
            exports = [(stack.enter_context(self._place(tree)), options) for options in ways]
            for at, options in exports:
                if options is None:
                    stack.enter_context(self.bare(at))
            if entries := [f"{at} *(insecure,rw,{options})\n" for at, options in exports if options is not None]:
                stack.enter_context(self._cloaked(entries))
            yield [at if options is None else os.path.join(_ROOT, mount_name(at, "*")) for at, options in exports]

    @contextlib.contextmanager
    def _place(self, tree: str) -> Iterator[str]:
        at = os.path.join(self._base, f"tree-{next(self._numbers)}")
        os.mkdir(at)
        sh("mount", "--bind", tree, at)
        try:
            yield at
        finally:
            sh("umount", "-l", at)  # the server may hold on to it for a moment
            os.rmdir(at)

    @contextlib.contextmanager
    def bare(self, at: str) -> Iterator[None]:
        """Have the server export a directory as it is, for as long as it is needed."""
        sh("exportfs", "-o", f"rw,insecure,no_subtree_check,fsid={4000 + next(self._numbers)}", f"*:{at}")
        try:
            yield
        finally:
            sh("exportfs", "-u", f"*:{at}")
            sh("exportfs", "-f")

    @contextlib.contextmanager
    def _cloaked(self, entries: list[str]) -> Iterator[None]:
        os.makedirs(self._folder, exist_ok=True)
        path = os.path.join(self._folder, f"entries-{next(self._numbers)}.exports")
        with open(path, "w", encoding="utf-8") as file:
            file.writelines(entries)
        try:
            self._take_over()
            yield
        finally:
            os.unlink(path)
            self._take_over()

    def _take_over(self) -> None:
        """Serve what the folder says now."""
        if not os.listdir(self._folder):
            self.close()
        elif self._up:
            sh(*OWN_COMMAND, "export", "reload", "--name", self._service)
        else:
            sh(*OWN_COMMAND, "export", "up", "--name", self._service, self._folder)
            self._up = True

    @contextlib.contextmanager
    def reach(self, served: str, version: str, *options: str) -> Iterator[str]:
        """Mount an export as a client does, by this version of NFS; give the mount point."""
        at = os.path.join(self._base, "client")
        os.makedirs(at, exist_ok=True)
        words = ",".join((f"vers={version}", "hard", "nolock", *options))
        sh("mount", "-t", "nfs", "-o", words, f"127.0.0.1:{served}", at)
        try:
            yield at
        finally:
            deadline = time.monotonic() + _PATIENCE
            # Without the helper, which would notify mountd and wait for its answer.
            while subprocess.run(["umount", "-i", at], check=False, capture_output=True).returncode:
                if time.monotonic() > deadline:
                    sh("umount", "-l", at)
                    raise RuntimeError(f"{at} was still in use")
                time.sleep(0.1)

    def close(self) -> None:
        """End the service."""
        if self._up:
            sh(*OWN_COMMAND, "export", "down", "--name", self._service)
            self._up = False


def requests(served: str) -> Counter[str]:
    """How many requests the daemon of an export has answered, by operation.

    Raises:
        DaemonError: it does not publish its counts.
    """
    with Conversation(mounted()[served]) as daemon:
        figures = daemon.query({"method": "metrics"})["metrics"]
    return Counter({name: sum(number for _, number in rows) for name, (_, rows) in figures["durations"].items()})
