"""Where objects whose numbers are computed were last seen: by it a file is found that a client uses by its handle.

These are hints. Each is verified before it is relied upon, and all may be lost: a directory is found by "..", and a
file by a search (`search`). So they are written behind the answers, without waiting for the disk, and a file of them
that is damaged, or of another version, is replaced by an empty one.
"""

import contextlib
import logging
import os
import sqlite3

from ..linux import database, ownfiles
from ..linux.database import Database

log = logging.getLogger(__name__)

VERSION = 1
"""The version of the file."""

_MANY = 1000
"""How many are written together."""

_MOST = 100_000
"""How many are held in memory if they cannot be written; then they are forgotten."""

# An error of a statement: the table is another one.
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR)

_Place = tuple[int, bytes]


class Places:
    """The last known places of objects, by what identifies them (`computed`), which sorts them by inode number.

    Args:
        path: of the file, which is made if missing; `":memory:"` for none.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._noted: dict[int, _Place | None] = {}  # not written yet; None: it is to be removed
        self._has_failed = False
        self._db = self._opened()

    def _opened(self) -> Database | None:
        for is_new in (False, True):
            try:
                if is_new:
                    self._remove()
                return self._connected()
            except (sqlite3.Error, OSError) as exc:
                problem = exc
        self._fail(problem)
        return None

    def _connected(self) -> Database:
        if self._path != ":memory:":
            # Root's alone: names of hidden files are in it.
            os.close(ownfiles.open_fd(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
        db = database.connect(self._path, timeout=10)
        try:
            if int(db.execute("PRAGMA user_version").fetchone()[0]) not in (0, VERSION):
                raise sqlite3.DatabaseError("is of another version")
            db.execute("PRAGMA journal_mode=WAL")
            db.execute("PRAGMA synchronous=OFF")
            db.execute(
                "CREATE TABLE IF NOT EXISTS places (identity INTEGER PRIMARY KEY, parent INTEGER NOT NULL, "
                "name BLOB NOT NULL)"
            )
            db.execute(f"PRAGMA user_version = {VERSION}")
        except BaseException:
            db.close()
            raise
        return db

    def _remove(self) -> None:
        for path in (self._path, f"{self._path}-wal", f"{self._path}-shm"):
            with contextlib.suppress(FileNotFoundError):
                ownfiles.unlink(path)

    def _fail(self, problem: Exception) -> None:
        if not self._has_failed:
            self._has_failed = True
            log.warning("%s: %s; files will be searched for after a restart, when they are used", self._path, problem)

    def _replace_if_damaged(self, problem: sqlite3.Error) -> None:
        if getattr(problem, "sqlite_errorcode", 0) & 0xFF in _DAMAGED and self._db is not None:
            with contextlib.suppress(sqlite3.Error):
                self._db.close()
            with contextlib.suppress(OSError):
                self._remove()
            self._db = self._opened()

    def note(self, identity: int, parent: int, name: bytes) -> None:
        """Note that this object is `name` in a directory: its identity, or another number below 0."""
        self._noted[identity] = parent, name
        if len(self._noted) >= _MANY and (not self._has_failed or len(self._noted) > _MOST):
            self.commit()

    def forget(self, identity: int) -> None:
        """Note that the object is gone."""
        self._noted[identity] = None

    def find(self, identity: int) -> _Place | None:
        """Return where the object was last seen: the parent and the name, as they were noted."""
        if identity in self._noted:
            return self._noted[identity]
        if self._db is None:
            return None
        try:
            row = self._db.execute("SELECT parent, name FROM places WHERE identity = ?", (identity,)).fetchone()
        except sqlite3.Error as exc:
            self._fail(exc)
            self._replace_if_damaged(exc)
            return None
        parent, name = row or (None, None)
        return (parent, name) if isinstance(parent, int) and isinstance(name, bytes) else None  # damaged otherwise

    def after(self, identity: int, count: int) -> list[int]:
        """Return up to `count` larger identities of objects that are written, in ascending order."""
        if self._db is None:
            return []
        try:
            question = "SELECT identity FROM places WHERE identity > ? ORDER BY identity LIMIT ?"
            return [row[0] for row in self._db.execute(question, (identity, count)).fetchall()]
        except sqlite3.Error as exc:
            self._fail(exc)
            self._replace_if_damaged(exc)
            return []

    def commit(self) -> bool:
        """Write up to `_MANY` of what was noted; return whether there is more."""
        if len(self._noted) > _MOST:
            self._noted.clear()
        if self._db is None or not self._noted:
            return False
        some = dict(list(self._noted.items())[:_MANY]) if len(self._noted) > _MANY else self._noted.copy()
        try:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                rows = [(identity, *place) for identity, place in some.items() if place is not None]
                self._db.executemany("INSERT OR REPLACE INTO places VALUES (?, ?, ?)", rows)
                gone = [(identity,) for identity, place in some.items() if place is None]
                self._db.executemany("DELETE FROM places WHERE identity = ?", gone)
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise
        except sqlite3.Error as exc:
            self._fail(exc)
            self._replace_if_damaged(exc)
            return False
        for identity in some:
            del self._noted[identity]
        self._has_failed = False
        return bool(self._noted)

    def clear(self) -> None:
        """Forget all: the tree is another one."""
        self._noted.clear()
        if self._db is not None:
            try:
                self._db.execute("DELETE FROM places")
            except sqlite3.Error as exc:
                self._fail(exc)

    def size(self) -> int:
        """Return how many bytes the file and its log have on disk."""
        return database.size(self._path)

    def close(self) -> None:
        """Write everything and close the file."""
        while self.commit():
            pass
        if self._db is not None:
            self._db.close()
