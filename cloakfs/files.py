"""Replaces a file atomically: a reader finds the old content or the new, never a part of either."""

import contextlib
import os


def beside(path: str) -> str:
    """Return the path to which the new content of a file is written before it replaces the old."""
    return f"{path}.new"


def replace(path: str, content: bytes, *, mode: int = 0o666, durable: bool = False) -> None:
    """Replace the content of the file at `path`, which need not exist yet, by `content`.

    If a process is killed here, the temporary file that it leaves is overwritten by the next one. If the disk is full,
    none is left.

    Args:
        path: the path of the file itself, not of a link to it.
        content: the whole new content.
        mode: the permissions of the file; the umask is subtracted, as usual.
        durable: the file has the old content or the new even after a power failure. This waits for the disk.

    Raises:
        OSError: it cannot be written; the file is unchanged. The error names the file, or the temporary one.
    """
    try:
        with open(beside(path), "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(beside(path), path)
    except OSError as exc:
        if exc.filename is None:  # write(2) and fsync(2) know no name
            exc.filename = path
        with contextlib.suppress(OSError):
            os.unlink(beside(path))
        raise
