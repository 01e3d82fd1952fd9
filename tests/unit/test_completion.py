"""The shells complete commands, options and arguments."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

BIN = os.path.dirname(sys.executable)


def completion(shell: str) -> str:
    """What click makes for a shell."""
    done = subprocess.run(
        [f"{BIN}/cloakfs"], env={**os.environ, "_CLOAKFS_COMPLETE": f"{shell}_source"}, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    return done.stdout


def played(shell: str, script: str, cwd: Path, *options: str) -> list[str]:
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell}")
    done = subprocess.run(
        [shell, *options, "-c", script], cwd=cwd, env={**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stderr == ""
    return done.stdout.splitlines()


def in_bash(cwd: Path, *words: str) -> list[str]:
    script = completion("bash") + (
        f"COMP_WORDS=({' '.join(repr(word) for word in words)}); COMP_CWORD={len(words) - 1}\n"
        '_cloakfs_completion cloakfs; printf "%s\\n" "${COMPREPLY[@]}"\n'
        "complete -p cloakfs\n"
    )
    *found, declared = played("bash", script, cwd, "--norc")
    assert declared.endswith("-F _cloakfs_completion cloakfs")
    return [line for line in found if line]


def test_bash(tmp_path: Path) -> None:
    (tmp_path / "lab.exports").touch()
    assert in_bash(tmp_path, "cloakfs", "ex") == ["export", "explain", "exposure"]
    assert in_bash(tmp_path, "cloakfs", "export", "re") == ["reload"]
    assert in_bash(tmp_path, "cloakfs", "export", "up", "--server", "g") == ["ganesha"]
    assert in_bash(tmp_path, "cloakfs", "ben") == []  # it is told where to go, but not offered
    assert "--dry-run" in in_bash(tmp_path, "cloakfs", "prune", "--")
    assert in_bash(tmp_path, "cloakfs", "umount", "/no such") == []


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("mount /sr", "dir,/sr"),
        ("mount /srv /mn", "dir,/mn"),
        ("mount /srv /mnt --exports la", "file,la"),
        ("check la", "file,la"),
        ("explain a", "file,a"),
        ("table a", "dir,a"),
        ("prune /mnt/o", "dir,/mnt/o"),
    ],
)
def test_the_shell_is_told_what_to_complete_by_itself(words: str, kind: str) -> None:
    asked = {
        "_CLOAKFS_COMPLETE": "bash_complete",
        "COMP_WORDS": f"cloakfs {words}",
        "COMP_CWORD": str(words.count(" ") + 1),
    }
    done = subprocess.run([f"{BIN}/cloakfs"], env={**os.environ, **asked}, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [kind]


def test_fish(tmp_path: Path) -> None:
    script = completion("fish")
    assert [line.split("\t")[0] for line in played("fish", f'{script}complete -C "cloakfs ex"', tmp_path, "-N")] == [
        "explain",
        "export",
        "exposure",
    ]


def test_zsh(tmp_path: Path) -> None:
    (tmp_path / "_cloakfs").write_text(completion("zsh"))
    script = "fpath=($PWD $fpath); autoload -Uz compinit; compinit -D -u; print $_comps[cloakfs]; autoload +X _cloakfs"
    assert played("zsh", script, tmp_path, "-f") == ["_cloakfs"]
