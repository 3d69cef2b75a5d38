"""Losses that are exact, in the form the oracle takes: this package's algorithms, PPO, GSPO and CISPO.

`megatron-daro check-loss megatron_daro.workshop.check_loss.shipped:daro`. They are worked examples of how to wrap a
loss, and losses for which the oracle must not raise a false alarm.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_daro.algo.corrections import sample_sums, sequence_log_ratio
from megatron_daro.algo.surrogate import clipped_ratio_loss, clipped_token_loss, importance_ratio
from megatron_daro.algo.weighting import ALGORITHMS, SampleAlgorithm, StepTotals, make_algorithm
from megatron_daro.workshop.check_loss.records import LossBatch, LossFunction, StepInfo


def megatron_return(share: Tensor, batch: LossBatch, step: StepInfo) -> tuple[Any, ...]:
    """Return this micro-batch's share of the step's loss in the form that Megatron's schedules want.

    With calculate_per_token_loss, Megatron sums gradients over DP x CP and divides them by the returned tokens, so the
    share is multiplied by the tokens of the step. Without it, Megatron multiplies the loss of a 2-tuple by CP, divides
    it by the number of micro-batches, and averages gradients over DP x CP.

    Args:
        share: 0-dim; the sum over micro-batches and ranks is the loss.
    """
    if step.calculate_per_token_loss:
        return step.tokens * share, batch.mask_T.sum(), {}
    return share * step.num_micro_batches * step.data_parallel, {}


def _sample_sums(losses_T: Tensor, batch: LossBatch) -> Tensor:
    return sample_sums(losses_T, batch.mask_T, batch.sequence_T, len(batch))


def _algorithm(name: str) -> LossFunction:
    def loss(batch: LossBatch, step: StepInfo) -> tuple[Any, ...]:
        algorithm = make_algorithm(name, rollouts_per_prompt=step.rollouts_per_prompt, max_response_tokens=16)
        totals = StepTotals(step.tokens_per_bin[:, None], step.rollouts_per_bin)
        coefficients_M = algorithm.bin_coefficients(batch.bins_M, batch.lengths_M, totals)
        losses_T = clipped_token_loss(batch.logprobs_T, batch.old_logprobs_T, batch.advantages_T, mask=batch.mask_T)
        return megatron_return((coefficients_M * _sample_sums(losses_T, batch)).sum(), batch, step)

    loss.__name__ = name
    return loss


# The other algorithms weight by a state, or by the lengths of whole groups, which a LossBatch does not hold.
_LOSSES: dict[str, Callable[..., Any]] = {
    name: _algorithm(name) for name, cls in ALGORITHMS.items() if not issubclass(cls, SampleAlgorithm)
}
grpo, grpo_sequence, dapo = _LOSSES["grpo"], _LOSSES["grpo_sequence"], _LOSSES["dapo"]
lite_ppo, dr_grpo, rloo, daro = _LOSSES["lite_ppo"], _LOSSES["dr_grpo"], _LOSSES["rloo"], _LOSSES["daro"]
maxrl, f_grpo, mgpo, dgpo = _LOSSES["maxrl"], _LOSSES["f_grpo"], _LOSSES["mgpo"], _LOSSES["dgpo"]


def ppo(batch: LossBatch, step: StepInfo) -> tuple[Any, ...]:
    """Return PPO's clipped surrogate, mean over the step's tokens."""
    old_T = torch.where(batch.mask_T, batch.old_logprobs_T, batch.logprobs_T.detach())
    ratio_T = importance_ratio(batch.logprobs_T, old_T)
    losses_T = clipped_ratio_loss(ratio_T, batch.advantages_T, 0.2, 0.2)
    return megatron_return(_sample_sums(losses_T, batch).sum() / max(step.tokens, 1), batch, step)


def gspo(batch: LossBatch, step: StepInfo) -> tuple[Any, ...]:
    """Return GSPO's loss: one ratio per sequence, over all context-parallel ranks; mean over sequences."""

    def over_context(sums_M: Tensor) -> Tensor:
        total_M = sums_M.detach().clone()
        dist.all_reduce(total_M, group=step.context_group)
        return total_M

    old_T = torch.where(batch.mask_T, batch.old_logprobs_T, batch.logprobs_T.detach())
    where = (batch.mask_T, batch.sequence_T, len(batch))
    log_ratio_T = sequence_log_ratio(batch.logprobs_T, old_T, *where, over_context)
    losses_T = clipped_ratio_loss(log_ratio_T.exp(), batch.advantages_T, 0.2, 0.28)
    means_M = _sample_sums(losses_T, batch) / batch.lengths_M.clamp(min=1)
    return megatron_return(means_M.sum() / step.samples, batch, step)


def cispo(batch: LossBatch, step: StepInfo) -> tuple[Any, ...]:
    """Return CISPO's loss: the clipped ratio is a constant weight of the log-prob; mean over the step's tokens."""
    old_T = torch.where(batch.mask_T, batch.old_logprobs_T, batch.logprobs_T.detach())
    weight_T = importance_ratio(batch.logprobs_T, old_T).detach().clamp(max=1.28)
    losses_T = -weight_T * batch.advantages_T * batch.logprobs_T
    return megatron_return(_sample_sums(losses_T, batch).sum() / max(step.tokens, 1), batch, step)
