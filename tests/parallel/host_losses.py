"""Losses as other frameworks scale them, wrapped as docs/plugins.md says."""

from __future__ import annotations

import torch


def _losses(batch):
    old = torch.where(batch.mask_T, batch.old_logprobs_T, batch.logprobs_T.detach())
    ratio = torch.exp(batch.logprobs_T - old)
    losses = -torch.min(ratio * batch.advantages_T, ratio.clamp(0.8, 1.28) * batch.advantages_T)
    return torch.where(batch.mask_T, losses, 0.0)


def verl(batch, step):
    """agg_loss "token-mean" and what the Megatron engine does with it."""
    loss = _losses(batch).sum() / step.tokens * step.data_parallel
    return loss * step.num_micro_batches, {}


def slime(batch, step):
    """sum_of_sample_mean and loss_function in the default mode."""
    sums = torch.zeros(len(batch), dtype=torch.float64).index_add(0, batch.sequence_T, _losses(batch))
    total = (sums / batch.lengths_M.clamp(min=1)).sum()
    scaled = total * step.num_micro_batches / step.samples * step.data_parallel * step.context_parallel
    return scaled, torch.ones(()), {}
