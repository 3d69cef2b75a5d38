"""Choosing tokens: temperature, nucleus (top-p), and randomness that belongs to the row and not to the batch.

Place in the data flow: logits of one decoding step -> `choose_tokens` -> token and log-prob of every row.
Every row draws its own uniform numbers from a counter-based generator keyed by (seed, group, attempt, index), one per
step, and inverts its cumulative distribution with them. So what a row says does not depend on its neighbours.
Offers no top-k, no penalties: the training loss could not account for them.

Shape letters: B rows of the batch, V vocabulary, M most new tokens.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def row_uniforms(seed: int, group_id: int, attempt: int, index: int, count: int) -> np.ndarray:
    """Return the uniform numbers of one rollout.

    Args:
        seed, group_id, attempt, index: any integers of 64 bits; together they name the rollout.
        count: how many numbers, one per token.

    Returns:
        float32 [count] in [0, 1), multiples of 2**-24; a longer call begins with the same numbers.
    """
    # Fixed-width words: numpy would write small integers shorter, and two different keys could then look alike.
    words = np.array([part & (2**64 - 1) for part in (seed, group_id, attempt, index)], dtype=np.uint64)
    entropy = [int(word) for word in words.view(np.uint32)]
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence(entropy)))
    return generator.random(count, dtype=np.float32)


def choose_tokens(
    logits_BV: Tensor, uniforms_B: Tensor, temperatures_B: Tensor, top_p_B: Tensor
) -> tuple[Tensor, Tensor]:
    """One token per row.

    Args:
        logits_BV: float32.
        uniforms_B: float32 in [0, 1).
        temperatures_B: float32, 0 for the most likely token.
        top_p_B: float32 in (0, 1]; 1 keeps every token.

    Returns:
        tokens int64 [B], and their log-probs float32 [B] (natural log) in the distribution with the temperature applied
        and top-p not applied. At temperature 0 the log-prob is that of temperature 1.
    """
    greedy_B = temperatures_B == 0
    scale_B = torch.where(greedy_B, 1.0, temperatures_B)
    logprobs_BV = torch.log_softmax(logits_BV / scale_B[:, None], dim=-1)
    weights_BV = logprobs_BV.exp()
    narrow = torch.nonzero(top_p_B < 1).flatten()
    if len(narrow):
        weights_BV[narrow] = keep_nucleus(weights_BV[narrow], top_p_B[narrow])
    tokens_B = _invert(weights_BV, uniforms_B)
    if greedy_B.any():
        tokens_B = torch.where(greedy_B, logits_BV.argmax(dim=-1), tokens_B)
    return tokens_B, logprobs_BV.gather(1, tokens_B[:, None]).squeeze(1)


def keep_nucleus(probs_BV: Tensor, top_p_B: Tensor) -> Tensor:
    """Zero outside the nucleus: the fewest most likely tokens whose probabilities sum to at least top_p.

    Args:
        probs_BV: float32, rows sum to 1.
        top_p_B: float32 in (0, 1].

    Returns:
        [B, V], not renormalised; at least one token per row stays. Equal probabilities are ranked by token id.
    """
    sorted_BV, order_BV = probs_BV.sort(dim=-1, descending=True, stable=True)
    before_BV = sorted_BV.cumsum(dim=-1) - sorted_BV
    keep_BV = torch.zeros_like(probs_BV, dtype=torch.bool)
    keep_BV.scatter_(1, order_BV, before_BV < top_p_B[:, None])
    keep_BV.scatter_(1, order_BV[:, :1], True)  # rounding must not empty a row
    return probs_BV * keep_BV


def _invert(weights_BV: Tensor, uniforms_B: Tensor) -> Tensor:
    """Return the first token whose cumulative weight exceeds the row's share of the total; never one of weight 0."""
    cumulative_BV = weights_BV.cumsum(dim=-1)
    total_B = cumulative_BV[:, -1]
    # u * total can round up to total, which no cumulative weight exceeds.
    target_B = torch.minimum(uniforms_B * total_B, torch.nextafter(total_B, torch.zeros_like(total_B)))
    return torch.searchsorted(cumulative_BV, target_B[:, None], right=True).squeeze(1)
