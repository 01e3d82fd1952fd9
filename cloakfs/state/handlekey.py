"""The key of file handles: machines that have the same one give clients the same handles.

Handles have a generation that nobody can guess without the secret of their mount (`tree.nodes`). Without this file,
each mount has a random secret in its state, and old handles are stale once that is lost. With it, secrets of mounts
whose numbers are computed (`tree.numbers`) are computed, too, for the source and the mount point, so that a machine
that has nothing but the configuration and this file gives, and knows, the same handles. Whoever has the file can forge
handles.
"""

import contextlib
import hashlib
import json
import os
import secrets
import sqlite3
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from urllib.parse import quote

from ..linux import database, ownfiles
from ..messages import UserError, shell_word
from . import persistent
from .versions import is_known, version_problem

PATH = "/etc/cloakfs/key"

VERSION = 1
"""The version of the file."""

_BYTES = 32


class HandleKeyError(UserError):
    """The file cannot be used; the text is one line that says why, and what to do."""


@dataclass(frozen=True, slots=True)
class HandleKey:
    """What is in the file.

    Attributes:
        key: from which secrets are computed.
        secrets: those of mounts that had one before there was a key, by the names of their states (`mount_key`).
    """

    key: bytes = field(repr=False)
    secrets: Mapping[str, bytes] = field(default_factory=dict, repr=False)

    def secret(self, mount: str) -> bytes:
        """Return the secret of a mount, given the name of its state."""
        known = self.secrets.get(mount)
        if known is not None:
            return known
        return hashlib.blake2b(os.fsencode(mount), key=self.key, digest_size=_BYTES, person=b"mount").digest()

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal digits by which two files are compared without showing them."""
        content = hashlib.blake2b(key=self.key, digest_size=8, person=b"fingerprint")
        for mount, secret in sorted(self.secrets.items()):
            content.update(hashlib.sha256(os.fsencode(mount)).digest() + secret)
        return content.hexdigest()


def read() -> HandleKey | None:
    """Return the key; None if there is none.

    Raises:
        HandleKeyError: the file cannot be used.
    """
    try:
        fd = ownfiles.open_fd(PATH, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with ownfiles.open(fd, encoding="utf-8") as file:
            _require_secret(ownfiles.fstat(fd))
            content = json.load(file)
        if not is_known(content["version"], VERSION):
            raise HandleKeyError(version_problem(PATH, content["version"], VERSION, "use the cloakfs that wrote it"))
        key = HandleKey(_bytes(content["key"]), {str(name): _bytes(it) for name, it in content["mounts"].items()})
        for name in key.secrets:
            os.fsencode(name)
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise HandleKeyError(f"{PATH}: {exc.strerror}") from exc
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as exc:
        raise HandleKeyError(f"{PATH}: is damaged; put a copy of it back") from exc
    return key


def _require_secret(info: os.stat_result) -> None:
    mode = stat.S_IMODE(info.st_mode)
    if not stat.S_ISREG(info.st_mode):
        raise HandleKeyError(f"{PATH}: is not a regular file")
    if info.st_uid != os.geteuid() or mode & 0o077:
        raise HandleKeyError(
            f"{PATH}: uid {info.st_uid} or others may read it (mode {mode:04o}), and could forge file handles: "
            f"if somebody may have read it, remove it, and make a new one (cloakfs export key); otherwise: "
            f"chown root {shell_word(PATH)}; chmod 600 {shell_word(PATH)}"
        )


def _bytes(text: object) -> bytes:
    found = bytes.fromhex(text) if isinstance(text, str) else b""
    if len(found) != _BYTES:
        raise ValueError
    return found


def make() -> HandleKey:
    """Make a key and its file, with the secrets that mounts have already, so that the handles of clients stay valid.

    Raises:
        FileExistsError: there is one.
        OSError: it cannot be written.
    """
    key = HandleKey(secrets.token_bytes(_BYTES), dict(_own_secrets()))
    ownfiles.makedirs(os.path.dirname(PATH), exist_ok=True)
    content = {
        "version": VERSION,
        "key": key.key.hex(),
        "mounts": {mount: secret.hex() for mount, secret in sorted(key.secrets.items())},
    }
    # Who is killed, or reads meanwhile, has the whole file or none.
    new = f"{PATH}.{os.getpid()}"
    fd = ownfiles.open_fd(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with ownfiles.open(fd, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(fd)
        ownfiles.link(new, PATH)
    finally:
        with contextlib.suppress(FileNotFoundError):
            ownfiles.unlink(new)
    return key


def _own_secrets() -> Iterator[tuple[str, bytes]]:
    """Yield the secrets in the states of mounts with computed numbers (`tree.numbers`), also of those mounted now."""
    for state in persistent.all_states():
        index = f"file:{quote(os.path.join(state.path, persistent.INDEX))}?mode=ro"
        with (
            contextlib.suppress(sqlite3.Error),
            contextlib.closing(database.connect(index, timeout=10, uri=True)) as db,
        ):
            row = db.execute("SELECT key FROM secret JOIN numbering WHERE computed").fetchone()
            if row is not None and isinstance(row[0], bytes) and len(row[0]) == _BYTES:
                yield state.key, row[0]
