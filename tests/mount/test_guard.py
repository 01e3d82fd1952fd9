"""How the guard of an export makes the daemons of its mounts reload, without an NFS server."""

import contextlib
import json
import os
import re
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio

from cli.common import FORKED
from cloakfs.background.forkserver import ForkServer
from cloakfs.config.errors import Location
from cloakfs.config.options import Options
from cloakfs.identity import ServerId
from cloakfs.nfs.guard import Guard, control_path
from cloakfs.nfs.plan import Mount, Plan
from cloakfs.state.runtime import mounted
from tests.mount.guards import NoServer

PLUG_IN = "class P:\n    def visible(self, caller, attrs):\n        return True\n"
BROKEN = "class P(\n"
KILL = """
import os, select, signal
held = os.pidfd_open({pid})
os.kill({pid}, signal.SIGKILL)
select.select([held], [], [], 60)
raise SyntaxError
"""

Order = Callable[[str], dict[str, Any]]


def mount_of(base: str, tree: str, name: str, options: Options) -> Mount:
    return Mount(name, f"{base}/{name}", tree, "*", "", options, Location("x.exports", 1, 1))


class Served:
    """A guard in this process: `plan` is what it finds when it reads the configuration again."""

    def __init__(self, base: str, *mounts: Mount) -> None:
        self.plan = Plan("knfsd", base, mounts, (), ())
        self.run_dir = os.path.join(base, "run")
        os.mkdir(self.run_dir)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        guard = Guard(self.plan, lambda: self.plan, NoServer(), self.run_dir, ForkServer(FORKED))
        ready = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(guard.run, ready.set)
            await ready.wait()
            try:
                yield
            finally:
                with trio.CancelScope(shield=True):
                    await self.order("down")

    async def order(self, word: str) -> dict[str, Any]:
        """Return what the guard answers."""
        return await trio.to_thread.run_sync(self._order, word)

    def _order(self, word: str) -> dict[str, Any]:
        with socket.socket(socket.AF_UNIX) as control:
            control.settimeout(60)
            control.connect(control_path(self.run_dir))
            control.sendall(word.encode())
            with control.makefile("rb") as answer:
                return dict(json.loads(answer.read()))

    def use(self, *mounts: Mount) -> None:
        """Have this in the configuration from now on."""
        self.plan = replace(self.plan, mounts=mounts)

    def entry(self, mount: Mount) -> str:
        """Return what the daemon of a mount reads."""
        return Path(self.run_dir, f"{mount.name}.exports").read_text()


def test_a_daemon_that_refuses_to_reload_is_believed_at_once(base: str, tree: str) -> None:
    plug = Path(base, "plug.py")
    plug.write_text(PLUG_IN)
    options = Options(read_only=False, policy=f"{plug}:P")
    mount = mount_of(base, tree, "it", options)
    changed = replace(mount, options=replace(options, anonuid=ServerId(7)))
    served = Served(base, mount)

    async def reload() -> None:
        async with served.running():
            with trio.fail_after(25):  # it does not wait in vain, which takes longer
                plug.write_text(BROKEN)
                (error,) = (await served.order("reload"))["errors"]
                assert "SyntaxError" in error
                assert (mounted()[mount.path].asked, mounted()[mount.path].reloads) == (1, 0)
                plug.write_text(PLUG_IN)
                served.use(changed)
                assert (await served.order("reload"))["errors"] == []
                assert (mounted()[mount.path].asked, mounted()[mount.path].reloads) == (2, 1)
                assert "anonuid=7" in mounted()[mount.path].options
                assert "anonuid=7" in (await served.order("status"))["mounts"][0]["options"]

    trio.run(reload)
    assert mount.path not in mounted()


@pytest.mark.parametrize("first", ["options", "plug-in", "dead"])
def test_a_reload_that_fails_half_way_is_taken_back(base: str, tree: str, first: str) -> None:
    """Two daemons are told, and the second refuses."""
    plugs = [Path(base, f"plug{number}.py") for number in (0, 1)]
    for plug in plugs:
        plug.write_text(PLUG_IN)
    before = Options(read_only=False, anonuid=ServerId(5))
    plain = replace(before, policy=f"{plugs[0]}:P") if first == "plug-in" else before
    chosen = (plain, replace(before, policy=f"{plugs[1]}:P"))
    old = [mount_of(base, tree, f"mnt{number}", options) for number, options in enumerate(chosen)]
    new = [replace(mount, options=replace(mount.options, anonuid=ServerId(7))) for mount in old]
    served = Served(base, *old)

    async def reload() -> dict[str, Any]:
        async with served.running():
            pid = mounted()[old[0].path].pid
            plugs[1].write_text(KILL.format(pid=pid) if first == "dead" else BROKEN)
            served.use(*new)
            told = await served.order("reload")
            if first != "dead":
                assert "anonuid=5" in mounted()[old[0].path].options
            for mount in (await served.order("status"))["mounts"]:
                assert "anonuid=5" in mount["options"]
            for mount in old:
                assert "anonuid=5" in served.entry(mount)
            assert "anonuid=5" in mounted()[old[1].path].options
            return told

    told = trio.run(reload)
    (error,) = told["errors"]
    assert "SyntaxError" in error
    path = old[0].path
    left = {
        "options": [],
        "plug-in": [f"{path} keeps the plug-in that it has read again"],
        "dead": [f"{path} may keep the new options until it is mounted again ({path}: its daemon has died; try again)"],
    }[first]
    # The guard may have noticed it meanwhile.
    noticed = r"its daemon (has just died|died; it is being mounted again);"
    assert [re.sub(noticed, "its daemon has died;", line) for line in told["left"]] == left


def test_reading_ahead_in_another_way_takes_no_new_mount(base: str, tree: str) -> None:
    options = Options(read_only=False)
    mount = mount_of(base, tree, "mnt", options)
    limits = replace(options.prefetch_limits, files=7)
    served = Served(base, mount)

    async def reload() -> None:
        async with served.running():
            pid = mounted()[mount.path].pid
            served.use(replace(mount, options=replace(options, prefetch="off", prefetch_limits=limits)))
            told = await served.order("reload")
            assert (told["changed"], told["renewed"]) == ([mount.path], [])
            assert mounted()[mount.path].pid == pid
            assert "prefetch=off" in mounted()[mount.path].options
            assert "prefetch_files=7" in mounted()[mount.path].options

    trio.run(reload)
