"""The persistent half of nodeids: which number was given to which object, for ever.

One SQLite database per mount, in WAL mode: a commit survives the daemon's death at once, and a crash of the machine
costs the last numbers at most. A number that was lost so may name another object later, but with another
generation (`nodes`), so that an old handle is refused rather than misdirected.

What an NFS server exports must be committed before a client gets a handle. On local mounts the commit comes up to a
second after the answer (`behind`): when the daemon is killed in between, a handle from that second is ESTALE.

The database has a version (`PRAGMA user_version`). That of an earlier cloakfs is made into the present one when it is
opened, and keeps every number, key and secret, so that handles stay valid.
"""

import contextlib
import logging
import os
import secrets
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

from ..versions import VersionError, is_known, refusal

log = logging.getLogger(__name__)

# Deleted objects that are taken out of the database at once.
_MANY = 1000

VERSION = 1
"""Of the database that this cloakfs writes."""

# What makes each version out of the one before, from 0 on: nothing at all, or what 0.1.0 left, which had these tables.
_STEPS = (
    """
    CREATE TABLE IF NOT EXISTS secret (key BLOB NOT NULL);
    CREATE TABLE IF NOT EXISTS filesystems (number INTEGER PRIMARY KEY AUTOINCREMENT, key TEXT UNIQUE NOT NULL);
    CREATE TABLE IF NOT EXISTS views (number INTEGER PRIMARY KEY AUTOINCREMENT, label TEXT UNIQUE NOT NULL);
    CREATE TABLE IF NOT EXISTS objects (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        handle BLOB UNIQUE NOT NULL,
        parent INTEGER NOT NULL,
        name BLOB NOT NULL
    );
    """,
)


class Index:
    """Numbers for objects, file systems and views, each given once and never reused.

    Args:
        path: of the database file; made if missing, readable by root alone.
        behind: numbers of objects are made durable by the next `commit`, not before they are given.

    Raises:
        sqlite3.Error: the file is no database, or cannot be written.
        VersionError: it is of a version that is not known; it is left as it is.
    """

    def __init__(self, path: str, *, behind: bool = False) -> None:
        self._path = path
        self._behind = behind
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.close(fd)
        self._db = sqlite3.connect(path, isolation_level=None, timeout=10)
        try:
            before = self._version()
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.execute("PRAGMA wal_autocheckpoint=0")  # it waits for the disk: see `checkpoint`
            self._migrate(before)
            if self._db.execute("SELECT 1 FROM secret").fetchone() is None:
                self._db.execute("INSERT INTO secret VALUES (?)", (secrets.token_bytes(32),))
        except BaseException:
            self._db.close()
            raise
        self.secret = self._secret()
        self._last = self._last_given()
        self._removed: set[int] = set()
        self._batching = False

    def _version(self) -> int:
        version = int(self._db.execute("PRAGMA user_version").fetchone()[0])
        if not is_known(version, VERSION):
            folder = os.path.dirname(self._path)
            way_out = f"use the cloakfs that wrote it, or move {folder} away (old file handles become stale)"
            raise VersionError(refusal(self._path, version, VERSION, way_out))
        return version

    def _migrate(self, version: int) -> None:
        """Make a database of that version into one of the present version, or leave it as it is."""
        for number, step in enumerate(_STEPS[version:], version + 1):
            self._db.executescript(f"BEGIN IMMEDIATE; {step} PRAGMA user_version = {number}; COMMIT")

    def _secret(self) -> bytes:
        return bytes(self._db.execute("SELECT key FROM secret").fetchone()[0])

    def claim(self, number: int, handle: bytes) -> bool:
        """See to it that `number` is the object with this handle.

        If it was another one until now, the tree was replaced: all objects and the secret are forgotten, so that
        old file handles are stale.

        Returns:
            False if everything had to be forgotten.
        """
        row = self.find(number)
        if row is not None and row[0] == handle:
            return True
        with self.batch():
            self._change("DELETE FROM objects")
            self._change("DELETE FROM sqlite_sequence WHERE name = 'objects'")
            self._change("UPDATE secret SET key = ?", (secrets.token_bytes(32),))
            self._change("INSERT INTO objects VALUES (?, ?, 0, x'')", (number, handle))
        self.commit()
        self.secret = self._secret()
        self._last = self._last_given()
        return row is None

    def _last_given(self) -> int:
        row = self._db.execute("SELECT seq FROM sqlite_sequence WHERE name = 'objects'").fetchone()
        return 0 if row is None else int(row[0])

    def close(self) -> None:
        """Write everything back into the one file."""
        self.tidy()
        with contextlib.suppress(sqlite3.Error):  # which `commit` has logged
            self.commit()
        self._db.close()

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Make many numbers durable at the price of one; must not be held across an await.

        Raises:
            sqlite3.Error: they could not be made durable, and last only as long as this process.
        """
        self._batching = True
        try:
            yield
        finally:
            self._batching = False
            if not self._behind:
                self.commit()

    def commit(self) -> None:
        """Make durable what is not yet.

        Raises:
            sqlite3.Error: it cannot be, and lasts only as long as this process. From now on, numbers are made durable
                before they are given: who asks for one is to know.
        """
        if not self._db.in_transaction:  # SQLite ends one by itself when the disk is full
            return
        try:
            self._db.execute("COMMIT")
        except sqlite3.Error as exc:
            self._behind = False
            log.warning("%s: %s; handles of what was just found do not outlive the daemon", self._path, exc)
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    def _change(self, statement: str, values: tuple[object, ...] = ()) -> sqlite3.Cursor:
        # No transaction before: most listings change nothing.
        if (self._batching or self._behind) and not self._db.in_transaction:
            self._db.execute("BEGIN IMMEDIATE")
        return self._db.execute(statement, values)

    def filesystem(self, key: str, former: str | None = None) -> int:
        """The number of the file system that `key` names, and `former` named in earlier versions."""
        if former is not None:
            self._db.execute("UPDATE OR IGNORE filesystems SET key = ? WHERE key = ?", (key, former))
        return self._number("filesystems", "key", key)

    def filesystems(self) -> list[tuple[int, str]]:
        """(number, key) of every file system that ever got a number."""
        return self._db.execute("SELECT number, key FROM filesystems").fetchall()

    def view(self, label: str) -> int:
        """The number (from 1) of the view called `label`."""
        return self._number("views", "label", label)

    def view_label(self, number: int) -> str | None:
        """What the view with this number is called, if there ever was one."""
        row = self._db.execute("SELECT label FROM views WHERE number = ?", (number,)).fetchone()
        return None if row is None else str(row[0])

    def _number(self, table: str, column: str, value: str) -> int:
        self._db.execute(f"INSERT OR IGNORE INTO {table} ({column}) VALUES (?)", (value,))
        row = self._db.execute(f"SELECT number FROM {table} WHERE {column} = ?", (value,)).fetchone()
        self.commit()
        return int(row[0])

    def object(self, handle: bytes, parent: int, name: bytes) -> int:
        """The number of the object with this handle, which was just seen as `name` in `parent`."""
        # Counted here: a number must not be given twice even if a transaction had to be undone.
        self._last += 1
        number, was_parent, was_name = self._change(
            "INSERT INTO objects VALUES (?, ?, ?, ?) ON CONFLICT (handle) DO UPDATE SET handle = handle "
            "RETURNING number, parent, name",
            (self._last, handle, parent, name),
        ).fetchone()
        if number != self._last:
            self._last -= 1
            self._removed.discard(number)
            if (was_parent, was_name) != (parent, name):
                self.moved(number, parent, name)
        return int(number)

    def moved(self, number: int, parent: int, name: bytes) -> None:
        """The object is now called `name` in `parent`."""
        self._change("UPDATE objects SET parent = ?, name = ? WHERE number = ?", (parent, name, number))

    def remove(self, number: int) -> None:
        """The object was deleted; its number is not given again. Done by `tidy`: until then it does no harm."""
        self._removed.add(number)
        if len(self._removed) >= _MANY:
            self.tidy()

    def tidy(self) -> None:
        """Take out what was deleted."""
        if not self._removed:
            return
        removed, self._removed = [(number,) for number in self._removed], set()
        try:
            with contextlib.nullcontext() if self._batching else self.batch():
                for values in removed:
                    self._change("DELETE FROM objects WHERE number = ?", values)
        except sqlite3.Error as exc:
            log.warning("%s: %s; deleted files stay in it", self._path, exc)

    def after(self, number: int, count: int) -> list[tuple[int, bytes]]:
        """Up to `count` (number, handle) of the objects with larger numbers, in their order."""
        return self._db.execute(
            "SELECT number, handle FROM objects WHERE number > ? ORDER BY number LIMIT ?", (number, count)
        ).fetchall()

    def checkpoint(self) -> None:
        """Move what the log holds into the database, from any thread; others go on meanwhile."""
        with contextlib.closing(sqlite3.connect(self._path, timeout=10)) as db:
            db.execute("PRAGMA wal_checkpoint(PASSIVE)")

    def find(self, number: int) -> tuple[bytes, int, bytes] | None:
        """(handle, parent, name) of an object, or None if the number was never given."""
        row: tuple[bytes, int, bytes] | None = self._db.execute(
            "SELECT handle, parent, name FROM objects WHERE number = ?", (number,)
        ).fetchone()
        return row
