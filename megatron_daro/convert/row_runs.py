"""Which rows and columns of which HF tensors make up a Megatron parameter, as runs that can be read and written.

Place in the data flow: a rule's pieces -> `shard_runs` (what one tensor-parallel rank holds) -> reads of those bytes
only; `hf_runs` is the way back. Layouts are known to `convert.mapping` alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

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
    pieces = rule.pieces(tp_rank, tp_size, padded_vocab=padded_vocab)
    rows = rule.local_shape(tp_size, padded_vocab=padded_vocab)[0]
    if rule.dim == 1:
        return [Run(p.source, 0, rows, 0, (p.start, p.stop) if tp_size > 1 else None) for p in pieces]
    runs, at = [], 0
    for piece in pieces:
        runs.append(Run(piece.source, piece.start, piece.stop, at))
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
    dtype = check_sources(rule, tensors)
    shape = rule.local_shape(tp_size, padded_vocab=padded_vocab)
    values = torch.empty(shape, dtype=dtype) if out is None else out.view(shape)
    for run in shard_runs(rule, tp_rank, tp_size, padded_vocab=padded_vocab):
        target = values[run.at : run.at + run.rows]
        if run.source == PADDING:
            target.zero_()
        else:
            tensors.read(rule.hf_names[run.source], run.start, run.stop, run.columns, out=target)
    return values


def check_sources(rule: TensorRule, tensors: RowReader) -> torch.dtype:
    """Return the dtype of a rule's HF tensors.

    Raises:
        ModelError: one is missing, or has the wrong shape or another dtype than the others.
    """
    for name, dims in zip(rule.hf_names, rule.hf_shapes, strict=True):
        if name not in tensors:
            raise ModelError(f"{name}, which {rule.megatron_name} is made of, is missing from the checkpoint.")
        if tensors.shape(name) != dims:
            raise ModelError(f"{name} has shape {tensors.shape(name)}; config.json of the model asks for {dims}.")
    dtypes = {name: tensors.dtype(name) for name in rule.hf_names}
    if len(set(dtypes.values())) > 1:
        raise ModelError(
            f"{rule.megatron_name} is made of tensors of different dtypes: {dtypes}. Save them in one dtype."
        )
    return next(iter(dtypes.values()))


def hf_runs(rule: TensorRule, *, padded_vocab: int | None = None) -> list[list[Run]]:
    """Return for each HF tensor of a rule the runs of the whole parameter that make it up, in the HF tensor's order."""
    found: list[list[Run]] = [[] for _ in rule.hf_names]
    for run in shard_runs(rule, 0, 1, padded_vocab=padded_vocab):
        if run.source != PADDING:
            found[run.source].append(run)
    return [sorted(runs, key=lambda run: run.start) for runs in found]
