import os
import signal

import pytest

from cloakfs import linux


def test_a_thread_apart_has_no_descriptors_and_takes_no_signals() -> None:
    # Python's signal handler writes to a descriptor of the process, in whichever thread the kernel chooses.
    opened, blocked = linux.apart(
        lambda: (os.listdir("/proc/thread-self/fd"), signal.pthread_sigmask(signal.SIG_BLOCK, []))
    )
    assert set(opened) <= {"0", "1", "2", "3"}  # standard streams, and the listing itself
    assert blocked >= signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
    assert signal.SIGALRM not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_what_fails_in_a_thread_apart_fails_here() -> None:
    with pytest.raises(FileNotFoundError):
        linux.apart(os.stat, "/nonexistent")
