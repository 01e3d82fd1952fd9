"""How a mount is exported (`cloakfs.exportmode`)."""

import pytest

from cloakfs.exportmode import LOCAL, ExportMode, Server
from cloakfs.fuse.attach import split_mount_options

KNFSD, GANESHA = ExportMode(Server.KNFSD), ExportMode(Server.GANESHA)


@pytest.mark.parametrize(
    ("words", "mode"),
    [
        ("", LOCAL),
        ("all_squashed,subtree_checked", LOCAL),  # these are about the kernel's server
        ("knfsd", KNFSD),
        ("knfsd,all_squashed", ExportMode(Server.KNFSD, all_squash=True)),
        ("knfsd,subtree_checked", ExportMode(Server.KNFSD, subtree_check=True)),
        ("ganesha", GANESHA),
    ],
)
def test_the_words_of_a_mount(words: str, mode: ExportMode) -> None:
    assert split_mount_options(words)[0].export_mode == mode


@pytest.mark.parametrize(
    ("mode", "is_exported", "passes_handles", "gated"),
    [
        (LOCAL, False, False, False),
        (ExportMode(kernel_gate=True), False, False, True),
        (KNFSD, True, True, False),
        (ExportMode(Server.KNFSD, all_squash=True), True, False, False),
        (GANESHA, True, False, True),
    ],
)
def test_what_follows(mode: ExportMode, is_exported: bool, passes_handles: bool, gated: bool) -> None:
    assert (mode.is_exported, mode.passes_handles, mode.gated) == (is_exported, passes_handles, gated)
    assert (mode.knfsd, mode.ganesha) == (mode.server is Server.KNFSD, mode.server is Server.GANESHA)
