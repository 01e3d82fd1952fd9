"""The records of a trace: each describes one request that was answered, and a tracer says which it wants. Pure.

`filesystem.trace` makes them, and docs/commands.md lists their fields.
"""

import fnmatch
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Self

from .messages import printable

Record = dict[str, Any]

OPERATIONS = (
    "access", "copy_file_range", "create", "fallocate", "flock", "flush", "fsync", "fsyncdir", "getattr", "getlk",
    "getxattr", "link", "listxattr", "lookup", "lseek", "mkdir", "mknod", "open", "opendir", "read", "readdir",
    "readlink", "release", "releasedir", "removexattr", "rename", "rmdir", "setattr", "setlk", "setxattr", "statfs",
    "symlink", "unlink", "unlock", "write",
)  # fmt: skip
"""The operations that are traced."""


@dataclass(frozen=True, slots=True)
class TraceFilter:
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
    def parse(cls, fields: dict[str, Any]) -> Self:
        """Return what the JSON object `fields` stands for.

        Raises:
            TypeError: it has other fields, or a field is of another type.
        """
        conditions: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()
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
    arguments = f" ({record['request']})" if record["request"] else ""
    done = f"{_who(record)} {record['operation']} {path}{arguments} = "
    answer = record["error"] or record["answer"]
    text = printable(done) + (error if record["error"] else str)(printable(answer))
    text += f" {record['microseconds']} µs"
    if cached := _cached(record["remembers"]):
        text += f"; kept: {cached}"
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


def _cached(remembers: dict[str, float] | None) -> str:
    """Return what the kernel may cache, in words; "" if there is nothing."""
    cached = {name: seconds for name, seconds in (remembers or {}).items() if seconds}
    return ", ".join(name if name == "content" else f"{name} {seconds:g} s" for name, seconds in cached.items())
