"""Rows made by hand for `megatron-daro curate`, and what the command wrote of each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pyarrow.parquet as pq


def write_problems(path: Path, cases: Sequence[tuple[str, ...]]) -> Path:
    """(text, answer, other answers ...) as a file."""
    rows = [{"problem": text, "answer": list(answers)} for text, *answers in cases]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def number_of(place: str) -> int:
    """Rows are named by their file and their number, from 1."""
    return int(place.rsplit(":", 1)[-1])


class Curated:
    """What the command wrote of one file of rows.

    dropped: (reason, number of the row that it is a copy of, or the name of the held-out problem) by the row's number;
    details: their details. kept: numbers of the rows that stayed. notes: (row, reason, other, detail) of these.
    """

    def __init__(self, out: Path, num_rows: int) -> None:
        self.out = out
        self.statistics = json.loads((out / "statistics.json").read_text())
        rows = pq.read_table(out / "dropped.parquet").to_pylist()
        others = [number_of(row["other"]) if "train.jsonl" in row["other"] else row["other"] for row in rows]
        self.dropped = {number_of(row["origin"]): (row["reason"], o) for row, o in zip(rows, others, strict=True)}
        self.details = {number_of(row["origin"]): row["detail"] for row in rows}
        self.kept = [number for number in range(1, num_rows + 1) if number not in self.dropped]
        notes = pq.read_table(out / "notes.parquet").to_pylist()
        self.notes = [(number_of(n["origin"]), n["reason"], n["other"], n["detail"]) for n in notes]
        assert self.statistics["rows_read"] == num_rows and self.statistics["kept"] == len(self.kept)

    @property
    def reasons(self) -> dict[int, str]:
        return {number: reason for number, (reason, _) in self.dropped.items()}


# A row that no rule touches: a set must not be empty.
PLAIN = ("Compute the area of a circle of radius 7 in the plane of a floor.", "49\\pi")
