"""What a curation leaves behind: the curated set, a record of each dropped row, notes, statistics and a page.

Everything is written to OUT.partial and renamed once it is complete and was read back, so OUT is finished or absent.
No time and no path of the machine is written: the same input gives the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from megatron_daro import durable
from megatron_daro.data.prompts import load_problems
from megatron_daro.errors import ConfigError, DataError
from megatron_daro.workshop.curate.decisions import Decisions, Finding
from megatron_daro.workshop.curate.page import render_page
from megatron_daro.workshop.curate.rows import Row

CURATED, DROPPED, NOTES = "curated.parquet", "dropped.parquet", "notes.parquet"
STATISTICS, PAGE = "statistics.json", "page.html"
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
    """Return the folder in which a curation is written until it is complete."""
    return out.with_name(f"{out.name}.partial")


def check_free(out: Path) -> None:
    """Refuse a path that exists. Raises ConfigError."""
    if out.exists():
        raise ConfigError(
            f"--out: got {str(out)!r}, which is there already; allowed: a new directory; fix: name another one, or "
            "remove it"
        )


def check_keep(names: Sequence[str]) -> None:
    """Refuse fields that the curated set has itself. Raises ConfigError."""
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
    extra: Mapping[int, Mapping[str, Any]],
    sets: Mapping[str, Sequence[Row]],
) -> None:
    """Write everything, then rename it to `out`.

    Args:
        out: not there yet; `partial_of(out)` may hold files of an earlier attempt, which are replaced.
        rows: every row that was read. decisions: what happened to them. statistics: for the file and the page.
        extra: row -> further fields of the curated set, such as its pass rate.
        sets: evaluation sets by name, whose rows are shown on the page beside leaks.

    Raises:
        ConfigError: `out` is there. DataError: nothing is left, or what was written reads differently.
    """
    check_free(out)
    kept = decisions.kept()
    if not kept:
        reasons = ", ".join(f"{count} {reason}" for reason, count in decisions.counts().items())
        raise DataError(f"no problem is left of {len(rows)} rows: {reasons}; relax the rules")
    folder = partial_of(out)
    folder.mkdir(parents=True, exist_ok=True)
    _write_curated(folder / CURATED, [_curated(rows[row], extra.get(row, {})) for row in kept])
    _write_findings(folder / DROPPED, [decisions.dropped[row] for row in sorted(decisions.dropped)], rows)
    _write_findings(folder / NOTES, decisions.notes_on_kept(), rows)
    text = json.dumps(statistics, indent=2, ensure_ascii=False, sort_keys=True)
    (folder / STATISTICS).write_text(text + "\n", encoding="utf-8")
    (folder / PAGE).write_text(render_page(statistics, rows, decisions, sets, extra), encoding="utf-8")
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


def _write_curated(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Write the set, and check that training would read exactly these problems."""
    columns: dict[str, pa.Array] = {name: pa.array([r[name] for r in records], kind) for name, kind in _COLUMNS}
    for name in dict.fromkeys(name for record in records for name in record if name not in columns):
        columns[name] = _column([record.get(name) for record in records])
    pq.write_table(pa.table(columns), path, compression="zstd")
    prompts, report = load_problems([path], strict=True)
    if [prompt.id for prompt in prompts] != [record["id"] for record in records]:
        raise DataError(
            f"{path}: {len(records)} problems were written, and training would read {len(prompts)} of them "
            f"({report.summary()}); the file stays there, unfinished"
        )


def _column(values: list[Any]) -> pa.Array:
    """Return values of one kind as they are, and JSON text where rows differ in kind."""
    try:
        return pa.array(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
        return pa.array([None if v is None else json.dumps(v, ensure_ascii=False) for v in values], pa.string())


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
