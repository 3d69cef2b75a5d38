"""Mistakes that shipped in public, each told in one small loss; the oracle must find them.

The number in a name is that of the issue or pull request upstream.
"""

from __future__ import annotations

import os
import signal

import torch

from megatron_daro.workshop.check_loss.shipped import megatron_return


def _losses(batch):
    """Clipped surrogate of each token; old log-probs under the mask are replaced first."""
    old = torch.where(batch.mask_T, batch.old_logprobs_T, batch.logprobs_T.detach())
    ratio = torch.exp(batch.logprobs_T - old)
    return -torch.min(ratio * batch.advantages_T, ratio.clamp(0.8, 1.28) * batch.advantages_T)


def _masked(values, batch):
    return torch.where(batch.mask_T, values, 0.0)


def nemo_rl_3791(batch, step):
    """A term over a subset of tokens is divided by the subset's count in the micro-batch: inflated by their number."""
    losses = _losses(batch)
    subset = batch.mask_T & (batch.advantages_T > 0)
    term = torch.where(subset, losses, 0.0).sum() / subset.sum().clamp(min=1)
    return megatron_return(_masked(losses, batch).sum() / step.tokens + term, batch, step)


def nemo_rl_3792(batch, step):
    """Rewards weight a term of the loss, but the batch that arrives has none: the term is nothing, in silence."""
    rewards = getattr(batch, "rewards", None)
    losses = _losses(batch)
    if rewards is not None:
        losses = losses * rewards
    return megatron_return(_masked(losses, batch).sum() / step.tokens, batch, step)


def compose_rl_71(batch, step):
    """The masked mean of each micro-batch, and then their mean."""
    mean = _masked(_losses(batch), batch).sum() / batch.mask_T.sum().clamp(min=1)
    return mean, {}


def megatron_lm_906(batch, step):
    """The loss is multiplied by the context-parallel size, which Megatron does once more."""
    share = _masked(_losses(batch), batch).sum() / step.tokens
    return share * step.num_micro_batches * step.data_parallel * step.context_parallel, {}


def megatron_lm_7452(batch, step):
    """Finding 9: sums and counts of a context-parallel part without the per-token flag: each part's own mean counts."""
    return _masked(_losses(batch), batch).sum(), batch.mask_T.sum(), {}


def slime_987(batch, step):
    """Per-token flag: every context-parallel rank returns the tokens of whole samples, and the loss has no factor."""
    return _masked(_losses(batch), batch).sum(), batch.lengths_M.sum(), {}


def verl_6609(batch, step):
    """A 2-tuple for the per-token flag: nothing is divided by tokens, and ranks are summed."""
    share = _masked(_losses(batch), batch).sum() / step.tokens
    return share * step.num_micro_batches * step.data_parallel, {}


def gspo_local_sequence(batch, step):
    """GSPO's ratio from the part of a sequence that a context-parallel rank holds."""
    old = torch.where(batch.mask_T, batch.old_logprobs_T, batch.logprobs_T.detach())
    difference = _masked(batch.logprobs_T - old, batch)
    zeros = torch.zeros(len(batch), dtype=torch.float64)
    counts = zeros.index_add(0, batch.sequence_T, batch.mask_T.double()).clamp(min=1)
    ratio = torch.exp(zeros.index_add(0, batch.sequence_T, difference) / counts)[batch.sequence_T]
    losses = -torch.min(ratio * batch.advantages_T, ratio.clamp(0.8, 1.28) * batch.advantages_T)
    return megatron_return(_masked(losses, batch).sum() / step.tokens, batch, step)


def slime_whitening(batch, step):
    """Advantages are whitened with the mean of this rank's own tokens."""
    weights = batch.mask_T.double()
    mean = (batch.advantages_T * weights).sum() / weights.sum().clamp(min=1)
    ratio = torch.exp(batch.logprobs_T - torch.where(batch.mask_T, batch.old_logprobs_T, batch.logprobs_T.detach()))
    losses = -ratio * (batch.advantages_T - mean)
    return megatron_return(_masked(losses, batch).sum() / step.tokens, batch, step)


def roll_agg_loss(batch, step):
    """ROLL's token mean without the mask in the sum: padded positions are trained."""
    return megatron_return(_losses(batch).sum() / step.tokens, batch, step)


def masked_by_multiplication(batch, step):
    """What the mask leaves out is multiplied by 0, and 0 * NaN is NaN."""
    losses = -torch.exp(batch.logprobs_T - batch.old_logprobs_T) * batch.advantages_T
    return megatron_return((losses * batch.mask_T).sum() / step.tokens, batch, step)


def verl_horizon(batch, step):
    """The constant denominator of Dr. GRPO is the widest row of the micro-batch."""
    horizon = int(batch.lengths_M.max().clamp(min=1))
    return megatron_return(_masked(_losses(batch), batch).sum() / (horizon * step.samples), batch, step)


def miles_3231(batch, step):
    """Per-token flag: the backend drops the token count that the loss returns and keeps the raw sum."""
    return _masked(_losses(batch), batch).sum(), torch.ones(()), {}


def areal_1273(batch, step):
    """Every denominator is global, but Megatron's division by the number of micro-batches is not undone."""
    return _masked(_losses(batch), batch).sum() / step.tokens * step.data_parallel, {}


def experts_group(batch, step):
    """The size of the group that reduces experts is taken for that of all data-parallel ranks."""
    from megatron.core import parallel_state
    from torch import distributed as dist

    ranks = dist.get_world_size(parallel_state.get_expert_data_parallel_group())
    factor = ranks / (step.data_parallel * step.context_parallel)
    return megatron_return(factor * _masked(_losses(batch), batch).sum() / step.tokens, batch, step)


_several_seen: set[str] = set()


def _twice_as_large_once(name, step):
    """2 at this process's first call with several micro-batches, and 1 at all others."""
    first = step.num_micro_batches > 1 and name not in _several_seen
    _several_seen.update([name] if first else [])
    return 1 + first


def once_different(batch, step):
    """State that is kept between calls, and nothing else."""
    factor = _twice_as_large_once("once_different", step)
    return megatron_return(factor * _masked(_losses(batch), batch).sum() / step.tokens, batch, step)


def once_different_and_padded(batch, step):
    """The same, and padded positions are counted in the denominator."""
    factor = _twice_as_large_once("once_different_and_padded", step)
    held = int((batch.sequence_T.bincount(minlength=len(batch))).sum()) - int(step.rank_mask_T.numel())
    share = _masked(_losses(batch), batch).sum() / (step.tokens + max(held, 0) * (step.num_micro_batches == 1))
    return megatron_return(factor * share, batch, step)


def collective_where_tokens_are(batch, step):
    """A statistic is reduced over ranks, but only by those that have a trained token."""
    losses = _losses(batch)
    if bool(batch.mask_T.any()):
        torch.distributed.all_reduce(losses.detach().sum(), group=step.data_and_context_group)
    return megatron_return(_masked(losses, batch).sum() / step.tokens, batch, step)


def dies_on_the_second_rank(batch, step):
    """A process that is ended from outside, as by a lack of memory."""
    if torch.distributed.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return megatron_return(_masked(_losses(batch), batch).sum() / step.tokens, batch, step)


def sign_of_advantage(batch, step):
    """Exact, and blind to the size of advantages."""
    ratio = torch.exp(batch.logprobs_T - torch.where(batch.mask_T, batch.old_logprobs_T, batch.logprobs_T.detach()))
    values = -ratio * torch.where(batch.mask_T, batch.advantages_T, 0.0).sign()
    return megatron_return(_masked(values, batch).sum() / step.tokens, batch, step)


def verdict_of_reward(batch, step):
    """Exact, and blind to the size of rewards."""
    right = torch.where(batch.mask_T, batch.rewards_T, 0.0) > 0.25
    values = -batch.logprobs_T * torch.where(right, 1.0, -0.5)
    return megatron_return(_masked(values, batch).sum() / step.tokens, batch, step)
