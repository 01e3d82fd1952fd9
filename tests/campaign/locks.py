"""Uses an SQLite database, a mailbox, a git repository and a log through two mounts and on the real tree at once.

Each place has processes that write with locks, as the programs do by themselves. Afterwards, nothing may be missing,
double or damaged: each process counts what it has added.
"""

import argparse
import contextlib
import fcntl
import mailbox
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cloakfs.state.runtime import STATE_DIR
from tests.agents import User
from tests.mount.conftest import Mount, mounted

UID = 3001
_SETTINGS = ("user.name=locks", "user.email=locks@example.invalid", "gc.auto=0", "safe.directory=*")
_RECORD = 32
_GIT = ["git", *(word for setting in _SETTINGS for word in ("-c", setting))]


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


def use_log(top: str, who: str, until: float) -> int:
    """Append lines, each under a lock."""
    done = 0
    fd = os.open(f"{top}/log", os.O_RDWR | os.O_APPEND)
    while time.time() < until:
        fcntl.lockf(fd, fcntl.LOCK_EX)
        os.write(fd, f"{who} {done}\n".encode())
        fcntl.lockf(fd, fcntl.LOCK_UN)
        done += 1
    os.close(fd)
    return done


def check_log(top: str, done: int) -> str:
    lines = Path(top, "log").read_bytes().splitlines()
    return "" if len(set(lines)) == len(lines) == done else f"{len(lines)} lines, {len(set(lines))} of them different"


def use_records(top: str, who: str, until: float) -> int:
    """Write records of one size where the file ends, each under a lock, without O_APPEND.

    Before that, open and close the file, as a program does that does not get the lock.
    """
    done = 0
    fd = os.open(f"{top}/records", os.O_RDWR)
    while time.time() < until:
        os.close(os.open(f"{top}/records", os.O_RDWR))
        fcntl.lockf(fd, fcntl.LOCK_EX)
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


WORK: dict[str, tuple[Callable[[str, str, float], int], Callable[[str, int], str]]] = {
    "sqlite": (use_sqlite, check_sqlite),
    "log": (use_log, check_log),
    "records": (use_records, check_records),
    "mbox": (use_mbox, check_mbox),
    "maildir": (use_maildir, check_maildir),
    "git": (use_git, check_git),
}


def prepare(top: str) -> None:
    """Make all that is used."""
    os.umask(0o022)
    os.putenv("HOME", top)
    with contextlib.closing(sqlite3.connect(f"{top}/database")) as database, database:
        database.execute("CREATE TABLE sums (sum INTEGER)")
        database.execute("INSERT INTO sums VALUES (0)")
        database.execute("CREATE TABLE lines (who TEXT, line INTEGER)")
    for name in ("log", "records", "mbox"):
        Path(top, name).touch()
    mailbox.Maildir(f"{top}/maildir")
    os.mkdir(f"{top}/repository")
    for command in (["init", "--quiet"], ["commit", "--quiet", "--allow-empty", "-m", "first"]):
        subprocess.run([*_GIT, *command], cwd=f"{top}/repository", check=True)


@contextlib.contextmanager
def places() -> Iterator[list[str]]:
    """Yield where one directory can be used: on the real tree, and in two mounts."""
    base = tempfile.mkdtemp(prefix="cloakfs-test-")
    mounts: list[Mount] = []
    try:
        os.chmod(base, 0o755)
        top = f"{base}/tree/shared"
        os.makedirs(top)
        os.chown(top, UID, UID)
        with contextlib.ExitStack() as stack:
            for name in ("one", "two"):
                os.mkdir(f"{base}/{name}")
                mounts.append(stack.enter_context(mounted(f"{base}/tree", f"{base}/{name}")))
            yield [top, *(mount.at("shared") for mount in mounts)]
    finally:
        shutil.rmtree(base)
        for mount in mounts:
            shutil.rmtree(os.path.join(STATE_DIR, mount.key), ignore_errors=True)


def run(work: list[str], seconds: float) -> dict[str, tuple[int, str]]:
    """Return for each work how often it was done, and what is wrong afterwards."""
    with places() as tops, contextlib.ExitStack() as stack:
        with User(UID) as first:
            first.do(prepare, tops[0])
        users = [
            (name, number, stack.enter_context(User(UID)), top) for name in work for number, top in enumerate(tops)
        ]
        until = time.time() + seconds
        for name, number, user, top in users:
            user.do(os.putenv, "HOME", tops[0])
            user.start(WORK[name][0], top, f"{name}-{number}", until)
        done = dict.fromkeys(work, 0)
        for name, _, user, _ in users:
            done[name] += user.answer_within(seconds + 300)
        return {name: (done[name], WORK[name][1](tops[0], done[name])) for name in work}


def main() -> int:
    """Run the campaign."""
    parser = argparse.ArgumentParser(prog="scripts/campaign locks", description=__doc__)
    parser.add_argument("--seconds", type=float, default=300.0, help="(default: %(default)s)")
    parser.add_argument("--work", action="append", choices=sorted(WORK), help="(default: all)")
    words = parser.parse_args()
    found = run(words.work or list(WORK), words.seconds)
    for name, (done, problem) in found.items():
        print(f"{name}: {done:,} times, {problem or 'intact'}")
    return int(any(problem for _, problem in found.values()))


if __name__ == "__main__":
    sys.exit(main())
