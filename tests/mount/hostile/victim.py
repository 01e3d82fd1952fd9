"""The user who is attacked: works in a directory of its own, knows every answer, and measures each latency."""

import errno
import os
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

UID, GID = 5001, 5001
FILES = 12


@dataclass
class Watch:
    """The seconds that each operation took, the wrong answers, and how often the attacker got what it must not."""

    seconds: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    told: int = 0

    def percentile(self, percent: float) -> float:
        return sorted(self.seconds)[min(int(len(self.seconds) * percent / 100), len(self.seconds) - 1)]


def furnish(top: str) -> None:
    """As root, make on the real tree a private directory, and what everybody may see."""
    own = os.path.join(top, "victim")
    os.mkdir(own)
    for name, mode in [("private", 0o600), ("public", 0o644), *((f"file{n}", 0o640) for n in range(FILES))]:
        path = os.path.join(own, name)
        with open(path, "wb") as file:
            file.write(content(name))
        os.chmod(path, mode)
        os.chown(path, UID, GID)
    os.chown(own, UID, GID)
    os.chmod(own, 0o755)
    homes = os.path.join(top, "homes")
    os.mkdir(homes)
    for name, uid in (("victim", UID), ("another", UID + 1)):
        os.mkdir(os.path.join(homes, name), 0o700)
        os.chown(os.path.join(homes, name), uid, uid)


def content(name: str) -> bytes:
    return name.encode() * 700


def what_is_there() -> list[str]:
    return sorted(["private", "public", *(f"file{n}" for n in range(FILES))])


def look_after(top: str, stop: str, hidden: str | None) -> Watch:
    """Work until the file `stop` exists, for at least one round.

    Args:
        top: the mount.
        stop: a path outside of it.
        hidden: a path that must not be there for this user; None where nothing is hidden.
    """
    watch = Watch()
    own = os.path.join(top, "victim")
    number = 0
    while not number or not os.path.exists(stop):
        number += 1
        _go_round(watch, own, number)
        ask(watch, partial(os.listdir, os.path.join(top, "homes", "victim")), [])
        if hidden is not None:
            ask(watch, partial(os.path.lexists, hidden), False)
            ask(watch, partial(_error, os.chmod, hidden, 0o777), errno.ENOENT)
    return watch


def _go_round(watch: Watch, own: str, number: int) -> None:
    name = f"file{number % FILES}"
    path, new, newer = (os.path.join(own, last) for last in (name, f"new{number}", f"newer{number}"))
    for call, expected in (
        (lambda: sorted(os.listdir(own)), what_is_there()),
        (lambda: _read(path), content(name)),
        (lambda: _shape(path), (0o100640, UID, GID, len(content(name)))),
        (lambda: _write(new, content(name)), None),
        (lambda: os.rename(new, newer), None),
        (lambda: _error(os.stat, new), errno.ENOENT),
        (lambda: _read(newer), content(name)),
        (lambda: os.unlink(newer), None),
    ):
        ask(watch, call, expected)


def ask(watch: Watch, call: Callable[[], object], expected: object) -> None:
    began = time.monotonic()
    try:
        answer = call()
    except OSError as exc:
        answer = exc
    watch.seconds.append(time.monotonic() - began)
    if answer != expected:
        watch.wrong.append(f"{answer!r:.200}, expected {expected!r:.200}")


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _write(path: str, data: bytes) -> None:
    with open(path, "xb") as file:
        file.write(data)


def _shape(path: str) -> tuple[int, int, int, int]:
    info = os.stat(path)
    assert stat.S_ISREG(info.st_mode)
    return info.st_mode, info.st_uid, info.st_gid, info.st_size


def _error(call: Callable[..., object], *arguments: object) -> int | None:
    try:
        call(*arguments)
    except OSError as exc:
        return exc.errno
    return 0
