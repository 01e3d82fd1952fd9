"""What `ls -l` of 1,000 files costs through the kernel's server, in requests. `python -m bench` measures the time."""

from collections import Counter

import pytest

from bench.homes import HOME
from bench.over_nfs import BARE_EXPORT, CALLER, CALLER_CHECKED, EXPORTS, PLACES, PUBLIC, SQUASHED, VERSIONS, site
from tests.nfs.knfsd.fixtures import NfsHost

FILES = 1000

# Requests to the daemon for each file: its attributes are read twice, or three times if the machine is busy:
# nothing may be remembered of what some caller may not see. Where that is nothing, no file is asked for by itself.
MOST = 4.1
# Requests beside those that list: a few for each directory on the way.
MOST_BESIDE = 25


def check(export: str, kind: str, counts: Counter[str]) -> None:
    """Check the number of requests of one listing."""
    assert counts["lookup"] + counts["getattr"] <= MOST * FILES
    # Names and attributes come in large batches, some 45 of them; in smaller ones where an answer takes long (`Turns`).
    assert counts["readdir"] <= FILES / 8
    if export.endswith("subtree_check"):
        # The kernel asks for the home once for each request to the server, and for each name that lies directly in it.
        is_home = export == CALLER_CHECKED and kind == HOME
        assert counts["getattr"] <= (1.1 * FILES if is_home else 40)
        assert counts["lookup"] + counts["getxattr"] <= 20
    if export == SQUASHED or (export == CALLER and kind == PUBLIC):
        assert counts.total() - counts["readdir"] <= MOST_BESIDE, counts


@pytest.mark.timeout(900)  # a machine may be slow
@pytest.mark.parametrize("kind", PLACES)
def test_ls_l_of_a_thousand_files(kind: str, nfs_host: NfsHost) -> None:
    exports = [export for export in EXPORTS if export != BARE_EXPORT]
    with site(kind, FILES, exports) as made:
        for export in exports:
            for version in VERSIONS:
                for cold in (True, False):
                    counts = made.list_once(export, version, cold=cold).requests
                    print(f"ls -l over NFSv{version}, {kind}, {'cold' if cold else 'warm'}, {export}: {dict(counts)}")
                    check(export, kind, counts)
