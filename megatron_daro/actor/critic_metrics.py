"""Metrics of a critic over the whole step: how well its values fit, and which advantages follow from them.

A shard with values, targets and advantages per token -> sums over the data-parallel ranks -> the metrics under
`critic/` that need no model.

Legend: N samples of the shard, R its response tokens, J those that are trained; K rollouts per prompt (bins 0..K).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from megatron_daro.actor.reductions import sum_over_data_parallel
from megatron_daro.types import StepBatch

TENTHS = 10
"""Parts that an answer's trained tokens are divided into, for values by position."""

_BY_BIN = ("value", "target", "advantage", "advantage_abs")
_BY_TENTH = ("value_wrong", "value_right")


def column_metrics(batch: StepBatch) -> dict[str, float]:
    """Return how well the values that the batch began with fit the targets of the step, and its advantages by pass
    rate, over all its trained tokens. Collective over the data-parallel group.

    Args:
        batch: this rank's shard, with `values_R`, `value_targets_R` and `token_advantages_R`.

    Returns:
        Metrics of docs/metrics.md; none for a step without a trained token, nor for a bin or a tenth without one.
    """
    values_J, targets_J, advantages_J = (
        _trained(batch, column_R) for column_R in (batch.values_R, batch.value_targets_R, batch.token_advantages_R)
    )
    bins_J, tenths_J = _cells(batch)
    num_bins = batch.rollouts_per_prompt + 1
    by_bin = _sums(bins_J, num_bins, values_J, targets_J, advantages_J, advantages_J.abs())
    by_tenth = _sums(tenths_J, len(_BY_TENTH) * TENTHS, values_J)
    together = sum_over_data_parallel(torch.cat([by_bin.flatten(), by_tenth.flatten()]))
    by_bin, by_tenth = together[: by_bin.numel()].view_as(by_bin), together[by_bin.numel() :].view_as(by_tenth)
    count, values, targets = by_bin[:, :3].sum(dim=0).tolist()
    if count == 0:
        return {}
    value_mean, target_mean = values / count, targets / count
    errors_J = (targets_J - target_mean) - (values_J - value_mean)
    squares = torch.stack([errors_J.square().sum(), (targets_J - target_mean).square().sum()])
    unexplained, spread = sum_over_data_parallel(squares).tolist()
    metrics = {"critic/value_mean": value_mean, "critic/target_mean": target_mean}
    if spread > 0:
        metrics["critic/explained_variance"] = 1 - unexplained / spread
    for k, (tokens, *sums) in enumerate(by_bin.tolist()):
        if tokens:
            metrics |= {f"critic/{name}/{k}": total / tokens for name, total in zip(_BY_BIN, sums, strict=True)}
    for cell, (tokens, total) in enumerate(by_tenth.tolist()):
        if tokens:
            metrics[f"critic/{_BY_TENTH[cell // TENTHS]}/{cell % TENTHS}"] = total / tokens
    return metrics


def _trained(batch: StepBatch, column_R: np.ndarray | None) -> Tensor:
    """float64 [J]."""
    assert column_R is not None
    return torch.from_numpy(column_R[batch.loss_mask_R.astype(bool)]).double()


def _cells(batch: StepBatch) -> tuple[Tensor, Tensor]:
    """Return two int64 [J]: the bin of each trained token's sample; and its tenth: token j (from 0) of the sample's n
    trained tokens is in tenth 10 j / n, rounded down, plus 10 for right answers."""
    counts_N = torch.from_numpy(batch.trained_tokens_N)
    sample_J = torch.arange(len(batch)).repeat_interleave(counts_N)
    number_J = torch.arange(len(sample_J)) - (counts_N.cumsum(0) - counts_N)[sample_J]
    tenth_J = number_J * TENTHS // counts_N[sample_J]
    correct_N = torch.from_numpy(batch.correct_N.astype(np.int64))
    return torch.from_numpy(batch.bins_N)[sample_J], tenth_J + TENTHS * correct_N[sample_J]


def _sums(cells_J: Tensor, num_cells: int, *columns_J: Tensor) -> Tensor:
    """Return float64 [cells, 1 + columns]: the number of tokens in each cell, then each column's sum."""
    rows_J = torch.stack([torch.ones(len(cells_J), dtype=torch.float64), *columns_J], dim=1)
    return torch.zeros(num_cells, rows_J.shape[1], dtype=torch.float64).index_add_(0, cells_J, rows_J)
