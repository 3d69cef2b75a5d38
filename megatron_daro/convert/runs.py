"""Which rows and columns of which HF tensors make up the shard of a tensor-parallel rank, and the inverse.

`read_shard` reads only these, and no bytes of other ranks' shards. Only convert/mapping.py knows the layouts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megatron_daro.config.model_files import QUANTIZED
from megatron_daro.convert.mapping import TensorRule
from megatron_daro.errors import ModelError

PADDING = -1


class RowReader(Protocol):
    """HF tensors by name, any rows and columns of which can be read: an HFCheckpoint, or MegatronWeights."""

    def __contains__(self, name: object) -> bool:
        """Return whether there is such a tensor."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Return its shape."""

    def dtype(self, name: str) -> torch.dtype:
        """Return its dtype."""

    def read(
        self, name: str, start: int, stop: int, columns: tuple[int, int] | None = None, *, out: Tensor | None = None
    ) -> Tensor:
        """Return rows [start, stop) and `columns` (None: all) of a tensor; with `out`, fill and return that tensor."""


@dataclass(frozen=True, slots=True)
class Run:
    """Rows [start, stop) of HF tensor number `source` of a rule; with `source` PADDING, rows of zeros.

    at: the first row that they take in the Megatron parameter. columns: the columns that are taken; None: all.
    """

    source: int
    start: int
    stop: int
    at: int
    columns: tuple[int, int] | None = None

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.stop - self.start


def shard_runs(rule: TensorRule, tp_rank: int, tp_size: int, *, padded_vocab: int | None = None) -> list[Run]:
    """Return the rows of a rank's shard, first to last, as runs of rows of HF tensors.

    Args:
        rule: of the parameter. tp_rank, tp_size: 0 <= tp_rank < tp_size. padded_vocab: as in `mapping.shard`.

    Raises:
        ModelError: the parameter cannot be divided by tp_size.
    """
    slices = rule.slices(tp_rank, tp_size, padded_vocab=padded_vocab)
    rows = rule.local_shape(tp_size, padded_vocab=padded_vocab)[0]
    if rule.dim == 1:
        return [Run(one.source, 0, rows, 0, (one.start, one.stop) if tp_size > 1 else None) for one in slices]
    runs, at = [], 0
    for one in slices:
        runs.append(Run(one.source, one.start, one.stop, at))
        at += runs[-1].rows
    return runs if at == rows else [*runs, Run(PADDING, 0, rows - at, at)]


def read_shard(
    rule: TensorRule,
    tensors: RowReader,
    tp_rank: int,
    tp_size: int,
    *,
    padded_vocab: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return the same as `mapping.shard`, but read only the bytes of this rank's shard.

    With `out`, that tensor is filled and returned, without another copy if it is contiguous, on the CPU and has the
    dtype of the files.

    Raises:
        ModelError: a tensor is missing or torn, has the wrong shape, or has another dtype than the rule's other
            tensors.
    """
    dtype = common_dtype(rule, tensors)
    shape = rule.local_shape(tp_size, padded_vocab=padded_vocab)
    values = torch.empty(shape, dtype=dtype) if out is None else out.view(shape)
    for run in shard_runs(rule, tp_rank, tp_size, padded_vocab=padded_vocab):
        target = values[run.at : run.at + run.rows]
        if run.source == PADDING:
            target.zero_()
        else:
            tensors.read(rule.hf_names[run.source], run.start, run.stop, run.columns, out=target)
    return values


def source_dtypes(rule: TensorRule, tensors: RowReader) -> tuple[torch.dtype, ...]:
    """Return the dtype of each of a rule's HF tensors. Raises ModelError: one is missing or quantized, or has the wrong
    shape."""
    for name, dims in zip(rule.hf_names, rule.hf_shapes, strict=True):
        if name not in tensors:
            raise ModelError(f"{name}, which {rule.megatron_name} is made of, is missing from the checkpoint.")
        if tensors.shape(name) != dims:
            raise ModelError(f"{name} has shape {tensors.shape(name)}; config.json of the model asks for {dims}.")
        dtype = tensors.dtype(name)
        if not dtype.is_floating_point or dtype.itemsize < 2:  # a cast would ignore the scales
            raise ModelError(f"{name} is {dtype}; allowed: fp32, bf16, fp16. {QUANTIZED}")
    return tuple(tensors.dtype(name) for name in rule.hf_names)


def common_dtype(rule: TensorRule, tensors: RowReader) -> torch.dtype:
    """Return the common dtype of a rule's HF tensors. Raises ModelError: as `source_dtypes`, or the dtypes differ."""
    dtypes = source_dtypes(rule, tensors)
    if len(set(dtypes)) > 1:
        own = ", ".join(f"{n} {str(d).removeprefix('torch.')}" for n, d in zip(rule.hf_names, dtypes, strict=True))
        raise ModelError(
            f"{rule.megatron_name} is made of tensors of different dtypes: {own}. Make them one with "
            "`megatron-daro convert --dtype`"
        )
    return dtypes[0]


def hf_runs(rule: TensorRule, *, padded_vocab: int | None = None) -> list[list[Run]]:
    """Return, for each HF tensor of a rule, the runs of the whole parameter that make it up, in the tensor's order."""
    runs_of_source: list[list[Run]] = [[] for _ in rule.hf_names]
    for run in shard_runs(rule, 0, 1, padded_vocab=padded_vocab):
        if run.source != PADDING:
            runs_of_source[run.source].append(run)
    return [sorted(runs, key=lambda run: run.start) for runs in runs_of_source]
