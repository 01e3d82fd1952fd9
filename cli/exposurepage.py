"""The page of `cloakfs exposure --html`: one file, with everything in it, that needs neither a network nor scripts."""

import os
from html import escape
from typing import Any

from cloakfs.messages import printable, shell_word

_MOST_COLUMNS = 30

_STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; margin: 2rem; color: #1c1c1c; background: #fff; max-width: 90rem; }
h1 { font-size: 1.5rem; } h2 { margin-top: 2.5rem; border-bottom: 1px solid #bbb; font-size: 1.25rem; }
h3 { font-size: 1.05rem; margin-top: 1.6rem; }
table { border-collapse: collapse; margin: .6rem 0; }
th, td { border: 1px solid #ccc; padding: .2rem .5rem; text-align: left; vertical-align: top; }
td.n { text-align: right; font-variant-numeric: tabular-nums; }
.map td { text-align: center; min-width: 3.2rem; padding: 0; }
.map td a, .map td span { display: block; padding: .25rem .4rem; color: inherit; text-decoration: none; }
.map td a:hover { outline: 2px solid #1c1c1c; }
.map thead th { vertical-align: bottom; max-width: 9rem; overflow-wrap: anywhere; }
.map tbody th { font-weight: normal; white-space: nowrap; }
.findings li { margin: .25rem 0; } .findings b { color: #9a1b1b; }
.cell { border-left: 3px solid #ccc; padding-left: .8rem; margin: 1rem 0; }
.cell:target { border-color: #9a1b1b; background: #fff8ef; }
.key span { display: inline-block; padding: .1rem .6rem; margin-right: .4rem; border: 1px solid #ccc; }
code { font-size: 13px; overflow-wrap: anywhere; }
"""

_LEVELS = {"change": (6, 88, 55), "read": (32, 95, 58), "see": (52, 90, 75)}
"""Hue, saturation and lightness of the worst that can be done."""


def page(reports: list[dict[str, Any]]) -> str:
    """Return the page on some entries.

    Args:
        reports: what `cloakfs.audit.report.report` returns for each of them.
    """
    contents = "".join(f'<li><a href="#e{number}">{_text(of["entry"])}</a></li>' for number, of in enumerate(reports))
    entries = "".join(_entry(f"e{number}", of) for number, of in enumerate(reports))
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>Exposure</title>'
        '<meta name="viewport" content="width=device-width">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<style>{_STYLE}</style></head><body>\n<h1>What a compromised client could do</h1>\n"
        f"<ul>{contents}</ul>\n{entries}</body></html>\n"
    )


def _text(value: object) -> str:
    """Return a value as text of the page: names may have any bytes, and must not be taken for markup."""
    return escape(printable(str(value)))


def _entry(key: str, of: dict[str, Any]) -> str:
    tree = of["tree"]
    about = f"Tree {tree['source']}: {tree['examined']:,} names, {'ro' if of['read_only'] else 'rw'}; {of['place']}."
    findings = "".join(
        f"<li><b>{_text(one['kind'])}</b>: {_text(one['text'])}"
        + "".join(f"<br><code>/{_text(path)}</code>" for path in one["paths"][:3])
        + "</li>"
        for one in of["findings"]
    )
    rows = [of["anybody"], *of["identities"]]
    left_out = of["identities_left_out"]
    more = f"<p>{left_out} more identities, which read less, are not shown (--all).</p>" if left_out else ""
    return (
        f'<h2 id="{key}">{_text(of["entry"])}</h2>\n<p>{_text(about)}</p>\n<ul class="findings">{findings}</ul>\n'
        f"<h3>Who becomes whom</h3>{_ids(of)}"
        f"<h3>Users and the tree</h3>{_key()}{_areas(key, of, rows)}{more}"
        f"<h3>Who sees whom</h3><p>Whose files each identity reaches.</p>{_owners(of, rows)}"
        f"<h3>Why</h3>{''.join(_cells(key, of, rows))}"
    )


def _ids(of: dict[str, Any]) -> str:
    lines = "".join(
        f"<tr><td>{kind} {_range(one['client'])}</td><td>{_range(one['server'])}</td><td>{_text(one['rule'])}</td></tr>"
        for kind in ("uid", "gid")
        for one in of[f"{kind}s"]
    )
    return f"<table><thead><tr><th>client ids<th>become<th>rule</tr></thead><tbody>{lines}</tbody></table>"


def _range(ends: list[int]) -> str:
    return str(ends[0]) if ends[0] == ends[1] else f"{ends[0]}–{ends[1]}"


def _key() -> str:
    spans = "".join(f'<span style="background:{_colour(level, 1.0)}">{level}s</span>' for level in _LEVELS)
    return (
        f'<p class="key">{spans} the worst in each cell; the fuller the colour, the larger the part of its names.</p>'
    )


def _colour(level: str, share: float) -> str:
    hue, saturation, lightness = _LEVELS[level]
    return f"hsl({hue} {saturation}% {lightness + (93 - lightness) * (1 - share) * 0.8:.0f}%)"


def _chosen(sizes: list[tuple[str, dict[str, Any]]]) -> list[tuple[str, dict[str, Any]]]:
    """Return the largest columns, in the order given."""
    largest = {name for name, _ in sorted(sizes, key=lambda one: -one[1]["names"])[:_MOST_COLUMNS]}
    return [one for one in sizes if one[0] in largest]


def _areas(key: str, of: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    columns = _chosen(sorted(of["tree"]["areas"].items()))
    head = "".join(f"<th>{_area(name)}" for name, _ in columns)
    body = []
    for number, row in enumerate(rows):
        cells = []
        for column, (name, size) in enumerate(columns):
            target = _target(key, rows, number, name, column)
            cells.append(_cell(row["areas"].get(name), size, target))
        body.append(f"<tr><th>{_who(row)}</th>{''.join(cells)}</tr>")
    return _map(head, body, len(of["tree"]["areas"]) - len(columns))


def _target(key: str, rows: list[dict[str, Any]], number: int, area: str, column: int) -> str | None:
    """Return where a cell is explained: where others can do the same, with them."""
    if area in rows[number]["worst"]:
        return f"{key}-{number}-{column}"
    others = next((at for at, row in enumerate(rows) if row["name"] == "others" and area in row["worst"]), None)
    return None if others is None or area not in rows[number]["areas"] else f"{key}-{others}-{column}"


def _owners(of: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    columns = _chosen([(str(one["uid"]), one) for one in of["tree"]["owners"]])
    head = "".join(f"<th>{_text(one['name'])}" for _, one in columns)
    body = []
    for row in rows:
        cells = "".join(_cell(row["owners"].get(uid), size, None) for uid, size in columns)
        body.append(f"<tr><th>{_who(row)}</th>{cells}</tr>")
    return _map(head, body, len(of["tree"]["owners"]) - len(columns))


def _map(head: str, body: list[str], left_out: int) -> str:
    more = f"<p>{left_out} more columns, with fewer names, are not shown.</p>" if left_out else ""
    return f'<table class="map"><thead><tr><th></th>{head}</tr></thead><tbody>{"".join(body)}</tbody></table>{more}'


def _who(row: dict[str, Any]) -> str:
    claimed = f" ← {row['client_uids']}" if row["client_uids"] else ""
    return f"{_text(row['name'])}{_text(claimed)}"


def _area(name: str) -> str:
    return _text(f"/{name}") if name else "at the top"


def _cell(tally: dict[str, int] | None, size: dict[str, int], target: str | None) -> str:
    if tally is None or not tally["sees"]:
        return "<td><span>–</span></td>"
    does = {"change": tally["changes"], "read": tally["reads"], "see": tally["sees"]}
    level, count = next((level, count) for level, count in does.items() if count)
    title = f"sees {tally['sees']}, reads {tally['reads']} ({tally['read_bytes']} bytes), changes {tally['changes']}"
    text = f"{count:,}"
    inside = f'<a href="#{target}">{text}</a>' if target is not None else f"<span>{text}</span>"
    return f'<td style="background:{_colour(level, count / size["names"])}" title="{title}">{inside}</td>'


def _cells(key: str, of: dict[str, Any], rows: list[dict[str, Any]]) -> list[str]:
    """Return for each cell its worst example, and why it is open."""
    found = []
    for number, row in enumerate(rows):
        for column, (name, _) in enumerate(_chosen(sorted(of["tree"]["areas"].items()))):
            example = row["worst"].get(name)
            if example is not None:
                tally = row["areas"].get(name, {})
                found.append(_why(f"{key}-{number}-{column}", of, row, name, tally, example))
    return found


def _why(
    target: str, of: dict[str, Any], row: dict[str, Any], area: str, tally: dict[str, int], example: dict[str, Any]
) -> str:
    who = example["as"]
    ids = f"{who['uid']}:{who['gid']}" + (":" + ",".join(map(str, who["groups"])) if who["groups"] else "")
    path = os.path.join(of["explain"]["below"], example["path"].lstrip("/"))
    # Below the mount point of a fixed view, the path says as whom.
    caller = [] if of["view"] and not of["explain"]["options"] else ["--as-server", ids]
    command = ["cloakfs", "explain", path, *caller, *of["explain"]["options"]]
    steps = "".join(
        f"<tr><td><code>{_text(step['path'])}</code><td><code>{_text(step['mode'])}{'+' if step['acl'] else ''}</code>"
        f"<td>{step['uid']}<td>{step['gid']}<td><code>{step['permissions']}</code><td>{_text(step['why'])}</tr>"
        for step in example["steps"]
    )
    numbers = f"sees {tally.get('sees', 0):,}, reads {tally.get('reads', 0):,}, changes {tally.get('changes', 0):,}"
    return (
        f'<div class="cell" id="{target}"><b>{_text(row["name"])}</b> in {_area(area)}: {numbers}. The worst: '
        f"<code>{_text(example['path'])}</code> ({_text(', '.join(example['can']))}; {example['alike']:,} alike), as "
        f"{_text(ids)}."
        "<table><thead><tr><th>path<th>mode<th>owner<th>group<th>permissions<th>why</tr></thead>"
        f"<tbody>{steps}</tbody></table>"
        f"<code>{_text(' '.join(map(shell_word, command)))}</code></div>"
    )
