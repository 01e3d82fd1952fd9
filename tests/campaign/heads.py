"""Runs all tests of two heads of one CephFS, with five minutes of work through both: `scripts/campaign heads`."""

import argparse
import os
import subprocess
import sys


def main() -> int:
    """Run the campaign; other arguments go to pytest."""
    parser = argparse.ArgumentParser(prog="scripts/campaign heads", description=__doc__)
    parser.add_argument("--seconds", type=float, default=300.0, help="of work in each test (default: %(default)s)")
    words, more = parser.parse_known_args()
    environment = os.environ | {"CLOAKFS_HEADS_SECONDS": f"{words.seconds:g}"}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-s", "tests/heads", *more], env=environment, check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
