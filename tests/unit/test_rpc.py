"""The NULL call to sockets that answer as servers do, and to some that do not."""

import socket
import struct
import threading
from collections.abc import Callable

import pytest

from cloakfs.nfs.rpc import NFS, null_call


def served(answer: Callable[[bytes], bytes]) -> bool:
    """What a call says to one who answers so."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(answer(connection.recv(1000)))

        thread = threading.Thread(target=serve)
        thread.start()
        said = null_call("127.0.0.1", server.getsockname()[1], NFS, 4, 1.0)
        thread.join()
    return said


def reply(call: bytes, *, xid: bytes = b"", accepted: int = 0, status: int = 0) -> bytes:
    return struct.pack("!I", 1 << 31 | 24) + (xid or call[4:8]) + struct.pack("!5I", 1, accepted, 0, 0, status)


def test_an_answer() -> None:
    assert served(reply)


@pytest.mark.parametrize(
    "answer",
    [
        lambda call: reply(call, status=2),  # PROG_MISMATCH
        lambda call: reply(call, accepted=1),  # MSG_DENIED
        lambda call: reply(call, xid=b"none"),
        lambda call: reply(call)[:20],
        lambda call: b"",
    ],
)
def test_no_answer(answer: Callable[[bytes], bytes]) -> None:
    assert not served(answer)


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert not null_call("127.0.0.1", port, NFS, 4, 1.0)


def test_the_call_is_that_of_rfc_5531() -> None:
    calls: list[bytes] = []

    def remember(call: bytes) -> bytes:
        calls.append(call)
        return reply(call)

    assert served(remember)
    (call,) = calls
    words = struct.unpack("!11I", call)
    assert words[0] == 1 << 31 | 40
    assert words[2:] == (0, 2, NFS, 4, 0, 0, 0, 0, 0)
