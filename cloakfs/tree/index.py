"""The persistent half of nodeids: which number was given to which object, for ever.

There is one SQLite database per mount, in WAL mode: a commit survives the daemon's death at once, and a crash of the
machine costs at most the last numbers. A number lost in this way may name another object later, but with another
generation (`nodes`), so that an old handle is refused rather than misdirected.

What an NFS server exports must be committed before a client gets a handle; what cannot be committed gets no number
(`Unstored`). On local mounts the commit comes up to a second after the answer (`behind`): if the daemon is killed in
between, a handle from that second is ESTALE. What cannot be committed is held in memory until it can be, and if
the database turns out to be damaged, everything is.

The database has a version (`PRAGMA user_version`). The database of an earlier cloakfs is migrated to the present
version when it is opened, with every number, key and secret, so that handles stay valid.

Objects are found by a key, which has the bytes of the handle in another order (`_key`): what is listed together lies
close together in the database, so that a million new objects are not a million pages to read and write.
"""

import contextlib
import errno
import hashlib
import logging
import os
import secrets
import sqlite3
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from ..linux import database, ownfiles
from ..linux.database import Database
from ..state.versions import VersionError, is_known, version_problem

log = logging.getLogger(__name__)

# How many deleted objects are collected before they are removed from the database together, and how many new ones are
# put into it together.
_MANY = 1000

MAX_VIEWS = (1 << 15) - 1
"""How many views a mount may have."""

MEMORY = ":memory:"
"""The path of an index that is in memory alone."""

# The errno for a failure of SQLite (https://www.sqlite.org/rescode.html); anything else is EIO.
_ERRNOS = {
    sqlite3.SQLITE_FULL: errno.ENOSPC,
    sqlite3.SQLITE_NOMEM: errno.ENOMEM,
    sqlite3.SQLITE_READONLY: errno.EROFS,
    sqlite3.SQLITE_BUSY: errno.EAGAIN,
}
_SECRET_BYTES = 32
_FINGERPRINT_BYTES = 16

_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)

VERSION = 3
"""The version of the database that this cloakfs writes."""

FIRST_COMPUTED = 3
"""The first version that says whether numbers are computed; in earlier ones, none are."""

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
    """
    CREATE TABLE numbering (computed INTEGER NOT NULL);
    INSERT INTO numbering SELECT 0 WHERE EXISTS (SELECT 1 FROM objects);
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


def _fingerprint(secret: bytes) -> bytes:
    return hashlib.blake2b(secret, digest_size=_FINGERPRINT_BYTES, person=b"secret").digest()


def is_of_key(stored: object, secret: bytes) -> bool:
    """Whether what an index has stored as its secret stands for this one, which the key gives."""
    return stored in (secret, _fingerprint(secret))


class Unstored(OSError):
    """A number cannot be made durable, or found: ENOSPC if the disk is full.

    Attributes:
        numbers: those that were given since the last commit, and are void: no reply may have had them.
    """

    def __init__(self, exc: sqlite3.Error, path: str, numbers: Iterable[int] = ()) -> None:
        code = _ERRNOS.get(_code(exc) & 0xFF, errno.EIO)
        super().__init__(errno.ENOSPC if _code(exc) == sqlite3.SQLITE_IOERR_SHMSIZE else code, str(exc), path)
        self.numbers = frozenset(numbers)


def _last_of(table: str) -> tuple[str, tuple[str]]:
    """Return the question for the largest number that a table has, and ever had: `_largest` takes the answer.

    SQLite's own note of the latter is a row like any other, and may be damaged.
    """
    return f"SELECT seq FROM sqlite_sequence WHERE name = ? UNION ALL SELECT max(number) FROM {table}", (table,)


def _largest(rows: Iterable[tuple[Any, ...]]) -> int:
    return max((row[0] for row in rows if isinstance(row[0], int)), default=0)


def _code(exc: sqlite3.Error) -> int:
    """Return the extended result code of SQLite; 0 if the error is not its own."""
    return int(getattr(exc, "sqlite_errorcode", 0))


class Index:
    """Numbers for objects, file systems and views, each given once and never reused.

    Args:
        path: of the database file; it is created if missing, readable by root alone. Or `MEMORY`.
        behind: numbers are made durable by the next `commit`, not before they are returned, and are held in memory if
            that fails.
        trouble: why the numbers are in memory, if `path` is `MEMORY`.
        secret: that the key of file handles gives (`state.handlekey`), if there is one. A new index whose numbers are
            computed has none of its own then. (Where it gives the numbers, old handles must be stale if it is lost.)

    Attributes:
        trouble: why numbers cannot be stored at present; None if they can.
        is_computed: whether the numbers of objects are computed where that is possible (`numbers`).
        secret: of the mount.

    Raises:
        OSError: the file cannot be opened, or belongs to another user. ENOKEY: its secret is that of a key that there
            is no more.
        sqlite3.Error: the file is not a database, is damaged, or cannot be written.
        VersionError: its version is unknown; the file is left unchanged.
    """

    def __init__(
        self, path: str, *, behind: bool = False, trouble: str | None = None, secret: bytes | None = None
    ) -> None:
        self._path = path
        self._of_key = secret
        self._behind = behind
        self.trouble = trouble
        if path != MEMORY:
            self._require_own_file()
        self._db = self._opened(path)
        try:
            self.is_computed = self._was_computed()
            self.secret = self._secret()
            self._last = self._last_given()
        except BaseException:
            self._db.close()
            raise
        # What is not in the database yet: number -> handle, parent, name; handle -> number; number -> parent, name;
        # (table, column, value) -> number.
        self._made: dict[int, tuple[bytes, int, bytes]] = {}
        self._numbers: dict[bytes, int] = {}
        self._moved: dict[int, tuple[int, bytes]] = {}
        self._named: dict[tuple[str, str, str], int] = {}
        self._has_skipped = False  # whether the last number that was given may be larger than the database knows
        self._removed: set[int] = set()
        self._batching = False
        self._in_batch: list[int] = []  # numbers that were given, and are not durable yet
        self._failure: sqlite3.Error | None = None  # of the batch

    def _require_own_file(self) -> None:
        """Make the file unless it exists.

        Raises:
            OSError: it cannot be opened, or others could write to it: they could choose who gets which file handle.
        """
        fd = ownfiles.open_fd(self._path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
        try:
            info = ownfiles.fstat(fd)
        finally:
            os.close(fd)
        if not stat.S_ISREG(info.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", self._path)
        if info.st_uid != os.geteuid() or stat.S_IMODE(info.st_mode) & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError(errno.EPERM, f"uid {info.st_uid} or others may write to it", self._path)

    def _opened(self, path: str) -> Database:
        db = database.connect(path, timeout=10)
        try:
            before = self._version(db)
            db.execute("PRAGMA journal_mode=WAL")
            db.execute("PRAGMA synchronous=NORMAL")
            db.execute("PRAGMA wal_autocheckpoint=0")  # a checkpoint waits for the disk
            # A page that turns out to be damaged later would be an error for some files, for ever.
            wrong = db.execute("PRAGMA quick_check(1)").fetchone()[0]
            if wrong != "ok":
                raise sqlite3.DatabaseError(f"is damaged ({' '.join(wrong.split())})")
            self._migrate(db, before)
            if db.execute("SELECT 1 FROM secret").fetchone() is None:
                db.execute("INSERT INTO secret VALUES (?)", (secrets.token_bytes(_SECRET_BYTES),))
        except BaseException:
            db.close()
            raise
        return db

    def _version(self, db: Database) -> int:
        version = int(db.execute("PRAGMA user_version").fetchone()[0])
        if not is_known(version, VERSION):
            folder = os.path.dirname(self._path)
            hint = f"use the cloakfs that wrote it, or move {folder} away (old file handles become stale)"
            raise VersionError(version_problem(self._path, version, VERSION, hint))
        return version

    @staticmethod
    def _migrate(db: Database, version: int) -> None:
        """Migrate a database of that version to the present version; a step that fails changes nothing."""
        db.create_function("key_of", 1, _key, deterministic=True)
        for number, step in enumerate(_STEPS[version:], version + 1):
            db.executescript(f"BEGIN IMMEDIATE; {step} PRAGMA user_version = {number}; COMMIT")

    def _secret(self) -> bytes:
        """Return the secret. One that the index has itself stays in force, so that old handles stay valid."""
        (stored,) = self._db.execute("SELECT key FROM secret").fetchone()
        if not isinstance(stored, bytes) or len(stored) not in (_SECRET_BYTES, _FINGERPRINT_BYTES):
            raise sqlite3.DatabaseError("is damaged (it has no secret of the right length)")
        is_own, given = len(stored) == _SECRET_BYTES, self._of_key
        if is_own and not (self.is_computed and stored == given):
            return stored
        if given is None:
            raise OSError(errno.ENOKEY, "the key that its file handles were made with is missing", self._path)
        if stored != _fingerprint(given):
            if not is_own:
                log.warning("%s: the key of file handles is another one now: old file handles are stale", self._path)
            self._db.execute("UPDATE secret SET key = ?", (_fingerprint(given),))
        return given

    def _was_computed(self) -> bool:
        row = self._db.execute("SELECT computed FROM numbering").fetchone()
        return row is not None and row[0] == 1

    @property
    def path(self) -> str:
        """The path of the database file, or `MEMORY`."""
        return self._path

    @property
    def last(self) -> int:
        """The largest number that was ever given to an object."""
        return self._last

    def claim(self, number: int, handle: bytes, *, computed: bool = False) -> bool:
        """Ensure that `number` belongs to the object with this handle.

        If it belonged to another one until now, the tree was replaced: all objects and the secret are forgotten, so
        that old file handles are stale. Then, and for a new index, `computed` says whether the numbers of objects are
        to be computed from now on (`is_computed`).

        Returns:
            False if everything had to be forgotten.

        Raises:
            sqlite3.Error: this cannot be stored.
        """
        row = self.find(number)
        if row is not None and row[0] == handle:
            return True
        # A secret of the key stays: generations depend on the handles, too.
        of_key = self._of_key if computed else None
        new = secrets.token_bytes(_SECRET_BYTES) if of_key is None else _fingerprint(of_key)
        self._write(
            [
                ("DELETE FROM objects", ()),
                ("DELETE FROM sqlite_sequence WHERE name = 'objects'", ()),
                ("UPDATE secret SET key = ?", (new,)),
                ("INSERT INTO objects VALUES (?, ?, 0, x'')", (number, _key(handle))),
                ("DELETE FROM numbering", ()),
                ("INSERT INTO numbering VALUES (?)", (int(computed),)),
            ]
        )
        self.is_computed = computed
        self.secret = self._secret()
        self._last = self._last_given()
        return row is None

    def _last_given(self) -> int:
        return _largest(self._db.execute(*_last_of("objects")))

    def close(self) -> None:
        """Write everything to the database file and close it."""
        self.tidy()
        with contextlib.suppress(Unstored):  # `_fail` has logged it
            while self.commit():
                pass
        self._db.close()

    # -- storing -----------------------------------------------------------------------------------

    def _write(self, statements: Iterable[tuple[str, tuple[object, ...]]]) -> None:
        """Make changes durable together: all of them or none.

        Raises:
            sqlite3.Error: none.
        """
        self._db.execute("BEGIN IMMEDIATE")
        try:
            for statement, values in statements:
                self._db.execute(statement, values)
            self._db.execute("COMMIT")
        except BaseException:
            self._roll_back()
            raise

    def _roll_back(self) -> None:
        if self._db.in_transaction:  # SQLite itself ends a transaction when the disk is full
            self._db.execute("ROLLBACK")

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Make many numbers durable at the cost of one; must not be held across an await.

        Raises:
            Unstored: they could not be made durable.
        """
        self._batching, self._failure = True, None
        try:
            yield
        finally:
            self._batching = False
            if not self._behind:
                self.commit()

    def commit(self) -> bool:
        """Make durable what is not durable yet, or much of it; return whether there is more.

        Raises:
            Unstored: it failed. What was given since the last commit is void, unless `behind`.
        """
        given, self._in_batch = self._in_batch, []
        failure, self._failure = self._failure, None
        try:
            if failure is not None:
                raise failure
            if self._db.in_transaction:
                self._db.execute("COMMIT")
                self._recovered()
            if self._behind or self._named:
                return self._store()
        except sqlite3.Error as exc:
            self._roll_back()
            if exc is not failure:
                self._fail(exc)
            raise Unstored(exc, self._path, given) from exc
        self._try_to_store()  # only names, which are not needed to find anything
        return False

    def _store(self) -> bool:
        """Put up to `_MANY` of what is in memory into the database; return whether there is more.

        Raises:
            sqlite3.Error: that is not possible, and all stays in memory.
        """
        if not (self._made or self._moved or self._named or self._has_skipped):
            return False
        made = dict(list(self._made.items())[:_MANY]) if len(self._made) > _MANY else self._made.copy()
        moved = dict(list(self._moved.items())[:_MANY])
        named = self._named.copy()
        statements: list[tuple[str, tuple[object, ...]]] = []
        for (table, column, value), number in named.items():
            statements.append((f"INSERT OR IGNORE INTO {table} (number, {column}) VALUES (?, ?)", (number, value)))
        for number, (handle, parent, name) in made.items():
            # A file system may give the handle of a removed object to another one. The old number is void then.
            row = number, _key(handle), parent, name
            statements.append(("INSERT OR REPLACE INTO objects VALUES (?, ?, ?, ?)", row))
        for number, place in moved.items():
            statements.append(("UPDATE objects SET parent = ?, name = ? WHERE number = ?", (*place, number)))
        statements.append(("UPDATE sqlite_sequence SET seq = ? WHERE name = 'objects'", (self._last,)))
        self._write(statements)
        self._named.clear()
        self._has_skipped = False
        for number, (handle, _, _) in made.items():
            del self._made[number], self._numbers[handle]
        for number in moved:
            del self._moved[number]
        self._recovered()
        return bool(self._made or self._moved)

    def _recovered(self) -> None:
        if self.trouble is not None and self._path != MEMORY:
            log.info("%s: numbers can be stored again", self._path)
            self.trouble = None

    def _fail(self, exc: sqlite3.Error) -> None:
        """Note that numbers cannot be stored; with `behind`, go on without a database that is damaged."""
        if self._db.in_transaction:
            self._roll_back()
        if self._in_batch:
            self._failure = exc  # what was given before is void
        if self._behind and _code(exc) & 0xFF in _DAMAGED:
            self._go_on_in_memory(exc)
        elif self.trouble is None:
            self.trouble = f"{self._path}: {exc}"
            if self._behind:
                log.warning("%s; numbers of what is found from now on are in memory alone until it works", self.trouble)
            else:
                log.warning("%s; nothing can be made, and nothing new be looked up, until it works", self.trouble)

    def _go_on_in_memory(self, exc: sqlite3.Error) -> None:
        """Give the file up. Numbers that were given stay valid for what the kernel has not forgotten."""
        self.trouble = f"{self._path}: {exc}"
        log.error("%s; numbers are in memory from now on, and do not outlive the daemon", self.trouble)
        names = self._all_named()
        with contextlib.suppress(sqlite3.Error):
            self._db.close()
        self._path = MEMORY
        self._db = self._opened(MEMORY)
        self._write(
            [
                ("UPDATE secret SET key = ?", (self.secret,)),
                ("INSERT INTO objects VALUES (?, x'', 0, x'')", (self._last,)),
                ("DELETE FROM objects", ()),
                *(
                    (f"INSERT INTO {table} (number, {column}) VALUES (?, ?)", (number, value))
                    for table, column, value, number in names
                ),
            ]
        )

    def _all_named(self) -> list[tuple[str, str, str, int]]:
        """Return the numbers of file systems and views, as far as they can still be read."""
        found = []
        for table, column in (("filesystems", "key"), ("views", "label")):
            with contextlib.suppress(sqlite3.Error):
                rows = self._db.execute(f"SELECT number, {column} FROM {table}").fetchall()
                found += [(table, column, str(value), int(number)) for number, value in rows]
        return found

    def _rows(self, question: str, values: tuple[object, ...] = ()) -> list[Any]:
        """Ask the database.

        Raises:
            Unstored: it does not answer; with `behind`, one in memory takes its place.
        """
        try:
            return self._db.execute(question, values).fetchall()
        except sqlite3.Error as exc:
            if not self._behind or self._path == MEMORY:
                raise Unstored(exc, self._path) from exc
            self._go_on_in_memory(exc)
            return self._db.execute(question, values).fetchall()

    def _row(self, table: str, column: str, value: str | bytes, *more: str) -> tuple[Any, ...] | None:
        """Return the number, and other columns, of the row with this value in a column that is unique.

        SQLite finds it by an index of its own, which `quick_check` does not compare with the table: so this does.

        Raises:
            Unstored: the database does not answer, or is damaged; with `behind`, one in memory takes its place.
        """
        rows = self._rows(
            f"SELECT a.{', a.'.join(('number', *more))}, b.{column} "
            f"FROM {table} a JOIN {table} b ON b.number = a.number WHERE a.{column} = ?",
            (value,),
        )
        if not rows:
            return None
        *row, stored = rows[0]
        if stored == value:
            return tuple(row)
        exc = sqlite3.DatabaseError(f"is damaged (an entry of {table} leads to another one)")
        if not self._behind:
            if self.trouble is None:
                self.trouble = f"{self._path}: {exc}"
                log.error("%s; what it is about fails until an empty one takes its place", self.trouble)
            raise Unstored(exc, self._path)
        self._go_on_in_memory(exc)
        return None

    def require_room(self) -> None:
        """To be called before something is made that needs a number.

        Raises:
            Unstored: it would not get one.
        """
        if self.trouble is None or self._behind:
            return
        trial = [(self._last + count, secrets.token_bytes(32)) for count in range(1, 9)]
        try:
            self._write(
                [
                    *(("INSERT INTO objects VALUES (?, ?, 0, x'')", row) for row in trial),
                    *(("DELETE FROM objects WHERE number = ?", (number,)) for number, _ in trial),
                ]
            )
        except sqlite3.Error as exc:
            raise Unstored(exc, self._path) from exc
        self._last = trial[-1][0]
        self._recovered()

    # -- file systems and views ----------------------------------------------------------------------

    def filesystem(self, key: str, former: str | None = None) -> int:
        """Return the number of the file system with this `key`, which earlier versions knew by the key `former`.

        Raises:
            Unstored: it has none, and cannot get one.
        """
        if former is not None and self._rows("SELECT 1 FROM filesystems WHERE key = ?", (former,)):
            with contextlib.suppress(sqlite3.Error):
                self._db.execute("UPDATE OR IGNORE filesystems SET key = ? WHERE key = ?", (key, former))
        return self._number("filesystems", "key", key)

    def filesystems(self) -> list[tuple[int, str]]:
        """Return (number, key) of every file system that ever got a number."""
        return self._rows("SELECT number, key FROM filesystems")

    def view(self, label: str) -> int:
        """Return the number (from 1) of the view called `label`.

        Where numbers are computed, it depends on the label and the secret, unless another view has that number.

        Raises:
            Unstored: it has none, and cannot get one.
        """
        return self._number("views", "label", label)

    def usual_view(self, label: str) -> int:
        """Return the number that the view called `label` has where numbers are computed, unless another one has it."""
        digest = hashlib.blake2b(os.fsencode(label), key=self.secret, digest_size=8, person=b"view").digest()
        return int.from_bytes(digest, "little") % MAX_VIEWS + 1

    def _computed_view(self, label: str) -> int:
        first = number = self.usual_view(label)
        while self.view_label(number) is not None:
            number = number % MAX_VIEWS + 1
            if number == first:
                return MAX_VIEWS + 1
        return number

    def view_label(self, number: int) -> str | None:
        """Return the label of the view with this number, if there ever was one."""
        for (table, _, label), given in self._named.items():
            if table == "views" and given == number:
                return label
        rows = self._rows("SELECT label FROM views WHERE number = ?", (number,))
        return str(rows[0][0]) if rows else None

    def _number(self, table: str, column: str, value: str) -> int:
        known = self._named.get((table, column, value))
        if known is not None:
            return known
        row = self._row(table, column, value)
        if row is not None:
            return int(row[0])
        if self.is_computed and table == "views":
            number = self._computed_view(value)
        else:
            others = (number for (of, _, _), number in self._named.items() if of == table)
            number = max(_largest(self._rows(*_last_of(table))), *others, 0) + 1
        self._named[table, column, value] = number
        try:
            while self.commit():
                pass
        except Unstored:
            if not self._behind:
                del self._named[table, column, value]
                raise
        return number

    # -- objects -----------------------------------------------------------------------------------

    def made(self, handle: bytes, parent: int, name: bytes) -> int | None:
        """Return a number for an object that was just made as `name` in `parent`, which no caller can have seen.

        The database is not touched: a file that is soon removed never gets into it. The result is None if numbers have
        to be durable before they are given: `object` has to be called then.
        """
        if not self._behind:
            return None
        before = self._numbers.get(handle)
        if before is not None:  # of a removed object
            del self._made[before]
        self._last += 1
        self._made[self._last] = handle, parent, name
        self._numbers[handle] = self._last
        if len(self._made) >= _MANY and self.trouble is None:
            self._try_to_store()
        return self._last

    def _try_to_store(self) -> None:
        if not (self._made or self._moved or self._has_skipped):
            return
        try:
            self._store()
        except sqlite3.Error as exc:
            self._fail(exc)

    def object(self, handle: bytes, parent: int, name: bytes) -> int:
        """Return the number of the object with this handle, which was just seen as `name` in `parent`.

        Raises:
            Unstored: it has none, and cannot get one.
        """
        number = self._numbers.get(handle)
        if number is not None:
            if self._made[number][1:] != (parent, name):
                self._made[number] = handle, parent, name
            return number
        key = _key(handle)
        row = self._row("objects", "key", key, "parent", "name")
        if row is not None:
            number, was_parent, was_name = row
            self._removed.discard(number)
            if self._moved.get(number, (was_parent, was_name)) != (parent, name):
                self.moved(number, parent, name)
            return int(number)
        if self._behind:
            number = self.made(handle, parent, name)
            assert number is not None
            return number
        # Counted here, because a number must not be given twice even if a transaction was rolled back.
        self._last += 1
        try:
            if self._failure is not None:
                raise self._failure
            # A transaction is begun only here, because most listings change nothing. In trouble, each number is
            # committed by itself, so that the listing has them.
            if self._batching and self.trouble is None and not self._db.in_transaction:
                self._db.execute("BEGIN IMMEDIATE")
            self._db.execute("INSERT INTO objects VALUES (?, ?, ?, ?)", (self._last, key, parent, name))
        except sqlite3.Error as exc:
            self._fail(exc)
            raise Unstored(exc, self._path) from exc
        if self._db.in_transaction:
            self._in_batch.append(self._last)
        elif self.trouble is not None:
            self._recovered()
        return self._last

    def moved(self, number: int, parent: int, name: bytes) -> None:
        """Record that the object is now called `name` in `parent`.

        It can be found without that, so that nothing fails if it cannot be stored yet.
        """
        made = self._made.get(number)
        if made is not None:
            self._made[number] = made[0], parent, name
            return
        self._moved[number] = parent, name
        if not self._behind and not self._batching and self.trouble is None:
            self._try_to_store()

    def remove(self, number: int) -> None:
        """Note that the object was deleted, for `tidy` to remove; until then the entry is harmless.

        The number is never reused.
        """
        self._moved.pop(number, None)
        made = self._made.pop(number, None)
        if made is not None:
            del self._numbers[made[0]]
            self._has_skipped = True
            return
        self._removed.add(number)
        if len(self._removed) >= _MANY:
            self.tidy()

    def tidy(self) -> None:
        """Remove the deleted objects from the database."""
        if not self._removed or self._batching:
            return
        removed, self._removed = self._removed, set()
        try:
            self._write(("DELETE FROM objects WHERE number = ?", (number,)) for number in removed)
        except sqlite3.Error as exc:
            log.warning("%s: %s; deleted files stay in it", self._path, exc)

    def after(self, number: int, count: int) -> list[tuple[int, bytes]]:
        """Return (number, handle) of up to `count` objects with larger numbers, in ascending order.

        What is not in the database yet is left out, and everything if it does not answer.
        """
        rows: list[tuple[int, bytes]] = []
        with contextlib.suppress(Unstored):
            question = "SELECT number, key FROM objects WHERE number > ? ORDER BY number LIMIT ?"
            rows = self._rows(question, (number, count))
        return [(number, _key(key)) for number, key in rows]

    def checkpoint(self) -> None:
        """Move the contents of the log into the database. Any thread may call this; others go on meanwhile."""
        if self._path == MEMORY:
            return
        with contextlib.closing(database.connect(self._path, timeout=10)) as db:
            db.execute("PRAGMA wal_checkpoint(PASSIVE)")

    def size(self) -> int:
        """Return how many bytes the database and its log have on disk."""
        return database.size(self._path)

    def find(self, number: int) -> tuple[bytes, int, bytes] | None:
        """Return (handle, parent, name) of an object, or None if the index does not have the number.

        Raises:
            Unstored: the index does not answer.
        """
        if number in self._made:
            return self._made[number]
        rows = self._rows("SELECT key, parent, name FROM objects WHERE number = ?", (number,))
        if not rows:
            return None
        key, parent, name = rows[0]
        return _key(key), *self._moved.get(number, (parent, name))
