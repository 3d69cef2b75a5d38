"""The tables of an evaluation, as text for a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_daro.observe.table import table_text


def summary_text(summary: Mapping[str, Any]) -> str:
    """Return tables: metrics with intervals by set, how answers end and reflect, accuracy and length by difficulty;
    with several templates also one that compares them."""
    sets: Mapping[str, Any] = summary["sets"]
    names = list(dict.fromkeys(metric for one in sets.values() for metric in one["metrics"]))
    rows = []
    for name, one in sets.items():
        numbers = [_estimate(one["metrics"].get(metric)) for metric in names]
        shares = [f"{one['length']:.0f}", f"{one['truncated']:.1%}", f"{one['no_answer']:.1%}"]
        rows.append([name, str(one["problems"]), *numbers, *shares])
    if summary["mean"]:
        rows.append(["mean of sets", "", *(_estimate(summary["mean"].get(metric)) for metric in names), "", "", ""])
    head = ["set", "problems", *names, "tokens", "cut off", "no answer"]
    levels = []
    for name, one in sets.items():
        for row in one["by_level"]:
            lengths = [_tokens(row[key]) for key in ("length", "length_right", "length_wrong")]
            what = f"{row['by']} {row['level']}"
            levels.append([name, what, str(row["problems"]), f"{row['accuracy']:.1%}", *lengths])
    level_head = ["set", "difficulty", "problems", "accuracy", "tokens", "tokens, right", "tokens, wrong"]
    tables = [table_text(head, rows, left=1), _behaviour_text(sets), table_text(level_head, levels, left=2)]
    return "\n".join([*tables, *([_templates_text(summary["templates"])] if summary.get("templates") else [])])


def _behaviour_text(sets: Mapping[str, Any]) -> str:
    head = ["set", "answered", "ran on", "cut off", "stopped without answer", "code"]
    head += ["reflecting", "problems with one", "accuracy of these", "of the others"]
    rows = [
        [name, *("" if value is None else f"{value:.1%}" for value in one["behaviour"].values())]
        for name, one in sets.items()
    ]
    return table_text(head, rows, left=1)


def _templates_text(templates: Mapping[str, Any]) -> str:
    """Return a table with one row for each template: the mean of its sets, each counting once."""
    names = list(dict.fromkeys(metric for one in templates.values() for metric in one["metrics"]))
    shares = ("answered", "reflecting")
    rows = [
        [
            name,
            *(_estimate(one["metrics"].get(metric)) for metric in names),
            f"{one['length']:.0f}",
            *(f"{one['behaviour'][share]:.1%}" for share in shares),
        ]
        for name, one in templates.items()
    ]
    return table_text(["template, mean of its sets", *names, "tokens", *shares], rows, left=1)


def _estimate(one: Mapping[str, float] | None) -> str:
    return f"{one['mean']:.1%} [{one['low']:.1%}, {one['high']:.1%}]" if one else ""


def _tokens(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}"
