"""Problem files -> Row: one for each row of each file, usable or not, with the place it came from."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from megatron_daro.data.containers import RowProblem, WrittenNumber, read_rows
from megatron_daro.data.formats import field_names, parse_row
from megatron_daro.data.prompts import prompt_of
from megatron_daro.errors import ConfigError, DataError
from megatron_daro.types import Prompt
from megatron_daro.workshop.curate.statements import Statement, shared_lines, statement_of, without_lines

_FIELDS_SHOWN = 20
_SET_FILES = ("*.jsonl", "*.json", "*.parquet", "*.jsonl.gz", "*.jsonl.zst", "*.json.gz")
_NO_PROMPT = Prompt(id="", answer="", source="")
_NO_STATEMENT = Statement(())


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a file. `unusable` says why there is no problem in it; then `prompt` and `statement` are empty.

    place: "file:row", rows counted as data/ counts them. kept: fields that are carried along unchanged, as JSON text.
    """

    place: str
    prompt: Prompt = _NO_PROMPT
    statement: Statement = _NO_STATEMENT
    unusable: str = ""
    kept: Mapping[str, str] = field(default_factory=dict)

    @property
    def file(self) -> str:
        """The file's part of the place."""
        return self.place.rpartition(":")[0]

    @property
    def number(self) -> str:
        """The row's number in its file."""
        return self.place.rpartition(":")[2]


@dataclass(frozen=True, slots=True)
class Fields:
    """Names of a file's fields, where they are not the usual ones; keep: further ones to carry along."""

    problem: str | None = None
    answer: str | None = None
    keep: tuple[str, ...] = ()


def read_all(paths: Sequence[Path], fields: Fields) -> tuple[list[Row], dict[str, list[str]]]:
    """Read every row of every file, in order.

    Returns:
        The rows; and for each file the lines shared by its problems, which are not part of them.

    Raises:
        DataError: no file, a file that cannot be read or holds no usable row, or one that is given twice.
    """
    if not paths:
        raise DataError("DATA: no file given; give at least one file of problems")
    resolved = [path.resolve() for path in paths]
    repeated = sorted({str(path) for path in resolved if resolved.count(path) > 1})
    if repeated:
        raise DataError(f"DATA: {', '.join(repeated)} is given twice; give each file once")
    rows: list[Row] = []
    shared: dict[str, list[str]] = {}
    for path, name in zip(paths, _names(resolved), strict=True):
        rows_of_file, lines = _read(path, name, fields)
        rows += rows_of_file
        if lines:
            shared[name] = sorted(lines)
    return rows, shared


def read_evaluation_sets(paths: Sequence[Path]) -> dict[str, list[Row]]:
    """Read evaluation sets, each named as its file up to the first dot.

    Args:
        paths: files, or folders of them.

    Raises:
        ConfigError: a folder without problem files, or two sets of one name. DataError: as `read_all`.
    """
    sets: dict[str, list[Row]] = {}
    for file in [file for path in paths for file in _set_files(path)]:
        name = file.name.split(".")[0]
        if name in sets:
            raise ConfigError(
                f"--against: got two sets named {name!r}; allowed: names that differ before the first dot; fix: "
                "rename one of the files"
            )
        sets[name], _ = read_all([file], Fields())
    return sets


def _set_files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = sorted({file for pattern in _SET_FILES for file in path.glob(pattern)})
    if not files:
        raise ConfigError(
            f"--against: got {str(path)!r}, a folder without problem files; allowed: files of problems or folders "
            f"with {', '.join(_SET_FILES)}; fix: check the path"
        )
    return files


def _names(paths: Sequence[Path]) -> list[str]:
    """Return the shortest ends of the paths that tell the files apart."""
    depth = 1
    while len(set(names := ["/".join(path.parts[-depth:]) for path in paths])) < len(paths):
        depth += 1
    return names


def _read(path: Path, name: str, fields: Fields) -> tuple[list[Row], frozenset[str]]:
    rows: list[Row] = []
    names: list[str] = []
    for number, raw in read_rows(path):
        names = names or field_names(raw)[:_FIELDS_SHOWN]
        parsed = parse_row(raw, "auto", fields.problem, fields.answer)
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
    return [row if row.unusable else _with_statement(row, lines) for row in rows], lines


def _with_statement(row: Row, lines: frozenset[str]) -> Row:
    return replace(row, statement=statement_of(without_lines(row.prompt.statement, lines)))


def _kept(raw: object, names: Sequence[str]) -> dict[str, str]:
    if not isinstance(raw, Mapping):
        return {}
    return {name: json.dumps(raw.get(name), ensure_ascii=False, default=_plain_value) for name in names}


def _plain_value(value: object) -> str:
    return value.text if isinstance(value, WrittenNumber) else str(value)
