"""Small rollouts for the adapters' hosts, and the slow loss of docs/algorithms.md on them, for a table of logits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

K, GROUPS, STEPS, VOCAB, LEARNING_RATE = 4, 6, 2, 24, 0.5


@dataclass
class Sample:
    """One rollout."""

    group: int
    prompt: list[int]
    response: list[int]
    old: list[float]
    mask: list[int]
    reward: float


def start_table() -> Tensor:
    """float64 [V, V], the logits after each token."""
    return torch.randn(VOCAB, VOCAB, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def samples(seed: int) -> list[Sample]:
    """Groups of K one after another, masks with holes, one answer wholly masked."""
    rng = np.random.default_rng(seed)
    found = []
    for group in range(GROUPS):
        prompt = rng.integers(0, VOCAB, rng.integers(2, 7)).tolist()
        right = rng.permutation(K) < (group + seed) % (K + 1)
        for i in range(K):
            length = int(rng.integers(1, 14))
            mask = [0] * length if (group, i) == (1, 2) else (rng.random(length) > 0.15).astype(int).tolist()
            old = (-3.2 + 0.4 * rng.standard_normal(length)).tolist()
            found.append(Sample(group, prompt, rng.integers(0, VOCAB, length).tolist(), old, mask, float(right[i])))
    return found


def bins_of(step: list[Sample], whole: list[Sample]) -> list[int]:
    """Right answers of each sample's group."""
    return [int(sum(o.reward for o in whole if o.group == s.group)) for s in step]


def reference(table: Tensor, step: list[Sample], whole: list[Sample], weights: list[float]) -> list[float]:
    """Fill table.grad with the gradient of one optimizer step; L_k of bins 0..K."""
    bins = bins_of(step, whole)
    tokens = [sum(sum(s.mask) for s, b in zip(step, bins, strict=True) if b == k) for k in range(K + 1)]
    sums, loss = [0.0] * (K + 1), (table * 0).sum()
    for sample, k in zip(step, bins, strict=True):
        mu = k / K
        advantage = 0.0 if k in (0, K) else (sample.reward - mu) / ((mu * (1 - mu)) ** 0.5 + 1e-6)
        context = [sample.prompt[-1], *sample.response[:-1]]
        for before, token, old, kept in zip(context, sample.response, sample.old, sample.mask, strict=True):
            ratio = torch.exp(torch.log_softmax(table[before], -1)[token] - old)
            term = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
            if kept:
                sums[k] += float(term.detach())
            if kept and 0 < k < K:
                loss = loss + weights[k] / tokens[k] * term
    table.grad = None
    loss.backward()
    return [s / t if t else 0.0 for s, t in zip(sums, tokens, strict=True)]
