"""The wheel and the source distribution bring what an installation needs besides the code."""

import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

TOP = Path(__file__).parents[2]
IN_GIT = subprocess.run(["git", "ls-files"], cwd=TOP, capture_output=True, text=True, check=False).stdout.splitlines()

pytestmark = pytest.mark.skipif(not IN_GIT, reason="needs a clone, to know what belongs to cloakfs")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with both, built from a copy of what git knows, as `scripts/package` does."""
    place = tmp_path_factory.mktemp("distribution")
    copy = place / "copy"
    made = [f"package/made/{name}" for name in ("cloakfs.8", "bash/cloakfs", "zsh/_cloakfs", "fish/cloakfs.fish")]
    for name in [*IN_GIT, *made]:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        if name in made:
            (copy / name).write_text("made")
        elif (TOP / name).exists():
            (copy / name).write_bytes((TOP / name).read_bytes())
    subprocess.run(
        [sys.executable, "-m", "build", "--outdir", place, copy], check=True, capture_output=True,
        env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
    )  # fmt: skip
    return place


def wanted(prefix: str, suffix: str = "") -> set[str]:
    found = {name for name in IN_GIT if name.startswith(prefix) and name.endswith(suffix)}
    assert found
    return found


def test_every_package_is_listed() -> None:
    """The wheel shows it, too, but building one takes a network, which not everybody has while developing."""
    listed = tomllib.loads((TOP / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = {str(path.parent.relative_to(TOP)).replace("/", ".") for path in (TOP / "cloakfs").rglob("__init__.py")}
    assert set(listed) == found | {"cloakfs_cli"}


@pytest.mark.timeout(300)
def test_wheel(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    shared = {name.partition(".data/data/share/")[2] for name in names if ".data/data/share/" in name}
    documents = wanted("docs/") | wanted("examples/") | wanted("contrib/") | {"scripts/demo"}
    documents |= {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "LICENSE"}
    assert {name.removeprefix("doc/cloakfs/") for name in shared if name.startswith("doc/")} == documents
    assert {name for name in shared if not name.startswith("doc/")} == {
        "man/man8/cloakfs.8",
        "bash-completion/completions/cloakfs",
        "zsh/site-functions/_cloakfs",
        "fish/vendor_completions.d/cloakfs.fish",
    }
    code = {name for name in names if not name.startswith("cloakfs-")}
    folders = {"cloakfs_cli/": "cli/", "cloakfs/": "cloakfs/"}
    expected = {
        name.replace(folder, package, 1)
        for package, folder in folders.items()
        for name in wanted(folder, ".py")
        if name.startswith(folder)
    }
    assert code == expected | {"cloakfs/py.typed"}


@pytest.mark.timeout(300)
def test_source_distribution(built: Path) -> None:
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    assert {name for name in IN_GIT if (TOP / name).exists()} - names == {".ci/run", ".editorconfig", ".gitignore"}
