"""What one user sees of another's files through the client's cache, which all users of a mount share.

Ann looks at her files, then Bob looks on the same client: he must not see Ann's files, and must not miss his own.
`LEAKS` and `MISSING` list the cases in which he does; with `no_client_cache` both are empty.
"""

import errno
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path

import pytest

from tests.agents import User, read
from tests.nfs.knfsd.fixtures import VERSIONS, Service, Share, exported

OWNERS = {"ann": 1000, "bob": 1001}
# Whatever the mode bits, which let all users do everything: only cloaking keeps any of them out.
EXPORTS = {
    "real times": "rw,cloak_list = uid +000 1000 1001",
    "no_client_cache": "rw,cloak_list = uid +000 1000 1001,no_client_cache",
}

LEASES = Path("/proc/sys/fs/leases-enable")

MOUNTS = {"default": "rw", "lookupcache=none": "lookupcache=none", "a mount per user": "nosharecache"}
# Files are remembered for at least 3 s by default, directories for 30: here longer, for slow machines; or not so long.
TIMES = {"at once": "acregmin=60,acregmax=60", "expired": "actimeo=1"}
EXPIRED_SECONDS = 2.1


def fill(place: str) -> None:
    """A directory open to all, with the same objects of each user's."""
    os.mkdir(place)
    for name, uid in OWNERS.items():
        Path(place, f"{name}-file").write_text(name)
        Path(place, f"{name}-program").write_text("#!/bin/true\n")
        os.mkdir(f"{place}/{name}-dir")
        Path(place, f"{name}-dir", "below").write_text(name)
        os.symlink("nowhere", f"{place}/{name}-link")
        for made in ("file", "program", "dir/below", "dir", "link"):
            os.lchown(f"{place}/{name}-{made}", uid, uid)
            if made != "link":
                os.chmod(f"{place}/{name}-{made}", 0o777)
    os.chmod(place, 0o777)


# -- ways to look, at the working directory: each is False, or fails, if there is nothing ----------


def listing(whose: str) -> bool:
    return any(name.startswith(whose) for name in os.listdir("."))


def scanning(whose: str) -> bool:
    with os.scandir(".") as entries:
        return len([entry.stat(follow_symlinks=False) for entry in entries if entry.name.startswith(whose)]) > 0


def path_opening(whose: str) -> None:
    os.close(os.open(f"{whose}-file", os.O_PATH))


def entering(whose: str) -> None:
    here = os.open(".", os.O_PATH)
    try:
        os.chdir(f"{whose}-dir")
        os.fchdir(here)
    finally:
        os.close(here)


def executing(whose: str) -> None:
    program = f"./{whose}-program"
    os.waitpid(os.posix_spawn(program, [program], {}), 0)


WAYS: dict[str, Callable[[str], object]] = {
    "list": listing,
    "scan": scanning,
    "stat": lambda whose: os.stat(f"{whose}-file"),
    "access": lambda whose: os.access(f"{whose}-file", os.F_OK),
    "read": lambda whose: read(f"{whose}-file"),
    "O_PATH": path_opening,
    "readlink": lambda whose: os.readlink(f"{whose}-link"),
    "chdir": entering,
    "stat below": lambda whose: os.stat(f"{whose}-dir/below"),
    "exec": executing,
    "link": lambda whose: os.link(f"{whose}-file", "linked"),
    "rename": lambda whose: os.rename(f"{whose}-file", "renamed"),
}
CHANGING = ("link", "rename")

# Without no_client_cache, the same by version 3 and 4.2 while the server gives no delegations. Names and their absence
# are remembered until the directory changes, attributes until they expire. What needs the server's consent (opening to
# read, executing, going further down, changing) is refused in any case.
LEAKS: dict[tuple[str, str], set[str]] = {
    ("default", "at once"): {"list", "scan", "stat", "access", "O_PATH", "readlink", "link"},
    ("default", "expired"): {"list", "access", "O_PATH", "link"},
    ("lookupcache=none", "at once"): {"list"},
    ("lookupcache=none", "expired"): {"list"},
    ("a mount per user", "at once"): set(),
    ("a mount per user", "expired"): set(),
}
MISSING: dict[tuple[str, str], set[str]] = {
    ("default", "at once"): set(WAYS),
    ("default", "expired"): set(WAYS),
    ("lookupcache=none", "at once"): {"list", "scan"},
    ("lookupcache=none", "expired"): {"list", "scan"},
    ("a mount per user", "at once"): set(),
    ("a mount per user", "expired"): set(),
}

# With no_client_cache, of a file that Ann has open and of which her client has a delegation (version 4 only): so long,
# the client asks the server neither whether the name is there nor for attributes.
DELEGATED = {
    "default": {"stat", "access", "O_PATH", "link"},
    "lookupcache=none": {"stat", "access", "O_PATH", "link"},
    "a mount per user": set[str](),
}


def sees(way: str, whose: str) -> bool:
    """Does it show that there is something of this owner's, whether or not it may be used?"""
    try:
        return WAYS[way](whose) is not False
    except OSError as exc:
        return exc.errno not in (errno.ENOENT, errno.ESTALE)


def ann_looks(place: str, way: str) -> bool:
    """Ann lists, stats and opens, looks in a given way and finds no trace of Bob: is it as it should be?"""
    os.chdir(place)
    try:
        right = scanning("ann") and read("ann-file") == b"ann" and not sees("stat", "bob")
        if way not in CHANGING:
            right = right and sees(way, "ann") and not sees(way, "bob")
        return right
    finally:
        os.chdir("/")


def bob_looks(place: str, way: str) -> tuple[bool, bool]:
    """What Bob sees, of Ann's and of his own."""
    os.chdir(place)
    try:
        return sees(way, "ann"), sees(way, "bob")
    finally:
        os.chdir("/")


@contextmanager
def delegations(*, on: bool) -> Iterator[None]:
    """Have the server give delegations, or none."""
    before = LEASES.read_text()
    LEASES.write_text("1" if on else "0")
    try:
        yield
    finally:
        LEASES.write_text(before)


@pytest.fixture(autouse=True)
def no_delegations() -> Iterator[None]:
    with delegations(on=False):
        yield


@pytest.fixture(scope="module")
def trees(service: Service) -> Iterator[dict[str, Share]]:
    with ExitStack() as stack:
        yield {name: stack.enter_context(exported(service, options)) for name, options in EXPORTS.items()}


def mount_for_both(mount_nfs: Callable[..., str], tree: Share, version: str, kind: str, *more: str) -> tuple[str, str]:
    """Where Ann looks, and where Bob does."""
    anns = mount_nfs(tree, version, MOUNTS[kind], *more)
    return anns, mount_nfs(tree, version, MOUNTS[kind], *more) if kind == "a mount per user" else anns


@pytest.mark.parametrize("export", EXPORTS)
@pytest.mark.parametrize("version", VERSIONS)
def test_what_one_user_sees_of_another(
    version: str, export: str, trees: dict[str, Share], mount_nfs: Callable[..., str], user: Callable[..., User]
) -> None:
    tree = trees[export]
    ann, bob = user(OWNERS["ann"]), user(OWNERS["bob"])
    seen: dict[tuple[str, str], dict[str, tuple[bool, bool]]] = {(kind, when): {} for kind in MOUNTS for when in TIMES}
    later: list[tuple[float, str, str, str]] = []
    for when in ("expired", "at once"):  # the first do so meanwhile
        for kind in MOUNTS:
            anns, bobs = mount_for_both(mount_nfs, tree, version, kind, TIMES[when])
            for way in WAYS:
                name = f"{kind}, {when}, {way}, {version}"  # which no caller has seen yet
                fill(tree.real(name))
                assert ann.do(ann_looks, f"{anns}/{name}", way), name
                if when == "expired":
                    later.append((time.monotonic() + EXPIRED_SECONDS, kind, way, f"{bobs}/{name}"))
                else:
                    seen[kind, when][way] = bob.do(bob_looks, f"{bobs}/{name}", way)
    for due, kind, way, place in later:
        time.sleep(max(0.0, due - time.monotonic()))
        seen[kind, "expired"][way] = bob.do(bob_looks, place, way)
    leaks = {cell: {way for way, (anns, _) in looked.items() if anns} for cell, looked in seen.items()}
    missing = {cell: {way for way, (_, bobs) in looked.items() if not bobs} for cell, looked in seen.items()}
    nowhere: dict[tuple[str, str], set[str]] = {cell: set() for cell in seen}
    assert leaks == (LEAKS if export == "real times" else nowhere)
    assert missing == (MISSING if export == "real times" else nowhere)


def is_delegated(path: str) -> bool:
    """Has a client a delegation of this file?"""
    inode = os.stat(path).st_ino
    return any("DELEG" in line and f":{inode} " in line for line in Path("/proc/locks").read_text().splitlines())


@pytest.mark.parametrize("kind", MOUNTS)
def test_delegations(
    kind: str, trees: dict[str, Share], mount_nfs: Callable[..., str], user: Callable[..., User]
) -> None:
    tree = trees["no_client_cache"]
    ann, bob = user(OWNERS["ann"]), user(OWNERS["bob"])
    anns, bobs = mount_for_both(mount_nfs, tree, "4.2", kind, TIMES["at once"])
    for on in (False, True):
        seen = {}
        with delegations(on=on):
            for way in WAYS:
                name = f"{kind}, {way}, delegations {on}"
                fill(tree.real(name))
                fd = ann.do(os.open, f"{anns}/{name}/ann-file", os.O_RDONLY)
                assert ann.do(is_delegated, f"{anns}/{name}/ann-file") == on
                seen[way] = bob.do(bob_looks, f"{bobs}/{name}", way)
                ann.do(os.close, fd)
        assert {way for way, (leaks, _) in seen.items() if leaks} == (DELEGATED[kind] if on else set())
        assert all(own for _, own in seen.values()), seen


@pytest.mark.parametrize("export", EXPORTS)
@pytest.mark.parametrize("version", VERSIONS)
def test_times_of_directories(
    version: str, export: str, trees: dict[str, Share], mount_nfs: Callable[..., str], user: Callable[..., User]
) -> None:
    """With no_client_cache, each answer gives later ones, to every caller, by name or by handle; they are not set."""
    tree, name = trees[export], f"times {version}"
    fill(tree.real(name))
    before = [os.stat(tree.real(name, each)) for each in ("", "ann-file")]
    users = [user(uid) for uid in OWNERS.values()]
    places = [f"{mount_nfs(tree, version, 'nosharecache', 'noac')}/{name}" for _ in users]
    fds = [who.do(os.open, place, os.O_RDONLY) for who, place in zip(users, places, strict=True)]
    answers, of_file = before[:1], before[1:]
    for _ in range(10):
        for who, place, fd in zip(users, places, fds, strict=True):
            answers += [who.do(os.fstat, fd), who.do(os.stat, place)]
        of_file.append(users[0].do(os.stat, f"{places[0]}/ann-file"))
    for who, fd in zip(users, fds, strict=True):
        who.do(os.close, fd)
    for times in ([info.st_mtime_ns for info in answers], [info.st_ctime_ns for info in answers]):
        if export == "no_client_cache":
            assert all(earlier < later for earlier, later in pairwise(times))
        else:
            assert len(set(times)) == 1
    after = [os.stat(tree.real(name, each)) for each in ("", "ann-file")]
    assert len({(info.st_mtime_ns, info.st_ctime_ns) for info in (*of_file, after[1])}) == 1
    assert (after[0].st_mtime_ns, after[0].st_ctime_ns) == (before[0].st_mtime_ns, before[0].st_ctime_ns)
