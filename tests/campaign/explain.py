"""Compares what `cloakfs explain` says with what callers meet, in random trees under each policy."""

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter

from cloakfs.state.runtime import STATE_DIR
from tests.mount.conftest import mounted
from tests.mount.test_explain_agrees import FILES, agree
from tests.mount.test_stateful import CALLERS, POLICIES


def main() -> int:
    """Run the campaign."""
    parser = argparse.ArgumentParser(prog="scripts/campaign explain", description=__doc__)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    words = parser.parse_args()
    print(f"explain: seed {words.seed}", file=sys.stderr, flush=True)
    trees = -(-words.cases // (FILES * len(CALLERS) * len(POLICIES)))
    began = time.monotonic()
    met: Counter[int] = Counter()
    for policy, rules in POLICIES.items():
        base = tempfile.mkdtemp(prefix="cloakfs-test-")
        os.chmod(base, 0o755)
        real, point = os.path.join(base, "real"), os.path.join(base, "mnt")
        try:
            for path in (real, point):
                os.mkdir(path, 0o755)
            with mounted(real, point, "-o", rules.options) as m:
                met += agree(m, random.Random(f"{words.seed} {policy}"), trees)
            shutil.rmtree(os.path.join(STATE_DIR, m.key))
        finally:
            shutil.rmtree(base)
        print(f"explain: {policy}: {met.total():,} cases agree", file=sys.stderr, flush=True)
    errors = ", ".join(f"{os.strerror(error) if error else 'visible'} {count:,}" for error, count in met.items())
    print(f"{met.total():,} cases agree in {time.monotonic() - began:.0f} s ({errors}); seed {words.seed}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
