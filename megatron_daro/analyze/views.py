"""What the sums per pass rate say: losses, weights that DARO would learn, shares of the gradient, tokens for nothing.

Place in the data flow: Dump -> rows of a table. On-policy (ratio 1) a bin's loss follows from its lengths alone, so the
numbers are those of a first update on these rollouts; nothing is estimated.

Mass of a bin: the sum over its tokens of coefficient * |advantage|, which is the size of its gradient if all tokens'
log-probability gradients were of one size. With mu = k/K, s = sqrt(mu (1 - mu)), n+ and n- the tokens of right and
wrong answers, |A| summed over tokens is a(mu) * ((1 - mu) n+ + mu n-), and the rules differ in a(mu):

| rule | a(mu) |
|---|---|
| grpo, dapo | 1 / s |
| dr_grpo, lite_ppo | 1 |
| maxrl | 1 / mu (mean-normalised: maximum likelihood) |
| focal | (1 - mu) / s (F-GRPO's focal weight with exponent 1) |
| mad | 1 / (2 mu (1 - mu)) (DGPO's mean absolute deviation in the place of s) |
| daro | w_k / N_k / s, with the weights at rest |
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_daro.algo.difficulty import DifficultyWeights, predicted_bin_loss
from megatron_daro.algo.weighting import make_algorithm
from megatron_daro.analyze.sums import BinSums, Dump
from megatron_daro.config.algorithm import AlgorithmSection, DaroSection


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """Per bin, float64 [K+1]. right_length, wrong_length: means, NaN without answers. loss: L_k on-policy.
    weight_learnt: DARO's after the dump's steps; weight_rest: where they would settle on these rollouts. shares: rule
    -> part of the mass."""

    pass_rate: Tensor
    groups: Tensor
    tokens: Tensor
    right_length: Tensor
    wrong_length: Tensor
    loss: Tensor
    weight_learnt: Tensor
    weight_rest: Tensor
    shares: dict[str, Tensor]
    wasted_tokens: float


def view_of(dump: Dump, options: DaroSection) -> View:
    """Return all views of a dump under DARO with these options."""
    sums, k = dump.total, dump.total.rollouts_per_prompt
    mu = torch.arange(k + 1, dtype=torch.float64) / k
    right_count, wrong_count = sums.groups * k * mu, sums.groups * k * (1 - mu)
    right, wrong = sums.right_tokens / right_count, sums.wrong_tokens / wrong_count
    loss_sums, abs_sums = token_loss_sums(sums)
    learnt = _learnt(dump, options)
    rest = _at_rest(learnt, loss_sums, abs_sums, sums.tokens, options)
    return View(
        pass_rate=mu,
        groups=sums.groups,
        tokens=sums.tokens,
        right_length=right,
        wrong_length=wrong,
        loss=predicted_bin_loss(mu, right, wrong),
        weight_learnt=learnt.weights,
        weight_rest=rest,
        shares=_shares(sums, mu, rest, options),
        wasted_tokens=float(sums.tokens[0] + sums.tokens[-1]),
    )


def token_loss_sums(sums: BinSums) -> tuple[Tensor, Tensor]:
    """Return S_k and the sums of |token loss|, float64 [K+1], of an on-policy step with group-normalised advantages."""
    mu = torch.arange(len(sums.groups), dtype=torch.float64) / sums.rollouts_per_prompt
    std = (mu * (1 - mu)).clamp(min=0).sqrt()
    safe = torch.where(std > 0, std, 1.0)
    right, wrong = (1 - mu) / safe * sums.right_tokens, mu / safe * sums.wrong_tokens
    return torch.where(std > 0, wrong - right, 0.0), torch.where(std > 0, wrong + right, 0.0)


def _learnt(dump: Dump, options: DaroSection) -> DifficultyWeights:
    """Return DARO's weights after one update for each step of the dump."""
    section = AlgorithmSection(name="daro", daro=options)
    k = dump.total.rollouts_per_prompt
    algorithm = make_algorithm(**section.arguments(rollouts_per_prompt=k, max_response_tokens=1))
    for step in dump.steps:
        loss_sums, abs_sums = token_loss_sums(step)
        algorithm.update(loss_sums, step.tokens, abs_sums)
    weights: DifficultyWeights = algorithm.difficulty  # type: ignore[attr-defined]
    return weights


def _at_rest(
    weights: DifficultyWeights, loss_sums: Tensor, abs_sums: Tensor, tokens: Tensor, options: DaroSection
) -> Tensor:
    """Return the weights with w_k m_k = 1, within the clamp; 1 where a bin has no tokens."""
    denominators = tokens[1:-1].sum().expand_as(tokens) if options.normalizer == "batch" else tokens
    measured = (abs_sums if options.magnitude == "token" else loss_sums) / denominators.clamp(min=1)
    measured = measured.abs() if options.magnitude == "abs" else measured
    low, high = weights.clamp
    rest = torch.where(measured > 0, 1 / measured.clamp(min=1e-12), high).clamp(low, high)
    inner = torch.zeros_like(tokens, dtype=torch.bool)
    inner[1:-1] = tokens[1:-1] > 0
    return torch.where(inner, rest, 1.0)


def _shares(sums: BinSums, mu: Tensor, rest: Tensor, options: DaroSection) -> dict[str, Tensor]:
    std = (mu * (1 - mu)).clamp(min=0).sqrt()
    inner = (std > 0) & (sums.tokens > 0)
    safe_std, safe_mu = torch.where(inner, std, 1.0), torch.where(inner, mu, 1.0)
    centred = (1 - mu) * sums.right_tokens + mu * sums.wrong_tokens
    denominators = sums.tokens[1:-1].sum() if options.normalizer == "batch" else sums.tokens.clamp(min=1)
    rules = {
        "grpo, dapo": 1 / safe_std,
        "dr_grpo, lite_ppo": torch.ones_like(mu),
        "maxrl": 1 / safe_mu,
        "focal": (1 - mu) / safe_std,
        "mad": 1 / (2 * safe_std.square()),
        "daro": rest / denominators / safe_std,
    }
    masses = {name: torch.where(inner, factor * centred, 0.0) for name, factor in rules.items()}
    return {name: mass / mass.sum().clamp(min=1e-300) for name, mass in masses.items()}
