"""A type checker distinguishes client ids from server ids, and a ClientCaller from a Caller."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TOP = Path(__file__).parents[2]

PROGRAM = """
from cloakfs.identity import Caller, ClientCaller
from cloakfs.cloak import CloakDef, CloakList, Mask
from cloakfs.config.options import Options
from cloakfs.identity import ClientId, ServerId
from cloakfs.mapping import IdMap, RangeDef
from cloakfs.policy import Attrs, Policy
from cloakfs.view import KernelCheckedCaller, View

client, server = ClientId(1), ServerId(1)
asks = ClientCaller(client, client, frozenset({client}))
served = Caller(server, server, frozenset({server}))
ids, policy, view = IdMap([]), Policy(), View(Policy())
attrs = Attrs("", 0o100644, server, server)
cloak = CloakList([])
options = Options(anonuid=server, view_access=(client,))

# An id of the other realm, or a number of which nobody knows whose it is.
becomes: ServerId = ids.forward(client)
ids.forward(server)  # wrong
ids.forward(1)  # wrong
shown: ClientId = ids.reverse(server)
ids.reverse(client)  # wrong
ids.reverse(ids.forward(client))
ids.forward(ids.forward(client))  # wrong
there: ServerId | None = ids.counterpart(client, "forward")
ids.counterpart(server, "forward")  # wrong
here: ClientId | None = ids.counterpart(server, "reverse")
ids.counterpart(client, "reverse")  # wrong
ids.is_sole(client)  # wrong
in_groups: frozenset[ServerId] = ids.groups(asks.groups)
ids.groups(served.groups)  # wrong
RangeDef("uid", client, client, "map", server)
RangeDef("uid", client, client, "map", client)  # wrong
RangeDef("uid", client, server, "map", server)  # wrong
CloakDef("uid", Mask.parse("+007"), server, server)
CloakDef("uid", Mask.parse("+007"), client, server)  # wrong
cloak.visible(0, server, server, served.uid, served.groups)
cloak.visible(0, server, server, asks.uid, served.groups)  # wrong
Options(anonuid=client)  # wrong
Options(view_access=(server,))  # wrong
Attrs("", 0o100644, client, server)  # wrong
Caller(client, server, frozenset())  # wrong
ClientCaller(client, server, frozenset())  # wrong
client == server  # wrong
client in served.groups  # wrong

# Who asks, and as whom it is served.
identity: Caller = policy.forward(asks)
policy.forward(served)  # wrong
policy.visible(policy.forward(asks), attrs)
policy.visible(asks, attrs)  # wrong
attrs.accessible(asks, 4)  # wrong
View(policy, served)
View(policy, asks)  # wrong
maybe: Caller | None = view.identify(asks)
view.identify(served)  # wrong
view.visible(asks, attrs)  # wrong
view.server_ids(*view.client_ids(server, server))
view.server_ids(*view.server_ids(client, client))  # wrong
view.client_ids(*view.client_ids(server, server))  # wrong
stored: ServerId | None = view.server_id("uid", client)
view.server_id("uid", server)  # wrong
view.client_id("uid", client)  # wrong
view.admits(served.uid)  # wrong
KernelCheckedCaller(client, client, server, server).recognise(server, server, client, client)
KernelCheckedCaller(client, server, server, server)  # wrong
KernelCheckedCaller(client, client, server, server).recognise(server, client, client, client)  # wrong
"""


@pytest.mark.timeout(120)
def test_a_type_checker_refuses_the_other_realm_and_nothing_else(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, "-m", "mypy", "--config-file", str(TOP / "pyproject.toml"), "--no-error-summary"]
    # Not the project's cache: another mypy may be writing there.
    run = subprocess.run(
        [*command, "--cache-dir", str(tmp_path / "cache"), str(program)],
        cwd=TOP,
        env={**os.environ, "MYPYPATH": str(TOP)},
        capture_output=True,
        text=True,
        check=False,
    )
    refused = {int(line.split(":")[1]) for line in run.stdout.splitlines() if ": error: " in line}
    wrong = {number for number, line in enumerate(PROGRAM.splitlines(), 1) if line.endswith("# wrong")}
    assert run.stderr == ""
    assert refused == wrong, run.stdout
