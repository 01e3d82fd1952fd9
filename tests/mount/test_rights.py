"""A caller has no more rights through a mount than it has elsewhere: capabilities, and groups of thread and process."""

import ctypes
import errno
import json
import os
import stat
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cloakfs import linux
from cloakfs.linux.libc import NR, check, syscall
from cloakfs.state.runtime import RUN_DIR
from tests.agents import User, names, read, write
from tests.altered import command_with
from tests.mount.conftest import FIGURES_AT_ONCE, Mount
from tests.waiting import wait_until

MakeMount = Callable[..., Mount]
MakeUser = Callable[..., User]

ANN, TEAM, OTHER_TEAM = 3001, 5001, 5002


def drop(*capabilities_: int) -> None:
    """Drop these capabilities of this thread for good."""
    header = ctypes.create_string_buffer(struct.pack("Ii", 0x20080522, 0))  # _LINUX_CAPABILITY_VERSION_3
    mask = linux.effective_capabilities() & ~sum(1 << number for number in capabilities_)
    words = [mask & 0xFFFFFFFF, mask & 0xFFFFFFFF, 0, mask >> 32, mask >> 32, 0]
    data = ctypes.create_string_buffer(b"".join(word.to_bytes(4, "little") for word in words))
    check(syscall(NR["capset"], header, data))


ALL = range(41)

# What takes a capability of root's: its number, and what to do at the top of a tree.
TAKES: dict[str, tuple[int, Callable[[str], object]]] = {
    "read": (1, lambda top: read(f"{top}/private")),
    "write": (1, lambda top: write(f"{top}/private", b"x", 0)),
    "list": (1, lambda top: names(f"{top}/home")),
    "create": (1, lambda top: write(f"{top}/home/new", b"")),
    "remove": (1, lambda top: os.unlink(f"{top}/home/file")),
    "rename": (1, lambda top: os.rename(f"{top}/home/file", f"{top}/home/file2")),
    "look": (1, lambda top: os.stat(f"{top}/home/file")),
    "chown": (0, lambda top: os.chown(f"{top}/roots", ANN, ANN)),
    "chmod": (3, lambda top: os.chmod(f"{top}/private", 0o644)),
    "times": (3, lambda top: os.utime(f"{top}/private", (1, 1))),
    "remove in a sticky directory": (3, lambda top: os.unlink(f"{top}/sticky/file")),
    "make a device": (27, lambda top: os.mknod(f"{top}/device", stat.S_IFCHR | 0o600, os.makedev(1, 3))),
}


def take(what: str, top: str) -> None:
    TAKES[what][1](top)


@pytest.fixture
def rights(tree: str) -> str:
    """What root needs capabilities for."""
    os.chown(tree, 0, 0)
    os.chmod(tree, 0o755)
    for name, mode in (("home", 0o700), ("sticky", 0o1777)):
        os.mkdir(f"{tree}/{name}")
        os.chown(f"{tree}/{name}", ANN, ANN)
        os.chmod(f"{tree}/{name}", mode)
        write(f"{tree}/{name}/file", b"ann's")
        os.chown(f"{tree}/{name}/file", ANN, ANN)
    write(f"{tree}/private", b"ann's")
    os.chown(f"{tree}/private", ANN, ANN)
    os.chmod(f"{tree}/private", 0o600)
    write(f"{tree}/roots", b"root's")
    return tree


OPTIONS = ("no_root_squash,dev,default_permissions", "no_root_squash", "no_root_squash,cloak_list=uid +077 9000 9999")


@pytest.mark.parametrize("options", [*OPTIONS, "range_map=uid 0 -1 map 0 gid 0 -1 map 0,groups=database"])
def test_root_without_a_capability_does_not_get_it_through_the_mount(
    options: str, rights: str, mount: MakeMount, user: MakeUser
) -> None:
    """Each alone, all of them, and both on the bare tree; root with all of them goes first, and in between."""
    m = mount("-o", options)
    root, confined = user(0), user(0)
    confined.do(drop, *ALL)
    for what, (number, _) in TAKES.items():
        assert confined.error(take, what, m.path) in (errno.EACCES, errno.EPERM), what
        assert confined.error(take, what, rights) == confined.error(take, what, m.path), what
        with User(0) as lacking:
            lacking.do(drop, *{1: (1, 2)}.get(number, (number,)))
            assert lacking.error(take, what, m.path) == lacking.error(take, what, rights) != 0, what
        assert root.do(os.stat, m.at("home", "file")).st_uid == ANN
    assert confined.do(read, m.at("roots")) == b"root's"
    confined.do(write, m.at("new"), b"")
    confined.do(os.unlink, m.at("new"))
    for what in TAKES:
        assert root.error(take, what, m.path) == 0, what
        if what.startswith(("remove", "rename")):
            name = "sticky/file" if what.endswith("directory") else "home/file"
            write(m.real(name), b"")
            os.chown(m.real(name), ANN, ANN)
        if what == "make a device":
            os.unlink(m.real("device"))
        if what == "chmod":
            os.chmod(m.real("private"), 0o600)


def test_other_capabilities_make_no_difference(rights: str, mount: MakeMount, user: MakeUser) -> None:
    m = mount("-o", "no_root_squash")
    root = user(0)
    root.do(drop, 10, 12, 13)  # CAP_NET_…
    assert root.do(read, m.at("private")) == b"ann's"
    root.do(os.chown, m.at("roots"), ANN, ANN)


def test_trusted_attributes_take_the_capability(rights: str, mount: MakeMount, user: MakeUser) -> None:
    m = mount("-o", "no_root_squash")
    root, confined = user(0), user(0)
    confined.do(drop, 21, 31)
    root.do(os.setxattr, m.at("roots"), "trusted.x", b"1")
    assert root.do(os.getxattr, m.at("roots"), "trusted.x") == b"1"
    assert confined.error(os.getxattr, m.at("roots"), "trusted.x") != 0
    assert confined.error(os.setxattr, m.at("roots"), "trusted.x", b"2") == errno.EPERM
    assert root.do(os.listxattr, m.at("roots")) == ["trusted.x"]
    assert "trusted.x" not in confined.do(os.listxattr, m.at("roots"))


def test_an_ordinary_user_that_is_mapped_to_root_gets_its_files_and_no_capabilities(
    rights: str, mount: MakeMount, user: MakeUser
) -> None:
    m = mount("-o", f"range_map=uid {ANN} map 0 gid 0 -1 map 0")
    ann = user(ANN)
    ann.do(write, m.at("roots"), b"changed", 0)
    assert ann.error(read, m.at("private")) == errno.EACCES


def test_a_fixed_view_of_root_gives_nobody_capabilities(rights: str, mount: MakeMount, user: MakeUser) -> None:
    m = mount("--view", "0:0", "-o", f"view_access={ANN}")
    root, confined, ann = user(0), user(0), user(ANN)
    confined.do(drop, *ALL)
    for _ in range(2):
        assert root.do(read, m.at("private")) == b"ann's"
        assert root.do(names, m.at("home")) == ["file"]
        for caller in confined, ann:
            assert caller.error(read, m.at("private")) == errno.EACCES
            assert caller.error(os.stat, m.at("home", "file")) == errno.EACCES
            assert caller.error(names, m.at("home")) == errno.EACCES
            assert caller.do(read, m.at("roots")) == b"root's"


@pytest.mark.parametrize("more", [(), ("--view", "9001:9001")])
def test_root_enters_a_fixed_view_only_if_it_could_become_its_user(
    more: tuple[str, ...], rights: str, mount: MakeMount, user: MakeUser
) -> None:
    m = mount("--view", f"{ANN}:{ANN}", *more)
    top = m.at(f"@{ANN}") if more else m.path
    root, confined, net = user(0), user(0), user(0)
    confined.do(drop, 7)  # CAP_SETUID
    net.do(drop, 12, 13)
    for _ in range(2):
        for allowed in root, net:
            assert allowed.do(read, f"{top}/private") == b"ann's"
            assert allowed.do(os.stat, f"{top}/home/file").st_uid == ANN
        assert confined.error(read, f"{top}/private") == errno.EACCES
        assert confined.error(os.stat, f"{top}/home/file") == errno.EACCES
        assert confined.error(names, top) == errno.EACCES


def enter_user_namespace() -> None:
    check(ctypes.CDLL(None, use_errno=True).unshare(0x10000000))  # CLONE_NEWUSER


def test_root_of_another_user_namespace_has_no_capabilities(rights: str, mount: MakeMount, user: MakeUser) -> None:
    """All ids are mapped to themselves there, and it has all capabilities: those of its namespace."""
    m = mount("-o", "no_root_squash")
    root = user(0)
    if root.error(enter_user_namespace):
        pytest.skip("no user namespaces")
    for kind in ("uid", "gid"):
        Path(f"/proc/{root.pid}/{kind}_map").write_text("0 0 4294967295\n")
    assert root.do(linux.effective_capabilities) & linux.FILE_CAPABILITIES == linux.FILE_CAPABILITIES
    assert root.do(read, m.at("roots")) == b"root's"
    assert root.do(read, m.real("private")) == b"ann's"  # the kernel lets it: the id of the owner is mapped
    assert root.error(read, m.at("private")) == errno.EACCES
    assert root.error(names, m.at("home")) == errno.EACCES
    assert read(m.at("private")) == b"ann's"


def test_what_a_confined_root_opened_it_goes_on_using(rights: str, mount: MakeMount, user: MakeUser) -> None:
    """Also in a thread, after others have acted in it: set-id bits show as whom the daemon writes."""
    m = mount("-o", "no_root_squash,suid")
    os.chown(m.real("roots"), 0, 0)
    os.chmod(m.real("roots"), 0o4755)
    root, confined = user(0), user(0)
    confined.do(drop, *ALL)
    for number in range(200):
        confined.do(write, m.at("of confined"), b"x" * 200_000)
        root.do(write, m.at("home", f"of root {number % 4}"), b"x" * 200_000)
        assert confined.error(read, m.at("home", "file")) == errno.EACCES
    confined.do(write, m.at("roots"), b"changed", 0)
    assert os.stat(m.real("roots")).st_mode & stat.S_ISUID == 0


# -- groups ----------------------------------------------------------------------------------------


@pytest.fixture
def teams(tree: str) -> str:
    for gid in (TEAM, OTHER_TEAM):
        path = os.path.join(tree, str(gid))
        write(path, b"%d" % gid)
        os.chown(path, 0, gid)
        os.chmod(path, 0o040)
    return tree


def set_thread_groups(*gids: int) -> None:
    array = (ctypes.c_uint32 * len(gids))(*gids)
    check(syscall(NR["setgroups"], ctypes.c_long(len(gids)), array))


def in_a_thread(gids: tuple[int, ...], path: str) -> int:
    """Open a file in a thread that has these groups and is an ordinary user; return the errno."""
    found: list[int] = []

    def run() -> None:
        set_thread_groups(*gids)
        syscall(NR["setfsgid"], ctypes.c_uint32(ANN))
        syscall(NR["setfsuid"], ctypes.c_uint32(ANN))
        try:
            os.close(os.open(path, os.O_RDONLY))
            found.append(0)
        except OSError as exc:
            found.append(exc.errno or -1)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize(
    ("of_process", "of_thread", "opens"),
    [
        ((TEAM, OTHER_TEAM), (TEAM, OTHER_TEAM), (TEAM, OTHER_TEAM)),
        ((TEAM, OTHER_TEAM), (TEAM,), (TEAM,)),
        ((TEAM,), (TEAM, OTHER_TEAM), (TEAM,)),
        ((OTHER_TEAM,), (TEAM,), ()),
        ((), (TEAM,), ()),
        ((TEAM,), (), ()),
    ],
)
def test_what_thread_and_process_have_counts(
    of_process: tuple[int, ...], of_thread: tuple[int, ...], opens: tuple[int, ...],
    teams: str, mount: MakeMount, user: MakeUser,
) -> None:  # fmt: skip
    m = mount()
    process = user(0, 0, of_process)
    for gid in (TEAM, OTHER_TEAM):
        expected = 0 if gid in opens else errno.EACCES
        assert process.do(in_a_thread, of_thread, m.at(str(gid))) == expected


# Opens a file by io_uring in a worker that was started when the process still had all its groups, and once more.
WORKER = Path(__file__).parent.parent / "data" / "uring.c"


@pytest.fixture(scope="module")
def uring(tmp_path_factory: pytest.TempPathFactory) -> str:
    program = str(tmp_path_factory.mktemp("uring") / "uring")
    done = subprocess.run(["cc", "-O1", "-o", program, str(WORKER)], check=False, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no compiler, or no io_uring: {done.stderr[:200]}")
    os.chmod(os.path.dirname(program), 0o755)
    os.chmod(program, 0o755)
    return program


def test_a_worker_of_io_uring_does_not_open_by_a_dropped_group(teams: str, mount: MakeMount, uring: str) -> None:
    m = mount()
    done = subprocess.run([uring, m.at(str(TEAM)), str(ANN), str(TEAM)], check=False, capture_output=True, text=True)
    if done.returncode == 77:
        pytest.skip("io_uring is turned off")
    before, worker_groups, after, bare = map(int, done.stdout.split())
    assert (before, after, bare) == (0, errno.EACCES, errno.EACCES), done
    assert worker_groups == 1, "the worker was to have kept the group"


# -- callers that cannot be seen -------------------------------------------------------------------


@pytest.fixture(params=[(), ("--mount-proc",)], ids=["the /proc of others", "its own /proc"])
def unseen(request: pytest.FixtureRequest, tree: str, base: str) -> Iterator[tuple[str, list[str]]]:
    """A mount whose daemon is in a pid namespace of its own, and how to run commands that see the mount outside it."""
    path = os.path.join(base, "unseen")
    os.mkdir(path)
    command = [
        "unshare",
        "--pid",
        "--fork",
        "--kill-child=SIGTERM",
        *request.param,
        *command_with(tuning=FIGURES_AT_ONCE),
    ]
    command += ["mount", "-f", tree, path, "-o", "no_root_squash"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as daemon:
        assert daemon.stderr is not None
        said = ""
        for line in daemon.stderr:
            said += line
            if ": access is" in line:
                break
        enter = ["nsenter", "--mount", "--target", str(daemon.pid)]
        try:
            yield path, enter
            (state,) = Path(RUN_DIR).glob(f"*{os.path.basename(base)}*.json")
            # `cloakfs status` prints it.
            wait_until(lambda: "have their primary group alone" in json.loads(state.read_text())["access"])
        finally:
            if subprocess.run([*enter, "umount", path], check=False).returncode:
                daemon.kill()  # and with it the namespace, or else this would wait for it for ever
            _, rest = daemon.communicate(timeout=60)
        assert (said + rest).count("it has its primary group alone") == 1, said + rest


def test_a_caller_that_cannot_be_seen_has_its_primary_group_alone(
    teams: str, rights: str, unseen: tuple[str, list[str]]
) -> None:
    path, enter = unseen

    def reads(name: str, *who: str) -> bool:
        command = [*enter, "setpriv", *who, "cat", f"{path}/{name}"]
        return subprocess.run(command, check=False, capture_output=True).returncode == 0

    for _ in range(2):
        assert not reads(str(TEAM), f"--reuid={ANN}", f"--regid={ANN}", f"--groups={TEAM}")
        assert reads(str(TEAM), f"--reuid={ANN}", f"--regid={TEAM}", "--clear-groups")
        assert not reads("private", "--clear-groups")
        assert reads("roots", "--clear-groups")
