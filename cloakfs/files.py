"""Replacing a file: whoever reads it finds what it said before or what it says now, never a part of either."""

import os


def beside(path: str) -> str:
    """Where the new content of a file is written before it takes the place of the old."""
    return f"{path}.new"


def replace(path: str, content: bytes, *, mode: int = 0o666, durable: bool = False) -> None:
    """Have the file at `path`, which need not be there yet, say `content`.

    What a process that was killed here leaves beside it, the next one overwrites.

    Args:
        path: of the file, not of a link to it.
        content: all that it is to say.
        mode: its permissions; the umask is taken off, as ever.
        durable: after a power failure, too, it says the one or the other. That waits for the disk.

    Raises:
        OSError: it cannot be written (of open(2), the file name is that of the new one); the file is as before.
    """
    with open(beside(path), "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
        file.write(content)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    os.replace(beside(path), path)
