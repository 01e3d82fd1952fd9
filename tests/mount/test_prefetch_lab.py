"""The slow disk is slow, and is removed; streams are read from real files; the figures can be made."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Container, Iterator
from pathlib import Path

import pytest

from bench.clone import module_command
from bench.prefetch import content
from bench.prefetch.live import Files, read_all
from bench.prefetch.slowdisk import SlowDisk, SlowDiskError, slow_disk
from bench.prefetch.streams import Read, generate, parse
from bench.workers import fork
from cloakfs.linux import mountinfo
from tests.mount.conftest import COMMAND, Mount
from tests.mount.loopfs import require_disk
from tests.waiting import wait_until

M = 1 << 20
PREFETCH = module_command("bench", "prefetch")


def groups() -> set[str]:
    """The cgroups of all slow disks there are."""
    with open("/proc/self/mounts", encoding="utf-8", errors="surrogateescape") as file:
        roots = [line.split()[1] for line in file if line.split()[2] in ("cgroup", "cgroup2")]
    return {f"{root}/{name}" for root in roots for name in os.listdir(root) if name.startswith("cloakfs-slow-")}


def left_behind(place: Path, others: Container[str]) -> list[str]:
    names = [path for path in mountinfo.by_path() if path.startswith(f"{place}/")]
    names += [str(path) for path in place.iterdir()]
    names += [group for group in groups() if group not in others]
    for device in Path("/sys/block").glob("loop*/loop/backing_file"):
        backing = device.read_text()
        names += [str(device)] if str(place) in backing else []
    return names


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """Where disks are made; nothing is left there, nor anywhere else."""
    others = groups()  # of a measurement that runs beside the tests, or that was killed before them
    yield tmp_path
    wait_until(lambda: left_behind(tmp_path, others) == [])  # a loop device goes away in its own time


@pytest.fixture
def disk(place: Path) -> Iterator[SlowDisk]:
    try:
        with slow_disk(32, base=str(place)) as made:
            yield made
    except SlowDiskError as exc:
        pytest.skip(f"no slow disk: {exc}")


def require_slow_disk(place: Path) -> None:
    try:
        with slow_disk(16, base=str(place)):
            pass
    except SlowDiskError as exc:
        pytest.skip(f"no slow disk: {exc}")


def reads_per_second(disk: SlowDisk, name: str, reads: int, *, slowly: bool) -> float:
    """Of a process of its own, of 4 KiB each in random order."""
    (stream,) = generate("random", 8 * M, 4096)
    assert content.drop_pages(os.path.join(disk.path, name)) in (0, None)
    reading, writing = os.pipe()
    if (pid := fork()) == 0:
        try:
            if slowly:
                disk.slow_down(os.getpid())
            with Files(disk.path, [name], direct=True) as files:
                some = [read._replace(file=name) for read in stream[:reads]]
                found = read_all([some], files, verified=True)
            os.write(writing, f"{reads / found.seconds}".encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, encoding="ascii") as told:
        rate = float(told.read())
    os.waitpid(pid, 0)
    return rate


def test_it_is_slow_for_whom_it_is_told(disk: SlowDisk) -> None:
    content.create(disk.path, "file", 8 * M)
    # The best of three, because on a busy machine one may wait for a processor, and not for the disk.
    slow, fast = (max(reads_per_second(disk, "file", 300, slowly=slowly) for _ in range(3)) for slowly in (True, False))
    assert 0.5 * 200 < slow < 2 * 200
    assert fast > 3 * slow
    assert "throttled to 200 reads/s and 120 MB/s; read_ahead_kb 128" in disk.about


def test_it_goes_away_with_whoever_is_in_it(place: Path) -> None:
    require_slow_disk(place)
    others = groups()
    with subprocess.Popen(["sleep", "100"]) as sleeper:
        with contextlib.suppress(ZeroDivisionError), slow_disk(16, base=str(place)) as disk:
            disk.slow_down(sleeper.pid)
            raise ZeroDivisionError
        assert left_behind(place, others) == []
        assert sleeper.poll() is None
        sleeper.kill()


def test_the_devices_settings_are_put_back(place: Path) -> None:
    require_slow_disk(place)
    with slow_disk(16, base=str(place), read_ahead_kb=512) as disk:
        setting = Path(f"/sys/block/{disk.device}/queue/read_ahead_kb")
        assert setting.read_text() == "512\n"
    assert setting.read_text() != "512\n"


def test_memory_is_no_disk() -> None:
    with pytest.raises(
        SlowDiskError, match=r"^/dev/shm: lies on a tmpfs, in memory; set TMPDIR to a directory on a disk$"
    ):
        slow_disk(16, base="/dev/shm").__enter__()


def test_what_is_missing_is_told(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_disk(str(place), "that is what is told first")
    monkeypatch.setattr("bench.prefetch.slowdisk._hierarchies", lambda: iter(()))
    told = "reads cannot be throttled here: no cgroup hierarchy has blkio (v1) or io (v2)"
    with pytest.raises(SlowDiskError) as caught:
        slow_disk(16, base=str(place)).__enter__()
    assert str(caught.value) == told
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SlowDiskError, match=r"^mkfs.ext4 is not installed "):
        slow_disk(16, base=str(place)).__enter__()


# -- streams, live -------------------------------------------------------------------------------------


def replay(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*PREFETCH, "replay", *arguments], capture_output=True, text=True, check=False, timeout=60)


def test_a_stream_reaches_a_mount_as_it_is(mount: Callable[..., Mount], tmp_path: Path) -> None:
    record, sent = tmp_path / "record", tmp_path / "sent"
    mounted = mount("-o", f"no_root_squash,prefetch=always,record={record}")
    pattern = ("--pattern", "stride", "--size", "1M", "--reordered", "10", "--readers", "2", "--save", str(sent))
    done = replay(*pattern, "--live", mounted.path, "--create", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["requests"], told["bytes"], told["O_DIRECT"]) == (128, M, True)
    assert told["p50 ms"] <= told["p99 ms"] <= told["p100 ms"]
    subprocess.run([*COMMAND, "umount", mounted.path], check=True)  # all of the record is written then
    got, expected = (parse(path.read_text().splitlines(), path.name) for path in (record, sent))
    assert [read[2:] for read in got] == [read[2:] for read in expected]


def test_several_at_once_and_through_the_page_cache(mount: Callable[..., Mount]) -> None:
    mounted = mount("-o", "no_root_squash")
    pattern = ("--pattern", "random", "--size", "1M", "--live", mounted.path, "--create", "--outstanding", "4")
    for more in ([], ["--buffered"], ["--paced"]):
        done = replay(*pattern, *more)
        assert done.returncode == 0, done.stderr
        assert f"bytes: {M}\n" in done.stdout


def test_other_content_is_noticed(mount: Callable[..., Mount]) -> None:
    mounted = mount("-o", "no_root_squash")
    content.create(mounted.source, "file-0", M)
    with open(mounted.real("file-0"), "r+b") as file:
        file.seek(40960)
        file.write(b"x" * 8)
    done = replay("--pattern", "sequential", "--size", "1M", "--live", mounted.path, "--create")
    assert done.returncode == 1
    assert done.stderr.startswith(f"cloakfs: {mounted.path}: file-0: wrong content at 40960: 0x7878787878787878 ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("offset", [0, 1, 4095, 4096, 5000, 8191])
def test_content_tells_where_it_belongs(tmp_path: Path, offset: int) -> None:
    content.create(str(tmp_path), "a/b", 20_000)
    data = bytearray((tmp_path / "a/b").read_bytes())
    assert len(data) == 20_000
    content.verify("a/b", offset, memoryview(data)[offset:])
    for wrong in (("a/c", offset), ("a/b", offset + 4096)):
        with pytest.raises(OSError, match="wrong content"):
            content.verify(*wrong, memoryview(data)[offset:])


def test_a_read_that_fails_ends_all(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(bytes(4096))
    reads = [Read(0, "x", 0, 4096)] * 10_000
    with Files(str(tmp_path), ["x"], direct=False) as files, pytest.raises(OSError, match="wrong content"):
        read_all([reads, reads], files, outstanding=2, verified=True)


# -- figures -------------------------------------------------------------------------------------------


def start(place: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*PREFETCH, "figures", "--quick", *arguments],
        env={**os.environ, "TMPDIR": str(place)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_figures(place: Path) -> None:
    require_slow_disk(place)
    results = place / "results"
    results.mkdir()
    out, plot = results / "out.json", results / "out.svg"
    picture = ["--plot", str(plot)] if shutil.which("python3") and _has_matplotlib() else []
    process = start(place, "--json", str(out), *picture)
    shown, said = process.communicate(timeout=250)
    assert process.returncode == 0, said
    assert "cloakfs: prefetch: reduced: stride: 4 MiB instead of 256 MiB\n" in said
    told = json.loads(out.read_text())
    assert told["failed"] == []
    assert told["about"]["slow disk"].startswith("ext4 on loop")
    assert {"kernel", "block", "cache", "runs", "reduced", "disk", "memory"} <= set(told["about"])
    rates = told["rates"]
    assert {setting: len(by_case) for setting, by_case in rates.items()} == {
        "stride": 2,
        "readers": 4,
        "table": 2,
        "device": 6,
    }
    assert all(
        len(values) == 1 and values[0] > 0 for cs in rates.values() for c in cs.values() for values in c.values()
    )
    assert list(rates["stride"]["s = 2"]) == ["bare", "off", "default", "cursors"]
    assert "Table 1, Figure 8" in shown
    if picture:
        assert "<svg" in plot.read_text()
    shutil.rmtree(results)


def _has_matplotlib() -> bool:
    return subprocess.run([sys.executable, "-c", "import matplotlib"], capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("when", [1, 4])
def test_interrupted_they_leave_nothing_behind(place: Path, number: signal.Signals, when: int) -> None:
    """With the disk there and nothing else, or with all mounts."""
    require_slow_disk(place)
    process = start(place, "--figure", "8", "--size", "64M")
    try:
        wait_until(
            lambda: (
                process.poll() is not None or sum(path.startswith(f"{place}/") for path in mountinfo.by_path()) >= when
            )
        )
        assert process.poll() is None
    finally:
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert said.endswith("cloakfs: prefetch: interrupted\n")
    assert said.count("\n") == 3


def test_clients_beside_what_hangs(place: Path) -> None:
    done = subprocess.run(
        [*PREFETCH, "hung", "--rounds", "1", "--seconds", "0.3", "--json"],
        env={**os.environ, "TMPDIR": str(place)}, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert len(told["before"]) == len(told["while_waiting"]) == len(told["ratios"]) == 1
    assert told["before"][0] > 0
