"""The statistics of a curation as plain values: what was read, what happened to it, and what is left."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_daro.reward.normal_form import canonical, number
from megatron_daro.workshop.curate.decisions import REASONS, Decisions
from megatron_daro.workshop.curate.kinds import guess_of
from megatron_daro.workshop.curate.rows import Row

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
    """Count.

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
        "categories": dict(sorted(Counter(filter(None, (rows[row].prompt.category for row in kept))).items())),
        "answers": dict(sorted(Counter(_kind(rows[row]) for row in kept).items())),
        "statement_tokens": _lengths([len(rows[row].statement.tokens) for row in kept]),
        "instructions": {name: list(lines) for name, lines in shared.items()},
        "crowded_groups": crowded,
        "rules": dict(rules),
        "reasons": dict(REASONS),
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


def _kind(row: Row) -> str:
    """Return what sort of answer it is, in a word."""
    if len(row.prompt.answers) > 1:
        return "several alternatives"
    words = {"choice": "choice letter", "yes_no": "yes or no", "true_false": "true or false"}
    guess = guess_of(row.prompt.answer, row.prompt.statement)
    if guess in words:
        return words[guess]
    text = canonical(row.prompt.answer)
    if number(text) is None:
        return "expression or text"
    return "integer" if text.lstrip("+-").isdigit() else "other number"


def _lengths(lengths: Sequence[int]) -> dict[str, int]:
    """Return how many statements have up to so many tokens."""
    names = [*(f"up to {limit}" for limit in _LENGTHS), f"above {_LENGTHS[-1]}"]
    counts = Counter(names[bisect_left(_LENGTHS, length)] for length in lengths)
    return {name: counts[name] for name in names if counts[name]}
