"""Difficulty: pass-rate bins, sums per bin, and the loss that is predicted from the lengths in a bin.

Verdicts -> bins -> tokens per bin, summed over all ranks -> coefficients of the token losses.
DARO's weight per bin is in `difficulty_weights`. Refuses incomplete groups: a group of fewer than K rollouts has no bin
among 0..K.

Shape letters: N samples, K rollouts per prompt, [K+1] one entry per bin 0..K. Bins 0 and K carry no signal.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_daro.errors import AlgorithmError


def pass_rate_bins(correct_N: Tensor, group_ids_N: Tensor, rollouts_per_prompt: int) -> Tensor:
    """Return the bin of every sample: how many rollouts of its group are correct.

    Args:
        correct_N: [N], bool or 0/1: the verifier's verdicts, never the shaped reward.
        group_ids_N: [N] integers, arbitrary values in any order.
        rollouts_per_prompt: K, 2 or more; every group must have exactly K samples.

    Returns:
        int64 [N], 0..K, the same for all samples of a group.

    Raises:
        AlgorithmError: a group has more or fewer than K samples (the message says which), or a verdict is not 0/1.
    """
    check_rollouts_per_prompt(rollouts_per_prompt)
    correct_N = torch.as_tensor(correct_N)
    group_ids_N = torch.as_tensor(group_ids_N, device=correct_N.device)
    if correct_N.ndim != 1 or correct_N.shape != group_ids_N.shape:
        raise AlgorithmError(
            f"correct_N and group_ids_N: got shapes {tuple(correct_N.shape)} and {tuple(group_ids_N.shape)}, "
            "allowed are two vectors of the same length; give one verdict and one group id per rollout"
        )
    if not bool(((correct_N == 0) | (correct_N == 1)).all()):
        raise AlgorithmError("correct_N: got a value other than 0 and 1; give the verdict, not the shaped reward")
    ids_G, group_N, sizes_G = torch.unique(group_ids_N, return_inverse=True, return_counts=True)
    wrong = (sizes_G != rollouts_per_prompt).nonzero().flatten().tolist()
    if wrong:
        named = ", ".join(f"group {int(ids_G[g])} has {int(sizes_G[g])}" for g in wrong[:5])
        more = f" and {len(wrong) - 5} more groups" if len(wrong) > 5 else ""
        raise AlgorithmError(
            f"group_ids_N: {named}{more}; allowed is exactly rollouts_per_prompt = {rollouts_per_prompt} samples "
            "a group; complete the group or drop it"
        )
    bins_G = torch.zeros(len(ids_G), dtype=torch.int64, device=correct_N.device)
    return bins_G.index_add_(0, group_N, correct_N.to(torch.int64))[group_N]


def bin_sums(values_N: Tensor, bins_N: Tensor, rollouts_per_prompt: int) -> Tensor:
    """Return the sum of a value per sample over each bin.

    Args:
        values_N: [N]; floating values are summed in float64, whole numbers in int64.
        bins_N: int64 [N], 0..K.
        rollouts_per_prompt: K.

    Returns:
        [K+1], float64 or int64, on the device of the values; gradient flows.

    Raises:
        AlgorithmError: shapes differ, or a bin is outside 0..K.
    """
    values_N = torch.as_tensor(values_N)
    bins_N = torch.as_tensor(bins_N, device=values_N.device).to(torch.int64)
    if values_N.ndim != 1 or values_N.shape != bins_N.shape:
        raise AlgorithmError(
            f"values and bins_N: got shapes {tuple(values_N.shape)} and {tuple(bins_N.shape)}, "
            "allowed are two vectors of the same length"
        )
    if bins_N.numel() and not 0 <= int(bins_N.min()) <= int(bins_N.max()) <= rollouts_per_prompt:
        raise AlgorithmError(
            f"bins_N: got {int(bins_N.min())}..{int(bins_N.max())}, allowed is 0..{rollouts_per_prompt} "
            "(rollouts_per_prompt); the bins were made with another K"
        )
    dtype = torch.float64 if values_N.is_floating_point() else torch.int64
    sums = torch.zeros(rollouts_per_prompt + 1, dtype=dtype, device=values_N.device)
    return sums.index_add(0, bins_N, values_N.to(dtype))


def token_counts(bins_N: Tensor, lengths_N: Tensor, rollouts_per_prompt: int) -> Tensor:
    """Return the trained tokens per bin. The caller sums them over all ranks before using them as denominators.

    Args:
        bins_N: int64 [N], 0..K.
        lengths_N: [N], trained response tokens of each sample (after the loss mask).
        rollouts_per_prompt: K.

    Returns:
        int64 [K+1].

    Raises:
        AlgorithmError: shapes differ, or a bin is outside 0..K.
    """
    lengths_N = torch.as_tensor(lengths_N)
    return bin_sums(lengths_N.to(torch.int64), bins_N, rollouts_per_prompt)


def predicted_bin_loss(mu: Tensor | float, mean_len_right: Tensor | float, mean_len_wrong: Tensor | float) -> Tensor:
    """Return L_k of an on-policy step (ratio 1), from the pass rate and the mean lengths alone.

    Exact for 0/1 rewards and the population standard deviation with eps -> 0.

    Args:
        mu: pass rate k/K; mean_len_right, mean_len_wrong: mean trained tokens of the bin's right and wrong answers.
            Numbers or tensors of one shape.

    Returns:
        float64, sqrt(mu(1-mu)) (l- - l+) / (mu l+ + (1-mu) l-); 0 where mu is 0 or 1 or the bin has no tokens.
    """
    mu, right, wrong = (torch.as_tensor(x, dtype=torch.float64) for x in (mu, mean_len_right, mean_len_wrong))
    mixed = (mu > 0) & (mu < 1)
    right, wrong = torch.where(mixed, right, 0.0), torch.where(mixed, wrong, 0.0)
    mean_length = mu * right + (1 - mu) * wrong
    loss = (mu * (1 - mu)).clamp(min=0).sqrt() * (wrong - right) / torch.where(mean_length > 0, mean_length, 1.0)
    return torch.where(mixed & (mean_length > 0), loss, 0.0)


def check_rollouts_per_prompt(rollouts_per_prompt: int) -> None:
    if rollouts_per_prompt < 2:
        raise AlgorithmError(
            f"rollouts_per_prompt: got {rollouts_per_prompt}, allowed is 2 or more: one rollout compares with nothing"
        )
