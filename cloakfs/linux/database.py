"""SQLite as the daemon (`linux.ownfiles`): it opens, makes and removes files whenever it needs them."""

import contextlib
import os
import sqlite3

from .credentials import as_daemon


class Database(sqlite3.Connection):
    """A connection whose statements are executed as the daemon. What they return is to be fetched at once."""

    close = as_daemon(sqlite3.Connection.close)
    execute = as_daemon(sqlite3.Connection.execute)
    executemany = as_daemon(sqlite3.Connection.executemany)
    executescript = as_daemon(sqlite3.Connection.executescript)


@as_daemon
def connect(path: str, *, timeout: float, uri: bool = False) -> Database:
    """Open a database, in which each statement outside of BEGIN and COMMIT is a transaction; see sqlite3.connect.

    Raises:
        sqlite3.Error: it cannot be opened.
    """
    return sqlite3.connect(path, timeout=timeout, isolation_level=None, factory=Database, uri=uri)


@as_daemon
def size(path: str) -> int:
    """Return how many bytes a database and its log have on disk; 0 if it has no file."""
    found = 0
    for file in (path, f"{path}-wal"):
        with contextlib.suppress(OSError):
            found += os.stat(file).st_size
    return found
