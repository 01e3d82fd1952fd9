"""Measures how long others wait while one caller writes to a device that is throttled, or to a disk that is full.

One caller writes 4 KiB at a time, and another one asks for a name that does not exist, every two milliseconds. What its
requests take is compared with what they take while nobody writes.
"""

import argparse
import contextlib
import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from cloakfs.state.runtime import STATE_DIR
from tests.agents import User
from tests.mount.conftest import Mount, mounted
from tests.mount.loopfs import filesystem
from tests.waiting import let_expire

WRITER, OTHER = 3001, 3002

MOST_SECONDS = 0.05
"""How long a request of the other caller may take."""

_EVERY = 0.002
_BYTES_PER_SECOND = 4 << 20
_DIRTY_BYTES = 4 << 20
_THROTTLE = Path("/sys/fs/cgroup/blkio/blkio.throttle.write_bps_device")


class Waits(NamedTuple):
    """What the requests of the other caller took, in seconds, and what the writer wrote, in bytes a second."""

    requests: int
    median: float
    p99: float
    longest: float
    written: float


def write(path: str, until: float) -> float:
    """Write until then; once the disk or the quota is full, try again from the beginning. Return bytes a second."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    data, done, at, began = b"x" * 4096, 0, 0, time.monotonic()
    while time.monotonic() < until:
        try:
            at += os.pwrite(fd, data, at)
            done += len(data)
        except OSError as exc:
            if exc.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            at = 0
    os.close(fd)
    return done / (time.monotonic() - began)


def idle(_path: str, until: float) -> float:
    """Write nothing until then."""
    let_expire(max(0.0, until - time.monotonic()))
    return 0.0


def look(top: str, until: float) -> list[float]:
    """Ask for names that do not exist until then; return what each request took, in seconds, in ascending order."""
    took = []
    while time.monotonic() < until:
        name = f"{top}/{time.monotonic_ns()}"  # none that the kernel has cached
        began = time.monotonic()
        with contextlib.suppress(FileNotFoundError):
            os.stat(name)
        took.append(time.monotonic() - began)
        let_expire(_EVERY)
    return sorted(took)


@contextlib.contextmanager
def throttled(base: str) -> Iterator[str]:
    """An ext4 whose device writes little in a second, and of which the kernel has few dirty pages."""
    with filesystem("ext4", base, "throttled", mib=512) as top:
        device = os.stat(top).st_dev
        numbers = f"{os.major(device)}:{os.minor(device)}"
        dirty = Path("/sys/class/bdi", numbers)
        try:
            for file, text in (
                (dirty / "strict_limit", "1"),
                (dirty / "max_bytes", f"{_DIRTY_BYTES}"),
                (_THROTTLE, f"{numbers} {_BYTES_PER_SECOND}"),
            ):
                file.write_text(text, encoding="ascii")
            yield top
        finally:
            # A loop device keeps all this when it is used for another file later.
            for file, text in (
                (dirty / "strict_limit", "0"),
                (dirty / "max_ratio", "100"),  # of which max_bytes is another form
                (_THROTTLE, f"{numbers} 0"),
            ):
                with contextlib.suppress(OSError):
                    file.write_text(text, encoding="ascii")


@contextlib.contextmanager
def full(base: str) -> Iterator[str]:
    """An ext4 that is soon full."""
    with filesystem("ext4", base, "full", mib=32) as top:
        yield top


@contextlib.contextmanager
def limited(base: str) -> Iterator[str]:
    """A btrfs with a quota."""
    with filesystem("btrfs", base, "limited") as top:
        subprocess.run(["btrfs", "quota", "enable", top], check=True)
        subprocess.run(["btrfs", "qgroup", "limit", "16M", top], check=True, capture_output=True)
        yield top


SCENES: dict[str, Callable[[str], contextlib.AbstractContextManager[str]]] = {
    "throttled": throttled,
    "full": full,
    "quota": limited,
}


def measure(source: str, base: str, seconds: float, passthrough: str) -> list[Waits]:
    """Return what the other caller's requests take while nobody writes, and while one writes."""
    point = tempfile.mkdtemp(dir=base)
    made = []
    try:
        with (
            mounted(source, point, "-o", f"passthrough={passthrough}") as m,
            User(WRITER) as writer,
            User(OTHER) as other,
        ):
            for work in (idle, write):
                until = time.monotonic() + seconds
                writer.start(work, m.at("written"), until)
                other.start(look, m.path, until)
                took: list[float] = other.answer_within(seconds + 60)
                written: float = writer.answer_within(seconds + 300)
                count = len(took)
                made.append(Waits(count, took[count // 2], took[count * 99 // 100], took[-1], written))
    finally:
        shutil.rmtree(os.path.join(STATE_DIR, Mount(source, point).key), ignore_errors=True)
        os.rmdir(point)
    return made


def main() -> int:
    """Run the campaign."""
    parser = argparse.ArgumentParser(prog="scripts/campaign waits", description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement (default: %(default)s)")
    parser.add_argument("--scene", action="append", choices=sorted(SCENES), help="(default: all)")
    parser.add_argument("--passthrough", choices=("auto", "off"), default="off", help="(default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print the results for a program to read")
    words = parser.parse_args()
    found: dict[str, list[Waits]] = {}
    for name in words.scene or SCENES:
        base = tempfile.mkdtemp(prefix="cloakfs-test-")
        os.chmod(base, 0o755)
        try:
            with SCENES[name](base) as source:
                found[name] = measure(source, base, words.seconds, words.passthrough)
        except (OSError, subprocess.CalledProcessError) as exc:
            print(f"waits: {name}: left out ({exc})", file=sys.stderr)
        finally:
            shutil.rmtree(base)
    if words.json:
        print(json.dumps({name: [waits._asdict() for waits in rows] for name, rows in found.items()}))
    else:
        print(f"{'':10} {'':14} {'requests':>8} {'median ms':>9} {'99 % ms':>8} {'longest ms':>10} {'MB/s':>7}")
        for name, rows in found.items():
            for what, row in zip(("nobody writes", "one writes"), rows, strict=True):
                times = f"{row.median * 1e3:9.2f} {row.p99 * 1e3:8.2f} {row.longest * 1e3:10.2f}"
                print(f"{name:10} {what:14} {row.requests:8} {times} {row.written / 1e6:7.1f}")
    late = [name for name, rows in found.items() if rows[1].longest > MOST_SECONDS]
    for name in late:
        print(f"waits: {name}: a request took more than {MOST_SECONDS * 1000:.0f} ms", file=sys.stderr)
    return 1 if late or not found else 0


if __name__ == "__main__":
    sys.exit(main())
