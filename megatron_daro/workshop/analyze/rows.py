"""Recorded rollouts of several frameworks as rows of one kind, file by file; a file is a step.

A file -> its records (`files`, `host_lines`) -> its columns (`columns`) -> Rows.
"""

from __future__ import annotations

import json
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from megatron_daro.errors import DataError
from megatron_daro.workshop.analyze.behaviour import reflects
from megatron_daro.workshop.analyze.columns import Columns, Wanted, choose_columns
from megatron_daro.workshop.analyze.files import open_records
from megatron_daro.workshop.analyze.lengths import character_count, number_of, token_count

_TURNS, _REPORTS, _USED, _TURN_KEYS = "turns", "reports", "used", {"observed", "generated"}
"""Columns that only this package writes, and the keys of a turn."""


@dataclass(frozen=True, slots=True)
class Row:
    """One rollout. right: None if the dump has no verdict for it. length: generated tokens, or characters of a text or
    of a chat's assistant messages. turns: of a conversation, observed and generated tokens of each turn. reports: what
    its environment reported about each answer. reflects: whether its text has a word of self-reflection; None if texts
    are not read."""

    group: Hashable
    length: float
    right: bool | None
    turns: Sequence[Mapping[str, int]] = ()
    reports: Sequence[Mapping[str, float]] = ()
    reflects: bool | None = None


def open_dump(files: Sequence[Path], wanted: Wanted) -> Iterator[tuple[Columns, Iterator[Row | None]]]:
    """Yield the columns and the rollouts of each file, which is opened when its turn comes and can be read once.

    Raises:
        DataError: as in `open_file`; or the lengths of two files have different units.
    """
    unit = ""
    for path in files:
        columns, rows = open_file(path, wanted)
        unit = unit or columns.unit
        if columns.unit != unit:
            raise DataError(
                f"dump: {files[0]} has lengths in {unit}, {path} in {columns.unit}; allowed is one unit: analyze the "
                "files of each framework by themselves"
            )
        yield columns, rows


def open_file(path: Path, wanted: Wanted) -> tuple[Columns, Iterator[Row | None]]:
    """Return the columns of one file and its rollouts, with None for a record that has no group or no length.

    Raises:
        DataError: as in `choose_columns`. While it is read: the file is torn, a value is not a length, or a verdict is
            neither 0/1 nor -1/1 and no threshold was given.
    """
    names, read = open_records(path)
    columns = choose_columns(path, names, wanted)
    return columns, _rows(path, read([*columns.names, _TURNS, _REPORTS, _USED]), columns)


def _rows(path: Path, records: Iterable[Mapping[str, object]], columns: Columns) -> Iterator[Row | None]:
    for number, record in enumerate(records, 1):
        if record.get(_USED) == "dropped":
            continue
        try:
            row = _row(path, record, columns)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:  # such as a list nested without end
            raise DataError(
                f"dump: {path}, record {number}: {', '.join(columns.names)} cannot be read ({type(error).__name__}: "
                f"{error!s:.80}); allowed are a group, a length and a verdict: repair the record or leave it out"
            ) from None
        yield row


def _row(path: Path, record: Mapping[str, object], columns: Columns) -> Row | None:
    length, group = _plain(record.get(columns.length)), _plain(record.get(columns.group))
    if length is None or group is None:
        return None
    right, size = _right(_plain(record.get(columns.right)), columns, path), _size(length, columns, path)
    turns = _turns(record.get(_TURNS)) if columns.length == "length" else ()
    reports = cast("list[Mapping[str, float]]", record.get(_REPORTS) or []) if turns else []
    observed = sum(turn["observed"] for turn in turns)
    text = record.get(columns.text) if columns.text else None
    reflecting = reflects(text) if isinstance(text, str) else None
    return Row(_key(group), size - observed, right, turns, reports, reflecting)


def _plain(value: object) -> object:
    """Return the numbers of a tensor, an array or one of their scalars; return anything else unchanged."""
    return value.tolist() if hasattr(value, "tolist") else value


def _turns(value: object) -> Sequence[Mapping[str, int]]:
    """Return the turns of this package's conversations; nothing if there is no such column or it has other content."""
    if not isinstance(value, list) or not all(isinstance(turn, Mapping) and set(turn) == _TURN_KEYS for turn in value):
        return ()
    return value


def _key(value: object) -> Hashable:
    """Return a hashable key of a group, whose prompt may be a list of mappings (a chat)."""
    if isinstance(value, Hashable) and not isinstance(value, tuple):
        return value
    return json.dumps(value, sort_keys=True, default=str)


def _size(length: object, columns: Columns, path: Path) -> float:
    size = character_count(length) if columns.is_text else token_count(length)
    if size is None:
        raise DataError(f"dump: {path}, {columns.length}: got {_shown(length)}, {_allowed_lengths(columns)}")
    return size


def _allowed_lengths(columns: Columns) -> str:
    name = columns.length
    if columns.is_text:
        return (
            "allowed are texts, and chats whose assistant messages have a text as content: their characters are "
            f"counted; numbers of tokens and lists of tokens are named with --columns length={name}"
        )
    return (
        "allowed are numbers of tokens and lists of tokens; the characters of a text or of a chat's assistant messages "
        f"are counted with --columns length=len({name})"
    )


def _shown(value: object) -> str:
    kind = "a list of messages" if isinstance(value, list) and value and isinstance(value[0], Mapping) else None
    return kind or f"{value!r:.80}"


def _right(verdict: object, columns: Columns, path: Path) -> bool | None:
    if isinstance(verdict, Mapping):
        if columns.reward_key not in verdict:
            raise DataError(
                f"dump: {path}, {columns.right}: got a mapping with {', '.join(map(str, verdict))}; allowed is one of "
                f"these with --reward-key{f', not {columns.reward_key}' if columns.reward_key else ''}"
            )
        verdict = _plain(verdict[columns.reward_key])
    if verdict is None or isinstance(verdict, bool):
        return verdict
    value = number_of(verdict)
    if value is None or not math.isfinite(value):
        raise DataError(
            f"dump: {path}, {columns.right}: got {verdict!r:.80}, allowed are finite numbers and true or false"
        )
    if columns.correct_above is not None:
        return value > columns.correct_above
    if value not in (-1.0, 0.0, 1.0):
        raise DataError(
            f"dump: {path}, {columns.right}: got {value:g}, allowed are 0 and 1, or -1 and 1: a shaped reward does not "
            "say whether an answer is right; give --correct-above"
        )
    return value == 1.0
