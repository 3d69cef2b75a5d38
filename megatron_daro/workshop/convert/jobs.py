"""One file of a conversion, written by a worker process.

`write_file` reads the rows that a job of the plan needs, writes them, and hashes both sides on the way. It holds one
piece of a tensor at a time (`Plan.piece_bytes`), whatever the size of the model.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from megatron_daro.config.model_shape import read_model_shape
from megatron_daro.convert import torch_dist
from megatron_daro.convert.checkpoint_keys import other_name
from megatron_daro.convert.daro_format import StoredShard
from megatron_daro.convert.mapping import TensorRule
from megatron_daro.convert.megatron_weights import MegatronWeights
from megatron_daro.convert.plan import HFTensor, Job, MegatronParameter, Plan, torch_dtype, torch_name
from megatron_daro.convert.runs import PADDING, RowReader, Run, hf_runs, shard_runs
from megatron_daro.convert.safetensors_file import DirectFile, FileWriter, bytes_of
from megatron_daro.workshop.convert.records import FileRecord, TensorRecord
from megatron_daro.workshop.convert.rows import RowHash, Scratch, cast, windows
from megatron_daro.workshop.convert.stopping import StopFlag, raise_if_stopped


def write_file(plan: Plan, job: Job, folder: Path, stop: StopFlag | None = None) -> FileRecord:
    """Write one file of a plan into a folder; it is on the disk when this returns.

    Raises:
        ModelError, CheckpointError: the source is torn. OSError: the disk refused. StoppedError: the flag was raised.
    """
    writer = {"hf": _write_hf, "daro": _write_daro, "torch_dist": _write_torch_dist}[plan.format]
    return writer(plan, job, folder, stop)


class _ParameterReader:
    """The rows of one Megatron parameter, read from HF tensors and hashed on both sides."""

    def __init__(self, parameter: MegatronParameter, tensors: RowReader, scratch: Scratch, most_bytes: int) -> None:
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
            raise_if_stopped(stop)
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
        return TensorRecord(parameter.box.name, parameter.shape, parameter.dtype, digest), hf

    def _hf_digest(self, name: str, shape: tuple[int, ...], dtype: str, row_hash: RowHash) -> str:
        own = torch_dtype(dtype)

        def read(start: int, stop: int) -> Tensor:
            return self._tensors.read(name, start, stop, out=self._scratch.shaped((stop - start, *shape[1:]), own))

        return row_hash.digest(list(windows(shape, own, self._most_bytes)), read)


def _write_daro(plan: Plan, job: Job, folder: Path, stop: StopFlag | None) -> FileRecord:
    parameters = [item for item in job.items if isinstance(item, MegatronParameter)]
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
        for parameter in (item for item in job.items if isinstance(item, MegatronParameter)):
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
        for _, group in itertools.groupby(items, lambda item: rules[(item.members or (item.name,))[0]].megatron_name):
            tensors = list(group)
            if tensors[0].members:
                writer.write_stack(tensors[0], stop)
            else:
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

    def write_stack(self, item: HFTensor, stop: StopFlag | None) -> None:
        """Write the tensor that holds those of all experts of a layer, and note the parameters that these are of."""
        parts = len(item.members) // item.shape[0]
        for first in range(0, len(item.members), parts):
            raise_if_stopped(stop)
            names = item.members[first : first + parts]
            rule, dtype = self._weights.rule(names[0]), torch_dtype(item.dtype)
            whole, digest = torch.empty(item.shape[1:], dtype=dtype), hashlib.sha256()
            for part, name in enumerate(names):
                source = self._weights[name]
                digest.update(bytes_of(source))
                values = source if dtype == source.dtype else cast(source, torch.empty_like(source, dtype=dtype), name)
                whole[..., part::parts] = values.t() if values.dim() > 1 else values
                own = TensorRecord(name, tuple(values.shape), item.dtype, hashlib.sha256(bytes_of(values)).hexdigest())
                self._record.hf.append(own)
            self._out.write(whole)
            shape = self._weights.parameter_shape(rule)
            record = TensorRecord(self._weights.box(rule).name, shape, item.source_dtype, digest.hexdigest())
            self._record.megatron.append(record)

    def _write_tensor(self, item: HFTensor, row_hash: RowHash, at: int, stop: StopFlag | None) -> None:
        digest, own = hashlib.sha256(), self._weights.dtype(item.name)
        for start, end in windows(item.shape, own, self._most_bytes):
            raise_if_stopped(stop)
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
        return TensorRecord(box.name, shape, torch_name(dtype), digest)


def _shard(file: str, number: int, parameter: MegatronParameter, start: int, stop: int) -> StoredShard:
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
    return replace(record, num_bytes=path.stat().st_size)
