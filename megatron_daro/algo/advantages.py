"""Advantages, one number per rollout, from the rewards of its group; penalties and masks for overlong answers.

Runs once all K rollouts of every group of the step have verdicts. An advantage is later broadcast over the tokens of
its rollout. DAPO's soft length penalty and the overlong filter change rewards and masks, never verdicts: a penalized
or masked rollout still counts in its group's pass rate. Rejects non-finite rewards.

Shape letters: N samples of the whole optimizer step, G groups among them, R response tokens of all samples end to
end.
"""

from __future__ import annotations

from typing import Literal, TypeVar, get_args

import numpy as np
import torch
from torch import Tensor

from megatron_daro.errors import AlgorithmError

Vector = TypeVar("Vector", np.ndarray, Tensor)


def overlong_penalty(lengths_N: Vector, max_tokens: int = 20480, cache_tokens: int = 4096) -> Vector:
    """Return DAPO's soft penalty, which is added to the reward.

    Args:
        lengths_N: [N], generated tokens, numpy or torch.
        max_tokens: L_max; from there on the penalty is -1.
        cache_tokens: L_cache, 1..max_tokens; the penalty starts at L_max - L_cache and falls linearly.

    Returns:
        float32 [N] in [-1, 0], numpy for numpy and torch for torch.

    Raises:
        AlgorithmError: cache_tokens is not in 1..max_tokens.

    Source: DAPO arXiv 2503.14476 eq. 13.
    """
    if not 1 <= cache_tokens <= max_tokens:
        raise AlgorithmError(f"cache_tokens: got {cache_tokens}, allowed is 1..{max_tokens} (max_tokens)")
    lengths = torch.as_tensor(lengths_N).to(torch.float64)
    penalty = ((max_tokens - cache_tokens - lengths) / cache_tokens).clamp(-1.0, 0.0).to(torch.float32)
    return penalty.numpy() if isinstance(lengths_N, np.ndarray) else penalty


def length_rewards(lengths_N: Vector, correct_N: Vector, group_ids_N: Vector) -> Vector:
    """Return Kimi k1.5's length reward: lambda for a right answer and min(0, lambda) for a wrong one, with
    lambda = 0.5 - (length - shortest) / (longest - shortest) over the group; 0 where all are equally long.

    Args:
        lengths_N: [N], generated tokens, numpy or torch. correct_N: [N], 1 where the answer is right. group_ids_N: [N].

    Returns:
        float32 [N] in [-0.5, 0.5], numpy for numpy and torch for torch.

    Source: arXiv 2501.12599, section 2.3.3.
    """
    lengths = torch.as_tensor(lengths_N).to(torch.float64)
    ids_G, group_N = torch.unique(torch.as_tensor(group_ids_N), return_inverse=True)
    zeros_G = torch.zeros(len(ids_G), dtype=torch.float64)
    shortest_N = zeros_G.scatter_reduce(0, group_N, lengths, "amin", include_self=False)[group_N]
    spread_N = zeros_G.scatter_reduce(0, group_N, lengths, "amax", include_self=False)[group_N] - shortest_N
    lambda_N = 0.5 - (lengths - shortest_N) / spread_N.clamp(min=1)
    rewards_N = torch.where(torch.as_tensor(correct_N).bool(), lambda_N, lambda_N.clamp(max=0))
    rewards_N = torch.where(spread_N > 0, rewards_N, 0.0).to(torch.float32)
    return rewards_N.numpy() if isinstance(lengths_N, np.ndarray) else rewards_N


def overlong_filter(loss_mask_R: Vector, response_lengths_N: Vector, truncated_N: Vector) -> Vector:
    """Return the loss mask without the truncated rollouts. Verdicts, bins and advantages are left as they are.

    Args:
        loss_mask_R: [R], 1 where a token is trained; the samples' responses end to end.
        response_lengths_N: [N], response tokens per sample; they sum to R.
        truncated_N: [N], true (or 1) where generation hit the length limit.

    Returns:
        A new mask [R] of the same dtype, numpy for numpy and torch for torch.

    Raises:
        AlgorithmError: the lengths do not sum to R, or the vectors' lengths differ.
    """
    mask = torch.as_tensor(loss_mask_R)
    lengths = torch.as_tensor(response_lengths_N).to(mask.device, torch.int64)
    truncated = torch.as_tensor(truncated_N).to(mask.device).bool()
    if lengths.shape != truncated.shape or int(lengths.sum()) != mask.numel():
        raise AlgorithmError(
            f"loss_mask_R: got {mask.numel()} tokens for response lengths that sum to {int(lengths.sum())} "
            f"({lengths.numel()} samples, {truncated.numel()} truncation flags); all must describe the same samples"
        )
    filtered = torch.where(torch.repeat_interleave(truncated, lengths), torch.zeros_like(mask), mask)
    return filtered.numpy() if isinstance(loss_mask_R, np.ndarray) else filtered


AdvantageStd = Literal["population", "sample", "batch", "none"]


def group_advantages(
    rewards_N: Tensor, group_ids_N: Tensor, std: AdvantageStd = "population", eps: float = 1e-6
) -> Tensor:
    """Return a = (R - mean of the group) / (std + eps).

    The mean is always the group's. Groups whose rewards are all equal, including groups of one, get exactly 0.

    Args:
        rewards_N: [N], any real or integer dtype, in any order.
        group_ids_N: [N] integers, arbitrary values in any order; equal id means same group.
        std: "population" (dividing by K) or "sample" (by K - 1), over the group; "batch", population over all N rewards
            (Lite PPO; pass the whole step); "none", no division (Dr. GRPO).
        eps: added to the standard deviation.

    Returns:
        [N], dtype of the rewards if that is floating, else float32. Never NaN.

    Raises:
        AlgorithmError: shapes differ, a reward is not finite, or `std` is unknown.

    Source: GRPO arXiv 2402.03300; Lite PPO arXiv 2508.08221; Dr. GRPO arXiv 2503.20783.
    """
    if std not in get_args(AdvantageStd):
        raise AlgorithmError(f"std: got {std!r}, allowed are {', '.join(get_args(AdvantageStd))}")
    rewards_N, group_N, num_groups, dtype = _checked(rewards_N, group_ids_N)
    if rewards_N.numel() == 0:
        return rewards_N.to(dtype)
    centred_N, size_N = _centred(rewards_N, group_N, num_groups)
    if std == "none":
        return centred_N.to(dtype)
    std_N = rewards_N.std(correction=0) if std == "batch" else _group_std(centred_N, group_N, num_groups, size_N, std)
    # With eps 0 a constant group would be 0/0; its centred rewards are exactly 0, so any positive divisor does.
    return (centred_N / torch.where(std_N + eps > 0, std_N + eps, 1.0)).to(dtype)


def leave_one_out_advantages(rewards_N: Tensor, group_ids_N: Tensor) -> Tensor:
    """Return A_i = R_i - mean of the other rewards of the group (RLOO); exactly 0 for equal rewards and a group of one.

    Args:
        rewards_N: [N], any real or integer dtype.
        group_ids_N: [N] integers, arbitrary values in any order.

    Returns:
        [N], dtype of the rewards if that is floating, else float32.

    Raises:
        AlgorithmError: shapes differ or a reward is not finite.

    Source: Ahmadian et al., arXiv 2402.14740: R_i - (sum - R_i)/(K - 1) = (R_i - mean) * K/(K - 1).
    """
    rewards_N, group_N, num_groups, dtype = _checked(rewards_N, group_ids_N)
    centred_N, size_N = _centred(rewards_N, group_N, num_groups)
    return (centred_N * size_N / (size_N - 1).clamp(min=1)).to(dtype)


def over_mean_deviation(advantages_N: Tensor, rewards_N: Tensor, group_ids_N: Tensor) -> Tensor:
    """Divide advantages by the mean absolute deviation of the rewards of their group; 0 where all rewards are equal.

    Args:
        advantages_N: [N]. rewards_N: [N], finite. group_ids_N: [N] integers, arbitrary values in any order.

    Returns:
        [N], dtype of the advantages.

    Raises:
        AlgorithmError: shapes differ or a reward is not finite.

    Source: DGPO, arXiv 2601.20614 (without the 1e-4 that the authors' code adds).
    """
    rewards_N, group_N, num_groups, _ = _checked(rewards_N, group_ids_N)
    centred_N, size_N = _centred(rewards_N, group_N, num_groups)
    sums_G = torch.zeros(num_groups, dtype=torch.float64, device=rewards_N.device).index_add(
        0, group_N, centred_N.abs()
    )
    deviation_N = sums_G[group_N] / size_N
    divided_N = advantages_N.to(torch.float64) / torch.where(deviation_N > 0, deviation_N, 1.0)
    return torch.where(deviation_N > 0, divided_N, 0.0).to(advantages_N.dtype)


def _checked(rewards_N: Tensor, group_ids_N: Tensor) -> tuple[Tensor, Tensor, int, torch.dtype]:
    """Return rewards as float64, group numbers 0..G-1, G, and the dtype of the result."""
    rewards_N = torch.as_tensor(rewards_N)
    group_ids_N = torch.as_tensor(group_ids_N, device=rewards_N.device)
    if rewards_N.ndim != 1 or rewards_N.shape != group_ids_N.shape:
        raise AlgorithmError(
            f"rewards_N and group_ids_N: got shapes {tuple(rewards_N.shape)} and {tuple(group_ids_N.shape)}, "
            "allowed are two vectors of the same length; give one reward and one group id per rollout"
        )
    finite_N = torch.isfinite(rewards_N)
    if not bool(finite_N.all()):
        where = int((~finite_N).nonzero()[0])
        raise AlgorithmError(
            f"rewards_N[{where}]: got {float(rewards_N[where])} (group {int(group_ids_N[where])}), "
            "allowed are finite numbers; check the reward function of that answer"
        )
    dtype = rewards_N.dtype if rewards_N.is_floating_point() else torch.float32
    ids_G, group_N = torch.unique(group_ids_N, return_inverse=True)
    return rewards_N.to(torch.float64), group_N, len(ids_G), dtype


def _centred(rewards_N: Tensor, group_N: Tensor, num_groups: int) -> tuple[Tensor, Tensor]:
    """Return R - group mean (exactly 0 in groups of equal rewards) and the size of each sample's group, float64 [N]
    each."""
    zeros_G = torch.zeros(num_groups, dtype=torch.float64, device=rewards_N.device)
    size_N = zeros_G.index_add(0, group_N, torch.ones_like(rewards_N))[group_N]
    mean_N = zeros_G.index_add(0, group_N, rewards_N)[group_N] / size_N
    lowest_N = zeros_G.scatter_reduce(0, group_N, rewards_N, "amin", include_self=False)[group_N]
    highest_N = zeros_G.scatter_reduce(0, group_N, rewards_N, "amax", include_self=False)[group_N]
    # The mean of ten times 0.1 is not 0.1 in floating point: rounding must not become a signal of size 1e-17/eps.
    return torch.where(lowest_N == highest_N, 0.0, rewards_N - mean_N), size_N


def _group_std(centred_N: Tensor, group_N: Tensor, num_groups: int, size_N: Tensor, std: str) -> Tensor:
    """Return the standard deviation of each sample's group, float64 [N]; 0 for a group of one with either divisor."""
    squares_G = torch.zeros(num_groups, dtype=torch.float64, device=centred_N.device)
    squares_G.index_add_(0, group_N, centred_N.square())
    divisor_N = size_N if std == "population" else (size_N - 1).clamp(min=1)
    return (squares_G[group_N] / divisor_N).sqrt()
