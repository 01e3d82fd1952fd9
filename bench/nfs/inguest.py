"""In the guest: serve exports of a tree, and do each piece of work on each of them, while instructions are counted.

Server, client and daemon are one machine with one processor. Each export has a tree of its own, since daemons watch
the file system of their tree, and would wake up for what is done through others. Each piece of work is done by a client
that has just mounted, and the same has been done before through another mount, so that the server is warm.
"""

import contextlib
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial

from ..lab.guest import OUT
from ..lab.nfsexports import NfsExports, requests
from ..lab.nfshost import NfsHost, sh
from ..lab.stock.marks import Marks
from ..over_nfs import BASE, TREE
from ..tree import WORKER
from ..workers import WorkError, done_as
from .plan import BINDFS, OPTIONS, RESULTS, NfsPlan, Record
from .work import NfsWork, all_nfs_work, fill

_BINDFS = f"{BASE}/bindfs"


class _Exported:
    """An export of a new tree; all work is done through it.

    Args:
        name: of the export.
        served: its path for clients.
        daemon: whether its daemon counts requests.
        marks: by which instructions are counted.
    """

    def __init__(self, name: str, served: str, marks: Marks, *, daemon: bool) -> None:
        self._name = name
        self._served = served
        self._daemon = daemon
        self._marks = marks
        self._exports = NfsExports(BASE, "client")  # only to mount

    def measure(self, work: NfsWork, version: str, repeat: int) -> Iterator[Record]:
        """Do a piece of work once, and so many times more, while it is counted; give a record of each of these."""
        for again in range(1 + repeat):
            number = self._marks.next()
            try:
                switches, answered = self._once(work, version)
            except (WorkError, RuntimeError, OSError) as exc:
                yield Record(work.name, version, self._name, number, failed=f"{type(exc).__name__}: {exc}")
                return
            if again:
                yield Record(work.name, version, self._name, number, switches, answered)

    def _once(self, work: NfsWork, version: str) -> tuple[int, dict[str, int]]:
        """Return the switches between tasks, and the requests that the daemon has answered."""
        if work.is_cold:
            with open("/proc/sys/vm/drop_caches", "w", encoding="ascii") as file:
                file.write("1")
        try:
            with self._exports.reach(self._served, version, *work.client) as at:
                place = os.path.join(at, work.place)
                if work.prepare:
                    done_as(WORKER, place, partial(_private, work.prepare))
                before = self._answered()
                do = partial(self._marks.counted, partial(_private, work.do))
                _, switches = done_as(WORKER, os.path.join(place, work.within), do)
                return switches, dict(self._answered() - before)
        finally:
            clean(work)

    def _answered(self) -> Counter[str]:
        return requests(self._served) if self._daemon else Counter()


def clean(work: NfsWork) -> None:
    """Remove what the work has made; after a failure it may not be there."""
    if work.clean:
        with contextlib.suppress(WorkError):
            done_as(WORKER, os.path.join(TREE, work.place), work.clean)


def _private(do: Callable[[], object]) -> None:
    os.umask(0o077)
    do()


@contextlib.contextmanager
def _bindfs() -> Iterator[str]:
    """Mount bindfs over the tree, and export it; `noforget`, or handles would not last."""
    os.makedirs(_BINDFS, exist_ok=True)
    sh("bindfs", "-o", "noforget", TREE, _BINDFS)
    try:
        yield _BINDFS
    finally:
        sh("umount", "-l", _BINDFS)


@contextlib.contextmanager
def _site(plan: NfsPlan, name: str, marks: Marks) -> Iterator[_Exported]:
    """Make a tree in memory, and this export of it, for as long as it is needed."""
    os.makedirs(TREE, exist_ok=True)
    sh("mount", "-t", "tmpfs", "-o", "mode=755", "over-nfs", TREE)
    try:
        fill(TREE, plan.amounts)
        exports = NfsExports(BASE, "over-nfs")
        with contextlib.ExitStack() as stack:
            if name == BINDFS:
                served = stack.enter_context(_bindfs())
                stack.enter_context(exports.bare(served))
            else:
                (served,) = stack.enter_context(exports.serve(TREE, [OPTIONS[name]]))
            yield _Exported(name, served, marks, daemon=OPTIONS[name] is not None)
    finally:
        sh("umount", "-l", TREE)


def _measure(plan: NfsPlan) -> None:
    NfsHost()
    marks = Marks()
    every = all_nfs_work(plan.amounts)
    with open(os.path.join(OUT, RESULTS), "a", encoding="utf-8", buffering=1) as file:
        for name in plan.exports:
            with _site(plan, name, marks) as exported:
                for work in (every[one] for one in plan.works_with(name)):
                    _do_bare(work)
                    for version in plan.versions:
                        for record in exported.measure(work, version, plan.repeat):
                            file.write(f"{json.dumps(asdict(record))}\n")


def _do_bare(work: NfsWork) -> None:
    """Do it in the tree itself: afterwards, programs are in memory."""
    place = os.path.join(TREE, work.place)
    if work.prepare:
        done_as(WORKER, place, partial(_private, work.prepare))
    done_as(WORKER, os.path.join(place, work.within), partial(_private, work.do))
    clean(work)


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as found:
        _measure(NfsPlan.parse(found.read()))
