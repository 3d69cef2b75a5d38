r"""Problem files: their bytes become rows, and each row a problem with its gold answers.

A container is recognized by content, never by name: Parquet, a JSON array or JSON lines, each also inside gzip or
zstd. Other containers (zip, xz, bzip2, Arrow, UTF-16, ...) and files that are missing, empty or torn raise DataError
with what to do.

A row's layout is recognized by its fields: DAPO (`prompt` is a list of chat messages, gold in
`reward_model.ground_truth`), GSM8K (gold after `####`), and plain rows (`problem`, `question`, `prompt` or
`messages`; gold in `answer`, `final_answer`, `ground_truth`, or the last \boxed{} of `solution`). A gold may be a
list of alternatives. A pass rate with the name of its model, as `megatron-daro curate` writes them, or a plain
`pass_rate` from 0 to 1 is read too. A line or row that cannot be used is a RowProblem, which the caller counts.
"""

from __future__ import annotations

import io
import json
import math
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, cast, get_args

from megatron_daro.boxed import last_box
from megatron_daro.config.data_file import why_no_file
from megatron_daro.config.safetensors_header import GIT_LFS
from megatron_daro.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa


DataFormat = Literal["auto", "jsonl", "parquet", "gsm8k", "dapo"]
Row = tuple[int, Any]

_HEAD_BYTES = 4096
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_COMPRESSED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
_REFUSED = {
    b"PK\x03\x04": ("a zip archive", "unpack it and name the files inside"),
    b"PK\x05\x06": ("an empty zip archive", "name a file of problems"),
    b"\xfd7zXZ\x00": ("an xz archive", "unpack it, or pack it with gzip or zstd"),
    b"BZh": ("a bzip2 archive", "unpack it, or pack it with gzip or zstd"),
    b"ARROW1": ("an Arrow file", "write the table as Parquet (pyarrow.parquet.write_table)"),
    b"\xff\xff\xff\xff": ("an Arrow stream", "write the table as Parquet (datasets: Dataset.to_parquet)"),
    GIT_LFS: ("a git-lfs pointer, not the file", "run `git lfs pull` in its folder"),
    b"\xff\xfe\x00\x00": ("UTF-32 text", "save the file as UTF-8"),
    b"\x00\x00\xfe\xff": ("UTF-32 text", "save the file as UTF-8"),
    b"\xff\xfe": ("UTF-16 text", "save the file as UTF-8"),
    b"\xfe\xff": ("UTF-16 text", "save the file as UTF-8"),
}
"""First bytes -> what such a file is, and what to do with it."""
_MOST_DIGITS = 4000  # Python converts no longer text to an integer.


@dataclass(frozen=True, slots=True)
class RowProblem:
    """Why a row cannot be used, in a few words that are the same for all rows of that kind."""

    reason: str


@dataclass(frozen=True, slots=True)
class WrittenNumber:
    """A number of a JSON file as it stands there: as a float, 6.02e23 would be another number."""

    text: str


def read_rows(path: Path, data_format: DataFormat = "auto", *, ends: int | None = None) -> Iterator[Row]:
    """Return the rows of a file, one at a time.

    Args:
        path: Parquet, a JSON array of objects, or one JSON object per line; also packed with gzip or zstd.
        data_format: "jsonl" and "parquet" insist on that container; the others take whichever it is.
        ends: only so many first and as many last rows. Lines and packed files are read to their end all the same.

    Yields:
        (number, row): the line number of JSON lines, else the row number, from 1. A RowProblem stands where a line is
        not JSON, a WrittenNumber where JSON has a number with a point or an exponent.

    Raises:
        DataError: the file is missing, empty, torn, of a kind that is not read, or not of the container asked for.
    """
    if data_format not in get_args(DataFormat):
        raise DataError(f"format: got {data_format!r}, allowed are {', '.join(get_args(DataFormat))}")
    packing = _packing(path)
    with _readable(path, packing) as file:
        head = file.read(_HEAD_BYTES)
    _refuse_others(path, head)
    text = head.removeprefix(_BYTE_ORDER_MARK).lstrip()
    container = "parquet" if head.startswith(b"PAR1") else "array" if text.startswith(b"[") else "lines"
    if not text:
        raise DataError(f"{path}: the file is empty; give a file with at least one problem")
    if data_format == "parquet" and container != "parquet":
        raise DataError(f"{path}: format is parquet, but the file is not a Parquet file; use format auto")
    if data_format == "jsonl" and container == "parquet":
        raise DataError(f"{path}: format is jsonl, but the file is a Parquet file; use format auto")
    reader: Callable[[Path, str | None, int | None], Iterator[Row]]
    reader = {"parquet": _parquet_rows, "array": _array_rows, "lines": _line_rows}[container]
    yield from reader(path, packing, ends)


def _packing(path: Path) -> str | None:
    """gzip, zstd or None, by the first bytes."""
    if why := why_no_file(path):
        fix = "give a file with at least one problem" if "empty" in why else "check the path"
        raise DataError(f"{path}: {why}; {fix}")
    try:
        with path.open("rb") as file:
            start = file.read(8)
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read ({error.strerror}); check the path in data.train or data.eval"
        ) from error
    return next((name for magic, name in _COMPRESSED.items() if start.startswith(magic)), None)


@contextmanager
def _readable(path: Path, packing: str | None) -> Iterator[IO[bytes]]:
    """Return the file, unpacked. pyarrow tells a packed file that ends too early from a whole one; zstandard does
    not."""
    if packing is None:
        with path.open("rb") as plain:
            yield plain
        return
    import pyarrow as pa

    try:
        with pa.input_stream(str(path), compression=packing) as unpacked:
            yield io.BufferedReader(unpacked)
    except OSError as error:
        raise DataError(f"{path}: torn {packing} file ({error}); fetch the file again") from error


def _refuse_others(path: Path, head: bytes) -> None:
    for magic, (kind, fix) in _REFUSED.items():
        if head.startswith(magic):
            raise DataError(f"{path}: {kind}, which is not read; {fix}")
    if b"\0" in head and not head.startswith(b"PAR1"):
        raise DataError(
            f"{path}: a binary file of an unknown kind; Parquet, a JSON array and JSON lines are read, in UTF-8, also "
            "packed with gzip or zstd"
        )


def _line_rows(path: Path, packing: str | None, ends: int | None) -> Iterator[Row]:
    with _readable(path, packing) as file:
        numbered = ((number, line) for number, line in enumerate(_lines(file), start=1) if line.strip())
        for number, line in numbered if ends is None else _both_ends(numbered, ends):
            yield number, _json_line(line)


def _lines(file: IO[bytes]) -> Iterator[bytes]:
    yield file.readline().removeprefix(_BYTE_ORDER_MARK)
    yield from file


def _both_ends(rows: Iterable[tuple[int, bytes]], count: int) -> Iterator[tuple[int, bytes]]:
    """Return the first `count` and the last `count`, each once."""
    rest = iter(rows)
    yield from islice(rest, count)
    yield from deque(rest, maxlen=count)


def _json_line(line: bytes) -> object:
    try:
        return _json(line)
    except UnicodeDecodeError:
        return RowProblem("line is not UTF-8 text")
    except (ValueError, RecursionError):
        return RowProblem("line is not JSON")


def _json(content: bytes) -> object:
    return json.loads(content.decode("utf-8"), parse_float=WrittenNumber, parse_int=_integer)


def _integer(digits: str) -> int | WrittenNumber:
    return int(digits) if len(digits) <= _MOST_DIGITS else WrittenNumber(digits)


def _array_rows(path: Path, packing: str | None, ends: int | None) -> Iterator[Row]:
    with _readable(path, packing) as file:
        content = file.read()
    try:
        rows = cast("list[Any]", _json(content.removeprefix(_BYTE_ORDER_MARK)))  # it begins with a bracket
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{path}: starts like a JSON array, but is torn or not JSON ({error}); repair the file"
        ) from error
    numbered = list(enumerate(rows, start=1))
    middle = slice(ends, max(ends, len(numbered) - ends)) if ends is not None else slice(0)
    del numbered[middle]
    yield from numbered


def _parquet_rows(path: Path, packing: str | None, ends: int | None) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        with _readable(path, packing) as file, pq.ParquetFile(file if packing is None else _in_memory(file)) as table:
            total = table.metadata.num_rows
            first, last = (total, total) if ends is None else (ends, total - ends)
            for part in range(table.num_row_groups):
                size = table.metadata.row_group(part).num_rows
                if first <= number <= number + size <= last:
                    number += size
                    continue
                for batch in table.iter_batches(batch_size=1024, row_groups=[part]):
                    before = min(max(first - number, 0), batch.num_rows)
                    after = max(last - number, before)
                    yield from enumerate(_values(batch.slice(0, before)), start=number + 1)
                    yield from enumerate(_values(batch.slice(after)), start=number + after + 1)
                    number += batch.num_rows
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: torn Parquet file after row {number} ({error}); fetch the file again") from error


def _in_memory(file: IO[bytes]) -> io.BytesIO:
    """Parquet is read from its end, which a packed file does not allow."""
    return io.BytesIO(file.read())


def _values(batch: pa.RecordBatch) -> list[Any]:
    """Return the rows of an Arrow batch; one that Python cannot hold (text that is not UTF-8, the year 100000) is
    named."""
    try:
        return batch.to_pylist()
    except (ValueError, OverflowError) as error:
        if batch.num_rows == 1:
            return [RowProblem(f"row cannot be read ({type(error).__name__})")]
        return [row for i in range(batch.num_rows) for row in _values(batch.slice(i, 1))]


FIELD = "pass_rate"
SAMPLES, MODEL, WEIGHTS = "pass_rate_samples", "pass_rate_model", "pass_rate_weights"


@dataclass(frozen=True, slots=True)
class PassRate:
    """How often a model solved a problem. rate: in [0, 1]; samples: answers asked for, 0 if not said; model: its name;
    weights: a digest of its weights (empty: not said)."""

    rate: float
    samples: int = 0
    model: str = ""
    weights: str = ""


def pass_rate_of(row: object) -> PassRate | None:
    """Return the pass rate of a row; None where it has none that is a number from 0 to 1."""
    if not isinstance(row, Mapping):
        return None
    rate = _number(row.get(FIELD))
    if rate is None or not 0 <= rate <= 1:
        return None
    samples, model, weights = _number(row.get(SAMPLES)), row.get(MODEL), row.get(WEIGHTS)
    return PassRate(
        rate,
        int(samples) if samples is not None and samples >= 0 else 0,
        model if isinstance(model, str) else "",
        weights if isinstance(weights, str) else "",
    )


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float, Decimal, WrittenNumber)):
        return None
    # Of text: an integer of 400 digits would raise.
    number = float(value.text if isinstance(value, WrittenNumber) else str(value))
    return number if math.isfinite(number) else None


PROBLEM_FIELDS = ("problem", "question", "prompt", "messages")
CATEGORY_FIELDS = ("category", "difficulty", "level")
ANSWER_FIELDS = ("answer", "final_answer", "reward_model.ground_truth", "ground_truth", "solution")
_BESIDE_MESSAGES = ("tools", "functions", "documents", "chat_template_kwargs")
_SEPARATED_NUMBER = re.compile(r"-?\d{1,3}(,\d{3})+(\.\d+)?")
_SURROGATE = re.compile(r"[\ud800-\udfff]")
_MOST_ALTERNATIVES = 64
_EXACT_AS_FLOAT = 2**53


@dataclass(frozen=True, slots=True)
class ParsedRow:
    """A usable row: `text` or `messages`, the gold answers (each is right), the row's own source, category and
    stored pass rate."""

    answers: tuple[str, ...]
    text: str | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None
    source: str | None = None
    category: str = ""
    pass_rate: PassRate | None = None


class _UnusableRowError(Exception):
    """Carries a RowProblem's reason out of the field readers; never leaves this module."""


def parse_row(
    row: object, data_format: DataFormat = "auto", problem_field: str | None = None, answer_field: str | None = None
) -> ParsedRow | RowProblem:
    """Return the problem and the gold answer of a row.

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
        parsed = ParsedRow(
            answers=_answers(row, data_format, answer_field),
            source=source if isinstance(source, str) and source else None,
            category=_category(row),
            pass_rate=pass_rate_of(row),
            **problem,
        )
    except _UnusableRowError as unusable:
        return RowProblem(str(unusable))
    # JSON can write half of a character (\ud800 alone); no tokenizer and no file takes it.
    if any(_SURROGATE.search(text) for text in _texts(parsed)):
        return RowProblem("text that is not Unicode (a lone surrogate)")
    return parsed


def field_names(row: object) -> list[str]:
    """Names that `problem_field` and `answer_field` could have: of the row's fields, and of those in its objects."""
    if not isinstance(row, Mapping):
        return []
    inner = [f"{name}.{key}" for name, value in row.items() if isinstance(value, Mapping) for key in value]
    return [*map(str, row), *inner]


def answer_text(value: object) -> str | None:
    """Return a gold answer as text: 27.0 is "27", a number of a JSON file keeps its digits, a one-element list is
    its element.

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
    if isinstance(value, WrittenNumber):
        return _number_text(_decimal(value.text), value.text)
    if isinstance(value, Decimal):
        return _number_text(value, f"{value:f}") if value.is_finite() else None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    if isinstance(value, int):
        return str(value)
    return _number_text(Decimal(repr(value)), repr(value)) if math.isfinite(value) else None


def _decimal(written: str) -> Decimal | None:
    """None for an exponent of more digits than the library takes."""
    try:
        return Decimal(written)
    except InvalidOperation:
        return None


def _number_text(value: Decimal | None, written: str) -> str:
    """Return the number as it is written, but 27.0 as 27 and 0.50 as 0.5."""
    # copy_abs and not abs, which rounds and overflows.
    if value is not None and value.copy_abs() <= _EXACT_AS_FLOAT and value == int(value):
        return str(int(value))
    if "e" in written.lower() or "." not in written:
        return written
    return written.rstrip("0").rstrip(".")


def _texts(parsed: ParsedRow) -> Iterator[str]:
    """Every text of the row that goes on from here."""
    yield from (*parsed.answers, parsed.text or "", parsed.source or "", parsed.category)
    for message in parsed.messages or ():
        yield json.dumps(message, ensure_ascii=False)


def _field(row: Mapping[str, Any], dotted: str) -> object:
    if dotted in row:
        return row[dotted]
    value: object = row
    for name in dotted.split("."):
        if not isinstance(value, Mapping) or name not in value:
            return None
        value = value[name]
    return value


def _first_field(row: Mapping[str, Any], names: Sequence[str]) -> tuple[str, Any]:
    """Return the first field that says something; an empty `answer` beside a `solution` says nothing."""
    return next(((name, _field(row, name)) for name in names if not _is_blank(_field(row, name))), ("", None))


def _is_blank(value: object) -> bool:
    return value is None or (isinstance(value, str) and not value.strip()) or value == []


def _problem(row: Mapping[str, Any], data_format: DataFormat, field: str | None) -> dict[str, Any]:
    default = {"gsm8k": ("question",), "dapo": ("prompt",)}.get(data_format, PROBLEM_FIELDS)
    names = (field,) if field else default
    _, value = _first_field(row, names)
    if value is None:
        values = [_field(row, name) for name in names]
        if [] in values:
            raise _UnusableRowError("the chat does not end with a user message")
        missing = all(one is None for one in values)
        raise _UnusableRowError(f"no problem (field {' or '.join(names)})" if missing else "problem is empty")
    if isinstance(value, str):
        value = _chat_in_text(value) or value
    if isinstance(value, list):
        offered = [name for name in _BESIDE_MESSAGES if _offers(row.get(name))]
        if offered:
            raise _UnusableRowError(f"{', '.join(offered)}, which only an environment can offer (environment.kind)")
        return {"messages": _messages(value)}
    if not isinstance(value, str):
        raise _UnusableRowError("problem is not text")
    return {"text": value}


def _offers(value: object) -> bool:
    # Parquet gives each struct every key of the column.
    values = value.values() if isinstance(value, Mapping) else [value]
    return not all(map(_is_blank, values))


def _chat_in_text(text: str) -> list[Any] | None:
    """Return the chat that a text is, where all of it is a JSON array of messages; files without lists keep chats
    so."""
    if not text.lstrip().startswith("["):
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    is_chat = isinstance(value, list) and value and all(isinstance(m, dict) and "role" in m for m in value)
    return value if is_chat else None


def _messages(value: list[Any]) -> tuple[Mapping[str, Any], ...]:
    """Return the messages with all that a chat template may read of them: `tool_calls`, `reasoning_content`, `name`."""
    messages = []
    for message in value:
        # Parquet gives each message every key of the column, None where a message has none.
        fields = {k: v for k, v in message.items() if v is not None} if isinstance(message, Mapping) else {}
        if fields.get("tool_calls") and "content" not in fields:
            fields["content"] = ""
        if not isinstance(fields.get("role"), str) or not isinstance(fields.get("content"), str):
            raise _UnusableRowError("a chat message lacks role or content as text")
        try:
            messages.append(json.loads(json.dumps(fields, allow_nan=False, default=_plain_number)))
        except (TypeError, ValueError, RecursionError):
            raise _UnusableRowError("a chat message holds what is no JSON") from None
    if not messages or messages[-1]["role"] != "user" or not messages[-1]["content"].strip():
        raise _UnusableRowError("the chat does not end with a user message")
    return tuple(messages)


def _plain_number(value: object) -> float:
    """Return the number that a template takes for a WrittenNumber; anything else is no JSON."""
    if not isinstance(value, WrittenNumber):
        raise TypeError
    return float(value.text)


def _answers(row: Mapping[str, Any], data_format: DataFormat, field: str | None) -> tuple[str, ...]:
    """Return the gold and its alternatives, each once, in the file's order."""
    default = {"gsm8k": ("answer",), "dapo": ("reward_model.ground_truth",)}.get(data_format, ANSWER_FIELDS)
    name, value = _first_field(row, (field,) if field else default)
    alternatives = [one for one in value if not _is_blank(one)] if isinstance(value, list) else [value]
    if value is None or not alternatives:
        raise _UnusableRowError("no answer")
    if len(alternatives) > _MOST_ALTERNATIVES:
        raise _UnusableRowError(f"answer is a list of more than {_MOST_ALTERNATIVES}")
    return tuple(dict.fromkeys(_answer(one, name, data_format) for one in alternatives))


def _answer(value: object, name: str, data_format: DataFormat) -> str:
    if name == "solution":
        value = last_box(value) if isinstance(value, str) else None
        if not value:
            raise _UnusableRowError(r"no answer (no \boxed{} in the solution)")
    text = answer_text(value)
    if text is None:
        raise _UnusableRowError(f"answer is not text ({_kind(value)})")
    if data_format == "gsm8k" and "####" not in text:
        raise _UnusableRowError("no answer (no #### in a GSM8K answer)")
    return _after_hashes(text) if "####" in text else text


def _category(row: Mapping[str, Any]) -> str:
    """Return a number (a level of difficulty) as text; what is neither text nor number is no category."""
    _, value = _first_field(row, CATEGORY_FIELDS)
    return answer_text(value) or "" if not isinstance(value, list) else ""


def _after_hashes(text: str) -> str:
    """GSM8K writes thousands with a comma, which elsewhere separates answers: 1,080 is 1080."""
    answer = text.rsplit("####", 1)[1].strip()
    if not answer:
        raise _UnusableRowError("no answer (nothing after ####)")
    return answer.replace(",", "") if _SEPARATED_NUMBER.fullmatch(answer) else answer


def _kind(value: object) -> str:
    if isinstance(value, list):
        return f"a list of {len(value)}"
    return (
        "an object" if isinstance(value, Mapping) else f"{value}" if isinstance(value, float) else type(value).__name__
    )
