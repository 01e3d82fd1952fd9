"""Times, bounds and such that no option configures. Tests and the benchmark hand in others."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tuning:
    """Times in seconds, bounds, and one choice. They may differ in the next version.

    Attributes:
        housekeeping_seconds: how often a daemon publishes what it counts, and closes unused descriptors.
        stop_seconds: how long processes with open files may go on after SIGTERM to a daemon; a second SIGTERM ends the
            session at once.
        view_seconds: how often the user database is queried for changes of the users of fixed views; it takes as long
            again at most until the change is seen.
        probe_seconds: how often probes are counted.
        groups_again_seconds: how old an answer of the user database is when it is queried again.
        groups_seconds: how long its answer holds at most.
        groups_patience_seconds: how long a request waits for its answer.
        filesystem_seconds: how long a file system may take to answer when it becomes known.
        notify_threads: how many threads have the kernel invalidate names, besides those that wait for a lock; None: it
            depends on how many processors there are.
        most_notify_threads: how many may be waiting at a time.
        notify_wait_seconds: a thread to which one name takes longer than this seems to wait for a lock.
        notify_patience_seconds: how long the kernel may take to invalidate a name; after that, its directory is
            stalled, and nothing more is cached in it.
        names_at_once: how many names below a directory are invalidated without giving time to other requests.
        most_levels: how many directories deep a tree may become through the mount: twice as deep as the longest path
            (PATH_MAX) can lead. It may be deeper on disk, or become so by renames. A handle that leads deeper is not
            followed to the root.
        most_locked_ranges: how many ranges of files may be locked by fcntl(2), some 150 bytes each.
        trace_bytes: how much is kept for a tracer that does not fetch it.
        unmount_seconds: how long `cloakfs umount` tries again while the mount is busy.
        guard_seconds: how often a guard looks after its mounts and its server.
        served_seconds: how long what was just exported may take until the server serves it (mountd may just have
            started).
        stock_loop: answer with pyfuse3's own session loop, which is slower: for comparison.
    """

    housekeeping_seconds: float = 5.0
    stop_seconds: float = 10.0
    view_seconds: float = 30.0
    probe_seconds: float = 0.5
    groups_again_seconds: float = 20.0
    groups_seconds: float = 30.0
    groups_patience_seconds: float = 5.0
    filesystem_seconds: float = 2.0
    notify_threads: int | None = None
    most_notify_threads: int = 32
    notify_wait_seconds: float = 0.02
    notify_patience_seconds: float = 0.5
    names_at_once: int = 64
    most_levels: int = 4096
    most_locked_ranges: int = 20_000
    trace_bytes: int = 4 << 20
    unmount_seconds: float = 0.5
    guard_seconds: float = 5.0
    served_seconds: float = 15.0
    stock_loop: bool = False


STANDARD = Tuning()
