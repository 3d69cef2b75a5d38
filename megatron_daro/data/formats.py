r"""File formats: rows of a problem file, and the problem and the gold answer in each.

Place in the data flow: a file -> (row number, row) -> ParsedRow -> prompts.
Containers are recognised by content: Parquet, a JSON array, or JSON lines. Layouts are recognised by their fields: DAPO
(`prompt` is a list of chat messages, gold in `reward_model.ground_truth`), GSM8K (gold after `####`), and plain rows
(`problem` or `question`; gold in `answer`, `final_answer`, `ground_truth`, or the last \boxed{} of `solution`).
Refuses whole files that are missing, empty or torn (DataError). A single bad row is a RowProblem: the caller counts it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from megatron_daro.errors import DataError

DataFormat = Literal["auto", "jsonl", "parquet", "gsm8k", "dapo"]

PROBLEM_FIELDS = ("problem", "question", "prompt")
CATEGORY_FIELDS = ("category", "difficulty", "level")
ANSWER_FIELDS = ("answer", "final_answer", "reward_model.ground_truth", "ground_truth", "solution")
_SEPARATED_NUMBER = re.compile(r"-?\d{1,3}(,\d{3})+(\.\d+)?")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class RowProblem:
    """Why a row cannot be used, in a few words that are the same for all rows of that kind."""

    reason: str


@dataclass(frozen=True, slots=True)
class ParsedRow:
    """A usable row: `text` or `messages`, the gold answer, and the row's own source and category if it has them."""

    answer: str
    text: str | None = None
    messages: tuple[Mapping[str, str], ...] | None = None
    source: str | None = None
    category: str = ""


class _UnusableRowError(Exception):
    """Carries a RowProblem's reason out of the field readers; never leaves this module."""


def read_rows(path: Path, data_format: DataFormat = "auto") -> Iterator[tuple[int, Any]]:
    """The rows of a file, one at a time.

    Args:
        path: a Parquet file, a JSON array of objects, or one JSON object per line.
        data_format: "jsonl" and "parquet" insist on that container; the others take whichever it is.

    Yields:
        (number, row): the line number of JSON lines, else the row number, from 1; a RowProblem where a line is not
        JSON.

    Raises:
        DataError: the file is missing, empty, torn, or not of the container asked for.
    """
    if data_format not in get_args(DataFormat):
        raise DataError(f"format: got {data_format!r}, allowed are {', '.join(get_args(DataFormat))}")
    head = _head(path)
    container = "parquet" if head.startswith(b"PAR1") else "array" if head.lstrip().startswith(b"[") else "lines"
    if data_format == "parquet" and container != "parquet":
        raise DataError(f"{path}: format is parquet, but the file is not a Parquet file; use format auto")
    if data_format == "jsonl" and container == "parquet":
        raise DataError(f"{path}: format is jsonl, but the file is a Parquet file; use format auto")
    reader = {"parquet": _parquet_rows, "array": _array_rows, "lines": _line_rows}[container]
    yield from reader(path)


def parse_row(
    row: Any, data_format: DataFormat = "auto", problem_field: str | None = None, answer_field: str | None = None
) -> ParsedRow | RowProblem:
    """The problem and the gold answer of a row.

    Args:
        row: an object as read from the file.
        data_format: "gsm8k" and "dapo" insist on that layout; the others recognise it.
        problem_field: name of the field with the problem; dots go into nested objects.
        answer_field: name of the field with the answer; dots go into nested objects.

    Returns:
        The parsed row, or why it cannot be used.
    """
    if isinstance(row, RowProblem):
        return row
    if not isinstance(row, Mapping):
        return RowProblem("row is not an object")
    try:
        source = row.get("data_source")
        problem = _problem(row, data_format, problem_field)
        return ParsedRow(
            answer=_answer(row, data_format, answer_field),
            source=source if isinstance(source, str) and source else None,
            category=_category(row),
            **problem,
        )
    except _UnusableRowError as unusable:
        return RowProblem(str(unusable))


def answer_text(value: Any) -> str | None:
    """A gold answer as text: 27.0 is "27", a one-element list is its element.

    Args:
        value: what a file holds.

    Returns:
        The text, without space around it; None where the value is not an answer (an object, several answers, NaN,
        true or false, nothing).
    """
    if isinstance(value, list) and len(value) == 1:
        return answer_text(value[0])
    if isinstance(value, str):
        return value.strip() or None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    if not math.isfinite(value):
        return None
    return str(int(value)) if value == int(value) else repr(value)


def last_boxed(text: str) -> str | None:
    r"""The content of the last \boxed{...} (or \fbox{...}) with balanced braces; None where there is none."""
    for match in reversed(list(re.finditer(r"\\(?:boxed|fbox)\s*\{", text))):
        depth = 1
        for place in range(match.end(), len(text)):
            escaped = text[place - 1] == "\\" and text[place - 2] != "\\"
            if text[place] in "{}" and not escaped:
                depth += 1 if text[place] == "{" else -1
            if depth == 0:
                return text[match.end() : place].strip() or None
    return None


def _head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            head = file.read(4096).removeprefix(_BYTE_ORDER_MARK)
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read ({error.strerror}); check the path in data.train or data.eval"
        ) from error
    if not head.strip():
        raise DataError(f"{path}: the file is empty; give a file with at least one problem")
    return head


def _line_rows(path: Path) -> Iterator[tuple[int, Any]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if number == 1:
                line = line.removeprefix(_BYTE_ORDER_MARK)
            if not line.strip():
                continue
            try:
                yield number, json.loads(line.decode("utf-8"))
            except UnicodeDecodeError:
                yield number, RowProblem("line is not UTF-8 text")
            except (ValueError, RecursionError):
                yield number, RowProblem("line is not JSON")


def _array_rows(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        rows = json.loads(path.read_bytes().removeprefix(_BYTE_ORDER_MARK).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{path}: starts like a JSON array, but is torn or not JSON ({error}); repair the file"
        ) from error
    yield from enumerate(rows, start=1)


def _parquet_rows(path: Path) -> Iterator[tuple[int, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: torn Parquet file after row {number} ({error}); fetch the file again") from error


def _field(row: Mapping[str, Any], dotted: str) -> Any:
    if dotted in row:
        return row[dotted]
    value: Any = row
    for name in dotted.split("."):
        if not isinstance(value, Mapping) or name not in value:
            return None
        value = value[name]
    return value


def _first_field(row: Mapping[str, Any], names: Sequence[str]) -> tuple[str, Any]:
    return next(((name, _field(row, name)) for name in names if _field(row, name) is not None), ("", None))


def _problem(row: Mapping[str, Any], data_format: DataFormat, field: str | None) -> dict[str, Any]:
    default = {"gsm8k": ("question",), "dapo": ("prompt",)}.get(data_format, PROBLEM_FIELDS)
    _, value = _first_field(row, (field,) if field else default)
    if value is None:
        raise _UnusableRowError(f"no problem (field {field or ' or '.join(default)})")
    if isinstance(value, list):
        return {"messages": _messages(value)}
    if not isinstance(value, str):
        raise _UnusableRowError("problem is not text")
    if not value.strip():
        raise _UnusableRowError("problem is empty")
    return {"text": value}


def _messages(value: list[Any]) -> tuple[Mapping[str, str], ...]:
    messages = []
    for message in value:
        role = message.get("role") if isinstance(message, Mapping) else None
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(role, str) or not isinstance(content, str):
            raise _UnusableRowError("a chat message lacks role or content as text")
        messages.append({"role": role, "content": content})
    if not messages or messages[-1]["role"] != "user" or not messages[-1]["content"].strip():
        raise _UnusableRowError("the chat does not end with a user message")
    return tuple(messages)


def _answer(row: Mapping[str, Any], data_format: DataFormat, field: str | None) -> str:
    default = {"gsm8k": ("answer",), "dapo": ("reward_model.ground_truth",)}.get(data_format, ANSWER_FIELDS)
    name, value = _first_field(row, (field,) if field else default)
    if value is None or value == "" or value == []:
        raise _UnusableRowError("no answer")
    if name == "solution":
        value = last_boxed(value) if isinstance(value, str) else None
        if value is None:
            raise _UnusableRowError(r"no answer (no \boxed{} in the solution)")
    text = answer_text(value)
    if text is None:
        raise _UnusableRowError("no answer" if isinstance(value, str) else f"answer is not text ({_kind(value)})")
    if data_format == "gsm8k" and "####" not in text:
        raise _UnusableRowError("no answer (no #### in a GSM8K answer)")
    return _after_hashes(text) if "####" in text else text


def _category(row: Mapping[str, Any]) -> str:
    """A number (a level of difficulty) as text; what is neither text nor number is no category."""
    _, value = _first_field(row, CATEGORY_FIELDS)
    return answer_text(value) or "" if not isinstance(value, list) else ""


def _after_hashes(text: str) -> str:
    """GSM8K writes thousands with a comma, which elsewhere separates answers: 1,080 is 1080."""
    answer = text.rsplit("####", 1)[1].strip()
    if not answer:
        raise _UnusableRowError("no answer (nothing after ####)")
    return answer.replace(",", "") if _SEPARATED_NUMBER.fullmatch(answer) else answer


def _kind(value: Any) -> str:
    if isinstance(value, list):
        return f"a list of {len(value)}"
    return (
        "an object" if isinstance(value, Mapping) else f"{value}" if isinstance(value, float) else type(value).__name__
    )
