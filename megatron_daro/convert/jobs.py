"""One file of a conversion: read the rows it needs, write them, and take the hashes of both sides on the way.

Place in the data flow: a worker process calls `write_file` with a job of the plan; what it returns goes into the card
and the index. Holds one piece of a tensor at a time (`Plan.piece_bytes`), whatever the size of the model.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from megatron_daro.config.model_shape import read_model_shape
from megatron_daro.convert import torch_dist
from megatron_daro.convert.daro_format import StoredShard
from megatron_daro.convert.hf_reader import HFCheckpoint
from megatron_daro.convert.mapping import TensorRule
from megatron_daro.convert.megatron_names import other_name
from megatron_daro.convert.megatron_weights import MegatronWeights
from megatron_daro.convert.plan import HFTensor, Job, Parameter, Plan, torch_dtype
from megatron_daro.convert.row_runs import PADDING, RowReader, Run, shard_runs
from megatron_daro.convert.safetensors_file import FileWriter, bytes_of


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


class RowHash:
    """SHA-256 of a tensor whose rows come in order; where they do not, the tensor is read again for it."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._next = 0

    def add(self, start: int, values: Tensor) -> None:
        """Take rows [start, start + len(values))."""
        if start == self._next:
            self._hash.update(bytes_of(values))
            self._next += len(values)
        else:
            self._next = -1

    def digest(self, name: str, tensors: RowReader, most_bytes: int) -> str:
        """Return the hash of the whole tensor, hexadecimal."""
        shape = tensors.shape(name)
        if self._next == shape[0]:
            return self._hash.hexdigest()
        again = hashlib.sha256()
        for start, stop in windows(shape, tensors.dtype(name), most_bytes):
            again.update(bytes_of(tensors.read(name, start, stop)))
        return again.hexdigest()


def write_file(plan: Plan, job: Job, folder: Path, stop: StopFlag | None = None) -> FileRecord:
    """Write one file of a plan into a folder; it is on the disk when this returns.

    Raises:
        ModelError, CheckpointError: the source is torn. OSError: the disk refused. StoppedError: the flag was raised.
    """
    writer = {"hf": _write_hf, "daro": _write_daro, "torch_dist": _write_torch_dist}[plan.format]
    return writer(plan, job, folder, stop)


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

    def __init__(self, parameter: Parameter, tensors: HFCheckpoint, most_bytes: int) -> None:
        self._parameter, self._tensors, self._most_bytes = parameter, tensors, most_bytes
        rule = parameter.rule
        self._runs = shard_runs(rule, 0, 1, padded_vocab=parameter.shape[0] if rule.kind == "vocab" else None)
        self._hashes = [RowHash() for _ in rule.hf_names]
        is_same = parameter.source_dtype == parameter.dtype and len(self._runs) == 1
        self._hash = None if is_same else hashlib.sha256()

    def rows(self, start: int, stop: int) -> Tensor:
        """Return rows [start, stop) in the target's dtype; to be called in order."""
        shape = (stop - start, *self._parameter.shape[1:])
        values = torch.empty(shape, dtype=torch_dtype(self._parameter.dtype))
        for run in self._runs:
            first, last = max(run.at, start), min(run.at + run.rows, stop)
            if first < last:
                self._fill(run, first, values[first - start : last - start])
        if self._hash:
            self._hash.update(bytes_of(values))
        return values

    def _fill(self, run: Run, at: int, target: Tensor) -> None:
        if run.source == PADDING:
            target.zero_()
            return
        start = run.start + at - run.at
        values = self._tensors.read(self._parameter.rule.hf_names[run.source], start, start + len(target))
        self._hashes[run.source].add(start, values)
        target.copy_(values)

    def records(self) -> tuple[TensorRecord, list[TensorRecord]]:
        """Return what was written and what it was made of, after the last row."""
        rule, parameter = self._parameter.rule, self._parameter
        hf = [
            TensorRecord(name, dims, parameter.source_dtype, row_hash.digest(name, self._tensors, self._most_bytes))
            for name, dims, row_hash in zip(rule.hf_names, rule.hf_shapes, self._hashes, strict=True)
        ]
        digest = self._hash.hexdigest() if self._hash else hf[0].sha256
        return TensorRecord(parameter_name(parameter), parameter.shape, parameter.dtype, digest), hf


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
    with (
        HFCheckpoint(plan.source) as tensors,
        FileWriter(path, [(s.name, dtypes[s.name], s.shape) for s in shards]) as out,
    ):
        for parameter in parameters:
            reader = _ParameterReader(parameter, tensors, plan.piece_bytes)
            for start, end in windows(parameter.shape, torch_dtype(parameter.dtype), plan.piece_bytes):
                _check(stop)
                out.write(reader.rows(start, end))
            _note(record, reader)
    for shard, (parameter, _, _) in zip(shards, stored, strict=True):
        other = other_name(parameter.box)
        if other is not None:
            record.shards.append(replace(shard, key=other.key))
    return _finished(record, path)


def _write_torch_dist(plan: Plan, job: Job, folder: Path, stop: StopFlag | None) -> FileRecord:
    record, path = FileRecord(job.file, 0), folder / job.file
    with HFCheckpoint(plan.source) as tensors, path.open("wb") as out:
        for parameter in (item for item in job.items if isinstance(item, Parameter)):
            reader = _ParameterReader(parameter, tensors, plan.piece_bytes)
            for start, end in windows(parameter.shape, torch_dtype(parameter.dtype), plan.piece_bytes):
                _check(stop)
                shard = _shard(job.file, 0, parameter, start, end)
                at, length = torch_dist.write_blob(out, reader.rows(start, end).view(shard.shape))
                other = other_name(parameter.box)
                for key in [shard.key, *([other.key] if other else [])]:
                    place = (shard.offset, shard.shape, shard.global_shape, parameter.dtype)
                    record.blobs.append(torch_dist.WrittenBlob(key, job.file, at, length, *place))
            _note(record, reader)
        out.flush()
        os.fsync(out.fileno())
    return _finished(record, path)


def _write_hf(plan: Plan, job: Job, folder: Path, stop: StopFlag | None) -> FileRecord:
    items = [item for item in job.items if isinstance(item, HFTensor)]
    header = [(item.name, torch_dtype(item.dtype), item.shape) for item in items]
    record, path = FileRecord(job.file, 0), folder / job.file
    with ExitStack() as stack:
        weights = stack.enter_context(MegatronWeights(plan.source, read_model_shape(plan.config)))
        out = stack.enter_context(FileWriter(path, header, metadata={"format": "pt"}))
        firsts = {rule.hf_names[0]: rule for rule in weights.rules}
        for item in items:
            digest, dtype = hashlib.sha256(), torch_dtype(item.dtype)
            for start, end in windows(item.shape, weights.dtype(item.name), plan.piece_bytes):
                _check(stop)
                values = weights.read(item.name, start, end).to(dtype)
                digest.update(bytes_of(values))
                out.write(values)
            record.hf.append(TensorRecord(item.name, item.shape, item.dtype, digest.hexdigest()))
            if item.name in firsts:
                is_same = item.dtype == item.source_dtype and weights.parameter_shape(firsts[item.name]) == item.shape
                known = digest.hexdigest() if is_same and len(firsts[item.name].hf_names) == 1 else None
                record.megatron.append(_parameter_record(weights, firsts[item.name], known, plan.piece_bytes))
    return _finished(record, path)


def _parameter_record(weights: MegatronWeights, rule: TensorRule, known: str | None, most_bytes: int) -> TensorRecord:
    """Return a parameter of the source; read once more for its hash, unless its bytes are those of the HF tensor."""
    box, shape = weights.box(rule), weights.parameter_shape(rule)
    dtype = weights.dtype(rule.hf_names[0])
    if known is None:
        digest = hashlib.sha256()
        for start, stop in windows(shape, dtype, most_bytes):
            digest.update(bytes_of(weights.read_parameter(rule, start, stop)))
        known = digest.hexdigest()
    return TensorRecord(box_name(box.key, box.index), shape, str(dtype).removeprefix("torch."), known)


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
