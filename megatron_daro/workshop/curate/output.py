"""What a curation leaves behind: the curated set, a record of each dropped row, notes, statistics and a page.

Everything is written to OUT.partial and renamed once it is complete and was read back, so OUT is finished or absent.
No time and no path of the machine is written: the same input gives the same bytes. The page (page.html, one file, no
network) shows what was dropped and why, with examples; text of the data is escaped.

Statistics are plain values: what was read, what happened to it, and what is left.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from megatron_daro import durable
from megatron_daro.data.prompts import load_problems
from megatron_daro.errors import ConfigError, DataError
from megatron_daro.observe.logs import safe_text
from megatron_daro.reward.normal_form import canonical, number
from megatron_daro.workshop.curate.offline import guess_of
from megatron_daro.workshop.curate.rows import NOTES, REASONS, Decisions, Finding, Row
from megatron_daro.workshop.report.page import COLOURS, Page, Plot, Section, Table, render

_LENGTHS = (8, 16, 32, 64, 128, 256, 512)


def collect(
    rows: Sequence[Row],
    decisions: Decisions,
    *,
    sets: Mapping[str, Sequence[Row]],
    rules: Mapping[str, Any],
    shared: Mapping[str, Sequence[str]],
    crowded: int,
) -> dict[str, Any]:
    """Return the statistics.

    Args:
        rows: every row that was read. decisions: what happened to them.
        sets: evaluation sets by name.
        rules: the settings of the curation, as plain values.
        shared: file -> lines shared by its problems, which are not compared.
        crowded: groups of candidates that were too full to compare all of their pairs.

    Raises:
        ValueError: kept and dropped rows do not add up to the rows that were read.
    """
    kept = decisions.kept()
    counts = decisions.counts()
    if len(kept) + sum(counts.values()) != len(rows):
        raise ValueError(f"{len(kept)} kept and {sum(counts.values())} dropped rows are not the {len(rows)} read")
    by_file: dict[str, Counter[str]] = {}
    for index, row in enumerate(rows):
        name = row.place.rsplit(":", 1)[0]
        finding = decisions.dropped.get(index)
        by_file.setdefault(name, Counter())[finding.reason if finding else "kept"] += 1
    return {
        "rows_read": len(rows),
        "kept": len(kept),
        "dropped": counts,
        "notes": decisions.note_counts(),
        "files": {name: dict(sorted(counter.items())) for name, counter in by_file.items()},
        "held_out": _held_out(decisions, sets),
        "decontaminated": bool(sets),
        "sources": dict(sorted(Counter(rows[row].prompt.source for row in kept).items())),
        "categories": dict(sorted(Counter(filter(None, (rows[row].prompt.category for row in kept))).items())),
        "answers": dict(sorted(Counter(_kind(rows[row]) for row in kept).items())),
        "statement_tokens": _lengths([len(rows[row].statement.tokens) for row in kept]),
        "instructions": {name: list(lines) for name, lines in shared.items()},
        "crowded_groups": crowded,
        "rules": dict(rules),
        "reasons": dict(REASONS),
    }


def _held_out(decisions: Decisions, sets: Mapping[str, Sequence[Row]]) -> dict[str, dict[str, int]]:
    leaks = Counter(f.other.rsplit(":", 1)[0] for f in decisions.dropped.values() if f.reason == "leak")
    overlaps = Counter(n.other.rsplit(":", 1)[0] for n in decisions.notes_on_kept() if n.reason == "overlap")
    return {
        name: {
            "problems": sum(not row.unusable for row in rows),
            "rows_dropped": leaks[name],
            "rows_with_overlap": overlaps[name],
        }
        for name, rows in sets.items()
    }


def _kind(row: Row) -> str:
    """Return what sort of answer it is, in a word."""
    if len(row.prompt.answers) > 1:
        return "several alternatives"
    guess = guess_of(row.prompt.answer, row.prompt.statement, 0)
    if guess not in (None, "small_integer"):
        return {"choice": "choice letter", "yes_no": "yes or no", "true_false": "true or false"}[str(guess)]
    text = canonical(row.prompt.answer)
    value = number(text)
    if value is None:
        return "expression or text"
    return "integer" if text.lstrip("+-").isdigit() else "other number"


def _lengths(lengths: Sequence[int]) -> dict[str, int]:
    """Return how many statements have up to so many tokens."""
    counts: Counter[str] = Counter()
    for length in lengths:
        limit = next((limit for limit in _LENGTHS if length <= limit), None)
        counts[f"up to {limit}" if limit else f"above {_LENGTHS[-1]}"] += 1
    order = [*(f"up to {limit}" for limit in _LENGTHS), f"above {_LENGTHS[-1]}"]
    return {name: counts[name] for name in order if counts[name]}


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
    ]
    cards += [(reason.replace("_", " "), count, REASONS[reason]) for reason, count in dropped.items()]
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


def _examples(rows: Sequence[Row], decisions: Decisions, known: Mapping[str, Row]) -> list[tuple[str, list[Any]]]:
    """Return, for each reason, its heading and some rows."""
    by_reason: dict[str, list[Finding]] = {}
    for finding in (*(decisions.dropped[row] for row in sorted(decisions.dropped)), *decisions.notes_on_kept()):
        by_reason.setdefault(finding.reason, []).append(finding)
    order = [name for name in (*REASONS, *NOTES) if name in by_reason]
    parts = []
    for name in dict.fromkeys(order):
        examples = by_reason[name]
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


CURATED, DROPPED, NOTES_FILE, STATISTICS, PAGE = (
    "curated",
    "dropped.parquet",
    "notes.parquet",
    "statistics.json",
    "page.html",
)
FORMATS = ("parquet", "jsonl")
Extra = Mapping[int, Mapping[str, Any]]
"""Row -> further fields of the curated set, such as its pass rate."""

_TEXTS = pa.list_(pa.string())
_MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
_COLUMNS = [
    ("id", pa.string()), ("problem", pa.string()), ("messages", _MESSAGES), ("answer", _TEXTS),
    ("data_source", pa.string()), ("category", pa.string()), ("origin", pa.string()),
]  # fmt: skip
_RECORD = [
    ("origin", pa.string()), ("reason", pa.string()), ("detail", pa.string()), ("other", pa.string()),
    ("problem", pa.string()), ("answer", _TEXTS), ("data_source", pa.string()),
]  # fmt: skip


def partial_of(out: Path) -> Path:
    """Return where a curation is written before it is whole."""
    return out.with_name(f"{out.name}.partial")


def check_free(out: Path) -> None:
    """Refuse a place that holds something. Raises ConfigError."""
    if out.exists():
        raise ConfigError(
            f"--out: got {str(out)!r}, which is there already; allowed: a new directory; fix: name another one, or "
            "remove it"
        )


def check_keep(names: Sequence[str]) -> None:
    """Refuse fields that would stand twice in the curated set. Raises ConfigError."""
    own = {name for name, _ in _COLUMNS}
    taken = sorted(name for name in names if name in own or name.startswith("pass_rate"))
    if taken:
        raise ConfigError(
            f"--keep-field: got {', '.join(taken)}; allowed: fields that the curated set does not have itself "
            f"({', '.join(own)}, pass_rate...); fix: leave it out"
        )


def write(
    out: Path,
    rows: Sequence[Row],
    decisions: Decisions,
    statistics: Mapping[str, Any],
    *,
    formats: Sequence[str] = FORMATS[:1],
    extra: Extra | None = None,
    examples: Mapping[str, Row] | None = None,
) -> None:
    """Write everything and give it its name.

    Args:
        out: not there yet; `partial_of(out)` may hold files of an earlier attempt, which are replaced.
        rows: every row that was read. decisions: what happened to them. statistics: for the file and the page.
        formats: of the curated set.
        extra: further fields of kept rows.
        examples: rows of evaluation sets by "set:row", to show on the page.

    Raises:
        ConfigError: `out` is there. DataError: nothing is left, or what was written reads differently.
    """
    check_free(out)
    kept = decisions.kept()
    if not kept:
        raise DataError(f"no problem is left of {len(rows)} rows: {_reasons(decisions)}; relax the rules")
    folder = partial_of(out)
    folder.mkdir(parents=True, exist_ok=True)
    records = [_curated(rows[row], (extra or {}).get(row, {})) for row in kept]
    for name in formats:
        path = folder / f"{CURATED}.{name}"
        _write_parquet(path, records) if name == "parquet" else _write_lines(path, records)
        _check(path, [record["id"] for record in records])
    dropped = [decisions.dropped[row] for row in sorted(decisions.dropped)]
    _write_findings(folder / DROPPED, dropped, rows)
    _write_findings(folder / NOTES_FILE, decisions.notes_on_kept(), rows)
    text = json.dumps(statistics, indent=2, ensure_ascii=False, sort_keys=True)
    (folder / STATISTICS).write_text(text + "\n", encoding="utf-8")
    page = render_page(statistics, rows, decisions, examples or {}, extra or {})
    (folder / PAGE).write_text(page, encoding="utf-8")
    for path in folder.iterdir():
        if path.is_file():
            durable.sync(path)
    durable.sync(folder)
    folder.rename(out)
    durable.sync(out.resolve().parent)


def _curated(row: Row, extra: Mapping[str, Any]) -> dict[str, Any]:
    prompt = row.prompt
    messages = None if prompt.messages is None else [dict(message) for message in prompt.messages]
    return {
        "id": prompt.id,
        "problem": prompt.text,
        "messages": messages,
        "answer": list(prompt.answers),
        "data_source": prompt.source,
        "category": prompt.category,
        "origin": row.place,
        **{name: json.loads(value) for name, value in row.kept.items()},
        **extra,
    }


def _write_parquet(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    columns: dict[str, pa.Array] = {name: pa.array([r[name] for r in records], kind) for name, kind in _COLUMNS}
    for name in dict.fromkeys(name for record in records for name in record if name not in columns):
        columns[name] = _column([record.get(name) for record in records])
    pq.write_table(pa.table(columns), path, compression="zstd")


def _column(values: list[Any]) -> pa.Array:
    """Return values of one kind as they are, and JSON text where rows differ in kind."""
    try:
        return pa.array(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
        return pa.array([None if v is None else json.dumps(v, ensure_ascii=False) for v in values], pa.string())


def _write_lines(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for record in records:
            answer = record["answer"][0] if len(record["answer"]) == 1 else record["answer"]
            fields = {k: v for k, v in {**record, "answer": answer}.items() if v is not None}
            file.write(json.dumps(fields, ensure_ascii=False) + "\n")


def _check(path: Path, ids: Sequence[str]) -> None:
    """Training must find exactly these problems in the file."""
    prompts, report = load_problems([path], strict=True)
    if [prompt.id for prompt in prompts] != list(ids):
        raise DataError(
            f"{path}: {len(ids)} problems were written, and training would read {len(prompts)} of them "
            f"({report.summary()}); the file stays there, unfinished"
        )


def _write_findings(path: Path, findings: Sequence[Finding], rows: Sequence[Row]) -> None:
    records = [
        {
            "origin": rows[one.row].place,
            "reason": one.reason,
            "detail": one.detail,
            "other": one.other,
            "problem": rows[one.row].prompt.statement or None,
            "answer": list(rows[one.row].prompt.answers) if not rows[one.row].unusable else None,
            "data_source": rows[one.row].prompt.source or None,
        }
        for one in findings
    ]
    columns = {name: pa.array([record[name] for record in records], kind) for name, kind in _RECORD}
    pq.write_table(pa.table(columns), path, compression="zstd")


def _reasons(decisions: Decisions) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in decisions.counts().items())
