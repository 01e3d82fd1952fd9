"""For how long is attacked, and what cloakfs is compared with.

Only cloakfs has to answer rightly and soon. How the same attacks fare without it, on the bare tree and through bindfs,
is for a report alone. It is made when CLOAKFS_ATTACK_SECONDS says for how long each attack lasts (30, for instance).
"""

import os
import shutil

import pytest

SECONDS = float(os.environ.get("CLOAKFS_ATTACK_SECONDS", "1"))

OTHERS = ["bindfs", "bare"] if "CLOAKFS_ATTACK_SECONDS" in os.environ else []
"""Kinds of what cloakfs is compared with."""

KINDS = ["cloakfs", *OTHERS]


def require(kind: str) -> None:
    """Skip the test if this machine does not have a kind of file system."""
    if kind == "bindfs" and shutil.which("bindfs") is None:
        pytest.skip("bindfs is not installed")
