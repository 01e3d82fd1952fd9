"""Options of mount(8) that change the mount."""

from cloakfs.mountpoint import split_mount_options


def test_the_kernels_server_needs_acls() -> None:
    assert split_mount_options("rw")[0].xattrs
    words, rest = split_mount_options("rw,noxattr")
    assert not words.xattrs
    assert rest.strip() == "rw"
    assert split_mount_options("noxattr,knfsd")[0].xattrs
