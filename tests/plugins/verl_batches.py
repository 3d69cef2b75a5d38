"""Small batches in the form in which verl's workers get them, and the slow loss of docs/algorithms.md on them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

K, VOCAB, GROUPS, LONGEST = 4, 50, 6, 12
CLIP_LOW, CLIP_HIGH, DUAL_CLIP = 0.2, 0.28, 3.0


@dataclass
class Sample:
    """One rollout: prompt and response tokens, old log-probs, mask and verdict."""

    uid: str
    prompt: list[int]
    response: list[int]
    old: list[float]
    mask: list[int]
    correct: int


def samples(seed: int) -> list[Sample]:
    """Shuffled groups of K with every pass rate, masks with holes, and one wholly masked answer."""
    rng = np.random.default_rng(seed)
    found = []
    for group in range(GROUPS):
        prompt = rng.integers(0, VOCAB, rng.integers(2, 9)).tolist()
        for i in range(K):
            length = int(rng.integers(2, LONGEST + 1))
            mask = (rng.random(length) > 0.15).astype(int).tolist()
            if (group, i) == (1, 0):
                mask = [0] * length
            found.append(
                Sample(
                    f"prompt {group}",
                    prompt,
                    rng.integers(0, VOCAB, length).tolist(),
                    (-3.9 + 0.5 * rng.standard_normal(length)).tolist(),
                    mask,
                    int(i < group % (K + 1)),
                )
            )
    return [found[i] for i in rng.permutation(len(found))]


def _padded(rows: Iterable[list[Any]], dtype: torch.dtype) -> Tensor:
    return torch.stack([torch.tensor(row + [0] * (LONGEST - len(row)), dtype=dtype) for row in rows])


def response_mask(whole: list[Sample]) -> Tensor:
    """[B, R]."""
    return _padded((s.mask for s in whole), torch.int64)


def token_rewards(whole: list[Sample]) -> Tensor:
    """[B, R], the verdict on one token."""
    return _padded(([float(s.correct)] for s in whole), torch.float32)


def uids(whole: list[Sample]) -> np.ndarray:
    """object [B]."""
    return np.array([s.uid for s in whole], dtype=object)


def _nested(rows: list[Tensor]) -> Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def as_tensordict(whole: list[Sample], advantages: Tensor, returns: Tensor, part: Iterable[int]) -> Any:
    """What one data-parallel rank's worker receives: jagged fields, as verl's queue hands them out."""
    from tensordict import TensorDict

    rows = list(part)
    mine = [whole[i] for i in rows]
    lengths = [len(s.response) for s in mine]

    def field(values: Iterable[list[Any]], dtype: torch.dtype) -> Tensor:
        return _nested([torch.tensor(row, dtype=dtype) for row in values])

    cut = lambda column: _nested([column[i, :n].clone() for i, n in zip(rows, lengths, strict=True)])
    return TensorDict(
        {
            "input_ids": field((s.prompt + s.response for s in mine), torch.int64),
            "position_ids": field((list(range(len(s.prompt) + len(s.response))) for s in mine), torch.int64),
            "prompts": field((s.prompt for s in mine), torch.int64),
            "responses": field((s.response for s in mine), torch.int64),
            "response_mask": field((s.mask for s in mine), torch.int64),
            "loss_mask": field(([0] * len(s.prompt) + s.mask for s in mine), torch.int64),
            "old_log_probs": field((s.old for s in mine), torch.float32),
            "advantages": cut(advantages),
            "returns": cut(returns),
        },
        batch_size=len(mine),
    )


def reference(model: torch.nn.Module, whole: list[Sample], weights: list[float]) -> tuple[float, list[float]]:
    """docs/algorithms.md, sample by sample and token by token; fills the model's gradients.

    Returns:
        (policy loss, L_k of bins 0..K).
    """
    bins = [sum(o.correct for o in whole if o.uid == s.uid) for s in whole]
    tokens = [sum(sum(s.mask) for s, b in zip(whole, bins, strict=True) if b == k) for k in range(K + 1)]
    sums, loss = [0.0] * (K + 1), torch.zeros((), dtype=torch.float64)
    for sample, k in zip(whole, bins, strict=True):
        mu = k / K
        advantage = 0.0 if k in (0, K) else (sample.correct - mu) / ((mu * (1 - mu)) ** 0.5 + 1e-6)
        ids = torch.tensor([sample.prompt + sample.response])
        logp = torch.log_softmax(model(ids).logits[0].float(), -1)[len(sample.prompt) - 1 : -1]
        for t, (token, old, kept) in enumerate(zip(sample.response, sample.old, sample.mask, strict=True)):
            if not kept:
                continue
            ratio = torch.exp(logp[t, token] - old)
            term = -torch.min(ratio * advantage, ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH) * advantage).double()
            if advantage < 0:
                term = term.clamp(max=-DUAL_CLIP * advantage)
            sums[k] += float(term.detach())
            if 0 < k < K:
                loss = loss + weights[k] / tokens[k] * term
    model.zero_grad()
    loss.backward()
    return float(loss.detach()), [s / t if t else 0.0 for s, t in zip(sums, tokens, strict=True)]
