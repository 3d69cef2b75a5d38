"""lambda-GRPO: a learnt preference for the longer or the shorter answers of each group.

As every algorithm (see `algorithm`), with the lengths of each sample's whole group: they are
put beside the samples before these are split over ranks. Refuses groups so large that its formula has no value.

Shape letters: N samples, K rollouts per prompt.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from megatron_daro.algo.algorithm import BatchTotals, Common, SampleAlgorithm, Samples, StepStats, token_mean
from megatron_daro.algo.difficulty_weights import Adam
from megatron_daro.errors import AlgorithmError, CheckpointError, NonFiniteError


class LambdaGrpo(SampleAlgorithm):
    """lambda-GRPO: GRPO's advantage times K softmax_j(h_j^lambda) over the group, h = 1 + spread * z.

    z is the length less the group's mean over its (population) standard deviation; equal lengths give z = 0. lambda 0
    is a plain token mean; above 0 longer answers count more. The weights of a group sum to K. lambda descends the
    policy loss: for the policy it is a constant, for lambda the losses are.

    Source: arXiv 2510.06870 (its text could not be had whole: formula from a summary and its public reviews, which give
    h, the exponent, the softmax, the scaling and 1/9). Open, and chosen: lambda starts at 0; Adam, 0.01, betas 0.9 and
    0.999; lengths are trained tokens.
    """

    name = "lambda_grpo"
    needs_group_lengths = True

    def __init__(
        self,
        *,
        learning_rate: float = 0.01,
        betas: tuple[float, float] = (0.9, 0.999),
        spread: float = 1 / 9,
        **common: Unpack[Common],
    ) -> None:
        """Take the options of `Algorithm`, Adam's learning rate and betas, and spread in (0, 1).

        Raises:
            AlgorithmError: an option is out of range, or spread * sqrt(K - 1) is 1 or more: the shortest answer of a
                group can be sqrt(K - 1) deviations below the mean, where h^lambda would have no value.
        """
        super().__init__(**common)
        if not 0 < spread < 1:
            raise AlgorithmError(f"spread: got {spread}, allowed is a number above 0 and below 1")
        furthest = math.sqrt(self.rollouts_per_prompt - 1)
        if spread * furthest >= 1:
            raise AlgorithmError(
                f"spread: got {spread:g} with {self.rollouts_per_prompt} rollouts per prompt, allowed is a number "
                f"below {1 / furthest:g}: an answer much shorter than the others would have h of 0 or less"
            )
        self.spread = float(spread)
        self._lambda = 0.0
        self._adam = Adam(1, learning_rate=learning_rate, betas=betas)

    @property
    def exponent(self) -> float:
        """Lambda."""
        return self._lambda

    def coefficients(self, samples: Samples, totals: BatchTotals) -> Tensor:
        """See `Algorithm.coefficients`."""
        weights_N, _ = self._weights(samples)
        return token_mean(samples.lengths_N, totals) * weights_N

    def coefficient_slopes(self, samples: Samples, totals: BatchTotals) -> Tensor:
        """float64 [1, N]: the derivative by lambda."""
        _, slopes_N = self._weights(samples)
        return (token_mean(samples.lengths_N, totals) * slopes_N)[None]

    def _weights(self, samples: Samples) -> tuple[Tensor, Tensor]:
        """K softmax(g)_i with g = h^lambda, and its derivative by lambda: f_i (g_i ln h_i - mean of g ln h under f)."""
        if samples.group_lengths_NK is None:
            raise AlgorithmError(
                "lambda_grpo: got samples without the lengths of their groups, allowed is with group_lengths_NK; "
                "build the batch with this algorithm, whose `needs_group_lengths` says so"
            )
        lengths_NK = samples.group_lengths_NK.to(torch.float64)
        h_NK = self._relative(lengths_NK)
        own_N = self._relative(lengths_NK, samples.lengths_N.to(torch.float64))
        g_NK, g_N = h_NK**self._lambda, own_N**self._lambda
        share_NK = torch.softmax(g_NK, dim=1)
        weights_N = self.rollouts_per_prompt * torch.exp(g_N - torch.logsumexp(g_NK, dim=1))
        mean_N = (share_NK * g_NK * h_NK.log()).sum(dim=1)
        return weights_N, weights_N * (g_N * own_N.log() - mean_N)

    def _relative(self, lengths_NK: Tensor, own_N: Tensor | None = None) -> Tensor:
        """Return h of the whole groups [N, K], or of one length of each [N]."""
        mean_N = lengths_NK.mean(dim=1)
        std_N = (lengths_NK - mean_N[:, None]).square().mean(dim=1).sqrt()
        safe_N = torch.where(std_N > 0, std_N, 1.0)
        if own_N is not None:
            return 1 + self.spread * (own_N - mean_N) / safe_N
        return 1 + self.spread * (lengths_NK - mean_N[:, None]) / safe_N[:, None]

    def learn(self, step_stats: StepStats) -> None:
        """One Adam step of lambda down the policy loss.

        Raises:
            NonFiniteError: the slope is not finite; lambda is left as it was.
        """
        if not bool(torch.isfinite(step_stats.slopes).all()):
            raise NonFiniteError("the slope of lambda is not finite; lambda was not changed")
        moves = self._adam.moves(step_stats.slopes.to("cpu", torch.float64), torch.ones(1, dtype=torch.bool))
        self._lambda -= float(moves[0])

    def state_dict(self) -> dict[str, Any]:
        """Return lambda and Adam's state."""
        return {**super().state_dict(), "lambda": self._lambda, "adam": self._adam.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raise CheckpointError for another algorithm or a torn state; a refused one changes nothing."""
        super().load_state_dict(state)
        value, adam = state.get("lambda"), state.get("adam")
        if not isinstance(value, float) or not math.isfinite(value) or not isinstance(adam, Mapping):
            raise CheckpointError(
                f"algorithm state, lambda: the saved state has {value!r} with adam {adam!r}, allowed are a finite "
                "number and Adam's state; the checkpoint is torn or edited"
            )
        self._adam.load_state_dict(adam, "algorithm state, adam")
        self._lambda = value
