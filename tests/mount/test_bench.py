"""The benchmark runs and reports every peer; its figures are not tested."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.lab import guest
from bench.over_nfs import BARE_EXPORT, EXPORTS, PUBLIC, all_listings
from bench.peers import BARE, FIXED, MANY, PEERS, PLAIN, does
from bench.speed.overnfs import LISTINGS
from bench.speed.plan import GROWTH, IDLE, REQUESTS
from bench.tree import WORKER
from bench.work import all_work
from cloakfs.linux import mountinfo
from cloakfs.state.runtime import RUN_DIR, STATE_DIR, mounted
from tests import processes
from tests.waiting import wait_until

BENCH = (sys.executable, "-m", "bench")
WORKS = all_work(1)
LISTED = {
    name: one
    for name, one in all_listings(1).items()
    if one.kind == PUBLIC and one.version == "4.2" and not guest.missing()
}
"""What is listed over NFS: of what `--quick` lists, one half, because the guest takes longer than all the rest."""


def mounts_below(place: Path) -> list[str]:
    return [path for path in mountinfo.by_path() if path.startswith(f"{place}/")]


@pytest.fixture
def place() -> Iterator[Path]:
    """Where the benchmark works: not pytest's own directory, which other users may not enter."""
    base = Path(f"/tmp/cloakfs-test-bench-{os.getpid()}")
    base.mkdir(mode=0o755)
    yield base
    left = mounts_below(base)
    shutil.rmtree(base)
    assert left == []


def daemons_below(place: Path) -> list[int]:
    return [mount.pid for mount in mounted().values() if mount.target.startswith(f"{place}/")]


def left_behind(place: Path) -> list[str]:
    names = [name for directory in (RUN_DIR, STATE_DIR) for name in os.listdir(directory) if place.name in name]
    return names + mounts_below(place) + [str(path) for path in place.iterdir()]


def bench(place: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TMPDIR": str(place)}
    return subprocess.run(
        [*BENCH, *arguments], env=environment, capture_output=True, text=True, check=False, timeout=550
    )


@pytest.mark.timeout(600)  # a machine may be slow
def test_every_peer_does_all_the_work(place: Path, tmp_path: Path) -> None:
    out, plot = tmp_path / "results" / "out.json", tmp_path / "out.svg"
    arguments = ["--quick", "--markdown", "--json", str(out)]
    for name in (*WORKS, *LISTED, REQUESTS, IDLE, GROWTH):
        arguments += ["--work", name]
    if has_plots := bool(shutil.which("bindfs")):
        pytest.importorskip("matplotlib", reason="needs the extra `bench`")
        arguments += ["--plot", str(plot)]
    done = bench(place, *arguments)
    assert done.returncode == 0, done.stderr
    assert left_behind(place) == []
    results = json.loads(out.read_text())
    assert results["failed"] == []
    assert results["about"]["rounds"] == 1
    # What a machine may lack is told of.
    for name in results["skipped"]:
        assert name in ("bind mount", "overlayfs", "bindfs", "bindfs, caches off", "cloakfs stock loop", LISTINGS)
        assert f"cloakfs: bench: skipped {name}: " in done.stderr
    peers = [peer for peer in PEERS if peer not in results["skipped"]]
    assert list(results["rates"]) == ["pinned", "unpinned"]
    listed = {name: results["rates"]["pinned"].pop(name) for name in LISTED}
    for name, by_export in listed.items():
        assert list(by_export) == list(EXPORTS)
        rounds = LISTED[name].rounds or 1
        assert all(len(values) == rounds and min(values) > 0 for values in by_export.values())
        assert set(results["requests"][name]) == set(EXPORTS) - {BARE_EXPORT}
        assert all(asked["readdir"] > 0 for asked in results["requests"][name].values())
    for setting, rates in results["rates"].items():
        assert set(rates) == {name for name, work in WORKS.items() if setting == work.settings[0]}
        for name, by_peer in rates.items():
            assert list(by_peer) == [peer for peer in peers if does(peer, WORKS[name])]
            rounds = WORKS[name].rounds or 1
            assert all(len(values) == rounds and min(values) > 0 for values in by_peer.values())
    assert set(results["requests"]["stat public"]) == {"cloakfs null", MANY, FIXED, PLAIN}
    assert {"idle RSS", "idle PSS", "growth RSS", "growth PSS"} <= set(results["memory"][MANY])
    for peer in (*peers[1:], *(export for export in EXPORTS if LISTED and export != BARE_EXPORT)):
        assert f"\n| {peer} | **" in done.stdout
    for line in done.stdout.splitlines():
        assert "not measured" not in line or line.startswith("| ls -l over NFS")
    if has_plots:
        assert "<svg" in plot.read_text()

    again = subprocess.run(
        [*BENCH, "--show", str(out), "--against", str(out)], capture_output=True, text=True, check=False
    )
    assert again.returncode == 0
    assert "Nothing got worse by more than the spread." in again.stdout


def test_some_peers_and_works(place: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    choice = ["--peer", BARE, "--peer", "*null", "--work", "stat p*", "--cpus", "unpinned"]
    done = bench(place, "--quick", *choice, "--json", str(out))
    assert done.returncode == 0, done.stderr
    results = json.loads(out.read_text())
    assert {work: list(rates) for work, rates in results["rates"].pop("unpinned").items()} == {
        "stat public": [BARE, "cloakfs null"],
        "stat private": [BARE, "cloakfs null"],
    }
    assert (results["rates"], results["requests"], results["memory"]) == ({}, {}, {})


def test_what_cannot_be_done_is_told_before_anything_is_measured(place: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text("[]")
    for status, said, arguments in (
        (2, "--work x: no such thing; see --list", ["--work", "x"]),
        (1, f"{tmp_path}/absent: No such file or directory", ["--against", f"{tmp_path}/absent"]),
        (2, f"{other}: not a run", ["--show", str(other)]),
        (1, f"{other}/out.json: File exists", ["--json", f"{other}/out.json"]),
        (1, f"{tmp_path}/absent: No such file or directory", ["--package", f"{tmp_path}/absent"]),
    ):
        done = bench(place, *arguments)
        assert done.returncode == status
        assert done.stderr.startswith(f"cloakfs: {said}")
        assert done.stderr.count("\n") == 1
    assert left_behind(place) == []


def test_without_matplotlib_there_is_one_line(place: Path, tmp_path: Path) -> None:
    (tmp_path / "matplotlib.py").write_text("raise ImportError")
    done = subprocess.run(
        [*BENCH, "--plot", str(tmp_path / "out.svg")],
        env={**os.environ, "PYTHONPATH": str(tmp_path), "TMPDIR": str(place)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "cloakfs: --plot: matplotlib is not installed (pip install -e '.[bench]')\n"


def test_list() -> None:
    done = subprocess.run([*BENCH, "--list"], capture_output=True, text=True, check=True)
    lines = [line.strip() for line in done.stdout.splitlines()]
    assert set(lines) >= {*PEERS, *WORKS, "requests", "memory idle", "memory growth"}


def test_a_peer_that_the_machine_cannot_have_is_skipped_loudly(place: Path, tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "mount").symlink_to("/usr/bin/mount")
    (programs / "umount").symlink_to("/usr/bin/umount")
    done = subprocess.run(
        [*BENCH, "--quick", "--peer", "b*", "--work", "stat public"],
        env={**os.environ, "TMPDIR": str(place), "PATH": str(programs)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "cloakfs: bench: skipped bindfs: bindfs is not installed (apt install bindfs)\n" in done.stderr
    assert "skipped bindfs, caches off: bindfs is not installed" in done.stdout
    assert left_behind(place) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("when", [0, 6])
def test_interrupted_it_leaves_nothing_behind(place: Path, number: signal.Signals, when: int) -> None:
    """While it mounts, or when everything is there (a file system and a mount each but for the bare tree)."""
    peers = ["--peer", BARE, "--peer", "overlayfs", "--peer", MANY, "--peer", FIXED]
    process = subprocess.Popen(
        [*BENCH, *peers, "--work", "ls*", "--work", "tar*"],
        env={**os.environ, "TMPDIR": str(place)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_until(lambda: process.poll() is not None or len(mounts_below(place)) > when, 100)
        assert process.poll() is None
    finally:
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert said == "cloakfs: bench: interrupted\n"
    assert left_behind(place) == []


def is_mounting(pid: int) -> bool:
    """Does this process still wait for a command that mounts?"""
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        with contextlib.suppress(OSError):
            if b"mount" in Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0"):
                return True
    return False


def is_measuring(pid: int) -> bool:
    """Has this process a child that works, as the user of the benchmark?"""
    owners = []
    for child in processes.children(pid):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            owners.append(os.stat(f"/proc/{child}").st_uid)
    return WORKER in owners


def test_a_daemon_that_dies_fails_alone(place: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    choice = ["--peer", BARE, "--peer", "cloakfs null", "--work", "stat public", "--rounds", "2", "--seconds", "1"]
    process = subprocess.Popen(
        [*BENCH, *choice, "--json", str(out)],
        env={**os.environ, "TMPDIR": str(place)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_until(lambda: daemons_below(place), 100)
        wait_until(lambda: not is_mounting(process.pid), 100)
        wait_until(lambda: is_measuring(process.pid), 100)
        os.kill(daemons_below(place)[0], signal.SIGKILL)
    finally:
        shown, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "cloakfs: bench: pinned, stat public with cloakfs null: " in said
    assert "failed: pinned, stat public with cloakfs null: " in shown
    rates = json.loads(out.read_text())["rates"]["pinned"]["stat public"]
    assert {peer: len(values) for peer, values in rates.items()} == {BARE: 2}
    assert left_behind(place) == []


def guest_of(place: Path) -> list[int]:
    """The processes of the laboratory's guest that a benchmark in this place has begun."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if f"lab.out={place}/".encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


@pytest.fixture
def listing(place: Path) -> Iterator[subprocess.Popen[str]]:
    """A benchmark that has begun to list over NFS."""
    if why := guest.missing():
        pytest.skip(why)
    process = subprocess.Popen(
        [*BENCH, "--quick", "--peer", BARE_EXPORT, "--work", "ls -l over NFS*"],
        env={**os.environ, "TMPDIR": str(place)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_until(lambda: process.poll() is not None or guest_of(place), 100)
    assert process.poll() is None
    yield process
    process.kill()
    process.wait()


def test_interrupted_it_ends_the_guest(place: Path, listing: subprocess.Popen[str]) -> None:
    listing.send_signal(signal.SIGINT)
    _, said = listing.communicate(timeout=60)
    assert (listing.returncode, said) == (1, "cloakfs: bench: interrupted\n")
    assert guest_of(place) == []
    assert left_behind(place) == []


def test_a_guest_that_dies_is_told_of(place: Path, listing: subprocess.Popen[str]) -> None:
    os.kill(min(guest_of(place)), signal.SIGKILL)
    shown, said = listing.communicate(timeout=60)
    assert listing.returncode == 1
    assert said.startswith(f"cloakfs: bench: {LISTINGS}: the guest ended")
    assert f"\nfailed: {LISTINGS}: the guest ended" in shown
    assert left_behind(place) == []
