"""What an administrator should know first of what is open to the clients of an entry, and the report on it. Pure.

The report is plain values: `--json` prints it, and text and page are made of it.
"""

import stat
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ..identity import Caller, ClientId, ServerId
from ..policy import Attrs
from ..reasons import reason_of
from .assess import Assessment, Example, IdentityExposure, Planted, Runs, Tally
from .diff import exposure_changes
from .entry import Entry
from .identities import Accounts, MappedRange
from .reach import OWNS, SEES
from .survey import EXECUTE, NO_ANCESTRY, READ, WRITE, Survey


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
        unmapped = any(mapped.shifts and mapped.is_unchanged for mapped in entry.claims.gids)
        why = "gids are not mapped, so that a claimed gid counts as the server's" if unmapped else "gids can be claimed"
        found.append(
            Finding(
                "claimed groups",
                "files and directories that no user reads by the groups of the server's user database, but a caller "
                f"who claims their group: {total.claimed} ({total.claimed_bytes} bytes); {why}",
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
    return " and ".join(whom) or "the user who starts them: their set-id bits are not shown"


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


_GRAVE = ("root", "exempt", "shared set-id")  # what opens something even if nothing in the tree does
_NAMES = {SEES: "see", READ: "read", WRITE: "change", EXECUTE: "execute", OWNS: "own"}


def report(assessment: Assessment, accounts: Accounts, most: int | None = None) -> dict[str, Any]:
    """Return the report on one entry.

    Args:
        assessment: what is open to its clients.
        accounts: the server's user database.
        most: describe no more than this many identities, those that read most; None for all of them.
    """
    entry, survey = assessment.entry, assessment.survey
    return {
        "entry": entry.name,
        "path": entry.path,
        "client": entry.client,
        "view": entry.label or None,
        "place": entry.place,
        "read_only": entry.read_only,
        "explain": {"below": entry.top or survey.source, "options": list(entry.explain_words)},
        "tree": {
            "source": survey.source,
            "names": survey.names,
            "examined": survey.examined,
            "sample": survey.is_sample,
            "left_out": [{"path": path, "reason": reason} for path, reason in survey.left_out],
            "areas": _sizes(survey, "area"),
            "owners": [
                {"uid": uid, "name": accounts.user(ServerId(uid)), **size}
                for uid, size in sorted(_sizes(survey, "owner").items())
            ],
        },
        "uids": [_mapped_range(mapped) for mapped in entry.claims.uids],
        "gids": [_mapped_range(mapped) for mapped in entry.claims.gids],
        "findings": [asdict(finding) for finding in findings(assessment, accounts)],
        "anybody": _row(assessment, assessment.whole, "anybody"),
        "identities": [
            _row(assessment, row, "others" if row.uid is None else accounts.user(row.uid))
            for row in assessment.rows[:most]
        ],
        "identities_left_out": len(assessment.rows[most:]) if most is not None else 0,
    }


def _sizes(survey: Survey, by: Literal["area", "owner"]) -> dict[Any, dict[str, int]]:
    """Return how many names, regular files, and bytes in them, each area or each owner has."""
    sizes: dict[Any, dict[str, int]] = {}
    for place, found in survey.found.items():
        of = survey.kinds[place.kind]
        size = sizes.setdefault(place.area if by == "area" else of.uid, {"names": 0, "files": 0, "bytes": 0})
        size["names"] += found.names
        size["files"] += found.names if of.is_file else 0
        size["bytes"] += found.size
    return sizes


def _mapped_range(mapped: MappedRange) -> dict[str, Any]:
    low, high = mapped.servers
    return {
        "client": [mapped.low, mapped.high],
        "server": [low, high],
        "rule": mapped.rule,
        "has_counterpart": mapped.counts,
    }


def _row(assessment: Assessment, row: IdentityExposure, name: str) -> dict[str, Any]:
    examples = {example.path: example for example in (*row.claimed_examples, *row.examples)}
    claimed = {example.path for example in row.claimed_examples}
    return {
        "name": name,
        "uid": row.uid,
        "client_uids": format_ids(row.claimed),
        "total": asdict(row.total),
        "areas": {area: asdict(tally) for area, tally in row.areas.items() if tally != Tally()},
        "owners": {str(uid): asdict(tally) for uid, tally in row.owners.items() if tally != Tally()},
        "worst": {area: _example(assessment, example) for area, example in row.worst.items()},
        "examples": [
            {**_example(assessment, example), "by_claimed_group": path in claimed} for path, example in examples.items()
        ],
    }


def _example(assessment: Assessment, example: Example) -> dict[str, Any]:
    bits = example.access.bits
    caller = next(example.access.witnesses[bit] for bit in (READ, WRITE, OWNS, SEES) if bits & bit)
    of = example.likeness
    return {
        "path": f"/{example.path}",
        "mode": stat.filemode(of.mode),
        "uid": of.uid,
        "gid": of.gid,
        "can": [_NAMES[bit] for bit in _NAMES if bits & bit],
        "as": {"uid": caller.uid, "gid": caller.gid, "groups": sorted(caller.groups - {caller.gid})},
        "alike": assessment.survey.found[example.place].names,
        "steps": list(_steps(assessment.entry, assessment.survey, example, caller)),
    }


def _steps(entry: Entry, survey: Survey, example: Example, caller: Caller) -> Iterator[dict[str, Any]]:
    """Yield for each directory above an example, and for itself, what an identity is granted and why it sees it."""
    kinds = [example.place.kind]
    ancestry = example.place.ancestry
    while ancestry != NO_ANCESTRY:
        ancestry, kind = survey.ancestries[ancestry]
        kinds.append(kind)
    names = example.path.split("/") if example.path else []
    for depth, kind in enumerate(reversed(kinds)):
        of = survey.kinds[kind]
        policy = entry.view.policy
        verdicts = policy.cloak.judge(of.mode, of.uid, of.gid, caller.uid, caller.groups)
        granted = survey.grants[kind].to(caller.uid, caller.groups)
        attrs = Attrs("", of.mode, of.uid, of.gid)
        yield {
            "path": "/" + "/".join(names[:depth]),
            "mode": stat.filemode(of.mode),
            "uid": of.uid,
            "gid": of.gid,
            "acl": bool(of.acl),
            "permissions": "".join(
                letter if granted & bit else "-" for letter, bit in zip("rwx", (READ, WRITE, EXECUTE), strict=True)
            ),
            "why": reason_of(policy, caller, attrs, verdicts, is_root=depth == 0, is_shown=True),
        }


def difference_report(entry: str, old: Assessment | None, new: Assessment | None, accounts: Accounts) -> dict[str, Any]:
    """Return the report on what a change opens and closes to the clients of an entry.

    Args:
        entry: the entry.
        old: what is open by the old configuration; None if it has no such entry.
        new: what is open by the new configuration; None if it has no such entry.
        accounts: the server's user database.
    """
    found = exposure_changes(old, new)
    were, are = ([] if of is None else findings(of, accounts) for of in (old, new))
    grave = [finding for finding in are if finding.kind in _GRAVE and finding not in were]
    return {
        "entry": entry,
        "opens": bool(grave) or any(of.opens != Tally() for of in found),
        "differences": [
            {
                "client_uids": format_ids([(of.low, of.high)]),
                "before": _become(of.before, accounts),
                "after": _become(of.after, accounts),
                "opens": asdict(of.opens),
                "closes": asdict(of.closes),
                "opened": [f"/{path}" for path in of.opened],
                "closed": [f"/{path}" for path in of.closed],
            }
            for of in found
        ],
        "new_findings": [asdict(finding) for finding in grave],
    }


def _become(ends: tuple[ServerId, ServerId] | None, accounts: Accounts) -> str | None:
    if ends is None:
        return None
    low, high = ends
    return accounts.user(low) if low == high else f"{low}-{high}"
