"""The configurations of Spadavecchia & Zadok §4: options, caller, and what the caller must see."""

from dataclasses import dataclass

USER = 20000
"""The server id of the first user who owns files; the others follow."""

SHIFT = 100000
"""The client id of a user who is mapped is the server's, plus this."""

STRANGER = 19000
"""A user who owns nothing."""

GROUPS = tuple(range(31000, 31008))
"""Supplementary groups of callers, which own nothing."""

ABSENT = 400000
"""The first of the ids that no user has, for definitions that match nothing."""

BARE, BINDFS = "bare", "bindfs"
"""Instead of options: the tree itself (behind NFS: the kernel's own export), and bindfs, a null relay in C."""

NULL = "root_squash"
"""Options of cloakfs that ask for nothing: it is the default."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """What is measured in one configuration.

    Attributes:
        name: of the configuration, as the paper calls it.
        options: of the mount; or BARE or BINDFS.
        uid: client id of the caller.
        place: in which directory of the tree.
        groups: the caller's supplementary groups, as the client claims them.
        visible: how many files of each 1,000 the caller must see; None: whatever is there.
    """

    name: str
    options: str = NULL
    uid: int = USER
    place: str = ""
    groups: tuple[int, ...] = GROUPS
    visible: int | None = None

    @property
    def server_uid(self) -> int:
        """Whom the caller is on the server."""
        return self.uid - SHIFT if self.uid >= SHIFT else self.uid


def mapping(count: int, users: int) -> str:
    """Return `count` range-mapping definitions: the last `users` of them for users, the others for unused ids.

    The first user's comes last, where a scan of the list takes longest.
    """
    others = [f"uid {ABSENT + i} map {ABSENT + i}" for i in range(count - users)]
    theirs = [f"uid {USER + SHIFT + i} map {USER + i}" for i in reversed(range(users))]
    return f"range_map={' '.join([*others, *theirs])}"


def cloaking(count: int, users: int) -> str:
    """Return `count` definitions that show files to their owners alone, made as those of `mapping`."""
    ids = [*(ABSENT + i for i in range(count - users)), *(USER + i for i in reversed(range(users)))]
    return f"cloak_list={' '.join(f'uid +000 {i}' for i in ids)}"


UNCACHED = "no_client_cache"


def worst(count: int) -> tuple[Configuration, ...]:
    """Return the cases of Figure 5: all files are seen, whatever is configured, with `count` definitions."""
    place, everything = "by-1000", 1000
    maps, cloaks = mapping(count, 1), cloaking(count, 0)

    def case(name: str, options: str, uid: int = USER, groups: tuple[int, ...] = GROUPS) -> Configuration:
        return Configuration(name, options, uid, place, groups, everything)

    return (
        case("VAN", BARE),
        case("MNU", NULL),
        case("RMAP", maps, USER + SHIFT),
        case("CLK", f"{cloaks},{UNCACHED}"),
        case("RMAPCLK", f"{maps},{cloaks},{UNCACHED}", USER + SHIFT),
        case("CLK, client caches", cloaks),
        case("RMAPCLK, client caches", f"{maps},{cloaks}", USER + SHIFT),
        case("VAN, no groups", BARE, groups=()),
        case("MNU, no groups", NULL, groups=()),
    )


def scaling(counts: tuple[int, ...]) -> tuple[Configuration, ...]:
    """Return the cases of Figure 6, with so many users, who own all files together, and as many definitions."""
    cases = [Configuration("VAN-0", BARE, USER, "empty", visible=0)]
    for n in counts:
        maps, cloaks, place = mapping(n, n), f"{cloaking(n, n)},{UNCACHED}", f"by-{n}"
        cases += [
            Configuration(f"RMAP-{n}", maps, USER + SHIFT, place, visible=1000),
            Configuration(f"CLK-{n}", cloaks, STRANGER, place, visible=0),
            Configuration(f"RMAPCLK-{n}", f"{maps},{cloaks}", USER + SHIFT, place, visible=1000 // n),
        ]
    return tuple(cases)


def general(*more: int) -> tuple[Configuration, ...]:
    """Return the cases of Figures 3 and 4: ten definitions, and a user who may do everything; RMAPCLK with `more`."""
    cases = [
        Configuration("VAN", BARE),
        Configuration("MNU", NULL),
        Configuration("RMAP", mapping(10, 10), USER + SHIFT),
        Configuration("CLK", cloaking(10, 0)),
        Configuration("RMAPCLK", f"{mapping(10, 10)},{cloaking(10, 10)}", USER + SHIFT),
    ]
    both = {n: f"{mapping(n, 10)},{cloaking(n, 10)}" for n in more}
    return (*cases, *(Configuration(f"RMAPCLK {n}", options, USER + SHIFT) for n, options in both.items()))


def relays(*, bindfs: bool) -> tuple[Configuration, ...]:
    """Return the tree itself, null relays, and a relay that maps and cloaks, but hides nothing."""
    cases = [
        Configuration("VAN", BARE),
        Configuration("MNU", NULL),
        Configuration("RMAPCLK", f"{mapping(10, 10)},{cloaking(10, 0)}", USER + SHIFT),
    ]
    return (*cases, Configuration(BINDFS, BINDFS)) if bindfs else tuple(cases)
