"""Source packages of Debian, from wherever apt gets this machine's packages."""

import os
import subprocess
import tempfile

_SECONDS = 120


class NoSource(Exception):
    """A source package cannot be had; the text is one line that says why."""


def download(package: str, directory: str) -> None:
    """Download the files of a source package into a directory.

    apt's own lists are left alone: most machines are not set up for source packages.

    Raises:
        NoSource: apt has no such package, or does not get it.
    """
    archives = _apt("apt-get", "indextargets", "--format", "$(SITE) $(RELEASE) $(COMPONENT)", "Created-By: Packages")
    with tempfile.TemporaryDirectory() as state:
        with open(os.path.join(state, "sources.list"), "w", encoding="utf-8") as file:
            file.writelines(f"deb-src {archive}\n" for archive in sorted(set(archives.splitlines())))
        os.makedirs(os.path.join(state, "lists", "partial"))
        options = (
            *("-o", f"Dir::Etc::sourcelist={state}/sources.list", "-o", "Dir::Etc::sourceparts=-"),
            *("-o", f"Dir::State::lists={state}/lists", "-o", "APT::Sandbox::User=root"),
        )
        # An archive without sources is no reason to stop: then the package is not found.
        _apt("apt-get", "-qq", *options, "update", must_succeed=False)
        _apt("apt-get", "-qq", *options, "source", "--download-only", package, cwd=directory)


def _apt(*command: str, cwd: str = "/", must_succeed: bool = True) -> str:
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise NoSource(f"{command[0]}: {exc}") from exc
    if done.returncode and must_succeed:
        raise NoSource(f"{command[0]}: {' '.join(done.stderr.split()) or f'exit status {done.returncode}'}")
    return done.stdout
