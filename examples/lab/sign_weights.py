"""DARO with weights that see the sign of the advantage: two of them, and what each can learn.

`DaroSign` has a weight per pass rate and verdict, learnt from loss magnitudes as DARO's are. `DaroTaught` has one per
band of pass rates and verdict, learnt from gradients. Where each comes to rest, and why magnitudes say little about a
verdict, is derived in sign_weights.md. In a configuration: `sign_weights:DaroSign`; `DaroTaught` needs the closed-form
worlds, which hand it gradients.

Shape letters: N samples, K rollouts per prompt, B = K+1 bins, C cells, R losses, D parameters. A cell is a bin, or a
band of them, and a verdict: (wrong, right) of the lowest first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from megatron_daro.algo.algorithm import BatchTotals, Common, SampleAlgorithm, Samples, StepStats, inverse
from megatron_daro.algo.difficulty_weights import column
from megatron_daro.errors import AlgorithmError, CheckpointError, NonFiniteError

_SWEEPS, _CLOSE = 200, 1e-12


class DaroSign(SampleAlgorithm):
    """DARO with a weight per pass rate and verdict: w_ks / N' on |A|, w_ks the inverse of a mean |token loss|.

    M_ks is the sum of |l_t| over the right (or wrong) answers of bin k over the tokens of all answers of bin k, both
    averaged over steps with a half-life before they are divided: of a step with few groups in a bin little is learnt.
    w_ks = 1 / M_ks is the minimum of w M - ln w. The policy sees one denominator, N', the trained tokens of the step.

    With ratio 1 and rewards of 0 and 1 the weights rest at w_k+ = (mu l+ + (1 - mu) l-) / (sqrt(mu (1 - mu)) l+), and
    w_k- with l- in the place of the last l+: the only thing that the sign of A adds is the ratio of lengths.
    """

    name = "daro_sign"
    dynamic_filter = True

    def __init__(
        self, *, half_life: float = 10.0, clamp: tuple[float, float] = (0.1, 10.0), **common: Unpack[Common]
    ) -> None:
        """Take the options of `Algorithm`. All weights start at 1.

        Args:
            half_life: steps after which half of an average is newer; above 0.
            clamp: (lowest, highest) weight, with 0 < lowest <= 1 <= highest.

        Raises:
            AlgorithmError: an option is out of range.
        """
        super().__init__(**common)
        self.half_life, self.clamp = _half_life(half_life), _clamp(clamp)
        # Sums of |l| [K+1, 2] and tokens [K+1], as shares of N'; a start of equal ones puts every weight at 1.
        bins = self.rollouts_per_prompt + 1
        self._losses_B2 = torch.full((bins, 2), 1 / (bins - 2), dtype=torch.float64)
        self._tokens_B = torch.full((bins,), 1 / (bins - 2), dtype=torch.float64)

    @property
    def sign_weights(self) -> Tensor:
        """float64 [K+1, 2]: of wrong and of right answers; bins 0 and K stay at 1."""
        weights_B2 = (self._tokens_B[:, None] / self._losses_B2.clamp(min=1e-300)).clamp(*self.clamp)
        weights_B2[0] = weights_B2[-1] = 1.0
        return weights_B2

    @property
    def weights(self) -> Tensor:
        """float64 [K+1]: the mean of both verdicts."""
        return self.sign_weights.mean(dim=1)

    @property
    def clamped(self) -> int:
        """See `Algorithm.clamped`."""
        inner = self.sign_weights[1:-1]
        return int(((inner <= self.clamp[0]) | (inner >= self.clamp[1])).sum())

    def coefficients(self, samples: Samples, totals: BatchTotals) -> Tensor:
        """See `Algorithm.coefficients`."""
        right_N = (samples.advantages_N > 0).long()
        weights_N = self.sign_weights.to(samples.bins_N.device)[samples.bins_N, right_N]
        kept_N = self._mixed(samples.bins_N) & (samples.lengths_N > 0)
        return torch.where(kept_N, weights_N * inverse(totals.kept_tokens), 0.0)

    def learn(self, step_stats: StepStats) -> None:
        """Move the averages by one step.

        A token's loss has the sign of -A, so sums of l and of |l| give those of right and of wrong answers.

        Raises:
            NonFiniteError: a sum is NaN or infinite; the weights are left as they were.
        """
        tokens = step_stats.totals.kept_tokens
        if not tokens:
            return
        signed_B, absolute_B = (step_stats.per_bin(name).cpu() for name in ("loss_sums", "abs_loss_sums"))
        losses_B2 = torch.stack([absolute_B + signed_B, absolute_B - signed_B], dim=1) / 2 / tokens
        if not bool(torch.isfinite(losses_B2).all()):
            raise NonFiniteError("sums of token losses are not finite; the weights were not changed")
        share = 1 - 2 ** (-1 / self.half_life)
        self._losses_B2 = self._losses_B2 + share * (losses_B2 - self._losses_B2)
        tokens_B = step_stats.totals.tokens_per_bin.cpu().to(torch.float64) / tokens
        self._tokens_B = self._tokens_B + share * (tokens_B - self._tokens_B)

    def state_dict(self) -> dict[str, Any]:
        """Return both averages."""
        own = {"losses": self._losses_B2.flatten().tolist(), "tokens": self._tokens_B.tolist()}
        return {**super().state_dict(), **own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raise CheckpointError for another algorithm, another K, or a torn state; a refused one changes nothing."""
        super().load_state_dict(state)
        losses = column(state, "losses", self._losses_B2.numel(), "sign weights")
        tokens = column(state, "tokens", len(self._tokens_B), "sign weights")
        if bool((losses < 0).any()) or bool((tokens < 0).any()):
            raise CheckpointError("sign weights: the saved averages have numbers below 0; the checkpoint is edited")
        self._losses_B2, self._tokens_B = losses.reshape(-1, 2), tokens


class DaroTaught(SampleAlgorithm):
    """DAPO with a weight per band of pass rates and verdict, which gradients teach.

    x_c is the gradient that the answers of cell c give to a step (each with coefficient 1 / N'), v the average, with a
    half-life, of the gradient of the mean reward in the steps before. The weights are the minimum of
        1/2 |v - s sum of w_c x_c|^2 / u + strength * sum of (w_c - ln w_c)
    over averages of the products of x and v, with the scale s that is best for equal weights, and the unit u in which
    these have the curvature C. They make of a step the best estimate of where the reward rises on other prompts;
    -ln w keeps them above 0, and with an infinite strength they are 1, which is DAPO.

    Costs a gradient per cell: C buffers in the place of one, and no further pass where the cells go backward one after
    the other. The lab takes passes of their own.
    """

    name = "daro_taught"
    dynamic_filter = True

    def __init__(
        self,
        *,
        edges: Sequence[float] = (1 / 3, 2 / 3),
        half_life: float = 20.0,
        strength: float = 0.05,
        rest_steps: int = 10,
        clamp: tuple[float, float] = (0.1, 10.0),
        **common: Unpack[Common],
    ) -> None:
        """Take the options of `Algorithm`. All weights start at 1.

        Args:
            edges: pass rates at which a new band begins, rising, between 0 and 1; none: a weight per verdict alone.
            half_life: steps after which half of an average is newer; above 0.
            strength: of the barrier, above 0.
            rest_steps: steps before the weights move.
            clamp: (lowest, highest) weight, with 0 < lowest <= 1 <= highest.

        Raises:
            AlgorithmError: an option is out of range.
        """
        super().__init__(**common)
        if list(edges) != sorted(set(edges)) or not all(0 < edge < 1 for edge in edges):
            raise AlgorithmError(f"edges: got {edges}, allowed are rising pass rates between 0 and 1")
        if not 0 < strength < math.inf:
            raise AlgorithmError(f"strength: got {strength}, allowed is a number above 0")
        if rest_steps < 0:
            raise AlgorithmError(f"rest_steps: got {rest_steps}, allowed is 0 or more")
        self.half_life, self.clamp = _half_life(half_life), _clamp(clamp)
        self.strength, self.rest_steps = float(strength), int(rest_steps)
        mu_B = torch.arange(self.rollouts_per_prompt + 1, dtype=torch.float64) / self.rollouts_per_prompt
        self._band_B = torch.bucketize(mu_B, torch.tensor(edges, dtype=torch.float64), right=True)
        cells = 2 * (len(edges) + 1)
        self._weights_C = torch.ones(cells, dtype=torch.float64)
        self._products_CC = torch.zeros(cells, cells, dtype=torch.float64)
        self._progress_C = torch.zeros(cells, dtype=torch.float64)
        self._uphill_D: Tensor | None = None
        self._steps, self._taught = 0, False

    @property
    def sign_weights(self) -> Tensor:
        """float64 [K+1, 2]: of wrong and of right answers of each bin; nothing is trained in bins 0 and K."""
        return self._weights_C.reshape(-1, 2)[self._band_B]

    @property
    def weights(self) -> Tensor:
        """float64 [K+1]: the mean of both verdicts."""
        return self.sign_weights.mean(dim=1)

    @property
    def clamped(self) -> int:
        """See `Algorithm.clamped`; counts cells."""
        return int(((self._weights_C <= self.clamp[0]) | (self._weights_C >= self.clamp[1])).sum())

    def coefficients(self, samples: Samples, totals: BatchTotals) -> Tensor:
        """See `Algorithm.coefficients`."""
        return self._plain(samples, totals) * self._weights_C[self._cells(samples)]

    def gradient_rows(self, samples: Samples, totals: BatchTotals) -> Tensor:
        """Return what the sums of token losses are multiplied by in each of the losses whose gradients teach.

        Args:
            samples, totals: as in `coefficients`.

        Returns:
            float64 [C+1, N]: each cell by itself; then all, with R - mean in the place of A (rewards of 0 and 1).
        """
        plain_N, mu_N = self._plain(samples, totals), samples.bins_N.to(torch.float64) / self.rollouts_per_prompt
        cells_CN = torch.arange(len(self._weights_C))[:, None] == self._cells(samples)
        return torch.cat([plain_N * cells_CN, (plain_N * (mu_N * (1 - mu_N)).sqrt())[None]])

    def learn_from_gradients(self, gradients_RD: Tensor) -> None:
        """Move the weights by one step; called before `learn`, after the coefficients of the step were taken.

        Args:
            gradients_RD: float64 [C+1, D], gradients of the losses of `gradient_rows`.

        Raises:
            NonFiniteError: one is NaN or infinite; the weights are left as they were.
        """
        if not bool(torch.isfinite(gradients_RD).all()):
            raise NonFiniteError("the gradients of the cells are not finite; the weights were not changed")
        cells_CD, reward_D, share = gradients_RD[:-1], gradients_RD[-1], 1 - 2 ** (-1 / self.half_life)
        self._taught = True
        if self._uphill_D is None:
            self._uphill_D = reward_D.clone()
            return
        self._steps += 1
        rate = max(share, 1 / self._steps)
        self._products_CC = self._products_CC + rate * (cells_CD @ cells_CD.T - self._products_CC)
        self._progress_C = self._progress_C + rate * (cells_CD @ self._uphill_D - self._progress_C)
        self._uphill_D = self._uphill_D + max(share, 1 / (self._steps + 1)) * (reward_D - self._uphill_D)
        if self._steps > self.rest_steps:
            best_C = best_weights(self._products_CC, self._progress_C, self.strength, self._weights_C)
            self._weights_C = best_C.clamp(*self.clamp)

    def learn(self, step_stats: StepStats) -> None:
        """Raise AlgorithmError where no gradients came: the weights would stay at 1 and nobody would see it."""
        if not self._taught:
            raise AlgorithmError(
                "algorithm daro_taught: got a step without the gradients of its cells, allowed is the lab's "
                "closed-form worlds, which hand them over; choose daro or dapo here"
            )
        self._taught = False

    def state_dict(self) -> dict[str, Any]:
        """Raise AlgorithmError: its average gradient is as large as the policy."""
        raise AlgorithmError("algorithm daro_taught: it has no checkpoints; it is one of the closed-form worlds only")

    def _cells(self, samples: Samples) -> Tensor:
        """int64 [N], 0..C-1."""
        return 2 * self._band_B[samples.bins_N] + (samples.advantages_N > 0).long()

    def _plain(self, samples: Samples, totals: BatchTotals) -> Tensor:
        kept_N = self._mixed(samples.bins_N) & (samples.lengths_N > 0)
        return torch.where(kept_N, torch.tensor(inverse(totals.kept_tokens), dtype=torch.float64), 0.0)


def best_weights(products: Tensor, progress: Tensor, strength: float, start: Tensor) -> Tensor:
    """Return the minimum of 1/2 w'Mw - w'g + strength * sum of (w - ln w), M and g in the unit of equal weights.

    Args:
        products: float64 [C, C], averages of x_s . x_t. progress: float64 [C], of x_s . v. strength: above 0.
        start: float64 [C], where the search begins; returned as it is where equal weights make no progress, since then
            there is nothing to learn from.

    Returns:
        float64 [C], above 0.
    """
    cells, curvature, slope = len(progress), float(products.sum()), float(progress.sum())
    if not (curvature > 0 and slope > 0):
        return start
    m = (products * (cells / curvature)).tolist()
    g = (progress * (cells / slope)).tolist()
    w = start.tolist()
    for _ in range(_SWEEPS):
        moved = 0.0
        for i in range(cells):
            # Exact in one weight: a w^2 + b w - strength = 0.
            a, b = m[i][i], sum(m[i][j] * w[j] for j in range(cells) if j != i) - g[i] + strength
            new = (math.sqrt(b * b + 4 * a * strength) - b) / (2 * a) if a > 0 else strength / max(b, 1e-300)
            moved, w[i] = max(moved, abs(new - w[i])), new
        if moved < _CLOSE:
            break
    return torch.tensor(w, dtype=torch.float64)


def _half_life(value: float) -> float:
    if not 0 < value < math.inf:
        raise AlgorithmError(f"half_life: got {value}, allowed is a number of steps above 0")
    return float(value)


def _clamp(value: tuple[float, float]) -> tuple[float, float]:
    if len(value) != 2 or not 0 < value[0] <= 1 <= value[1] < math.inf:
        raise AlgorithmError(f"clamp: got {value}, allowed are two numbers with 0 < lowest <= 1 <= highest")
    return float(value[0]), float(value[1])
