"""Properties and machines try the same examples each time, so that the same code gets the same result.

`--hypothesis-profile=explore` has hypothesis choose new ones, as scripts/campaign does. Neither is about how long a
busy machine takes for an answer.
"""

import signal

import pyfuse3
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


def pytest_report_header() -> str:
    """Say whose pyfuse3 is tested."""
    how = "patched" if hasattr(pyfuse3.Operations, "fallocate") else "released"
    return f"pyfuse3: {pyfuse3.__version__} ({how})"
