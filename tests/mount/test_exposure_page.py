"""The page of `cloakfs exposure --html`: it says what the report says, links lead somewhere, and a browser shows it."""

import json
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.mount.conftest import COMMAND, Mount, run
from tests.mount.test_exposure import exports, put

BROWSERS = ("chromium", "chromium-headless-shell", "google-chrome", "chrome")

TRAP = b"<img src=x onerror=alert(1)>\xff\x1b"


class Page(HTMLParser):
    """The elements of a page: how many of each name, ids, and what links lead to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: dict[str, int] = {}
        self.ids: list[str] = []
        self.links: list[str] = []
        self.colours: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements[tag] = self.elements.get(tag, 0) + 1
        told = dict(attrs)
        self.ids += [told["id"] or ""] if "id" in told else []
        self.links += [told["href"] or ""] if "href" in told else []
        if tag == "td" and (told.get("style") or "").startswith("background"):
            self.colours.append(told["style"] or "")
        assert not any(name in ("src", "srcset", "action") or name.startswith("on") for name in told), told

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture
def page(base: str, tree: str) -> str:
    """A page about a home, a project that is open to its group, and a file with a name that is a trap."""
    os.chmod(tree, 0o755)
    for name, uid, gid, mode in (("home", 20001, 20001, 0o700), ("project", 0, 3042, 0o770)):
        os.mkdir(os.path.join(tree, name))
        put(os.path.join(tree, name, "file"), uid, gid, 0o600 if uid else 0o660)
        os.chown(os.path.join(tree, name), uid, gid)
        os.chmod(os.path.join(tree, name), mode)
    put(os.fsdecode(os.path.join(os.fsencode(tree), b"project", TRAP)), 0, 3042, 0o660, size=100)
    at = exports(base, f"{tree} lab(rw,range_map=uid 1000 1999 map 20000)", f"{tree} office(ro)")
    path = os.path.join(base, "page.html")
    run("exposure", at, "--html", path)
    return path


def test_a_page_says_what_the_report_says_and_every_link_leads_somewhere(base: str, page: str) -> None:
    text = Path(page).read_text(encoding="utf-8")
    of = Page(text)
    assert {link.removeprefix("#") for link in of.links} <= set(of.ids)
    assert len(of.ids) == len(set(of.ids))
    report = json.loads(run("exposure", "--json", os.path.join(base, "x.exports")).stdout)["entries"][0]
    for row in report["identities"]:
        assert f"{row['name']} ← {row['client_uids']}" in of.text
        assert all(row["worst"][area]["steps"][-1]["why"] in of.text for area in row["worst"])
    # There is a coloured cell for each area of which an identity knows something.
    rows = [report["anybody"], *report["identities"]]
    assert len(of.colours) > sum(len(row["areas"]) + len(row["owners"]) for row in rows)
    assert "claimed groups" in of.text


def test_a_page_needs_nothing_else_and_runs_nothing(page: str) -> None:
    text = Path(page).read_text(encoding="utf-8")
    assert not any(word in text for word in ("http:", "https:", "@import", "url("))
    assert not {"script", "img", "link", "iframe", "object", "form"} & Page(text).elements.keys()
    assert "<img src=x onerror=alert(1)>\\377\\033" in Page(text).text


@pytest.fixture
def browser() -> str:
    """The program of a headless Chromium."""
    found = os.environ.get("CLOAKFS_CHROMIUM") or next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip("NOT TESTED IN A BROWSER: there is no Chromium (apt install chromium, or set CLOAKFS_CHROMIUM)")
    return found


def in_browser(browser: str, *arguments: str) -> str:
    with tempfile.TemporaryDirectory() as profile:
        done = subprocess.run(
            [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}",
             "--host-resolver-rules=MAP * ~NOTFOUND", *arguments],
            capture_output=True, text=True, check=True, timeout=120,
        )  # fmt: skip
    return done.stdout


def test_a_browser_finds_the_same_elements_and_takes_no_name_for_markup(browser: str, page: str) -> None:
    met = Page(in_browser(browser, "--dump-dom", f"file://{page}"))
    written = Page(Path(page).read_text(encoding="utf-8"))
    for tag in ("table", "tr", "th", "td", "a", "div"):
        assert met.elements[tag] == written.elements[tag], tag
    assert met.ids == written.ids
    assert not {"script", "img"} & met.elements.keys()


def test_a_browser_shows_the_picture_and_where_a_cell_leads(browser: str, page: str, tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image")

    def coloured(address: str, colour: tuple[int, int, int]) -> int:
        """How many pixels have about this colour."""
        shot = tmp_path / "shot.png"
        in_browser(browser, "--hide-scrollbars", "--window-size=1200,3000", f"--screenshot={shot}", address)
        pixels = image.imread(str(shot))[:, :, :3] * 255
        return int((abs(pixels - colour).max(axis=2) < 6).sum())

    red, highlighted = (241, 58, 39), (255, 248, 239)
    assert coloured(f"file://{page}", red) > 2000  # what can be changed
    assert coloured(f"file://{page}", highlighted) < 500
    target = next(link for link in Page(Path(page).read_text()).links if link.startswith("#e0-0-"))
    assert coloured(f"file://{page}{target}", highlighted) > 2000  # why it can be


def commands(page: str) -> list[str]:
    found = re.findall(r"<code>(cloakfs explain .*?)</code>", Path(page).read_text(encoding="utf-8"))
    assert found
    return [unescape(command) for command in found]


def check_commands(page: str) -> None:
    """Every command that the page prints runs in a shell as it stands, and finds what the page speaks of."""
    for command in commands(page):
        words = shlex.join(COMMAND)
        done = subprocess.run(
            ["bash", "-c", command.replace("cloakfs", words, 1)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, (command, done.stdout, done.stderr)


ENTRIES = {
    "caller views": ("rw,range_map=uid 1000 1999 map 1", "knfsd"),
    "a view": ("rw,views=1:1", "knfsd"),
    "several views": ("rw,views=1:1 0:3042", "knfsd"),
    "a range of views": ("rw,views=1-3", "knfsd"),
    "nfs-ganesha": ("rw,all_squash,anonuid=1,anongid=1", "ganesha"),
    "views of nfs-ganesha": ("rw,views=1:1 0:3042", "ganesha"),
}


@pytest.mark.parametrize("given", ["file", "folder"])
@pytest.mark.parametrize("kind", ENTRIES)
def test_the_commands_on_a_page_say_the_same_wherever_they_are_run(base: str, tree: str, kind: str, given: str) -> None:
    """The exports.d file is given by a relative path, and an entry for a directory of the tree is not meant."""
    options, server = ENTRIES[kind]
    os.chmod(tree, 0o755)
    os.mkdir(os.path.join(tree, "home"))
    put(os.path.join(tree, "home", "file"), 1, 1, 0o600)
    os.chown(os.path.join(tree, "home"), 1, 3042)
    os.chmod(os.path.join(tree, "home"), 0o750)
    put(os.path.join(tree, "listed"), 0, 3042, 0o660)
    os.mkdir(os.path.join(base, "ex"))
    exports(base, f"{tree} *({options})", name="ex/a")
    inner = "ro,all_squash,cloak_list=uid +077 0 -1 gid +077 0 -1"
    exports(base, f"{tree}/home *({inner})", name="ex/b" if given == "folder" else "other")
    at = "ex" if given == "folder" else "ex/a.exports"
    words = [*COMMAND, "exposure", at, "--server", server, "--html", "page.html", "--json"]
    done = subprocess.run(words, cwd=base, capture_output=True, text=True, check=True)
    expected = [
        example["steps"]
        for entry in json.loads(done.stdout)["entries"]
        for row in (entry["anybody"], *entry["identities"])
        for example in row["worst"].values()
    ]
    printed = commands(os.path.join(base, "page.html"))
    assert len(printed) == len(expected)
    for command, steps in zip(printed, expected, strict=True):
        answer = json.loads(run(*shlex.split(command)[1:], "--json").stdout)
        assert answer["visible"], command
        assert [said(step) for step in answer["steps"]] == [said(step) for step in steps], command


def said(step: dict[str, Any]) -> tuple[object, ...]:
    """What a step of `explain`, or of the page, says."""
    granted = step["permissions"]
    if isinstance(granted, dict):
        granted = "".join(name[0] if granted[name] else "-" for name in ("read", "write", "execute"))
        granted = granted.replace("e", "x")
    return step["path"], step["mode"], step["uid"], step["gid"], granted, step.get("reason", step.get("why"))


def test_the_commands_on_a_page_run(page: str) -> None:
    """The tree has two entries, and the name of a file needs quoting."""
    assert any("--client office" in command for command in commands(page))
    assert any(r"$'" in command for command in commands(page))
    check_commands(page)


@pytest.mark.parametrize("views", ["", ",views = 20001:20001", ",views = 20001:20001 0:3042", ",views = 1-3"])
def test_so_do_those_on_a_page_about_a_mount(
    base: str, tree: str, page: str, mount: Callable[..., Mount], views: str
) -> None:
    m = mount("-o", f"rw{views}")
    run("exposure", m.path, "--html", page)
    assert os.path.isfile(os.path.join(tree, "home", "file"))
    check_commands(page)
