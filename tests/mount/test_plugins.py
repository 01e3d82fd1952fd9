"""Plug-ins through a real mount by real uids: the examples, and what goes wrong in others."""

import errno
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from cloakfs import linux
from cloakfs.state.runtime import mounted as telling
from tests.agents import User, read, write
from tests.mount.conftest import Mount, is_mounted, run, told
from tests.waiting import wait_until

EXAMPLES = Path(__file__).parents[2] / "examples" / "policies"

MakeMount = Callable[..., Mount]
MakeUser = Callable[..., User]


def put(path: str, uid: int, gid: int, mode: int = 0o644) -> None:
    Path(path).write_text("text")
    os.chown(path, uid, gid)
    os.chmod(path, mode)


def plugin(base: str, code: str, name: str = "plug.py") -> str:
    """Write a plug-in and say what to mount with."""
    Path(base, name).write_text(
        f"from cloakfs.policy import Attrs, Policy\nfrom cloakfs.identity import Caller\n{code}"
    )
    return f"{base}/{name}:P"


# -- the examples ----------------------------------------------------------------------------------


def test_name_pattern(tree: str, mount: MakeMount, user: MakeUser) -> None:
    for name in ("site.key", "draft-1", "paper", "draft-x.key"):
        put(os.path.join(tree, name), 3001, 3001)
    put(os.path.join(tree, "cloaked"), 3009, 3009, 0o600)
    m = mount("--policy", f"{EXAMPLES}/name_pattern.py:NamePattern", "-o", "cloak_list=uid +007 3009")
    everything = ["draft-1", "draft-x.key", "paper", "site.key"]
    for groups, sees in (
        ([], ["paper"]),
        ([1001], ["paper", "site.key"]),
        ([1002], ["draft-1", "paper"]),
        ([1001, 1002], everything),
    ):
        caller = user(3002, 3002, groups)
        assert sorted(caller.do(os.listdir, m.path)) == sees, groups
        for name in everything:
            assert caller.error(os.stat, m.at(name)) == (0 if name in sees else errno.ENOENT), (groups, name)
    assert sorted(user(3001).do(os.listdir, m.path)) == everything
    # Who may not see what would be made does not make it: unless it is the owner's, as here.
    caller = user(3002)
    caller.do(write, m.at("draft-2"), b"")
    assert "draft-2" in caller.do(os.listdir, m.path)
    assert "draft-2" not in user(3003).do(os.listdir, m.path)


def test_a_name_that_its_giver_would_not_see_is_not_given(tree: str, mount: MakeMount, user: MakeUser) -> None:
    """By whichever operation: what one has made, linked or renamed, one could not remove."""
    os.chmod(tree, 0o777)
    for name in ("paper", "taken.key", "mine.key"):
        put(os.path.join(tree, name), 3002 if name == "mine.key" else 3001, 3001, 0o666)
    m = mount("--policy", f"{EXAMPLES}/name_pattern.py:NamePattern")
    caller = user(3002)
    for flags, name, expected in (
        (0, "new.key", errno.EACCES),
        (0, "taken.key", errno.EACCES),
        (0, "mine.key", errno.EACCES),  # which is the caller's, but would be the owner's of the paper then
        (linux.RENAME_NOREPLACE, "new.key", errno.EACCES),
        (linux.RENAME_NOREPLACE, "taken.key", errno.EEXIST),
        (linux.RENAME_EXCHANGE, "mine.key", errno.EACCES),
        (linux.RENAME_EXCHANGE, "new.key", errno.ENOENT),
    ):
        found = caller.error(linux.renameat2, -1, os.fsencode(m.at("paper")), -1, os.fsencode(m.at(name)), flags)
        assert found == expected, (flags, name)
    assert caller.error(os.link, m.at("paper"), m.at("new.key")) == errno.EACCES
    assert caller.error(os.link, m.at("paper"), m.at("taken.key")) == errno.EEXIST
    assert sorted(os.listdir(tree)) == ["mine.key", "paper", "taken.key"]
    caller.do(os.rename, m.at("paper"), m.at("article"))
    caller.do(os.link, m.at("article"), m.at("paper"))
    user(3001).do(os.rename, m.at("paper"), m.at("new.key"))  # the owner sees it
    assert sorted(os.listdir(tree)) == ["article", "mine.key", "new.key", "taken.key"]


def test_office_hours(base: str, tree: str, mount: MakeMount, user: MakeUser) -> None:
    code = (EXAMPLES / "office_hours.py").read_text()

    def write_hours(days: str, hours: str) -> None:
        changed = code.replace("DAYS = range(0, 5)", f"DAYS = {days}").replace(
            "HOURS = range(8, 18)", f"HOURS = {hours}"
        )
        assert changed.count(f"DAYS = {days}") == changed.count(f"HOURS = {hours}") == 1
        Path(base, "office_hours.py").write_text(changed)

    put(os.path.join(tree, "project"), 3001, 1001, 0o664)
    put(os.path.join(tree, "other"), 3001, 3001)
    entry = Path(base, "lab.exports")
    entry.write_text(f"{tree} *(rw, policy=office_hours.py:OfficeHours)\n")  # beside the file of exports
    write_hours("range(7)", "range(24)")
    m = mount("--exports", str(entry))
    member, owner = user(3002, 3002, [1001]), user(3001)
    assert sorted(member.do(os.listdir, m.path)) == ["other", "project"]
    assert member.do(read, m.at("project")) == b"text"
    for reloads, (days, hours) in enumerate((("range(0)", "range(24)"), ("range(7)", "range(0)")), start=1):
        write_hours(days, hours)
        os.kill(m.pid, signal.SIGHUP)
        wait_until(lambda count=reloads: m.log.count("reloaded") == count)  # type: ignore[misc]
        assert member.do(os.listdir, m.path) == ["other"]
        assert member.error(os.stat, m.at("project")) == errno.ENOENT
        assert sorted(owner.do(os.listdir, m.path)) == ["other", "project"]


def test_hide_unreadable(tree: str, mount: MakeMount, user: MakeUser) -> None:
    put(os.path.join(tree, "public"), 3001, 3001)
    put(os.path.join(tree, "private"), 3001, 3001, 0o600)
    put(os.path.join(tree, "group"), 3001, 3101, 0o640)
    put(os.path.join(tree, "writable"), 3001, 3001, 0o622)
    put(os.path.join(tree, "by-acl"), 3001, 3001, 0o600)
    put(os.path.join(tree, "denied-by-acl"), 3001, 3001, 0o644)
    put(os.path.join(tree, "own"), 3002, 3002, 0o000)
    for name, mode in (("passage", 0o711), ("closed", 0o700)):
        os.mkdir(os.path.join(tree, name))
        put(os.path.join(tree, name, "inside"), 3001, 3001)
        os.chown(os.path.join(tree, name), 3001, 3001)
        os.chmod(os.path.join(tree, name), mode)
    subprocess.run(["setfacl", "-m", "u:3002:r", os.path.join(tree, "by-acl")], check=True)
    subprocess.run(["setfacl", "-m", "u:3002:-", os.path.join(tree, "denied-by-acl")], check=True)
    m = mount("--policy", f"{EXAMPLES}/hide_unreadable.py:HideUnreadable")
    caller = user(3002, 3002, [3101])
    assert sorted(caller.do(os.listdir, m.path)) == ["by-acl", "group", "own", "passage", "public"]
    assert sorted(user(3003).do(os.listdir, m.path)) == ["denied-by-acl", "passage", "public"]
    assert caller.do(read, m.at("passage", "inside")) == b"text"
    assert caller.error(os.stat, m.at("closed", "inside")) == errno.ENOENT
    assert caller.error(os.stat, m.at("writable")) == errno.ENOENT
    assert caller.do(read, m.at("by-acl")) == b"text"
    # The kernel decides at every request.
    subprocess.run(["setfacl", "-x", "u:3002", os.path.join(tree, "by-acl")], check=True)
    assert caller.error(os.stat, m.at("by-acl")) == errno.ENOENT
    caller.do(write, m.at("new"), b"mine")
    assert caller.do(read, m.at("new")) == b"mine"


def test_hide_unreadable_heeds_the_cloak_list_too(tree: str, mount: MakeMount, user: MakeUser) -> None:
    put(os.path.join(tree, "readable"), 3001, 3001)
    put(os.path.join(tree, "cloaked"), 3005, 3005)
    m = mount("--policy", f"{EXAMPLES}/hide_unreadable.py:HideUnreadable", "-o", "cloak_list=uid +000 3005")
    assert user(3002).do(os.listdir, m.path) == ["readable"]


# -- what goes wrong -------------------------------------------------------------------------------

RAISES = "raise RuntimeError('for ' + repr(args))"


FAILING = {
    "show": "def show(_, *args):\n        if args[0].name:\n            {how}\n        return args[0]\n",
    "client_id": "def client_id(_, *args):\n        if args[1] == 3001:\n            {how}\n        return args[1]\n",
}


@pytest.mark.parametrize("how", [RAISES, "raise SystemExit(7)", "return object()"])
@pytest.mark.parametrize("base_class", ["", "(Policy)"])
@pytest.mark.parametrize("method", FAILING)
def test_what_cannot_be_shown_is_hidden(
    method: str, base_class: str, how: str, base: str, tree: str, mount: MakeMount, user: MakeUser
) -> None:
    put(os.path.join(tree, "file"), 3001, 3001)
    m = mount("--policy", plugin(base, f"class P{base_class}:\n    {FAILING[method].format(how=how)}"))
    m.expect_errors = True
    caller = user(3001)
    for _ in range(3):
        assert caller.do(os.listdir, m.path) == []
        assert caller.error(os.stat, m.at("file")) == errno.ENOENT
        assert caller.error(read, m.at("file")) == errno.ENOENT
    assert m.log.count("failed: hidden") == m.log.count("Traceback") == 1, m.log
    assert Path(tree, "file").read_text() == "text"


@pytest.mark.parametrize("how", [RAISES, "raise SystemExit(7)", "return object()"])
@pytest.mark.parametrize("base_class", ["", "(Policy)"])
def test_without_forward_nobody_sees_anything(
    base_class: str, how: str, base: str, tree: str, mount: MakeMount, user: MakeUser
) -> None:
    put(os.path.join(tree, "file"), 3001, 3001)
    m = mount("--policy", plugin(base, f"class P{base_class}:\n    def forward(*args):\n        {how}\n"))
    m.expect_errors = True
    caller = user(3001)
    for _ in range(3):
        assert caller.error(os.stat, m.at("file")) == errno.ENOENT
        assert caller.error(os.listdir, m.path) == errno.ENOENT
    assert m.log.count("failed: hidden") == m.log.count("Traceback") == 1, m.log


def test_a_reload_to_a_policy_that_shows_nothing_leaves_nothing_and_can_be_undone(
    base: str, tree: str, mount: MakeMount, user: MakeUser
) -> None:
    put(os.path.join(tree, "file"), 3001, 3001)
    entry = Path(base, "lab.exports")
    entry.write_text(f"{tree} *(rw, policy=plug.py:P)\n")
    plugin(base, "class P:\n    def show(self, attrs):\n        return attrs\n")
    m = mount("--exports", str(entry))
    m.expect_errors = True
    caller = user(3001)
    assert caller.do(os.listdir, m.path) == ["file"]
    for count, (how, seen) in enumerate((("1 / 0", False), ("return attrs", True)), start=1):
        plugin(base, f"class P:\n    def show(self, attrs):\n        {how}\n")
        os.kill(m.pid, signal.SIGHUP)
        wait_until(lambda count=count: m.log.count("reloaded") == count)  # type: ignore[misc]
        assert (caller.error(os.stat, m.at("file")) == 0) == seen
        assert (caller.error(os.listdir, m.path) == 0) == seen


@pytest.mark.parametrize("how", [("--policy", "{}"), ("-o", "rw,policy={}")], ids=" ".join)
def test_a_plug_in_that_the_command_line_names_is_read_again(
    how: tuple[str, str], base: str, tree: str, mount: MakeMount, user: MakeUser
) -> None:
    put(os.path.join(tree, "file"), 3001, 3001)
    code = "class P:\n    def visible(self, caller, attrs):\n        return {}\n"
    spec = plugin(base, code.format(True))
    m = mount(how[0], how[1].format(spec))
    m.expect_errors = True
    caller = user(3002)
    options = telling()[m.path].options
    for asked, (text, failure, reloads, seen) in enumerate(
        (
            (code.format(False), None, 1, []),
            (code.format("(")[:-1], f"policy={spec}: SyntaxError: ", 1, []),
            (code.format(True), None, 2, ["file"]),
        ),
        start=1,
    ):
        plugin(base, text)
        os.kill(m.pid, signal.SIGHUP)
        wait_until(lambda asked=asked: telling()[m.path].asked == asked)  # type: ignore[misc]
        now = telling()[m.path]
        assert now.failure == failure or (failure and now.failure and now.failure.startswith(failure))
        assert (now.reloads, now.options) == (reloads, options)
        assert caller.do(os.listdir, m.path) == seen


def test_a_policy_that_cannot_even_show_the_root_is_no_mount(base: str, tree: str) -> None:
    target = os.path.join(base, "mnt")
    os.mkdir(target)
    spec = plugin(base, "class P:\n    def show(self, attrs):\n        1 / 0\n")
    done = run("mount", tree, target, "--policy", spec, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("cloakfs: ")
    assert done.stderr.count("\n") == 1
    assert not is_mounted(target)


@pytest.mark.parametrize("how", [RAISES, "raise SystemExit(7)", "return [] == args or 1 / 0"])
@pytest.mark.parametrize("base_class", ["", "(Policy)"])
def test_a_failing_visible_hides_all_but_the_root(
    base_class: str, how: str, base: str, tree: str, mount: MakeMount, user: MakeUser
) -> None:
    put(os.path.join(tree, "file"), 3001, 3001)
    m = mount("--policy", plugin(base, f"class P{base_class}:\n    def visible(*args):\n        {how}\n"))
    m.expect_errors = True
    caller = user(3001)
    for _ in range(3):
        assert caller.do(os.listdir, m.path) == []
        assert caller.error(os.stat, m.at("file")) == errno.ENOENT
        assert caller.error(write, m.at("file"), b"gone") == errno.EACCES
        assert caller.error(os.mkdir, m.at("new")) == errno.EACCES
    assert m.log.count("failed: hidden") == 1, m.log
    assert m.log.count("Traceback") == 1  # where the author finds the line
    os.kill(m.pid, 0)
    assert Path(tree, "file").read_text() == "text"


def test_only_the_object_that_a_method_fails_for_is_hidden(
    base: str, tree: str, mount: MakeMount, user: MakeUser
) -> None:
    for name in ("bad", "good"):
        put(os.path.join(tree, name), 3001, 3001)
    code = "class P:\n    def visible(self, caller, attrs):\n        return {'good': True}[attrs.name]\n"
    m = mount("--policy", plugin(base, code))
    m.expect_errors = True
    caller = user(3002)
    assert caller.do(os.listdir, m.path) == ["good"]
    assert caller.do(read, m.at("good")) == b"text"
    assert caller.error(os.stat, m.at("bad")) == errno.ENOENT


@pytest.mark.parametrize("how", [RAISES, "raise SystemExit(7)", "return object()", "return None"])
def test_a_failing_server_id_refuses(how: str, base: str, tree: str, mount: MakeMount, user: MakeUser) -> None:
    put(os.path.join(tree, "file"), 3001, 3001)
    m = mount("--policy", plugin(base, f"class P:\n    def server_id(*args):\n        {how}\n"), "-o", "no_root_squash")
    m.expect_errors = True
    for uid, gid in ((3002, -1), (-1, 3002)):
        with pytest.raises(OSError, match="Invalid argument"):
            os.chown(m.at("file"), uid, gid)
    acl = subprocess.run(["setfacl", "-m", "u:3002:r", m.at("file")], capture_output=True, text=True, check=False)
    assert "Invalid argument" in acl.stderr
    info = os.stat(os.path.join(tree, "file"))
    assert (info.st_uid, info.st_gid) == (3001, 3001)
    assert m.log.count("failed: hidden") == (how != "return None")
    assert user(3002).do(read, m.at("file")) == b"text"


def test_a_forward_that_fails_for_one_hides_from_that_one(
    base: str, tree: str, mount: MakeMount, user: MakeUser
) -> None:
    put(os.path.join(tree, "file"), 3001, 3001)
    code = "class P:\n    def forward(self, caller):\n        assert caller.uid != 3002\n        return caller\n"
    m = mount("--policy", plugin(base, code))
    m.expect_errors = True
    assert user(3003).do(os.listdir, m.path) == ["file"]
    assert user(3002).error(os.listdir, m.path) == errno.ENOENT
    assert user(3003).do(read, m.at("file")) == b"text"


@pytest.mark.parametrize("answer", ["None", "attrs.mode & 4"])
def test_a_visible_that_answers_neither_true_nor_false_hides_and_says_so(
    answer: str, base: str, tree: str, mount: MakeMount, user: MakeUser
) -> None:
    put(os.path.join(tree, "file"), 3001, 3001)
    spec = plugin(base, f"class P:\n    def visible(self, caller, attrs):\n        return {answer}\n")
    m = mount("--policy", spec)
    m.expect_errors = True
    caller = user(3001)
    for _ in range(3):
        assert caller.do(os.listdir, m.path) == []
        assert caller.error(os.stat, m.at("file")) == errno.ENOENT
    value = "None" if answer == "None" else "4"
    said = f"policy {spec}: visible answered {value}, neither True nor False: hidden"
    assert [said in line for line in m.log.splitlines()].count(True) == 1, m.log
    assert "Traceback" not in m.log


# -- what is remembered ----------------------------------------------------------------------------

SECRETS = """class P(Policy):
    def visible(self, caller, attrs):
        return caller.uid == attrs.uid or not attrs.name.startswith("secret")
    def same_for_all(self, attrs):
        return not attrs.name.startswith("secret")
"""


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_a_rename_to_a_name_that_is_hidden_is_not_remembered_for_all(
    kind: str, base: str, tree: str, mount: MakeMount, user: MakeUser
) -> None:
    m = mount("--policy", plugin(base, SECRETS))
    owner, other = user(3001), user(3002)
    if kind == "directory":
        owner.do(os.mkdir, m.at("public"))
    inside = "/inside" * (kind == "directory")
    owner.do(write, m.at(f"public{inside}"), b"text")
    told()  # a change within the last tick of the clock is nothing to rely on
    for _ in range(3):
        assert other.do(read, m.at(f"public{inside}")) == b"text"
        assert other.do(os.listdir, m.path) == ["public"]
    owner.do(os.rename, m.at("public"), m.at("secret"))
    wait_until(lambda: other.error(os.stat, m.at("secret")) == errno.ENOENT)
    wait_until(lambda: other.error(os.stat, m.at(f"secret{inside}")) == errno.ENOENT)
    for _ in range(3):
        assert owner.do(read, m.at(f"secret{inside}")) == b"text"
        assert other.do(os.listdir, m.path) == []
        assert other.error(os.stat, m.at(f"secret{inside}")) == errno.ENOENT


def test_a_link_by_a_name_that_is_hidden_is_not_remembered_for_all(
    base: str, tree: str, mount: MakeMount, user: MakeUser
) -> None:
    m = mount("--policy", plugin(base, SECRETS))
    owner, other = user(3001), user(3002)
    owner.do(write, m.at("public"), b"text")
    told()  # as above
    assert other.do(read, m.at("public")) == b"text"
    owner.do(os.link, m.at("public"), m.at("secret"))
    for first, second in (("public", "secret"), ("secret", "public")):
        for _ in range(3):
            assert owner.do(read, m.at(first)) == owner.do(read, m.at(second)) == b"text"
            assert other.do(read, m.at("public")) == b"text"
            assert other.error(os.stat, m.at("secret")) == errno.ENOENT
            assert other.do(os.listdir, m.path) == ["public"]
    owner.do(os.unlink, m.at("public"))
    wait_until(lambda: other.error(os.stat, m.at("public")) == errno.ENOENT)
    assert other.do(os.listdir, m.path) == []


# -- what does not load ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (None, "FileNotFoundError: [Errno 2] No such file or directory: "),
        ("class P(:\n", "SyntaxError: invalid syntax (plug.py, line 3)"),
        ("class Q: pass\n", "AttributeError: module 'cloakfs_policy_plug' has no attribute 'P'"),
        ("class P:\n    def __init__(self, options):\n        raise ValueError('no\\ngood')\n", "ValueError: no good"),
        ("raise SystemExit\n", "SystemExit: "),
    ],
)
def test_a_plug_in_that_does_not_load_is_one_line_and_no_mount(
    code: str | None, says: str, base: str, tree: str
) -> None:
    spec = plugin(base, code) if code is not None else f"{base}/absent.py:P"
    target = os.path.join(base, "mnt")
    os.mkdir(target)
    done = run("mount", tree, target, "--policy", spec, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(f"cloakfs: policy={spec}: {says}")
    assert done.stderr.count("\n") == 1
    assert not is_mounted(target)


def test_a_name_that_is_none_is_a_wrong_option(base: str, tree: str) -> None:
    done = run("mount", tree, base, "--policy", "plug.py", check=False)
    assert done.returncode == 2
    assert "expected FILE.py:Class or package.module:Class" in done.stderr


def test_a_plug_in_from_an_installed_module(
    base: str, tree: str, mount: MakeMount, user: MakeUser, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(os.path.join(tree, "seen"), 3001, 3001)
    put(os.path.join(tree, "unseen"), 3001, 3001)
    os.makedirs(os.path.join(base, "site", "lab", "rules"))
    Path(base, "site", "lab", "rules", "names.py").write_text(
        "class Seen:\n    def visible(self, caller, attrs):\n        return attrs.name == 'seen'\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.path.join(base, "site"))
    m = mount("--policy", "lab.rules.names:Seen")
    assert user(3001).do(os.listdir, m.path) == ["seen"]


# Each method notes with which file system uid it runs (proc_pid_status(5)).
WHO = """
def who():
    with open("/proc/thread-self/status") as file:
        uid = next(line.split()[4] for line in file if line.startswith("Uid:"))
    if uid != "0":
        raise RuntimeError(f"runs as {uid}")

class P(Policy):
    def forward(self, caller):
        who()
        return super().forward(caller)

    def visible(self, caller, attrs):
        who()
        seen = attrs.mode & 0o004 or attrs.accessible(caller, 4)
        who()
        return bool(seen) and super().visible(caller, attrs)

    def show(self, attrs):
        who()
        return super().show(attrs)
"""


def test_a_plug_in_never_runs_as_a_caller(base: str, tree: str, mount: MakeMount, user: MakeUser) -> None:
    os.chmod(tree, 0o777)
    put(os.path.join(tree, "private"), 3001, 3001, 0o600)
    m = mount("-o", "no_root_squash", "--policy", plugin(base, WHO))
    caller, other = user(3001), user(3002)
    for _ in range(3):
        caller.do(write, m.at("file"), b"text")  # as the caller; what is asked next must not be
        assert caller.do(read, m.at("private")) == b"text"
        caller.do(os.chmod, m.at("file"), 0o640)
        caller.do(os.rename, m.at("file"), m.at("other"))
        assert sorted(caller.do(os.listdir, m.path)) == ["other", "private"]
        assert other.do(os.listdir, m.path) == []
        assert other.error(os.stat, m.at("private")) == errno.ENOENT
        caller.do(os.unlink, m.at("other"))
    assert "runs as" not in m.log
