"""A record of a trace in words."""

from typing import Any

import pytest

from cloakfs.tracerecords import Record, described

RECORD: Record = {
    "operation": "lookup",
    "path": "/mnt/a",
    "new_path": None,
    "request": None,
    "pid": 7,
    "command": "ls",
    "client": {"uid": 1, "gid": 2},
    "server": {"uid": 1001, "gid": 1002},
    "inside": False,
    "error": None,
    "answer": "-rw-r--r-- 1:2",
    "remembers": None,
    "hidden": [],
    "more_hidden": 0,
    "refused": None,
    "microseconds": 9,
}
CALLER = "1:2 → 1001:1002 ls[7]"
ANSWER = "-rw-r--r-- 1:2 9 µs"
HIDES = {"path": "/mnt/a", "reason": "a rule hides it"}
HIDES_ABOVE = {"path": "/mnt", "reason": "another one"}
HIDES_SOMEWHERE = {"path": None, "reason": "a third one"}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, f"{CALLER} lookup /mnt/a = {ANSWER}"),
        ({"path": None}, f"{CALLER} lookup ? = {ANSWER}"),
        ({"operation": "rename", "new_path": "/mnt/b"}, f"{CALLER} rename /mnt/a → /mnt/b = {ANSWER}"),
        ({"operation": "read", "request": "5 at 0", "answer": "5"}, f"{CALLER} read /mnt/a (5 at 0) = 5 9 µs"),
        ({"command": None}, f"1:2 → 1001:1002 ?[7] lookup /mnt/a = {ANSWER}"),
        ({"pid": None, "server": None}, f"1:2 → - lookup /mnt/a = {ANSWER}"),
        ({"client": None, "pid": None}, f"- → 1001:1002 lookup /mnt/a = {ANSWER}"),
        ({"inside": True}, f"cloakfs itself lookup /mnt/a = {ANSWER}"),
        ({"path": "/mnt/\x1b"}, rf"{CALLER} lookup /mnt/\033 = {ANSWER}"),
        ({"error": "ENOENT", "answer": None}, f"{CALLER} lookup /mnt/a = <ENOENT> 9 µs"),
        (
            {"remembers": {"name": 3600.0, "attributes": 0.002, "content": 0}},
            f"{CALLER} lookup /mnt/a = {ANSWER}; kept: name 3600 s, attributes 0.002 s",
        ),
        ({"remembers": {"content": True}}, f"{CALLER} lookup /mnt/a = {ANSWER}; kept: content"),
        (
            {"error": "EACCES", "answer": None, "refused": "the real tree refuses it"},
            f"{CALLER} lookup /mnt/a = <EACCES> 9 µs; refused: the real tree refuses it",
        ),
        (
            {"error": "ENOENT", "answer": None, "hidden": [HIDES]},
            f"{CALLER} lookup /mnt/a = <ENOENT> 9 µs; hidden: [a rule hides it]",
        ),
        (
            {"hidden": [HIDES, HIDES_ABOVE, HIDES_SOMEWHERE], "more_hidden": 1200},
            f"{CALLER} lookup /mnt/a = {ANSWER}; "
            "hidden: [a rule hides it, /mnt: another one, ?: a third one, 1,200 more]",
        ),
    ],
)
def test_a_line(changes: dict[str, Any], text: str) -> None:
    assert described(RECORD | changes, error="<{}>".format, hidden="[{}]".format) == text
