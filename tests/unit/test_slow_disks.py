"""When threads make the calls on a file system instead of the session loop."""

import time

from cloakfs.tree.filesystems import MountedFilesystem


def wait(filesystem: MountedFilesystem) -> None:
    filesystem.timed(time.sleep, 0.01)


def compute(filesystem: MountedFilesystem) -> None:
    until = time.thread_time() + 0.01

    def work() -> None:
        while time.thread_time() < until:
            pass

    filesystem.timed(work)


def test_waiting_twice_makes_it_slow() -> None:
    disk = MountedFilesystem(1, "ext4", "/", -1)
    wait(disk)
    assert not disk.waits
    wait(disk)
    assert disk.waits


def test_want_of_a_processor_does_not() -> None:
    slow = 0
    for _ in range(20):  # preempted or not: nothing is waited for, but now and then for memory, or another thread
        disk = MountedFilesystem(1, "ext4", "/", -1)
        compute(disk)
        compute(disk)
        slow += disk.waits
    assert slow < 5


def test_quick_answers_do_not() -> None:
    disk = MountedFilesystem(1, "ext4", "/", -1)
    wait(disk)
    for _ in range(100):
        disk.timed(int)
    assert not disk.waits


def test_memory_is_never_slow() -> None:
    memory = MountedFilesystem(1, "tmpfs", "/", -1)
    for _ in range(3):
        wait(memory)
    assert not memory.waits
