"""`cloakfs metrics`: the figures of this machine's mounts and services, for a monitoring system."""

import ipaddress
import os
import re
import stat
from typing import TYPE_CHECKING

import click

from cloakfs.messages import shell_word

from .common import fail, mount_point, note
from .completion import a_file, a_mount_point
from .exits import FAILED, WRONG

if TYPE_CHECKING:
    from cloakfs.nfs.health import Machine

_SHORTEST_TOKEN = 16


@click.command()
@click.argument("mountpoints", nargs=-1, metavar="[MOUNTPOINT]…", shell_complete=a_mount_point)
@click.option("--listen", metavar="PLACE", help="Serve them over HTTP: ADDRESS:PORT, or the path of a unix socket.")
@click.option("--group", metavar="GROUP", help="A group that may use the unix socket, besides root.")
@click.option(
    "--token", metavar="FILE", shell_complete=a_file, help="Admit who sends the token in FILE (Authorization: Bearer)."
)
@click.option("--without-token", is_flag=True, help="Let all users of this machine ask at the port.")
@click.option("--beyond-this-machine", is_flag=True, help="Allow an ADDRESS that other machines can reach.")
def metrics(
    mountpoints: tuple[str, ...],
    *,
    listen: str | None,
    group: str | None,
    token: str | None,
    without_token: bool,
    beyond_this_machine: bool,
) -> None:
    """Print the figures of mounts and services as OpenMetrics, or serve them to a monitoring system.

    What does not answer within five seconds has the value 0 of `cloakfs_up` or `cloakfs_service_up`, and no other
    figures. A port needs a --token, because all users of this machine can connect to it: one who looks a name up
    and watches the figures could tell whether it is hidden or absent.

    Exit status: 0 printed, or served until a signal came; 1 not root, a MOUNTPOINT is no cloakfs mount, or PLACE
    cannot be used; 2 the command line is wrong.
    """
    if os.geteuid() != 0:
        fail("only root may ask the daemons", FAILED)
    # These take longer to import than --help should take.
    from cloakfs.nfs.health import machine_state  # noqa: PLC0415

    from . import metricsserver  # noqa: PLC0415
    from .openmetrics import text  # noqa: PLC0415

    paths = [mount_point(path) for path in mountpoints]

    def wanted() -> "Machine":
        machine = machine_state()
        return machine.only(paths) if paths else machine

    if listen is None:
        if group or token or without_token or beyond_this_machine:
            fail("--group, --token, --without-token and --beyond-this-machine need --listen", WRONG)
        machine = wanted()
        _require_all(machine)
        click.echo(text(machine), nl=False)
        return
    secret = _secret(token) if token else None
    if listen.startswith("/"):
        place: str | tuple[str, int] = listen
    else:
        place = _address(listen, beyond=beyond_this_machine)
        _require_guarded(secret, group, without_token=without_token and not beyond_this_machine)
    try:
        server = metricsserver.MetricsServer(place, group, secret, wanted)
    except (OSError, LookupError) as exc:
        fail(f"--listen {listen}: {exc.strerror if isinstance(exc, OSError) else exc.args[0]}", FAILED)
    note(f"metrics are served at {server.place}")
    server.serve()


def _require_all(machine: "Machine") -> None:
    """End the command if one of the mounts is none of cloakfs."""
    for one in machine.mounts:
        if one.is_absent:
            fail(f"{one.path}: {one.problem} (cloakfs status lists all)", FAILED)


def _require_guarded(secret: bytes | None, group: str | None, *, without_token: bool) -> None:
    """End the command if others than those who are meant could ask at a port."""
    if secret is None and not without_token:
        fail("a port needs --token FILE (or --without-token, if all users of this machine may see the figures)", WRONG)
    if group:
        fail("--group is for a unix socket; at a port, use --token", WRONG)


def _address(listen: str, *, beyond: bool) -> tuple[str, int]:
    """Return the address and the port; the command ends if they are wrong, or others could reach them."""
    found = re.fullmatch(r"(?:\[([0-9a-fA-F:.]+)\]|([0-9.]+|localhost)):(\d{1,5})", listen)
    try:
        if found is None or int(found[3]) > 65535:
            raise ValueError
        address = ipaddress.ip_address("127.0.0.1" if found[2] == "localhost" else found[1] or found[2])
    except ValueError:
        fail(f"--listen {listen}: expected ADDRESS:PORT, [ADDRESS]:PORT or the absolute path of a unix socket", WRONG)
    if not address.is_loopback and not beyond:
        fail(
            f"--listen {listen}: other machines may reach that; use 127.0.0.1 or [::1], or --beyond-this-machine if it "
            "is meant",
            FAILED,
        )
    return str(address), int(found[3])


def _secret(path: str) -> bytes:
    """Return the token in this file; the command ends if that is none, or not a secret."""
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            token = file.read(4096).strip()
    except OSError as exc:
        fail(f"--token {path}: {exc.strerror}", FAILED)
    if mode & stat.S_IROTH:
        fail(f"--token {path}: all users can read it (chmod o-r {shell_word(path)})", FAILED)
    if len(token) < _SHORTEST_TOKEN or len(token.split()) > 1:
        fail(f"--token {path}: expected one word of at least {_SHORTEST_TOKEN} characters", FAILED)
    return token
