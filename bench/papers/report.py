"""What the raw runs say: the values and the verdict of each figure, and how both came about, as Markdown and HTML."""

import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from html import escape

from ..figures import number
from ..sheet import Sheet
from .experiment import Experiment, Figure, Grade, Judgement, MeasuredSeries, Point, Series
from .records import Records, RunRecord, in_order, measured

_STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; margin: 2rem auto; padding: 0 1rem; color: #1c1c1c; max-width: 72rem; }
h1 { font-size: 1.5rem; } h2 { margin-top: 2.5rem; border-bottom: 1px solid #bbb; font-size: 1.25rem; }
table { border-collapse: collapse; margin: .6rem 0; } caption { text-align: left; font-weight: bold; }
th, td { border: 1px solid #ccc; padding: .2rem .5rem; text-align: left; vertical-align: top; }
.holds { color: #14691f; } .part { color: #8a5a00; } .fails { color: #9a1b1b; } .open { color: #555; }
svg { max-width: 100%; height: auto; } code { font-size: 13px; } dt { font-weight: bold; }
"""

_CLASSES = {"holds": "holds", "holds in part": "part", "does not hold": "fails"}


NOT_JUDGED = "not judged"


@dataclass(frozen=True, slots=True)
class FigureReport:
    """What is reported of a figure.

    Attributes:
        figure: which.
        found: what was measured; without any series if nothing was.
        verdict: None if it cannot be judged.
        why_not: why there is no verdict.
        proof: what shows that it was measured as it should be.
        command: the command that measures it.
        minutes: how long the measurements of its experiment took.
    """

    figure: Figure
    found: MeasuredSeries
    verdict: Judgement | None
    why_not: str
    proof: tuple[str, ...]
    command: str
    minutes: float

    @property
    def grade(self) -> str:
        """The verdict in words."""
        return self.verdict.grade.value if self.verdict else NOT_JUDGED


def figure_reports(experiments: Iterable[Experiment], records: Records) -> list[FigureReport]:
    """Return what is to be reported of each figure of these experiments."""
    reports = []
    for experiment in experiments:
        runs = records.of([experiment.key])
        for figure in experiment.figures:
            found = measured(runs, figure.key)
            verdict, why_not = None, records.skipped.get(experiment.key, "not measured yet")
            if found.series:
                try:
                    verdict, why_not = figure.judge(found), ""
                except LookupError as exc:
                    why_not = f"too little was measured: {exc.args[0]}"
            other = f" --runs {found.runs}" if found.series and found.runs != experiment.runs else ""
            quick = " --quick" if records.common.get("quick") else ""
            minutes = sum(run.seconds for run in runs) / 60
            command = f"{figure.command}{other}{quick}"
            reports.append(FigureReport(figure, found, verdict, why_not, proof_of(runs), command, minutes))
    return reports


def proof_of(runs: list[RunRecord]) -> tuple[str, ...]:
    """Return what the measurements say of themselves, each kind of statement once."""
    said: dict[str, list[object]] = {}
    for record in runs:
        for name, value in record.proof.items():
            said.setdefault(name, []).append(value)
    return tuple(f"{name}: {_range(values)} ({len(values)} measurements)" for name, values in said.items())


def _range(values: list[object]) -> str:
    numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    if len(numbers) == len(values):
        low, high = min(numbers), max(numbers)
        return f"{low:,g}" if low == high else f"{low:,.4g} to {high:,.4g}"
    return "; ".join(dict.fromkeys(str(value) for value in values))


# -- tables --------------------------------------------------------------------------------------------


def sheet(report: FigureReport) -> Sheet:
    """Return the values of a figure: the paper's, ours, and the ratios of both."""
    figure, found = report.figure, report.found
    xs = in_order([*found.xs, *(point.x for series in figure.paper_values for point in series.points)])
    table = Sheet(f"{figure.unit}, by {figure.x_label}; mean (standard deviation)", ["", *xs])
    paper = {series.name: series for series in figure.paper_values}
    for series in paper.values():
        table.rows.append([f"paper: {series.name}", *(_value(series.at(x)) for x in xs)])
    for series in found.series.values():
        table.rows.append([f"{figure.ours}: {series.name}", *(_value(series.at(x)) for x in xs)])
    for whose, known in (("paper", paper), (figure.ours, found.series)):
        for series in known.values():
            if base := _base_of(series.name, figure.baseline, known):
                cells = (_ratio(series.at(x), known[base].at(x)) for x in xs)
                table.rows.append([f"{whose}: {series.name} / {base}", *cells])
    for series in found.series.values():
        if series.name in paper:
            table.rows.append([f"{series.name}: {figure.ours} / paper", *_against(series, paper[series.name], xs)])
    return table


def checks(verdict: Judgement) -> Sheet:
    """Return the parts of a claim that are ratios: as they should be, as they are, and whether they are as claimed."""
    table = Sheet("What the verdict is made of", ["ratio", "claimed", "ours", "spread", "ours / claimed", "as claimed"])
    for one in verdict.checked:
        spread = "–" if one.spread is None else f"± {number(one.spread)}"
        cells = [one.says, one.wanted, number(one.ours), spread, number(one.to_wanted), "yes" if one.held else "**no**"]
        table.rows.append(cells)
    return table


def _tables(report: FigureReport) -> Iterator[Sheet]:
    """Return the tables of a figure."""
    if report.verdict and len(report.verdict.checked) > 1:
        yield checks(report.verdict)
    if report.found.series or report.figure.paper_values:
        yield sheet(report)


def _base_of(name: str, baseline: str, known: Mapping[str, Series]) -> str:
    """Return the series with which to compare one: `default (busy)` for `cursors (busy)`; empty if there is none."""
    _, bracket, suffix = name.partition(" (")
    base = f"{baseline}{bracket}{suffix}"
    return base if baseline and base != name and base in known else ""


def _value(point: Point | None) -> str:
    if point is None:
        return "–"
    return f"{_digits(point.mean)} ({_digits(point.deviation)})" if point.deviation is not None else _digits(point.mean)


def _digits(value: float) -> str:
    return f"{value:,.2f}" if abs(value) < 1000 else f"{value:,.0f}"


def _ratio(mine: Point | None, to: Point | None) -> str:
    ratios = mine.ratios(to) if mine and to else []
    if not ratios:
        return "–"
    middle = f"**{statistics.median(ratios):.2f}**"
    return f"{middle} ({min(ratios):.2f}–{max(ratios):.2f})" if len(ratios) > 1 else middle


def _against(ours: Series, theirs: Series, xs: list[str]) -> list[str]:
    cells = []
    for x in xs:
        mine, printed = ours.at(x), theirs.at(x)
        cells.append(number(mine.mean / printed.mean) if mine and printed and printed.mean else "–")
    return cells


# -- both reports --------------------------------------------------------------------------------------


def about(records: Records) -> list[str]:
    """Return the circumstances of the runs: what all sessions have in common, and what differs."""
    sessions = records.sessions
    lines = [f"{name}: {value}" for name, value in records.common.items() if name not in ("format", "quick")]
    for name in dict.fromkeys(name for session in sessions for name in session):
        values = list(dict.fromkeys(str(session.get(name, "unknown")) for session in sessions))
        lines.append(f"{name}: {' / '.join(values) if len(values) < 4 else f'{values[0]} … {values[-1]}'}")
    if records.common.get("quick"):
        lines.append("**These are quick runs, which only show that everything works: their numbers mean little**")
    return lines


def _details(report: FigureReport) -> dict[str, str]:
    """Return what is said of a figure beside its numbers, by heading."""
    figure = report.figure
    failed = report.verdict is not None and report.verdict.grade is not Grade.HOLDS
    said = {
        "The paper": figure.claim,
        "Why": figure.why if failed else "",
        "Criterion": figure.criterion,
        "Printed values": figure.paper_note,
        "What differs": figure.differs,
        "Shown by the runs themselves": "; ".join(report.proof),
        "Runs": f"{report.found.runs} of each point; all of the experiment took {report.minutes:.1f} minutes"
        if report.found.series
        else "",
        "Command": f"`{report.command}`",
    }
    return {name: text for name, text in said.items() if text}


_MANY = {
    Grade.HOLDS.value: "hold",
    Grade.PART.value: "hold in part",
    Grade.FAILS.value: "do not hold",
    NOT_JUDGED: "are not judged",
}


def _tally(reports: list[FigureReport]) -> str:
    """Return how many claims hold."""
    grades = Counter(one.grade for one in reports)
    said = ", ".join(f"{grades[grade]} {word}" for grade, word in _MANY.items() if grades[grade])
    return f"Of {len(reports)} claims, {said}."


def _sentence(report: FigureReport) -> str:
    return report.verdict.sentence if report.verdict else report.why_not


def markdown(reports: list[FigureReport], records: Records, pictures: Mapping[str, str]) -> str:
    """Return the report in Markdown.

    Args:
        reports: what is reported.
        records: the raw runs.
        pictures: the file of the picture of each figure, by its key.
    """
    lines = [
        "# The papers' evaluations",
        "",
        "`python -m bench papers` repeats the experiments of the papers behind cloakfs, and writes this report.",
        "",
        *(f"- {one}" for one in about(records)),
        "",
        _tally(reports),
        "",
        "| figure | | what it shows | the claim | what decided |",
        "| --- | --- | --- | --- | --- |",
        *(
            f"| [{one.figure.key}](#{one.figure.key}) | {one.figure.paper}, {one.figure.place} | {one.figure.title} "
            f"| **{one.grade}** | {_sentence(one)} |"
            for one in reports
        ),
        "",
    ]
    for one in reports:
        figure = one.figure
        lines += [f'<a id="{figure.key}"></a>', "", f"## {figure.paper}, {figure.place}: {figure.title}", ""]
        lines += [f"**{one.grade.capitalize()}.** {_sentence(one)}", ""]
        if figure.key in pictures:
            lines += [f"![{figure.title}]({pictures[figure.key]})"]
        for table in _tables(one):
            lines += [table.markdown(), ""]
        lines += [f"- *{name}*: {text}" for name, text in _details(one).items()]
        lines += [""]
    lines += [f"- skipped {name}: {why}" for name, why in records.skipped.items()]
    lines += [f"- failed: {one.experiment}, {one.point}, run {one.run + 1}: {one.failed}" for one in records.failures()]
    return "\n".join(lines).rstrip() + "\n"


def page(reports: list[FigureReport], records: Records, pictures: Mapping[str, str]) -> str:
    """Return the report as one page, with everything in it, that needs neither a network nor scripts.

    Args:
        reports: what is reported.
        records: the raw runs.
        pictures: the SVG element of each figure, by its key.
    """
    contents = "".join(
        f'<tr><td><a href="#{escape(one.figure.key)}">{escape(one.figure.paper)}, {escape(one.figure.place)}</a>'
        f"<td>{_text(one.figure.title)}<td>{_grade(one)}<td>{_text(_sentence(one))}</tr>"
        for one in reports
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>The papers\' evaluations</title>'
        '<meta name="viewport" content="width=device-width">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<style>{_STYLE}</style></head><body>\n<h1>The papers' evaluations, repeated</h1>\n"
        f"<ul>{''.join(f'<li>{_text(one)}</li>' for one in about(records))}</ul>\n"
        f"<p>{_tally(reports)}</p>\n"
        f"<table><thead><tr><th>figure<th>what it shows<th>the claim<th>what decided</tr></thead>"
        f"<tbody>{contents}</tbody></table>"
        + "".join(_section(one, pictures.get(one.figure.key, "")) for one in reports)
        + _rest(records)
        + "</body></html>\n"
    )


def _section(report: FigureReport, picture: str) -> str:
    figure = report.figure
    details = "".join(f"<dt>{escape(name)}<dd>{_text(text)}" for name, text in _details(report).items())
    table = "".join(_table(table) for table in _tables(report))
    return (
        f'\n<h2 id="{escape(figure.key)}">{escape(figure.paper)}, {escape(figure.place)}: {_text(figure.title)}</h2>\n'
        f"<p>{_grade(report)}. {_text(_sentence(report))}</p>\n{picture}\n{table}\n<dl>{details}</dl>"
    )


def _grade(report: FigureReport) -> str:
    return f'<b class="{_CLASSES.get(report.grade, "open")}">{escape(report.grade)}</b>'


def _rest(records: Records) -> str:
    lines = [f"skipped {name}: {why}" for name, why in records.skipped.items()]
    lines += [f"failed: {one.experiment}, {one.point}, run {one.run + 1}: {one.failed}" for one in records.failures()]
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>" if lines else ""


def _table(table: Sheet) -> str:
    head = "".join(f"<th>{_text(cell)}" for cell in table.head)
    rows = "".join(f"<tr>{''.join(f'<td>{_text(cell)}' for cell in row)}</tr>" for row in table.rows)
    return f"<table><caption>{_text(table.title)}</caption><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _text(text: str) -> str:
    """Return text of the reports, which may have `**` and backquotes, as text of the page."""
    text = escape(text)
    for mark, tag in (("**", "b"), ("`", "code")):
        text = "".join(f"<{tag}>{part}</{tag}>" if at % 2 else part for at, part in enumerate(text.split(mark)))
    return text
