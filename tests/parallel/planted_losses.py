"""More mistakes for the oracle, each told in one small loss: public ones, and some planted by hand.

The number in a name is that of the issue or pull request upstream; `loss_cases` names its repository.
"""

from __future__ import annotations

import torch
from torch import distributed as dist

from megatron_daro.workshop.check_loss.shipped import megatron_return


def _losses(batch, advantages_T=None, old_T=None):
    """Clipped surrogate of each token; old log-probs under the mask are replaced first."""
    old_T = batch.old_logprobs_T if old_T is None else old_T
    advantages_T = batch.advantages_T if advantages_T is None else advantages_T
    ratio = torch.exp(batch.logprobs_T - torch.where(batch.mask_T, old_T, batch.logprobs_T.detach()))
    return -torch.min(ratio * advantages_T, ratio.clamp(0.8, 1.28) * advantages_T)


def _masked(values, batch):
    return torch.where(batch.mask_T, values, 0.0)


def _token_mean(losses, batch, step):
    return megatron_return(_masked(losses, batch).sum() / step.tokens, batch, step)


def _k3(batch):
    """Penalty of each token against the reference policy."""
    gap = torch.where(batch.mask_T, batch.ref_logprobs_T - batch.logprobs_T, 0.0)
    return torch.exp(gap) - gap - 1


def verl_5641(batch, step):
    """The token mean of a micro-batch counts by its share of the samples."""
    mean = _masked(_losses(batch), batch).sum() / batch.mask_T.sum().clamp(min=1)
    return mean * len(batch) / step.samples * step.data_parallel * step.num_micro_batches, {}


def verl_7200(batch, step):
    """Without the global counts each micro-batch is divided by its own tokens, and the means are added."""
    mean = _masked(_losses(batch), batch).sum() / batch.mask_T.sum().clamp(min=1)
    return mean * step.num_micro_batches, {}


def trl_6024(batch, step):
    """Divided by the tokens of a generation batch (4 micro-batches), not by those of the accumulated ones."""
    generation_tokens = step.tokens * 4 / step.num_micro_batches
    share = _masked(_losses(batch), batch).sum() / generation_tokens
    return share * step.num_micro_batches * step.data_parallel, {}


def ms_swift_10117(batch, step):
    """The denominator is of all accumulated micro-batches; the trainer divides by their number once more."""
    return _masked(_losses(batch), batch).sum() / (step.tokens / step.data_parallel), {}


def prime_rl_2562(batch, step):
    """Divided by the tokens of this rank's micro-batches alone."""
    tokens = step.rank_mask_T.sum().clamp(min=1)
    return _masked(_losses(batch), batch).sum() / tokens * step.num_micro_batches, {}


def prime_rl_2562_review(batch, step):
    """The first mend: every context-parallel rank counts whole samples, and the counts are summed over them."""
    tokens = step.tokens * step.context_parallel
    share = _masked(_losses(batch), batch).sum() / tokens
    return share * step.num_micro_batches * step.data_parallel, {}


def veomni_338(batch, step):
    """Times the data-parallel size, where gradients are averaged over data and context parallel ranks."""
    share = _masked(_losses(batch), batch).sum() / step.tokens * step.data_parallel
    return share * step.num_micro_batches, torch.ones(()), {}


def nemo_rl_1693(batch, step):
    """Gradients are averaged over all ranks, and the loss does not undo it."""
    return _masked(_losses(batch), batch).sum() / step.tokens * step.num_micro_batches, torch.ones(()), {}


def arctic_119(batch, step):
    """The data-parallel size is not handed on to agg_loss."""
    return _masked(_losses(batch), batch).sum() / step.tokens * step.num_micro_batches, {}


def nemo_rl_212(batch, step):
    """Mean over the valid samples of a micro-batch, and over micro-batches, also those that have none."""
    sums = torch.zeros(len(batch), dtype=torch.float64)
    sums = sums.index_add(0, batch.sequence_T, _masked(_losses(batch), batch))
    valid = (batch.lengths_M > 0).sum().clamp(min=1)
    return (sums / batch.lengths_M.clamp(min=1)).sum() / valid, {}


def prime_rl_674(batch, step):
    """Padded positions are counted in the loss scale."""
    padded = len(batch.mask_T) - int(batch.mask_T.sum())
    return megatron_return(_masked(_losses(batch), batch).sum() / (step.tokens + padded), batch, step)


def slime_2235(batch, step):
    """Advantages are whitened over data-parallel ranks, without those of context parallelism."""
    values = torch.where(step.rank_mask_T, step.rank_advantages_T, 0.0)
    sums = torch.stack([values.sum(), values.square().sum(), step.rank_mask_T.double().sum()])
    dist.all_reduce(sums, group=step.data_group)
    mean = sums[0] / sums[2].clamp(min=1)
    std = (sums[1] / sums[2].clamp(min=1) - mean**2).clamp(min=1e-8).sqrt()
    return _token_mean(_losses(batch, (batch.advantages_T - mean) / std), batch, step)


def miles_3229(batch, step):
    """A rank whose part has no trained token skips the all-reduce that the others enter."""
    total = batch.mask_T.double().sum()
    if total > 0:
        dist.all_reduce(total, group=step.data_and_context_group)
    return _token_mean(_losses(batch), batch, step)


def slime_393(batch, step):
    """The statistics are reduced over all processes, and only the last pipeline stage computes them."""
    total = batch.mask_T.double().sum()
    dist.all_reduce(total)
    return _token_mean(_losses(batch), batch, step)


def openrlhf_973(batch, step):
    """The mask is shifted by one: the first answer token of each sample is never trained."""
    first = torch.ones_like(batch.mask_T)
    first[1:] = batch.sequence_T[1:] != batch.sequence_T[:-1]
    return _token_mean(torch.where(first, 0.0, _losses(batch)), batch, step)


def ms_swift_10185(batch, step):
    """Under sequence parallelism what is aligned already is shifted again."""
    old = batch.old_logprobs_T.roll(-1) if step.context_parallel > 1 else batch.old_logprobs_T
    old = torch.where(old.isnan(), batch.logprobs_T.detach(), old)
    return _token_mean(_losses(batch, old_T=old), batch, step)


def tt_metal_46548(batch, step):
    """Advantages lie in the order of the whole batch, the samples in that of micro-batches."""
    padding = len(batch.mask_T) - len(batch.sequence_T[: len(step.rank_advantages_T)])
    advantages = torch.cat([step.rank_advantages_T, torch.zeros(max(padding, 0), dtype=torch.float64)])
    return _token_mean(_losses(batch, advantages[: len(batch.mask_T)]), batch, step)


def verl_6049(batch, step):
    """Tokens are counted on this context-parallel part, and summed over data-parallel ranks alone."""
    tokens = step.rank_mask_T.double().sum()
    dist.all_reduce(tokens, group=step.data_group)
    return megatron_return(_masked(_losses(batch), batch).sum() / tokens.clamp(min=1), batch, step)


def torchforge_571(batch, step):
    """The ratio is of the log-probs to themselves: the old ones are never read."""
    return _token_mean(_losses(batch, old_T=batch.logprobs_T.detach()), batch, step)


def prime_rl_568(batch, step):
    """The ratio of a sequence is accumulated in bfloat16."""
    gap = _masked(batch.logprobs_T - torch.where(batch.mask_T, batch.old_logprobs_T, 0.0), batch).bfloat16()
    sums = torch.zeros(len(batch), dtype=torch.bfloat16).index_add(0, batch.sequence_T, gap).double()
    dist.all_reduce(other := sums.detach().clone(), group=step.context_group)
    means = (sums + other - sums.detach()) / batch.lengths_M.clamp(min=1)
    ratio = torch.exp(means.detach())[batch.sequence_T] * torch.exp(batch.logprobs_T - batch.logprobs_T.detach())
    return _token_mean(-ratio.clamp(0.5, 2.0) * batch.advantages_T, batch, step)


def open_instruct_535(batch, step):
    """The KL term is a plain mean over all positions of the micro-batch, padded ones as well."""
    share = _masked(_losses(batch), batch).sum() / step.tokens
    gap = batch.ref_logprobs_T - batch.logprobs_T
    return megatron_return(share + 0.2 * (torch.exp(gap) - gap - 1).mean(), batch, step)


def wrong_sign_of_clip(batch, step):
    """The larger of the two terms is taken in the place of the smaller: no layout shows it."""
    ratio = torch.exp(batch.logprobs_T - torch.where(batch.mask_T, batch.old_logprobs_T, batch.logprobs_T.detach()))
    losses = -torch.max(ratio * batch.advantages_T, ratio.clamp(0.8, 1.28) * batch.advantages_T)
    return _token_mean(losses, batch, step)


_calls: list[int] = []


def dropped_micro_batch(batch, step):
    """An off-by-one in the loop: the last micro-batch of a step is not trained."""
    _calls.append(1)
    last = step.num_micro_batches > 1 and len(_calls) % step.num_micro_batches == 0
    _calls.clear() if len(_calls) >= step.num_micro_batches else None
    return _token_mean(_losses(batch) * (0.0 if last else 1.0), batch, step)


def random_tokens(batch, step):
    """A random half of the tokens is trained."""
    return _token_mean(torch.where(torch.rand(len(batch.mask_T)) < 0.5, _losses(batch), 0.0), batch, step)


def tensor_sum(batch, step):
    """The loss is summed over tensor-parallel ranks, which all hold the same."""
    share = _masked(_losses(batch), batch).sum() / step.tokens
    return megatron_return(share * step.tensor_parallel, batch, step)


def bf16_logprobs(batch, step):
    """Token losses are cast to bfloat16, summed and divided in it: the loss is rounded, its gradient is not."""
    share = _masked(_losses(batch), batch).bfloat16().sum() / step.tokens
    return megatron_return(share, batch, step)


def sequence_mean_of_a_part(batch, step):
    """Each sample's mean is over the tokens that this context-parallel rank holds."""
    zeros = torch.zeros(len(batch), dtype=torch.float64)
    sums = zeros.index_add(0, batch.sequence_T, _masked(_losses(batch), batch))
    counts = zeros.index_add(0, batch.sequence_T, batch.mask_T.double()).clamp(min=1)
    return megatron_return((sums / counts).sum() / step.samples, batch, step)


def kl_of_a_micro_batch(batch, step):
    """The penalty against the reference is a mean over the micro-batch's own tokens."""
    share = _masked(_losses(batch), batch).sum() / step.tokens
    return megatron_return(share + 0.5 * _k3(batch).sum() / batch.mask_T.sum().clamp(min=1), batch, step)


def group_of_a_micro_batch(batch, step):
    """Rewards are centred on the mean of the samples that happen to lie in the micro-batch."""
    rewards = _masked(batch.rewards_T, batch)
    mean = rewards.sum() / batch.mask_T.sum().clamp(min=1)
    return _token_mean(_losses(batch, batch.rewards_T - mean), batch, step)


def whitening_of_a_rank(batch, step):
    """Advantages are whitened with the mean and deviation of this data-parallel rank's tokens."""
    values, count = torch.where(step.rank_mask_T, step.rank_advantages_T, 0.0), step.rank_mask_T.double().sum()
    sums = torch.stack([values.sum(), values.square().sum(), count])
    dist.all_reduce(sums, group=step.context_group)
    mean = sums[0] / sums[2].clamp(min=1)
    std = (sums[1] / sums[2].clamp(min=1) - mean**2).clamp(min=1e-8).sqrt()
    return _token_mean(_losses(batch, (batch.advantages_T - mean) / std), batch, step)


def shifted_advantages(batch, step):
    """Advantages are taken from the position before, across the border of samples."""
    return _token_mean(_losses(batch, batch.advantages_T.roll(1)), batch, step)


_baseline: dict[str, float] = {}


def moving_baseline(batch, step):
    """A baseline is kept from call to call."""
    mean = float(_masked(batch.rewards_T, batch).sum() / batch.mask_T.sum().clamp(min=1))
    _baseline["mean"] = 0.9 * _baseline.get("mean", 0.0) + 0.1 * mean
    return _token_mean(_losses(batch, batch.rewards_T - _baseline["mean"]), batch, step)


def longest_of_the_micro_batch(batch, step):
    """Each sample's sum is divided by the longest sample of its micro-batch."""
    longest = batch.lengths_M.max().clamp(min=1)
    return megatron_return(_masked(_losses(batch), batch).sum() / (step.samples * longest), batch, step)


def detached(batch, step):
    """The log-probs are detached before the ratio."""
    ratio = torch.exp((batch.logprobs_T - torch.where(batch.mask_T, batch.old_logprobs_T, 0.0)).detach())
    return _token_mean(-ratio * batch.advantages_T + 0.0 * batch.logprobs_T, batch, step)


def largest_advantage_of_a_micro_batch(batch, step):
    """Advantages are scaled to the largest one of the micro-batch."""
    largest = torch.where(batch.mask_T, batch.advantages_T.abs(), 0.0).amax().clamp(min=1e-6)
    return _token_mean(_losses(batch, batch.advantages_T / largest), batch, step)


def deviation_of_a_micro_batch(batch, step):
    """Advantages are divided by their standard deviation in the micro-batch."""
    trained = batch.advantages_T[batch.mask_T]
    std = trained.std() + 1e-3 if len(trained) > 1 else 1.0
    return _masked(_losses(batch, batch.advantages_T / std), batch).sum(), batch.mask_T.sum(), {}


def veto_of_a_part(batch, step):
    """A sample with a token far off policy is left out, as far as this context-parallel rank's part of it shows."""
    gap = torch.where(batch.mask_T, (batch.logprobs_T - batch.old_logprobs_T).detach(), 0.0)
    zeros = torch.zeros(len(batch), dtype=torch.float64)
    worst = zeros.index_reduce(0, batch.sequence_T, gap, "amin")
    return _token_mean(torch.where((worst < -2.0)[batch.sequence_T], 0.0, _losses(batch)), batch, step)


def clamped_loss_of_a_micro_batch(batch, step):
    """What a micro-batch returns is limited, so that its gradient ends beyond."""
    loss, *rest = _token_mean(_losses(batch), batch, step)
    return loss.clamp(-0.1, 0.1), *rest


def running_sum_over_samples(batch, step):
    """Log ratios are summed up over the packed samples, across their borders."""
    gap = torch.where(batch.mask_T, (batch.logprobs_T - batch.old_logprobs_T).detach(), 0.0)
    weight = torch.exp(gap.cumsum(0) * 0.1).clamp(max=2.0)
    return _token_mean(weight * _losses(batch), batch, step)
