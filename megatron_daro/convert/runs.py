"""Which rows and columns of which HF tensors make up what one tensor-parallel rank holds, and the inverse.

`read_shard` reads them, and no byte that another rank's shard holds. The layouts themselves are known to
convert/mapping.py alone.
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
    """HF tensors by name, of which any rows and columns can be read: an HFCheckpoint, or MegatronWeights."""

    def __contains__(self, name: object) -> bool:
        """Whether there is such a tensor."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Return its shape."""

    def dtype(self, name: str) -> torch.dtype:
        """Return its dtype."""

    def read(
        self, name: str, start: int, stop: int, columns: tuple[int, int] | None = None, *, out: Tensor | None = None
    ) -> Tensor:
        """Return rows [start, stop), of these columns (None: all); with `out`, fill and return that tensor."""


@dataclass(frozen=True, slots=True)
class Run:
    """Rows [start, stop) of HF tensor number `source` of a rule; `source` PADDING: rows of zeros.

    `at` is the first row of the Megatron parameter that they are; `columns` the columns that are taken, None: all.
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
    """Return what `mapping.shard` gives, but read no byte that another rank's shard holds.

    With `out`, that tensor is filled and returned: without another copy where it is contiguous, on the CPU and of the
    dtype of the files.

    Raises:
        ModelError: a tensor is missing, has the wrong shape or another dtype than its neighbours; or it is torn.
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
    """Return the dtype of each of a rule's HF tensors. Raises ModelError: one is missing, or has the wrong shape."""
    for name, dims in zip(rule.hf_names, rule.hf_shapes, strict=True):
        if name not in tensors:
            raise ModelError(f"{name}, which {rule.megatron_name} is made of, is missing from the checkpoint.")
        if tensors.shape(name) != dims:
            raise ModelError(f"{name} has shape {tensors.shape(name)}; config.json of the model asks for {dims}.")
        dtype = tensors.dtype(name)
        if not dtype.is_floating_point or dtype.itemsize < 2:  # a cast would leave out the scales
            raise ModelError(f"{name} is {dtype}; allowed: fp32, bf16, fp16. {QUANTIZED}")
    return tuple(tensors.dtype(name) for name in rule.hf_names)


def common_dtype(rule: TensorRule, tensors: RowReader) -> torch.dtype:
    """Return the one dtype of a rule's HF tensors. Raises ModelError: as `source_dtypes`, or they have several."""
    dtypes = source_dtypes(rule, tensors)
    if len(set(dtypes)) > 1:
        own = ", ".join(f"{n} {str(d).removeprefix('torch.')}" for n, d in zip(rule.hf_names, dtypes, strict=True))
        raise ModelError(
            f"{rule.megatron_name} is made of tensors of different dtypes: {own}. Make them one with "
            "`megatron-daro convert --dtype`"
        )
    return dtypes[0]


def hf_runs(rule: TensorRule, *, padded_vocab: int | None = None) -> list[list[Run]]:
    """Return for each HF tensor of a rule the runs of the whole parameter that make it up, in the HF tensor's order."""
    runs_of_source: list[list[Run]] = [[] for _ in rule.hf_names]
    for run in shard_runs(rule, 0, 1, padded_vocab=padded_vocab):
        if run.source != PADDING:
            runs_of_source[run.source].append(run)
    return [sorted(runs, key=lambda run: run.start) for runs in runs_of_source]
