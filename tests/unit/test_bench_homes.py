"""Homes in the benchmark: each is its owner's, and the definitions of the peers hide it from all others."""

import pytest

from bench.homes import DIRECTORIES, HOME, TEAM, USERS, names, place_of, rights_of
from bench.peers import SHIFT, definitions
from bench.tree import KINDS, OWNER, WORKER, Sizes
from cloakfs.config.parse import parse_options
from cloakfs.identity import ClientCaller, ClientId, ServerId
from cloakfs.policy import Attrs, Policy
from cloakfs.view import View


@pytest.mark.parametrize("count", [2, 10, 1000])
@pytest.mark.parametrize("maps", [True, False])
def test_a_home_is_hidden_from_everybody_but_its_owner(count: int, *, maps: bool) -> None:
    view = View(Policy(parse_options(definitions(count, maps=maps))[0]))
    shift = SHIFT if maps else 0
    top = Attrs("home", 0o040755, ServerId(OWNER), ServerId(OWNER), nlink=2)
    for user in range(USERS):
        client = ClientId(WORKER + user + shift)
        who = view.identify(ClientCaller(client, client, frozenset()))
        assert who is not None
        assert view.visible(who, top)
        seen = [
            owner
            for owner in range(USERS)
            for uid, gid, mode, _ in [rights_of(HOME, owner)]
            if view.visible(who, Attrs(f"user-{owner:02}", 0o040000 | mode, ServerId(uid), ServerId(gid), nlink=2))
        ]
        assert seen == [user]


def test_files_are_several_directories_deep() -> None:
    files = names(Sizes().own)
    assert len(set(files)) == len(files) == 500
    assert {name.count("/") for name in files} == {2, 3, 4, 5, 6}
    assert {name.rpartition("/")[0] for name in files} == set(DIRECTORIES)


def test_places() -> None:
    assert [place_of(kind) for kind in (*KINDS, HOME)] == ["public", "private", "home/user-00/project"]
    assert place_of(HOME, 19) == "home/user-19/project"
    assert place_of(TEAM, 1) == "team"
