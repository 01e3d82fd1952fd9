"""What is different with the patches in contrib/pyfuse3, and without them."""

import errno
import mmap
import os
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pyfuse3
import pytest

from cloakfs import linux
from tests.agents import User
from tests.mount.conftest import Mount, run, told
from tests.mount.loopfs import filesystem
from tests.mount.test_caching import requests

MakeMount = Callable[..., Mount]

HAS_PATCH = hasattr(pyfuse3.Operations, "fallocate")
with_patch = pytest.mark.skipif(not HAS_PATCH, reason="this pyfuse3 is not patched (scripts/setup --patched-pyfuse3)")
without_patch = pytest.mark.skipif(HAS_PATCH, reason="this pyfuse3 is patched (scripts/setup --released-pyfuse3)")

K, M = 1 << 10, 1 << 20
KEEP_SIZE, PUNCH_HOLE, COLLAPSE_RANGE, ZERO_RANGE = 1, 2, 8, 16
UID = 2001


@pytest.fixture
def ext4(base: str) -> Iterator[str]:
    """A file system with holes, half of which is reserved for root."""
    with filesystem("ext4", base, mkfs=("-m", "50")) as path:
        yield path


@pytest.fixture
def there(ext4: str, mount: MakeMount) -> Mount:
    return mount("-o", "no_root_squash", source=ext4)


def write(path: str, content: bytes) -> str:
    with open(path, "wb") as file:
        file.write(content)
    os.chmod(path, 0o666)
    return path


def read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def error(call: Callable[..., object], *arguments: Any) -> int:
    """The errno of the call, 0 if it succeeds."""
    try:
        call(*arguments)
    except OSError as exc:
        return exc.errno or -1
    return 0


def fallocate(path: str, mode: int, offset: int, length: int, flags: int = os.O_RDWR) -> None:
    fd = os.open(path, flags)
    try:
        linux.fallocate(fd, mode, offset, length)
    finally:
        os.close(fd)


def sparse(path: str) -> list[tuple[int, int]]:
    """Make a file with two extents of data; where they begin and end."""
    extents = [(0, 64 * K), (M, M + 64 * K)]
    with open(path, "wb") as file:
        for start, end in extents:
            file.seek(start)
            file.write(b"x" * (end - start))
        file.truncate(2 * M)
    os.chmod(path, 0o666)
    return extents


def extents(path: str) -> list[tuple[int, int]]:
    """Where lseek(2) says that data begins and ends."""
    found = []
    end = 0
    fd = os.open(path, os.O_RDONLY)
    try:
        while error(os.lseek, fd, end, os.SEEK_DATA) != errno.ENXIO:
            start = os.lseek(fd, end, os.SEEK_DATA)
            end = os.lseek(fd, start, os.SEEK_HOLE)
            found.append((start, end))
    finally:
        os.close(fd)
    return found


# -- with the patch ----------------------------------------------------------------------------------------------------


@with_patch
def test_space_is_allocated(there: Mount, user: Callable[..., User]) -> None:
    write(there.real("file"), b"abc")
    user(UID).do(fallocate, there.at("file"), 0, 0, M)
    for path in (there.at("file"), there.real("file")):
        info = os.stat(path)
        assert info.st_size == M
        assert info.st_blocks * 512 >= M
    assert read(there.at("file")) == b"abc" + bytes(M - 3)


@with_patch
def test_the_size_can_be_kept(there: Mount) -> None:
    write(there.real("file"), b"abc")
    fallocate(there.at("file"), KEEP_SIZE, 0, M)
    assert os.stat(there.at("file")).st_size == 3
    assert os.stat(there.real("file")).st_blocks * 512 >= M


@with_patch
@pytest.mark.parametrize("mode", [PUNCH_HOLE | KEEP_SIZE, ZERO_RANGE, ZERO_RANGE | KEEP_SIZE])
def test_what_is_removed_is_no_longer_read(there: Mount, mode: int) -> None:
    write(there.real("file"), b"x" * M)
    assert read(there.at("file")) == b"x" * M  # and the kernel keeps it
    before = os.stat(there.at("file"))
    fallocate(there.at("file"), mode, 256 * K, 256 * K)
    for path in (there.real("file"), there.at("file")):
        assert read(path) == b"x" * (256 * K) + bytes(256 * K) + b"x" * (512 * K)
    after = os.stat(there.at("file"))
    assert after.st_size == M
    assert after.st_mtime_ns > before.st_mtime_ns
    assert (after.st_blocks < before.st_blocks) == bool(mode & PUNCH_HOLE)


@with_patch
def test_it_is_done_as_the_caller(there: Mount, user: Callable[..., User]) -> None:
    """Half of the file system is reserved for root."""
    info = os.statvfs(there.source)
    too_much = (info.f_bavail + info.f_bfree) // 2 * info.f_frsize
    write(there.real("file"), b"")
    assert os.stat(there.at("file")).st_size == 0
    assert user(UID).error(fallocate, there.at("file"), 0, 0, too_much) == errno.ENOSPC
    part = os.stat(there.real("file"))
    assert part.st_size > 0  # ext4 keeps what it could allocate
    told()
    assert os.stat(there.at("file")).st_size == part.st_size
    fallocate(there.at("file"), 0, 0, too_much)
    assert os.stat(there.real("file")).st_size == too_much


@with_patch
def test_what_is_appended_then_goes_to_the_real_end(there: Mount) -> None:
    write(there.real("file"), b"")
    fd = os.open(there.at("file"), os.O_WRONLY | os.O_APPEND)
    try:
        linux.fallocate(fd, 0, 0, 4 * K)
        with open(there.real("file"), "ab") as behind:
            behind.write(b"behind")
        os.write(fd, b"through")
    finally:
        os.close(fd)
    assert read(there.real("file")) == bytes(4 * K) + b"behindthrough"


@with_patch
def test_an_error_of_the_real_file_system_is_passed_on(base: str, mount: MakeMount) -> None:
    with filesystem("tmpfs", base) as source:
        there = mount(source=source)
        write(there.real("file"), b"x" * K)
        assert error(fallocate, there.at("file"), ZERO_RANGE, 0, K) == errno.EOPNOTSUPP
        fallocate(there.at("file"), PUNCH_HOLE | KEEP_SIZE, 0, K)  # which it can do
        assert read(there.real("file")) == bytes(K)


@with_patch
def test_data_and_holes_are_found(there: Mount) -> None:
    made = sparse(there.real("file"))
    assert extents(there.real("file")) == made
    assert extents(there.at("file")) == made
    with open(there.at("file"), "rb", buffering=0) as file:
        assert file.seek(128 * K, os.SEEK_DATA) == M
        assert file.read(1) == b"x"
        for whence in (os.SEEK_DATA, os.SEEK_HOLE):
            assert error(file.seek, 2 * M, whence) == errno.ENXIO


@with_patch
def test_a_mapping_may_have_data_for_a_hole(there: Mount) -> None:
    """The kernel keeps it until it sees fit, or nobody maps the file any more."""
    made = sparse(there.real("file"))
    with open(there.at("file"), "r+b") as file:
        mapping = mmap.mmap(file.fileno(), 2 * M)
    mapping[512 * K] = ord("y")
    assert extents(there.real("file")) == made  # it is not there yet
    assert extents(there.at("file")) == [(0, 2 * M)]
    mapping.close()
    assert extents(there.at("file")) == extents(there.real("file"))
    assert read(there.at("file"))[512 * K] == ord("y")
    assert len(extents(there.at("file"))) == 3


# -- with and without it -----------------------------------------------------------------------------------------------


def test_a_descriptor_for_reading_does_not_do(there: Mount, user: Callable[..., User]) -> None:
    write(there.real("file"), b"abc")
    for mode in (0, PUNCH_HOLE | KEEP_SIZE):
        assert user(UID).error(fallocate, there.at("file"), mode, 0, M, os.O_RDONLY) == errno.EBADF
    os.chmod(there.real("file"), 0o644)
    assert user(UID).error(fallocate, there.at("file"), 0, 0, M) == errno.EACCES
    assert read(there.real("file")) == b"abc"


def test_the_kernel_passes_on_no_other_modes(there: Mount) -> None:
    write(there.real("file"), b"x" * M)
    assert error(fallocate, there.at("file"), COLLAPSE_RANGE, 0, 64 * K) == errno.EOPNOTSUPP
    fallocate(there.real("file"), COLLAPSE_RANGE, 0, 64 * K)  # which the real file system can do


def test_the_c_library_allocates_in_any_case(there: Mount) -> None:
    write(there.real("file"), b"abc")
    with open(there.at("file"), "r+b") as file:
        os.posix_fallocate(file.fileno(), 0, M)
    assert read(there.real("file")) == b"abc" + bytes(M - 3)
    assert os.stat(there.real("file")).st_blocks * 512 >= M


# -- without it --------------------------------------------------------------------------------------------------------


@without_patch
@pytest.mark.parametrize("mode", [0, KEEP_SIZE, PUNCH_HOLE | KEEP_SIZE, ZERO_RANGE])
def test_nothing_is_allocated(there: Mount, mode: int) -> None:
    write(there.real("file"), b"abc")
    assert error(fallocate, there.at("file"), mode, 0, M) == errno.EOPNOTSUPP
    assert read(there.real("file")) == b"abc"
    assert os.stat(there.real("file")).st_blocks * 512 < M


@without_patch
def test_everything_is_data(there: Mount) -> None:
    sparse(there.real("file"))
    assert extents(there.at("file")) == [(0, 2 * M)]


# -- set-id bits and capabilities, which the kernel leaves to the real tree with the patch ---------------------------

CAPABILITY = bytes.fromhex("0100000200040000000000000000000000000000")


def append(path: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_APPEND)
    os.write(fd, b"more")
    os.close(fd)


def write_in_place(path: str) -> None:
    fd = os.open(path, os.O_RDWR)
    os.pwrite(fd, b"other", 0)
    os.close(fd)


def shorten(path: str) -> None:
    fd = os.open(path, os.O_RDWR)
    os.ftruncate(fd, 1)
    os.close(fd)


def reopen(path: str) -> None:
    os.close(os.open(path, os.O_WRONLY | os.O_TRUNC))


CHANGES: dict[str, Callable[[str], object]] = {
    "append": append,
    "write": write_in_place,
    "truncate": lambda path: os.truncate(path, 3),
    "ftruncate": shorten,
    "O_TRUNC": reopen,
    "nothing": lambda path: os.close(os.open(path, os.O_RDWR)),
}


def change(what: str, path: str) -> None:
    CHANGES[what](path)


def changed(what: str, path: str) -> tuple[int, int, int]:
    """Make a change; return the mode that is seen before, and at once afterwards by a path and by a descriptor."""
    before = os.stat(path).st_mode
    CHANGES[what](path)
    fd = os.open(path, os.O_RDONLY)
    try:
        return before, os.stat(path).st_mode, os.fstat(fd).st_mode
    finally:
        os.close(fd)


@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.parametrize("uid", [0, 3001, 3002])
@pytest.mark.parametrize("options", ["no_root_squash", "no_root_squash,cloak_list=uid +077 3000 3999"])
def test_set_id_bits_are_dropped_as_on_the_real_tree(
    tree: str, mount: MakeMount, user: Callable[..., User], what: str, uid: int, options: str
) -> None:
    m = mount("-o", options)
    one, other = user(uid), user(3003)
    for mode in (0o4777, 0o2777, 0o6757, 0o2767, 0o777):
        for name in ("bare", "file"):
            path = write(os.path.join(tree, f"{name}-{mode:o}"), b"content")
            os.chown(path, 3001, 3001)
            os.chmod(path, mode)
    told()
    for mode in (0o4777, 0o2777, 0o6757, 0o2767, 0o777):
        at = m.at(f"file-{mode:o}")
        other.do(os.stat, at)
        expected = one.do(changed, what, os.path.join(tree, f"bare-{mode:o}"))
        assert one.do(changed, what, at) == expected, oct(mode)
        assert other.do(os.stat, at).st_mode == expected[1]
        assert os.stat(os.path.join(tree, f"file-{mode:o}")).st_mode == expected[1]


@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.parametrize("uid", [0, 3001, 3002])
def test_capabilities_are_dropped_as_on_the_real_tree(
    tree: str, mount: MakeMount, user: Callable[..., User], what: str, uid: int
) -> None:
    m, one = mount("-o", "no_root_squash"), user(uid)
    for name in ("bare", "file"):
        path = write(os.path.join(tree, name), b"content")
        os.chown(path, 3001, 3001)
        os.setxattr(path, "security.capability", CAPABILITY)
    told()
    one.do(change, what, os.path.join(tree, "bare"))
    one.do(change, what, m.at("file"))
    found = ["security.capability" in os.listxattr(os.path.join(tree, name)) for name in ("bare", "file")]
    assert found[0] == found[1]


@pytest.mark.usefixtures("figures_at_once")
def test_the_text_of_a_link_is_requested_once(tree: str, mount: MakeMount, user: Callable[..., User]) -> None:
    """And nobody gets it who does not see the link."""
    os.mkdir(f"{tree}/home", 0o755)
    os.symlink("target", f"{tree}/home/link")
    os.chown(f"{tree}/home/link", 3001, 3001, follow_symlinks=False)
    m, ann, bob = mount("-o", "no_root_squash,cloak_list=uid +000 3000 3999"), user(3001), user(3002)
    told()
    assert ann.do(os.readlink, m.at("home/link")) == "target"
    before = requests(m)
    for _ in range(10):
        assert ann.do(os.readlink, m.at("home/link")) == "target"
    assert (requests(m) - before)["readlink"] == (0 if HAS_PATCH else 10)
    assert bob.error(os.readlink, m.at("home/link")) == errno.ENOENT
    os.unlink(f"{tree}/home/link")
    os.symlink("elsewhere", f"{tree}/home/link")
    os.chown(f"{tree}/home/link", 3001, 3001, follow_symlinks=False)
    told()
    assert ann.do(os.readlink, m.at("home/link")) == "elsewhere"
    os.chown(f"{tree}/home/link", 3002, 3002, follow_symlinks=False)
    told()
    assert ann.error(os.readlink, m.at("home/link")) == errno.ENOENT
    assert bob.do(os.readlink, m.at("home/link")) == "elsewhere"


def many_lines(path: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for _ in range(50):
        os.write(fd, b"line")
    os.close(fd)


@pytest.mark.usefixtures("figures_at_once")
def test_who_writes_little_at_a_time(tree: str, mount: MakeMount, user: Callable[..., User]) -> None:
    os.chmod(tree, 0o1777)
    m, ann = mount("-o", "no_root_squash,passthrough=off"), user(3001)
    before = requests(m)
    ann.do(many_lines, m.at("log"))
    found = requests(m) - before
    assert found["write"] == 50
    assert (found["getxattr"] <= 2) if HAS_PATCH else (found["getxattr"] == 50)


# -- copy_file_range(2) ----------------------------------------------------------------------------


@pytest.fixture(params=["ext4", "xfs", "btrfs"])
def copying(request: pytest.FixtureRequest, base: str, mount: MakeMount) -> Iterator[tuple[Mount, str]]:
    """A mount, and the kind of the file system below."""
    with filesystem(request.param, base) as path:
        os.chmod(path, 0o777)
        yield mount("-o", "rw", source=path), request.param


def copy(source: str, target: str, size: int, offset: int = 0, to: int = 0) -> None:
    """Copy as `cp` does: until nothing is left."""
    fds = os.open(source, os.O_RDONLY), os.open(target, os.O_WRONLY | os.O_CREAT, 0o666)
    done = 0
    try:
        while done < size and (step := os.copy_file_range(*fds, size - done, offset + done, to + done)):
            done += step
    finally:
        for fd in fds:
            os.close(fd)
    assert done == size


@with_patch
@pytest.mark.usefixtures("figures_at_once")
def test_a_copy_moves_no_bytes_through_the_daemon(copying: tuple[Mount, str]) -> None:
    m, kind = copying
    content = os.urandom(3 * M)
    with User(UID) as who:
        who.do(write, m.at("from"), content)
        before = requests(m)
        who.do(copy, m.at("from"), m.at("to"), 3 * M)
        found = requests(m) - before
        assert found["copy_file_range"] >= 1
        assert found["read"] == found["write"] == 0
        assert who.do(read, m.at("to")) == content
        assert os.stat(m.real("to")).st_uid == UID
        # In the middle, within a file, and beyond what there is.
        who.do(copy, m.at("from"), m.at("to"), K, 10, 5 * M)
        assert read(m.at("to"))[5 * M :] == content[10 : 10 + K]
        assert os.stat(m.at("to")).st_size == 5 * M + K
        who.do(copy, m.at("to"), m.at("to"), K, 0, 2 * M)
        assert read(m.real("to"))[2 * M : 2 * M + K] == content[:K]
        with pytest.raises(AssertionError):
            who.do(copy, m.at("from"), m.at("other"), 4 * M)
        assert os.stat(m.at("other")).st_size == 3 * M
    if kind != "ext4":
        assert is_shared(m.real("from"))


def is_shared(path: str) -> bool:
    return "shared" in subprocess.run(["filefrag", "-v", path], check=True, capture_output=True, text=True).stdout


@with_patch
@pytest.mark.usefixtures("figures_at_once")
def test_a_copy_larger_than_a_request_is_whole(base: str, mount: MakeMount) -> None:
    with filesystem("ext4", base, "large", mib=300) as path:
        m = mount("-o", "no_root_squash", source=path)
        content = os.urandom(M) * 70
        write(m.real("large"), content)
        before = requests(m)
        copy(m.at("large"), m.at("copy"), len(content))
        assert (requests(m) - before)["copy_file_range"] == 2
        assert read(m.real("copy")) == content
        run("umount", m.path)


@with_patch
def test_a_copy_has_what_a_mapping_has_not_written_yet(copying: tuple[Mount, str]) -> None:
    m, _ = copying
    write(m.real("from"), bytes(mmap.PAGESIZE))
    write(m.at("to"), b"")
    with User(UID) as who:
        assert who.do(_copy_while_mapped, m.at("from"), m.at("to")) == b"mapped"


def _copy_while_mapped(source: str, target: str) -> bytes:
    fd = os.open(source, os.O_RDWR)
    with mmap.mmap(fd, mmap.PAGESIZE) as mapped:
        mapped[:6] = b"mapped"
        copy(source, target, mmap.PAGESIZE)
        found = read(target)[:6]
    os.close(fd)
    return found


@with_patch
def test_a_copy_to_another_file_system_is_read_and_written(copying: tuple[Mount, str], base: str) -> None:
    m, kind = copying
    with filesystem("tmpfs", os.path.join(base, kind), "other"):
        write(m.at("from"), bytes(range(256)) * 100)
        copy(m.at("from"), m.at("other/to"), 25600)
        assert read(m.real("other/to")) == read(m.real("from"))
        run("umount", m.path)


@with_patch
def test_a_copy_drops_set_id_bits_as_on_the_bare_tree(copying: tuple[Mount, str]) -> None:
    m, _ = copying
    write(m.real("from"), b"content")
    found = []
    for top, name in ((m.source, "bare"), (m.path, "mounted")):
        write(m.real(name), b"")
        os.chmod(m.real(name), 0o6777)
        told()
        with User(UID) as who:
            who.do(copy, f"{top}/from", f"{top}/{name}", 7)
        found.append((os.stat(f"{top}/{name}").st_mode, read(f"{top}/{name}")))
    assert found[0] == found[1]


@with_patch
def test_a_copy_needs_what_reading_and_writing_needs(copying: tuple[Mount, str]) -> None:
    m, _ = copying
    write(m.real("from"), b"content")
    with User(UID) as who:
        assert who.error(_copy_between, m.at("from"), os.O_RDONLY, m.at("from"), os.O_RDONLY) == errno.EBADF
        assert who.error(_copy_between, m.at("from"), os.O_WRONLY, m.at("to"), os.O_WRONLY | os.O_CREAT) == errno.EBADF
        assert who.error(_copy_between, m.at("from"), os.O_RDONLY, m.at("to"), os.O_WRONLY | os.O_APPEND) == errno.EBADF


def _copy_between(source: str, how: int, target: str, how_target: int) -> None:
    fds = os.open(source, how), os.open(target, how_target, 0o666)
    try:
        os.copy_file_range(*fds, 7, 0, 0)
    finally:
        for fd in fds:
            os.close(fd)


@with_patch
def test_a_full_disk_ends_a_copy(there: Mount) -> None:
    size = 40 * M
    write(there.at("large"), b"x" * size)
    with pytest.raises(OSError, match="No space left"):
        copy(there.at("large"), there.at("copy"), size)
