"""Options of mount(8) that change the mount."""

import pytest

from cloakfs import linux
from cloakfs.fuse.attach import split_mount_options


def test_the_kernels_server_needs_acls() -> None:
    assert split_mount_options("rw")[0].xattrs
    words, rest = split_mount_options("rw,noxattr")
    assert not words.xattrs
    assert rest.strip() == "rw"
    assert split_mount_options("noxattr,knfsd")[0].xattrs


NEITHER = linux.MS_NOSUID | linux.MS_NODEV


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("rw", NEITHER),
        ("setid", linux.MS_NODEV),
        ("suid", linux.MS_NODEV),
        ("devices,default_permissions", linux.MS_NOSUID),
        ("setid,devices,default_permissions", 0),
        # mount(8) reorders options.
        ("nosuid,setid", NEITHER),
        ("setid,nosuid", NEITHER),
        ("nodev,setid,devices,default_permissions", linux.MS_NODEV),
    ],
)
def test_set_id_bits_and_devices_take_a_word(text: str, flags: int) -> None:
    words, rest = split_mount_options(text)
    assert words.flags == flags
    assert not words.dev_refused
    assert rest.strip() in ("", "rw")


def test_every_flag_of_mount8_is_taken() -> None:
    """These are the words of mount(8) for any file system, which a line of fstab may have been copied from."""
    words = (
        "async,atime,noatime,auto,noauto,defaults,dev,nodev,diratime,nodiratime,dirsync,exec,noexec,group,iversion,"
        "noiversion,mand,nomand,_netdev,nofail,relatime,norelatime,strictatime,nostrictatime,lazytime,nolazytime,suid,"
        "nosuid,silent,loud,owner,remount,sync,user,nouser,users,symfollow,nosymfollow,X-mount.mkdir,x-initrd.mount"
    )
    for word in words.split(","):
        assert split_mount_options(word)[1].strip() == "", word
    assert split_mount_options("nosymfollow")[0].flags == NEITHER | linux.MS_NOSYMFOLLOW
    assert split_mount_options("nosymfollow,symfollow")[0].flags == NEITHER


def test_devices_take_default_permissions() -> None:
    words, _ = split_mount_options("devices")
    assert words.flags == NEITHER
    assert words.dev_refused


def test_values_may_be_quoted_and_the_columns_of_the_rest_stay() -> None:
    words, rest = split_mount_options('nonempty,fsname="a, b",ro,auto_unmount,exports=/x,client=*,restart,groups=none')
    assert (words.fsname, words.exports, words.client, words.restart) == ("a, b", "/x", "*", True)
    assert rest.replace(" ", "") == "ro,groups=none"
    assert rest.index("groups") == 67
    assert words.given[:2] == ("nonempty", 'fsname="a, b"')


def test_a_value_that_is_missing_is_left_to_be_refused() -> None:
    assert split_mount_options("fsname=,rw")[1] == "fsname=,rw"


def test_how_often_it_was_mounted_again_is_a_number() -> None:
    assert split_mount_options("restarted=3")[0].restarts == 3
    assert split_mount_options("restarted=x")[0].restarts == 0


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("", ""),
        ("nosuid", "      "),
        ("nosuid,rw", "       rw"),
        ("rw,nosuid", "rw"),
        ("rw,nosuid,nodev", "rw"),
        ("rw,nosuid,noatime,+077", "rw,               +077"),
        ('fsname="a,b",rw', "             rw"),
    ],
)
def test_each_word_that_is_taken_out_takes_a_comma_along(text: str, left: str) -> None:
    assert split_mount_options(text)[1].rstrip(" ") == left.rstrip(" ")
