"""The NULL call to sockets that answer as servers do, and to some that do not."""

import socket
import struct
import threading
from collections.abc import Callable

import pytest

from cloakfs.nfs import rpc
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


def asked(results: Callable[[bytes], bytes], ask: Callable[[int], int]) -> tuple[int, list[bytes]]:
    """What `ask` makes of the results of its calls to this port, and the calls."""
    calls: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(5)

        def serve() -> None:
            while True:
                connection, _ = server.accept()
                with connection:
                    calls.append(connection.recv(1000))
                    told = results(calls[-1])
                    size = struct.pack("!I", 1 << 31 | 24 + len(told))
                    connection.sendall(size + reply(calls[-1])[4:] + told)
                    if told[:4] != struct.pack("!I", rpc.DELAY):
                        return

        thread = threading.Thread(target=serve)
        thread.start()
        said = ask(server.getsockname()[1])
        thread.join()
    return said, calls


@pytest.mark.parametrize("status", [0, 2, 10016])
def test_a_lookup(status: int) -> None:
    """The status of the COMPOUND; the call is one that RFC 7530 and RFC 5531 know, from root and a reserved port."""
    said, (call,) = asked(
        lambda call: struct.pack("!I", status) + bytes(8),
        lambda port: rpc.lookup("127.0.0.1", port, ["srv", "häme"], "127.0.0.1", 3),
    )
    assert said == status
    assert call[28:60] == struct.pack("!6I", 1, 24, 0, 1, ord("c") << 24, 0) + bytes(8)
    arguments = call[68:]
    assert arguments == (
        struct.pack("!5I", 0, 0, 4, 24, 15) + b"\0\0\0\x03srv\0" + b"\0\0\0\x0f"
        b"\0\0\0\x05h\xc3\xa4me\0\0\0" + struct.pack("!3I", 9, 1, 2)
    )


def test_a_lookup_that_the_server_puts_off() -> None:
    told = [struct.pack("!I", 0), *[struct.pack("!I", rpc.DELAY)] * 2]
    said, calls = asked(lambda _: told.pop(), lambda port: rpc.lookup("127.0.0.1", port, [], "127.0.0.1", 5))
    assert (said, len(calls)) == (0, 3)


def test_an_answer_without_a_status_is_none() -> None:
    with pytest.raises(rpc.NotAccepted):
        asked(lambda _: b"", lambda port: rpc.lookup("127.0.0.1", port, ["x"], "127.0.0.1", 3))


@pytest.mark.parametrize(
    ("status", "words"), [(2, "No such file or directory"), (70, "Stale file handle"), (10099, "NFS error 10099")]
)
def test_a_status_in_words(status: int, words: str) -> None:
    assert rpc.described(status) == words
