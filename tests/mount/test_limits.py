"""Large files, long names, many files, full disks: errors of the real tree are passed on; the daemon continues."""

import contextlib
import errno
import itertools
import os
import re
import resource
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cloakfs import linux
from cloakfs.state.runtime import STATE_DIR
from tests.agents import User, read, write
from tests.mount.conftest import COMMAND, Mount, is_mounted, mounted, told
from tests.mount.loopfs import attached, filesystem
from tests.waiting import wait_until

NULL = "no_root_squash"
CLOAKED = "no_root_squash,cloak_list=uid +007 1 9999"
MS_REMOUNT = 32


def drop_caches() -> None:
    """Have the kernel forget what it knows of names and inodes."""
    Path("/proc/sys/vm/drop_caches").write_text("2\n")


def memory(pid: int, field: str = "VmRSS") -> float:
    """MiB; VmHWM is the most it ever was."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found
    return int(found[1]) / 1024


# -- names -----------------------------------------------------------------------------------------


def test_names_of_every_byte(tree: str, mount: Callable[..., Mount], user: Callable[..., User]) -> None:
    m = mount("-o", CLOAKED)
    someone = user(2001)
    path = os.fsencode(m.path)
    given = [bytes([byte]) * 2 + b"x" for byte in range(1, 256) if byte != ord("/")] + [bytes([255, 254, 200])]
    for name in given:
        someone.do(write, os.path.join(path, name), name)
    listed: list[bytes] = someone.do(os.listdir, path)
    assert sorted(listed) == sorted(given) == sorted(os.listdir(os.fsencode(tree)))
    for name in given:
        assert someone.do(read, os.path.join(path, name)) == name
        someone.do(os.rename, os.path.join(path, name), os.path.join(path, name + name))
        someone.do(os.unlink, os.path.join(path, name + name))
    assert os.listdir(tree) == []


def test_names_of_255_bytes(tree: str, mount: Callable[..., Mount], user: Callable[..., User]) -> None:
    m = mount("-o", NULL)
    someone = user(2001)
    someone.do(write, m.at("n" * 255), b"long")
    assert someone.do(os.listdir, m.path) == ["n" * 255]
    assert someone.do(read, m.at("n" * 255)) == b"long"
    for call in (os.stat, os.mkdir, os.unlink):
        assert someone.error(call, m.at("n" * 256)) == errno.ENAMETOOLONG


def dig(top: str, name: str, depth: int) -> None:
    """Make directories inside of each other, further down than one path can say."""
    os.chdir(top)
    for _ in range(depth):
        os.mkdir(name)
        os.chdir(name)
    os.chdir("/")


def test_paths_of_4096_bytes(tree: str, mount: Callable[..., Mount], user: Callable[..., User]) -> None:
    m = mount("-o", CLOAKED)
    someone = user(2001)
    # PATH_MAX counts the NUL: 4095 bytes are the longest.
    room = 4095 - len(m.path)
    name, rest = "d" * 199, room % 200
    someone.do(dig, m.path, name, room // 200)
    longest = m.at(*[name] * (room // 200)) + (f"/{'f' * (rest - 1)}" if rest > 1 else "")
    if rest > 1:
        someone.do(write, longest, b"deep")
        assert someone.do(read, longest) == b"deep"
    assert someone.do(os.stat, longest).st_uid == 2001
    assert someone.error(os.stat, longest + "/" + "x" * 200) == errno.ENAMETOOLONG


def test_1100_levels(tree: str, mount: Callable[..., Mount], user: Callable[..., User]) -> None:
    """Deeper than Python recurses, with every level asked about."""
    someone = user(2001)
    someone.do(dig, tree, "d", 1100)
    someone.do(write, os.path.join(tree, *["d"] * 1100, "file"), b"deep")
    m = mount("-o", CLOAKED)
    assert someone.do(read, m.at(*["d"] * 1100, "file")) == b"deep"
    subprocess.run(["rm", "-rf", os.path.join(tree, "d")], check=True)


# -- a directory of 100,000 entries ----------------------------------------------------------------

MANY = int(os.environ.get("CLOAKFS_MANY_NAMES", "50000"))


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    path = tmp_path_factory.mktemp("many")
    for number in range(MANY):
        (path / f"entry-{number:06}").touch()
    yield str(path)
    shutil.rmtree(path)


Batches = Callable[[str, int], Iterator[list[tuple[bytes, int]]]]


def few(fd: int, size: int) -> list[tuple[bytes, int]]:
    """The next entries, and where each ends."""
    return [(name, cookie) for name, cookie, _ in linux.getdents(fd, size)]


def in_one_go(path: str, size: int) -> Iterator[list[tuple[bytes, int]]]:
    """getdents64(2) with a small buffer."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        while batch := few(fd, size):
            yield batch
    finally:
        os.close(fd)


def opened_anew(path: str, size: int) -> Iterator[list[tuple[bytes, int]]]:
    """getdents64(2) with a small buffer, opening the directory anew each time, as an NFS server does."""
    cookie = 0
    while True:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.lseek(fd, cookie, os.SEEK_SET)
            batch = few(fd, size)
        finally:
            os.close(fd)
        if not batch:
            return
        yield batch
        cookie = batch[-1][1]


@pytest.mark.timeout(400)
def test_listing_very_many_names(many: str, mount: Callable[..., Mount]) -> None:
    # Of a mount of its own: the daemon may have read the directory before the first client does.
    idle = memory(mount("-o", CLOAKED).pid)
    m = mount("-o", CLOAKED, source=many)
    start = time.monotonic()
    listed = os.listdir(m.path)
    took = time.monotonic() - start
    assert len(listed) == MANY
    assert set(listed) == {f"entry-{number:06}" for number in range(MANY)}
    # What the kernel holds references to has to be known; the listing itself must not pile up.
    most = memory(m.pid, "VmHWM")
    print(f"{MANY} entries: {took:.1f} s, {idle:.0f} MiB idle, {most:.0f} MiB at most")
    assert most - idle < 5 + 75 * MANY / 100_000
    # What was forgotten is given back or used again: once the allocator has settled, each more would be a leak.
    reached = []
    for _ in range(3):
        drop_caches()
        assert len(os.listdir(m.path)) == MANY
        reached.append(memory(m.pid, "VmHWM"))
    assert reached[-1] - reached[1] < 5 + 15 * MANY / 100_000, reached
    assert reached[-1] - idle < 5 + 75 * MANY / 100_000, reached


def require_stable_cookies(path: str) -> None:
    """Skip the test, with the reason, if cookies of the real file system do not survive deletions."""
    for letter in "abcd":
        Path(path, letter).touch()
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        entries = few(fd, 4096)
        first, cookie = entries[2]
        os.unlink(os.path.join(os.fsencode(path), first))
        os.lseek(fd, cookie, os.SEEK_SET)
        stable = few(fd, 4096) == entries[3:]
    finally:
        os.close(fd)
    for name, _ in entries[3:]:
        os.unlink(os.path.join(os.fsencode(path), name))
    if not stable:
        pytest.skip("cookies of a tmpfs survive deletions from Linux 6.6 on")


@pytest.fixture(params=["base", "tmpfs"])
def some(request: pytest.FixtureRequest, base: str) -> Iterator[str]:
    """A directory on the file system of the other tests, and one on a tmpfs."""
    with contextlib.ExitStack() as stack:
        path = os.path.join(base, "some")
        if request.param == "tmpfs":
            stack.enter_context(filesystem("tmpfs", base, "some"))
            require_stable_cookies(path)
        else:
            os.mkdir(path)
        yield path


@pytest.mark.timeout(400)
@pytest.mark.parametrize("batches", [in_one_go, opened_anew])
def test_cookies_survive_deletions(batches: Batches, some: str, mount: Callable[..., Mount]) -> None:
    source = some
    names = {f"entry-{number:04}".encode() for number in range(3000)}
    for name in names:
        os.close(os.open(os.path.join(os.fsencode(source), name), os.O_CREAT))
    # The name that is listed last stays until it has been seen: where no name is left, a tmpfs begins anew (see below).
    last = os.listdir(os.fsencode(source))[-1]
    m = mount("-o", CLOAKED, source=source)
    seen: list[bytes] = []
    deleted = set()
    behind = None
    for batch in batches(m.path, 2048):
        found = [name for name, _ in batch if name not in (b".", b"..")]
        seen += found
        for name in itertools.islice(found, 0, None, 2):  # every other one that was seen
            if name != behind:  # which may have been read ahead (readdir(3p))
                os.unlink(os.path.join(os.fsencode(m.path), name))
            deleted.add(name)
        behind = next(iter(names - set(seen) - deleted - {last}), None)
        if behind:
            os.unlink(os.path.join(os.fsencode(source), behind))  # behind the mount
            deleted.add(behind)
    assert len(deleted) > 1000
    assert len(seen) == len(set(seen))
    assert names - deleted <= set(seen)
    assert set(os.listdir(os.fsencode(m.path))) == names - deleted


def test_a_tmpfs_begins_anew_where_no_name_is_left(base: str, mount: Callable[..., Mount]) -> None:
    """A cookie after which all names were deleted leads to the same as on the real file system.

    On Linux 6.18, a tmpfs then lists the names before the cookie once more.
    """
    with filesystem("tmpfs", base) as source:
        for number in range(10):
            Path(source, f"entry-{number}").touch()
        m = mount("-o", CLOAKED, source=source)
        listed = [name for batch in in_one_go(m.path, 4096) for name, _ in batch]
        for name in listed[6:]:
            os.unlink(os.path.join(os.fsencode(source), name))
        fd, real = (os.open(path, os.O_RDONLY | os.O_DIRECTORY) for path in (m.path, source))
        try:
            cookies = [few(where, 4096)[4][1] for where in (fd, real)]
            os.unlink(os.path.join(os.fsencode(source), listed[5]))
            for where, cookie in zip((fd, real), cookies, strict=True):
                os.lseek(where, cookie, os.SEEK_SET)
            again = [name for name, _ in few(real, 4096)]
            assert [name for name, _ in few(fd, 4096)] == again
            # The names are those that there are, however often.
            assert set(again) <= set(listed[:5])
        finally:
            os.close(fd)
            os.close(real)


def test_telldir_and_seekdir(tree: str, mount: Callable[..., Mount]) -> None:
    """Going back to a position gives what followed it, also from another descriptor, and also in another order."""
    for number in range(500):
        Path(tree, f"entry-{number:03}").touch()
    m = mount("-o", CLOAKED)
    entries = [entry for batch in in_one_go(m.path, 512) for entry in batch]
    assert len({cookie for _, cookie in entries}) == 502
    fd, other = (os.open(m.path, os.O_RDONLY | os.O_DIRECTORY) for _ in range(2))
    try:
        for at in (250, 3, 499, 100, 0):
            for where in (fd, other):
                os.lseek(where, entries[at][1], os.SEEK_SET)
                following = few(where, 512)
                assert following == entries[at + 1 : at + 1 + len(following)]
                assert following
        os.lseek(fd, 0, os.SEEK_SET)
        assert few(fd, 512)[0] == entries[0]
        os.lseek(fd, entries[-1][1], os.SEEK_SET)
        assert few(fd, 512) == []
    finally:
        os.close(fd)
        os.close(other)


# -- large and sparse ------------------------------------------------------------------------------


def put(path: str, offset: int, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        assert os.pwrite(fd, data, offset) == len(data)
    finally:
        os.close(fd)


def get(path: str, offset: int, size: int) -> bytes:
    fd = os.open(path, os.O_RDONLY)
    try:
        return os.pread(fd, size, offset)
    finally:
        os.close(fd)


def test_over_4_gib_and_sparse(tree: str, mount: Callable[..., Mount], user: Callable[..., User]) -> None:
    m = mount("-o", NULL)
    someone = user(2001)
    far = 5 * 2**30 + 12345
    someone.do(put, m.at("file"), far, b"far out")
    info = someone.do(os.stat, m.at("file"))
    assert info.st_size == far + 7
    assert info.st_blocks < 100
    assert someone.do(get, m.at("file"), far - 3, 100) == b"\0\0\0far out"
    assert someone.do(get, m.at("file"), 2**32 - 4, 8) == b"\0" * 8
    someone.do(os.truncate, m.at("file"), 2**32 + 1)
    assert os.stat(m.real("file")).st_size == 2**32 + 1


# -- errors of the backing tree --------------------------------------------------------------------


def fill(path: str) -> int:
    """Write until an error; how many bytes were taken."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    taken = 0
    try:
        while True:
            taken += os.write(fd, b"x" * 65536)
    except OSError as exc:
        raise type(exc)(exc.errno, f"after {taken} bytes") from None
    finally:
        with contextlib.suppress(OSError):
            os.close(fd)


def test_enospc(base: str, mount: Callable[..., Mount], user: Callable[..., User]) -> None:
    with filesystem("ext4", base, mib=16) as source, mounted(source, base_dir(base), "-o", NULL) as m:
        someone = user(2001)
        fresh = os.statvfs(source)
        reserved = fresh.f_bfree - fresh.f_bavail
        assert reserved > 0
        assert someone.error(fill, m.at("file")) == errno.ENOSPC
        os.unlink(m.at("file"))
        someone.do(write, m.at("again"), b"works")
        # Reserved blocks are for root's own, not for whoever root's daemon acts for.
        assert someone.error(fill, m.at("more")) == errno.ENOSPC
        assert os.statvfs(source).f_bfree >= reserved


RESERVING = 3777


def may_use_reserved_blocks(m: Mount, who: User) -> bool:
    """Whether the caller can write a file on a file system that is full but for reserved blocks."""
    fd = who.do(os.open, m.at("more"), os.O_CREAT | os.O_WRONLY, 0o600)
    try:
        return who.error(os.write, fd, b"x" * 65536) == 0
    finally:
        who.do(os.close, fd)
        who.do(os.unlink, m.at("more"))


def test_a_group_may_use_the_blocks_that_are_reserved_for_it(base: str, user: Callable[..., User]) -> None:
    """Also if they are reserved while the tree is mounted."""
    with (
        filesystem("ext4", base, mib=16, mkfs=("-m", "30")) as source,
        mounted(source, base_dir(base), "-o", NULL) as m,
    ):
        member, stranger = user(3001, 3001, [RESERVING]), user(3002)
        assert stranger.error(fill, m.at("file")) == errno.ENOSPC
        assert not may_use_reserved_blocks(m, member)
        for group in (RESERVING, 0, RESERVING):
            subprocess.run(["mount", "-o", f"remount,resgid={group}", source], check=True)
            wait_until(lambda: may_use_reserved_blocks(m, member) is (group == RESERVING))  # noqa: B023
            assert not may_use_reserved_blocks(m, stranger)


def base_dir(base: str) -> str:
    path = os.path.join(base, "mnt-of-it")
    os.mkdir(path)
    return path


def test_edquot_of_a_user(base: str, user: Callable[..., User]) -> None:
    if not shutil.which("setquota"):
        pytest.skip("needs setquota (Debian: quota)")
    try:
        with filesystem("ext4", base, mkfs=("-O", "quota")):
            pass
    except subprocess.CalledProcessError:
        pytest.skip("this kernel has no ext4 quota (CONFIG_QFMT_V2)")
    with filesystem("ext4", base, "limited", mkfs=("-O", "quota")) as source:
        subprocess.run(["quotaon", "-u", source], capture_output=True, check=False)  # or it is on already
        subprocess.run(["setquota", "-u", "2001", "0", "1024", "0", "0", source], check=True)
        with mounted(source, base_dir(base), "-o", NULL) as m:
            someone, other = user(2001), user(2002)
            assert someone.error(fill, m.at("file")) == errno.EDQUOT
            other.do(write, m.at("other"), b"has none")
            assert os.stat(m.real("file")).st_size <= 1 << 20


def test_edquot_of_a_subvolume(base: str, user: Callable[..., User]) -> None:
    with filesystem("btrfs", base) as source:
        subprocess.run(["btrfs", "quota", "enable", source], check=True)
        subprocess.run(["btrfs", "qgroup", "limit", "4M", source], check=True, capture_output=True)
        with mounted(source, base_dir(base), "-o", NULL) as m:
            assert user(2001).error(fill, m.at("file")) == errno.EDQUOT
            assert os.stat(m.real("file")).st_size <= 4 << 20


def is_read_only_now(path: str) -> bool:
    """Remount it read-only if nobody writes there."""
    try:
        linux.mount("none", path, "ext4", MS_REMOUNT | linux.MS_RDONLY, "")
    except OSError as exc:
        if exc.errno != errno.EBUSY:
            raise
        return False
    return True


def test_erofs(base: str, user: Callable[..., User]) -> None:
    with filesystem("ext4", base) as source, mounted(source, base_dir(base), "-o", NULL) as m:
        someone = user(2001)
        someone.do(write, m.at("file"), b"x")
        # The kernel tells the daemon of a close(2) only after it has returned.
        wait_until(lambda: is_read_only_now(source))
        assert someone.error(write, m.at("file"), b"y") == errno.EROFS
        assert someone.error(os.mkdir, m.at("directory")) == errno.EROFS
        assert someone.error(os.chmod, m.at("file"), 0o600) == errno.EROFS
        assert someone.error(os.unlink, m.at("file")) == errno.EROFS
        assert someone.do(read, m.at("file")) == b"x"


def test_read_only_mount(tree: str, mount: Callable[..., Mount], user: Callable[..., User]) -> None:
    write(os.path.join(tree, "file"), b"x")
    m = mount("-o", "ro")
    someone = user(2001)
    assert someone.error(write, m.at("file"), b"y") == errno.EROFS
    assert someone.error(os.mkdir, m.at("directory")) == errno.EROFS
    assert someone.do(read, m.at("file")) == b"x"


def open_many(paths: list[str], held: list[int]) -> int:
    """Open files until one cannot be opened, and keep them open in `held`: the errno."""
    try:
        for path in paths:
            held.append(os.open(path, os.O_RDONLY))
    except OSError as exc:
        return exc.errno or -1
    return 0


_held: list[int] = []  # of the User whose process this is


def hold_many(paths: list[str]) -> tuple[int, int]:
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(paths) + 100, len(paths) + 100))
    code = open_many(paths, _held)
    return len(_held), code


def let_go() -> None:
    while _held:
        os.close(_held.pop())


@contextlib.contextmanager
def mounted_with_few_descriptors(tree: str, path: str, limit: int, options: str) -> Iterator[Mount]:
    subprocess.run(
        [*COMMAND, "mount", tree, path, "-o", options],
        check=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit)),
    )
    mount = Mount(tree, path)
    try:
        yield mount
    finally:
        # --lazy: whoever still has files open after a failure must not keep the mount.
        subprocess.run([*COMMAND, "umount", "--lazy", path], check=True)
        shutil.rmtree(os.path.join(STATE_DIR, mount.key), ignore_errors=True)
    assert not is_mounted(path)


@pytest.mark.parametrize(("limit", "files", "far"), [(128, 200, False), (1024, 2000, False), (256, 500, True)])
def test_emfile(
    limit: int, files: int, far: bool, tree: str, base: str, mount: Callable[..., Mount], user: Callable[..., User]
) -> None:
    for number in range(files):
        write(os.path.join(tree, str(number)), b"x")
    # What is behind another daemon is opened by threads.
    source = mount("-o", NULL).path if far else tree
    with mounted_with_few_descriptors(source, base_dir(base), limit, CLOAKED) as m:
        greedy, other = user(2001), user(2002)
        assert len(greedy.do(os.listdir, m.path)) == files
        paths = [m.at(str(number)) for number in range(files)]
        opened, code = greedy.do(hold_many, paths)
        assert code == errno.EMFILE
        assert limit // 4 < opened < limit // 2
        # Only this caller cannot open any more now, neither files nor directories; everything else works.
        assert greedy.error(os.listdir, m.path) == errno.EMFILE
        assert greedy.error(os.stat, m.at(str(files - 2))) == 0
        assert other.do(read, m.at(str(files - 1))) == b"x"
        assert len(other.do(os.listdir, m.path)) == files
        others, code = other.do(hold_many, paths)
        assert code == errno.EMFILE
        assert opened // 3 < others < opened
        other.do(let_go)
        assert m.log.count("server uid 2001 has") == 1
        greedy.do(let_go)
        # Afterwards everything works as before.
        wait_until(lambda: other.error(read, m.at("0")) == 0)
        assert all(other.do(read, path) == b"x" for path in paths[:: files // 200])
        assert len(other.do(os.listdir, m.path)) == files
        opened_again, _ = greedy.do(hold_many, paths)
        assert abs(opened_again - opened) <= max(5, limit // 20)
        greedy.do(let_go)
        assert "ERROR" not in m.log
        assert "Traceback" not in m.log


def test_submounts_that_come_later(tree: str, base: str, mount: Callable[..., Mount]) -> None:
    os.mkdir(os.path.join(tree, "later"))
    m = mount("-o", CLOAKED)
    assert os.listdir(m.at("later")) == []
    with attached("tmpfs", os.path.join(tree, "later"), "-t", "tmpfs"):
        write(os.path.join(tree, "later", "file"), b"x")
        told()
        assert read(m.at("later", "file")) == b"x"
        assert os.stat(m.at("later")).st_ino != os.stat(m.at()).st_ino
