"""Going to the background once the work is under way."""

import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

from sdnotify import SystemdNotifier

from .common import fail

Work = Callable[[Callable[[], None]], None]
"""Does something for a long time, and calls what it is given once it is ready."""


def in_foreground(work: Work, level: int, *refusals: type[Exception]) -> NoReturn:
    """Do the work here, log to the terminal, and tell systemd when it is ready (sd_notify(3)).

    Args:
        work: what to do.
        level: of messages to log.
        refusals: exceptions whose text is a message for the user.
    """
    logging.basicConfig(level=level, format="cloakfs: %(message)s", stream=sys.stderr)
    try:
        work(lambda: SystemdNotifier().notify("READY=1"))
    except refusals as exc:
        fail(str(exc), 1)
    sys.exit(0)


def in_background(work: Work, level: int, log_path: str, *refusals: type[Exception]) -> NoReturn:
    """Do the work in a process of its own, which logs to a file; end when it is ready or says why it cannot be."""
    reader, writer = os.pipe()
    if os.fork():
        os.close(writer)
        with open(reader, encoding="utf-8", errors="replace") as answer:
            said = answer.read()
        if said == "ready":
            sys.exit(0)
        fail(said or f"the daemon died; see {log_path}", 1)
    os.close(reader)
    os.setsid()
    os.chdir("/")
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    null = os.open(os.devnull, os.O_RDWR)
    log_fd = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(null, 0)
    os.dup2(log_fd, 1)
    os.dup2(log_fd, 2)
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True)

    def ready() -> None:
        os.write(writer, b"ready")
        os.close(writer)

    try:
        work(ready)
    except refusals as exc:
        os.write(writer, str(exc).encode("utf-8", "replace"))
        os._exit(1)
    except BaseException:
        logging.getLogger("cloakfs").exception("the daemon failed")
        os._exit(1)
    os._exit(0)
