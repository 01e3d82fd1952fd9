"""Uses an SQLite database, a mailbox, a git repository and a log through two mounts and on the real tree at once.

Each place has processes that write with locks, as the programs do by themselves. Afterwards, nothing may be missing,
double or damaged: each process counts what it has added. With `--exports`, two NFSv4 clients use two exports as well:
`scripts/campaign guest locks --exports`.
"""

import argparse
import contextlib
import fcntl
import mailbox
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from bench.lab.guest import inside
from bench.lab.nfshost import NfsHost
from cloakfs.nfs.plan import mount_name
from cloakfs.state.runtime import STATE_DIR
from tests.agents import User
from tests.mount.conftest import Mount, mounted
from tests.nfs.knfsd.fixtures import Service, Share, nfs_mounted, second_host, without_nfsv3
from tests.waiting import wait_until

UID = 3001
_SETTINGS = ("user.name=locks", "user.email=locks@example.invalid", "gc.auto=0", "safe.directory=*")
_RECORD = 32
_GIT = ["git", *(word for setting in _SETTINGS for word in ("-c", setting))]


_PATIENCE = 300.0
_SERVED = "/srv/cloakfs"

Lock = Callable[[int], None]


class Found(NamedTuple):
    """How often a work was done in each place, and what is wrong afterwards."""

    done: dict[str, int]
    problem: str


def wait_for_lock(fd: int) -> None:
    """Lock a file; the kernel queues those who wait."""
    fcntl.lockf(fd, fcntl.LOCK_EX)


def ask_for_lock(fd: int) -> None:
    """Lock a file without ever standing in the queue, as SQLite does: no NFS client would get past it."""
    wait_until(lambda: _has_locked(fd), _PATIENCE, every=random.uniform(0.001, 0.02))


def _has_locked(fd: int) -> bool:
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True


def use_sqlite(top: str, who: str, until: float) -> int:
    """Add one to a sum and a row to a table, in one transaction each; return how many were committed."""
    done = 0
    with contextlib.closing(sqlite3.connect(f"{top}/database", timeout=60)) as database:
        database.execute("PRAGMA journal_mode = DELETE")
        database.execute("PRAGMA synchronous = OFF")
        while time.time() < until:
            with database:
                database.execute("BEGIN IMMEDIATE")
                database.execute("UPDATE sums SET sum = sum + 1")
                database.execute("INSERT INTO lines VALUES (?, ?)", (who, done))
            done += 1
    return done


def check_sqlite(top: str, done: int) -> str:
    with contextlib.closing(sqlite3.connect(f"{top}/database")) as database:
        ((health,),) = database.execute("PRAGMA integrity_check")
        ((total,),) = database.execute("SELECT sum FROM sums")
        ((lines,),) = database.execute("SELECT count(*) FROM lines")
    return "" if (health, total, lines) == ("ok", done, done) else f"{health}; sum {total}, lines {lines}, done {done}"


def use_log(top: str, who: str, until: float, lock: Lock = wait_for_lock) -> int:
    """Append lines, each under a lock."""
    done = 0
    fd = os.open(f"{top}/log", os.O_RDWR | os.O_APPEND)
    while time.time() < until:
        lock(fd)
        os.write(fd, f"{who} {done}\n".encode())
        fcntl.lockf(fd, fcntl.LOCK_UN)
        done += 1
    os.close(fd)
    return done


def check_log(top: str, done: int) -> str:
    lines = Path(top, "log").read_bytes().splitlines()
    return "" if len(set(lines)) == len(lines) == done else f"{len(lines)} lines, {len(set(lines))} of them different"


def use_records(top: str, who: str, until: float, lock: Lock = wait_for_lock) -> int:
    """Write records of one size where the file ends, each under a lock, without O_APPEND.

    Before that, open and close the file, as a program does that does not get the lock.
    """
    done = 0
    fd = os.open(f"{top}/records", os.O_RDWR)
    while time.time() < until:
        os.close(os.open(f"{top}/records", os.O_RDWR))
        lock(fd)
        os.lseek(fd, 0, os.SEEK_END)
        os.write(fd, f"{who} {done}".encode().ljust(_RECORD))
        fcntl.lockf(fd, fcntl.LOCK_UN)
        done += 1
    os.close(fd)
    return done


def check_records(top: str, done: int) -> str:
    content = Path(top, "records").read_bytes()
    records = {content[at : at + _RECORD] for at in range(0, len(content), _RECORD)}
    return "" if len(records) == len(content) / _RECORD == done else f"{len(content)} bytes, {len(records)} of {done}"


def use_mbox(top: str, who: str, until: float) -> int:
    """Deliver into an mbox, which is read and rewritten as a whole, under both kinds of locks."""
    done = 0
    while time.time() < until:
        box = mailbox.mbox(f"{top}/mbox", create=False)
        try:
            box.lock()
        except mailbox.ExternalClashError:  # another process has it
            box.close()
            os.sched_yield()
            continue
        box.add(f"Subject: {who} {done}\n\ntext\n")
        box.flush()
        box.unlock()
        box.close()
        done += 1
    return done


def check_mbox(top: str, done: int) -> str:
    return _check_mail(mailbox.mbox(f"{top}/mbox", create=False), done)


def _check_mail(box: mailbox.Mailbox[Any], done: int) -> str:
    subjects = [message["Subject"] for message in box]
    return "" if len(set(subjects)) == len(subjects) == done else f"{len(subjects)} messages, {done} delivered"


def use_maildir(top: str, who: str, until: float) -> int:
    """Deliver into a Maildir, and mark what is new as read."""
    done = 0
    box = mailbox.Maildir(f"{top}/maildir", create=False)
    while time.time() < until:
        box.add(f"Subject: {who} {done}\n\ntext\n")
        done += 1
    return done


def check_maildir(top: str, done: int) -> str:
    return _check_mail(mailbox.Maildir(f"{top}/maildir", create=False), done)


def use_git(top: str, who: str, until: float) -> int:
    """Commit to a branch that all share, as far as git's own lock files let this process."""
    done = 0
    while time.time() < until:
        command = [*_GIT, "commit", "--quiet", "--allow-empty", "-m", f"{who} {done}"]
        done += not subprocess.run(command, cwd=f"{top}/repository", capture_output=True, check=False).returncode
    return done


def check_git(top: str, done: int) -> str:
    repository = f"{top}/repository"
    found = subprocess.run([*_GIT, "fsck", "--strict"], cwd=repository, capture_output=True, text=True, check=False)
    count = subprocess.run([*_GIT, "rev-list", "--count", "HEAD"], cwd=repository, capture_output=True, check=True)
    commits = int(count.stdout) - 1
    return "" if not found.returncode and commits == done else f"{found.stderr.strip()}; {commits} commits, {done} made"


def use_replaced(top: str, who: str, until: float) -> int:
    """Replace a file by one with a larger number, under a lock of another file."""
    done = 0
    while time.time() < until:
        fd = os.open(f"{top}/replaced.lock", os.O_RDWR)
        wait_for_lock(fd)
        number = int(Path(top, "replaced").read_text())
        new = Path(top, f"replaced.{who}")
        new.write_text(str(number + 1))
        new.rename(Path(top, "replaced"))
        os.close(fd)
        done += 1
    return done


def check_replaced(top: str, done: int) -> str:
    number = int(Path(top, "replaced").read_text())
    return "" if number == done else f"the number is {number}, replaced {done} times"


WORK: dict[str, tuple[Callable[..., int], Callable[[str, int], str]]] = {
    "sqlite": (use_sqlite, check_sqlite),
    "log": (use_log, check_log),
    "records": (use_records, check_records),
    "mbox": (use_mbox, check_mbox),
    "maildir": (use_maildir, check_maildir),
    "git": (use_git, check_git),
    "replaced": (use_replaced, check_replaced),
}
_LOCAL_WORK = {"replaced"}
"""Of an NFS client, a lock of one file says nothing about the name of another."""

_LOCKS_BY_ITSELF = ("log", "records")

# One processor does all of it: without this, NFS clients would get to do almost nothing.
_NICE = {"tree": 19, "one": 10, "two": 10}


def prepare(top: str) -> None:
    """Make all that is used."""
    os.umask(0o022)
    os.putenv("HOME", top)
    with contextlib.closing(sqlite3.connect(f"{top}/database")) as database, database:
        database.execute("CREATE TABLE sums (sum INTEGER)")
        database.execute("INSERT INTO sums VALUES (0)")
        database.execute("CREATE TABLE lines (who TEXT, line INTEGER)")
    for name in ("log", "records", "mbox", "replaced.lock"):
        Path(top, name).touch()
    Path(top, "replaced").write_text("0")
    mailbox.Maildir(f"{top}/maildir")
    os.mkdir(f"{top}/repository")
    for command in (["init", "--quiet"], ["commit", "--quiet", "--allow-empty", "-m", "first"]):
        subprocess.run([*_GIT, *command], cwd=f"{top}/repository", check=True)


@contextlib.contextmanager
def places(exports: bool) -> Iterator[dict[str, str]]:
    """Yield where one directory can be used: on the real tree, in two mounts, and by two NFS clients if wanted."""
    base = tempfile.mkdtemp(prefix="cloakfs-test-")
    mounts: list[Mount] = []
    try:
        os.chmod(base, 0o755)
        tree = f"{base}/tree"
        os.makedirs(f"{tree}/shared")
        os.chown(f"{tree}/shared", UID, UID)
        with contextlib.ExitStack() as stack:
            tops = {"tree": tree}
            for name in ("one", "two"):
                os.mkdir(f"{base}/{name}")
                mounts.append(stack.enter_context(mounted(tree, f"{base}/{name}")))
                tops[name] = mounts[-1].path
            if exports:
                tops |= stack.enter_context(clients(tree))
            yield {name: f"{top}/shared" for name, top in tops.items()}
    finally:
        shutil.rmtree(base)
        for mount in mounts:
            shutil.rmtree(os.path.join(STATE_DIR, mount.key), ignore_errors=True)


@contextlib.contextmanager
def clients(tree: str) -> Iterator[dict[str, str]]:
    """Export a tree twice, and mount it on two client machines; yield where."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.closing(NfsHost()))
        stack.enter_context(without_nfsv3())
        service = stack.enter_context(contextlib.closing(Service()))
        shares = {
            addresses: Share(service, "locks", tree, f"{_SERVED}/{mount_name(tree, addresses)}")
            for addresses in ("127.0.0.0/8", "10.9.0.0/24")
        }
        service.write("locks", "".join(f"{tree} {addresses}(insecure,rw)\n" for addresses in shares))
        service.take_over()
        netns = stack.enter_context(second_host())
        here, there = shares.values()
        # An error of a server that is only slow would be taken for a loss.
        yield {
            "NFSv4.2": stack.enter_context(nfs_mounted(here, "4.2", "hard")),
            "NFSv4.0": stack.enter_context(nfs_mounted(there, "4.0", "hard", host="10.9.0.1", netns=netns)),
        }
        for share in shares.values():
            assert "ERROR" not in share.log, share.log


def run(work: list[str], seconds: float, *, exports: bool = False) -> dict[str, Found]:
    """Return for each work how often it was done, and what is wrong afterwards."""
    with places(exports) as tops, contextlib.ExitStack() as stack:
        real = tops["tree"]
        with User(UID) as first:
            first.do(prepare, real)
        users = [
            (name, place, stack.enter_context(User(UID)), top)
            for name in work
            for place, top in tops.items()
            if name not in _LOCAL_WORK or not place.startswith("NFS")
        ]
        until = time.time() + seconds
        for name, place, user, top in users:
            user.do(os.putenv, "HOME", real)
            if exports:
                user.do(os.nice, _NICE.get(place, 0))
            how = [ask_for_lock] if exports and name in _LOCKS_BY_ITSELF else []
            user.start(WORK[name][0], top, f"{name}-{place}", until, *how)
        done: dict[str, dict[str, int]] = {name: {} for name in work}
        failed = dict.fromkeys(work, "")
        for name, place, user, _ in users:
            try:
                done[name][place] = user.answer_within(seconds + _PATIENCE)
            except (OSError, sqlite3.Error) as exc:
                code = getattr(exc, "sqlite_errorname", "")
                failed[name] += f"{place} failed: {exc!r} {code}; "
        return {name: Found(done[name], failed[name] + WORK[name][1](real, sum(done[name].values()))) for name in work}


def main() -> int:
    """Run the campaign."""
    parser = argparse.ArgumentParser(prog="scripts/campaign locks", description=__doc__)
    parser.add_argument("--seconds", type=float, default=300.0, help="(default: %(default)s)")
    parser.add_argument("--work", action="append", choices=sorted(WORK), help="(default: all)")
    parser.add_argument("--exports", action="store_true", help="by two clients of two exports, too; in a guest")
    words = parser.parse_args()
    if words.exports and not inside():
        parser.error("--exports needs an NFS server of its own: scripts/campaign guest locks --exports")
    found = run(words.work or list(WORK), words.seconds, exports=words.exports)
    for name, (done, problem) in found.items():
        each = ", ".join(f"{place} {count:,}" for place, count in done.items())
        print(f"{name}: {sum(done.values()):,} times ({each}), {problem or 'intact'}")
    return int(any(problem for _, problem in found.values()))


if __name__ == "__main__":
    sys.exit(main())
