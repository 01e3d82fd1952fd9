"""Properties and machines try the same examples each time, so that the same code gets the same result.

`--hypothesis-profile=explore` has hypothesis choose new ones, as scripts/campaign does. Neither is about how long a
busy machine takes for an answer.
"""

import signal
from pathlib import Path

import pyfuse3
import pytest
from hypothesis import HealthCheck, settings

_ANY_TIME = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("suite", _ANY_TIME, derandomize=True)
settings.register_profile("explore", _ANY_TIME)
settings.load_profile("suite")

# SIGTERM and a closed terminal end the run as Ctrl-C does: through the clean-up of every test. A shell that starts the
# suite in the background has it ignore SIGINT, and what the tests start would inherit that.
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:  # not below nohup(1)
    signal.signal(signal.SIGHUP, signal.default_int_handler)


# tests/mount/test_sessions.py mounts over these, and what it starts would not find the code that it is to test.
COVERED = (Path("/srv"), Path("/run"), Path("/var/log"), Path("/var/lib/cloakfs"), Path("/etc/cloakfs"))


def pytest_configure() -> None:
    """Refuse a checkout where tests mount something else over it."""
    checkout = Path(__file__).resolve().parent.parent
    for covered in COVERED:
        if checkout.is_relative_to(covered.resolve()):
            raise pytest.UsageError(
                f"{checkout} lies in {covered}, over which tests mount: move the checkout elsewhere"
            )


def pytest_report_header() -> str:
    """Say whose pyfuse3 is tested."""
    how = "patched" if hasattr(pyfuse3.Operations, "fallocate") else "released"
    return f"pyfuse3: {pyfuse3.__version__} ({how})"
