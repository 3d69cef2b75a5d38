"""An algorithm that nobody has published: what a user would write beside a configuration, as docs/algorithms.md says.

Advantage, filter and coefficient are unlike those of every algorithm of the package, so a test sees whose were used.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_daro.algo.weighting import Algorithm, BatchTotals


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

    def sample_coefficients(self, bins_N: Tensor, lengths_N: Tensor, totals: BatchTotals) -> Tensor:
        return torch.where(lengths_N > 0, (1.0 + bins_N) / (10.0 * totals.tokens), 0.0).double()
