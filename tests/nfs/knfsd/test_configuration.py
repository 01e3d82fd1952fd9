"""The configuration that `plan` shows, read by the real exportfs."""

import os
import re
from pathlib import Path

import pytest

from tests.nfs.knfsd.fixtures import NfsHost, Service, sh

GOLDEN = Path(__file__).parents[2] / "unit" / "golden"
FILE = "/etc/exports.d/golden.exports"


def etab() -> dict[str, str]:
    lines = Path("/var/lib/nfs/etab").read_text().splitlines()
    return dict(line.split("\t", 1) for line in lines)


@pytest.mark.parametrize("name", sorted(path.name for path in GOLDEN.glob("knfsd-*.txt")))
def test_exportfs_reads_it(nfs_host: NfsHost, service: Service, name: str) -> None:
    # The guest has no service that knows the addresses of hosts and members of groups.
    text = re.sub(r"(?m)(?<= )[a-z*@][a-z.*-]*[a-z](?=\()", "192.0.2.7", (GOLDEN / name).read_text())
    before = etab()
    os.makedirs(os.path.dirname(FILE), exist_ok=True)
    Path(FILE).write_text(text)
    try:
        for line in text.splitlines():
            os.makedirs(line.split()[0], exist_ok=True)
        said = sh("sh", "-c", "exportfs -ra 2>&1", check=False)
        assert "unknown" not in said, said
        assert "syntax" not in said, said
        read = etab()
        for line in text.splitlines():
            path, client, options = re.fullmatch(r"(\S+) (\S+)\((.*)\)", line).groups()  # type: ignore[union-attr]
            assert path in read, (line, said)
            words = read[path].partition("(")[2].rstrip(")").split(",")
            assert read[path].startswith(client)
            for option in options.split(","):
                assert option in (*words, "mp") or option.replace("mp", "mountpoint") in words, (option, words)
            # The commands that really configure it say the same.
            sh("exportfs", "-u", f"[{client}]:{path}" if ":" in client else f"{client}:{path}")
            sh("exportfs", "-o", options, f"[{client}]:{path}" if ":" in client else f"{client}:{path}")
            assert etab()[path] == read[path]
    finally:
        os.unlink(FILE)
        for line in text.splitlines():
            os.rmdir(line.split()[0])
        sh("exportfs", "-ra", check=False)
        # That has taken back what the service exports, too; its guard sees to that.
        Path("/var/lib/nfs/etab").write_text("".join(f"{path}\t{rest}\n" for path, rest in before.items()))
