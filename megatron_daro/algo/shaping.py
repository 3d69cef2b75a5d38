"""Overlong answers: DAPO's soft length penalty, and taking truncated rollouts out of the loss.

Place in the data flow: rollouts and verdicts -> shaped rewards and loss masks -> advantages and batch.
Refuses to touch verdicts: a penalised or filtered rollout still counts in its group's pass rate.

Shape letters: N samples, R response tokens of all samples end to end.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from megatron_daro.errors import AlgorithmError

Vector = TypeVar("Vector", np.ndarray, Tensor)


def overlong_penalty(lengths_N: Vector, max_tokens: int = 20480, cache_tokens: int = 4096) -> Vector:
    """DAPO's soft penalty, to be added to the reward.

    Args:
        lengths_N: [N], response tokens, numpy or torch.
        max_tokens: L_max; beyond it the penalty is -1.
        cache_tokens: L_cache; the penalty starts at L_max - L_cache and falls linearly. 1..max_tokens.

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


def overlong_filter(loss_mask_R: Vector, response_lengths_N: Vector, truncated_N: Vector) -> Vector:
    """Return the loss mask without the truncated rollouts. Verdicts, bins and advantages are left as they are.

    Args:
        loss_mask_R: [R], 1 where a token is trained; the samples' responses end to end.
        response_lengths_N: [N], response tokens per sample; they sum to R.
        truncated_N: [N], true (or 1) where generation hit the length limit.

    Returns:
        A new mask [R] of the same dtype and kind.

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
