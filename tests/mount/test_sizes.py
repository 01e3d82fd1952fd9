"""Files that say they are empty, and are not: the kernel's own, and those of some file systems of others."""

import contextlib
import mmap
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.agents import User, read
from tests.mount.conftest import Mount, is_mounted
from tests.mount.loopfs import attached, require
from tests.waiting import wait_until

MakeMount = Callable[..., Mount]
MakeUser = Callable[..., User]

OPTIONS = ("-o", "no_root_squash")

LYING = """
import os, stat, sys
import pyfuse3, trio
from pyfuse3 import FileInfo
from tests.mount.slowfs import Slow

class Lying(Slow):
    async def getattr(self, inode, ctx):
        entry = await super().getattr(inode, ctx)
        entry.st_size = 0
        return entry

    async def open(self, inode, flags, ctx):
        return FileInfo(fh=inode, direct_io=True)

    async def read(self, fh, off, size):
        return (b"%d " % fh * 100_000)[off : off + size]

pyfuse3.init(Lying(sys.argv[1] + ".flag"), sys.argv[1], {"fsname=lyingfs", "allow_other"})
try:
    trio.run(pyfuse3.main)
finally:
    pyfuse3.close()
"""


@contextlib.contextmanager
def lying(path: str) -> Iterator[None]:
    """A file system in FUSE whose files all say that they are empty."""
    os.mkdir(path)
    server = subprocess.Popen([sys.executable, "-c", LYING, path])
    try:
        wait_until(lambda: is_mounted(path))
        yield
    finally:
        subprocess.run(["umount", "--lazy", path], check=True)
        server.terminate()  # a mount of cloakfs still holds it
        server.wait()


@pytest.mark.parametrize(
    ("kind", "files"),
    [("proc", ["version", "cpuinfo", "filesystems", "sys/kernel/ostype"]), ("cgroup2", ["cgroup.controllers"])],
)
def test_files_of_the_kernel_have_their_content(
    kind: str, files: list[str], tree: str, mount: MakeMount, user: MakeUser
) -> None:
    require(kind)
    with attached("none", f"{tree}/{kind}", "-t", kind):
        m = mount(*OPTIONS)
        for reader in user(0), user(2001):
            for name in files:
                there = m.real(kind, name)
                assert os.stat(m.at(kind, name)).st_size == 0
                assert reader.do(read, m.at(kind, name)) == read(there) != b""


def test_one_can_be_read_and_written(tree: str, mount: MakeMount) -> None:
    """Through one descriptor, as sysctl(8) and programs that manage control groups do."""
    with attached("none", f"{tree}/proc", "-t", "proc"):
        m = mount(*OPTIONS)
        with open(m.at("proc/sys/kernel/ostype"), "rb", buffering=0) as file:
            assert file.read() == b"Linux\n"
        before = read("/proc/self/coredump_filter")
        path = f"proc/{os.getpid()}/coredump_filter"
        fd = os.open(m.at(path), os.O_RDWR)
        try:
            assert os.read(fd, 100) == before
            os.pwrite(fd, b"0x1", 0)
            assert int(os.pread(fd, 100, 0), 16) == 1
        finally:
            os.close(fd)
            Path("/proc/self/coredump_filter").write_bytes(b"0x" + before)


def test_files_of_others_have_their_content(tree: str, mount: MakeMount, user: MakeUser) -> None:
    with lying(f"{tree}/lying"):
        m = mount(*OPTIONS)
        for reader in user(0), user(2001):
            content = reader.do(read, m.at("lying/7"))
            assert content == b"107 " * 100_000


def test_an_empty_file_can_grow_and_be_mapped(base: str, tree: str, mount: MakeMount) -> None:
    """Also where sizes are not trusted, by who has it open for writing."""
    require("overlay")
    with attached("tmpfs", f"{base}/layers", "-t", "tmpfs"):
        layers = [os.path.join(base, "layers", name) for name in ("lower", "upper", "work")]
        for layer in layers:
            os.mkdir(layer)
        words = ",".join(f"{name}dir={path}" for name, path in zip(("lower", "upper", "work"), layers, strict=True))
        with attached("overlay", f"{tree}/overlay", "-t", "overlay", "-o", words):
            m = mount(*OPTIONS)
            path = m.at("overlay/file")
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY))
            reader, writer = os.open(path, os.O_RDONLY), os.open(path, os.O_RDWR)
            try:
                assert os.read(reader, 10) == b""
                os.ftruncate(writer, 4096)
                with mmap.mmap(writer, 4096) as mapped:
                    mapped[:5] = b"hello"
                    mapped.flush()
                assert os.pread(reader, 5, 0) == b"hello"
                assert read(m.real("overlay/file"))[:5] == b"hello"
                os.pwrite(writer, b"HELLO", 0)
                assert os.pread(reader, 5, 0) == b"HELLO"
            finally:
                os.close(reader)
                os.close(writer)
