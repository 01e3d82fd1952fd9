"""Real work on a real source package: the same through a mapped, cloaked mount as done directly."""

import os
import shutil
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.debiansource import NoSource, download
from tests.agents import User
from tests.mount.conftest import Mount

CLIENT, SERVER = 52001, 2001
POLICY = (
    f"range_map=uid {CLIENT} map {SERVER} gid {CLIENT} map {SERVER},"
    "cloak_list=uid +000 2002 2999 uid +077 2001 gid -000 0 -1"
)
PACKAGE = "bzip2"  # small, plain C, a Makefile without configure
CACHE = Path(__file__).parents[2] / ".cache" / "sources"


@pytest.fixture(scope="module")
def package() -> Path:
    """The source package as Debian has it, fetched once."""
    CACHE.mkdir(parents=True, exist_ok=True)
    if not list(CACHE.glob(f"{PACKAGE}_*.orig.tar.gz")):
        try:
            download(PACKAGE, str(CACHE))
        except NoSource as exc:
            pytest.skip(f"no source package: {exc}")
    (archive,) = CACHE.glob(f"{PACKAGE}_*.orig.tar.gz")
    return archive


def shell(script: str, directory: str) -> None:
    """Run as whoever calls, with a clean environment, so that both sides do the same."""
    environment = {"PATH": "/usr/bin:/bin", "LC_ALL": "C", "HOME": "/nonexistent", "GIT_CONFIG_NOSYSTEM": "1"}
    done = subprocess.run(
        ["sh", "-euc", script], cwd=directory, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"exit {done.returncode}: {done.stdout[-2000:]}{done.stderr[-2000:]}")


def contents(top: str, *, times: bool) -> dict[str, tuple[object, ...]]:
    """Everything below a directory: type and mode, ids, content, link target, and if asked for, mtime."""
    found: dict[str, tuple[object, ...]] = {}
    for directory, _, files in os.walk(top):
        for path in [directory, *(os.path.join(directory, name) for name in files)]:
            info = os.lstat(path)
            data: bytes | str = b""
            if stat.S_ISREG(info.st_mode):
                data = Path(path).read_bytes()
            elif stat.S_ISLNK(info.st_mode):
                data = os.readlink(path)
            mtime = info.st_mtime_ns if times and path != top else 0  # the top is made here, not by tar
            found[os.path.relpath(path, top)] = (oct(info.st_mode), info.st_uid, info.st_gid, data, mtime)
    return found


class Sides:
    """The same user at work in two places: through the mount, and directly as the server's id."""

    def __init__(self, mount: Mount, client: User, server: User, directly: str) -> None:
        self.through = mount.at("work")
        self.behind = mount.real("work")
        self.directly = directly
        self.client, self._server = client, server

    def run(self, script: str) -> None:
        self.client.do(shell, script, self.through)
        self._server.do(shell, script, self.directly)

    def compare(self, subdirectory: str, *, times: bool = False) -> int:
        """Both hold the same, as the server sees it; the mount shows the client's ids. The number of entries."""
        behind = contents(os.path.join(self.behind, subdirectory), times=times)
        assert behind == contents(os.path.join(self.directly, subdirectory), times=times)
        seen = self.client.do(contents, os.path.join(self.through, subdirectory), times=times)
        assert {(entry[1], entry[2]) for entry in behind.values()} == {(SERVER, SERVER)}
        assert seen == {path: (mode, CLIENT, CLIENT, data, mtime) for path, (mode, _, _, data, mtime) in behind.items()}
        return len(behind)


@pytest.fixture
def sides(tree: str, base: str, mount: Callable[..., Mount], user: Callable[..., User], package: Path) -> Sides:
    directly = os.path.join(base, "direct")
    for path in (os.path.join(tree, "work"), directly):
        os.mkdir(path)
        shutil.copy(package, os.path.join(path, "package.tar.gz"))
        os.chown(os.path.join(path, "package.tar.gz"), SERVER, SERVER)
        # Somebody else's file, in the way of nobody and not to be touched.
        foreign = os.path.join(path, "foreign")
        Path(foreign).write_text("not yours")
        os.chown(foreign, 2002, 2002)
        os.chmod(foreign, 0o666)
        os.chown(path, SERVER, SERVER)
    return Sides(mount("-o", POLICY), user(CLIENT), user(SERVER), directly)


@pytest.mark.timeout(600)
def test_tar_make_git_and_rm(sides: Sides) -> None:
    sides.run("mkdir src; tar xzf package.tar.gz -C src --strip-components=1")
    assert sides.compare("src", times=True) > 50

    # No -g: it would put the directory's name into the objects.
    sides.run("cd src; make -j2 CC=gcc CFLAGS='-O1 -D_FILE_OFFSET_BITS=64'; ./bzip2 <manual.html | ./bzip2 -d >copy")
    assert sides.compare("src") > 70

    identity = "-c user.name=x -c user.email=x@x -c init.defaultBranch=main"
    dates = "export GIT_AUTHOR_DATE='2026-01-01T00:00:00Z' GIT_COMMITTER_DATE='2026-01-01T00:00:00Z'"
    sides.run(f"{dates}; cd src; git {identity} init -q; git {identity} add -A; git {identity} commit -qm import")
    sides.run('git clone -q --no-hardlinks src clone; cd clone; git fsck --strict; test -z "$(git status --porcelain)"')
    sides.run("cd clone; git rev-parse HEAD >head; rm -rf .git ../src/.git")
    assert sides.compare("clone") > 70

    foreign = os.path.join(sides.behind, "foreign")
    before = os.stat(foreign)
    sides.run("rm -rf src clone package.tar.gz")
    assert os.listdir(sides.behind) == ["foreign"]
    after = os.stat(foreign)
    assert (before.st_mtime_ns, before.st_ctime_ns, before.st_size) == (after.st_mtime_ns, after.st_ctime_ns, 9)


def test_the_whole_directory_cannot_be_removed_over_a_hidden_file(sides: Sides) -> None:
    client = sides.client
    assert client.do(os.listdir, sides.through) == ["package.tar.gz"]
    with pytest.raises(RuntimeError, match="Directory not empty"):
        client.do(shell, "mkdir -p sub; rm -rf ./sub ./package.tar.gz; rmdir ../work", sides.through)
    assert Path(sides.behind, "foreign").read_text() == "not yours"
