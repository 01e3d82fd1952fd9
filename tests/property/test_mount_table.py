"""The mount table can be read whatever users put into it."""

import os

from hypothesis import example, given
from hypothesis import strategies as st

from cloakfs.linux import mountinfo

FIELD = st.binary(max_size=12).map(lambda field: field.replace(b"\n", b"").replace(b" ", b""))
LINE = st.lists(FIELD, max_size=14).map(b" ".join)


def escaped(name: bytes) -> bytes:
    """As the kernel does (`mangle_path`, `mangle`)."""
    return b"".join(b"\\%03o" % byte if byte in b" \t\n\\" else bytes([byte]) for byte in name)


NAME = st.binary(min_size=1, max_size=20).filter(lambda name: not set(name) & {0, ord("/")})


@given(st.binary(max_size=300))
@example(b"1 2 0:1 / /x\\777 rw - fuse.\xff x rw,user_id=9999999999999")
def test_any_bytes(table: bytes) -> None:
    mountinfo.parse(table)


@given(st.lists(LINE, max_size=5))
def test_any_fields(lines: list[bytes]) -> None:
    mountinfo.parse(b"\n".join(lines))


@given(name=NAME, kind=NAME, source=NAME, uid=st.integers(0, 2**32 - 2), odd=LINE)
@example(name=b"\xff\x0c\r\x85", kind=b"x\xff", source=b"a - b", uid=1000, odd=b"")
def test_what_is_mounted_is_found_beside_it(name: bytes, kind: bytes, source: bytes, uid: int, odd: bytes) -> None:
    line = b"42 7 0:33 / /mnt/%s rw,nosuid shared:1 master:2 - fuse.%s %s rw,user_id=%d,group_id=5" % (
        escaped(name), escaped(kind), escaped(source), uid,
    )  # fmt: skip
    odd = odd if not odd.startswith(b"42") else b""
    place = mountinfo.parse(b"\n".join([odd, line, odd, b""]))[42]
    assert os.fsencode(place.path) == b"/mnt/" + name
    assert os.fsencode(place.kind) == b"fuse." + kind
    assert (place.parent, place.device, place.mounter, place.words) == (7, "0:33", uid, "rw,nosuid")


@given(st.text(max_size=20))
def test_who_mounts_something_else_does_not_answer_for_it(options: str) -> None:
    line = f"42 7 0:33 / /mnt rw - ext4 /dev/sda rw,user_id=1000,{options}"
    assert all(place.mounter == 0 for place in mountinfo.parse(line.encode("utf-8", "replace")).values())
