"""For arbitrary entries, the configuration of the kernel's server contains nothing that the plan does not."""

import re

from hypothesis import example, given
from hypothesis import strategies as st

from cloakfs.config.errors import Location
from cloakfs.config.options import Export, Options
from cloakfs.nfs import knfsd
from cloakfs.nfs.plan import plan
from tests.property.test_exports_text import clients, exports, options, paths

NOWHERE = Location("", 1, 1)
# What cloakfs says for itself of any entry.
OWN = {
    "ro",
    "rw",
    "mp",
    "all_squash",
    "root_squash",
    "no_root_squash",
    "anonuid",
    "anongid",
    "no_subtree_check",
    "fsid",
}

values = st.text(st.sampled_from("ab/@+:,= \t\n\"'()#\\\x00é\udcff") | st.characters(), min_size=1, max_size=12)
others = st.dictionaries(
    st.sampled_from(["refer", "replicas", "sec", "xprtsec", "reexport", "mp", "mountpoint", "secure", "future"]),
    st.none() | values | values.map(lambda text: f"{text},no_root_squash"),
    max_size=4,
)
entries = st.lists(
    st.builds(
        lambda path, client, of, other: Export(
            path, client, Options(of.read_only, of.squash, range_map=of.range_map, other=tuple(other.items())), NOWHERE
        ),
        paths, clients, options, others,
    ),
    max_size=3,
)  # fmt: skip


@given(entries | exports)
@example([Export("/x", "*", Options(other=(("refer", "/a,no_root_squash@b"),)), NOWHERE)])
@example([Export("/x", "*", Options(other=(("sec", "sys) *(rw"),)), NOWHERE)])
def test_no_option_is_told_that_was_not_planned(defined: list[Export]) -> None:
    made = plan(defined, "knfsd", "/srv/cloakfs")
    lines = knfsd.render(made.mounts).splitlines()
    assert len(lines) == len(made.mounts)
    assert len({mount.name for mount in made.mounts}) == len(made.mounts) or made.problems
    for mount, line in zip(made.mounts, lines, strict=True):
        # As exports(5) reads it.
        found = re.fullmatch(r"(\S+) ([^\s()#\"]+)\(([^\s()#\"]*)\)", line)
        assert found is not None, line
        assert (found[1], found[2]) == (mount.path, mount.client)
        words = found[3].split(",")
        assert words == knfsd.export_options(mount).split(",")
        given_names = {name for name, _ in mount.options.other}
        assert {word.partition("=")[0] for word in words} <= OWN | given_names, line
        assert sum(word in words for word in ("all_squash", "root_squash", "no_root_squash")) == 1
        assert ("rw" in words) != ("ro" in words)
