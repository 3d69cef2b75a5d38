"""Algorithms that nobody has published: what a user would write beside a configuration, as docs/algorithms.md says.

Advantage, filter and coefficient are unlike those of every algorithm of the package, so a test sees whose were used.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_daro.algo.weighting import Algorithm, StepTotals, TokenColumns


class Toy(Algorithm):
    """Rewards less a constant, groups of the lower half, and a coefficient that grows with the bin."""

    name = "toy"

    def __init__(self, *, baseline: float, **common) -> None:
        super().__init__(**common)
        self.baseline = baseline

    def advantages(self, rewards_N: Tensor, group_ids_N: Tensor) -> Tensor:
        return rewards_N - self.baseline

    def own_filter(self, bins_N: Tensor) -> Tensor:
        return (bins_N > 0) & (2 * bins_N <= self.rollouts_per_prompt)

    def bin_coefficients(self, bins_N: Tensor, lengths_N: Tensor, totals: StepTotals) -> Tensor:
        return torch.where(lengths_N > 0, (1.0 + bins_N) / (10.0 * totals.tokens), 0.0).double()


class Fluent(Algorithm):
    """The rollout's advantage, and what the reference will say of this trained token and of those after it, discounted;
    whitened over the whole step."""

    name = "fluent"
    token_columns = ("ref_logprobs",)

    def __init__(self, *, scale: float, discount: float, **common) -> None:
        super().__init__(**common)
        self.scale, self.discount = scale, discount

    def token_advantages(self, tokens: TokenColumns) -> Tensor:
        ref_NS, mask_NS = tokens.by_sample(tokens.columns["ref_logprobs"]), tokens.by_sample(tokens.mask_R)
        later_N, sums_NS = torch.zeros(len(ref_NS), dtype=torch.float64), torch.zeros_like(ref_NS)
        for s in reversed(range(ref_NS.shape[1])):  # a token that an environment wrote takes no time
            later_N = torch.where(mask_NS[:, s], ref_NS[:, s] + self.discount * later_N, later_N)
            sums_NS[:, s] = later_N
        raw_R = tokens.per_token(tokens.advantages_N) + self.scale * tokens.end_to_end(sums_NS)
        kept_R = torch.where(tokens.mask_R, raw_R, 0.0)
        count, total, squares = tokens.sum_over_step(
            torch.stack([tokens.mask_R.sum().double(), kept_R.sum(), kept_R.square().sum()])
        )
        mean = total / count
        return (raw_R - mean) / (squares / count - mean**2).sqrt()

    def bin_coefficients(self, bins_N: Tensor, lengths_N: Tensor, totals: StepTotals) -> Tensor:
        return torch.where(lengths_N > 0, 1.0 / totals.tokens, 0.0).double()


class Faulty(Fluent):
    """The same with a fault that only the ranks meet; nan: in samples of reward 7."""

    name = "faulty"

    def __init__(self, *, fault: str, **common) -> None:
        super().__init__(scale=0.1, discount=0.9, **common)
        self.fault = fault

    def token_advantages(self, tokens: TokenColumns) -> Tensor:
        values_R = super().token_advantages(tokens)
        if self.fault == "raises":
            raise ZeroDivisionError("no token to divide by")
        if self.fault == "nan":
            return torch.where(tokens.per_token(tokens.rewards_N == 7), torch.nan, values_R)
        return {
            "long": torch.cat([values_R, values_R]),
            "per sample": values_R[: len(tokens.lengths_N)],
            "list": values_R.tolist(),
            "integers": values_R.long(),
            "nan where nothing is trained": torch.where(tokens.mask_R, values_R, torch.nan),
        }[self.fault]
