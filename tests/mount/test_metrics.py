"""`cloakfs metrics` and the health that `cloakfs status` reports, of real mounts with real callers."""

import contextlib
import fcntl
import json
import os
import pty
import re
import signal
import socket
import stat
import struct
import subprocess
import termios
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from cli.metrics import metrics
from cloakfs.nfs.health import Machine, machine_state
from cloakfs.state.runtime import RUN_DIR
from cloakfs.tuning import Tuning
from tests.agents import User, read
from tests.mount.conftest import COMMAND, Mount, run, told
from tests.mount.guards import NoServer, guarding, wrong_while
from tests.processes import kill
from tests.waiting import wait_until

MakeMount = Callable[..., Mount]
MakeUser = Callable[..., User]

OWNER, STRANGER = 3001, 3002
CLOAKED = "rw,no_root_squash,cloak_list=uid +077 3000 3999"

Sample = tuple[str, frozenset[tuple[str, str]]]


def parsed(text: str) -> dict[Sample, float]:
    """The values of all samples, by their names and labels, as the parser of OpenMetrics understands them."""
    assert text.endswith("# EOF\n")
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)  # type: ignore[no-untyped-call]
        for sample in family.samples
    }


class Figures:
    """What `cloakfs metrics` says of one mount."""

    def __init__(self, m: Mount, text: str) -> None:
        self.mountpoint = m.path
        self.values = parsed(text)

    def get(self, name: str, **labels: str) -> float:
        """The value of a sample of this mount; 0 if there is none. Labels that are not given do not matter."""
        wanted = {("mountpoint", self.mountpoint), *labels.items()}
        return sum(value for (found, has), value in self.values.items() if found == f"cloakfs_{name}" and wanted <= has)


def figures(m: Mount) -> Figures:
    return Figures(m, run("metrics", m.path).stdout)


def put(path: str, mode: int) -> None:
    Path(path).write_text("text")
    os.chown(path, OWNER, OWNER)
    os.chmod(path, mode)


# -- figures ---------------------------------------------------------------------------------------


def test_the_traffic_of_two_callers(tree: str, mount: MakeMount, user: MakeUser) -> None:
    put(f"{tree}/public", 0o644)
    put(f"{tree}/hideous", 0o600)
    put(f"{tree}/turncoat", 0o644)
    m = mount("-o", CLOAKED)
    owner, stranger = user(OWNER), user(STRANGER)
    held = stranger.do(os.open, m.at("turncoat"), os.O_PATH)
    before = figures(m)
    assert before.get("up") == 1
    assert before.get("mount_info", view="caller") == 1

    for name in ("hideous", "nothing"):
        with pytest.raises(FileNotFoundError):
            stranger.do(os.stat, m.at(name))
    assert owner.do(read, m.at("hideous")) == b"text"
    assert sorted(stranger.do(os.listdir, m.path)) == ["public", "turncoat"]
    os.chmod(f"{tree}/turncoat", 0o600)
    told(m.path)
    with pytest.raises(OSError, match="Stale"):
        stranger.do(os.fstat, held)

    after = figures(m)

    def rose(name: str, **labels: str) -> float:
        return after.get(name, **labels) - before.get(name, **labels)

    assert rose("hidden_total", by="name") >= 1
    assert rose("hidden_total", by="listing") >= 1
    assert rose("hidden_total", by="handle") >= 1
    assert rose("errors_total", operation="lookup", error="ENOENT") >= 2
    assert rose("errors_total", operation="getattr", error="ESTALE") >= 1
    assert rose("request_duration_seconds_count", operation="read") == 1
    assert rose("request_duration_seconds_count", operation="lookup") >= 3
    assert 0 < rose("request_duration_seconds_sum", operation="lookup") < 60
    assert rose("request_duration_seconds_bucket", operation="lookup", le="+Inf") == rose(
        "request_duration_seconds_count", operation="lookup"
    )
    assert rose("answers_total", what="names", cached="no") >= 2  # what is hidden, and what is absent
    assert rose("answers_total", what="names", cached="yes") >= 1
    assert rose("answers_total", what="attributes") >= 1
    assert rose("reads_in_memory_total") + rose("reads_waited_total") == 1
    assert rose("cpu_seconds_total") > 0
    assert after.get("known_objects") >= 1
    assert 1 <= after.get("descriptors", **{"for": "cached"}) <= after.get("descriptors_limit", **{"for": "cached"})
    assert after.get("index_bytes") > 0
    # Neither who asked, nor for what.
    labels = {label for _, has in after.values for label in has if m.path in dict(has).values()}
    assert not {value for _, value in labels} & {str(OWNER), str(STRANGER)}
    assert {name for name, _ in labels} == {
        "by", "cached", "error", "for", "le", "mountpoint", "operation", "remembered", "result", "share", "view",
        "what",
    }  # fmt: skip
    assert not re.search("hideous|public|turncoat|nothing", str(labels))


def test_a_fixed_view_is_called_one(tree: str, mount: MakeMount) -> None:
    put(f"{tree}/file", 0o644)
    m = mount("-o", f"rw,views={OWNER}:{OWNER}")
    os.listdir(m.path)
    said = figures(m)
    assert said.get("request_duration_seconds_count", view="fixed") > 0
    assert said.get("request_duration_seconds_count", view="caller") == 0


# -- health ----------------------------------------------------------------------------------------


@pytest.fixture
def hung_and_dead(mount: MakeMount) -> Iterator[tuple[Mount, Mount, Mount]]:
    """A mount that is well, one whose daemon hangs, and one whose daemon has died."""
    well, hung, dead = (mount("-o", CLOAKED) for _ in range(3))
    kill(dead.without_reaper())
    os.kill(hung.pid, signal.SIGSTOP)
    try:
        yield well, hung, dead
    finally:
        os.kill(hung.pid, signal.SIGCONT)


def test_what_hangs_or_has_died_is_told_in_time(hung_and_dead: tuple[Mount, Mount, Mount]) -> None:
    well, hung, dead = hung_and_dead
    paths = [m.path for m in hung_and_dead]
    commands = (["status", *paths], ["status", "--json"], ["status", well.path], ["metrics", *paths])
    with ThreadPoolExecutor() as pool:
        jobs = [pool.submit(run, *command, check=False) for command in commands]
        text, plain, fine, exported = (job.result() for job in jobs)

    assert text.returncode == 3
    assert re.search(
        rf"^{hung.path}\n unhealthy its daemon \(process {hung.pid}\) has not answered for \d+ s "
        rf"\(kill -USR1 {hung.pid} has it log where it hangs, and kill -9 {hung.pid} ends it\)\n tree ",
        text.stdout,
        re.M,
    )
    assert text.stdout.splitlines()[-1] == (
        f"{dead.path}: its daemon has died, and nobody gets an answer (cloakfs umount {dead.path}; mounting there "
        "again unmounts it, too)"
    )
    assert plain.returncode == 3
    by_path = {one["target"]: one for one in json.loads(plain.stdout)}
    assert by_path[well.path]["unhealthy"] is None
    assert by_path[hung.path]["unhealthy"].startswith("its daemon (process")
    assert by_path[dead.path]["unhealthy"].startswith("its daemon has died")
    assert (fine.returncode, fine.stderr) == (0, "")
    assert "unhealthy" not in fine.stdout
    assert [Figures(m, exported.stdout).get("up") for m in hung_and_dead] == [1, 0, 0]
    assert Figures(well, exported.stdout).get("known_objects") > 0
    assert Figures(hung, exported.stdout).get("known_objects") == 0


def test_a_guard_and_its_server(base: str, tree: str) -> None:
    name = f"test-{os.path.basename(base).replace('_', '-')}"
    run_dir = f"{RUN_DIR}/export-{name}"
    m = Mount(tree, f"{base}/it")
    server = partial(NoServer, partial(wrong_while, f"{base}/broken"))
    with guarding(tree, m.path, run_dir, server, tuning=Tuning(guard_seconds=0.1)) as guard:

        def now() -> Machine:
            return machine_state().only([m.path])

        assert now().mounts[0].restarts == 0
        kill(m.pid)
        wait_until(lambda: now().mounts[0].restarts == 1)
        assert figures(m).get("guard_restarts_total", service=name) == 1
        said = run("status", m.path).stdout
        assert f" service   {name}, daemon replaced 1×\n" in said
        assert f"service {name}: knfsd answers, guard is process {guard.pid}, 1 mount\n" in said

        Path(base, "broken").touch()
        wait_until(lambda: not now().is_healthy)
        done = run("status", m.path, check=False)
        assert done.returncode == 3
        assert f"service {name}: knfsd: it does not answer\n" in done.stdout
        os.unlink(f"{base}/broken")
        wait_until(lambda: now().is_healthy)

        kill(guard.pid)
        done = run("status", m.path, check=False)
        assert done.returncode == 3
        assert f"service {name}: its guard (process {guard.pid}) has died, and nobody mounts again" in done.stdout
        assert f"cloakfs export up --name {name} takes over, and down ends it" in done.stdout
        values = parsed(run("metrics", m.path).stdout)
        assert values["cloakfs_service_up", frozenset({("service", name)})] == 0
        assert values["cloakfs_up", frozenset({("mountpoint", m.path)})] == 1


# -- for people ------------------------------------------------------------------------------------


def on_terminal(columns: int, *arguments: str) -> list[str]:
    """The lines that a command prints on a terminal of this width."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, columns, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    said = b""
    try:
        with subprocess.Popen([*COMMAND, *arguments], stdout=theirs, env={**environment, "TERM": "dumb"}) as command:
            os.close(theirs)
            with contextlib.suppress(OSError):  # the last one has closed the terminal
                while piece := os.read(ours, 65536):
                    said += piece
        assert command.returncode == 0
    finally:
        os.close(ours)
    return said.decode().replace("\r\n", "\n").splitlines()


def test_status_fits_into_60_columns(mount: MakeMount) -> None:
    maps = " ".join(f"uid {number} map {number + 5000}" for number in range(1000))
    m = mount("-o", f"rw,range_map={maps},cloak_list=uid +007 1 9")
    # Words of more than 60 columns, which paths may be, cannot be helped.
    lines = on_terminal(60, "status", m.path)
    assert [line for line in lines if len(line) > 60 and " " in line[11:].strip()] == []
    in_one = run("status", m.path).stdout
    told_of_kernel = [" ".join(text).partition(" kernel ")[2].split() for text in (lines, in_one.splitlines())]
    assert told_of_kernel[0]
    assert told_of_kernel[0] == told_of_kernel[1]  # nothing is cut, or left out
    assert "(1,000 of them: see -v)" in in_one
    assert len(lines) < 60
    assert [line for line in lines if len(line) - len(line.lstrip()) not in (0, 1, 11, 23)] == []
    full = on_terminal(60, "status", "-v", m.path)
    assert " ".join(full).count(" map ") == 1000


# -- over HTTP -------------------------------------------------------------------------------------


@contextlib.contextmanager
def listening(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Serve metrics for the duration of a with block; yields the process and where it says that it serves."""
    with subprocess.Popen([*COMMAND, "metrics", *arguments], stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            line = server.stderr.readline()
            assert line.startswith("cloakfs: metrics are served at "), line
            yield server, line.split()[-1]
        finally:
            server.terminate()


def asked(place: str | tuple[str, int], *headers: str) -> tuple[str, str]:
    """The status line and the body of the answer to a GET."""
    with socket.socket(socket.AF_UNIX if isinstance(place, str) else socket.AF_INET) as client:
        client.settimeout(60)
        client.connect(place)
        lines = ("GET /metrics HTTP/1.1", "Host: x", "Accept: application/openmetrics-text", *headers)
        client.sendall(("\r\n".join(lines) + "\r\n\r\n").encode())
        with client.makefile("rb") as answer:
            head, _, body = answer.read().decode().partition("\r\n\r\n")
    return head.splitlines()[0], body


def test_a_port_needs_a_token_and_silence_keeps_nobody_from_it(base: str, mount: MakeMount) -> None:
    m = mount()
    token = Path(base, "token")
    token.write_text("0123456789abcdef\n")
    token.chmod(0o600)
    with (
        listening(m.path, "--listen", "127.0.0.1:0", "--token", str(token)) as (server, url),
        contextlib.ExitStack() as s,
    ):
        found = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/metrics", url)
        assert found
        place = "127.0.0.1", int(found[1])
        for _ in range(100):
            s.enter_context(socket.create_connection(place))
        assert "401" in asked(place)[0]
        assert "401" in asked(place, "Authorization: Bearer 0123456789abcdeX")[0]
        line, body = asked(place, "Authorization: Bearer 0123456789abcdef")
        assert "200" in line
        assert Figures(m, body).get("up") == 1
        server.terminate()
        assert server.wait(60) == 0


def test_a_unix_socket_is_for_root_and_a_group(base: str, mount: MakeMount, user: MakeUser) -> None:
    m = mount()
    place = f"{base}/socket"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(place)  # by one that was killed
    with listening("--listen", place, "--group", "3300") as (server, said):
        assert said == place
        info = os.stat(place)
        assert (stat.S_IMODE(info.st_mode), info.st_uid, info.st_gid) == (0o660, 0, 3300)
        with pytest.raises(PermissionError):
            user(OWNER).do(asked, place)
        line, body = user(OWNER, 3300).do(asked, place)
        assert "200" in line
        assert Figures(m, body).get("up") == 1
        again = run("metrics", "--listen", place, check=False)
        assert (again.returncode, again.stderr) == (1, f"cloakfs: --listen {place}: Address already in use\n")
        server.terminate()
        assert server.wait(60) == 0
    assert not os.path.exists(place)


PORT = "a port needs --token FILE (or --without-token, if all users of this machine may see the figures)"


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (
            "--listen 0.0.0.0:9100 --token TOKEN",
            1,
            "--listen 0.0.0.0:9100: other machines may reach that; use 127.0.0.1",
        ),
        ("--listen [::]:9100 --without-token", 1, "--listen [::]:9100: other machines may reach that; use 127.0.0.1"),
        ("--listen 127.0.0.1:9100", 2, PORT),
        ("--listen 0.0.0.0:9100 --beyond-this-machine --without-token", 2, PORT),
        ("--listen localhost", 2, "--listen localhost: expected ADDRESS:PORT, [ADDRESS]:PORT or the absolute path"),
        ("--listen 127.0.0.1:0 --token OPEN", 1, "--token OPEN: all users can read it (chmod o-r OPEN)"),
        ("--listen 127.0.0.1:0 --token SHORT", 1, "--token SHORT: expected one word of at least 16 characters"),
        ("--listen /nowhere/at/all", 1, "--listen /nowhere/at/all: No such file or directory"),
        ("--listen /nowhere/at/all --group of-nobody", 1, "there is no group of-nobody"),
        ("/usr", 1, "/usr: not a cloakfs mount (cloakfs status lists all)"),
    ],
)
def test_what_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, status: int, says: str
) -> None:
    for name, text, mode in (("TOKEN", "x" * 16, 0o600), ("OPEN", "x" * 16, 0o644), ("SHORT", "x", 0o600)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(mode)
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(metrics, arguments.split())
    assert done.exit_code == status
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


def invoked() -> tuple[int, str, str]:
    done = CliRunner().invoke(metrics)
    return done.exit_code, done.stdout, done.stderr


def test_only_root_may_ask(user: MakeUser) -> None:
    assert user(OWNER).do(invoked) == (1, "", "cloakfs: only root may ask the daemons\n")
