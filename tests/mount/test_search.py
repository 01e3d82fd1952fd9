"""The search for files whose directory is not known: what it must not show, cost, or be kept from."""

import errno
import fcntl
import itertools
import os
import struct
import threading
import time
from contextlib import ExitStack, suppress
from functools import partial

import pytest

from tests.agents import User, write
from tests.mount import alterations
from tests.mount.conftest import FIGURES_AT_ONCE, daemons_with
from tests.mount.loopfs import filesystem
from tests.mount.test_numbers import CLOAKED, NULL, content_by_handle_as, forget_places
from tests.mount.test_trees import content_or_error, handle_of, steady
from tests.waiting import wait_until

ANN, BOB = 2001, 2002

FS_IOC_GETVERSION, FS_IOC_SETVERSION = 0x80087601, 0x40087602


def make_directories(top: str, count: int) -> str:
    """Make some, and return the one that a walk comes to last."""
    for number in range(count):
        os.mkdir(f"{top}/{number}")
    return next(name for name in reversed(os.listdir(top)) if name.isdigit())


@pytest.mark.parametrize("where", ["hidden first", "hidden last"])
def test_a_file_with_two_names_is_found_by_the_one_that_a_caller_sees(base: str, where: str) -> None:
    """Whichever the walk comes to first, and whichever was noted last, before and after a restart."""
    with ExitStack() as stack:
        stack.enter_context(daemons_with(alterations.walk_slowly))
        source = stack.enter_context(filesystem("ext4", base))
        mount = stack.enter_context(steady(source, base))
        os.chmod(source, 0o755)
        make_directories(source, 10)
        names = [name for name in os.listdir(source) if name.isdigit()]
        hidden, seen = (names[0], names[-1]) if where == "hidden first" else (names[-1], names[0])
        write(f"{source}/{seen}/file", b"content")
        os.link(f"{source}/{seen}/file", f"{source}/{hidden}/file")
        os.chown(f"{source}/{seen}/file", ANN, ANN)
        os.chown(f"{source}/{hidden}", BOB, BOB)
        os.chmod(f"{source}/{hidden}", 0o700)
        with mount("-o", CLOAKED) as m, User(ANN) as ann, User(BOB) as bob:
            handle = ann.do(handle_of, m.at(seen, "file"))
            bob.do(handle_of, m.at(hidden, "file"))  # this name is noted last
        with mount("-o", CLOAKED) as m:
            wait_until(lambda: content_by_handle_as(ANN, m.path, handle) == b"content")
        forget_places(m)
        with mount("-o", CLOAKED) as m:
            answers: list[bytes | int | None] = []

            def is_answered() -> bool:
                answers.append(content_by_handle_as(ANN, m.path, handle))
                return answers[-1] != errno.EAGAIN

            wait_until(is_answered)
            assert answers[-1] == b"content"


def test_what_is_hidden_by_itself_is_like_what_is_gone(base: str) -> None:
    with daemons_with(alterations.walk_slowly), filesystem("ext4", base) as source, steady(source, base) as mount:
        os.chmod(source, 0o755)
        last = make_directories(source, 20)
        for name in ("private", "gone"):
            write(f"{source}/{last}/{name}", b"")
            os.chown(f"{source}/{last}/{name}", BOB, BOB)
            os.chmod(f"{source}/{last}/{name}", 0o600)
        with mount("-o", CLOAKED) as m, User(BOB) as bob:
            handles = [bob.do(handle_of, m.at(last, name)) for name in ("private", "gone")]
        forget_places(m)
        os.unlink(f"{source}/{last}/gone")
        with mount("-o", CLOAKED) as m:
            assert [content_by_handle_as(ANN, m.path, handle) for handle in handles] == [errno.ESTALE] * 2


def test_requests_wait_once_for_all(base: str) -> None:
    """Otherwise, those for one file could keep all threads of a server."""
    with daemons_with(alterations.walk_slowly), filesystem("ext4", base) as source, steady(source, base) as mount:
        last = make_directories(source, 30)
        write(f"{source}/{last}/file", b"content")
        with mount("-o", CLOAKED) as m:
            handle = handle_of(m.at(last, "file"))
        forget_places(m)
        with mount("-o", CLOAKED) as m:
            assert content_or_error(m.path, handle) == errno.EAGAIN
            began = time.monotonic()
            answers = [content_or_error(m.path, handle) for _ in range(10)]
            assert time.monotonic() - began < 1 or b"content" in answers
            wait_until(lambda: content_or_error(m.path, handle) == b"content")


def test_a_directory_that_cannot_be_read_ends_no_search(base: str) -> None:
    with daemons_with(alterations.cannot_read_bad), filesystem("ext4", base) as source, steady(source, base) as mount:
        make_directories(source, 20)
        os.mkdir(f"{source}/bad")
        for number in range(20):
            write(f"{source}/{number}/file", b"content")
        with mount("-o", CLOAKED) as m:
            handles = [handle_of(m.at(f"{number}", "file")) for number in range(20)]
        forget_places(m)
        with mount("-o", CLOAKED) as m:
            for handle in handles:
                wait_until(partial(has_content, m.path, handle))


def has_content(path: str, handle: bytes) -> bool:
    return content_or_error(path, handle) == b"content"


def test_who_makes_directories_does_not_keep_it_from_others(base: str) -> None:
    with ExitStack() as stack:
        stack.enter_context(daemons_with(alterations.walk_slowly))
        source = stack.enter_context(filesystem("ext4", base, mib=128))
        mount = stack.enter_context(steady(source, base))
        last = make_directories(source, 10)
        write(f"{source}/{last}/file", b"content")
        with mount("-o", CLOAKED) as m:
            handle = handle_of(m.at(last, "file"))
        forget_places(m)
        stop = threading.Event()

        def make() -> None:
            with suppress(OSError):  # there is no more room
                for number in itertools.takewhile(lambda _: not stop.is_set(), itertools.count()):
                    os.makedirs(f"{source}/0/{number}/more")

        maker = threading.Thread(target=make)
        with mount("-o", CLOAKED) as m:
            maker.start()
            try:
                wait_until(lambda: content_or_error(m.path, handle) == b"content", 20)
            finally:
                stop.set()
                maker.join()


def cpu(pid: int) -> float:
    with open(f"/proc/{pid}/stat", encoding="ascii") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_a_file_outside_that_keeps_changing_makes_it_search_once_for_each_request(base: str) -> None:
    with filesystem("ext4", base, mib=128, mkfs=("-N", "30000")) as top:
        source = f"{top}/tree"
        os.mkdir(source)
        for directory in range(5):
            os.mkdir(f"{source}/{directory}")
            for number in range(1000):
                write(f"{source}/{directory}/{number}", b"")
        write(f"{source}/gone", b"")
        with steady(source, base) as mount:
            with mount("-o", CLOAKED) as m:
                handle = handle_of(m.at("gone"))
            os.rename(f"{source}/gone", f"{top}/gone")
            stop = threading.Event()

            def touch() -> None:
                while not stop.is_set():
                    os.utime(f"{top}/gone")

            toucher = threading.Thread(target=touch)
            with mount("-o", CLOAKED) as m:
                toucher.start()
                try:
                    before, began = cpu(m.pid), time.monotonic()
                    answers = {content_or_error(m.path, handle) for _ in range(10)}
                    took = time.monotonic() - began
                    assert answers <= {errno.ESTALE, errno.EAGAIN}
                    # A share of a processor, and what is free in the beginning and for the requests themselves.
                    assert cpu(m.pid) - before < 0.5 * took + 1
                finally:
                    stop.set()
                    toucher.join()


def generation(path: str, new: int | None = None) -> int:
    """The generation of an inode of ext4, after it was set."""
    fd = os.open(path, os.O_RDONLY)
    try:
        if new is not None:
            fcntl.ioctl(fd, FS_IOC_SETVERSION, struct.pack("=I", new))
        return int(struct.unpack("=I", fcntl.ioctl(fd, FS_IOC_GETVERSION, bytes(8))[:4])[0])
    finally:
        os.close(fd)


def takes_place(source: str, inode: int, name: str) -> bool:
    """Make a file; whether it has this inode number."""
    write(f"{source}/{name}", b"new")
    if os.stat(f"{source}/{name}").st_ino == inode:
        return True
    os.rename(f"{source}/{name}", f"{source}/other {time.monotonic_ns()}")
    return False


@pytest.mark.parametrize("views", [True, False])
def test_a_number_that_the_kernel_still_knows_is_not_given_to_another_file(base: str, views: bool) -> None:
    """Also where the bits of the generation in it are the same: one view does not hear what another one was told."""
    mkfs = ("-O", "^metadata_csum")  # with checksums, no generation can be set
    with ExitStack() as stack:
        stack.enter_context(daemons_with(tuning=FIGURES_AT_ONCE))  # idle descriptors are closed soon, too
        source = stack.enter_context(filesystem("ext4", base, mkfs=mkfs))
        mount = stack.enter_context(steady(source, base))
        os.chmod(source, 0o755)
        write(f"{source}/old", b"old")
        one, other = ("@root", "@daemon") if views else ("", "")
        with mount("-o", "no_root_squash,views=root daemon nobody" if views else CLOAKED) as m, ExitStack() as opened:
            handle, held = handle_of(m.at(one, "old")), os.open(m.at(one, "old"), os.O_PATH)
            opened.callback(os.close, held)
            inode, former = os.stat(f"{source}/old").st_ino, generation(f"{source}/old")
            os.unlink(f"{source}/old")
            wait_until(lambda: takes_place(source, inode, "new"))
            generation(f"{source}/new", former ^ 1 << 20)
            assert os.stat(m.at(other, "new")).st_size == 3
            wait_until(lambda: content_or_error(m.path, handle) != b"old")
            assert content_or_error(m.path, handle) in (errno.ESTALE, errno.EIO)
            with pytest.raises(OSError, match=r"Stale|Input/output"):
                os.open(f"/proc/self/fd/{held}", os.O_RDONLY)


def test_hints_of_files_in_the_root_are_used(base: str) -> None:
    with filesystem("ext4", base) as source, steady(source, base) as mount:
        os.mkdir(f"{source}/directory")
        names = ["file", "directory/file"]
        for name in names:
            write(f"{source}/{name}", name.encode())
        with mount("-o", CLOAKED) as m:
            handles = {name: handle_of(m.at(name)) for name in names}
        with daemons_with(alterations.never_walk), mount("-o", CLOAKED) as m:
            for name, handle in handles.items():
                assert content_or_error(m.path, handle) == name.encode()


def test_many_that_are_found_at_once_keep_nobody_waiting(base: str) -> None:
    levels = 200
    with ExitStack() as stack:
        stack.enter_context(daemons_with(alterations.begin_to_walk_late))
        source = stack.enter_context(filesystem("ext4", base, mib=128, mkfs=("-N", "20000")))
        mount = stack.enter_context(steady(source, base))
        at = os.open(source, os.O_RDONLY)
        for _ in range(levels):
            os.mkdir("d", dir_fd=at)
            above, at = at, os.open("d", os.O_RDONLY, dir_fd=at)
            os.close(above)
        for number in range(1000):
            os.close(os.open(f"{number}", os.O_CREAT | os.O_WRONLY, dir_fd=at))
        os.close(at)
        with mount("-o", NULL) as m:
            handles = handles_below(m.path, levels)
        forget_places(m)
        with mount("-o", NULL) as m:
            askers = [
                threading.Thread(target=ask, args=(m.path, handles[number::200], number % 2 == 0))
                for number in range(200)
            ]
            for asker in askers:
                asker.start()
            longest = 0.0
            while any(asker.is_alive() for asker in askers):
                began = time.monotonic()
                os.statvfs(m.path)
                longest = max(longest, time.monotonic() - began)
            for asker in askers:
                asker.join()
            assert longest < 2


def handles_below(path: str, levels: int) -> list[bytes]:
    at = os.open(path, os.O_RDONLY)
    for _ in range(levels):
        above, at = at, os.open("d", os.O_RDONLY, dir_fd=at)
        os.close(above)
    handles = [handle_of(f"/proc/self/fd/{at}/{name}") for name in os.listdir(at)]
    os.close(at)
    return handles


def ask(path: str, handles: list[bytes], again: bool) -> None:
    """Ask for files once, or until they are there."""
    for handle in handles:
        while content_or_error(path, handle) == errno.EAGAIN and again:
            pass
