"""Runs the tests of limits, of load and of attacks in full: 100,000 names, half a minute of load and of each attack.

And one that uses inode numbers again, a million times.
"""

import argparse
import os
import subprocess
import sys

FULL = {
    "CLOAKFS_MANY_NAMES": "100000",
    "CLOAKFS_LOAD_SECONDS": "30",
    "CLOAKFS_ATTACK_SECONDS": "30",
    "CLOAKFS_REUSES": "1000000",
}
TESTS = (
    "tests/mount/test_limits.py",
    "tests/mount/test_robustness.py",
    "tests/mount/hostile",
    "tests/mount/test_numbers.py",
)


def main() -> int:
    """Run the campaign; other arguments go to pytest."""
    parser = argparse.ArgumentParser(prog="scripts/campaign sizes", description=__doc__)
    _, more = parser.parse_known_args()
    return subprocess.run(
        [sys.executable, "-m", "pytest", *TESTS, *more], env=os.environ | FULL, check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
