"""PPO with a critic: advantages per token from the critic's values, the critic's targets, and its loss.

Columns of a batch (values, mask, rewards) -> generalized advantages over the model's own tokens -> the policy's
advantages per token, and the critic's targets -> `value_losses`. Tokens that an environment wrote are skipped: the
value after a token is the one before the model's next own token. Refuses options out of range.

Shape letters: N samples, R their response tokens end to end, S own (trained) tokens of the sample with the most, T
tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_daro.algo.algorithm import Algorithm, StepTotals, token_mean
from megatron_daro.algo.token_columns import TokenColumns
from megatron_daro.errors import AlgorithmError

_WHITENING_EPS = 1e-8


@dataclass(frozen=True, slots=True)
class GaeOptions:
    """How advantages per token follow from values: the options of `WithCritic`."""

    gamma: float
    gae_lambda: float
    critic_lambda: float | None
    length_factor: float | None
    bootstrap_truncated: bool
    whiten: bool

    def __post_init__(self) -> None:
        """Raise AlgorithmError if an option is out of range."""
        for name in ("gamma", "gae_lambda", "critic_lambda"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise AlgorithmError(f"{name}: got {value}, allowed is a number from 0 to 1")
        if self.length_factor is not None and not self.length_factor > 0:
            raise AlgorithmError(f"length_factor: got {self.length_factor}, allowed is a number above 0, or none")


def generalized_advantages(
    values_NS: Tensor,
    rewards_N: Tensor,
    lengths_N: Tensor,
    goes_on_N: Tensor,
    *,
    gamma: float,
    lambda_N: Tensor,
    token_rewards_NS: Tensor | None = None,
) -> Tensor:
    """Return sum over j of (gamma lambda)^j delta_{t+j}, delta_t = r_t + gamma V_{t+1} - V_t. The reward r is that of
    the sample at its last token, and 0 before, plus the rewards of tokens; V is 0 after the last token.

    Args:
        values_NS: float64 [N, S], of the state before each own token; not read after a sample's end.
        rewards_N: float64 [N]. lengths_N: int64 [N], own tokens of each sample. lambda_N: float64 [N].
        goes_on_N: bool [N], samples whose last value stands for everything that would follow: their last token has
            advantage 0, and neither their reward nor the last token's own reward is read.
        token_rewards_NS: float64 [N, S], 0 after a sample's end; None: 0.

    Returns:
        float64 [N, S], 0 after a sample's end.

    Source: GAE, arXiv 1506.02438, eq. 16; time limits, arXiv 1712.00378, section 3.
    """
    number_S = torch.arange(values_NS.shape[1])
    values_NS = torch.where(number_S < lengths_N[:, None], values_NS, 0.0)
    last_NS = number_S == lengths_N[:, None] - 1
    next_NS = torch.nn.functional.pad(values_NS[:, 1:], (0, 1))
    deltas_NS = gamma * next_NS - values_NS + torch.where(last_NS, rewards_N[:, None], 0.0)
    if token_rewards_NS is not None:
        deltas_NS = deltas_NS + token_rewards_NS
    deltas_NS = torch.where(last_NS & goes_on_N[:, None], 0.0, deltas_NS)
    return _discounted_sums(deltas_NS, gamma * lambda_N)


def _discounted_sums(terms_NS: Tensor, factor_N: Tensor) -> Tensor:
    """Return sum over j of factor^j term_{t+j}, [N, S]. Each round doubles the number of terms in the sums, so that 32k
    tokens take 15 rounds and not 32k."""
    sums_NS, reach = terms_NS, 1
    while reach < terms_NS.shape[1]:
        later_NS = torch.nn.functional.pad(sums_NS[:, reach:], (0, reach))
        sums_NS = sums_NS + (factor_N**reach)[:, None] * later_NS
        reach *= 2
    return sums_NS


def value_losses(
    values_T: Tensor, old_values_T: Tensor, targets_T: Tensor, clip: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return half the squared error of each token, and for which tokens the clip determines it.

    Args:
        values_T: of the current critic, differentiable. old_values_T: of the critic with which the batch began.
        targets_T: see `Algorithm.value_targets`.
        clip: most that a value may differ from the old one; beyond this the error of the clipped value counts, if it is
            larger. None: no clip.

    Returns:
        losses_T, clipped_T (bool), both [T].

    Source: TRL 0.19.1, trainer/ppo_trainer.py, lines 566 to 574.
    """
    errors_T = (values_T - targets_T).square()
    if clip is None:
        return 0.5 * errors_T, torch.zeros_like(errors_T, dtype=torch.bool)
    stopped_T = old_values_T + (values_T - old_values_T).clamp(-clip, clip)
    worse_T = (stopped_T - targets_T).square()
    return 0.5 * torch.maximum(errors_T, worse_T), worse_T > errors_T


class Gae:
    """Advantages and targets of a step's samples."""

    def __init__(self, options: GaeOptions) -> None:
        """Keep the options."""
        self._options = options

    def advantages(self, tokens: TokenColumns) -> Tensor:
        """Return float64 [R], see `Algorithm.token_advantages`. Whitening calls `sum_over_step` twice."""
        options, own = self._options, _OwnTokens(tokens)
        lambda_N = torch.full_like(tokens.rewards_N, options.gae_lambda)
        if options.length_factor is not None:
            lambda_N = (1 - 1 / (options.length_factor * own.lengths_N.double().clamp(min=1))).clamp(min=0.0)
        advantages_R = own.end_to_end(self._raw(tokens, own, lambda_N))
        there_R = tokens.mask_R & ~own.end_to_end(own.last_NS & self._goes_on(tokens)[:, None])
        if options.whiten:
            advantages_R = whitened(advantages_R, there_R, tokens)
        return torch.where(there_R, advantages_R, 0.0)

    def targets(self, tokens: TokenColumns) -> Tensor:
        """Return float64 [R], see `Algorithm.value_targets`."""
        options, own = self._options, _OwnTokens(tokens)
        given = options.gae_lambda if options.critic_lambda is None else options.critic_lambda
        raw_NS = self._raw(tokens, own, torch.full_like(tokens.rewards_N, given))
        return own.end_to_end(raw_NS + own.rows(tokens.columns["values"]))

    def _raw(self, tokens: TokenColumns, own: _OwnTokens, lambda_N: Tensor) -> Tensor:
        return generalized_advantages(
            own.rows(tokens.columns["values"]),
            tokens.rewards_N,
            own.lengths_N,
            self._goes_on(tokens),
            gamma=self._options.gamma,
            lambda_N=lambda_N,
            token_rewards_NS=None if tokens.token_rewards_R is None else own.rows(tokens.token_rewards_R),
        )

    def _goes_on(self, tokens: TokenColumns) -> Tensor:
        return tokens.truncated_N if self._options.bootstrap_truncated else torch.zeros_like(tokens.truncated_N)


class _OwnTokens:
    """The trained tokens of each sample, one after another from the start of its row."""

    def __init__(self, tokens: TokenColumns) -> None:
        self._mask_R = tokens.mask_R
        sample_R = torch.arange(len(tokens.lengths_N)).repeat_interleave(tokens.lengths_N)
        self.lengths_N = torch.bincount(sample_R[tokens.mask_R], minlength=len(tokens.lengths_N))
        number_S = torch.arange(max(self.lengths_N.tolist(), default=0))
        self._there_NS = number_S < self.lengths_N[:, None]
        self.last_NS = number_S == self.lengths_N[:, None] - 1

    def rows(self, values_R: Tensor) -> Tensor:
        """Return a column as rows [N, S], 0 after a sample's end."""
        rows_NS = values_R.new_zeros(self._there_NS.shape)
        rows_NS[self._there_NS] = values_R[self._mask_R]
        return rows_NS

    def end_to_end(self, rows_NS: Tensor) -> Tensor:
        """Return rows as a column [R], 0 where the mask is not set."""
        values_R = rows_NS.new_zeros(len(self._mask_R))
        values_R[self._mask_R] = rows_NS[self._there_NS]
        return values_R


def whitened(values_R: Tensor, there_R: Tensor, tokens: TokenColumns) -> Tensor:
    """Return the values less their mean, divided by their standard deviation (with n - 1, as in TRL and verl). Both are
    taken over the tokens of the whole step where `there_R` is set."""
    kept_R = torch.where(there_R, values_R, 0.0)
    count, total = tokens.sum_over_step(torch.stack([there_R.sum().double(), kept_R.sum()])).tolist()
    centred_R = torch.where(there_R, values_R - total / max(count, 1.0), 0.0)
    squares = float(tokens.sum_over_step(centred_R.square().sum()))
    return centred_R / (squares / max(count - 1.0, 1.0) + _WHITENING_EPS) ** 0.5


class WithCritic(Algorithm):
    """An algorithm whose advantages per token come from a critic."""

    advantage_std = "none"
    std_allowed = ("none",)
    token_columns = ("values",)

    def __init__(
        self,
        *,
        gamma: float = 1.0,
        gae_lambda: float = 1.0,
        critic_lambda: float | None = None,
        length_factor: float | None = None,
        bootstrap_truncated: bool = False,
        whiten: bool = True,
        **options: Any,
    ) -> None:
        """Take the options of the class that this one is mixed into, and:

        Args:
            gamma: discount of each own token, 0 to 1.
            gae_lambda: lambda of the policy's advantages, 0 to 1; 1: an advantage is the return less the value; 0: the
                error of one token's value.
            critic_lambda: lambda of the critic's targets, 0 to 1 (VC-PPO: 1 with a smaller gae_lambda). Unset:
                gae_lambda.
            length_factor: VAPO's alpha, above 0: the policy's lambda is 1 - 1 / (alpha * own tokens), for each answer.
                Unset: gae_lambda.
            bootstrap_truncated: true: an answer that was cut at the token limit is taken to go on as the critic
                expects: the value before its last token stands for everything that follows, so that token has advantage
                0. false: the answer ends there, with its reward.
            whiten: scale advantages to mean 0 and variance 1 over the step's tokens.
        """
        super().__init__(**options)
        self._gae = Gae(
            GaeOptions(
                gamma=gamma,
                gae_lambda=gae_lambda,
                critic_lambda=critic_lambda,
                length_factor=length_factor,
                bootstrap_truncated=bootstrap_truncated,
                whiten=whiten,
            )
        )

    def advantages(self, rewards_N: Tensor, group_ids_N: Tensor) -> Tensor:
        """Return the rewards as they are: the critic gives the baseline."""
        wrong_N = ~torch.isfinite(rewards_N)
        if bool(wrong_N.any()):
            where = int(wrong_N.nonzero()[0])
            raise AlgorithmError(f"rewards_N[{where}]: got {float(rewards_N[where])}, allowed are finite numbers")
        return rewards_N if rewards_N.is_floating_point() else rewards_N.float()

    def token_advantages(self, tokens: TokenColumns) -> Tensor:
        """See `Gae.advantages`."""
        return self._gae.advantages(tokens)

    def value_targets(self, tokens: TokenColumns) -> Tensor:
        """See `Gae.targets`."""
        return self._gae.targets(tokens)


class Ppo(WithCritic):
    """PPO: advantages per token from a critic, in the mean over all trained tokens of the step.

    Source: arXiv 1707.06347; no discount and lambda 1 by default, as in Open-Reasoner-Zero, arXiv 2503.24290; another
    lambda for the critic, VC-PPO, arXiv 2503.01491; lambda by length, VAPO, arXiv 2504.05118, section 4.2.
    """

    name = "ppo"

    def bin_coefficients(self, bins_N: Tensor, lengths_N: Tensor, totals: StepTotals) -> Tensor:
        """See `Algorithm.bin_coefficients`."""
        return token_mean(lengths_N, totals)
