"""What `cloakfs status MOUNTPOINT` says of the kernel's cache is what counting requests shows."""

import contextlib
import json
import os
import signal
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pyfuse3
import pytest

from tests.agents import User, read
from tests.mount.conftest import Mount, run, told, unmount
from tests.mount.loopfs import attached
from tests.mount.test_caching import CLOAKED, GROUP, OTHER, OWNER, STRANGER, put, requests
from tests.mount.test_plugins import plugin
from tests.waiting import let_expire, wait_until

pytestmark = pytest.mark.usefixtures("figures_at_once")

MakeMount = Callable[..., Mount]
MakeUser = Callable[..., User]

HOUR, SECOND, BRIEF = 3600, 1, 0.002

TIMES = 100

_held: dict[str, int] = {}


# -- what is measured ------------------------------------------------------------------------------


@pytest.fixture
def scene(tree: str) -> str:
    """What all see, what only a group sees, and what only its owner sees, each also by its place."""
    furnish(tree)
    return tree


def furnish(tree: str) -> None:
    os.chmod(tree, 0o777)
    put(os.path.join(tree, "top"), OWNER, 0o644)
    put(os.path.join(tree, "open"), OWNER, stat.S_IFDIR | 0o777)
    put(os.path.join(tree, "open/public"), OWNER, 0o644)
    put(os.path.join(tree, "open/directory"), OWNER, stat.S_IFDIR | 0o755)
    put(os.path.join(tree, "open/linked"), OWNER, 0o644)
    os.link(os.path.join(tree, "open/linked"), os.path.join(tree, "open/twin"))
    put(os.path.join(tree, "open/shared"), OWNER, 0o640, gid=GROUP)
    put(os.path.join(tree, "closed"), OWNER, stat.S_IFDIR | 0o750, gid=GROUP)
    put(os.path.join(tree, "closed/file"), OWNER, 0o644)
    put(os.path.join(tree, "closed/team"), STRANGER, stat.S_IFDIR | 0o2770, gid=GROUP)
    put(os.path.join(tree, "closed/team/file"), STRANGER, 0o660, gid=GROUP)
    put(os.path.join(tree, "home"), OTHER, stat.S_IFDIR | 0o700)
    put(os.path.join(tree, "home/secret"), OTHER, 0o600)
    put(os.path.join(tree, "home/inner"), OTHER, stat.S_IFDIR | 0o700)
    put(os.path.join(tree, "home/inner/secret"), OTHER, 0o600)


def look_up(path: str, times: int) -> None:
    """Look a name up in its directory, which is not looked up again."""
    directory = os.path.dirname(path)
    if directory not in _held:
        _held[directory] = os.open(directory, os.O_PATH)
    for _ in range(times):
        with contextlib.suppress(FileNotFoundError):
            os.stat(os.path.basename(path), dir_fd=_held[directory])


def get_attributes(path: str, times: int) -> None:
    if path not in _held:
        _held[path] = os.open(path, os.O_PATH)
    for _ in range(times * (10 if times > 1 else 1)):  # more of them than 2 ms are long enough for
        os.fstat(_held[path])


def list_names(path: str, times: int) -> None:
    for _ in range(times):
        os.listdir(path)


def read_content(path: str, times: int) -> None:
    for _ in range(times):
        read(path)


def get_acl(path: str, times: int) -> None:
    os.chdir(os.path.dirname(path))  # or else the kernel asks for the ACLs of the directories above, too
    for _ in range(times):
        with contextlib.suppress(OSError):
            os.getxattr(os.path.basename(path), "system.posix_acl_access")
    os.chdir("/")


def get_xattr(path: str, times: int) -> None:
    for _ in range(times):
        with contextlib.suppress(OSError):
            os.getxattr(path, "user.note")


# What is counted, while what is done that many times.
MEASURED: dict[str, tuple[str, Callable[[str, int], None]]] = {
    "names": ("lookup", look_up),
    "absent names": ("lookup", look_up),
    "attributes": ("getattr", get_attributes),
    "listings": ("readdir", list_names),
    "content": ("read", read_content),
    "POSIX ACLs": ("getxattr", get_acl),
    "extended attributes": ("getxattr", get_xattr),
}


@dataclass(frozen=True)
class Claim:
    """What status has to say (`of` is how it begins), and where that is seen."""

    what: str
    of: str
    seconds: float | None
    path: str


def names(seconds: float, path: str, of: str = "") -> Claim:
    return Claim("names", of, seconds, path)


def attributes(seconds: float, path: str, of: str = "") -> Claim:
    return Claim("attributes", of, seconds, path)


def absent(seconds: float, path: str = "open/absent", of: str = "") -> Claim:
    return Claim("absent names", of, seconds, path)


CONTENT = Claim("content", "of files", None, "open/public")
LISTINGS = Claim("listings", "", 0, "open")
LISTINGS_OF_HOMES = (
    (Claim("listings", "in directories known to one", None, "home"), Claim("listings", "of anything else", 0, "open"))
    if hasattr(pyfuse3.FileInfo, "cache_readdir")
    else (Claim("listings", "", 0, "home"),)
)
ABSENT_IN_HOMES = (absent(10, "home/absent", "in directories known to one"), absent(0, of="of anything else"))
"""This is found out by listing them, and so comes after that."""
XATTRS = Claim("extended attributes", "", 0, "open/public")
ACLS = (
    Claim("POSIX ACLs", "of objects", HOUR, "open/public"),
    Claim("extended attributes", "other", 0, "open/public"),
)
ALWAYS = (CONTENT, LISTINGS, XATTRS)


def facts(m: Mount) -> list[dict[str, Any]]:
    (mount,) = json.loads(run("status", m.path, "--json").stdout)
    found: list[dict[str, Any]] = mount["remembered"]
    return found


def agree(m: Mount, who: User, *claims: Claim, below: str = "", where: str = "") -> None:
    """Check that status says all this and nothing else, and that it is so."""
    said = {(fact["what"], fact["of"]): fact for fact in facts(m) if fact["where"] == where}
    proven = set()
    told()
    for claim in claims:
        key = next((key for key in said if key[0] == claim.what and begins(key[1], claim.of)), None)
        assert key, (claim, said)
        assert said[key]["seconds"] == claim.seconds, (claim, said[key])
        proven.add(key)
        who.do(MEASURED[claim.what][1], m.at(below, claim.path), 2)
    assert proven == set(said)
    before = requests(m)
    for claim in claims:
        counted, action = MEASURED[claim.what]
        who.do(action, m.at(below, claim.path), TIMES)
        now = requests(m)
        asked = (now - before)[counted]
        before = now
        if claim.seconds == 0:
            assert asked >= TIMES, (claim, asked)
        elif claim.seconds == BRIEF:
            assert 1 <= asked < 10 * TIMES, (claim, asked)
        else:
            assert asked <= 5, (claim, asked)
    let_expire(SECOND + 0.2)
    for what in ("attributes", "names"):  # in this order, because a LOOKUP brings attributes, too
        counted, action = MEASURED[what]
        for seconds in (SECOND, HOUR):
            paths = {m.at(below, claim.path) for claim in claims if (claim.what, claim.seconds) == (what, seconds)}
            if not paths:
                continue
            asked = asked_once(m, who, action, counted, paths)
            if seconds == SECOND:
                assert asked >= len(paths), (what, seconds, paths)
            elif asked:  # what has just changed is forgotten once more, some time after the daemon heard of it
                wait_until(partial(is_kept_longer, m, who, action, counted, paths))


def asked_once(m: Mount, who: User, action: Callable[..., object], counted: str, paths: Iterable[str]) -> int:
    """Return how many requests of a kind there are if something is done once for each of these paths."""
    before = requests(m)
    for path in paths:
        who.do(action, path, 1)
    return (requests(m) - before)[counted]


def is_kept_longer(m: Mount, who: User, action: Callable[..., object], counted: str, paths: Iterable[str]) -> bool:
    """Whether the kernel still asks nothing after what is kept for a second has expired."""
    let_expire(SECOND + 0.2)
    return asked_once(m, who, action, counted, paths) == 0


def begins(said: str, of: str) -> bool:
    """Whether status says it of these objects; \"\" stands for all."""
    return said.startswith(of) if of else not said


ALL, ONE, ELSE = "of what all callers see", "in directories known to one", "of anything else"
REACHED = "in directories that all callers can reach"
ITS = "of what is known to one"
TOP = attributes(HOUR, ".", "of the top")

# -- views for each caller -------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _figures(figures_at_once: None) -> None:
    """Requests can be counted without waiting for long."""


OF_MEMBERS = (
    names(HOUR, "closed/team/file", "in directories known to members of one group"),
    attributes(HOUR, "closed/team/file", "of what is known to members of one group"),
)
PUBLIC_NAMES = (names(HOUR, "open/public", ALL), names(HOUR, "home/secret", ONE), names(0, "open/shared", ELSE))
PUBLIC_ATTRIBUTES = (
    attributes(HOUR, "open/public", ALL),
    attributes(HOUR, "home/secret", ITS),
    attributes(BRIEF, "open/shared", ELSE),
    attributes(BRIEF, "open/linked", ELSE),
)


def test_each_caller(scene: str, mount: MakeMount, user: MakeUser) -> None:
    m = mount("-o", CLOAKED)
    agree(
        m,
        user(OTHER, GROUP),
        *OF_MEMBERS,
        *PUBLIC_NAMES,
        *PUBLIC_ATTRIBUTES,
        *LISTINGS_OF_HOMES,
        *ABSENT_IN_HOMES,
        CONTENT,
        XATTRS,
    )


def test_each_caller_where_nothing_is_hidden(scene: str, mount: MakeMount, user: MakeUser) -> None:
    m = mount("-o", "rw,no_root_squash,default_permissions")
    agree(
        m,
        user(OTHER, GROUP),
        *OF_MEMBERS,
        names(HOUR, "open/shared", REACHED),
        names(HOUR, "home/inner/secret", ONE),
        names(0, "home/secret", ELSE),  # all are told of a home that all can see
        names(0, "closed/file", ELSE),
        attributes(HOUR, "open/shared", REACHED),
        attributes(HOUR, "home/secret", ITS),
        attributes(BRIEF, "open/linked", ELSE),
        *(replace(claim, path=claim.path.replace("home", "home/inner")) for claim in LISTINGS_OF_HOMES),
        absent(10, of=REACHED),
        absent(10, "home/inner/absent", ONE),
        absent(0, "closed/absent", ELSE),
        CONTENT,
        *ACLS,
    )


def test_without_extended_attributes(scene: str, mount: MakeMount, user: MakeUser) -> None:
    m = mount("-o", f"{CLOAKED},noxattr")
    none = Claim("extended attributes", "", None, "open/public")
    facts = (*OF_MEMBERS, *PUBLIC_NAMES, *PUBLIC_ATTRIBUTES, *LISTINGS_OF_HOMES, *ABSENT_IN_HOMES, CONTENT, none)
    agree(m, user(OTHER, GROUP), *facts)


def test_no_client_cache(scene: str, mount: MakeMount, user: MakeUser) -> None:
    m = mount("-o", f"{CLOAKED},no_client_cache")
    agree(
        m,
        user(OTHER, GROUP),
        *OF_MEMBERS,
        *PUBLIC_NAMES,
        *PUBLIC_ATTRIBUTES[:2],
        attributes(0, "open/shared", ELSE),
        attributes(0, "open/directory", "of directories"),
        replace(LISTINGS, path="home"),
        *ABSENT_IN_HOMES,
        CONTENT,
        XATTRS,
    )


HIDES = """class P:
    def visible(self, caller, attrs):
        return caller.uid == attrs.uid or attrs.name != "shared"
"""
SAYS_SO = """    def same_for_all(self, attrs):
        return attrs.name != "shared"
"""
FORWARDS = """class P:
    def forward(self, caller):
        return Caller(caller.uid, caller.gid, caller.groups)
"""


def test_a_plugin(base: str, scene: str, mount: MakeMount, user: MakeUser) -> None:
    m = mount("-o", "rw,no_root_squash", "--policy", plugin(base, HIDES))
    agree(
        m, user(OTHER, GROUP), names(0, "open/public"), TOP, attributes(BRIEF, "open/public", ELSE), absent(0), *ALWAYS
    )


def test_a_plugin_that_says_what_all_see(base: str, scene: str, mount: MakeMount, user: MakeUser) -> None:
    m = mount("-o", "rw,no_root_squash", "--policy", plugin(base, HIDES + SAYS_SO))
    agree(
        m,
        user(OWNER),
        names(HOUR, "open/public", "of what the plug-in"),
        names(0, "open/shared", ELSE),
        names(0, "closed/file", ELSE),
        attributes(HOUR, "open/public", "of what the plug-in"),
        attributes(BRIEF, "open/shared", ELSE),
        absent(0),
        *ALWAYS,
    )


def test_a_plugin_that_hides_nothing(base: str, scene: str, mount: MakeMount, user: MakeUser) -> None:
    m = mount("-o", "rw,no_root_squash", "--policy", plugin(base, FORWARDS))
    agree(
        m,
        user(OTHER, GROUP),
        names(0, "open/public"),
        TOP,
        attributes(BRIEF, "open/public", ELSE),
        absent(10, "absent", "at the top"),
        absent(0, "open/absent", ELSE),
        *ALWAYS,
    )


# -- fixed views -----------------------------------------------------------------------------------

VIEW = f"views={OTHER}:{GROUP}"
EVERYTHING = (names(HOUR, "closed/file"), attributes(HOUR, "closed/file"), absent(10))
AT_THE_TOP = (names(0, "top", "at the top"), absent(0, "absent", "at the top"))


def test_a_fixed_view_behind_the_kernels_gate(scene: str, mount: MakeMount, user: MakeUser) -> None:
    m = mount("-o", f"{CLOAKED},{VIEW},default_permissions")
    whole = (names(HOUR, "top"), attributes(HOUR, "open/linked"))
    agree(m, user(OTHER, GROUP), *whole, *EVERYTHING, CONTENT, LISTINGS, *ACLS)


@pytest.mark.parametrize("words", ["", f",view_access={STRANGER},default_permissions"])
def test_a_fixed_view_that_the_daemon_guards(words: str, scene: str, mount: MakeMount, user: MakeUser) -> None:
    m = mount("-o", f"{CLOAKED},{VIEW}{words}")
    xattrs = ACLS if words else (XATTRS,)
    agree(m, user(OTHER, GROUP), *EVERYTHING, *AT_THE_TOP, replace(TOP, seconds=0), CONTENT, LISTINGS, *xattrs)


def test_several_views(scene: str, mount: MakeMount, user: MakeUser) -> None:
    m = mount("-o", f"{CLOAKED},{VIEW} {STRANGER}:{STRANGER}")
    view = names(0, f"../@{OTHER}", "of views")
    agree(m, user(OTHER, GROUP), *EVERYTHING, names(HOUR, "top"), view, *ALWAYS, below=f"@{OTHER}")


def test_a_plugin_in_a_fixed_view(base: str, scene: str, mount: MakeMount, user: MakeUser) -> None:
    m = mount("-o", f"rw,{VIEW},default_permissions", "--policy", plugin(base, HIDES + SAYS_SO))
    no_acl = Claim("POSIX ACLs", "", 0, "open/public")
    agree(
        m,
        user(OTHER, GROUP),
        names(0, "open/public"),
        TOP,
        attributes(BRIEF, "open/public", ELSE),
        absent(0),
        CONTENT,
        LISTINGS,
        no_acl,
        ACLS[1],
    )


# -- exports ---------------------------------------------------------------------------------------


def test_an_export(scene: str, mount: MakeMount, user: MakeUser) -> None:
    put(os.path.join(scene, "open/roots"), OWNER, 0o640, gid=0)
    m = mount("-o", f"{CLOAKED},knfsd")
    agree(
        m,
        user(0),
        names(HOUR, "open/public", ALL),
        names(0, "open/roots", ELSE),
        attributes(HOUR, "open/public", ALL),
        attributes(0, "open/roots", ELSE),
        attributes(0, "open/linked", ELSE),
        absent(0),
        CONTENT,
        LISTINGS,
        *ACLS,
    )


@pytest.mark.parametrize(
    ("words", "private"),
    [("all_squash,anonuid=0,anongid=0,knfsd,all_squashed", ITS), ("no_root_squash,knfsd,subtree_checked", ONE)],
    ids=["to one caller", "checked from the top"],
)
def test_an_export_for_which_private_files_are_cached(
    words: str, private: str, scene: str, mount: MakeMount, user: MakeUser
) -> None:
    m = mount("-o", f"rw,cloak_list=uid +077 3000 3999,{words}")
    put(os.path.join(scene, "open/roots"), OWNER, 0o640, gid=0)
    for path in ("home", "home/inner", "home/inner/secret"):
        os.chown(os.path.join(scene, path), 0, 0)
    agree(
        m,
        user(0),
        names(HOUR, "open/public", ALL),
        names(HOUR, "home/inner/secret", ONE),
        names(0, "open/roots", ELSE),
        attributes(HOUR, "open/public", ALL),
        attributes(HOUR, "home/inner/secret", private),
        attributes(0, "open/roots", ELSE),
        attributes(0, "open/linked", ELSE),
        absent(0),
        CONTENT,
        LISTINGS,
        *ACLS,
    )


def test_an_export_by_ganesha(scene: str, mount: MakeMount, user: MakeUser) -> None:
    put(os.path.join(scene, "open/roots"), OWNER, 0o640, gid=0)
    m = mount("-o", f"{CLOAKED},ganesha,views=0:0")
    no_content = Claim("content", "", 0, "open/public")
    whole = (names(HOUR, "open/roots"), names(HOUR, "top"), attributes(HOUR, "open/roots"), absent(10))
    agree(m, user(0), *whole, no_content, LISTINGS, XATTRS)


def test_an_export_of_a_fixed_view(scene: str, mount: MakeMount, user: MakeUser) -> None:
    m = mount("-o", f"{CLOAKED},views={OTHER}:{GROUP},knfsd")
    agree(
        m,
        user(0),
        names(HOUR, "closed/file"),
        attributes(0, "closed/file"),
        absent(10),
        CONTENT,
        LISTINGS,
        Claim("POSIX ACLs", "", 0, "open/public"),
        ACLS[1],
    )


# -- trees -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def overlay(base: str, place: str) -> Iterator[None]:
    """An overlay whose changes are not reported, mounted at `place`."""
    with attached("tmpfs", place, "-t", "tmpfs"):
        there = [os.path.join(place, name) for name in ("lower", "upper", "work")]
        for path in there:
            os.mkdir(path)
        furnish(there[0])
        words = "lowerdir={},upperdir={},workdir={}".format(*there)
        with attached("overlay", place, "-t", "overlay", "-o", words):
            yield


def test_a_tree_whose_changes_are_not_reported(base: str, tree: str, mount: MakeMount, user: MakeUser) -> None:
    no_content = Claim("content", "", 0, "open/public")
    with overlay(base, tree), contextlib.ExitStack() as stack:
        fixed = mount("-o", f"{CLOAKED},{VIEW},default_permissions")
        stack.callback(unmount, fixed.path)
        for_each = mount("-o", CLOAKED)
        stack.callback(unmount, for_each.path)
        member = user(OTHER, GROUP)
        stack.callback(member.close)
        acls = (Claim("POSIX ACLs", "of objects", SECOND, "open/public"), ACLS[1])
        everything = (names(SECOND, "closed/file"), attributes(SECOND, "closed/file"), absent(SECOND))
        agree(fixed, member, *everything, no_content, LISTINGS, *acls)
        agree(
            for_each,
            member,
            names(0, "open/public"),
            replace(TOP, seconds=SECOND),
            attributes(BRIEF, "open/public", ELSE),
            absent(0),
            no_content,
            LISTINGS,
            XATTRS,
        )


def test_another_file_system_in_the_tree(base: str, scene: str, mount: MakeMount, user: MakeUser) -> None:
    place = put(os.path.join(scene, "mounted"), 0, stat.S_IFDIR | 0o755)
    with overlay(base, place), contextlib.ExitStack() as stack:
        m = mount("-o", CLOAKED)
        stack.callback(unmount, m.path)
        member = user(OTHER, GROUP)
        stack.callback(member.close)
        homes = (*LISTINGS_OF_HOMES, *ABSENT_IN_HOMES)
        agree(m, member, *OF_MEMBERS, *PUBLIC_NAMES, *PUBLIC_ATTRIBUTES, *homes, CONTENT, XATTRS)
        other = (
            names(0, "open/public"),
            attributes(BRIEF, "open/public", ELSE),
            Claim("content", "", 0, "open/public"),
        )
        agree(m, member, *other, absent(0), LISTINGS, below="mounted", where=f"{place} (overlay)")


def test_a_tree_in_another_cloakfs(scene: str, mount: MakeMount, user: MakeUser) -> None:
    lower = mount("-o", CLOAKED)
    m = mount("-o", "rw,no_root_squash", source=lower.path)
    no_content = Claim("content", "", 0, "open/public")
    rest = (absent(0), no_content, LISTINGS, XATTRS)
    agree(m, user(OTHER, GROUP), names(0, "open/public"), attributes(BRIEF, "open/public"), *rest)


# -- the command -----------------------------------------------------------------------------------


def test_status_tells_of_one_mount_in_full_and_of_all_in_short(scene: str, mount: MakeMount) -> None:
    m = mount("-o", f"{CLOAKED},views={OTHER}:{GROUP}")
    said = run("status", m.path).stdout
    assert "\n access    checked by the daemon alone: a fixed view has ids and groups of its own\n locks " in said
    assert "\n kernel    1 h         names\n" in said
    assert (
        "\n           not at all  names at the top: the daemon checks there who may enter"
        " (hint: default_permissions)\n" in said
    )
    assert "kernel" not in run("status", check=False).stdout


def test_who_checks_permissions_is_told(base: str, scene: str, mount: MakeMount) -> None:
    file = Path(base, "a.exports")
    file.write_text(f"{scene} *(rw)\n")
    m = mount("--exports", str(file), "-o", "default_permissions")

    def access() -> str:
        (told,) = json.loads(run("status", m.path, "--json").stdout)
        return str(told["access"])

    assert access() == "checked by the daemon and the kernel, by the same ids and groups"
    assert f"{m.path}: access is {access()}\n" in m.log
    file.write_text(f"{scene} *(rw,range_map=uid 0 999 map 0)\n")
    os.kill(m.pid, signal.SIGHUP)
    wait_until(lambda: access().endswith("which may refuse what the daemon would grant: ids are mapped"))


def test_a_reload_is_told(base: str, scene: str, mount: MakeMount) -> None:

    file = Path(base, "a.exports")
    file.write_text(f"{scene} *(rw)\n")
    m = mount("--exports", str(file))
    assert any(fact["of"] == REACHED for fact in facts(m))
    file.write_text(f"{scene} *(rw,cloak_list=uid +077 3000 3999)\n")
    os.kill(m.pid, signal.SIGHUP)
    wait_until(lambda: not any(fact["of"] == REACHED for fact in facts(m)))
