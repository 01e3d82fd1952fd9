"""Reading ahead on real disks, a slow one and a fast one; and writing, which waits in threads."""

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.prefetch import content
from bench.prefetch.live import Files, read_all
from bench.prefetch.slowdisk import SlowDisk, SlowDiskError, slow_disk
from bench.prefetch.streams import generate
from cloakfs.state.runtime import mounted
from tests.mount import conftest
from tests.mount.conftest import Mount, run
from tests.waiting import wait_until

M = 1 << 20
SIZE = 8 * M
LONG = 24 * M  # what a stream waits for until it is known to be one does not count
MakeMount = Callable[..., Mount]

pytestmark = pytest.mark.usefixtures("figures_at_once")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SlowDisk]:
    try:
        with slow_disk(32, base=str(tmp_path)) as made:
            yield made
    except SlowDiskError as exc:
        pytest.skip(f"no slow disk: {exc}")


def state(there: Mount) -> dict[str, Any]:
    """What the daemon tells of its reads."""
    return dict(mounted()[there.path].prefetch)


def told(there: Mount, reads: int) -> dict[str, Any]:
    """The same, when it knows of so many reads."""
    wait_until(lambda: sum(state(there).get(name, 0) for name in ("hits", "misses")) >= reads)
    return state(there)


def stride(there: Mount, name: str, stride: int = 4, size: int = SIZE) -> int:
    """Read all of a cold file by 8 KiB in strides, checking its content; how many reads that were."""
    content.drop_pages(there.at(name))
    (stream,) = generate("stride", size, 8192, stride=stride)
    with Files(there.path, [name], direct=True) as files:
        read_all([[read._replace(file=name) for read in stream]], files, verified=True)
    return len(stream)


def on(disk: SlowDisk, mount: MakeMount, words: str) -> Mount:
    there = mount("-o", f"no_root_squash,{words}", source=disk.path)
    disk.slow_down(there.pid)
    return there


def test_strides_are_read_ahead_by_cursors_alone(disk: SlowDisk, mount: MakeMount) -> None:
    content.create(disk.path, "file", LONG)
    waits = {}
    for words in ("prefetch=cursors", "prefetch=default", "prefetch=off", "prefetch=cursors,prefetch_window=16K"):
        there = on(disk, mount, words)
        reads = stride(there, "file", size=LONG)
        now = told(there, reads)
        waits[words] = now["misses"]
        assert now["heuristic"] == words.partition("=")[2].partition(",")[0]
        if "cursors" in words:
            # A stream that gets to where the next one began asks for what is in memory already.
            assert 0.5 * LONG < now["asked"] <= LONG + 3 * 2 * M
            assert "ms" in now["devices"][0]
            assert "too fast" not in now["devices"][0]
        elif words == "prefetch=off":
            assert now["asked"] == 0
        else:
            assert now["asked"] < 0.1 * LONG
    # The kernel's own read-ahead is the same for all, but how much of it is there in time is not.
    assert waits["prefetch=cursors"] < 0.8 * waits["prefetch=off"]
    assert waits["prefetch=cursors"] < 0.8 * waits["prefetch=default"]


def test_random_reads_cost_next_to_nothing(disk: SlowDisk, mount: MakeMount) -> None:
    content.create(disk.path, "file", SIZE)
    there = on(disk, mount, "prefetch=cursors")
    content.drop_pages(there.at("file"))
    (stream,) = generate("random", SIZE, 4096)
    with Files(there.path, ["file"], direct=True) as files:
        read_all([[read._replace(file="file") for read in stream[:600]]], files, verified=True)
    # On trial, and then no more: some pieces of 128 KiB, beside 600 reads.
    assert told(there, 600)["asked"] <= 2 * M


def test_a_fast_device_is_left_alone(mount: MakeMount) -> None:
    there = mount("-o", "no_root_squash")
    content.create(there.source, "file", SIZE)
    for _ in range(3):
        reads = stride(there, "file")
    now = told(there, 3 * reads)
    if now["asked"]:
        pytest.skip(f"the disk of this machine is slow: {now['devices']}")
    assert "too fast to read ahead" in now["devices"][0] or "too few" in now["devices"][0]
    shown = run("status", there.path).stdout
    assert "too fast to read ahead (pays from 1 ms)" in shown or "too few reads so far" in shown


def test_several_readers_of_a_slow_file_get_what_is_there(disk: SlowDisk, mount: MakeMount) -> None:
    content.create(disk.path, "file", SIZE)
    there = on(disk, mount, "prefetch=always,prefetch_window=64K")
    content.drop_pages(there.at("file"))
    failures: list[BaseException] = []

    def reader(stride: int) -> None:
        try:
            (stream,) = generate("stride", SIZE, 65536, stride=stride)
            with Files(there.path, ["file"], direct=bool(stride % 2)) as files:
                read_all([[read._replace(file="file") for read in stream]], files, outstanding=2, verified=True)
        except BaseException as exc:
            failures.append(exc)

    threads = [threading.Thread(target=reader, args=(stride,)) for stride in (1, 2, 3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []


def test_a_file_that_grows_and_shrinks_while_it_is_read_ahead(disk: SlowDisk, mount: MakeMount) -> None:
    there = on(disk, mount, "rw,prefetch=always")
    path = there.at("file")
    with open(path, "wb") as file:
        file.write(bytes(M))
    content.drop_pages(path)
    with open(path, "r+b", buffering=0) as file:
        assert file.read(M // 2) == bytes(M // 2)
        os.truncate(there.real("file"), 3 * M // 4)
        conftest.told()
        assert file.read(M) == bytes(M // 4)
        assert file.read(1) == b""
        file.write(b"end")
        file.seek(3 * M // 4)
        assert file.read() == b"end"
    assert Path(there.real("file")).read_bytes() == bytes(3 * M // 4) + b"end"


def test_a_reload_takes_over_another_heuristic(mount: MakeMount, tree: str, base: str) -> None:
    exports = os.path.join(base, "exports")
    Path(exports).write_text(f"{tree} *(rw,no_root_squash)\n")
    there = mount("--exports", exports)
    content.create(tree, "file", M)
    Path(exports).write_text(f"{tree} *(rw,no_root_squash,prefetch=slowdown,prefetch_files=8)\n")
    os.kill(there.pid, signal.SIGHUP)
    wait_until(lambda: mounted()[there.path].reloads == 1)
    assert "prefetch=slowdown,prefetch_files=8" in mounted()[there.path].options
    Path(there.at("file")).read_bytes()
    assert told(there, 1)["heuristic"] == "slowdown"


def test_what_is_written_is_in_the_real_file_at_once(mount: MakeMount) -> None:
    there = mount("-o", "rw,no_root_squash")
    with open(there.at("file"), "wb", buffering=0) as file:
        for number in range(20):
            block = bytes([number]) * 300_000
            assert file.write(block) == 300_000
            with open(there.real("file"), "rb") as real:
                real.seek(number * 300_000)
                assert real.read() == block
        os.fsync(file.fileno())


def test_status_of_what_is_not_mounted(tmp_path: Path) -> None:
    done = run("status", str(tmp_path), check=False)
    assert done.returncode == 1
    assert done.stderr == f"cloakfs: {tmp_path}: not a cloakfs mount (cloakfs status lists all)\n"


def test_status_for_programs(mount: MakeMount) -> None:
    there = mount("-o", "ro,no_root_squash,prefetch=off")
    (told,) = json.loads(run("status", there.path, "--json").stdout)
    assert (told["source"], told["options"], told["pid"]) == (there.source, "ro,no_root_squash,prefetch=off", there.pid)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("prefetch=some", "bad value of prefetch, 'some'; expected one of cursors, slowdown, default, always, off"),
        ("prefetch_window=-1", "bad value of prefetch_window, '-1'; expected a number of bytes up to 1024G"),
        ("prefetch_files=0", "bad value of prefetch_files, '0'; expected a number from 1 to 9999999"),
    ],
)
def test_bad_options(tree: str, tmp_path: Path, words: str, problem: str) -> None:
    done = run("mount", tree, str(tmp_path), "-o", words, check=False)
    assert done.returncode == 2
    assert problem in done.stderr


def test_a_record_that_cannot_be_written(tree: str, tmp_path: Path) -> None:
    done = run("mount", tree, str(tmp_path), "-o", f"record={tmp_path}/no/where", check=False)
    assert done.returncode == 1
    assert done.stderr == f"cloakfs: record={tmp_path}/no/where: No such file or directory\n"
