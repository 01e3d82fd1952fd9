"""Two NFS servers of one CephFS, with the same configuration and key: clients go from one to the other."""

import errno
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest

from cloakfs.nfs.plan import mount_name
from cloakfs.state import handlekey
from tests.agents import User, names, read, write
from tests.heads.inguest.heads import SERVICE, TREE, Head, address_of, lead_to, networks, sh
from tests.heads.inguest.test_heads import ANN, BOB, prepare
from tests.nfs import nfs3
from tests.waiting import wait_until

ENTRY = f"{TREE} *(rw,insecure,cloak_list = uid +077 1000 1001)\n"
PATH = f"/srv/cloakfs/{mount_name(TREE, '*')}"
HEADS = (0, 1)


@pytest.fixture(scope="module")
def heads() -> Iterator[tuple[Head, ...]]:
    handlekey.make()
    with ExitStack() as stack:
        stack.callback(os.unlink, handlekey.PATH)
        stack.enter_context(networks(len(HEADS)))
        made = []
        for number in HEADS:
            made.append(Head("", number))
            stack.callback(made[-1].close)
        made[0].do(prepare)
        for number, head in enumerate(made):
            head.export(number, ENTRY)
        lead_to(0)
        yield tuple(made)


@pytest.mark.usefixtures("heads")
def test_a_handle_of_one_is_one_of_the_other() -> None:
    """And neither shows more by it than by name."""
    with ExitStack() as stack:
        clients = {(number, uid): nfs3.Client(address_of(number), uid, uid) for number in HEADS for uid in (ANN, BOB)}
        for client in clients.values():
            stack.callback(client.close)
        roots = [clients[number, ANN].mount(PATH) for number in HEADS]
        assert roots[0] == roots[1]
        public = clients[0, ANN].walk(roots[0], "public", "deep", "er", "file 1")
        private = clients[0, ANN].walk(roots[0], str(ANN), "file")
        for number in HEADS:
            assert clients[number, ANN].walk(roots[0], "public", "deep", "er", "file 1") == public
            assert clients[number, BOB].read(public) == (nfs3.OK, b"content 1")
            assert clients[number, ANN].read(private) == (nfs3.OK, b"of 1000")
            assert clients[number, BOB].read(private)[0] != nfs3.OK


@pytest.mark.parametrize("version", ["3", "4.2"])
@pytest.mark.usefixtures("heads")
def test_clients_go_on_with_another_head(version: str) -> None:
    """With a file open and a directory as working directory, there and back; what was written is there."""
    place = f"/client-{version}"
    os.makedirs(place, exist_ok=True)
    with ExitStack() as stack:
        lead_to(0)
        sh("mount", "-t", "nfs", "-o", f"vers={version},hard,nolock,timeo=50", f"{SERVICE}:{PATH}", place)
        stack.callback(sh, "umount", "-f", "-l", place)
        ann, bob = (stack.enter_context(User(uid)) for uid in (ANN, BOB))
        ann.do(os.chdir, f"{place}/{ANN}")
        ann.do(write, f"{place}/{ANN}/open-{version}", b"first")
        file = ann.do(os.open, f"open-{version}", os.O_RDWR)
        for number in (1, 0):
            lead_to(number)
            began = time.monotonic()
            wait_until(lambda: goes_on(ann, file, version), 90)
            print(f"NFSv{version}: goes on with head {number} after {time.monotonic() - began:.1f} s")
            ann.do(os.pwrite, file, b"head %d" % number, 10)
            ann.do(os.fsync, file)
            assert ann.do(read, f"open-{version}")[10:] == b"head %d" % number
            assert bob.error(os.listdir, f"{place}/{ANN}") in (errno.ENOENT, errno.ESTALE)
            assert bob.do(names, place) == [str(BOB), "public"]
        ann.do(os.close, file)
        ann.do(os.chdir, "/")


def goes_on(who: User, file: int, version: str) -> bool:
    with suppress(OSError):
        who.do(os.posix_fadvise, file, 0, 0, os.POSIX_FADV_DONTNEED)
        return who.do(os.pread, file, 5, 0) == b"first" and f"open-{version}" in who.do(names, ".")
    return False
