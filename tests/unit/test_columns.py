"""Definitions that are held as numbers are the same definitions, also in another process."""

import json
import pickle
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloakfs.cloak import CloakDef, CloakDefs, Mask
from cloakfs.columns import Columns
from cloakfs.config.options import Options
from cloakfs.config.parse import parse_options
from cloakfs.fuse.attach import MountError
from cloakfs.identity import ClientId, ServerId
from cloakfs.mapping import MAX_ID, NOBODY, RangeDef, RangeDefs
from cloakfs.mount.reread import read_apart
from cloakfs.policy import Policy

FIGURE_1 = (
    RangeDef("uid", ClientId(100), ClientId(100), "map", ServerId(10)),
    RangeDef("gid", ClientId(0), ClientId(MAX_ID), "squash", NOBODY),
    RangeDef("uid", ClientId(800), ClientId(999), "squash", ServerId(517)),
)
CLOAKS = (
    CloakDef("uid", Mask(True, 7, 0, 7), ServerId(0), ServerId(MAX_ID)),
    CloakDef("gid", Mask(False, 0, 5, 1), NOBODY, NOBODY),
)


def test_they_are_what_they_were_made_of() -> None:
    pairs: list[tuple[tuple[object, ...], Columns[Any]]] = [
        (FIGURE_1, RangeDefs(FIGURE_1)),
        (CLOAKS, CloakDefs(CLOAKS)),
    ]
    for records, columns in pairs:
        assert columns == records == columns == type(columns)(records)
        assert tuple(columns) == records
        assert columns[-1] == records[-1]
        assert columns[1:] == records[1:] != columns
        assert hash(columns) == hash(records)
        assert repr(columns) == repr(records)
        assert columns != 5
        with pytest.raises(IndexError):
            columns[len(records)]
    assert not RangeDefs()


@given(st.integers(0, MAX_ID))
def test_they_decide_alike_in_another_process(number: int) -> None:
    here = Policy(Options(range_map=RangeDefs(FIGURE_1), cloak_list=CloakDefs(CLOAKS)))
    there = Policy(pickle.loads(pickle.dumps(here.options)))
    assert there.ids["uid"].forward(ClientId(number)) == here.ids["uid"].forward(ClientId(number))
    assert there.ids["uid"].counterpart(ServerId(number), "reverse") == here.ids["uid"].counterpart(
        ServerId(number), "reverse"
    )
    assert there.cloak.selected(ServerId(number), ServerId(number)) == here.cloak.selected(
        ServerId(number), ServerId(number)
    )


def text(count: int) -> str:
    maps = " ".join(f"uid {3 * number} map {5 * number}" for number in range(count))
    cloaks = " ".join(f"uid +077 {5 * number}" for number in range(count))
    return f"rw,range_map = {maps},cloak_list = {cloaks}"


def test_very_many_are_taken_over_in_a_moment() -> None:
    """What another process sends is not made into objects one by one: everybody would wait meanwhile."""
    options, _ = parse_options(text(20_000))
    Policy(options)
    sent = pickle.dumps(options, pickle.HIGHEST_PROTOCOL)
    began = time.thread_time()
    policy = Policy(pickle.loads(sent))
    assert time.thread_time() - began < 0.02  # a hundred times as long, if they were made
    assert policy.ids["uid"].forward(ClientId(30_000)) == 50_000


class Read:
    """Reads a file of options; can be pickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self) -> Options:
        return parse_options(self.path.read_text())[0]


def test_options_are_read_by_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))  # where `Read` is found
    path = tmp_path / "options"
    path.write_text("rw,range_map = uid 1 map 2")
    options, published = read_apart(Read(path))
    again = json.loads(published)
    assert again == "rw,range_map = uid 1 map 2"
    assert options == parse_options(again)[0]
    path.write_text("rw,range_map = uid 1 map")
    with pytest.raises(MountError, match="1:25: the text ends here"):
        read_apart(Read(path))
    path.unlink()
    with pytest.raises(MountError, match="No such file"):
        read_apart(Read(path))
