"""A log that was rotated is begun anew."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import os, sys
from cloakfs.background.logfile import follow_rotation
path = sys.argv[1]
def say(text):
    follow_rotation(path)
    print(text, file=sys.stderr, flush=True)
    print(text, flush=True)
say("one")
say("two")
os.rename(path, path + ".1")
say("three")
os.rename(path, path + ".2")
os.symlink("/dev/null", path)
say("four")
os.unlink(path)
"""


def test_what_is_said_goes_to_the_file_that_has_the_name(tmp_path: Path) -> None:
    log = tmp_path / "some.log"
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(log)], capture_output=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    assert Path(f"{log}.1").read_text() == "one\none\ntwo\ntwo\n"
    # A link is not followed: what is said stays where it was going.
    assert Path(f"{log}.2").read_text() == "three\nthree\nfour\nfour\n"
    assert os.stat(f"{log}.1").st_mode & 0o777 == 0o600
