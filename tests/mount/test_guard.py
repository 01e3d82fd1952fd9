"""How the guard of an export makes the daemons of its mounts reload, without an NFS server."""

import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import trio

from cli.common import OWN_COMMAND
from cloakfs.config.errors import Location
from cloakfs.config.options import Options
from cloakfs.ids import ServerId
from cloakfs.mounted import mounted
from cloakfs.nfs.ending import wait_for_end
from cloakfs.nfs.guard import Guard, Watched, _NotTakenOver
from cloakfs.nfs.knfsd import Knfsd
from cloakfs.nfs.plan import Mount, Plan
from cloakfs.nfs.served import Answers
from cloakfs.nfs.server import ServerError


class NoServer(Knfsd):
    """What is mounted is what is served."""

    async def change(self, mounts: Sequence[Mount], renewed: Sequence[Mount]) -> None:
        pass

    async def ask(self, mounts: Sequence[Mount]) -> Answers:
        return Answers()


def test_a_daemon_that_refuses_to_reload_is_believed_at_once(base: str, tree: str) -> None:
    plug = Path(base, "plug.py")
    code = "class P:\n    def visible(self, caller, attrs):\n        return True\n"
    plug.write_text(code)
    path = os.path.join(base, "mnt")
    options = Options(read_only=False, policy=f"{plug}:P")
    mount = Mount("it", path, tree, "*", "", options, Location("x.exports", 1, 1))
    plan = Plan("knfsd", base, (mount,), (), ())
    run_dir = os.path.join(base, "run")
    os.mkdir(run_dir)
    guard = Guard(plan, lambda: plan, NoServer(), run_dir, OWN_COMMAND)

    async def reload() -> None:
        watched = await guard._mount(mount)
        try:
            with trio.fail_after(25):  # it does not wait in vain, which takes longer
                plug.write_text("class P(\n")
                with pytest.raises(ServerError, match="SyntaxError"):
                    await guard._reload_daemon(watched, mount)
                assert (mounted()[path].asked, mounted()[path].reloads) == (1, 0)
                plug.write_text(code)
                changed = replace(mount, options=replace(options, anonuid=ServerId(7)))
                await guard._reload_daemon(watched, changed)
                assert (mounted()[path].asked, mounted()[path].reloads) == (2, 1)
                assert watched.mount == changed
                assert "anonuid=7" in mounted()[path].options
                # No plan has a daemon told this: it would be mounted anew.
                with pytest.raises(ServerError, match="ro or rw: only a new mount can change this"):
                    await guard._reload_daemon(watched, replace(mount, options=replace(options, read_only=True)))
                assert watched.mount == changed
        finally:
            await guard._unmount(mount)

    trio.run(reload)
    assert path not in mounted()


PLUG_IN = "class P:\n    def visible(self, caller, attrs):\n        return True\n"


@pytest.mark.parametrize("first", ["options", "plug-in", "dead"])
def test_a_reload_that_fails_half_way_is_taken_back(base: str, tree: str, first: str) -> None:
    """Two daemons are told, and the second refuses."""
    plugs = [Path(base, f"plug{number}.py") for number in (0, 1)]
    for plug in plugs:
        plug.write_text(PLUG_IN)
    before = Options(read_only=False, anonuid=ServerId(5))
    plain = replace(before, policy=f"{plugs[0]}:P") if first == "plug-in" else before
    chosen = (plain, replace(before, policy=f"{plugs[1]}:P"))
    old = [
        Mount(f"it{number}", f"{base}/mnt{number}", tree, "*", "", options, Location("x.exports", 1, 1))
        for number, options in enumerate(chosen)
    ]
    new = [replace(mount, options=replace(mount.options, anonuid=ServerId(7))) for mount in old]
    plan = Plan("knfsd", base, tuple(old), (), ())
    run_dir = os.path.join(base, "run")
    os.mkdir(run_dir)
    guard = Guard(plan, lambda: plan, NoServer(), run_dir, OWN_COMMAND)

    async def reload() -> tuple[str, list[str]]:
        for mount in old:
            guard._watched[mount.name] = await guard._mount(mount)
        try:
            plugs[1].write_text("class P(\n")
            tell = guard._reload_daemon

            async def tell_and_kill(old: Watched, mount: Mount) -> None:
                await tell(old, mount)
                os.kill(old.pid, signal.SIGKILL)
                await wait_for_end(old.pid)

            if first == "dead":
                guard._reload_daemon = tell_and_kill  # type: ignore[method-assign]
            with pytest.raises(_NotTakenOver) as raised:
                await guard._take_over(replace(plan, mounts=tuple(new)))
            if first != "dead":
                assert "anonuid=5" in mounted()[old[0].path].options
            for mount in old:
                assert guard._watched[mount.name].mount == mount
                assert "anonuid=5" in Path(guard._entry_file(mount)).read_text()
            assert "anonuid=5" in mounted()[old[1].path].options
            return str(raised.value), raised.value.left
        finally:
            for mount in old:
                await guard._unmount(mount)

    said, left = trio.run(reload)
    assert "SyntaxError" in said
    assert (
        left
        == {
            "options": [],
            "plug-in": [f"{old[0].path} keeps the plug-in that it has read again"],
            "dead": [
                f"{old[0].path} may keep the new options until it is mounted again "
                f"({old[0].path}: its daemon has just died; try again)"
            ],
        }[first]
    )


def test_reading_ahead_in_another_way_takes_no_new_mount(base: str, tree: str) -> None:
    options = Options(read_only=False)
    mount = Mount("it", f"{base}/mnt", tree, "*", "", options, Location("x.exports", 1, 1))
    limits = replace(options.prefetch_limits, files=7)
    changed = replace(mount, options=replace(options, prefetch="off", prefetch_limits=limits))
    plan = Plan("knfsd", base, (mount,), (), ())
    run_dir = os.path.join(base, "run")
    os.mkdir(run_dir)
    guard = Guard(plan, lambda: plan, NoServer(), run_dir, OWN_COMMAND)

    async def reload() -> None:
        watched = guard._watched[mount.name] = await guard._mount(mount)
        try:
            told = await guard._take_over(replace(plan, mounts=(changed,)))
            assert (told["changed"], told["renewed"]) == ([mount.path], [])
            assert mounted()[mount.path].pid == watched.pid
            assert "prefetch=off" in mounted()[mount.path].options
            assert "prefetch_files=7" in mounted()[mount.path].options
        finally:
            await guard._unmount(mount)

    trio.run(reload)
