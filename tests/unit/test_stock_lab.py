"""The laboratory of stock kernels (bench/lab/stock) without qemu: the model, the image, what is booted."""

import shutil
import subprocess
from pathlib import Path

import pytest

from bench.lab.stock import setup
from bench.lab.stock.image import closure, parse_packages
from bench.lab.stock.initramfs import MODULES, newc
from bench.lab.stock.kernels import KERNELS, load_order
from bench.lab.stock.marks import counts_by_number, with_switches
from bench.lab.stock.setup import NoLaboratory, install_missing
from bench.lab.stock.weights import Counts

MODULES_DEP = """\
kernel/fs/ext4/ext4.ko: kernel/fs/jbd2/jbd2.ko kernel/fs/mbcache.ko kernel/lib/crc16.ko
kernel/fs/jbd2/jbd2.ko:
kernel/fs/mbcache.ko:
kernel/lib/crc16.ko:
kernel/fs/nfs/nfsv3.ko: kernel/fs/nfs/nfs.ko kernel/net/sunrpc/sunrpc.ko
kernel/fs/nfs/nfs.ko: kernel/net/sunrpc/sunrpc.ko
kernel/net/sunrpc/sunrpc.ko:
"""

PACKAGES = """\
base-files\t12\tawk\t\t\tyes
mawk\t1.3\t\tlibc6 (>= 2.36)\tawk\t
libc6\t2.36\t\tlibgcc-s1, libcrypt1 (>= 1:4)\t\t
libgcc-s1\t12\t\tlibc6\t\t
git\t2.39\t\tlibc6 (>= 2.36), perl:any | perl-base, liberror-perl\t\t
perl-base\t5.36\tlibc6\t\tperl:any (= 5)\t
left-over\t1\t\tlibc6\t\t
"""


def test_what_things_take() -> None:
    assert Counts(0, 0, 0, 0).seconds() == 0
    assert Counts(1_000_000, 0, 0, 0).seconds() == pytest.approx(145e-6)
    assert Counts(0, 1_000_000, 0, 0).seconds() == pytest.approx(319e-6)
    assert Counts(0, 0, 1_000_000, 0).seconds() == pytest.approx(100e-6)
    assert Counts(0, 0, 0, 100).seconds() == pytest.approx(168e-6)
    assert Counts(1000, 2000, 3000, 4).seconds() == pytest.approx(145e-9 + 638e-9 + 300e-9 + 6720e-9)


def test_what_the_plugin_writes_is_read() -> None:
    assert counts_by_number("") == {}
    found = counts_by_number("1 10 20 30\n3 11 21 31\n4 12")
    assert found == {1: (10, 20, 30), 3: (11, 21, 31)}, "the last line is not complete"
    assert with_switches(found[3], 7) == Counts(user=11, kernel=21, copied=31, switches=7)


def test_modules_are_loaded_after_what_they_need() -> None:
    order = load_order(MODULES_DEP, ["built-in", "nfsv3", "ext4", "nfs"])
    assert [Path(file).stem for file in order] == ["sunrpc", "nfs", "nfsv3", "crc16", "mbcache", "jbd2", "ext4"]
    assert {"9p", "overlay", "ext4", "fuse", "nfsd", "nfs"} <= set(MODULES)


def test_the_image_has_what_packages_need_and_no_more() -> None:
    packages = parse_packages(PACKAGES)
    assert packages["git"].depends == (("libc6",), ("perl", "perl-base"), ("liberror-perl",))
    assert packages["perl-base"].provides == ("perl",)
    assert closure(packages, ["git", "not-installed"]) == sorted(
        ["base-files", "mawk", "libc6", "libgcc-s1", "git", "perl-base"]
    )


@pytest.mark.skipif(not shutil.which("busybox"), reason="needs busybox, to unpack it")
def test_the_archive_can_be_unpacked(tmp_path: Path) -> None:
    files = {"init": (0o755, b"#!/bin/sh\n"), "a/empty": (0o644, b""), "a/odd": (0o600, b"123")}
    subprocess.run(["busybox", "cpio", "-i"], input=newc(["a"], files), cwd=tmp_path, check=True, capture_output=True)
    for name, (mode, content) in files.items():
        path = tmp_path / name
        assert (path.read_bytes(), path.stat().st_mode & 0o777) == (content, mode)


@pytest.fixture(autouse=True)
def debian(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.freedesktop_os_release", lambda: {"VERSION_CODENAME": "bookworm"})


def test_who_is_not_root_gets_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(NoLaboratory, match=r"^needs root\b.*$"):
        install_missing()


def test_another_system_gets_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.freedesktop_os_release", lambda: {"VERSION_CODENAME": "trixie"})
    with pytest.raises(NoLaboratory, match=r"^needs Debian 12\b.*$"):
        install_missing()


def test_what_cannot_be_installed_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    apt = tmp_path / "apt-get"
    apt.write_text("#!/bin/sh\necho 'E: Unable to locate package' qemu >&2; echo 'E: more' >&2; exit 100\n")
    apt.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr(setup, "missing_packages", lambda: ["qemu-system-x86"])
    with pytest.raises(NoLaboratory) as found:
        install_missing()
    assert str(found.value) == "apt-get update -qq: E: Unable to locate package qemu E: more"


def test_every_kernel_is_a_version_of_linux() -> None:
    assert list(KERNELS) == ["6.1", "6.12"]
