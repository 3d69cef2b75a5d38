"""One file of a conversion, written by a worker process, and the card that lists what all of them wrote.

`write_file` reads the rows that a job of the plan needs, writes them, and hashes both sides on the way. It holds one
piece of a tensor at a time (`Plan.piece_bytes`), whatever the size of the model.

The records become a `Card`: every tensor with shape, dtype and the hash of both sides, and how it was checked, as
`conversion.json` in the target and as the table that the command prints. A later conversion of that target compares
hashes with it, so that a flipped byte is found and named.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from megatron_daro.config.model_shape import read_model_shape
from megatron_daro.convert import torch_dist
from megatron_daro.convert.daro_format import StoredShard
from megatron_daro.convert.mapping import TensorRule, global_boxes, hf_to_megatron, other_name, possible_boxes
from megatron_daro.convert.megatron_weights import MegatronWeights
from megatron_daro.convert.pieces import PADDING, RowReader, Run, hf_runs, shard_runs
from megatron_daro.convert.plan import HFTensor, Job, Parameter, Plan, torch_dtype
from megatron_daro.convert.safetensors_file import DirectFile, FileWriter, bytes_of
from megatron_daro.errors import CheckpointError, ModelError


class StopFlag(Protocol):
    """Says whether the user wants the work to end."""

    def is_set(self) -> bool:
        """Whether it was raised."""


class StoppedError(Exception):
    """The work was ended from outside; the file is not complete."""


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """A tensor as it was read or written. sha256: of its bytes, row by row."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    sha256: str


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file that is complete: its size in bytes, the tensors of both sides, and the pieces that the index names."""

    file: str
    num_bytes: int
    megatron: list[TensorRecord] = field(default_factory=list)
    hf: list[TensorRecord] = field(default_factory=list)
    shards: list[StoredShard] = field(default_factory=list)
    blobs: list[torch_dist.WrittenBlob] = field(default_factory=list)


class Hash(Protocol):
    """What hashlib makes."""

    def update(self, data: memoryview) -> None:
        """Take the next bytes."""

    def hexdigest(self) -> str:
        """Return the hash of what was taken."""


class RowHash:
    """SHA-256 of a tensor whose rows come in order; what did not come so is read for it at the end.

    Args:
        rows: that were taken already. taken: the hash of them.
    """

    def __init__(self, rows: int = 0, taken: Hash | None = None) -> None:
        self._hash = taken or hashlib.sha256()
        self._next = rows
        self._is_in_order = True

    def add(self, start: int, values: Tensor) -> None:
        """Take rows [start, start + len(values))."""
        self._is_in_order = self._is_in_order and start == self._next
        if self._is_in_order:
            self._hash.update(bytes_of(values))
            self._next += len(values)

    def digest(self, windows: Sequence[tuple[int, int]], read: Callable[[int, int], Tensor]) -> str:
        """Return the hash of the whole tensor, hexadecimal.

        Args:
            windows: all rows of it, in order, as (start, stop). read: returns such rows.
        """
        if not self._is_in_order:
            return RowHash().digest(windows, read)
        for start, stop in windows:
            if stop > self._next:
                self.add(self._next, read(max(start, self._next), stop))
        return self._hash.hexdigest()


class Scratch:
    """Memory for the rows that are on their way, taken once: fresh memory costs the system more than reading into it.

    Args:
        num_bytes: at the beginning; grows to the largest piece.
    """

    def __init__(self, num_bytes: int) -> None:
        self._bytes = torch.empty(num_bytes, dtype=torch.uint8)

    def shaped(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a tensor in this memory; it holds until the next call."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes > len(self._bytes):
            self._bytes = torch.empty(num_bytes, dtype=torch.uint8)
        return self._bytes[:num_bytes].view(dtype).view(tuple(shape))


def write_file(plan: Plan, job: Job, folder: Path, stop: StopFlag | None = None) -> FileRecord:
    """Write one file of a plan into a folder; it is on the disk when this returns.

    Raises:
        ModelError, CheckpointError: the source is torn. OSError: the disk refused. StoppedError: the flag was raised.
    """
    writer = {"hf": _write_hf, "daro": _write_daro, "torch_dist": _write_torch_dist}[plan.format]
    return writer(plan, job, folder, stop)


def joined(records: Sequence[FileRecord], num_bytes: int) -> FileRecord:
    """Return the record of a file out of those of its parts. num_bytes: of the file."""
    joined_up = FileRecord(records[0].file, num_bytes)
    for record in records:
        joined_up.megatron.extend(record.megatron)
        joined_up.hf.extend(record.hf)
        joined_up.shards.extend(record.shards)
        joined_up.blobs.extend(record.blobs)
    return joined_up


def windows(shape: tuple[int, ...], dtype: torch.dtype, most_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield rows [start, stop) of a tensor, at most so many bytes (or one row) at a time."""
    row_bytes = dtype.itemsize
    for size in shape[1:]:
        row_bytes *= size
    most = max(1, most_bytes // max(row_bytes, 1))
    for start in range(0, shape[0], most):
        yield start, min(start + most, shape[0])


def parameter_name(parameter: Parameter) -> str:
    """Return a parameter's key with its index along the prepended axes, as the card shows it."""
    return box_name(parameter.box.key, parameter.box.index)


def box_name(key: str, index: tuple[int, ...]) -> str:
    """Return a key with an index along the prepended axes."""
    return key + "".join(f"[{i}]" for i in index)


class _ParameterReader:
    """The rows of one Megatron parameter, read from HF tensors and hashed on both sides."""

    def __init__(self, parameter: Parameter, tensors: RowReader, scratch: Scratch, most_bytes: int) -> None:
        self._parameter, self._tensors, self._scratch, self._most_bytes = parameter, tensors, scratch, most_bytes
        rule = parameter.rule
        self._runs = shard_runs(rule, 0, 1, padded_vocab=parameter.shape[0] if rule.kind == "vocab" else None)
        self._hash, self._hashes = hashlib.sha256(), [RowHash() for _ in rule.hf_names]
        self._casts = [own != parameter.dtype for own in parameter.source_dtypes]
        # Both sides begin with the same bytes where the first HF tensor comes first, and whole: hashed once.
        first = self._runs[0]
        is_shared = (first.source, first.rows) == (0, rule.hf_shapes[0][0]) and not self._casts[0]
        self._shared = first.rows if is_shared else 0
        self._windows = list(windows(parameter.shape, torch_dtype(parameter.dtype), most_bytes))

    def pieces(self, stop: StopFlag | None) -> Iterator[Tensor]:
        """Yield all rows in the target's dtype, a piece at a time; each holds until the next one."""
        for first, last in self._windows:
            _check(stop)
            shape = (last - first, *self._parameter.shape[1:])
            values = self._scratch.shaped(shape, torch_dtype(self._parameter.dtype))
            for run in self._runs:
                start, end = max(run.at, first), min(run.at + run.rows, last)
                if start < end:
                    self._fill(run, start, values[start - first : end - first])
            yield values

    def _fill(self, run: Run, at: int, target: Tensor) -> None:
        if run.source == PADDING:
            target.zero_()
        else:
            start = run.start + at - run.at
            name, stop = self._parameter.rule.hf_names[run.source], start + len(target)
            is_cast = self._casts[run.source]
            values = self._tensors.read(name, start, stop, out=None if is_cast else target)
            if at >= self._shared:
                self._hashes[run.source].add(start, values)
            if is_cast:
                cast(values, target, name)
        self._hash.update(bytes_of(target))
        if at + len(target) == self._shared:
            self._hashes[0] = RowHash(self._shared, self._hash.copy())

    def records(self) -> tuple[TensorRecord, list[TensorRecord]]:
        """Return what was written and what it was made of, after the last row."""
        parameter, rule = self._parameter, self._parameter.rule
        hf = [
            TensorRecord(name, dims, dtype, self._hf_digest(name, dims, dtype, row_hash))
            for name, dims, dtype, row_hash in zip(
                rule.hf_names, rule.hf_shapes, parameter.source_dtypes, self._hashes, strict=True
            )
        ]
        digest = self._hash.hexdigest()
        return TensorRecord(parameter_name(parameter), parameter.shape, parameter.dtype, digest), hf

    def _hf_digest(self, name: str, shape: tuple[int, ...], dtype: str, row_hash: RowHash) -> str:
        own = torch_dtype(dtype)

        def read(start: int, stop: int) -> Tensor:
            return self._tensors.read(name, start, stop, out=self._scratch.shaped((stop - start, *shape[1:]), own))

        return row_hash.digest(list(windows(shape, own, self._most_bytes)), read)


def cast(values: Tensor, target: Tensor, name: str) -> Tensor:
    """Fill a tensor of another dtype with values, and return it.

    Raises:
        ModelError: a finite value is infinite there. One look at the largest and the smallest value finds it.
    """
    target.copy_(values)
    limit = torch.finfo(target.dtype).max
    if limit >= torch.finfo(values.dtype).max:
        return target
    least, most = map(float, values.aminmax())  # as Python's numbers: bf16 would round the limit up
    if not (-limit <= least and most <= limit) and bool((target.isinf() & values.isfinite()).any()):
        largest = float(values[values.isfinite()].abs().max())
        raise ModelError(
            f"{name} holds {largest:.4g}, and the largest number of {str(target.dtype).removeprefix('torch.')} is "
            f"{limit:.4g}: the cast would make it infinite. Choose another --dtype; bf16 and fp32 reach 3.4e38"
        )
    return target


def _write_daro(plan: Plan, job: Job, folder: Path, stop: StopFlag | None) -> FileRecord:
    parameters = [item for item in job.items if isinstance(item, Parameter)]
    stored = [
        (p, start, stop_)
        for p in parameters
        for start, stop_ in windows(p.shape, torch_dtype(p.dtype), plan.piece_bytes)
    ]
    shards = [_shard(job.file, number, p, start, end) for number, (p, start, end) in enumerate(stored)]
    dtypes = {str(number): torch_dtype(p.dtype) for number, (p, _, _) in enumerate(stored)}
    record = FileRecord(job.file, 0, shards=list(shards))
    path = folder / job.file
    scratch = Scratch(plan.piece_bytes)
    with (
        plan.open_source() as tensors,
        FileWriter(path, [(s.name, dtypes[s.name], s.shape) for s in shards]) as out,
    ):
        for parameter in parameters:
            reader = _ParameterReader(parameter, tensors, scratch, plan.piece_bytes)
            for values in reader.pieces(stop):
                out.write(values)
            _note(record, reader)
    for shard, (parameter, _, _) in zip(shards, stored, strict=True):
        other = other_name(parameter.box)
        if other is not None:
            record.shards.append(replace(shard, key=other.key))
    return _finished(record, path)


def _write_torch_dist(plan: Plan, job: Job, folder: Path, stop: StopFlag | None) -> FileRecord:
    record, path, scratch = FileRecord(job.file, 0), folder / job.file, Scratch(plan.piece_bytes)
    with plan.open_source() as tensors, closing(DirectFile(path)) as out:
        for parameter in (item for item in job.items if isinstance(item, Parameter)):
            reader, row = _ParameterReader(parameter, tensors, scratch, plan.piece_bytes), 0
            for values in reader.pieces(stop):
                shard = _shard(job.file, 0, parameter, row, row + len(values))
                row += len(values)
                at, length = torch_dist.write_blob(out, values.view(shard.shape))
                other = other_name(parameter.box)
                for key in [shard.key, *([other.key] if other else [])]:
                    place = (shard.offset, shard.shape, shard.global_shape, parameter.dtype)
                    record.blobs.append(torch_dist.WrittenBlob(key, job.file, at, length, *place))
            _note(record, reader)
        out.finish()
    return _finished(record, path)


def _write_hf(plan: Plan, job: Job, folder: Path, stop: StopFlag | None) -> FileRecord:
    record, path = FileRecord(job.file, 0), folder / job.file
    header = [(t.name, torch_dtype(t.dtype), t.shape) for t in job.in_file]
    with ExitStack() as stack:
        weights = stack.enter_context(MegatronWeights(plan.source, read_model_shape(plan.config)))
        out = stack.enter_context(FileWriter(path, header, metadata={"format": "pt"}, part=job.part))
        writer = _HFWriter(weights, out, record, plan.piece_bytes)
        rules = {name: rule for rule in weights.rules for name in rule.hf_names}
        items = [item for item in job.items if isinstance(item, HFTensor)]
        for _, group in itertools.groupby(items, lambda item: rules[item.name].megatron_name):
            tensors = list(group)
            writer.write(rules[tensors[0].name], tensors, stop)
    return _finished(record, path)


class _HFWriter:
    """Writes the HF tensors of one Megatron parameter after the other, and notes both sides."""

    def __init__(self, weights: MegatronWeights, out: FileWriter, record: FileRecord, most_bytes: int) -> None:
        self._weights, self._out, self._record, self._most_bytes = weights, out, record, most_bytes
        self._scratch = Scratch(most_bytes)

    def write(self, rule: TensorRule, items: Sequence[HFTensor], stop: StopFlag | None) -> None:
        """Write tensors of a rule, and note the parameter with the first of them. In order, they hash the parameter
        on the way; what is not among them, and groups of query, key and value rows, are read for it."""
        row_hash = RowHash()
        padded = self._weights.parameter_shape(rule)[0] if rule.kind == "vocab" else None
        runs = hf_runs(rule, padded_vocab=padded)
        for item in items:
            own = runs[rule.hf_names.index(item.name)]
            self._write_tensor(item, row_hash, own[0].at if len(own) == 1 else -item.shape[0] - 1, stop)
        if items[0].name == rule.hf_names[0]:
            self._record.megatron.append(self._parameter_record(rule, row_hash))

    def _write_tensor(self, item: HFTensor, row_hash: RowHash, at: int, stop: StopFlag | None) -> None:
        digest, own = hashlib.sha256(), self._weights.dtype(item.name)
        for start, end in windows(item.shape, own, self._most_bytes):
            _check(stop)
            target = self._scratch.shaped((end - start, *item.shape[1:]), own)
            source = self._weights.read(item.name, start, end, out=target)
            dtype = torch_dtype(item.dtype)
            values = source if dtype == own else cast(source, torch.empty_like(source, dtype=dtype), item.name)
            digest.update(bytes_of(values))
            row_hash.add(at + start, source)
            self._out.write(values)
        self._record.hf.append(TensorRecord(item.name, item.shape, item.dtype, digest.hexdigest()))

    def _parameter_record(self, rule: TensorRule, row_hash: RowHash) -> TensorRecord:
        weights, box, shape = self._weights, self._weights.box(rule), self._weights.parameter_shape(rule)
        dtype = weights.dtype(rule.hf_names[0])

        def read(start: int, stop: int) -> Tensor:
            target = self._scratch.shaped((stop - start, *shape[1:]), dtype)
            return weights.read_parameter(rule, start, stop, out=target)

        digest = row_hash.digest(list(windows(shape, dtype, self._most_bytes)), read)
        return TensorRecord(box_name(box.key, box.index), shape, str(dtype).removeprefix("torch."), digest)


def _shard(file: str, number: int, parameter: Parameter, start: int, stop: int) -> StoredShard:
    box, rest = parameter.box, parameter.shape[1:]
    return StoredShard(
        box.key,
        file,
        str(number),
        (*box.index, start, *[0] * len(rest)),
        (*[1] * len(box.index), stop - start, *rest),
        (*box.sizes, *parameter.shape),
    )


def _note(record: FileRecord, reader: _ParameterReader) -> None:
    megatron, hf = reader.records()
    record.megatron.append(megatron)
    record.hf.extend(hf)


def _finished(record: FileRecord, path: Path) -> FileRecord:
    return FileRecord(record.file, path.stat().st_size, record.megatron, record.hf, record.shards, record.blobs)


def _check(stop: StopFlag | None) -> None:
    if stop is not None and stop.is_set():
        raise StoppedError


CARD_FILE = "conversion.json"
_FORMAT = "megatron-daro conversion 1"


@dataclass(frozen=True, slots=True)
class Row:
    """One Megatron parameter and the HF tensors that it is made of.

    change: "same bytes", "rows rearranged", "padded", "cast"; check: how it was checked.
    """

    megatron: TensorRecord
    hf: tuple[TensorRecord, ...]
    change: str
    check: str


@dataclass(frozen=True, slots=True)
class Card:
    """A conversion that was carried out. ignored: what the source had and the target has not."""

    source: str
    format: str
    num_bytes: int
    rows: tuple[Row, ...]
    ignored: tuple[str, ...]

    def as_json(self) -> dict[str, object]:
        """Return it as plain values for JSON."""
        return {"kind": _FORMAT, **asdict(self)}

    def summary(self) -> list[tuple[str, int, str, str, str, str]]:
        """Return a line for each kind of parameter: (key, how many, shape, dtype, change, check)."""
        counts: dict[tuple[str, str, str, str, str], int] = {}
        for row in self.rows:
            shape = " x ".join(map(str, row.megatron.shape))
            line = (row.megatron.name.split("[")[0], shape, row.megatron.dtype, row.change, row.check)
            counts[line] = counts.get(line, 0) + 1
        return [(key, count, *rest) for (key, *rest), count in counts.items()]  # type: ignore[misc]


def make_card(plan: Plan, records: Iterable[FileRecord], *, verified: Sequence[str]) -> Card:
    """Return the card of a plan whose files are written.

    Args:
        plan: that was carried out. records: of all its files. verified: files that were read again and compared.

    Raises:
        CheckpointError: the source's tensors have other hashes than the card of the conversion that wrote it.
    """
    records = list(records)
    known = {tensor.name: (tensor, record.file) for record in records for tensor in (*record.hf, *record.megatron)}
    _compare_with_source(plan, {name: tensor for name, (tensor, _) in known.items()})
    rules = hf_to_megatron(read_model_shape(plan.config), fused_norms=True)
    rows = []
    for rule, box in zip(rules, global_boxes(rules), strict=True):
        names = [box_name(piece.key, piece.index) for piece in possible_boxes(box)]
        name = next(name for name in names if name in known)
        megatron, hf = known[name][0], tuple(known[hf_name][0] for hf_name in rule.hf_names)
        files = {known[n][1] for n in (name, *rule.hf_names)}
        check = "hashed; read back and compared" if files <= set(verified) else "hashed"
        rows.append(Row(megatron, hf, _change(megatron, hf), check))
    return Card(str(plan.source), plan.format, plan.num_bytes, tuple(rows), plan.ignored)


def read_hashes(folder: Path) -> dict[str, TensorRecord]:
    """Return the HF tensors that a converted checkpoint's card describes, by name; none where there is no card.

    Raises:
        CheckpointError: the card cannot be read.
    """
    path = folder / CARD_FILE
    if not path.is_file():
        return {}
    try:
        card = json.loads(path.read_text())
        rows = [tensor for row in card["rows"] for tensor in row["hf"]] if card["kind"] == _FORMAT else []
        return {r["name"]: TensorRecord(r["name"], tuple(r["shape"]), r["dtype"], r["sha256"]) for r in rows}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; remove it to convert without its hashes") from None


def _compare_with_source(plan: Plan, written: dict[str, TensorRecord]) -> None:
    folders = (plan.source, plan.source.parent) if plan.source_format == "megatron" else (plan.source,)
    known = next((hashes for hashes in map(read_hashes, folders) if hashes), {})
    for name, record in known.items():
        own = written.get(name)
        if own is not None and (own.dtype, own.shape) == (record.dtype, record.shape) and own.sha256 != record.sha256:
            raise CheckpointError(
                f"{name} in {plan.source} is not what {CARD_FILE} says was written there: a byte was changed or "
                "damaged. Copy the checkpoint again; remove that file if the change was meant"
            )


def _change(megatron: TensorRecord, hf: tuple[TensorRecord, ...]) -> str:
    if any(tensor.dtype != megatron.dtype for tensor in hf):
        return "cast"
    if megatron.sha256 == hf[0].sha256:
        return "same bytes"
    return "rows rearranged" if len(hf) > 1 else "padded"
