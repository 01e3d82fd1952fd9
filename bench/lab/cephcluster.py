"""A small Ceph cluster of ordinary processes: a monitor, a disk in memory, and the metadata server of one CephFS.

It runs in a network namespace of its own, in which guests have a tap device each. Nothing outlasts it.
"""

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
import uuid
from pathlib import Path
from typing import Self

PACKAGES = {
    "ceph-mon": "ceph-mon",
    "ceph-osd": "ceph-osd",
    "ceph-mds": "ceph-mds",
    "ceph": "ceph-common",
    "monmaptool": "ceph-mon",
}

ADDRESS = "10.77.0.1"
"""Of the monitor."""

GUEST_ADDRESS = "10.77.0.10/24"

BEHIND = "10.8.0.0/16"
"""Networks that a guest may have, and from which clients of the cluster can be."""

_TAP = "tap0"
_BOOT_SECONDS = 60.0

_CONFIG = f"""\
[global]
fsid = {{fsid}}
mon_host = [v2:{ADDRESS}:3300/0,v1:{ADDRESS}:6789/0]
public_addr = {ADDRESS}
cluster_addr = {ADDRESS}
public_network = 10.77.0.0/24
keyring = {{top}}/keyring
run_dir = {{top}}/run
admin_socket = {{top}}/run/$name.asok
log_file = {{top}}/log/$name.log
mon_cluster_log_file = {{top}}/log/cluster.log
auth_cluster_required = none
auth_service_required = none
auth_client_required = none
osd_pool_default_size = 1
osd_pool_default_min_size = 1
mon_allow_pool_size_one = true
mon_warn_on_pool_no_redundancy = false
mon_data_avail_crit = 0
osd_crush_chooseleaf_type = 0
osd_pool_default_pg_num = 8
osd_pool_default_pgp_num = 8
osd_pool_default_pg_autoscale_mode = off
ms_bind_ipv6 = false
setuser_match_path =
pid_file =
[mon]
mon_data = {{top}}/mon
mon_initial_members = a
mon_host = {ADDRESS}
auth_allow_insecure_global_id_reclaim = false
[osd]
osd_data = {{top}}/osd
osd_objectstore = memstore
memstore_device_bytes = 1073741824
osd_class_dir = /usr/lib/x86_64-linux-gnu/rados-classes
[mds]
mds_data = {{top}}/mds
mds_beacon_grace = 60
mds_tick_interval = 0.1
"""


def missing() -> str | None:
    """Why there can be no cluster here, with the way out."""
    for program, package in PACKAGES.items():
        if not shutil.which(program):
            return f"needs {program} (apt-get install --no-install-recommends {package})"
    return None


class CephCluster:
    """One cluster. Use it as a context manager: whatever happens, its processes and its network end.

    Attributes:
        network: the words of a guest's command line for its network device, `vec0`.
        enter: the words of a command that has another one run in the cluster's network.
    """

    def __init__(self) -> None:
        namespace = f"cloakfs-ceph-{os.getpid()}"
        self.enter = ("ip", "netns", "exec", namespace)
        # Larger frames are lost without gro (Linux 6.1).
        self.network = (f"vec0:transport=tap,ifname={_TAP},mac=02:00:00:00:00:10,gro=1",)
        self._namespace = namespace
        self._top = tempfile.mkdtemp(prefix="cloakfs-ceph-")
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._stack = contextlib.ExitStack()
        self._stack.callback(shutil.rmtree, self._top)
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        _run("ip", "netns", "add", self._namespace)
        self._stack.callback(_run, "ip", "netns", "del", self._namespace)
        for words in (
            "link set lo up",
            "link add br0 type bridge",
            f"addr add {ADDRESS}/24 dev br0",
            "link set br0 up",
            f"tuntap add {_TAP} mode tap",
            f"link set {_TAP} master br0 up",
            f"route add {BEHIND} via {GUEST_ADDRESS.partition('/')[0]}",
        ):
            _run("ip", "-n", self._namespace, *words.split())
        for name in ("mon", "osd", "mds", "run", "log"):
            os.mkdir(f"{self._top}/{name}")
        fsid = str(uuid.uuid4())
        Path(self._config).write_text(_CONFIG.format(top=self._top, fsid=fsid), encoding="ascii")
        keyring, monmap = f"{self._top}/keyring", f"{self._top}/monmap"
        for name, more in (("mon.", ()), ("client.admin", ("--cap", "osd", "allow *", "--cap", "mds", "allow *"))):
            made = () if os.path.exists(keyring) else ("--create-keyring",)
            _run("ceph-authtool", *made, keyring, "--gen-key", "-n", name, "--cap", "mon", "allow *", *more)
        addresses = f"[v2:{ADDRESS}:3300,v1:{ADDRESS}:6789]"
        _run("monmaptool", "--create", "--fsid", fsid, "--addv", "a", addresses, monmap)
        self._ceph("mon", "--mkfs", "-i", "a", "--monmap", monmap, "--keyring", keyring)
        self._begin("mon", "a")
        self._ask("mon", "stat")
        osd = str(uuid.uuid4())
        self._ask("osd", "new", osd, "0")
        self._ceph("osd", "-i", "0", "--mkfs", "--osd-uuid", osd)
        self._begin("osd", "0")
        self._begin("mds", "a")
        for pool in ("meta", "data"):
            self._ask("osd", "pool", "create", pool, "8")
        self._ask("fs", "new", "cephfs", "meta", "data")
        deadline = time.monotonic() + _BOOT_SECONDS
        while "up:active" not in self._ask("mds", "stat"):
            if time.monotonic() > deadline:
                raise TimeoutError("the metadata server of CephFS is not active")
            time.sleep(0.2)

    @property
    def _config(self) -> str:
        return f"{self._top}/ceph.conf"

    def _words(self, program: str, *words: str) -> tuple[str, ...]:
        return (*self.enter, program, "-c", self._config, *words)

    def _ask(self, *words: str) -> str:
        return _run(*self._words("ceph", "--connect-timeout", "20", *words))

    def _ceph(self, kind: str, *words: str) -> None:
        _run(*self._words(f"ceph-{kind}", *words))

    def _begin(self, kind: str, name: str) -> None:
        with open(f"{self._top}/log/{kind}.out", "wb") as out:
            words = self._words(f"ceph-{kind}", "-i", name, "-f")
            process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        self._processes[kind] = process

    def _kill(self, kind: str) -> None:
        process = self._processes[kind]
        process.kill()  # `ip netns exec` has become the daemon
        process.wait()

    def restart_metadata_server(self) -> None:
        """Kill the metadata server, and start another one in its place; clients wait for that."""
        self._kill("mds")
        self._begin("mds", "a")

    def close(self) -> None:
        """End it. All that it holds is thrown away, so that nothing has to end in order."""
        for kind in self._processes:
            self._kill(kind)
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout
