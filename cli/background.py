"""Moves a command to the background once its work is under way."""

import contextlib
import logging
import os
import queue
import signal
import sys
from collections.abc import Callable
from logging.handlers import QueueHandler, QueueListener, SysLogHandler
from typing import NoReturn

from cloakfs.background.logfile import Formatter
from cloakfs.messages import UserError

from .common import fail
from .exits import FAILED

SYSLOG = "syslog"
SYSLOG_SOCKET = "/dev/log"
_MOST_MESSAGES = 1000

Work = Callable[[Callable[[], None]], None]
"""A function that works for a long time, and calls its argument once it is ready."""


_inherited: frozenset[int] = frozenset()


def record_inherited() -> None:
    """Note which descriptors are open; must be called first. A process that stays for long closes them later.

    They were opened by others, but cannot be closed at once: a configuration may be read from a descriptor
    (`--exports /dev/fd/3`).
    """
    global _inherited  # noqa: PLW0603  (it is the process's)
    with os.scandir("/proc/self/fd") as entries:
        numbers = {int(entry.name) for entry in entries}
    # The descriptor of the listing itself is already closed.
    _inherited = frozenset(fd for fd in numbers if fd > 2 and _is_open(fd))


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def _close_inherited() -> None:
    """Close the inherited descriptors, which would hold a lock, a pipe or a mount for the daemon's life."""
    for fd in _inherited:
        with contextlib.suppress(OSError):
            os.close(fd)


def open_for_us(path: str, flags: int) -> int:
    """Open a file in the directory of logs and locks; the command ends if it cannot be written."""
    try:
        os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
        return os.open(path, flags | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        fail(f"{exc.filename}: {exc.strerror}", FAILED)


def in_foreground(work: Work, level: int) -> NoReturn:
    """Do the work in this process, log to the terminal, and notify systemd when it is ready (sd_notify(3)).

    Args:
        work: the work to do.
        level: the level of messages to log.
    """
    from sdnotify import SystemdNotifier  # noqa: PLC0415  (no other command needs it)

    handler = logging.StreamHandler()
    handler.setFormatter(Formatter("cloakfs: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])
    _close_inherited()
    try:
        work(lambda: SystemdNotifier().notify("READY=1"))
    except UserError as exc:
        fail(str(exc), FAILED)
    sys.exit(0)


def in_background(work: Work, level: int, log_path: str, *, syslog: bool = False) -> NoReturn:
    """Do the work in a process of its own, which logs to a file; end when it is ready, or reports why it is not.

    Args:
        work: the work to do.
        level: the level of messages to log.
        log_path: the file.
        syslog: log to syslog or the journal instead; the file gets only what Python itself has to say.
    """
    log_fd = open_for_us(log_path, os.O_WRONLY | os.O_APPEND)
    reader, writer = os.pipe()
    if os.fork():
        os.close(writer)
        with open(reader, encoding="utf-8", errors="replace") as answer:
            said = answer.read()
        if said == "ready":
            sys.exit(0)
        fail(said or f"the daemon died; see {log_path}", FAILED)
    os.close(reader)
    _close_inherited()
    os.setsid()
    os.chdir("/")
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(log_fd, 1)
    os.dup2(log_fd, 2)
    for fd in {null, log_fd} - {0, 1, 2}:
        os.close(fd)
    to_file = logging.StreamHandler()
    to_file.setFormatter(Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    handler: logging.Handler = to_file
    flush: Callable[[], None] = to_file.flush
    if syslog:
        try:
            handler, flush = _syslog()
        except OSError as exc:
            os.write(writer, f"log={SYSLOG}: {SYSLOG_SOCKET}: {exc.strerror}".encode())
            os._exit(FAILED)
    logging.basicConfig(level=level, handlers=[handler], force=True)

    is_ready = False

    def ready() -> None:
        nonlocal is_ready
        is_ready = True
        os.write(writer, b"ready")
        os.close(writer)

    try:
        work(ready)
    except BaseException as exc:
        if isinstance(exc, UserError) and not is_ready:
            os.write(writer, str(exc).encode("utf-8", "replace"))
        else:
            logging.getLogger("cloakfs").exception("the daemon failed")
        flush()
        os._exit(FAILED)
    flush()
    os._exit(0)


def _syslog() -> tuple[logging.Handler, Callable[[], None]]:
    """Return a handler for syslog or the journal, and what sends the rest.

    A thread does the sending, since syslog may keep its senders waiting. Messages beyond what it has room for are lost.

    Raises:
        OSError: there is no syslog.
    """
    os.stat(SYSLOG_SOCKET)  # the handler would ignore that
    target = SysLogHandler(SYSLOG_SOCKET, SysLogHandler.LOG_DAEMON)
    target.ident = f"cloakfs[{os.getpid()}]: "
    target.append_nul = False
    messages: queue.Queue[logging.LogRecord] = queue.Queue(_MOST_MESSAGES)
    listener = QueueListener(messages, target)
    listener.start()
    handler = QueueHandler(messages)
    handler.setFormatter(Formatter("%(message)s"))
    return handler, listener.stop
