"""Words of mount(8) that change what a mount is."""

from cloakfs.mountpoint import split_words


def test_the_kernels_server_needs_acls() -> None:
    assert split_words("rw")[0].xattrs
    words, rest = split_words("rw,noxattr")
    assert not words.xattrs
    assert rest.strip() == "rw"
    assert split_words("noxattr,knfsd")[0].xattrs
