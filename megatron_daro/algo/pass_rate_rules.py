"""Fixed weights per pass rate: published rules that are a function of mu, one line each, and DGPO.

As every algorithm (see `algorithm`): a group's advantage, times the rule's weight of its pass rate, averaged over the
step's trained tokens. mu is always the share of right verdicts, never a mean of shaped rewards; with rewards of 0 and 1
that is the same. Refuses options out of their range.

Shape letters: N samples, K rollouts per prompt, B = K + 1 bins.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, Literal, cast, get_args

import torch
from torch import Tensor
from typing_extensions import Unpack

from megatron_daro.algo.advantages import AdvantageStd, over_mean_deviation
from megatron_daro.algo.algorithm import Algorithm, BatchTotals, Common, constant, inverse, token_mean
from megatron_daro.errors import AlgorithmError


@dataclass(frozen=True, slots=True)
class Option:
    """A number that a rule takes: its default, and the open interval or (`closed`) interval it must lie in."""

    default: float
    low: float
    high: float = float("inf")
    closed: bool = True

    def check(self, name: str, value: float) -> float:
        """Return the value, or raise AlgorithmError."""
        inside = self.low <= value < self.high if self.closed else self.low < value < self.high
        if not inside:
            least = f"{self.low:g} or more" if self.closed else f"above {self.low:g}"
            most = "" if self.high == float("inf") else f" and below {self.high:g}"
            raise AlgorithmError(f"{name}: got {value}, allowed is a number {least}{most}")
        return float(value)


@dataclass(frozen=True, slots=True)
class Rule:
    """One line of the table. std: what the centred reward is divided by. weight: (mu_B float64, **options) -> [B]."""

    name: str
    std: AdvantageStd
    weight: Callable[..., Tensor]
    source: str
    options: dict[str, Option] = field(default_factory=dict)


def bernoulli_kl(mu: Tensor, target: float) -> Tensor:
    """KL(Bernoulli(mu) || Bernoulli(target)) in nats, any shape; 0 log 0 is 0."""
    return torch.special.xlogy(mu, mu / target) + torch.special.xlogy(1 - mu, (1 - mu) / (1 - target))


RULES = (
    Rule("maxrl", "none", lambda mu: 1 / mu, "MaxRL, arXiv 2602.02710: A = (r - mu) / mu, 0 where none is right"),
    Rule(
        "f_grpo",
        "population",
        lambda mu, gamma: (1 - mu) ** gamma,
        "F-GRPO, arXiv 2602.06717: GRPO's advantage times (1 - mu)^gamma",
        {"gamma": Option(1.0, 0.0)},
    ),
    Rule(
        "mgpo",
        "population",
        lambda mu, strength, target: torch.exp(-strength * bernoulli_kl(mu, target)),
        "MGPO, arXiv 2511.06221: GRPO's advantage times exp(-lambda KL(mu || p0))",
        {"strength": Option(1.0, 0.0), "target": Option(0.5, 0.0, 1.0, closed=False)},
    ),
)
"""What is open in these papers, and what was chosen: docs/algorithms.md."""


class PassRateAlgorithm(Algorithm):
    """Token mean of all groups with a fixed weight per pass rate; one subclass for each `Rule`."""

    rule: ClassVar[Rule]
    std_defines = True

    def __init__(self, **given: object) -> None:
        """Take the options of `Algorithm` and those of the rule.

        Raises:
            AlgorithmError: an option is out of range. TypeError: there is no such option.
        """
        common = {name: value for name, value in given.items() if name not in self.rule.options}
        super().__init__(**cast(Common, common))
        own = {name: cast(float, given.get(name, option.default)) for name, option in self.rule.options.items()}
        self.options = {name: option.check(name, own[name]) for name, option in self.rule.options.items()}

    @property
    def pass_rate_weights(self) -> Tensor:
        """float64 [K+1], the rule's weight of each pass rate; 0 where it has none (a division by 0)."""
        mu_B = torch.arange(self.rollouts_per_prompt + 1, dtype=torch.float64) / self.rollouts_per_prompt
        weights_B: Tensor = self.rule.weight(mu_B, **self.options)
        return torch.where(torch.isfinite(weights_B), weights_B, 0.0)

    def sample_coefficients(self, bins_N: Tensor, lengths_N: Tensor, totals: BatchTotals) -> Tensor:
        """See `Algorithm.sample_coefficients`."""
        return token_mean(lengths_N, totals) * self.pass_rate_weights.to(bins_N.device)[bins_N]


PASS_RATE_RULES: tuple[type[Algorithm], ...] = tuple(
    cast(
        type[Algorithm],
        type(
            f"PassRateAlgorithm_{rule.name}",
            (PassRateAlgorithm,),
            {"name": rule.name, "advantage_std": rule.std, "rule": rule, "__doc__": rule.source},
        ),
    )
    for rule in RULES
)


Deviation = Literal["verdicts", "rewards"]


class Dgpo(Algorithm):
    """DGPO: the centred reward over the group's mean absolute deviation, times a softmax over the step's questions.

    With rewards of 0 and 1 the deviation is 2 mu (1 - mu), so every question with both right and wrong answers has the
    same sum of |A|. The weight of a question is V exp(-mu/T) / sum over the V such questions of the step, so they are 1
    on average; the loss is the mean over the tokens of these questions.

    The paper's deviation is that of the rewards (`deviation="rewards"`): with rewards of -1 and 1 it is twice the
    verdicts', and with a length penalty it counts what the penalty adds.

    Source: arXiv 2601.20614 with the authors' code (MathForge). The code adds 1e-4 to the deviation; here nothing.
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
        """Take the options of `Algorithm`, T, above 0 (the larger, the more alike are the questions' weights), and what
        the mean absolute deviation is of.

        Raises:
            AlgorithmError: an option is out of range.
        """
        super().__init__(**common)
        self.temperature = Option(2.0, 0.0, closed=False).check("temperature", temperature)
        if deviation not in get_args(Deviation):
            raise AlgorithmError(f"deviation: got {deviation!r}, allowed are {', '.join(get_args(Deviation))}")
        self.deviation = deviation

    def advantages(self, rewards_N: Tensor, group_ids_N: Tensor) -> Tensor:
        """See `Algorithm.advantages`; the deviation of rewards divides here, that of verdicts in the coefficient."""
        advantages_N = super().advantages(rewards_N, group_ids_N)
        return (
            over_mean_deviation(advantages_N, rewards_N, group_ids_N) if self.deviation == "rewards" else advantages_N
        )

    def sample_coefficients(self, bins_N: Tensor, lengths_N: Tensor, totals: BatchTotals) -> Tensor:
        """See `Algorithm.sample_coefficients`."""
        mu_B = torch.arange(self.rollouts_per_prompt + 1, dtype=torch.float64) / self.rollouts_per_prompt
        inner_B = self._mixed(torch.arange(self.rollouts_per_prompt + 1))
        # Rollouts in the place of questions: each has K, which cancels.
        counts_B = torch.where(inner_B, totals.rollouts_per_bin.to("cpu", torch.float64), 0.0)
        scores_B = torch.exp(-mu_B / self.temperature)
        mean_score = float((counts_B * scores_B).sum()) / max(float(counts_B.sum()), 1.0)
        weights_B = scores_B / (mean_score or 1.0)
        if self.deviation == "verdicts":
            weights_B = weights_B / torch.where(inner_B, 2 * mu_B * (1 - mu_B), 1.0)
        kept_N = constant(inverse(totals.kept_tokens), lengths_N)
        return kept_N * torch.where(inner_B, weights_B, 0.0).to(bins_N.device)[bins_N]
