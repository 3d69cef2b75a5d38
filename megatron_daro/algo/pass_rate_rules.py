"""Fixed weights per pass rate: published rules that are a function of mu, and DGPO.

Data flows as in every algorithm (see `algorithm`): a group's advantage, times the rule's weight of its pass rate,
averaged over the step's trained tokens (DGPO: over those of groups with 0 < mu < 1). mu is always the share of right
verdicts, never a mean of shaped rewards; with rewards of 0 and 1 both are the same. What these papers leave open, and
what was chosen here, is in docs/algorithms.md.

Shape letters: N samples, K rollouts per prompt, B = K + 1 bins.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import Unpack

from megatron_daro.algo.advantages import over_mean_deviation
from megatron_daro.algo.algorithm import Algorithm, Common, StepTotals, constant, inverse, number, token_mean


def bernoulli_kl(mu: Tensor, target: float) -> Tensor:
    """Return KL(Bernoulli(mu) || Bernoulli(target)) in nats, any shape; 0 log 0 is 0."""
    return torch.special.xlogy(mu, mu / target) + torch.special.xlogy(1 - mu, (1 - mu) / (1 - target))


class PassRateAlgorithm(Algorithm):
    """Token mean of all groups with a fixed weight per pass rate."""

    std_defines = True

    @abstractmethod
    def weight(self, mu_B: Tensor) -> Tensor:
        """Return the rule's weight of each pass rate, float64 [B]; weights that are not finite (division by 0) count as
        0."""

    @property
    def pass_rate_weights(self) -> Tensor:
        """The rule's weight of each pass rate, float64 [K+1]."""
        mu_B = torch.arange(self.rollouts_per_prompt + 1, dtype=torch.float64) / self.rollouts_per_prompt
        weights_B = self.weight(mu_B)
        return torch.where(torch.isfinite(weights_B), weights_B, 0.0)

    def bin_coefficients(self, bins_N: Tensor, lengths_N: Tensor, totals: StepTotals) -> Tensor:
        """See `Algorithm.bin_coefficients`."""
        return token_mean(lengths_N, totals) * self.pass_rate_weights.to(bins_N.device)[bins_N]


class MaxRl(PassRateAlgorithm):
    """MaxRL: A = (r - mu) / mu; 0 if no answer is right.

    Source: arXiv 2602.02710.
    """

    name = "maxrl"
    advantage_std = "none"

    def weight(self, mu_B: Tensor) -> Tensor:
        """See `PassRateAlgorithm.weight`."""
        return 1 / mu_B


class FGrpo(PassRateAlgorithm):
    """F-GRPO: GRPO's advantage times (1 - pass rate)^gamma.

    Source: arXiv 2602.06717.
    """

    name = "f_grpo"

    def __init__(self, *, gamma: float = 1.0, **common: Unpack[Common]) -> None:
        """Take the options of `Algorithm`, and:

        Args:
            gamma: exponent, 0 or more; 0 is GRPO.
        """
        super().__init__(**common)
        self.gamma = number("gamma", gamma, 0.0)

    def weight(self, mu_B: Tensor) -> Tensor:
        """See `PassRateAlgorithm.weight`."""
        return (1 - mu_B) ** self.gamma


class Mgpo(PassRateAlgorithm):
    """MGPO: GRPO's advantage times exp(-strength * KL(pass rate || target)).

    Source: arXiv 2511.06221.
    """

    name = "mgpo"

    def __init__(self, *, strength: float = 1.0, target: float = 0.5, **common: Unpack[Common]) -> None:
        """Take the options of `Algorithm`, and:

        Args:
            strength: factor of the divergence, 0 or more; 0 is GRPO.
            target: pass rate with the largest weight, above 0 and below 1.
        """
        super().__init__(**common)
        self.strength, self.target = number("strength", strength, 0.0), number("target", target, 0.0, 1.0, closed=False)

    def weight(self, mu_B: Tensor) -> Tensor:
        """See `PassRateAlgorithm.weight`."""
        return torch.exp(-self.strength * bernoulli_kl(mu_B, self.target))


Deviation = Literal["verdicts", "rewards"]


class Dgpo(Algorithm):
    """DGPO: the centred reward over the group's mean absolute deviation, times a softmax over the step's questions.

    With rewards of 0 and 1 the deviation is 2 mu (1 - mu), so every question with both right and wrong answers has the
    same sum of |A|. The weight of a question is V exp(-mu/T) / sum of exp(-mu/T) over the V such questions of the step,
    so the weights are 1 on average; the loss is the mean over the tokens of these questions.

    The paper takes the deviation of the rewards (`deviation="rewards"`): with rewards of -1 and 1 it is twice that of
    the verdicts, and a length penalty changes it.

    Source: arXiv 2601.20614 with the authors' code (MathForge), without the 1e-4 that the code adds to the deviation.
    """

    name = "dgpo"
    advantage_std = "none"
    std_defines = True

    def __init__(
        self,
        *,
        temperature: float = 2.0,
        deviation: Deviation = "verdicts",
        **common: Unpack[Common],
    ) -> None:
        """Take the options of `Algorithm`, and:

        Args:
            temperature: T of the softmax over minus the pass rates, above 0; the larger, the more alike the weights of
                the questions.
            deviation: what the mean absolute deviation in the divisor is taken of; rewards: as in the paper; verdicts:
                the same with rewards of 0 and 1 and no penalty.
        """
        super().__init__(**common)
        self.temperature, self.deviation = number("temperature", temperature, 0.0, closed=False), deviation

    def advantages(self, rewards_N: Tensor, group_ids_N: Tensor) -> Tensor:
        """See `Algorithm.advantages`. The deviation of rewards is divided by here, that of verdicts in
        `bin_coefficients`."""
        advantages_N = super().advantages(rewards_N, group_ids_N)
        return (
            over_mean_deviation(advantages_N, rewards_N, group_ids_N) if self.deviation == "rewards" else advantages_N
        )

    def bin_coefficients(self, bins_N: Tensor, lengths_N: Tensor, totals: StepTotals) -> Tensor:
        """See `Algorithm.bin_coefficients`."""
        mu_B = torch.arange(self.rollouts_per_prompt + 1, dtype=torch.float64) / self.rollouts_per_prompt
        inner_B = self._mixed(torch.arange(self.rollouts_per_prompt + 1))
        # Rollouts are counted instead of questions: each question has K of them, which cancels.
        counts_B = torch.where(inner_B, totals.rollouts_per_bin.to("cpu", torch.float64), 0.0)
        scores_B = torch.exp(-mu_B / self.temperature)
        mean_score = float((counts_B * scores_B).sum()) / max(float(counts_B.sum()), 1.0)
        weights_B = scores_B / (mean_score or 1.0)
        if self.deviation == "verdicts":
            weights_B = weights_B / torch.where(inner_B, 2 * mu_B * (1 - mu_B), 1.0)
        kept_N = constant(inverse(totals.mixed_tokens), lengths_N)
        return kept_N * torch.where(inner_B, weights_B, 0.0).to(bins_N.device)[bins_N]
