"""One file of a conversion, written by a worker process.

`write_file` reads the rows that a job of the plan needs and writes them. It holds one piece of a tensor at a time
(`Plan.piece_bytes`), whatever the size of the model.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from megatron_daro.convert import torch_dist
from megatron_daro.convert.checkpoint_keys import other_name
from megatron_daro.convert.daro_format import StoredShard
from megatron_daro.convert.mapping import TensorRule
from megatron_daro.convert.megatron_weights import MegatronWeights
from megatron_daro.convert.plan import HFTensor, Job, MegatronParameter, Plan, torch_dtype, torch_name
from megatron_daro.convert.runs import PADDING, RowReader, Run, shard_runs
from megatron_daro.convert.safetensors_file import DirectFile, FileWriter
from megatron_daro.workshop.convert.records import FileRecord, TensorRecord
from megatron_daro.workshop.convert.rows import Scratch, cast, windows
from megatron_daro.workshop.convert.stopping import StopFlag, raise_if_stopped


def write_file(plan: Plan, job: Job, folder: Path, stop: StopFlag | None = None) -> FileRecord:
    """Write one file of a plan into a folder; it is on the disk when this returns.

    Raises:
        ModelError, CheckpointError: the source is torn. OSError: the disk refused. StoppedError: the flag was raised.
    """
    writer = {"hf": _write_hf, "daro": _write_daro, "torch_dist": _write_torch_dist}[plan.format]
    return writer(plan, job, folder, stop)


def _rows_of(
    parameter: MegatronParameter, tensors: RowReader, scratch: Scratch, most_bytes: int, stop: StopFlag | None
) -> Iterator[Tensor]:
    """Yield a Megatron parameter's rows, read from HF tensors, in its dtype; each piece is valid until the next."""
    rule, dtype = parameter.rule, torch_dtype(parameter.dtype)
    runs = shard_runs(rule, 0, 1, padded_vocab=parameter.shape[0] if rule.kind == "vocab" else None)
    for first, last in windows(parameter.shape, dtype, most_bytes):
        raise_if_stopped(stop)
        values = scratch.shaped((last - first, *parameter.shape[1:]), dtype)
        for run in runs:
            start, end = max(run.at, first), min(run.at + run.rows, last)
            if start < end:
                _fill(values[start - first : end - first], run, start, parameter, tensors)
        yield values


def _fill(target: Tensor, run: Run, at: int, parameter: MegatronParameter, tensors: RowReader) -> None:
    """Read rows of a run, from row `at` of the parameter on."""
    if run.source == PADDING:
        target.zero_()
        return
    start = run.start + at - run.at
    name, is_cast = parameter.rule.hf_names[run.source], parameter.source_dtypes[run.source] != parameter.dtype
    values = tensors.read(name, start, start + len(target), out=None if is_cast else target)
    if is_cast:
        cast(values, target, name)


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
        plan.tensors as tensors,
        FileWriter(path, [(s.name, dtypes[s.name], s.shape) for s in shards]) as out,
    ):
        for parameter in parameters:
            for values in _rows_of(parameter, tensors, scratch, plan.piece_bytes, stop):
                out.write(values)
            _note(record, parameter)
    for shard, (parameter, _, _) in zip(shards, stored, strict=True):
        other = other_name(parameter.box)
        if other is not None:
            record.shards.append(replace(shard, key=other.key))
    return _finished(record, path)


def _write_torch_dist(plan: Plan, job: Job, folder: Path, stop: StopFlag | None) -> FileRecord:
    record, path, scratch = FileRecord(job.file, 0), folder / job.file, Scratch(plan.piece_bytes)
    with plan.tensors as tensors, closing(DirectFile(path)) as out:
        for parameter in (item for item in job.items if isinstance(item, MegatronParameter)):
            row = 0
            for values in _rows_of(parameter, tensors, scratch, plan.piece_bytes, stop):
                shard = _shard(job.file, 0, parameter, row, row + len(values))
                row += len(values)
                at, length = torch_dist.write_blob(out, values.view(shard.shape))
                other = other_name(parameter.box)
                for key in [shard.key, *([other.key] if other else [])]:
                    place = (shard.offset, shard.shape, shard.global_shape, parameter.dtype)
                    record.blobs.append(torch_dist.WrittenBlob(key, job.file, at, length, *place))
            _note(record, parameter)
        out.finish()
    return _finished(record, path)


def _write_hf(plan: Plan, job: Job, folder: Path, stop: StopFlag | None) -> FileRecord:
    record, path = FileRecord(job.file, 0), folder / job.file
    header = [(t.name, torch_dtype(t.dtype), t.shape) for t in job.in_file]
    with ExitStack() as stack:
        weights = stack.enter_context(plan.tensors)
        assert isinstance(weights, MegatronWeights), "a plan to Hugging Face files has a Megatron source"
        out = stack.enter_context(FileWriter(path, header, metadata={"format": "pt"}, part=job.part))
        writer = _HFWriter(weights, out, record, plan.piece_bytes)
        items = [item for item in job.items if isinstance(item, HFTensor)]
        for rule, group in itertools.groupby(items, lambda item: weights.rule((item.members or (item.name,))[0])):
            tensors = list(group)
            if tensors[0].members:
                writer.write_stack(tensors[0], stop)
            else:
                writer.write(rule, tensors, stop)
    return _finished(record, path)


class _HFWriter:
    """Writes the HF tensors of one Megatron parameter after the other, and notes both sides."""

    def __init__(self, weights: MegatronWeights, out: FileWriter, record: FileRecord, most_bytes: int) -> None:
        self._weights, self._out, self._record, self._most_bytes = weights, out, record, most_bytes
        self._scratch = Scratch(most_bytes)

    def write(self, rule: TensorRule, items: Sequence[HFTensor], stop: StopFlag | None) -> None:
        """Write tensors of a rule, and note the parameter with the first of them."""
        for item in items:
            self._write_tensor(item, stop)
        if items[0].name == rule.hf_names[0]:
            self._note(rule, torch_name(self._weights.dtype(rule.hf_names[0])))

    def write_stack(self, item: HFTensor, stop: StopFlag | None) -> None:
        """Write the tensor that stacks those of all experts of a layer, and note each expert's parameter."""
        parts = len(item.members) // item.shape[0]
        for first in range(0, len(item.members), parts):
            raise_if_stopped(stop)
            names = item.members[first : first + parts]
            rule, dtype = self._weights.rule(names[0]), torch_dtype(item.dtype)
            whole = torch.empty(item.shape[1:], dtype=dtype)
            for part, name in enumerate(names):
                source = self._weights[name]
                values = source if dtype == source.dtype else cast(source, torch.empty_like(source, dtype=dtype), name)
                whole[..., part::parts] = values.t() if values.dim() > 1 else values
                self._record.hf.append(TensorRecord(name, tuple(values.shape), item.dtype))
            self._out.write(whole)
            self._note(rule, item.source_dtype)

    def _write_tensor(self, item: HFTensor, stop: StopFlag | None) -> None:
        own, dtype = self._weights.dtype(item.name), torch_dtype(item.dtype)
        for start, end in windows(item.shape, own, self._most_bytes):
            raise_if_stopped(stop)
            target = self._scratch.shaped((end - start, *item.shape[1:]), own)
            source = self._weights.read(item.name, start, end, out=target)
            self._out.write(source if dtype == own else cast(source, torch.empty_like(source, dtype=dtype), item.name))
        self._record.hf.append(TensorRecord(item.name, item.shape, item.dtype))

    def _note(self, rule: TensorRule, dtype: str) -> None:
        name, shape = self._weights.box(rule).name, self._weights.parameter_shape(rule)
        self._record.megatron.append(TensorRecord(name, shape, dtype))


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


def _note(record: FileRecord, parameter: MegatronParameter) -> None:
    rule = parameter.rule
    record.megatron.append(TensorRecord(parameter.box.name, parameter.shape, parameter.dtype))
    record.hf.extend(map(TensorRecord, rule.hf_names, rule.hf_shapes, parameter.source_dtypes))


def _finished(record: FileRecord, path: Path) -> FileRecord:
    return replace(record, num_bytes=path.stat().st_size)
