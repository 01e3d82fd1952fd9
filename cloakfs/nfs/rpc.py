"""The smallest request that an ONC RPC service answers: the NULL procedure (RFC 5531 §12)."""

import secrets
import socket
import struct
import time

RPCBIND = 100000
NFS = 100003
MOUNT = 100005

_CALL, _REPLY = 0, 1
_LAST_FRAGMENT = 1 << 31


def null_call(host: str, port: int, program: int, version: int, timeout: float = 2.0) -> bool:
    """Whether this version of a program answers on a TCP port.

    Args:
        host: name or address.
        port: 1 to 65535.
        program: the number of the program, as registered with IANA.
        version: the version of the program.
        timeout: the limit for connecting and the answer together, in seconds.

    Returns:
        False if nothing listens, nothing answers in time, or the program or version is not served there.
    """
    xid = secrets.randbits(32)
    # Procedure 0, credentials and verifier AUTH_NONE.
    call = struct.pack("!10I", xid, _CALL, 2, program, version, 0, 0, 0, 0, 0)
    deadline = time.monotonic() + timeout
    try:
        with socket.create_connection((host, port), timeout=timeout) as stream:
            stream.sendall(struct.pack("!I", _LAST_FRAGMENT | len(call)) + call)
            # Record mark, xid, REPLY, MSG_ACCEPTED, verifier (flavour and length 0), SUCCESS.
            answer = b""
            while len(answer) < 28:
                stream.settimeout(max(deadline - time.monotonic(), 0.001))
                more = stream.recv(28 - len(answer))
                if not more:
                    return False
                answer += more
    except OSError:
        return False
    return struct.unpack("!7I", answer)[1:] == (xid, _REPLY, 0, 0, 0, 0)
