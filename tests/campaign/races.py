"""Performs every operation on two mounts while hidden files come and go at the same names of the real tree.

The hostile side moves files that no client may see onto the names that the clients work with, and away again, from
one process per processor but one. Clients make, open, rename, link and remove whatever they find. Reported are: hidden
files that were lost or changed (losses), or found under another name than they were given (moved, which a client's
rename does whose source was swapped in the same instant); attributes or content of hidden files that a client was
shown, or of others than what it had just made (wrong); and names that the daemons left behind.
"""

import argparse
import contextlib
import errno
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from cloakfs import linux
from cloakfs.state.runtime import STATE_DIR
from tests.agents import User
from tests.mount.conftest import Mount, mounted

OPTIONS = "no_root_squash,cloak_list=uid +077 3000 3999"
CLIENTS, HIDDEN = (3001, 3002, 3003), 3900
NAMES = [f"{directory}/{number}" for directory in ("a", "b") for number in range(4)]
SECRET = b"secret"

# What may go wrong when others are quicker.
BY_CHANCE = {
    errno.ENOENT, errno.EEXIST, errno.EACCES, errno.ESTALE, errno.EISDIR, errno.ENOTDIR, errno.ENOTEMPTY, errno.EPERM,
    errno.EINVAL, errno.ELOOP, errno.ENXIO,
}  # fmt: skip


def client(top: str, uid: int, seed: str, until: float) -> Counter[str]:
    """Perform random operations until then; count operations, their errors, and wrong answers."""
    chance, count = random.Random(seed), Counter[str]()
    mine = f"of {uid}".encode()

    def wrong(what: str, is_wrong: bool) -> None:
        count[f"wrong: {what}"] += is_wrong

    def create(path: str, _: str) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            wrong("owner of what was created", os.fstat(fd).st_uid != uid)
            wrong("content of what was created", os.pread(fd, 100, 0) != b"")
            os.write(fd, mine)
        finally:
            os.close(fd)

    def look(path: str, _: str) -> None:
        wrong("attributes of what is hidden", os.lstat(path).st_uid == HIDDEN)

    def read(path: str, _: str) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            wrong("content of what is hidden", SECRET in os.read(fd, 100))
        finally:
            os.close(fd)

    def append(path: str, _: str) -> None:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK, 0o644)
        try:
            wrong("file to write to", os.fstat(fd).st_uid == HIDDEN)
            os.write(fd, mine)
        finally:
            os.close(fd)

    def list_(path: str, _: str) -> None:
        with os.scandir(os.path.dirname(path)) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    wrong("entry", entry.stat(follow_symlinks=False).st_uid == HIDDEN)

    operations: list[Callable[[str, str], None]] = [
        create, create, look, read, append, list_, os.rename, os.rename, os.link,
        lambda path, _: os.unlink(path),
        lambda path, _: os.mkdir(path),
        lambda path, _: os.rmdir(path),
        lambda path, _: os.symlink("target", path),
        lambda path, _: os.mkfifo(path),
        lambda path, _: os.chmod(path, 0o644, follow_symlinks=True),
    ]  # fmt: skip
    while time.monotonic() < until:
        operation = chance.choice(operations)
        path, other = (os.path.join(top, name) for name in chance.sample(NAMES, 2))
        count["operations"] += 1
        try:
            operation(path, other)
        except OSError as exc:
            code = errno.errorcode[exc.errno or 0]
            count[code if exc.errno in BY_CHANCE else f"wrong: {code}"] += 1
    return count


def hostile(top: str, number: int, seed: str, until: float) -> Counter[str]:
    """Make hidden files come and go until then."""
    chance = random.Random(seed)
    files = _Files(top, number, chance)
    while time.monotonic() < until:
        index = chance.randrange(len(files.held))
        if files.held[index][1]:
            files.take_home(index)
        else:
            with contextlib.suppress(OSError):
                files.place(index)
    return files.result()


class _Files:
    """The hidden files of one process.

    Attributes:
        held: the descriptor of each, and the name in the tree under which it was put; "" in the vault.
    """

    def __init__(self, top: str, number: int, chance: random.Random) -> None:
        self._top = top
        self._number = number
        self._chance = chance
        self._placed = 0
        self._vault = os.open(os.path.join(top, "vault"), os.O_RDONLY)
        self._tree = os.open(top, os.O_RDONLY)
        self.held = [(self._make(index), "") for index in range(8)]

    def _make(self, index: int) -> int:
        fd = os.open(self._home(index), os.O_RDWR | os.O_CREAT, 0o600, dir_fd=self._vault)
        os.write(fd, SECRET + self._home(index))
        os.fchown(fd, HIDDEN, HIDDEN)
        return fd

    def _home(self, index: int) -> bytes:
        """The name of a file in the vault."""
        return f"{self._number}-{index}".encode()

    def take_home(self, index: int) -> None:
        """Move a file back into the vault. Another process may have replaced it, or a client's rename moved it."""
        fd, where = self.held[index]
        with contextlib.suppress(OSError):
            linux.renameat2(self._tree, where.encode(), self._vault, self._home(index), linux.RENAME_NOREPLACE)
        if _is_there(self._vault, self._home(index), fd):
            self.held[index] = fd, ""
        elif os.path.lexists(os.path.join(self._top, "vault", self._home(index).decode())):
            # Not ours: a client's, or another process's, which will miss it.
            found = f"found-{self._number}-{time.monotonic_ns()}"
            os.rename(self._home(index), found, src_dir_fd=self._vault, dst_dir_fd=self._vault)

    def place(self, index: int) -> None:
        """Give a file a name in the tree, perhaps that of another one."""
        name = self._chance.choice(NAMES).encode()
        if self._chance.random() < 0.5:
            with contextlib.suppress(FileNotFoundError):
                if os.stat(name, dir_fd=self._tree, follow_symlinks=False).st_uid != HIDDEN:
                    os.rename(name, b"away-" + self._home(index), src_dir_fd=self._tree, dst_dir_fd=self._vault)
        linux.renameat2(self._vault, self._home(index), self._tree, name, linux.RENAME_NOREPLACE)
        self.held[index] = self.held[index][0], name.decode()
        self._placed += 1

    def result(self) -> Counter[str]:
        """Count the files that were placed, those that are lost, and those that another process has moved."""
        count = Counter(placed=self._placed)
        for index, (fd, where) in enumerate(self.held):
            count["losses"] += os.fstat(fd).st_nlink == 0 or os.pread(fd, 100, 0) != SECRET + self._home(index)
            place = (self._tree, where.encode()) if where else (self._vault, self._home(index))
            count["moved"] += not _is_there(*place, fd)
        return count


def _is_there(directory: int, name: bytes, fd: int) -> bool:
    try:
        return os.path.samestat(os.stat(name, dir_fd=directory, follow_symlinks=False), os.fstat(fd))
    except FileNotFoundError:
        return False


def main() -> int:
    """Run the campaign."""
    parser = argparse.ArgumentParser(prog="scripts/campaign races", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--on", default=None, help="a directory on the file system to try (default: $TMPDIR)")
    words = parser.parse_args()
    print(f"races: seed {words.seed}, {words.seconds:g} s", flush=True)
    base = tempfile.mkdtemp(prefix="cloakfs-campaign-", dir=words.on)
    os.chmod(base, 0o755)
    tree = os.path.join(base, "real")
    for directory, mode in (("", 0o755), ("a", 0o777), ("b", 0o777), ("vault", 0o700)):
        os.mkdir(os.path.join(tree, directory))
        os.chmod(os.path.join(tree, directory), mode)
    total: Counter[str] = Counter()
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, base)
        tops = [os.path.join(base, name) for name in ("mnt1", "mnt2")]
        for top in tops:
            os.mkdir(top)
            state = os.path.join(STATE_DIR, Mount(tree, top).key)
            stack.callback(shutil.rmtree, state, ignore_errors=True)
            stack.enter_context(mounted(tree, top, "-o", OPTIONS))
        until = time.monotonic() + words.seconds
        workers = []
        for number in range(max(1, (os.cpu_count() or 1) - 1)):
            user = stack.enter_context(User(0))
            user.start(hostile, tree, number, f"{words.seed} hostile {number}", until)
            workers.append(user)
        for number, uid in enumerate((*CLIENTS, *CLIENTS)):
            user = stack.enter_context(User(uid))
            user.start(client, tops[number % 2], uid, f"{words.seed} {number}", until)
            workers.append(user)
        for user in workers:
            total.update(user.answer_within(words.seconds + 600))
        left = list(Path(tree).rglob(".cloakfs-*"))
        total["left behind"] = len(left)
    for what, count in sorted(total.items()):
        print(f"{what}: {count}")
    return int(any(total[what] for what in total if what == "losses" or what.startswith(("wrong", "left"))))


if __name__ == "__main__":
    sys.exit(main())
