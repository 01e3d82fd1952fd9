"""The persistent half of nodeids: which number was given to which object, for ever.

There is one SQLite database per mount, in WAL mode: a commit survives the daemon's death at once, and a crash of the
machine costs at most the last numbers. A number lost in this way may name another object later, but with another
generation (`nodes`), so that an old handle is refused rather than misdirected.

What an NFS server exports must be committed before a client gets a handle. On local mounts the commit comes up to a
second after the answer (`behind`): if the daemon is killed in between, a handle from that second is ESTALE.

The database has a version (`PRAGMA user_version`). The database of an earlier cloakfs is migrated to the present
version when it is opened, and keeps every number, key and secret, so that handles stay valid.

Objects are found by a key, which has the bytes of the handle in another order (`_key`): what is listed together lies
close together in the database, so that a million new objects are not a million pages to read and write.
"""

import contextlib
import logging
import os
import secrets
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

from .. import linux
from ..versions import VersionError, is_known, refusal

log = logging.getLogger(__name__)

# How many deleted objects are collected before they are removed from the database together, and how many new ones are
# not put into it yet.
_MANY = 1000

VERSION = 2
"""The version of the database that this cloakfs writes."""

# The step from each version to the next. Version 0 is an empty database, or that of 0.1.0, which had these tables.
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
    """
    CREATE TABLE keyed (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        key BLOB UNIQUE NOT NULL,
        parent INTEGER NOT NULL,
        name BLOB NOT NULL
    );
    INSERT INTO keyed SELECT number, key_of(handle), parent, name FROM objects;
    DELETE FROM sqlite_sequence WHERE name = 'keyed';
    INSERT INTO sqlite_sequence SELECT 'keyed', seq FROM sqlite_sequence WHERE name = 'objects';
    DROP TABLE objects;
    ALTER TABLE keyed RENAME TO objects;
    """,
)

_TMPFS_TYPE, _TMPFS_LENGTH = b"\1\0\0\0", 20


def _key(handle: bytes) -> bytes:
    """Return the bytes of a handle in the order in which the database sorts them; of such a key, return the handle.

    Most handles have the inode number after the number of the mount and the type of the handle, four bytes each, and
    its least significant byte first. In those of a tmpfs, a random generation comes before it. Here the most
    significant byte of the inode number is first.
    """
    end = 16 if len(handle) == _TMPFS_LENGTH and handle[4:8] == _TMPFS_TYPE else 12
    return handle[:8] + handle[8:end][::-1] + handle[end:]


class Index:
    """Numbers for objects, file systems and views, each given once and never reused.

    Args:
        path: of the database file; it is created if missing, readable by root alone.
        behind: object numbers are made durable by the next `commit`, not before they are returned.

    Raises:
        sqlite3.Error: the file is not a database, or cannot be written.
        VersionError: its version is unknown; the file is left unchanged.
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
            self._db.execute("PRAGMA wal_autocheckpoint=0")  # a checkpoint waits for the disk
            self._migrate(before)
            if self._db.execute("SELECT 1 FROM secret").fetchone() is None:
                self._db.execute("INSERT INTO secret VALUES (?)", (secrets.token_bytes(32),))
        except BaseException:
            self._db.close()
            raise
        self.secret = self._secret()
        self._last = self._last_given()
        self._made: dict[int, tuple[bytes, int, bytes]] = {}  # number -> handle, parent, name: not in the database yet
        self._has_skipped = False  # whether the last number that was given may be larger than the database knows
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
        """Migrate a database of that version to the present version; a step that fails changes nothing."""
        self._db.create_function("key_of", 1, _key, deterministic=True)
        for number, step in enumerate(_STEPS[version:], version + 1):
            self._db.executescript(f"BEGIN IMMEDIATE; {step} PRAGMA user_version = {number}; COMMIT")

    def _secret(self) -> bytes:
        return bytes(self._db.execute("SELECT key FROM secret").fetchone()[0])

    @property
    def last(self) -> int:
        """The largest number that was ever given to an object."""
        return self._last

    def claim(self, number: int, handle: bytes) -> bool:
        """Ensure that `number` belongs to the object with this handle.

        If it belonged to another one until now, the tree was replaced: all objects and the secret are forgotten, so
        that old file handles are stale.

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
            self._change("INSERT INTO objects VALUES (?, ?, 0, x'')", (number, _key(handle)))
        self.commit()
        self.secret = self._secret()
        self._last = self._last_given()
        return row is None

    def _last_given(self) -> int:
        row = self._db.execute("SELECT seq FROM sqlite_sequence WHERE name = 'objects'").fetchone()
        return 0 if row is None else int(row[0])

    def close(self) -> None:
        """Write everything to the database file and close it."""
        self.tidy()
        with contextlib.suppress(sqlite3.Error):  # `commit` has logged it
            self.commit()
        self._db.close()

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Make many numbers durable at the cost of one; must not be held across an await.

        Raises:
            sqlite3.Error: they could not be made durable, and are valid only for the life of this process.
        """
        self._batching = True
        try:
            yield
        finally:
            self._batching = False
            if not self._behind:
                self.commit()

    def commit(self) -> None:
        """Make durable what is not durable yet.

        Raises:
            sqlite3.Error: it failed, and the numbers are valid only for the life of this process. From then on, numbers
                are made durable before they are returned, so that whoever asks for one learns of a failure.
        """
        self._store_made()
        try:
            if self._has_skipped:
                self._change("UPDATE sqlite_sequence SET seq = ? WHERE name = 'objects'", (self._last,))
                self._has_skipped = False
            if not self._db.in_transaction:  # SQLite itself ends a transaction when the disk is full
                return
            self._db.execute("COMMIT")
        except sqlite3.Error as exc:
            self._fail(exc)
            raise

    def _fail(self, exc: sqlite3.Error) -> None:
        self._behind = False
        log.warning("%s: %s; handles of what was just found do not outlive the daemon", self._path, exc)
        if self._db.in_transaction:
            self._db.execute("ROLLBACK")

    def _change(self, statement: str, values: tuple[object, ...] = ()) -> sqlite3.Cursor:
        # The transaction is begun only here, because most listings change nothing.
        if (self._batching or self._behind) and not self._db.in_transaction:
            self._db.execute("BEGIN IMMEDIATE")
        return self._db.execute(statement, values)

    def filesystem(self, key: str, former: str | None = None) -> int:
        """Return the number of the file system with this `key`, which earlier versions knew by the key `former`."""
        if former is not None:
            self._db.execute("UPDATE OR IGNORE filesystems SET key = ? WHERE key = ?", (key, former))
        return self._number("filesystems", "key", key)

    def filesystems(self) -> list[tuple[int, str]]:
        """Return (number, key) of every file system that ever got a number."""
        return self._db.execute("SELECT number, key FROM filesystems").fetchall()

    def view(self, label: str) -> int:
        """Return the number (from 1) of the view called `label`."""
        return self._number("views", "label", label)

    def view_label(self, number: int) -> str | None:
        """Return the label of the view with this number, if there ever was one."""
        row = self._db.execute("SELECT label FROM views WHERE number = ?", (number,)).fetchone()
        return None if row is None else str(row[0])

    def _number(self, table: str, column: str, value: str) -> int:
        self._db.execute(f"INSERT OR IGNORE INTO {table} ({column}) VALUES (?)", (value,))
        row = self._db.execute(f"SELECT number FROM {table} WHERE {column} = ?", (value,)).fetchone()
        self.commit()
        return int(row[0])

    def made(self, handle: bytes, parent: int, name: bytes) -> int | None:
        """Return a number for an object that was just made as `name` in `parent`, so that nobody can have seen it yet.

        The database is not touched: a file that is soon removed never gets there. The result is None if numbers have
        to be durable before they are given, or many are not in the database yet: `object` has to be called then.
        """
        if not self._behind or len(self._made) >= _MANY:
            return None
        self._last += 1
        self._made[self._last] = handle, parent, name
        return self._last

    def _store_made(self) -> None:
        """Put what was made into the database, before that is asked anything; raises what `commit` raises."""
        if not self._made:
            return
        made, self._made = self._made, {}
        try:
            for number, (handle, parent, name) in made.items():
                # A file system may give the handle of a removed object to another one. The old number is void then.
                self._change("INSERT OR REPLACE INTO objects VALUES (?, ?, ?, ?)", (number, _key(handle), parent, name))
        except sqlite3.Error as exc:
            self._fail(exc)
            raise

    def object(self, handle: bytes, parent: int, name: bytes) -> int:
        """Return the number of the object with this handle, which was just seen as `name` in `parent`."""
        self._store_made()
        # Counted here, because a number must not be given twice even if a transaction was rolled back.
        self._last += 1
        number, was_parent, was_name = self._change(
            "INSERT INTO objects VALUES (?, ?, ?, ?) ON CONFLICT (key) DO UPDATE SET key = key "
            "RETURNING number, parent, name",
            (self._last, _key(handle), parent, name),
        ).fetchone()
        if number != self._last:
            self._last -= 1
            self._removed.discard(number)
            if (was_parent, was_name) != (parent, name):
                self.moved(number, parent, name)
        return int(number)

    def moved(self, number: int, parent: int, name: bytes) -> None:
        """Record that the object is now called `name` in `parent`."""
        self._store_made()
        self._change("UPDATE objects SET parent = ?, name = ? WHERE number = ?", (parent, name, number))

    def remove(self, number: int) -> None:
        """Note that the object was deleted, for `tidy` to remove; until then the entry is harmless.

        The number is never reused.
        """
        if self._made.pop(number, None) is not None:
            self._has_skipped = True
            return
        self._removed.add(number)
        if len(self._removed) >= _MANY:
            linux.act_as_daemon()
            self.tidy()

    def tidy(self) -> None:
        """Remove the deleted objects from the database."""
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
        """Return (number, handle) of up to `count` objects with larger numbers, in ascending order."""
        self._store_made()
        rows = self._db.execute(
            "SELECT number, key FROM objects WHERE number > ? ORDER BY number LIMIT ?", (number, count)
        )
        return [(number, _key(key)) for number, key in rows]

    def checkpoint(self) -> None:
        """Move the contents of the log into the database. Any thread may call this; others go on meanwhile."""
        with contextlib.closing(sqlite3.connect(self._path, timeout=10)) as db:
            db.execute("PRAGMA wal_checkpoint(PASSIVE)")

    def size(self) -> int:
        """Return how many bytes the database and its log have on disk."""
        size = 0
        for path in (self._path, f"{self._path}-wal"):
            with contextlib.suppress(OSError):
                size += os.stat(path).st_size
        return size

    def find(self, number: int) -> tuple[bytes, int, bytes] | None:
        """Return (handle, parent, name) of an object, or None if the index does not have the number."""
        self._store_made()
        row = self._db.execute("SELECT key, parent, name FROM objects WHERE number = ?", (number,)).fetchone()
        if row is None:
            return None
        key, parent, name = row
        return _key(key), parent, name
