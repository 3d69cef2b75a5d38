"""Problem files: their bytes become rows.

A container is recognized by content, never by name: Parquet, a JSON array or JSON lines, each also inside gzip or
zstd. Other containers (zip, xz, bzip2, Arrow, UTF-16, ...) and files that are missing, empty or torn raise DataError
with what to do. A line or row that cannot be read is a RowProblem.
"""

from __future__ import annotations

import io
import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast, get_args

from megatron_daro.config.data_file import why_no_file
from megatron_daro.config.safetensors_header import GIT_LFS
from megatron_daro.config.sections import DataFormat
from megatron_daro.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa


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
_MOST_DIGITS = 4000  # Python converts at most 4300 to an integer.


@dataclass(frozen=True, slots=True)
class RowProblem:
    """Why a row cannot be used, in a few words that are the same for all rows of that kind."""

    reason: str


@dataclass(frozen=True, slots=True)
class WrittenNumber:
    """A number of a JSON file as it is written there: as a float, 6.02e23 would be another number."""

    text: str


def read_rows(path: Path, data_format: DataFormat = "auto", *, ends: int | None = None) -> Iterator[Row]:
    """Yield the rows of a file, one at a time.

    Args:
        path: Parquet, a JSON array of objects, or one JSON object per line; also packed with gzip or zstd.
        data_format: "parquet" insists on that container, "jsonl" on another; the others take whichever it is.
        ends: only this many first and as many last rows. Files other than Parquet are read to their end all the same.

    Yields:
        (number, row): the line number of JSON lines, else the row number, from 1. A RowProblem stands where a line is
        not JSON, a WrittenNumber where JSON has a number with a point or an exponent, or of thousands of digits.

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
    """Return gzip, zstd or None, by the first bytes."""
    if why := why_no_file(path):
        fix = "give a file with at least one problem" if "empty" in why else "check the path"
        raise DataError(f"{path}: {why}; {fix}")
    try:
        with path.open("rb") as file:
            start = file.read(8)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); check the path") from error
    return next((name for magic, name in _COMPRESSED.items() if start.startswith(magic)), None)


@contextmanager
def _readable(path: Path, packing: str | None) -> Iterator[IO[bytes]]:
    """Yield the file, unpacked. pyarrow notices when a packed file ends too early; zstandard does not."""
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
    """Yield the first `count` and the last `count` rows, each once."""
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
    """Return the whole file: Parquet is read from its end, which a packed file does not allow."""
    return io.BytesIO(file.read())


def _values(batch: pa.RecordBatch) -> list[Any]:
    """Return the rows of an Arrow batch, with a RowProblem for one that Python cannot hold (text that is not UTF-8, the
    year 100000)."""
    names = batch.schema.names
    # float64 is called double. Of two columns of one name Python gets only one, and it is unknown which.
    narrow = [field for field in batch.schema if "float" in str(field.type) and names.count(field.name) == 1]
    try:
        rows = batch.to_pylist()
        for row in rows:
            row |= {field.name: _shortest(row[field.name], field.type) for field in narrow}
        return rows
    except (ValueError, OverflowError) as error:
        if batch.num_rows == 1:
            return [RowProblem(f"row cannot be read ({type(error).__name__})")]
        return [row for i in range(batch.num_rows) for row in _values(batch.slice(i, 1))]


def _shortest(value: Any, kind: pa.DataType) -> Any:
    """Return the value with its narrow floats in the fewest digits that tell them apart: 0.3 of a float32 column would
    otherwise become 0.30000001192092896 in Python."""
    import pyarrow.types as kinds

    if value is None:
        return None
    if kinds.is_floating(kind):
        return float(str(kind.to_pandas_dtype()(value)))
    if kinds.is_struct(kind):
        return {field.name: _shortest(value[field.name], field.type) for field in kind}
    if kinds.is_list(kind) or kinds.is_large_list(kind) or kinds.is_fixed_size_list(kind):
        return [_shortest(one, kind.value_type) for one in value]
    return value
