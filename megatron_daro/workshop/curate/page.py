"""The statistics as a page of one file: what was dropped and why, with examples; all text of the data is escaped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_daro.observe.logs import safe_text
from megatron_daro.workshop.curate.decisions import NOTES, REASONS, Decisions, Finding
from megatron_daro.workshop.curate.rows import Row
from megatron_daro.workshop.report.page import COLOURS, Page, Plot, Section, Table, render

_EXAMPLES, _SOURCES = 12, 24
_SHOWN = 900


def render_page(
    statistics: Mapping[str, Any],
    rows: Sequence[Row],
    decisions: Decisions,
    sets: Mapping[str, Sequence[Row]],
    extra: Mapping[int, Mapping[str, Any]],
) -> str:
    """Return the page as text.

    Args:
        statistics: from `collect`.
        rows: every row that was read. decisions: what happened to them.
        sets: evaluation sets by name.
        extra: further fields of kept rows; their `pass_rate` is plotted.
    """
    known = {row.place: row for row in rows}
    known |= {f"{name}:{row.number}": row for name, held_out in sets.items() for row in held_out}
    read, kept = statistics["rows_read"], statistics["kept"]
    return render(
        Page(
            title="Curated problems",
            subtitle=f"{kept:,} of {read:,} rows kept ({kept / max(1, read):.1%}); the rest is in dropped.parquet",
            sections=[Section("Overview", _plots(statistics, extra))],
            template="curation.html.j2",
            values={
                "decontaminated": statistics["decontaminated"],
                "cards": _cards(statistics),
                "tables": _tables(statistics),
                "examples": _examples(rows, decisions, known),
                "rules": _rules(statistics),
            },
        )
    )


def _cards(statistics: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    dropped = statistics["dropped"]
    cards = [
        ("rows read", statistics["rows_read"], f"{len(statistics['files'])} files"),
        ("kept", statistics["kept"], ""),
        *((reason.replace("_", " "), count, REASONS[reason]) for reason, count in dropped.items()),
    ]
    return [(name, f"{count:,}", words) for name, count, words in cards]


def _tables(statistics: Mapping[str, Any]) -> list[tuple[str, Table]]:
    reasons = ["kept", *statistics["dropped"]]
    files = [[_line(name), *(f"{counts.get(r, 0):,}" for r in reasons)] for name, counts in statistics["files"].items()]
    header = ["file", *(r.replace("_", " ") for r in reasons)]
    tables = [("Files", Table(header, files, number_columns=len(reasons)))]
    if statistics["held_out"]:
        sets = [
            [_line(name), f"{one['problems']:,}", f"{one['rows_dropped']:,}", f"{one['rows_with_overlap']:,}"]
            for name, one in statistics["held_out"].items()
        ]
        header = ["evaluation set", "problems", "rows dropped as leaks", "kept rows that share a long run of words"]
        tables.append(("Evaluation sets", Table(header, sets, number_columns=3)))
    if statistics["notes"]:
        notes = [[NOTES[name], f"{count:,}"] for name, count in statistics["notes"].items()]
        tables.append(("Said of kept rows", Table(["note", "rows"], notes, number_columns=1)))
    return tables


def _plots(statistics: Mapping[str, Any], extra: Mapping[int, Mapping[str, Any]]) -> list[Plot]:
    plots = []
    rates = [one["pass_rate"] for one in extra.values() if one.get("pass_rate") is not None]
    if rates:
        count = max(one.get("pass_rate_samples") or 1 for one in extra.values())
        bins = [round(rate * count) for rate in rates]
        heights = [bins.count(k) for k in range(count + 1)]
        names = [f"{k}/{count}" for k in range(count + 1)]
        caption = "Kept problems by the part of their answers that was right."
        plots.append(_bars("Pass rates", caption, names, heights, 2))
    top = dict(sorted(statistics["sources"].items(), key=lambda one: -one[1])[:_SOURCES])
    names = [_line(name, 40) for name in top]
    plots.append(_bars("Sources", "Kept problems by their data_source, or their file.", names, list(top.values()), 1))
    return plots


def _bars(title: str, caption: str, names: list[str], heights: list[int], colour: int) -> Plot:
    trace = {"type": "bar", "x": names, "y": heights, "marker": {"color": COLOURS[colour]}, "text": heights}
    axes = {
        "xaxis": {"type": "category", "automargin": True},
        "yaxis": {"title": {"text": "rows"}},
        "showlegend": False,
    }
    return Plot(title, caption, [trace], axes)


def _examples(rows: Sequence[Row], decisions: Decisions, known: Mapping[str, Row]) -> list[tuple[str, list[Any]]]:
    """Return, for each reason, its heading and some rows."""
    by_reason: dict[str, list[Finding]] = {name: [] for name in (*REASONS, *NOTES)}
    for finding in (*(decisions.dropped[row] for row in sorted(decisions.dropped)), *decisions.notes_on_kept()):
        by_reason[finding.reason].append(finding)
    parts = []
    for name, examples in by_reason.items():
        if not examples:
            continue
        shown = examples[:: max(1, len(examples) // _EXAMPLES)][:_EXAMPLES]
        label = f"{name.replace('_', ' ')}: {len(shown)} of {len(examples):,} rows"
        parts.append((label, [_example(one, rows[one.row], known.get(one.other)) for one in shown]))
    return parts


def _example(finding: Finding, row: Row, other: Row | None) -> dict[str, str]:
    head = " · ".join(part for part in (row.place, finding.detail) if part)
    return {
        "head": _line(head, 300),
        "problem": _problem(row),
        "other_head": _line(finding.other, 200) if finding.other else "",
        "other": _problem(other) if finding.other and other else "",
    }


def _problem(row: Row) -> str:
    answer = " or ".join(row.prompt.answers) if not row.unusable else ""
    return safe_text(f"{row.prompt.statement}\n→ {answer}" if row.prompt.statement else row.unusable, _SHOWN)


def _rules(statistics: Mapping[str, Any]) -> Table:
    rules = [[name, _line(str(value), 200)] for name, value in statistics["rules"].items()]
    rules += [
        [f"instructions left out of the comparison in {n}", _line(" / ".join(v), 300)]
        for n, v in statistics["instructions"].items()
    ]
    rules.append(["groups of candidates too full to compare every pair", str(statistics["crowded_groups"])])
    return Table(["rule", "value"], rules, number_columns=0)


def _line(text: str, limit: int = 120) -> str:
    return safe_text(text, limit, one_line=True)
