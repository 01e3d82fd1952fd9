"""What the guard of an export tells the daemons of its mounts, without an NFS server."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import trio

from cli.common import OWN_COMMAND
from cloakfs.exports import Location, Options
from cloakfs.mounted import mounted
from cloakfs.nfs.guard import Guard
from cloakfs.nfs.knfsd import Knfsd
from cloakfs.nfs.plan import Mount, Plan
from cloakfs.nfs.server import ServerError


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
    guard = Guard(plan, lambda: plan, Knfsd(), run_dir, OWN_COMMAND)

    async def reload() -> None:
        watched = await guard._mount(mount)
        try:
            with trio.fail_after(25):  # it does not wait in vain, which takes longer
                plug.write_text("class P(\n")
                with pytest.raises(ServerError, match="SyntaxError"):
                    await guard._reload_daemon(watched, mount)
                assert (mounted()[path].asked, mounted()[path].reloads) == (1, 0)
                plug.write_text(code)
                changed = replace(mount, options=replace(options, anonuid=7))
                await guard._reload_daemon(watched, changed)
                assert (mounted()[path].asked, mounted()[path].reloads) == (2, 1)
                assert watched.mount == changed
                assert "anonuid=7" in mounted()[path].options
                # No plan has a daemon told this: it would be mounted anew.
                with pytest.raises(ServerError, match="ro or rw: only a new mount changes that"):
                    await guard._reload_daemon(watched, replace(mount, options=replace(options, read_only=True)))
                assert watched.mount == changed
        finally:
            await guard._unmount(mount)

    trio.run(reload)
    assert path not in mounted()
