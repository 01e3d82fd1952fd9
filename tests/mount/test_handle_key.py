"""The key of file handles: what it brings, what it must not change, and that nobody else gets to know it."""

import json
import os
import shutil
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cloakfs.state import handlekey
from cloakfs.state.runtime import STATE_DIR, mount_key
from tests.mount.conftest import COMMAND, Mount, mounted, run
from tests.mount.loopfs import attached, filesystem
from tests.mount.test_numbers import CLOAKED, COMPUTED, NULL, grow
from tests.mount.test_trees import by_handle, content_or_error, handle_of

FOLDER = os.path.dirname(handlekey.PATH)


@pytest.fixture(autouse=True)
def folder() -> Iterator[None]:
    """Cover /etc/cloakfs by an empty directory."""
    was_there = os.path.isdir(FOLDER)
    with attached("tmpfs", FOLDER, "-t", "tmpfs"):
        yield
    if not was_there:
        os.rmdir(FOLDER)


def made_key() -> str:
    """Make the key; return its fingerprint."""
    told = json.loads(run("export", "key", "--json").stdout)
    assert told["made"]
    assert stat.S_IMODE(os.stat(handlekey.PATH).st_mode) == 0o600
    return str(told["fingerprint"])


def test_it_is_made_once_and_shown_by_its_fingerprint_alone() -> None:
    fingerprint = made_key()
    content = Path(handlekey.PATH).read_text()
    done = run("export", "key")
    assert done.stdout == f"{handlekey.PATH}: fingerprint {fingerprint}\n"
    assert Path(handlekey.PATH).read_text() == content
    assert json.loads(content)["key"] not in done.stdout + done.stderr
    os.unlink(handlekey.PATH)
    assert made_key() != fingerprint


def test_several_that_make_it_at_once_make_one() -> None:
    for _ in range(5):
        makers = [subprocess.Popen([*COMMAND, "export", "key"], stdout=subprocess.PIPE, text=True) for _ in range(3)]
        said = [maker.communicate()[0] for maker in makers]
        assert [maker.returncode for maker in makers] == [0, 0, 0]
        assert len({line.rpartition(" ")[2] for line in said}) == 1
        assert sum("made" in line for line in said) == 1
        os.unlink(handlekey.PATH)
        assert os.listdir(FOLDER) == []


def test_a_link_that_leads_nowhere_is_told() -> None:
    os.symlink("/nowhere/key", handlekey.PATH)
    done = run("export", "key", check=False)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "leads nowhere" in done.stderr


def lose_state(source: str, path: str) -> None:
    shutil.rmtree(os.path.join(STATE_DIR, mount_key(source, path)))


@pytest.mark.parametrize("options", [NULL, f"{CLOAKED},knfsd", "no_root_squash,views=root daemon nobody"])
@pytest.mark.parametrize("kind", COMPUTED)
def test_handles_outlive_the_loss_of_all_state(kind: str, options: str, base: str) -> None:
    made_key()
    path = os.path.join(base, "mnt")
    os.mkdir(path)
    views = ["@root", "@daemon", "@nobody"] if "views" in options else [""]
    with filesystem(kind, base) as source:
        paths = grow(source, 5, 5)
        os.chmod(os.path.join(source, "top"), 0o755)
        with mounted(source, path, "-o", options) as m:
            places = [os.path.join(view, it) for view in views for it in paths]
            handles = {place: handle_of(m.at(place)) for place in places}
            assert len(set(handles.values())) == len(places)
        for _ in range(2):
            lose_state(source, path)
            with mounted(source, path, "-o", options) as m:
                for place in reversed(places):  # so that the views are used in another order
                    handle_of(m.at(place))
                assert {place: handle_of(m.at(place)) for place in places} == handles
            lose_state(source, path)
            with mounted(source, path, "-o", options) as m:
                for place, handle in handles.items():
                    assert place.encode().endswith(by_handle(m.path, handle))


def test_a_mount_that_had_a_secret_keeps_its_handles(base: str) -> None:
    """Before the key was made, afterwards, and when its state is lost then; the secret leaves its state."""
    path = os.path.join(base, "mnt")
    os.mkdir(path)
    with filesystem("ext4", base) as source:
        (first, *_) = grow(source, 1, 1)
        with mounted(source, path, "-o", NULL) as m:
            handle = handle_of(m.at(first))
            made_key()
        secret = bytes.fromhex(json.loads(Path(handlekey.PATH).read_text())["mounts"][mount_key(source, path)])
        index = Path(STATE_DIR, mount_key(source, path), "nodes.sqlite")
        with mounted(source, path, "-o", NULL) as m:
            assert by_handle(m.path, handle) == first.encode()
        lose_state(source, path)
        with mounted(source, path, "-o", NULL) as m:
            assert by_handle(m.path, handle) == first.encode()
        assert secret not in index.read_bytes()


def test_without_the_key_nothing_is_served_as_if_it_were_the_same(base: str, tree: str) -> None:
    path = os.path.join(base, "mnt")
    os.mkdir(path)
    Path(tree, "file").write_bytes(b"content")
    made_key()
    with mounted(tree, path, "-o", f"{NULL},knfsd") as m:
        handle = handle_of(m.at("file"))
    content = Path(handlekey.PATH).read_bytes()
    os.unlink(handlekey.PATH)
    done = run("mount", tree, path, "-o", "knfsd", check=False)
    assert done.returncode == 1
    assert "the key that its file handles were made with is missing; put /etc/cloakfs/key back" in done.stderr
    assert f"cloakfs prune {path}" in done.stderr
    assert done.stderr.count("\n") == 1
    with mounted(tree, path, "-o", NULL) as m:  # a local mount has other handles then
        assert content_or_error(m.path, handle) != b"content"
        assert "is missing" in m.log
    made_key()
    with mounted(tree, path, "-o", f"{NULL},knfsd") as m:
        assert content_or_error(m.path, handle) != b"content"
        assert "the key of file handles is another one now" in m.log
    Path(handlekey.PATH).write_bytes(content)
    with mounted(tree, path, "-o", f"{NULL},knfsd") as m:
        assert by_handle(m.path, handle) == b"content"
    os.unlink(handlekey.PATH)
    run("prune", path)
    with mounted(tree, path, "-o", f"{NULL},knfsd") as m:
        assert Path(m.at("file")).read_bytes() == b"content"


def readable_by_others() -> None:
    os.chmod(handlekey.PATH, 0o640)


def of_another_user() -> None:
    os.chown(handlekey.PATH, 2001, 0)


def shorter() -> None:
    os.truncate(handlekey.PATH, 40)


def empty() -> None:
    os.truncate(handlekey.PATH, 0)


def a_list() -> None:
    Path(handlekey.PATH).write_text("[]")


def nested() -> None:
    Path(handlekey.PATH).write_text("[" * 100_000)


def with_an_odd_name() -> None:
    content = json.loads(Path(handlekey.PATH).read_text())
    Path(handlekey.PATH).write_text(json.dumps(content | {"mounts": {"\ud800": "00" * 32}}))


def a_fifo() -> None:
    os.unlink(handlekey.PATH)
    os.mkfifo(handlekey.PATH, 0o600)


def of_another_version() -> None:
    content = json.loads(Path(handlekey.PATH).read_text())
    Path(handlekey.PATH).write_text(json.dumps(content | {"version": 99}))


def with_a_shorter_secret() -> None:
    content = json.loads(Path(handlekey.PATH).read_text())
    Path(handlekey.PATH).write_text(json.dumps(content | {"mounts": {"name": "00"}}))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (readable_by_others, "uid 0 or others may read it (mode 0640), and could forge file handles"),
        (of_another_user, "uid 2001 or others may read it (mode 0600), and could forge file handles"),
        (shorter, "is damaged; put a copy of it back"),
        (empty, "is damaged; put a copy of it back"),
        (a_list, "is damaged; put a copy of it back"),
        (with_a_shorter_secret, "is damaged; put a copy of it back"),
        (nested, "is damaged; put a copy of it back"),
        (with_an_odd_name, "is damaged; put a copy of it back"),
        (a_fifo, "is not a regular file"),
        (of_another_version, "version 99 is not known to this cloakfs"),
    ],
)
def test_a_file_that_cannot_be_used(
    change: Callable[[], None], said: str, tree: str, mount: Callable[..., Mount], base: str
) -> None:
    made_key()
    change()
    os.mkdir(f"{base}/mnt")
    for command in (("export", "key"), ("mount", tree, f"{base}/mnt"), ("mount", tree, f"{base}/mnt", "-o", "knfsd")):
        done = run(*command, check=False)
        assert (done.returncode, done.stderr.count("\n")) == (1, 1)
        assert f"{handlekey.PATH}: {said}" in done.stderr
    with pytest.raises(AssertionError):
        mount()


def test_two_machines_give_the_same_handles(base: str) -> None:
    """The same disk, configuration and key, and nothing else: here, one after the other, with other numbers before."""
    made_key()
    path = os.path.join(base, "mnt")
    os.mkdir(path)
    with filesystem("ext4", base) as source:
        paths = grow(source, 3, 3)
        found = []
        for order in (paths, paths[::-1]):
            with mounted(source, path, "-o", f"{CLOAKED},knfsd") as m:
                found.append({it: (handle_of(m.at(it)), os.stat(m.at(it)).st_ino) for it in order})
            lose_state(source, path)
        assert found[0] == found[1]
