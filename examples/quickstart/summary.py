"""Prints what a run gained: held-out accuracy by difficulty, and tool calls, before and after.

    python examples/quickstart/summary.py runs/quickstart

Place in the data flow: RUN/metrics.jsonl (keys eval/{name}/accuracy[/{category}] and tool_calls_mean) -> a table on the
terminal.
Refuses runs that were evaluated fewer than two times.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

ALL, CALLS = "all", "tool calls, mean"


def evaluations(run_dir: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl that hold an evaluation, in order."""
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines if line.strip()]
    return [record for record in records if any(key.startswith("eval/") for key in record)]


def accuracy_rows(first: dict[str, Any], last: dict[str, Any]) -> list[tuple[str, str, float, float]]:
    """Return (set, category or `ALL`, accuracy before, after) of every key in both, the whole set after its categories;
    then (set, `CALLS`, tool calls per conversation before, after) if the set has conversations."""
    rows = []
    for key in sorted(first):
        parts = key.split("/", 3)
        if parts[0] == "eval" and parts[2:3] == ["accuracy"] and key in last:
            rows.append((parts[1], parts[3] if len(parts) > 3 else ALL, first[key], last[key]))
        elif parts[0] == "eval" and parts[2:] == ["tool_calls_mean"] and key in last:
            rows.append((parts[1], CALLS, first[key], last[key]))
    order = {ALL: 1, CALLS: 2}
    return sorted(rows, key=lambda row: (row[0], order.get(row[1], 0), row[1]))


def accuracy_table(first: dict[str, Any], last: dict[str, Any]) -> Table:
    """Return the table of both evaluations."""
    table = Table(title="Accuracy on held-out problems")
    for column in ("set", "difficulty"):
        table.add_column(column)
    for column in (f"step {first['step']:.0f}", f"step {last['step']:.0f}", "gain"):
        table.add_column(column, justify="right")
    previous = None
    for name, category, before, after in accuracy_rows(first, last):
        if previous not in (None, name):
            table.add_section()
        # Names come from files: Text keeps rich from reading markup in them.
        cells = (Text(name if name != previous else ""), Text(category), f"{before:.3f}", f"{after:.3f}")
        table.add_row(*cells, f"{after - before:+.3f}", style="bold" if category == ALL else None)
        previous = name
    return table


def main(arguments: list[str]) -> int:
    """Run the command line: the run directory. Return the exit code."""
    if len(arguments) != 1:
        print("usage: summary.py RUN", file=sys.stderr)
        return 2
    try:
        found = evaluations(Path(arguments[0]))
    except (OSError, ValueError) as error:
        print(f"summary.py: {arguments[0]}/metrics.jsonl cannot be read: {error}", file=sys.stderr)
        return 1
    if len(found) < 2:
        print(f"summary.py: {arguments[0]} has {len(found)} evaluations, two are needed for a before and after")
        return 0
    Console().print(accuracy_table(found[0], found[-1]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
