"""Strides through the kernel's server, read by the kernel's client, from a slow disk [ES §7].

CLOAKFS_NFS_RUNS=10 measures more, and more often, than the test needs, CLOAKFS_NFS_MIB=32 a larger file; -rP shows the
figures.
"""

import mmap
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bench.prefetch import content
from bench.prefetch.slowdisk import SlowDisk, SlowDiskError, slow_disk
from bench.prefetch.streams import generate
from cloakfs.nfs import health
from cloakfs.nfs.plan import mount_name
from tests.agents import User
from tests.nfs.knfsd.fixtures import EXPORTS, VERSIONS, Service, Share, nfs_mounted, sh
from tests.nfs.lab import lab

RUNS = int(os.environ.get("CLOAKFS_NFS_RUNS", "1"))
SIZE = int(os.environ.get("CLOAKFS_NFS_MIB", "8")) << 20
BLOCK = 8192
STRIDES = (2, 4, 8) if RUNS > 1 else (4,)
HEURISTICS = ("default", "cursors")

# The guest, which is client, server and daemon by one processor, is slow itself.
IOPS = 50


@pytest.fixture
def disk() -> Iterator[SlowDisk]:
    sh("mount", "-t", "cgroup2", "cgroup2", "/sys/fs/cgroup")
    try:
        with slow_disk(2 * (SIZE >> 20) + 16, iops=IOPS, base=lab.OUT) as made:
            content.create(made.path, "file", SIZE)
            yield made
    except SlowDiskError as exc:
        pytest.skip(f"no slow disk: {exc}")
    finally:
        sh("umount", "/sys/fs/cgroup")


def read_all(path: str, offsets: list[int]) -> float:
    """Read these blocks past the client's cache; how long it took."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    block = mmap.mmap(-1, BLOCK)
    began = time.monotonic()
    for offset in offsets:
        assert os.preadv(fd, [block], offset) == BLOCK
        content.verify("file", offset, memoryview(block))
    took = time.monotonic() - began
    os.close(fd)
    return took


def forget() -> None:
    os.sync()
    with open("/proc/sys/vm/drop_caches", "w", encoding="ascii") as file:
        file.write("3\n")


def misses(tree: Share) -> int:
    """How many reads the daemon had to wait for."""
    (one,) = health.machine_state().only([tree.path]).mounts
    assert one.figures is not None, one.problem
    return int(one.figures["counters"]["reads_waited"])


@pytest.mark.timeout(300 * RUNS)
def test_strides(
    service: Service,
    user: Callable[..., User],
    disk: SlowDisk,
    record_property: Callable[[str, object], None],
) -> None:
    name = "slow"
    share = Share(service, name, disk.path, f"/srv/cloakfs/{mount_name(disk.path, '*')}")
    ann = user(1000)
    waited: dict[tuple[str, str], int] = {}
    rates: dict[tuple[str, int, str], list[float]] = {}
    try:
        for heuristic in HEURISTICS:
            share.set(f"rw,no_root_squash,prefetch={heuristic}")
            disk.slow_down(share.pid)
            # What the kernel reads ahead by itself would hide what the heuristics do.
            device = os.stat(share.path).st_dev
            Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb").write_text("128")
            for version in VERSIONS:
                before = misses(share)
                for stride in STRIDES * RUNS:
                    (stream,) = generate("stride", SIZE, BLOCK, stride=stride)
                    forget()
                    with nfs_mounted(share, version, "nosharecache") as place:
                        took = ann.do(read_all, f"{place}/file", [read.offset for read in stream])
                    rates.setdefault((version, stride, heuristic), []).append(SIZE / 1e6 / took)
                waited[version, heuristic] = misses(share) - before
    finally:
        os.unlink(f"{EXPORTS}/{name}.exports")
        service.take_over()
        time.sleep(1)
    for version in VERSIONS:
        for stride in STRIDES:
            shown = [
                f"{heuristic} {statistics.mean(some):.2f} MB/s (deviation {statistics.pstdev(some):.2f})"
                for heuristic in HEURISTICS
                for some in [rates[version, stride, heuristic]]
            ]
            ratio = statistics.mean(rates[version, stride, "cursors"]) / statistics.mean(
                rates[version, stride, "default"]
            )
            said = f"v{version}, s = {stride}, {RUNS} runs: {', '.join(shown)}: {ratio:.2f} x"
            record_property(f"v{version} s{stride}", said)
            print(said)
        assert waited[version, "cursors"] < 0.7 * waited[version, "default"], waited
