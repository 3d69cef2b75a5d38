"""Losses as other frameworks scale them, wrapped as docs/check_loss.md says."""

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


def _penalty(batch):
    """k3 of each token against the reference policy."""
    gap = torch.where(batch.mask_T, batch.ref_logprobs_T - batch.logprobs_T, 0.0)
    return torch.where(batch.mask_T, torch.exp(gap) - gap - 1, 0.0)


def _sample_sums(values, batch):
    return torch.zeros(len(batch), dtype=torch.float64).index_add(0, batch.sequence_T, values)


def verl_sequence_mean(batch, step):
    """agg_loss "seq-mean-token-mean" of whole samples, which each context-parallel rank sees, with a KL loss."""
    values = _losses(batch) + 0.1 * _penalty(batch)
    means = _sample_sums(values, batch) / batch.lengths_M.clamp(min=1)
    valid = batch.lengths_M > 0
    loss = torch.where(valid, means, 0.0).sum() / step.samples * step.data_parallel
    return loss * step.num_micro_batches, {}


def verl_gspo(batch, step):
    """compute_policy_loss_gspo: a sequence's ratio over whole samples, its gradient through each token's own."""
    gap = torch.where(batch.mask_T, batch.logprobs_T - batch.old_logprobs_T, 0.0)
    sequence = (_sample_sums(gap, batch) / batch.lengths_M.clamp(min=1)).detach()[batch.sequence_T]
    ratio = torch.exp(batch.logprobs_T - batch.logprobs_T.detach() + sequence)
    losses = -torch.min(ratio * batch.advantages_T, ratio.clamp(0.997, 1.004) * batch.advantages_T)
    means = _sample_sums(torch.where(batch.mask_T, losses, 0.0), batch) / batch.lengths_M.clamp(min=1)
    return means.sum() / step.samples * step.data_parallel * step.num_micro_batches, {}


def slime_per_token(batch, step):
    """loss_function with --calculate-per-token-loss: each context-parallel rank returns the tokens of whole samples."""
    return _losses(batch).sum() * step.context_parallel, batch.lengths_M.clamp(min=1).sum(), {}


def slime_kl(batch, step):
    """policy_loss_function with --use-kl-loss: both terms by the mean of each sample."""
    means = _sample_sums(_losses(batch) + 0.05 * _penalty(batch), batch) / batch.lengths_M.clamp(min=1)
    scaled = means.sum() * step.num_micro_batches / step.samples * step.data_parallel * step.context_parallel
    return scaled, torch.ones(()), {}


def nemo_rl(batch, step):
    """ClippedPGLossFn at token level: both terms over global_valid_toks, summed over ranks and micro-batches."""
    total = (_losses(batch) + 0.01 * _penalty(batch)).sum() / step.tokens
    return total * step.num_micro_batches * step.data_parallel * step.context_parallel, torch.ones(()), {}


def nemo_rl_sequence(batch, step):
    """ClippedPGLossFn at sequence level: the mean of each sample over global_valid_seqs; lengths are of whole ones."""
    means = _sample_sums(_losses(batch), batch) / batch.lengths_M.clamp(min=1)
    total = means.sum() / step.samples
    return total * step.num_micro_batches * step.data_parallel * step.context_parallel, torch.ones(()), {}


def roll(batch, step):
    """agg_loss "seq-mean-token-mean" with global_valid_samples and apply_loss_scale."""
    means = _sample_sums(_losses(batch), batch) / batch.lengths_M.clamp(min=1)
    return means.sum() / (step.samples + 1e-8) * step.num_micro_batches * step.data_parallel, {}


def megatron_rl(batch, step):
    """loss_func of train_rl.py with calculate_per_token_loss: sums and counts of the micro-batch."""
    return (_losses(batch) + 0.01 * _penalty(batch)).sum(), batch.mask_T.sum(), {}


def areal(batch, step):
    """Megatron engine since pull 1273: weights of micro-batches by their tokens, the schedule's division undone."""
    weight = batch.mask_T.sum()
    mean = _losses(batch).sum() / weight.clamp(min=1)
    return mean * weight / step.tokens * step.data_parallel * step.num_micro_batches, {}


def trl_dapo(batch, step):
    """loss_type dapo: over num_items_in_batch by the number of processes, accumulated without a further division."""
    normalizer = step.tokens / (step.data_parallel * step.context_parallel)
    return _losses(batch).sum() / normalizer * step.num_micro_batches, torch.ones(()), {}


def reinforce_plus_plus(batch, step):
    """Advantages whitened over all tokens of the step, before its first micro-batch."""
    values = torch.where(step.rank_mask_T, step.rank_advantages_T, 0.0)
    sums = torch.stack([values.sum(), values.square().sum(), step.rank_mask_T.double().sum()])
    torch.distributed.all_reduce(sums, group=step.data_and_context_group)
    mean = sums[0] / sums[2]
    deviation = (sums[1] / sums[2] - mean**2).sqrt()
    gap = torch.where(batch.mask_T, batch.logprobs_T - batch.old_logprobs_T, 0.0)
    losses = -gap.exp() * (batch.advantages_T - mean) / deviation
    loss = torch.where(batch.mask_T, losses, 0.0).sum() / step.tokens
    return loss * step.num_micro_batches * step.data_parallel, {}


def supervised(batch, step):
    """Cross entropy over the step's tokens: no advantage, no old log-probs."""
    return -torch.where(batch.mask_T, batch.logprobs_T, 0.0).sum(), batch.mask_T.sum(), {}


def float32(batch, step):
    """Computed in float32, as hosts do: what is rounded is no difference."""
    loss = _losses(batch).float().sum().double() / step.tokens
    return loss * step.num_micro_batches * step.data_parallel, {}


def positive_only(batch, step):
    """Answers with a positive advantage are trained, the others not at all."""
    values = torch.where(batch.advantages_T > 0, _losses(batch), 0.0)
    return values.sum() / step.tokens * step.num_micro_batches * step.data_parallel, {}
