"""The page of a curation: what was dropped and why, with examples to look at; one file, no network.

Place in the data flow: statistics and Decisions -> page.html, by the layout of the run's report (observe/). Text of the
data is escaped; the examples are the same for the same input.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_daro.curate.decisions import NOTES, REASONS, Decisions, Finding
from megatron_daro.curate.rows import Row
from megatron_daro.observe.escape import safe_text
from megatron_daro.observe.report_html import Page, render, table_html
from megatron_daro.observe.report_plots import COLOURS, Plot, Section

_EXAMPLES = 12
_SHOWN = 900


def render_page(
    statistics: Mapping[str, Any],
    rows: Sequence[Row],
    decisions: Decisions,
    examples: Mapping[str, Row],
    extra: Mapping[int, Mapping[str, Any]],
) -> str:
    """Return the page as text.

    Args:
        statistics: of statistics.collect, maybe with `pass_rates`.
        rows: every row that was read. decisions: what happened to them.
        examples: rows of evaluation sets by "set:row".
        extra: further fields of kept rows; `pass_rate` of each is drawn.
    """
    known = {row.place: row for row in rows} | dict(examples)
    read, kept = statistics["rows_read"], statistics["kept"]
    return render(
        Page(
            title="Curated problems",
            subtitle=f"{kept:,} of {read:,} rows kept ({kept / max(1, read):.1%}); the rest is in dropped.parquet",
            head_html=_warning(statistics) + _cards(statistics) + _tables(statistics),
            sections=[Section("Overview", _plots(statistics, extra))],
            samples_html="",
            tail_html=_examples(rows, decisions, known) + _rules(statistics),
        )
    )


def _warning(statistics: Mapping[str, Any]) -> str:
    if statistics["decontaminated"]:
        return ""
    return (
        '<div class="block"><b>Not compared with any evaluation set.</b> Problems of the benchmarks may be among '
        "these; give the sets with --against.</div>"
    )


def _cards(statistics: Mapping[str, Any]) -> str:
    dropped = statistics["dropped"]
    cards = [
        ("rows read", statistics["rows_read"], f"{len(statistics['files'])} files"),
        ("kept", statistics["kept"], ""),
    ]
    cards += [(reason.replace("_", " "), count, REASONS[reason]) for reason, count in dropped.items()]
    blocks = (
        f'<div class="card"><span>{html.escape(n)}</span><b>{v:,}</b><span>{html.escape(d)}</span></div>'
        for n, v, d in cards
    )
    return f'<div class="cards">{"".join(blocks)}</div>'


def _tables(statistics: Mapping[str, Any]) -> str:
    reasons = ["kept", *statistics["dropped"]]
    files = [[_line(name), *(f"{counts.get(r, 0):,}" for r in reasons)] for name, counts in statistics["files"].items()]
    parts = [
        _block(
            "Files", table_html(["file", *(r.replace("_", " ") for r in reasons)], files, number_columns=len(reasons))
        )
    ]
    if statistics["held_out"]:
        sets = [
            [_line(name), f"{one['problems']:,}", f"{one['rows_dropped']:,}", f"{one['rows_with_overlap']:,}"]
            for name, one in statistics["held_out"].items()
        ]
        header = ["evaluation set", "problems", "rows dropped as leaks", "kept rows that share a long run of words"]
        parts.append(_block("Evaluation sets", table_html(header, sets, number_columns=3)))
    if statistics["notes"]:
        notes = [[NOTES[name], f"{count:,}"] for name, count in statistics["notes"].items()]
        parts.append(_block("Said of kept rows", table_html(["note", "rows"], notes, number_columns=1)))
    return "".join(parts)


def _plots(statistics: Mapping[str, Any], extra: Mapping[int, Mapping[str, Any]]) -> list[Plot]:
    plots = []
    rates = [one["pass_rate"] for one in extra.values() if one.get("pass_rate") is not None]
    if rates:
        count = max(one.get("pass_rate_samples") or 1 for one in extra.values())
        bins = [round(rate * count) for rate in rates]
        heights = [bins.count(k) for k in range(count + 1)]
        names = [f"{k}/{count}" for k in range(count + 1)]
        plots.append(
            _bars("Pass rates", "Kept problems by the part of their answers that was right.", names, heights, 2)
        )
    plots.append(
        _bars(
            "Rows by what happened to them",
            "Every row that was read is in one bar.",
            ["kept", *(reason.replace("_", " ") for reason in statistics["dropped"])],
            [statistics["kept"], *statistics["dropped"].values()],
            0,
        )
    )
    for title, key, caption in (
        ("Sources", "sources", "Kept problems by their data_source, or their file."),
        ("Categories", "categories", "Kept problems by the category, level or difficulty that the data gives."),
        ("Answers", "answers", "Kept problems by what their answer is."),
        ("Length of the statement", "statement_tokens", "Words, numbers and signs of the normal form."),
    ):
        counts = statistics[key]
        if counts:
            top = dict(sorted(counts.items(), key=lambda one: -one[1])[:24]) if key != "statement_tokens" else counts
            plots.append(_bars(title, caption, [_line(name, 40) for name in top], list(top.values()), 1))
    return plots


def _bars(title: str, caption: str, names: list[str], heights: list[int], colour: int) -> Plot:
    trace = {"type": "bar", "x": names, "y": heights, "marker": {"color": COLOURS[colour]}, "text": heights}
    axes = {
        "xaxis": {"type": "category", "automargin": True},
        "yaxis": {"title": {"text": "rows"}},
        "showlegend": False,
    }
    return Plot(title, caption, [trace], axes)


def _examples(rows: Sequence[Row], decisions: Decisions, known: Mapping[str, Row]) -> str:
    by_reason: dict[str, list[Finding]] = {}
    for finding in (*(decisions.dropped[row] for row in sorted(decisions.dropped)), *decisions.notes_on_kept()):
        by_reason.setdefault(finding.reason, []).append(finding)
    order = [name for name in (*REASONS, *NOTES) if name in by_reason]
    parts = []
    for name in dict.fromkeys(order):
        found = by_reason[name]
        shown = found[:: max(1, len(found) // _EXAMPLES)][:_EXAMPLES]
        label = f"{name.replace('_', ' ')}: {len(shown)} of {len(found):,} rows"
        inner = "".join(_example(one, rows[one.row], known.get(one.other)) for one in shown)
        parts.append(f"<details><summary><b>{html.escape(label)}</b></summary>{inner}</details>")
    return f"<section><h2>Examples</h2>{''.join(parts)}</section>" if parts else ""


def _example(finding: Finding, row: Row, other: Row | None) -> str:
    head = " · ".join(part for part in (row.place, finding.detail) if part)
    body = f"<h4>{html.escape(_line(head, 300))}</h4>{_problem(row)}"
    if finding.other:
        body += f"<h4>{html.escape(_line(finding.other, 200))}</h4>{_problem(other) if other else ''}"
    return f'<div class="sample">{body}</div>'


def _problem(row: Row) -> str:
    answer = " or ".join(row.prompt.answers) if not row.unusable else ""
    text = f"{row.prompt.statement}\n→ {answer}" if row.prompt.statement else row.unusable
    return f"<pre>{html.escape(safe_text(text, _SHOWN))}</pre>"


def _rules(statistics: Mapping[str, Any]) -> str:
    rules = [[name, _line(str(value), 200)] for name, value in statistics["rules"].items()]
    rules += [
        [f"instructions left out of the comparison in {n}", _line(" / ".join(v), 300)]
        for n, v in statistics["instructions"].items()
    ]
    rules.append(["groups of candidates too full to compare every pair", str(statistics["crowded_groups"])])
    return _block("Rules", table_html(["rule", "value"], rules, number_columns=0))


def _block(title: str, inner: str) -> str:
    return f"<section><h2>{html.escape(title)}</h2>{inner}</section>"


def _line(text: str, limit: int = 120) -> str:
    return safe_text(text, limit, one_line=True)
