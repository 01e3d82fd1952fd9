"""Builds the Debian package in a bare Debian 12 or 13, and installs it in another one.

There it works with it, serves an export, upgrades it from the first version that runs there, and purges it. Each root
has nothing but what every system has (mmdebstrap, --variant=minbase), and is made from nothing. Everything in it
happens in mount and process namespaces of its own, which end with it. Both packages are built with scripts/package: the
earlier one from the last commit that had its version. Without --release, both releases have their turn. What is
committed is built.
"""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

from tests.campaign.bare import CLONE, RELEASES, TOP, add_release, is_possible, make_builder, make_root, room, run_in

# The first version that runs on each: 0.1.0 looks for the libfuse of Debian 12 by its name.
_EARLIER = {"bookworm": "0.1.0", "trixie": "0.2.0"}

# What apt, mount(8) and nfs-ganesha leave behind by themselves.
_OTHERS = ("/var/lib/dpkg/", "/var/lib/apt/", "/var/log/", "/var/cache/", "/run/mount", "/round/")

HANDLES = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
class Handle(ctypes.Structure):
    _fields_ = [("size", ctypes.c_uint), ("kind", ctypes.c_int), ("data", ctypes.c_ubyte * 128)]
handle, mount = Handle(size=128), ctypes.c_int()
if libc.name_to_handle_at(-100, os.fsencode(sys.argv[1]), ctypes.byref(handle), ctypes.byref(mount), 0):
    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
print(handle.kind, bytes(handle.data[:handle.size]).hex())
"""

READ = """
import sys
from tests.nfs.wire import Wire
port, *names = sys.argv[1:]
with Wire(int(port), version=4) as wire:
    handle = wire.root()
    for name in names:
        handle = wire.lookup(handle, name.encode())
    print("read:", wire.read(handle).decode())
"""

ROUND = """
set -euE
trap 'echo "failed: $BASH_COMMAND" >&2' ERR
export DEBIAN_FRONTEND=noninteractive LC_ALL=C.UTF-8
get() { apt-get --yes "$@" >/round/apt.log 2>&1 || { cat /round/apt.log; exit 1; }; }
install() { get install --no-install-recommends "$1"; }
files() { find / -xdev | sort; }
handle() { python3 /round/handle.py "$1"; }
fails() { if "$@" >/round/said 2>&1; then echo "succeeded: $*" >&2; exit 1; fi; }

get update
[ -e /etc/mtab ] || ln -s ../proc/self/mounts /etc/mtab
get install --no-install-recommends nfs-ganesha nfs-ganesha-vfs iproute2
for deb in old new; do
  get satisfy --no-install-recommends "$(dpkg-deb --field /round/$deb.deb Depends)"
done
files >/round/before
install /round/old.deb
echo "--- installed $(cloakfs --version)"
mkdir -p /srv/real /srv/one /srv/two
echo text >/srv/real/file
cloakfs mount /srv/real /srv/one -o no_root_squash
cloakfs mount /srv/real /srv/two -o no_root_squash
handle /srv/one/file >/round/handle.old
cloakfs umount /srv/one
echo '/srv/real *(ro)' >/etc/cloakfs/exports.d/real.exports

install /round/new.deb
echo "--- upgraded to $(cloakfs -V)"
[ "$(cat /srv/two/file)" = text ]  # the daemon of the old version goes on
fails apt-get -qq remove --yes cloakfs
grep -q "still mounted, so it cannot be removed" /round/said
cloakfs umount /srv/two
cloakfs mount /srv/real /srv/one -o no_root_squash
handle /srv/one/file >/round/handle.new
cmp /round/handle.old /round/handle.new
cloakfs status /srv/one | grep -q "^ tree  *"
cloakfs umount /srv/one
echo "--- file handles are the same"

/usr/share/doc/cloakfs/scripts/demo >/round/demo.log 2>&1 || { cat /round/demo.log; exit 1; }
grep -q "my diary" /round/demo.log
grep -q 'mkdir: cannot create directory .*: File exists' /round/demo.log
mount -t fuse.cloakfs /srv/real /srv/one -o ro
[ "$(cat /srv/one/file)" = text ]
umount /srv/one
for file in /usr/share/doc/cloakfs/examples/exports.d/*; do cloakfs check "$file" --text-only >/dev/null; done
for page in man8/cloakfs.8 man5/cloakfs.exports.5 man7/cloakfs-policy.7; do
  gzip -t /usr/share/man/$page.gz
done
bash -c '. /usr/share/bash-completion/completions/cloakfs; complete -p cloakfs' >/dev/null
[ -z "$(find /usr/lib/cloakfs -newer /round/before -name '*.pyc' -cnewer /var/lib/dpkg/info/cloakfs.list)" ]
echo "--- the demonstration ran"

chmod 755 /srv/real
echo '/srv/real 127.0.0.1(rw, views = 0:0, no_root_squash)' >/etc/cloakfs/exports.d/real.exports
unshare --net bash -euc '
  ip link set lo up
  # With ::1 alone, nfs-ganesha would not listen on one address.
  ip link add outside type dummy 2>/dev/null && ip link set outside up || true
  cloakfs export up --server ganesha --port 20490
  cloakfs export status
  PYTHONPATH=/round /usr/lib/cloakfs/bin/python3 -B /round/read.py 20490 srv-real@127.0.0.1 file
  cloakfs export down
' >/round/export.log 2>&1 || { cat /round/export.log; cat /run/cloakfs/export-*.log; exit 1; }
grep -q "^ganesha: answers" /round/export.log
grep -q "^read: text" /round/export.log
echo '/srv/real *(ro)' >/etc/cloakfs/exports.d/real.exports
echo "--- an export was served"

cloakfs prune /srv/one >/dev/null
rm -rf /srv/real /srv/one /srv/two /srv/cloakfs
get remove cloakfs
[ "$(cat /etc/cloakfs/exports.d/real.exports)" = '/srv/real *(ro)' ]
[ -n "$(find /var/lib/cloakfs -name nodes.sqlite)" ]
get purge cloakfs
files >/round/after
echo "--- purged"
"""


BUILD = f"""
set -e
earlier=$1
cd {CLONE}
scripts/package
mkdir /old
git archive "$(git log -1 --format=%H -S"version = \\"$earlier\\"" -- pyproject.toml)^" | tar -x -C /old
.venv/bin/pip --quiet --disable-pip-version-check wheel --no-deps --wheel-dir /old/dist /old
mkdir /built
mv dist/cloakfs_*.deb /built/new.deb
scripts/package --wheel /old/dist/cloakfs-"$earlier"-*.whl
mv dist/cloakfs_*.deb /built/old.deb
"""


def build(release: str, room: Path) -> tuple[Path, Path]:
    """Return the package of the earlier version and that of now, built in a root of this release."""
    root = room / "builder"
    make_builder(release, root)
    if run_in(root, f"set {_EARLIER[release]}\n{BUILD}", seen=False):
        raise SystemExit(f"debian: {release}: the packages cannot be built")
    return root / "built/old.deb", root / "built/new.deb"


def _left(place: Path) -> list[str]:
    """Return what is there after all, and was not before."""
    before, after = (set((place / name).read_text().splitlines()) for name in ("before", "after"))
    return [path for path in sorted(after - before) if not path.startswith(_OTHERS)]


def _works(release: str, old: Path, new: Path, room: Path) -> bool:
    root = room / "root"
    make_root(release, root)
    place = root / "round"
    (place / "tests/nfs").mkdir(parents=True)
    for name in ("rpc.py", "wire.py"):
        shutil.copy(TOP / "tests/nfs" / name, place / "tests/nfs")
    shutil.copy(old, place / "old.deb")
    shutil.copy(new, place / "new.deb")
    (place / "handle.py").write_text(HANDLES)
    (place / "read.py").write_text(READ)
    print(f"=== {release}", subprocess.check_output(["dpkg-deb", "--field", new, "Version", "Depends"], text=True))
    if run_in(root, ROUND):
        return False
    left = _left(place)
    print("\n".join(["--- left behind:", *left]) if left else "--- nothing is left behind", flush=True)
    return not left


def main() -> int:
    """Run the campaign; the exit status is 1 if anything went wrong."""
    parser = argparse.ArgumentParser(prog="scripts/campaign debian", description=__doc__)
    add_release(parser)
    parser.add_argument(
        "--deb", type=Path, metavar="FILE", help="A package that has been built already, for --release."
    )
    parser.add_argument("--old", type=Path, metavar="FILE", help="The same of an earlier version.")
    given = parser.parse_args()
    releases = given.release or RELEASES
    if (given.deb is None) != (given.old is None) or (given.deb and len(releases) != 1):
        parser.error("--deb and --old go together, and with one --release")
    if not is_possible("debian"):
        return 1
    succeeded = True
    for release in releases:
        with room() as place:
            old, new = (given.old, given.deb) if given.deb else build(release, place)
            succeeded &= _works(release, old, new, place)
    return 0 if succeeded else 1


if __name__ == "__main__":
    sys.exit(main())
