"""Rows: every row of every file, usable or not, with the place it came from, and the decision what becomes of it.

Every row that was read has exactly one decision, so that the counts add up to the rows that were read.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron_daro.data.formats import DataFormat, RowProblem, WrittenNumber, field_names, parse_row, read_rows
from megatron_daro.data.prompts import prompt_of
from megatron_daro.errors import DataError
from megatron_daro.types import Prompt
from megatron_daro.workshop.curate.statements import Statement, shared_lines, statement_of, without_lines

REASONS: Mapping[str, str] = {
    "unusable": "no problem or no answer could be read",
    "proof": "it asks for a proof",
    "free_text": "its answer is a sentence",
    "language": "it is in another language",
    "unverifiable": "the verifier cannot check its answer",
    "leak": "it stands in an evaluation set",
    "overlap": "it shares a long run of words with an evaluation set",
    "conflict": "the same problem stands in the data with another answer",
    "duplicate": "the same problem, written alike up to spelling, is kept",
    "duplicate_form": "the same problem is kept, asking for its answer in another form",
    "near_duplicate": "a kept problem differs in a few words, has the same numbers and the same answer",
    "paraphrase": "a kept problem says the same in other words, with the same numbers and the same answer",
    "guessable": "a guess hits its answer",
    "topic": "its topic has more than its share",
    "guessed": "the model guesses its answer without reasoning",
    "unsampled": "no pass rate could be measured",
    "pass_rate": "its pass rate is outside the range",
}
"""Why a row can be dropped, in the order of the stages."""

NOTES: Mapping[str, str] = {
    "other_answer": "a kept problem differs in a few words and has another answer",
    "overlap": "it shares a long run of words with an evaluation set, but is another problem",
    "majority": "its answer is that of most copies of the problem",
}
"""What can be said of a row that stays."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A row, why it was dropped or noted, and the other side: a place, or set and row of an evaluation set."""

    row: int
    reason: str
    detail: str = ""
    other: str = ""


@dataclass(slots=True)
class Decisions:
    """The book of one curation. `count`: rows that were read."""

    count: int
    dropped: dict[int, Finding] = field(default_factory=dict)
    notes: list[Finding] = field(default_factory=list)

    def drop(self, row: int, reason: str, detail: str = "", other: str = "") -> None:
        """Drop a row. Raises ValueError for an unknown reason or a row that was dropped before."""
        if reason not in REASONS or row in self.dropped or not 0 <= row < self.count:
            raise ValueError(f"row {row} of {self.count} cannot be dropped as {reason!r}")
        self.dropped[row] = Finding(row, reason, detail, other)

    def note(self, row: int, reason: str, detail: str = "", other: str = "") -> None:
        """Say something about a row. Raises ValueError for an unknown note."""
        if reason not in NOTES:
            raise ValueError(f"no note {reason!r}")
        self.notes.append(Finding(row, reason, detail, other))

    def kept(self) -> list[int]:
        """Return the rows that stay, in order."""
        return [row for row in range(self.count) if row not in self.dropped]

    def notes_on_kept(self) -> list[Finding]:
        """Return what is said about rows that stay, in order of the rows."""
        return sorted((n for n in self.notes if n.row not in self.dropped), key=lambda n: (n.row, n.reason, n.other))

    def counts(self) -> dict[str, int]:
        """Return how many rows each reason dropped; their sum and the rows that stay are `count`."""
        return _counted((f.reason for f in self.dropped.values()), REASONS)

    def note_counts(self) -> dict[str, int]:
        """Return how many notes there are of each kind, on rows that stay."""
        return _counted((note.reason for note in self.notes_on_kept()), NOTES)


def _counted(values: Iterable[str], names: Iterable[str]) -> dict[str, int]:
    counts = Counter(values)
    return {name: counts[name] for name in names if counts[name]}


_FIELDS_SHOWN = 20
_NO_PROMPT = Prompt(id="", answer="", source="")
_NO_STATEMENT = Statement(())


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a file. `unusable` says why there is no problem in it; then `prompt` and `statement` are empty.

    place: "file:row", the row as data/ counts them. kept: fields of the file that go on as they are, as JSON text.
    """

    place: str
    prompt: Prompt = _NO_PROMPT
    statement: Statement = _NO_STATEMENT
    unusable: str = ""
    kept: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Fields:
    """How the files are read: as `load_problems` has it; `keep`: names of further fields to carry along."""

    data_format: DataFormat = "auto"
    problem: str | None = None
    answer: str | None = None
    keep: tuple[str, ...] = ()


def read_all(paths: Sequence[Path], fields: Fields) -> tuple[list[Row], dict[str, list[str]]]:
    """Read every row of every file, in order.

    Returns:
        The rows; and for each file the lines shared by its problems, which are no part of them.

    Raises:
        DataError: no file, a file that cannot be read or holds no usable row, or two files of the same path.
    """
    if not paths:
        raise DataError("DATA: no file given; give at least one file of problems")
    repeated = sorted({str(p) for p in paths if [q.resolve() for q in paths].count(p.resolve()) > 1})
    if repeated:
        raise DataError(f"DATA: {', '.join(repeated)} is given twice; give each file once")
    rows: list[Row] = []
    shared: dict[str, list[str]] = {}
    names = _names(paths)
    for path in paths:
        of_file, lines = _read(path, names[path], fields)
        rows += of_file
        if lines:
            shared[names[path]] = sorted(lines)
    return rows, shared


def _names(paths: Sequence[Path]) -> dict[Path, str]:
    """Return the shortest ends of the paths that tell the files apart."""
    depth = 1
    while True:
        names = {path: "/".join(path.resolve().parts[-depth:]) for path in paths}
        if len(set(names.values())) == len(paths):
            return names
        depth += 1


def _read(path: Path, name: str, fields: Fields) -> tuple[list[Row], frozenset[str]]:
    rows: list[Row] = []
    names: list[str] = []
    for number, raw in read_rows(path, fields.data_format):
        names = names or field_names(raw)[:_FIELDS_SHOWN]
        parsed = parse_row(raw, fields.data_format, fields.problem, fields.answer)
        place = f"{name}:{number}"
        if isinstance(parsed, RowProblem):
            rows.append(Row(place, unusable=parsed.reason))
        else:
            rows.append(Row(place, prompt_of(parsed, path.stem), kept=_kept(raw, fields.keep)))
    usable = [row for row in rows if not row.unusable]
    if not usable:
        reasons = ", ".join(sorted({row.unusable for row in rows})) or "the file has no rows"
        hint = f"; the fields are {', '.join(names)}: name two with --problem-field and --answer-field" if names else ""
        raise DataError(f"{path}: no usable row among {len(rows)}: {reasons}{hint}")
    lines = shared_lines([row.prompt.statement for row in usable])
    return [_with_statement(row, lines) for row in rows], lines


def _with_statement(row: Row, lines: frozenset[str]) -> Row:
    if row.unusable:
        return row
    return Row(row.place, row.prompt, statement_of(without_lines(row.prompt.statement, lines)), "", row.kept)


def _kept(raw: object, names: Sequence[str]) -> dict[str, str]:
    if not isinstance(raw, Mapping):
        return {}
    return {name: json.dumps(raw.get(name), ensure_ascii=False, default=_plain_value) for name in names}


def _plain_value(value: object) -> str:
    return value.text if isinstance(value, WrittenNumber) else str(value)
