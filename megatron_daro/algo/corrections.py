"""Off-policy corrections, for rollouts that were sampled by another engine or with older weights.

Rollout, old and current log-probs -> a weight per token (tis, mis), and the ratio of a sequence (for the trust region
gspo), for the objective. Each weight comes with a mask of the tokens that it changed.
Here a sequence is a whole sample, with all of its contexts.
A token with weight 0 still counts in the denominators, which are fixed before the forward pass.

Shape letters: T tokens of this micro-batch, at least those that are trained; M its samples.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatron_daro.algo.surrogate import importance_ratio

Correction = Literal["none", "tis", "mis"]
CorrectionLevel = Literal["token", "sequence"]
SampleReduce = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class CorrectionWeights:
    """weight_T: detached factor of the token loss. changed_T: bool, where the ratio was truncated (tis) or masked
    (mis)."""

    weight_T: Tensor
    changed_T: Tensor


def truncated_importance_weights(ratio_T: Tensor, cap: float) -> CorrectionWeights:
    """Return the weights of TIS: min(ratio, cap).

    Args:
        ratio_T: [T], pi_old / pi_rollout of a token or of its sequence.
        cap: C > 0.

    Source: Yao et al., "Your efficient RL framework secretly brings you off-policy RL training" (2025).
    """
    ratio_T = ratio_T.detach()
    return CorrectionWeights(ratio_T.clamp(max=cap), ratio_T > cap)


def masked_importance_weights(ratio_T: Tensor, low: float, high: float) -> CorrectionWeights:
    """Return the weights of MIS: the ratio where it lies in [low, high], else 0.

    Args:
        ratio_T: [T], pi_old / pi_rollout of a token or of its sequence.
        low, high: bounds, both included; 0 <= low <= 1 <= high.

    Source: IcePop, arXiv 2510.18855 (token level); at sequence level the sequence's ratio takes the token's place.
    """
    ratio_T = ratio_T.detach()
    inside = (ratio_T >= low) & (ratio_T <= high)
    return CorrectionWeights(torch.where(inside, ratio_T, 0), ~inside)


def rollout_ratio(
    old_logprobs_T: Tensor,
    rollout_logprobs_T: Tensor,
    mask_T: Tensor,
    sample_T: Tensor,
    num_samples: int,
    *,
    level: CorrectionLevel = "token",
    sample_reduce: SampleReduce | None = None,
) -> Tensor:
    """Return pi_old / pi_rollout: per token, or per sequence as the geometric mean over its trained tokens.

    It is the geometric mean, as in GSPO, because a bound on the plain product would mean something else for every
    length.

    Args:
        old_logprobs_T, rollout_logprobs_T: [T], finite where the mask is set.
        mask_T: bool [T], trained tokens.
        sample_T: int64 [T], sample of the token, 0..M-1.
        num_samples: M.
        level: "token" or "sequence".
        sample_reduce: see `sample_means`.

    Returns:
        [T], detached.
    """
    log_ratio_T = (old_logprobs_T - rollout_logprobs_T).detach()
    if level == "sequence":
        log_ratio_T = sample_means(log_ratio_T, mask_T, sample_T, num_samples, sample_reduce)
    return importance_ratio(log_ratio_T, torch.zeros_like(log_ratio_T))


def sequence_log_ratio(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    mask_T: Tensor,
    sample_T: Tensor,
    num_samples: int,
    sample_reduce: SampleReduce | None = None,
) -> Tensor:
    """Return GSPO's log ratio: the sequence's mean of (logprobs - old), repeated on each of its tokens.

    Its gradient goes through each token's own log-prob: value sg[mean] + logprob - sg[logprob]. For a token loss f(s_i)
    summed over the |o_i| tokens of sequence i, the direct form gives d/dlogprob_u = |o_i| f' s_i / |o_i|, and this form
    f' s_i, which is the same. So no gradient has to cross context-parallel ranks, and `sample_reduce` may be a plain,
    non-differentiable all-reduce.

    Args:
        logprobs_T: [T], with gradient; old_logprobs_T: [T]; mask_T: bool [T]; sample_T: int64 [T]; num_samples: M.
        sample_reduce: see `sample_means`.

    Returns:
        [T], a log ratio with gradient.

    Source: GSPO arXiv 2507.18071, the sequence ratio in the form the paper calls GSPO-token.
    """
    mean_T = sample_means((logprobs_T - old_logprobs_T).detach(), mask_T, sample_T, num_samples, sample_reduce)
    return mean_T + (logprobs_T - logprobs_T.detach())


def sample_totals(
    values_T: Tensor,
    mask_T: Tensor,
    sample_T: Tensor,
    num_samples: int,
    sample_reduce: SampleReduce | None = None,
) -> Tensor:
    """Return the sum over each sample's tokens whose mask is set, repeated on each of these tokens; detached.

    Args: see `sample_means`, but `sample_reduce` is called once.
    """
    sums_M = sample_sums(values_T.detach(), mask_T, sample_T, num_samples)
    sums_M = sums_M if sample_reduce is None else sample_reduce(sums_M)
    if num_samples == 0:
        return torch.zeros_like(values_T)
    return torch.where(mask_T, sums_M[torch.where(mask_T, sample_T, 0)], 0.0).to(values_T.dtype)


def sample_means(
    values_T: Tensor,
    mask_T: Tensor,
    sample_T: Tensor,
    num_samples: int,
    sample_reduce: SampleReduce | None = None,
) -> Tensor:
    """Return the mean over each sample's tokens whose mask is set, repeated on each of these tokens; detached.

    Args:
        values_T: [T]; mask_T: bool [T]; sample_T: int64 [T] in 0..M-1 where the mask is set; num_samples: M.
        sample_reduce: sums a float64 [M] tensor over the ranks that hold parts of the same samples (context
            parallelism); called twice, in the same order on every rank. None: this process holds whole samples.

    Returns:
        [T], dtype of the values; sample 0's mean where the mask is not set.
    """
    sums_M = sample_sums(values_T.detach(), mask_T, sample_T, num_samples)
    counts_M = sample_sums(torch.ones_like(values_T), mask_T, sample_T, num_samples)
    if sample_reduce is not None:
        sums_M, counts_M = sample_reduce(sums_M), sample_reduce(counts_M)
    if num_samples == 0:
        return torch.zeros_like(values_T)
    means_M = (sums_M / counts_M.clamp(min=1)).to(values_T.dtype)
    return means_M[torch.where(mask_T, sample_T, 0)]


def sample_sums(values_T: Tensor, mask_T: Tensor, sample_T: Tensor, num_samples: int) -> Tensor:
    """Return the sum over each sample's tokens whose mask is set, float64 [M]; gradient flows only to these tokens.

    Args:
        values_T: [T]; mask_T: bool [T]; sample_T: int64 [T], any value where the mask is not set; num_samples: M.
    """
    if num_samples == 0:
        return values_T[:0].to(torch.float64)  # in the graph: pipeline stages wait for every micro-batch's gradient
    sums_M = torch.zeros(num_samples, dtype=torch.float64, device=values_T.device)
    kept_T = torch.where(mask_T, values_T, 0).to(torch.float64)
    return sums_M.index_add(0, torch.where(mask_T, sample_T, 0), kept_T)
