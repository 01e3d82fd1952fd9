"""Runs all tests with the released pyfuse3, in a copy of the checkout: `scripts/test` has the patched one.

What is committed is tested. It takes as long as `scripts/test`, and some minutes to set up.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

TOP = Path(__file__).parents[2]


def main() -> int:
    """Run the campaign."""
    parser = argparse.ArgumentParser(prog="scripts/campaign released", description=__doc__)
    parser.add_argument("tests", nargs="*", help="for scripts/test: tests/mount/test_listings.py, for example")
    words = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="cloakfs-test-", ignore_cleanup_errors=True) as base:
        copy = Path(base, "cloakfs")
        subprocess.run(["git", "clone", "--quiet", TOP, copy], check=True)
        subprocess.run([copy / "scripts/setup", "--test", "--released-pyfuse3"], check=True)
        return subprocess.run([copy / "scripts/test", *words.tests], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
