"""scripts/commits checks the subjects of new commits, and leaves old history alone."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

TOP = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.skipif(not (TOP / ".venv/bin/gitlint").exists(), reason="needs gitlint (scripts/setup --test)"),
    pytest.mark.skipif(not shutil.which("git"), reason="needs git"),
]

GOOD = [
    "Keep a directory's lock while its names are read",
    "Address what a review found",
    "Need no lock for names that are absent",
    "Bring the figures up to date",
    "Re-read exports.d where only its time has changed",
    "Say " + "w" * 68,  # 72 columns
]
BAD = [
    "Say " + "w" * 69,
    "keep a lock",
    "Fixed a lock",
    "Fixes a lock",
    "Fixing a lock",
    "The lock is kept",
    "What keeps a lock",
    "Documents: name the lock",
    "Keep a lock.",
    "Lock",
]


def git(place: Path, *words: str) -> str:
    alone = {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_NOSYSTEM": "1"}
    who = {f"GIT_{role}_{what}": "ann@example.org" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    done = subprocess.run(
        ["git", *words], cwd=place, env={**os.environ, **alone, **who}, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def commit(place: Path, subject: str) -> str:
    git(place, "commit", "--quiet", "--allow-empty", "--message", subject)
    return git(place, "rev-parse", "HEAD")


def check(place: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([place / "scripts/commits"], capture_output=True, text=True, check=False)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A repository with two old commits, the second of which is the last before the rules."""
    place = tmp_path / "clone"
    (place / "scripts").mkdir(parents=True)
    shutil.copy(TOP / ".gitlint", place)
    (place / ".venv").symlink_to(TOP / ".venv")
    git(place, "init", "--quiet")
    commit(place, "The first commit was here before the rules")
    before = commit(place, "So was the second")
    text = (TOP / "scripts/commits").read_text()
    (line,) = (line for line in text.splitlines() if line.startswith("before="))
    script = place / "scripts/commits"
    script.write_text(text.replace(line, f"before={before}"))
    script.chmod(0o755)
    return place


def test_subjects(clone: Path) -> None:
    assert (check(clone).returncode, check(clone).stderr) == (0, "")  # there are no new commits
    for subject in GOOD:
        commit(clone, subject)
    assert check(clone).returncode == 0, check(clone).stderr
    refused = [commit(clone, subject) for subject in BAD]
    result = check(clone)
    assert result.returncode == 1
    named = [line.split()[1].rstrip(":") for line in result.stderr.splitlines() if line.startswith("Commit ")]
    assert sorted(named) == sorted(name[:10] for name in refused)


def test_commits_of_an_earlier_version_are_not_checked(clone: Path) -> None:
    commit(clone, "This came with a version")
    assert check(clone).returncode == 1
    git(clone, "tag", "v1")
    assert check(clone).returncode == 0
    commit(clone, "This comes after it")
    assert check(clone).returncode == 1


def test_a_shallow_clone_has_its_last_commit_checked(clone: Path) -> None:
    commit(clone, "This is too far below to be checked")
    commit(clone, "Keep what is fetched small")
    shallow = clone.parent / "shallow"
    git(clone.parent, "clone", "--quiet", "--depth=1", clone.as_uri(), "shallow")
    shutil.copytree(clone / "scripts", shallow / "scripts")
    shutil.copy(clone / ".gitlint", shallow)
    (shallow / ".venv").symlink_to(TOP / ".venv")
    assert check(shallow).returncode == 0
    commit(shallow, "This is checked")
    assert check(shallow).returncode == 1
    commit(shallow, f"Merge {'0' * 40} into {'1' * 40}")
    assert check(shallow).returncode == 0


def test_without_a_repository_there_is_nothing_to_check(clone: Path) -> None:
    shutil.rmtree(clone / ".git")
    assert check(clone).returncode == 0
