"""What an administrator should know first of what is open to the clients of an entry. Pure."""

from dataclasses import dataclass

from ..ids import ClientId
from .assess import Assessment, Planted, Runs
from .identities import Accounts
from .survey import Survey


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding.

    Attributes:
        kind: what it is about, for programs: `root`, `exempt`, `claimed groups`, `shared set-id`, `planted set-id`,
            `set-id program`, or `inexact`.
        text: the finding, in one sentence.
        paths: examples, from the root of the tree.
    """

    kind: str
    text: str
    paths: tuple[str, ...] = ()


def format_ids(ranges: list[tuple[ClientId, ClientId]] | tuple[tuple[ClientId, ClientId], ...]) -> str:
    """Return ranges of ids as text: `0, 1000-1999`; neighbouring ranges are joined."""
    joined: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if joined and joined[-1][1] + 1 == low:
            joined[-1] = joined[-1][0], high
        else:
            joined.append((low, high))
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in joined)


def findings(assessment: Assessment, accounts: Accounts) -> list[Finding]:
    """Return the findings about an entry, the worst first.

    Args:
        assessment: what is open to its clients.
        accounts: the server's user database.
    """
    entry, whole = assessment.entry, assessment.whole
    found = []
    if assessment.root:
        does = "read everything" if entry.read_only else "read and change everything"
        found.append(
            Finding("root", f"client uid {format_ids(assessment.root)} becomes root on the server, who may {does}")
        )
    found += [
        Finding(
            "exempt",
            f"client uids {format_ids(claimed)} become {accounts.user(uid)}, from whom nothing is hidden (exempt)",
        )
        for uid in entry.view.policy.options.exempt
        if (claimed := entry.claims.claims_of(uid))
    ]
    found += [_shared(program, accounts) for program in assessment.planted if program.is_shared]
    total = whole.total
    if total.claimed:
        unmapped = any(stretch.shifts and stretch.is_unchanged for stretch in entry.claims.gids)
        why = "gids are not mapped, so that a claimed gid counts as the server's" if unmapped else "gids can be claimed"
        found.append(
            Finding(
                "claimed groups",
                "files and directories that nobody reads by the groups of the server's user database, but whoever "
                f"claims their group: {total.claimed} ({total.claimed_bytes} bytes); {why}",
                tuple(example.path for example in whole.claimed_examples),
            )
        )
    planted = [program for program in assessment.planted if program.kind == "uid" and not program.is_shared]
    if planted:
        found.append(_planted(planted, assessment, accounts))
    found += [_run(runs, accounts) for runs in assessment.runs]
    return found + _inexact(assessment.survey)


def _run(runs: Runs, accounts: Accounts) -> Finding:
    whose = f"{accounts.user(runs.likeness.uid)} and group {accounts.group(runs.likeness.gid)}"
    return Finding(
        "set-id program",
        f"set-id programs of {whose} that a client can run: {runs.names}; it runs them as "
        f"{_as_whom(runs.as_uid, runs.as_gid)}",
        (runs.example,),
    )


def _as_whom(as_uid: ClientId | None, as_gid: ClientId | None) -> str:
    whom = [f"client {kind} {of}" for kind, of in (("uid", as_uid), ("gid", as_gid)) if of is not None]
    return " and ".join(whom) or "whoever starts them: their set-id bits are not shown"


def _shared(program: Planted, accounts: Accounts) -> Finding:
    whose = (accounts.user if program.kind == "uid" else accounts.group)(program.server_id)
    own = next((shown.client_id for shown in program.shown), None)
    what = "set-user-ID" if program.kind == "uid" else "set-group-ID"
    return Finding(
        "shared set-id",
        f"client {program.kind}s {format_ids(program.claimed)} all become {whose}, and each of them can plant a {what} "
        f"program that other users of a client run as client {program.kind} {own}",
    )


def _planted(planted: list[Planted], assessment: Assessment, accounts: Accounts) -> Finding:
    whose = ", ".join(accounts.user(program.server_id) for program in planted[:5])
    more = f" and {len(planted) - 5} more" if len(planted) > 5 else ""
    elsewhere = sorted({shown.entry for program in planted for shown in program.shown} - {assessment.entry.name})
    where = "who start it on the server" + "".join(f", or on clients of {name}" for name in elsewhere)
    return Finding("planted set-id", f"a client can plant set-user-ID programs of {whose}{more}, for those {where}")


def _inexact(survey: Survey) -> list[Finding]:
    found = []
    if survey.is_sample:
        found.append(
            Finding("inexact", f"only a sample: {survey.examined} of {survey.names} names were looked at, "
                    "and nothing below those that were not")
        )  # fmt: skip
    if survey.missing:
        path, reason = survey.left_out[0]
        found.append(
            Finding(
                "inexact",
                f"names that are left out: {survey.missing}, for example {path} ({reason})",
                tuple(path for path, _ in survey.left_out),
            )
        )
    if not survey.by_mode_alone:
        found.append(
            Finding("inexact", "a part of the tree is on a file system that may not go by mode bits and ACLs alone")
        )
    return found
