"""The statistics of a curation as plain values: what was read, what happened to it, and what is left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_daro.workshop.curate.decisions import Decisions
from megatron_daro.workshop.curate.rows import Row


def collect(
    rows: Sequence[Row],
    decisions: Decisions,
    *,
    sets: Mapping[str, Sequence[Row]],
    rules: Mapping[str, Any],
    shared: Mapping[str, Sequence[str]],
    crowded: int,
) -> dict[str, Any]:
    """Return the counts, and the settings.

    Args:
        rows: every row that was read. decisions: what happened to them.
        sets: evaluation sets by name.
        rules: the settings of the curation, as plain values.
        shared: file -> lines shared by its problems, which are not compared.
        crowded: groups of candidates that were too full to compare all of their pairs.
    """
    kept = decisions.kept()
    by_file: dict[str, Counter[str]] = {}
    for index, row in enumerate(rows):
        finding = decisions.dropped.get(index)
        by_file.setdefault(row.file, Counter())[finding.reason if finding else "kept"] += 1
    return {
        "rows_read": len(rows),
        "kept": len(kept),
        "dropped": decisions.counts(),
        "notes": decisions.note_counts(),
        "files": {name: dict(sorted(counter.items())) for name, counter in by_file.items()},
        "held_out": _held_out(decisions, sets),
        "decontaminated": bool(sets),
        "sources": dict(sorted(Counter(rows[row].prompt.source for row in kept).items())),
        "instructions": {name: list(lines) for name, lines in shared.items()},
        "crowded_groups": crowded,
        "rules": dict(rules),
    }


def _held_out(decisions: Decisions, sets: Mapping[str, Sequence[Row]]) -> dict[str, dict[str, int]]:
    leaks = Counter(f.other.rpartition(":")[0] for f in decisions.dropped.values() if f.reason == "leak")
    overlaps = Counter(n.other.rpartition(":")[0] for n in decisions.notes_on_kept() if n.reason == "overlap")
    return {
        name: {
            "problems": sum(not row.unusable for row in rows),
            "rows_dropped": leaks[name],
            "rows_with_overlap": overlaps[name],
        }
        for name, rows in sets.items()
    }
