"""Those who trace the requests of a mount: which records each one wants, and what it has not fetched yet.

A record describes one request that was answered (`filesystem.trace` makes it, and docs/commands.md lists its fields).
"""

import contextlib
import fnmatch
import json
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Self

import trio

from .errors import UserError
from .shell import printable

Record = dict[str, Any]


class TooManyTracers(UserError):
    """Nobody else can trace the mount at the moment; the text is one line that says why."""


OPERATIONS = (
    "access", "create", "fallocate", "flush", "fsync", "fsyncdir", "getattr", "getxattr", "link", "listxattr", "lookup",
    "lseek", "mkdir", "mknod", "open", "opendir", "read", "readdir", "readlink", "release", "releasedir", "removexattr",
    "rename", "rmdir", "setattr", "setxattr", "statfs", "symlink", "unlink", "write",
)  # fmt: skip
"""The operations that are traced."""

MOST_TRACERS = 8
"""How many may trace one mount at a time."""

# An idle tracer gets an empty answer after this time, so that the daemon notices if the tracer has gone.
_IDLE_SECONDS = 0.5
# Records are handed over in batches: a tracer that fetched each one by itself would keep the loop busy.
_BATCH_SECONDS = 0.01


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which records a tracer wants: those that meet all conditions.

    Attributes:
        users: client uids; none means all.
        paths: patterns (fnmatch) of paths; what lies below is included. None means all.
        operations: names of operations; none means all.
        errors: only requests that were answered with an error.
        hidden: only requests from whose caller something was hidden.
    """

    users: tuple[int, ...] = ()
    paths: tuple[str, ...] = ()
    operations: tuple[str, ...] = ()
    errors: bool = False
    hidden: bool = False

    @classmethod
    def parse(cls, told: dict[str, Any]) -> Self:
        """Return what the JSON object `told` stands for.

        Raises:
            TypeError: it has other fields, or a field is of another type.
        """
        conditions: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in told.items()
        }
        wanted = cls(**conditions)
        lists = (wanted.users, int), (wanted.paths, str), (wanted.operations, str)
        if not all(type(values) is tuple and all(type(value) is kind for value in values) for values, kind in lists):
            raise TypeError("a condition is of the wrong type")
        return wanted

    def plain(self) -> dict[str, Any]:
        """Return the JSON object that `parse` reads."""
        return asdict(self)

    def includes(self, record: Record) -> bool:
        """Whether the record meets all conditions."""
        return (
            (not self.errors or record["error"] is not None)
            and (not self.hidden or bool(record["hidden"]))
            and (not self.operations or record["operation"] in self.operations)
            and (not self.users or (record["client"] is not None and record["client"]["uid"] in self.users))
            and (not self.paths or any(self._has_path(record[name]) for name in ("path", "new_path") if record[name]))
        )

    def _has_path(self, path: str) -> bool:
        return any(
            fnmatch.fnmatchcase(path, pattern) or fnmatch.fnmatchcase(path, pattern.rstrip("/") + "/*")
            for pattern in self.paths
        )


class Tracer:
    """The records that one tracer has not fetched yet. Their number is bounded, so that it may be as slow as it likes.

    Args:
        wanted: which records it wants.
        most: how many bytes of records are kept until they are fetched; further records are dropped and counted.
    """

    def __init__(self, wanted: Wanted, most: int) -> None:
        self.wanted = wanted
        self._most = most
        self._records: deque[bytes] = deque()
        self._bytes = 0
        self._dropped = 0
        self._news = trio.Event()

    def put(self, record: bytes) -> None:
        """Add a record (JSON), or drop it if there is no room."""
        if self._bytes + len(record) > self._most:
            self._dropped += 1
            return
        self._records.append(record)
        self._bytes += len(record)
        self._news.set()

    async def fetch(self) -> bytes:
        """Wait for records; return `{"records": […], "dropped": COUNT}`: what was dropped came after these records."""
        with trio.move_on_after(_IDLE_SECONDS):
            await self._news.wait()
            await trio.sleep(_BATCH_SECONDS)
        answer = b'{"records": [%s], "dropped": %d}' % (b", ".join(self._records), self._dropped)
        self._records.clear()
        self._bytes = self._dropped = 0
        self._news = trio.Event()
        return answer


class Tracers:
    """All who trace one mount.

    Args:
        switch: called with True before the first one begins, and with False after the last one has ended.
        most_bytes: how many bytes of records are kept for each until they are fetched.
    """

    def __init__(self, switch: Callable[[bool], None], most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._switch = switch
        self._tracers: set[Tracer] = set()

    @contextlib.contextmanager
    def attach(self, wanted: Wanted) -> Iterator[Tracer]:
        """Let somebody trace until the context ends.

        Raises:
            TooManyTracers: too many do already.
        """
        if len(self._tracers) >= MOST_TRACERS:
            raise TooManyTracers(f"{MOST_TRACERS} others trace this mount already")
        tracer = Tracer(wanted, self._most_bytes)
        if not self._tracers:
            self._switch(True)
        self._tracers.add(tracer)
        try:
            yield tracer
        finally:
            self._tracers.remove(tracer)
            if not self._tracers:
                self._switch(False)

    def tell(self, record: Record) -> None:
        """Hand a record to everybody who wants it."""
        text = None
        for tracer in self._tracers:
            if tracer.wanted.includes(record):
                text = text or json.dumps(record).encode()
                tracer.put(text)


def described(record: Record, error: Callable[[str], str] = str, hidden: Callable[[str], str] = str) -> str:
    """Return a line that describes a request, without its time.

    Args:
        record: what describes it.
        error: marks the answer if it is an error, such as with a colour.
        hidden: the same of why something was hidden.
    """
    path = record["path"] or "?"
    if record["new_path"]:
        path += f" → {record['new_path']}"
    asked = f" ({record['request']})" if record["request"] else ""
    done = f"{_who(record)} {record['operation']} {path}{asked} = "
    answer = record["error"] or record["answer"]
    text = printable(done) + (error if record["error"] else str)(printable(answer))
    text += f" {record['microseconds']} µs"
    if kept := _kept(record["remembers"]):
        text += f"; kept: {kept}"
    if record["refused"]:
        text += "; refused: " + printable(record["refused"])
    if record["hidden"]:
        reasons = [
            one["reason"] if one["path"] == record["path"] else f"{one['path'] or '?'}: {one['reason']}"
            for one in record["hidden"]
        ]
        if record["more_hidden"]:
            reasons.append(f"{record['more_hidden']:,} more")
        text += "; hidden: " + hidden(printable(", ".join(reasons)))
    return text


def _who(record: Record) -> str:
    if record["inside"]:
        return "cloakfs itself"
    client, server = (ids(record[side]) for side in ("client", "server"))
    command = f" {record['command'] or '?'}[{record['pid']}]" if record["pid"] is not None else ""
    return f"{client} → {server}{command}"


def ids(pair: dict[str, int] | None) -> str:
    """Return the ids of a caller, uid and gid, as `UID:GID`; `-` if there are none."""
    return "-" if pair is None else ":".join(map(str, pair.values()))


def _kept(remembers: dict[str, float] | None) -> str:
    """Return what the kernel may keep, in words; "" if there is nothing."""
    kept = {name: seconds for name, seconds in (remembers or {}).items() if seconds}
    return ", ".join(name if name == "content" else f"{name} {seconds:g} s" for name, seconds in kept.items())
