"""`cloakfs session`: gives each login its own view of a mount, always at the same path.

PAM (pam_namespace) or systemd (BindPaths=) makes a mount namespace for the login, in which the user's fixed view is
bind-mounted at the path. This module only writes their configuration.
"""

import contextlib
import glob
import os
import re
import shutil
import stat
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import click

from cloakfs.config.options import Options
from cloakfs.config.parse import parse_options
from cloakfs.config.viewitems import Range
from cloakfs.linux import mountinfo, ownfiles
from cloakfs.messages import printable
from cloakfs.state.runtime import mounted
from cloakfs.tree.views import ViewIdentity, accounts_of, resolve

from .common import fail, note
from .completion import a_directory, a_mount_point
from .exits import FAILED, WRONG
from .markedlines import EditedError, marked, with_added, without

PAM_D = "/etc/pam.d"
NAMESPACE_CONF = "/etc/security/namespace.d/cloakfs.conf"
SYSTEMD = "/etc/systemd/system"

SERVICES = ("login", "sshd", "su", "sudo-i", "runuser", "cron", "atd")
"""The PAM services by which users log in or have jobs run (su-l and runuser-l include su and runuser).

sudo is not among them: where pam_namespace changes the view, it also leaves the working directory if that is in the
view, and `sudo rm *` would happen in the directory above.
"""

_MODULES = ("pam_namespace.so", "pam_exec.so")
_MODULE_DIRS = ("/lib/*/security", "/usr/lib/*/security", "/lib/security", "/lib64/security", "/usr/lib64/security")

# Other characters mean something to pam_namespace, PAM or systemd (blanks, quotes, commas, %, $HOME).
_PATH = re.compile(r"(/[A-Za-z0-9._@+-]+)+")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._@+-]*\$?")

_namespace_line = re.compile(r"^-?session\s.*\bpam_namespace\.so\b", re.MULTILINE)


class _Edit(NamedTuple):
    """What becomes of a file; None stands for no file."""

    path: str
    before: bytes | None
    after: bytes | None


@click.group()
def session() -> None:
    """Give each login its own fixed view of a mount, always at the same path."""


@session.command()
@click.argument("mountpoint", required=False, shell_complete=a_mount_point)
@click.argument("path", required=False, shell_complete=a_directory)
@click.option("--pam", "how", flag_value="pam", help="Logins and jobs that go through PAM: login, ssh, su, cron, at.")
@click.option("--systemd", "how", flag_value="systemd", help="The user managers of systemd, and their user units.")
@click.option("--install", "what", flag_value="install", help="Write the files; otherwise they are only shown.")
@click.option("--remove", "what", flag_value="remove", help="Remove what --install has written.")
@click.option("--exempt", metavar="USER", multiple=True, help="Who sees PATH itself, besides root. Repeatable.")
@click.option("--service", "services", metavar="NAME", multiple=True,
              help=f"A PAM service; repeatable. Default: those of {', '.join(SERVICES)} that there are.")  # fmt: skip
def setup(
    mountpoint: str | None,
    path: str | None,
    how: str | None,
    what: str | None,
    exempt: tuple[str, ...],
    services: tuple[str, ...],
) -> None:
    """Have each user of a view in the cloakfs mount MOUNTPOINT see this view at PATH.

    Exit status: 0 shown, written or removed, 1 it cannot be done, 2 the request is wrong.
    """
    if os.geteuid() != 0:
        fail("only root may set up sessions", FAILED)
    if how is None:
        fail("give either --pam or --systemd", WRONG)
    if what == "remove":
        if mountpoint is not None or exempt or services:
            fail("--remove takes only --pam or --systemd: it removes whatever --install has written", WRONG)
        _apply(_edits({}, _places(how)), removing=True)
        return
    if mountpoint is None or path is None:
        fail("give MOUNTPOINT, the cloakfs mount, and PATH, where each user sees its own view of it", WRONG)
    if services and how == "systemd":
        fail("--service: only with --pam", WRONG)
    mountpoint, path = os.path.realpath(mountpoint), os.path.realpath(path)
    identities = _identities(mountpoint, exempt)
    _check_place(mountpoint, path)
    lines = _pam(mountpoint, path, identities, services) if how == "pam" else _systemd(mountpoint, path, identities)
    edits = _edits(lines, _places(how))
    if what == "install":
        _apply(edits, removing=False)
    else:
        _show(lines)


def _identities(mountpoint: str, exempt: tuple[str, ...]) -> list[ViewIdentity]:
    """Return the identities of the mount's views, without those who are exempt."""
    mount = mounted().get(mountpoint)
    if mount is None:
        fail(f"{mountpoint}: no cloakfs mount, or one whose daemon has died (cloakfs status lists all)", FAILED)
    if mount.unknown:
        fail(f"{mountpoint}: {mount.unknown}", FAILED)
    options, _ = parse_options(mount.options)
    if not _has_directories(options):
        fail(f"{mountpoint}: has no views in directories @NAME; mount it with several views or a range of them", FAILED)
    resolved = [resolve(account) for item in options.views for account in accounts_of(item)]
    identities = [identity for identity in resolved if isinstance(identity, ViewIdentity)]
    labels = {identity.label for identity in identities}
    for user in exempt:
        if user not in labels and user != "root":
            fail(f"--exempt {user}: {mountpoint} has no view of that name", WRONG)
    return [identity for identity in identities if identity.caller.uid != 0 and identity.label not in exempt]


def _has_directories(options: Options) -> bool:
    return len(options.views) > 1 or any(isinstance(item, Range) for item in options.views)


def _check_place(mountpoint: str, path: str) -> None:
    """Refuse places where pam_namespace cannot mount safely; warn if PATH shows something to users without a view."""
    for each in (mountpoint, path):
        if not _PATH.fullmatch(each):
            fail(f"{each}: only letters, digits and . _ @ + - / may be in the paths of MOUNTPOINT and PATH", WRONG)
    try:
        mode = os.stat(path).st_mode
    except OSError as exc:
        fail(f"{path}: {exc.strerror}", FAILED)
    if not stat.S_ISDIR(mode):
        fail(f"{path}: not a directory", FAILED)
    for each in (mountpoint, path):
        _refuse_unsafe(each)
    _refuse_reachable(mountpoint)
    if os.path.commonpath((mountpoint, path)) in (mountpoint, path):
        fail(f"{path}: PATH and {mountpoint} must not contain each other", WRONG)
    if path in mountinfo.by_path():
        fail(f"{path}: something is mounted there, which su would unmount for its session", FAILED)
    if mode & (stat.S_IXGRP | stat.S_IXOTH):
        note(f"{path}: warning: users without a view can enter the directory (chmod 0700 it, unless that is meant)")


def _refuse_unsafe(path: str) -> None:
    """Refuse a path that others than root can redirect: pam_namespace would cover its parts by mounts of their own."""
    while path != "/":
        info = os.stat(path)
        if info.st_uid != 0 or info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            fail(f"{path}: must belong to root, and only root may be able to write to it", FAILED)
        path = os.path.dirname(path)


def _refuse_reachable(mountpoint: str) -> None:
    """Refuse a mount whose list of views others than root can open: they can keep its lock, and all logins waiting."""
    above = os.path.dirname(mountpoint)
    while os.stat(above).st_mode & (stat.S_IXGRP | stat.S_IXOTH):
        if above == "/":
            fail(
                f"{mountpoint}: users who can open it can keep all others from logging in; mount it below a directory "
                "of mode 0700, such as one made by: install -d -m 700 /srv/views",
                FAILED,
            )
        above = os.path.dirname(above)


def _pam(mountpoint: str, path: str, all_: list[ViewIdentity], services: tuple[str, ...]) -> dict[str, list[str]]:
    """Return the lines that PAM needs, by file."""
    modules = {os.path.basename(found) for where in _MODULE_DIRS for found in glob.glob(f"{where}/pam_*.so")}
    for module in _MODULES:
        if module not in modules:
            fail(f"{module}: this machine does not have it (on Debian, it is in libpam-modules)", FAILED)
    checker = shutil.which("mountpoint", path="/usr/bin:/bin")
    if checker is None:
        fail("mountpoint(1): this machine does not have it (on Debian, it is in util-linux)", FAILED)
    users = [identity.label for identity in all_ if identity.by_user and _USER.fullmatch(identity.label)]
    left_out = [identity.label for identity in all_ if identity.label not in users]
    if left_out:
        note(
            f"{mountpoint}: warning: pam_namespace needs views of user names, so it cannot use @{', @'.join(left_out)}"
        )
    if not users:
        fail(f"{mountpoint}: has no view of a user of this machine who is not exempt", FAILED)
    for service in services:
        if "/" in service or not os.path.isfile(f"{PAM_D}/{service}"):
            fail(f"--service {service}: there is no {PAM_D}/{service}", WRONG)
    chosen = services or tuple(name for name in SERVICES if os.path.isfile(f"{PAM_D}/{name}"))
    for name in (*chosen, "common-session", "common-session-noninteractive"):
        _refuse_namespace_line(f"{PAM_D}/{name}")
    # If the mount is not there, pam_namespace would make a directory @USER below it, and refuse the login if it cannot.
    # Then it is skipped, so that administrators can log in to mount it.
    stack = [
        f"session [success=ignore default=1] pam_exec.so quiet seteuid {checker} -q {mountpoint}",
        "session required pam_namespace.so unmnt_remnt ignore_instance_parent_mode",
    ]
    conf = [f"{path} {mountpoint}/@ user:noinit ~{','.join(users)}"]
    return {NAMESPACE_CONF: conf, **{f"{PAM_D}/{name}": stack for name in chosen}}


def _refuse_namespace_line(path: str) -> None:
    """Refuse a service that runs pam_namespace already, because a second run would mount everything again."""
    before = _read(path)
    text = _without_ours(path, before or b"")
    found = _namespace_line.search(text)
    if found:
        line = text.count("\n", 0, found.start()) + 1
        fail(f"{path}:{line}: runs pam_namespace already; remove that, or choose other services (--service)", FAILED)


def _systemd(mountpoint: str, path: str, all_: list[ViewIdentity]) -> dict[str, list[str]]:
    """Return the lines that systemd needs, by file: a drop-in for each user manager, which is called by its uid."""
    lines: dict[str, list[str]] = {}
    for identity in all_:
        if not _USER.fullmatch(identity.label):
            note(f"{mountpoint}: warning: left out @{identity.label}, whose name systemd might misread")
            continue
        # With -, the manager starts even if the mount is not there.
        lines.setdefault(
            _drop_in(str(identity.caller.uid)), ["[Service]", f"BindPaths=-{mountpoint}/@{identity.label}:{path}"]
        )
    if not lines:
        fail(f"{mountpoint}: has no view of a user who is not exempt", FAILED)
    return lines


def _drop_in(uid: str) -> str:
    return f"{SYSTEMD}/user@{uid}.service.d/cloakfs.conf"


def _places(how: str) -> list[str]:
    """Return the files that may have marked lines from an earlier setup."""
    if how == "systemd":
        return sorted(glob.glob(_drop_in("*")))
    return [NAMESPACE_CONF, *sorted(path for path in glob.glob(f"{PAM_D}/*") if os.path.isfile(path))]


def _edits(lines: Mapping[str, list[str]], places: Iterable[str]) -> list[_Edit]:
    """Return what has to change so that `lines`, and no others, are in the files."""
    edits = []
    for path in dict.fromkeys((*lines, *places)):
        before = _read(path)
        rest = _without_ours(path, before or b"")
        if path in lines and lines[path] == marked(_text(before or b"")):
            continue
        text = with_added(rest, lines[path]) if path in lines else rest
        after = text.encode("utf-8", "surrogateescape")
        edit = _Edit(path, before, None if not after and _is_ours(path) else after)
        if edit.after != before:
            edits.append(edit)
    return edits


def _is_ours(path: str) -> bool:
    return path == NAMESPACE_CONF or path.startswith(f"{SYSTEMD}/")


def _text(content: bytes) -> str:
    return content.decode("utf-8", "surrogateescape")


def _read(path: str) -> bytes | None:
    try:
        with open(path, "rb") as file:
            return file.read()
    except FileNotFoundError:
        return None
    except OSError as exc:
        fail(f"{path}: {exc.strerror}", FAILED)


def _without_ours(path: str, content: bytes) -> str:
    try:
        return without(_text(content))
    except EditedError as exc:
        fail(f"{path}:{exc.line}: {exc}", FAILED)


def _apply(edits: list[_Edit], *, removing: bool) -> None:
    """Write the files, or leave all of them as they are."""
    # A service must not run pam_namespace before its configuration is there, nor when it is gone.
    edits = sorted(edits, key=lambda edit: _is_ours(edit.path) == removing)
    done: list[_Edit] = []
    try:
        for edit in edits:
            done.append(edit)
            _write(edit.path, edit.after)
    except OSError as exc:
        for edit in reversed(done):
            with contextlib.suppress(OSError):
                _write(edit.path, edit.before)
        fail(f"{exc.filename}: {exc.strerror}; no file was changed", FAILED)
    for edit in edits:
        click.echo(printable(f"{edit.path}: {'removed' if edit.after is None else 'written'}"))
    if not edits:
        note("nothing to change")
    if any(edit.path.startswith(SYSTEMD) for edit in edits):
        note("systemctl daemon-reload makes systemd read this; user managers that run keep what they have")


def _write(path: str, content: bytes | None) -> None:
    """Replace the content of a file, and keep its permissions; None removes it, and the folder of a drop-in with it."""
    real = os.path.realpath(path)
    if content is None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(real)
        if path.startswith(SYSTEMD):
            with contextlib.suppress(OSError):  # it has other drop-ins
                os.rmdir(os.path.dirname(path))
        return
    umask = os.umask(0o022)
    try:
        if path.startswith(SYSTEMD):
            os.makedirs(os.path.dirname(real), exist_ok=True)
        os.umask(0)
        mode = stat.S_IMODE(os.stat(real).st_mode) if os.path.exists(real) else 0o644
        ownfiles.replace(real, content, mode=mode, durable=True)
    finally:
        os.umask(umask)


def _show(lines: Mapping[str, list[str]]) -> None:
    for path, added in lines.items():
        click.echo(printable(f"{path}:"))
        for line in added:
            click.echo(printable(f"  {line}"))
