"""Commands print what the documents say they print.

A sample is a block with lines that begin with a prompt: `# cloakfs …`, `server# …`, `10101$ …`. Each block is either
played anew (`SCENES`), in a mount namespace of its own where /srv, /mnt, /home and /etc are as the document has them,
or it is listed in `ELSEWHERE` with the reason why it cannot be. An ellipsis on a line of its own stands for any lines.
In a block without prompts, lines that begin with `cloakfs` or `python -m bench` are commands, too. What they print is
not shown there, but they must succeed.
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pyfuse3
import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

COMMAND = re.compile(r"(?P<command>(?:cloakfs|python -m bench) .*?)(  +# .*)?")

# Bare "# " also begins comments, and lines that commands print.
PROMPT = re.compile(
    r"(?P<prompt># (?=cloakfs|python -m bench|echo)|(?:[a-z][\w'-]*(?: \d+)?|\d+)?\$ |[a-z][\w'-]*# )(?P<command>.*)"
)


@dataclass
class Sample:
    """A command and what it is said to print, if it has a prompt."""

    prompt: str
    command: str
    says: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Block:
    """One block of a document, by its first command."""

    document: str
    line: int
    samples: list[Sample]

    @property
    def key(self) -> tuple[str, str]:
        return self.document, self.samples[0].command


def code_blocks(path: Path) -> Iterator[tuple[int, list[str]]]:
    start = 0
    lines: list[str] | None = None
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.startswith("```"):
            if lines is not None:
                lines.append(line)
        elif lines is None:
            start, lines = number, []
        else:
            yield start, lines
            lines = None


def blocks() -> list[Block]:
    found = []
    for path in DOCUMENTS:
        for start, lines in code_blocks(path):
            samples: list[Sample] = []
            for line in lines:
                if samples and is_open(samples[-1].command):
                    samples[-1].command += f"\n{line}"
                elif match := PROMPT.fullmatch(line):
                    samples.append(Sample(match["prompt"].strip(), match["command"]))
                elif samples:
                    samples[-1].says.append(line)
            samples = samples or [Sample("", match["command"]) for line in lines if (match := COMMAND.fullmatch(line))]
            if samples:
                found.append(Block(path.name, start, samples))
    return found


def is_open(command: str) -> bool:
    """Does a quotation go on in the next line?"""
    try:
        shlex.split(command, comments=True)
    except ValueError:
        return True
    return False


# -- where samples come from -----------------------------------------------------------------------

LAB = next(
    "\n".join(lines)
    for _, lines in code_blocks(ROOT / "docs" / "commands.md")
    if lines[0].startswith("/srv/demo lab.example.org")
)

DEMO = f"""
mkdir -p /srv/demo/ann /srv/demo/shared-projects /mnt/demo /etc/cloakfs-demo /etc/cloakfs/exports.d
echo ann:x:20001:20001::/:/bin/sh >>/etc/passwd
echo 192.0.2.7 lab.example.org >>/etc/hosts
echo text >/srv/demo/ann/note; echo text >/srv/demo/ann/secret
chmod 640 /srv/demo/ann/note; chmod 600 /srv/demo/ann/secret; chown -R 20001:20001 /srv/demo/ann
cd /etc/cloakfs-demo
cat >lab.exports <<'E'
{LAB}
E
"""

MOUNTED = f"{DEMO}\ncloakfs mount /srv/demo /mnt/demo --exports lab.exports"

BAD = (
    f"{DEMO}\ncat >bad.exports <<'E'\n"
    "/srv/demo lab.example.org(rw, cloak_list = uid 007 20000)\n"
    "/srv/demo/shared-projects (rw)\n"
    "/srv/absent *(rw, policy=absent.py:Absent, views=nobody-knows)\n"
    "E\n"
)

EXPOSED = f"""
{DEMO}
echo staff:x:2300: >>/etc/group
echo 'a list of salaries' >/srv/demo/salaries; chown 0:2300 /srv/demo/salaries; chmod 640 /srv/demo/salaries
sed 's/ gid 1000 1999 map 20000//' lab.exports >open.exports
"""

HOME = """
mkdir -p /home/ann /home/ben /home/project /etc/cloakfs/exports.d
printf '%s\\n' ann:x:2101:2101::/:/bin/sh ben:x:2102:2102::/:/bin/sh >>/etc/passwd
printf '%s\\n' ann:x:2101: ben:x:2102: team:x:2200:ann,ben >>/etc/group
chown 2101:2101 /home/ann; chown 2102:2102 /home/ben; chown 0:2200 /home/project
chmod 700 /home/ann /home/ben; chmod 770 /home/project; touch /home/project/minutes
printf '/home 10.1.0.0/16(rw, cloak_list = uid +077 0 -1)\\n' >/etc/cloakfs/exports.d/home.exports
"""

WORK = """
mkdir -p /srv/work/real/{ann,ben,project} /srv/work/export; cd /srv/work/real
echo 'my diary' >ann/diary; echo 'pay slip' >ben/payslip; echo minutes >project/minutes
chown -R 101:101 ann; chown -R 102:102 ben; chown -R 103:100 project
chmod 700 ann ben; chmod 770 project; chmod 660 project/minutes; cd ..
"""

BUSY = """
(cd /mnt/demo; exec sleep 1000) >&- 2>&- & busy=$!
until [ "$(readlink /proc/$busy/cwd)" = /mnt/demo ]; do sleep .1; done
"""

# Until the command has ended, somebody looks for what is hidden.
LOOKING = """
(
  trap 'exit 0' TERM
  while sleep .2; do setpriv --reuid 1002 --regid 1002 --clear-groups cat /mnt/demo/ann/secret; done
) >/dev/null 2>&1 & busy=$!
"""

# Somebody has asked for many names that are hidden, and the daemon has counted them.
GUESSING = """
for number in $(seq 66); do install -m 600 -o 20001 -g 20001 /dev/null /srv/demo/ann/hidden$number; done
setpriv --reuid 1002 --regid 1002 --clear-groups stat $(seq -f /mnt/demo/ann/hidden%g 66) >/dev/null 2>&1
until [ "$(cloakfs events /mnt/demo)" ]; do sleep .1; done
"""

REAL = """
mkdir -p /srv/real/ann /etc/cloakfs/exports.d
printf '%s\\n' ann:x:2101:2101::/:/bin/sh ben:x:2102:2102::/:/bin/sh >>/etc/passwd
echo 'my diary' >/srv/real/ann/diary; chown -R 2101:2101 /srv/real/ann; chmod 700 /srv/real/ann
printf '/srv/real *(rw, cloak_list = uid +077 0 -1)\\n' >/etc/cloakfs/exports.d/office.exports
"""

NFS = "it takes an NFS server; tests/nfs has one"
LOGIN = "it changes how users log in; tests/mount/test_sessions.py does that on a machine within the machine"
CLIENT = "it is typed on a client of an NFS server; tests/nfs has one"
STOCK = "it measures, for up to an hour; `scripts/campaign stock` has a small run"
LONG = "it measures, for up to an hour; test_bench.py and test_prefetch_lab.py have small runs"
TMP = "it leaves a file in /tmp; test_prefetch_lab.py does the same elsewhere"


@dataclass(frozen=True)
class Scene:
    """How a block is played.

    Attributes:
        setup: shell commands, before all.
        before: shell commands, before the command that is their key.
        left_out: commands that are not run, and why.
    """

    setup: str
    before: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)


SCENES = {
    ("README.md", "cloakfs mount real export -o 'cloak_list = uid +077 0 -1'"): Scene(WORK),
    ("README.md", "ls -ln real"): Scene(WORK),
    (
        "README.md",
        "cloakfs mount /srv/real /export -o "
        "'rw,range_map=uid 5000 5999 map 1000 gid 5000 5999 map 1000,cloak_list=uid +007 1000 1999'",
    ): Scene(
        REAL,
        {"cloakfs mount /srv/real /export --exports /etc/cloakfs/exports.d/office.exports": "cloakfs umount /export"},
    ),
    (
        "README.md",
        "cloakfs check /etc/cloakfs/exports.d",
    ): Scene(
        f"{REAL}\ncloakfs mount /srv/real /export --exports /etc/cloakfs/exports.d/office.exports",
        left_out={
            "cloakfs trace /export --user ben --hidden": (
                "it goes on until it is interrupted; commands.md has it with --count"
            ),
            "cloakfs events --follow": "it goes on until it is interrupted; test_probing.py does that",
        },
    ),
    (
        "README.md",
        "cloakfs mount --policy ./examples/policies/hide_unreadable.py:HideUnreadable /srv/real /export",
    ): Scene(f"{REAL}\ncd {ROOT}"),
    ("commands.md", "cloakfs mount /srv/demo /mnt/demo --exports lab.exports"): Scene(DEMO),
    ("commands.md", "cloakfs umount /mnt/demo"): Scene(MOUNTED, {"cloakfs umount /mnt/demo": BUSY}),
    ("commands.md", "cloakfs status /mnt/demo"): Scene(MOUNTED),
    ("commands.md", "cloakfs metrics /mnt/demo"): Scene(MOUNTED),
    ("commands.md", "cloakfs export plan"): Scene(
        f"{DEMO}\nmv lab.exports /etc/cloakfs/exports.d; printf '[mountd]\\nmanage-gids=n\\n' >/etc/nfs.conf",
        left_out={"cloakfs export up": NFS, "cloakfs export reload": NFS, "echo $?": NFS},
    ),
    ("commands.md", "cloakfs prune --dry-run"): Scene(
        f"{MOUNTED}\nmkdir -p /srv/old /mnt/old; cloakfs mount /srv/old /mnt/old; cloakfs umount /mnt/old\n"
        "rmdir /srv/old"
    ),
    ("commands.md", "cloakfs check lab.exports bad.exports"): Scene(BAD),
    ("commands.md", "cloakfs check --json --text-only bad.exports"): Scene(BAD),
    ("commands.md", "cloakfs explain /mnt/demo/ann/note --as 1002:1002:1001,7"): Scene(MOUNTED),
    ("commands.md", "cloakfs table /mnt/demo/ann --as 1002:1002:1001"): Scene(MOUNTED),
    ("commands.md", "cloakfs trace /mnt/demo --user 1002 --hidden --count 1"): Scene(
        MOUNTED, {"cloakfs trace /mnt/demo --user 1002 --hidden --count 1": LOOKING}
    ),
    ("commands.md", "cloakfs bench --list"): Scene(""),
    ("commands.md", "cloakfs events /mnt/demo"): Scene(MOUNTED, {"cloakfs events /mnt/demo": GUESSING}),
    ("measuring.md", "python -m bench papers --only figure-9"): Scene("cd /srv"),
    ("measuring.md", "python -m bench nfs --list"): Scene(
        "",
        left_out={
            "python -m bench nfs --list": "its output is not shown",
            "python -m bench nfs --kernel 6.1 --work 'ls*' --export 'caller*' --requests": STOCK,
            "python -m bench nfs --json before.json": STOCK,
            "python -m bench nfs --work rename --against before.json       # what changed": STOCK,
            "python -m bench nfs --show a.json --show b.json --markdown    # two runs in one table": STOCK,
        },
    ),
    ("measuring.md", "python -m bench --peer bare --peer '*1000' --work 'stat*' --json run.json"): Scene(
        "cd /srv",
        left_out={
            "python -m bench --peer bare --peer '*1000' --work 'stat*' --json run.json": "it measures, for minutes",
            "python -m bench --peer bare --peer 'bindfs*' --peer '*1000' --work '* home' --json homes.json": "so, too",
            "python -m bench --peer '*export*' --work 'ls -l over NFS*' --json nfs.json": "and so does it",
            "python -m bench --show run.json --markdown": "it shows what was measured",
        },
    ),
    (
        "measuring.md",
        "python -m bench prefetch replay --pattern stride --stride 4 --heuristic cursors --heuristic default",
    ): Scene("cd /srv; printf '0 file 0 4096\\n0 file -1 4096\\n' >reads.txt"),
    ("commands.md", "cloakfs exposure --diff lab.exports open.exports"): Scene(EXPOSED),
    ("exposure.md", "cloakfs exposure open.exports"): Scene(EXPOSED),
    ("exposure.md", "cloakfs exposure --diff open.exports lab.exports"): Scene(EXPOSED),
    ("exposure.md", "cloakfs exposure --diff /etc/cloakfs/exports.d new.d || exit"): Scene(
        f"{EXPOSED}\ncp open.exports /etc/cloakfs/exports.d; mkdir new.d; cp lab.exports new.d"
    ),
    ("exports.md", "cloakfs check --text-only lab.exports"): Scene(
        "cd /srv; cat >lab.exports <<'E'\n# The range ends past the largest id.\n/home *(rw, \\\n"
        "       cloak_list = uid +007 1000, \\\n       range_map=uid 4294967295 map 5)\n/data *(no_subtreecheck)\nE\n"
    ),
    ("nfs.md", "ls -l /home"): Scene(HOME, left_out={"cloakfs export up": NFS}),
    ("nfs.md", "cloakfs explain /srv/cloakfs/home@10.1.0.0_16/ann --as ben"): Scene(
        f"{HOME}\nat=/srv/cloakfs/home@10.1.0.0_16; mkdir -p $at\n"
        "cloakfs mount /home $at --exports /etc/cloakfs/exports.d/home.exports -o knfsd"
    ),
    ("prefetch.md", "python -m bench prefetch replay --pattern sequential --reordered 6 --size 64M"): Scene("cd /srv"),
    (
        "prefetch.md",
        "python -m bench prefetch replay --pattern stride --stride 4 --size 64M",
    ): Scene(
        "mkdir /mnt/dir; cd /srv",
        left_out={
            "cloakfs mount /srv/real /mnt -o record=/tmp/reads": TMP,
            "python -m bench prefetch replay /tmp/reads -o prefetch_files=8": TMP,
        },
    ),
}

ELSEWHERE = {
    ("commands.md", "cloakfs status"): "it takes a daemon that hangs; tests/mount/test_metrics.py has one",
    (
        "performance.md",
        "python -m bench --markdown --json bench/results/0.2.0.json --plot docs/performance.svg",
    ): LONG,
    (
        "performance.md",
        "python -m bench --peer bare --peer 'bindfs*' --peer '*1000' --work 'stat*' --work 'lookup*' --cpus pinned",
    ): LONG,
    (
        "prefetch.md",
        "python -m bench prefetch figures --json run.json --plot figures.svg",
    ): LONG,
    ("prefetch.md", "python -m bench prefetch hung"): LONG,
    ("performance.md", "python -m bench nfs --json nfs.json --markdown"): STOCK,
    ("measuring.md", "python -m bench papers --list"): "it measures for hours; test_papers.py has small runs",
    (
        "metrics.md",
        "cloakfs metrics --listen 127.0.0.1:9817 --token /etc/cloakfs/metrics.token",
    ): "it serves until it is stopped; test_metrics.py has that",
    ("commands.md", "cloakfs session setup /srv/views/export /srv/data --pam --install"): LOGIN,
    (
        "sessions.md",
        "cloakfs mount /srv/real /srv/views/export -o 'cloak_list=uid +077 1000 1999' --view ann --view ben",
    ): LOGIN,
    ("README.md", "cat /etc/cloakfs/exports.d/home.exports"): NFS,
    ("nfs.md", "mount -t nfs server:/srv/cloakfs/home@10.1.0.0_16 home"): CLIENT,
    ("nfs.md", "ls -l home"): CLIENT,
    ("nfs.md", "ls -ln /srv/shared"): NFS,
    ("nfs.md", "mount -t nfs -o vers=4.2 server:/srv/cloakfs/srv-shared@10.1.0.0_16 shared"): CLIENT,
    ("nfs.md", "ls -ln home"): CLIENT,
    ("nfs.md", "mount -t nfs server:/srv/cloakfs/home@10.3.0.2 home"): CLIENT,
    ("nfs.md", "for u in ann ben; do"): CLIENT,
    ("nfs.md", "ls home"): CLIENT,
    ("nfs.md", "cloakfs export up --server ganesha"): NFS,
    ("nfs.md", "cloakfs export key"): "each key has another fingerprint; test_handle_key.py makes some",
    ("nfs.md", "cloakfs export same-as >head-a.json"): "it takes two machines; test_heads.py compares descriptions",
    ("nfs.md", "id -G                        # without the group"): CLIENT,
    ("nfs.md", "kill -9 PID               # of its daemon, from cloakfs export status --json"): NFS,
    ("nfs.md", "cat /run/cloakfs/export-default.log"): NFS,
    ("nfs.md", 'ln -s "$PWD"/.venv/bin/cloakfs /usr/local/bin/'): "it takes systemd",
    ("plug-ins.md", "cloakfs mount /srv/lab /mnt/lab --policy after_dark.py:AfterDark"): "output is not shown",
}


def test_every_sample_is_played_or_listed() -> None:
    assert sorted(block.key for block in blocks()) == sorted([*SCENES, *ELSEWHERE])
    for block in blocks():
        scene = SCENES.get(block.key, Scene(""))
        commands = {sample.command for sample in block.samples}
        assert {*scene.before, *scene.left_out} <= commands, block.key
        assert not commands <= scene.left_out.keys(), f"{block.key}: nothing of it is played"


def test_no_table_is_shown_without_its_command() -> None:
    with_command = {(block.document, block.line) for block in blocks()}
    for path in DOCUMENTS:
        for start, lines in code_blocks(path):
            if any(line.startswith("┏") for line in lines):
                assert (path.name, start) in with_command, f"{path.name}:{start}"


# -- playing them ----------------------------------------------------------------------------------

STAGES = ("/srv", "/mnt", "/home", "/export")
"""Directories that are as the document has them."""

STAGE = """
set -u
export LC_ALL=C
unset COLUMNS
# Copies of mounts that others made would keep their daemons from ending. (Private: the mounts themselves stay.)
umount --all --internal-only --lazy --types fuse.cloakfs
cloakfs() {{ {python} -m cloakfs_cli.main "$@"; }}
python() {{ PYTHONPATH={root} {python} "$@"; }}
for directory in {stages} /run/cloakfs /var/lib/cloakfs; do
  mkdir -p $directory; mount -t tmpfs -o mode=755 none $directory
done
mkdir /srv/.etc /srv/.etc/upper /srv/.etc/work
mount -t overlay -o lowerdir=/etc,upperdir=/srv/.etc/upper,workdir=/srv/.etc/work none /etc
busy=
leave() {{
  cd /
  [ -z "$busy" ] || kill $busy
  for place in $(awk '$3 == "fuse.cloakfs" {{print $2}}' /proc/self/mounts); do cloakfs umount --lazy $place; done
}}
trap leave EXIT
status=0
"""

PLAY = """
{before}
(exit $status)
({command}
) >{out}/{number}.out 2>{out}/{number}.err
status=$?
echo $status >{out}/{number}.status
"""


@pytest.fixture
def export_directory() -> Iterator[None]:
    """/export, where documents mount; a machine may have none."""
    is_new = not os.path.exists("/export")
    if is_new:
        os.mkdir("/export")
    yield
    if is_new:
        os.rmdir("/export")


@pytest.mark.usefixtures("export_directory")
@pytest.mark.parametrize("block", [b for b in blocks() if b.key in SCENES], ids=lambda b: f"{b.document}:{b.line}")
def test_sample(block: Block, tmp_path: Path) -> None:
    if not hasattr(pyfuse3, "FileLock") and any("on the real tree: they" in " ".join(it.says) for it in block.samples):
        pytest.skip("the sample has locks of the patched pyfuse3 (scripts/setup --patched-pyfuse3)")
    if (stage := next((it for it in STAGES if ROOT.is_relative_to(it)), None)) is not None:
        pytest.skip(f"the sample has a {stage} of its own, and the project lies in this machine's: move it")
    scene = SCENES[block.key]
    played = [(number, sample) for number, sample in enumerate(block.samples) if sample.command not in scene.left_out]
    script = STAGE.format(python=sys.executable, root=ROOT, stages=" ".join(STAGES)) + scene.setup
    for number, sample in played:
        command = sample.command
        if sample.prompt[:-1].isdecimal():  # one of a client's users, in the mount
            uid = sample.prompt[:-1]
            drop = f"setpriv --reuid {uid} --regid {uid} --groups {uid},10100"
            command = f"cd export && {drop} {command}"
        script += PLAY.format(before=scene.before.get(sample.command, ""), command=command, number=number, out=tmp_path)
    done = subprocess.run(
        ["timeout", "100", "unshare", "--mount", "--propagation", "private", "bash", "-c", script],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout + done.stderr == ""
    for number, sample in played:
        out, err = (Path(tmp_path, f"{number}.{kind}").read_text(encoding="utf-8") for kind in ("out", "err"))
        if not sample.prompt:
            status = Path(tmp_path, f"{number}.status").read_text()
            assert status in ("0\n", "3\n"), f"{sample.command}: {out}{err}"  # 3 is an answer: hidden
            assert not err, sample.command
            continue
        texts = [plain((first + second).splitlines()) for first, second in ((out, err), (err, out))]
        says = plain(told(sample.says))
        assert any(matches(says, text) for text in texts), (
            f"{sample.command}\n--- said to print\n{says}\n---\n{texts[0]}"
        )


def told(lines: list[str]) -> list[str]:
    """Without the heading of the next sample: a line after an empty one, at the end."""
    return lines[:-2] if len(lines) > 1 and not lines[-2] else lines


def plain(lines: list[str]) -> str:
    """Without what differs from run to run and from machine to machine."""
    kept = []
    for line in lines:
        if re.fullmatch(r"total \d+", line):
            continue
        changed = re.sub(r"\b[A-Z][a-z]{2} [ \d]\d \d\d:\d\d\b", "DATE", line)
        changed = re.sub(r"\b\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\b", "DATE", changed)
        changed = re.sub(r" \([\d.]+ kB\): ", " (SIZE): ", changed)
        changed = re.sub(r"^\d\d:\d\d:\d\d\.\d{6} (.*)\[\d+\] (.*) \d+ µs", r"TIME \1[PID] \2 N µs", changed)
        changed = re.sub(r"^(d[rwxsStT-]{9}.*?) +\d+ DATE", r"\1 SIZE DATE", changed)
        changed = re.sub(r"^([dl-][rwxsStT-]{9}) +\d+ ", r"\1 LINKS ", changed)
        kept.append(changed.rstrip())
    return "\n".join(kept).strip("\n")


def matches(says: str, text: str) -> bool:
    pattern = "\n".join("(?:.*\n)*?.*" if line.strip() == "…" else re.escape(line) for line in says.split("\n"))
    return re.fullmatch(pattern, text) is not None
