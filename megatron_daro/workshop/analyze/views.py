"""What a dump's sums per pass rate say: losses, DARO's weights, shares of the gradient, tokens that taught nothing.

On-policy (ratio 1) a bin's loss follows from its lengths alone, so the numbers are those of a first update on these
rollouts; nothing is estimated.

The mass of a bin is the sum over its tokens of coefficient * |advantage|: the size of its gradient if the
log-probability gradients of all tokens had the same size. Advantages and coefficients are those of each algorithm with
its default options at its start; for DARO with the given options, and weights at rest on the dump.

Shape letters: K rollouts per prompt, [K+1] one entry per bin 0..K, B bins 1..K-1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_daro.algo.difficulty import predicted_bin_loss
from megatron_daro.algo.weighting import ALGORITHMS, Algorithm, Daro, Samples, StepTotals, make_algorithm
from megatron_daro.config.algorithm import AlgorithmSection, DaroSection
from megatron_daro.workshop.analyze.dump import BinSums, Dump


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """Per bin, float64 [K+1]. right_length, wrong_length: means, NaN without answers. loss: L_k on-policy.
    weight_learnt: DARO's weights after the dump's steps; weight_rest: where they would settle on these rollouts.
    shares: names of algorithms -> share of each bin in the mass."""

    pass_rate: Tensor
    groups: Tensor
    tokens: Tensor
    right_length: Tensor
    wrong_length: Tensor
    loss: Tensor
    weight_learnt: Tensor
    weight_rest: Tensor
    shares: dict[str, Tensor]

    @property
    def rollouts_per_prompt(self) -> int:
        """K."""
        return len(self.pass_rate) - 1

    @property
    def wasted_tokens(self) -> float:
        """Tokens of groups without signal."""
        return float(self.tokens[0] + self.tokens[-1])

    @property
    def wasted_share(self) -> float:
        """Share of all tokens that are in groups without signal."""
        return self.wasted_tokens / max(float(self.tokens.sum()), 1.0)


def view_of(dump: Dump, options: DaroSection) -> View:
    """Return all views of a dump under DARO with these options."""
    sums, k = dump.total, dump.total.rollouts_per_prompt
    mu = torch.arange(k + 1, dtype=torch.float64) / k
    right_count, wrong_count = sums.groups * k * mu, sums.groups * k * (1 - mu)
    right, wrong = sums.right_tokens / right_count, sums.wrong_tokens / wrong_count
    rest = _at_rest(sums, options)
    return View(
        pass_rate=mu,
        groups=sums.groups,
        tokens=sums.tokens,
        right_length=right,
        wrong_length=wrong,
        loss=predicted_bin_loss(mu, right, wrong),
        weight_learnt=_learnt(dump, options),
        weight_rest=rest.weights,
        shares=_shares(sums, rest),
    )


def token_loss_sums(sums: BinSums) -> tuple[Tensor, Tensor]:
    """Return S_k and the sums of |token loss|, float64 [K+1], of an on-policy step with group-normalised advantages."""
    mu = torch.arange(len(sums.groups), dtype=torch.float64) / sums.rollouts_per_prompt
    std = (mu * (1 - mu)).clamp(min=0).sqrt()
    safe = torch.where(std > 0, std, 1.0)
    right, wrong = (1 - mu) / safe * sums.right_tokens, mu / safe * sums.wrong_tokens
    return torch.where(std > 0, wrong - right, 0.0), torch.where(std > 0, wrong + right, 0.0)


def _learnt(dump: Dump, options: DaroSection) -> Tensor:
    """Return DARO's weights after one update for each step of the dump."""
    algorithm = _daro(dump.total, options)
    for step in dump.steps:
        algorithm.difficulty.update(**_measures(step))
    return algorithm.weights


def _measures(sums: BinSums) -> dict[str, Tensor]:
    """Return the sums that DARO's magnitudes read, float64 [K+1]; at ratio 1 a token's loss is -A."""
    loss_sums, abs_sums = token_loss_sums(sums)
    return {
        "loss_sums": loss_sums,
        "token_counts": sums.tokens,
        "abs_loss_sums": abs_sums,
        "advantage_sums": abs_sums,
    }


def _at_rest(sums: BinSums, options: DaroSection) -> Daro:
    """Return DARO with the weights at which updates with these sums would settle; 1 for a bin without tokens."""
    algorithm = _daro(sums, options)
    algorithm.difficulty.settle(**_measures(sums))
    return algorithm


def _daro(sums: BinSums, options: DaroSection) -> Daro:
    section = AlgorithmSection(name="daro", daro=options)
    arguments = section.arguments(rollouts_per_prompt=sums.rollouts_per_prompt, max_response_tokens=1)
    algorithm = make_algorithm(**arguments)
    assert isinstance(algorithm, Daro)
    return algorithm


def _shares(sums: BinSums, daro: Daro) -> dict[str, Tensor]:
    """Return the shares by name; algorithms with equal shares are joined in one column."""
    columns: list[tuple[list[str], Tensor]] = []
    for name in ALGORITHMS:
        size = sums.rollouts_per_prompt
        other = make_algorithm(name, rollouts_per_prompt=size, max_response_tokens=1)
        mass = _masses(sums, daro if name == "daro" else other)
        share = mass / mass.sum().clamp(min=1e-300)
        same = next((names for names, known in columns if torch.allclose(known, share, atol=1e-5)), None)
        if same is None:
            columns.append(([name], share))
        else:
            same.append(name)
    return {", ".join(names): share for names, share in columns}


def _masses(sums: BinSums, algorithm: Algorithm) -> Tensor:
    """Return the mass of each bin, float64 [K+1], from one right and one wrong answer per bin with its mean lengths."""
    k = sums.rollouts_per_prompt
    inner_B = torch.arange(1, k)
    verdicts_BK = (torch.arange(k) < inner_B[:, None]).to(torch.float64)
    ids_BK = inner_B[:, None].expand(k - 1, k)
    advantages_BK = algorithm.advantages(verdicts_BK.reshape(-1), ids_BK.reshape(-1)).reshape(k - 1, k)
    tokens_B2 = torch.stack([sums.right_tokens, sums.wrong_tokens], dim=1)[1:-1]
    counts_B2 = torch.stack([inner_B, k - inner_B], dim=1) * sums.groups[1:-1, None]
    lengths_B2 = tokens_B2 / counts_B2.clamp(min=1)
    samples = Samples(
        bins_N=inner_B.repeat_interleave(2),
        lengths_N=lengths_B2.reshape(-1),
        advantages_N=advantages_BK[:, [0, -1]].reshape(-1),
        group_lengths_NK=torch.where(verdicts_BK > 0, lengths_B2[:, :1], lengths_B2[:, 1:]).repeat_interleave(2, dim=0),
    )
    totals = StepTotals(sums.tokens.round().to(torch.int64)[:, None], (sums.groups * k).round().to(torch.int64))
    mass_B2 = algorithm.coefficients(samples, totals) * samples.advantages_N.abs() * tokens_B2.reshape(-1)
    return torch.nn.functional.pad(mass_B2.reshape(k - 1, 2).sum(dim=1), (1, 1))
