"""Algorithms that the lab compared and the product does not have; a configuration names each `lab_algorithms:Class`.

They are examples of algorithms of one's own (docs/algorithms.md). Put this folder into PYTHONPATH on every machine of
the run. Options go into `algorithm.options`. LambdaGrpo and magnitude "gradient" learn from sums that only the
closed-form worlds make (closed_run.py); `megatron-daro train` ends with an error at their first step.

Shape letters: N samples, K rollouts per prompt, L classes of lengths, J kernels, C = (K+1) L cells, bin by bin; P
learned numbers (one per cell, or one per kernel and class). Cells of bins 0 and K carry no signal.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from megatron_daro.algo.algorithm import (
    Common,
    SampleAlgorithm,
    Samples,
    StepStats,
    StepTotals,
    token_mean,
)
from megatron_daro.algo.difficulty_weights import LEAST_MASS, Adam, DifficultyWeights
from megatron_daro.algo.histories import saved_number, torn_entry
from megatron_daro.algo.weighting import Daro
from megatron_daro.errors import AlgorithmError, CheckpointError, NonFiniteError


def gaussian_basis(rollouts_per_prompt: int, kernels: int, length_classes: int = 1) -> Tensor:
    """Return Gaussian bumps over the pass rate that sum to 1 at every pass rate, separately for each class of lengths.

    Args:
        rollouts_per_prompt: K. kernels: J, 2 or more; centres (j + 1/2) / J, standard deviation 1 / (2 J).
        length_classes: L.

    Returns:
        float64 [J L, (K+1) L]; 0 for bins 0 and K.
    """
    mu_B = torch.arange(rollouts_per_prompt + 1, dtype=torch.float64) / rollouts_per_prompt
    centres_J = (torch.arange(kernels, dtype=torch.float64) + 0.5) / kernels
    bumps_JB = torch.exp(-2.0 * ((mu_B - centres_J[:, None]) * kernels).square())
    bumps_JB = bumps_JB / bumps_JB.sum(dim=0)
    bumps_JB[:, 0] = bumps_JB[:, -1] = 0.0
    return torch.kron(bumps_JB, torch.eye(length_classes, dtype=torch.float64))


class CellWeights(DifficultyWeights):
    """DARO's weights per bin and class of lengths, or as a sum of kernels over the pass rate, or by gradient norms.

    kernels J: ln w(mu) = sum over j of theta_j phi_j(mu), Gaussians with centres (j + 1/2) / J and deviation 1 / (2 J)
    that add up to 1. At the fixed point the mean of w m within each kernel is 1.

    Magnitude "gradient" is GradNorm's aim (arXiv 1711.02257, alpha 0) without a backward pass per cell: m = n / mean of
    n over the present cells, n = sqrt(sum of g_t^2) / tokens, g_t = dl_t / d log pi_t. Exact up to a constant if
    tokens' gradients are uncorrelated and of one size: it measures noise, not what a cell's tokens have in common.
    """

    sums_read = {**DifficultyWeights.sums_read, "gradient": "gradient_squares"}

    def __init__(
        self,
        rollouts_per_prompt: int,
        *,
        kernels: int | None = None,
        length_classes: int = 1,
        parameter: str = "log",
        **options: Any,
    ) -> None:
        """All weights start at 1.

        Args:
            rollouts_per_prompt: K, 2 or more.
            kernels: J, 2..K-1: this many learned numbers over the pass rate instead of K - 1. None: a number per cell.
            length_classes: L, 1 or more.
            parameter, options: of `DifficultyWeights`, and magnitude "gradient".

        Raises:
            AlgorithmError: an option is out of range.
        """
        if kernels is not None and not 2 <= kernels < rollouts_per_prompt:
            raise AlgorithmError(
                f"kernels: got {kernels}, allowed is 2 to {rollouts_per_prompt - 1} (rollouts_per_prompt - 1), or None "
                "for a number per pass rate"
            )
        if parameter == "linear" and kernels is not None:
            raise AlgorithmError(
                "parameter: got 'linear' with kernels, allowed is 'log'; what is learnt is not w there"
            )
        if length_classes < 1:
            raise AlgorithmError(f"length_classes: got {length_classes}, allowed is 1 or more")
        self.kernels, self.length_classes = kernels, length_classes
        self._basis = None if kernels is None else gaussian_basis(rollouts_per_prompt, kernels, length_classes)
        super().__init__(rollouts_per_prompt, parameter=parameter, **options)  # type: ignore[arg-type]  # it checks

    @property
    def num_classes(self) -> int:
        """L."""
        return self.length_classes

    def _sizes(self) -> tuple[int, int]:
        cells, _ = super()._sizes()
        return cells, cells if self._basis is None else len(self._basis)

    def _per_cell(self, numbers: Tensor) -> Tensor:
        return numbers.clone() if self._basis is None else numbers @ self._basis

    def _per_number(self, values: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
        mask = present.to(torch.float64)
        return (values, mask) if self._basis is None else (self._basis @ values, self._basis @ mask)

    def _inner(self, values: Tensor) -> Tensor:
        return super()._inner(values) if self._basis is None else values

    def _measure(self, sums: Tensor, over: Tensor, present: Tensor) -> Tensor:
        if self.magnitude != "gradient":
            return super()._measure(sums, over, present)
        norms = sums.sqrt() / over
        mean = norms.sum() / present.sum().clamp(min=1)
        return norms / torch.where(mean > 0, mean, 1.0)

    def _form(self) -> dict[str, Any]:
        form = super()._form()
        form |= {} if self.kernels is None else {"kernels": self.kernels}
        return form | ({} if self.length_classes == 1 else {"length_classes": self.length_classes})

    def _minimise(self, present: Tensor, measured: Tensor) -> None:
        if self._basis is None:
            super()._minimise(present, measured)
        else:
            self._descend(self._basis, present, measured)

    def _descend(self, basis: Tensor, present: Tensor, measured: Tensor) -> None:
        """Minimise sum of (w_k m_k - ln w_k), ln w = heights @ basis, within the clamp: convex, by Newton's steps."""
        low, high = self._value_bounds()
        phi_PC, m_C = basis[:, present], measured[present].clamp(min=0.0)

        def value(heights: Tensor) -> Tensor:
            return ((heights @ phi_PC).exp() * m_C - heights @ phi_PC).sum()

        for _ in range(100):
            wm_C = (self._values @ phi_PC).exp() * m_C
            slope = phi_PC @ (wm_C - 1)
            outwards = ((self._values <= low) & (slope > 0)) | ((self._values >= high) & (slope < 0))
            free = (~outwards & (phi_PC.sum(dim=1) >= LEAST_MASS)).nonzero().flatten()
            if not len(free) or float(slope[free].abs().max()) < 1e-13:
                return
            curvature = (phi_PC[free] * wm_C) @ phi_PC[free].T + 1e-12 * torch.eye(len(free), dtype=torch.float64)
            step, share = torch.zeros_like(slope).index_put((free,), torch.linalg.solve(curvature, slope[free])), 1.0
            while share > 1e-6 and value((self._values - share * step).clamp(low, high)) > value(self._values):
                share /= 2
            self._values = (self._values - share * step).clamp(low, high)


class DaroCells(Daro):
    """DARO with weights per pass rate and length, over kernels, or by gradient norms: see `CellWeights`."""

    def __init__(
        self,
        *,
        kernels: int | None = None,
        length_edges: Sequence[int] = (),
        std: Any = "auto",
        group_filter: Any = "auto",
        rollouts_per_prompt: int,
        max_response_tokens: int,
        **difficulty: Any,
    ) -> None:
        """Take the options of `Daro`.

        Args:
            kernels: see `CellWeights`.
            length_edges: trained tokens at which a new class of lengths begins, above 0 and rising: each class has
                weights of its own. Empty: one weight for all lengths.

        Raises:
            AlgorithmError: an option is out of range.
        """
        common = {"rollouts_per_prompt": rollouts_per_prompt, "max_response_tokens": max_response_tokens}
        super().__init__(**common, std=std, group_filter=group_filter)
        self.length_edges = tuple(length_edges)
        if list(self.length_edges) != sorted(set(self.length_edges)) or any(edge < 1 for edge in self.length_edges):
            raise AlgorithmError(f"length_edges: got {self.length_edges}, allowed are rising numbers of tokens above 0")
        classes = len(self.length_edges) + 1
        self.difficulty: CellWeights = CellWeights(
            rollouts_per_prompt, kernels=kernels, length_classes=classes, **difficulty
        )

    @property
    def classes(self) -> tuple[str, tuple[str, ...]]:
        """See `Algorithm.classes`."""
        return "length", tuple(map(str, range(len(self.length_edges) + 1)))

    def classes_of(self, samples: Samples) -> Tensor:
        """Return how many edges each length has reached."""
        return torch.bucketize(samples.lengths_N, samples.lengths_N.new_tensor(self.length_edges), right=True)

    def state_dict(self) -> dict[str, Any]:
        """Return the weights' state beside the name, and where lengths are divided."""
        edges = {"length_edges": list(self.length_edges)} if self.length_edges else {}
        return {**super().state_dict(), **edges}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raise CheckpointError for another algorithm, another K, other length edges, or a torn state."""
        if state.get("length_edges", []) != list(self.length_edges):
            raise CheckpointError(
                f"difficulty weights, length_edges: the saved state has {state.get('length_edges', [])}, this run has "
                f"{list(self.length_edges)}; set length_edges to the saved value, or start fresh"
            )
        super().load_state_dict(state)


class Fade(SampleAlgorithm):
    """FADE: (1 - mu)^(alpha - 1) (r - mu), over delta for wrong answers; two running averages set alpha and delta.

    alpha = clip(3 (1 - p) / (2 p), 1, max_power), p the average pass rate of the steps: hard questions first, GRPO's
    middle ones later. delta = clip(1 + H - target, min_scale, 1), H the average entropy: wrong answers are pushed down
    harder once the entropy is below its target.

    Source: arXiv 2607.01490, through a reader's notes with its formulas and pseudo-code (the whole paper was not
    available). The target is half of the first step's entropy unless given: what the paper found best. The averages
    start at 0.5 and at the first entropy; the weight of a new step in them is `rate`, 0.02. The notes print 0.02 as the
    old value's weight, with which hardly anything would be averaged.
    """

    name = "fade"
    weighs_by_advantage = True
    advantage_std = "none"
    std_defines = True

    def __init__(
        self,
        *,
        rate: float = 0.02,
        max_power: float = 3.0,
        min_scale: float = 0.3,
        target_entropy: float | None = None,
        **common: Unpack[Common],
    ) -> None:
        """Take the options of `Algorithm`; rate in (0, 1], max_power 1 or more, min_scale in (0, 1], target in nats.

        Raises:
            AlgorithmError: an option is out of range.
        """
        super().__init__(**common)
        for field, value in (("rate", rate), ("min_scale", min_scale)):
            if not 0 < value <= 1:
                raise AlgorithmError(f"{field}: got {value}, allowed is a number above 0 and at most 1")
        if not 1 <= max_power < math.inf:
            raise AlgorithmError(f"max_power: got {max_power}, allowed is 1 or more")
        if target_entropy is not None and not 0 <= target_entropy < math.inf:
            raise AlgorithmError(f"target_entropy: got {target_entropy}, allowed is 0 or more, or None")
        self.rate, self.max_power, self.min_scale = float(rate), float(max_power), float(min_scale)
        self._given_target = target_entropy
        self._target: float | None = target_entropy
        self._solved = 0.5
        self._entropy: float | None = None

    @property
    def power(self) -> float:
        """Alpha of the next step."""
        raw = math.inf if self._solved <= 0 else 3 * (1 - self._solved) / (2 * self._solved)
        return min(max(raw, 1.0), self.max_power)

    @property
    def wrong_scale(self) -> float:
        """Delta of the next step; 1 before an entropy was seen."""
        if self._entropy is None or self._target is None:
            return 1.0
        return min(max(1 + self._entropy - self._target, self.min_scale), 1.0)

    def coefficients(self, samples: Samples, totals: StepTotals) -> Tensor:
        """See `Algorithm.coefficients`."""
        mu_N = samples.bins_N.to(torch.float64) / self.rollouts_per_prompt
        factor_N = (1 - mu_N) ** (self.power - 1)
        factor_N = torch.where(samples.advantages_N < 0, factor_N / self.wrong_scale, factor_N)
        return token_mean(samples.lengths_N, totals) * factor_N

    def learn(self, step_stats: StepStats) -> None:
        """Move both averages."""
        self._solved += self.rate * (step_stats.totals.pass_rate - self._solved)
        if self._entropy is None:
            self._entropy = step_stats.entropy
            self._target = step_stats.entropy / 2 if self._given_target is None else self._given_target
        else:
            self._entropy += self.rate * (step_stats.entropy - self._entropy)

    def state_dict(self) -> dict[str, Any]:
        """Return both averages and the entropy's target."""
        own = {"solved": self._solved, "entropy": self._entropy, "target_entropy": self._target}
        return {**super().state_dict(), **own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raise CheckpointError for another algorithm or a torn state. A target in the options is kept."""
        super().load_state_dict(state)
        solved = saved_number("solved", state)
        if solved is None or not 0 <= solved <= 1:
            raise torn_entry("solved", solved, "a number from 0 to 1")
        entropy, target = saved_number("entropy", state), saved_number("target_entropy", state)
        self._solved, self._entropy = solved, entropy
        self._target = target if self._given_target is None else self._given_target


class LambdaGrpo(SampleAlgorithm):
    """lambda-GRPO: GRPO's advantage times K softmax_j(h_j^lambda) over the group, h = 1 + spread * z.

    z is the length less the group's mean over its (population) standard deviation; equal lengths give z = 0. lambda 0
    is a plain token mean; above 0 longer answers count more. The weights of a group sum to K. lambda descends the
    policy loss: lambda is a constant in the policy's gradient, and the token losses are in lambda's.

    Source: arXiv 2510.06870 (the whole text was not available: formula from a summary and its public reviews, which
    give h, the exponent, the softmax, the scaling and 1/9). Not stated there, and chosen here: lambda starts at 0;
    Adam, 0.01, betas 0.9 and 0.999; lengths are trained tokens.
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

    def coefficients(self, samples: Samples, totals: StepTotals) -> Tensor:
        """See `Algorithm.coefficients`."""
        weights_N, _ = self._weights(samples)
        return token_mean(samples.lengths_N, totals) * weights_N

    def coefficient_slopes(self, samples: Samples, totals: StepTotals) -> Tensor:
        """Return the derivative of `coefficients` by lambda, float64 [N]."""
        _, slopes_N = self._weights(samples)
        return token_mean(samples.lengths_N, totals) * slopes_N

    def _weights(self, samples: Samples) -> tuple[Tensor, Tensor]:
        """Return f_i = K softmax(g)_i, g = h^lambda, and df_i/dlambda = f_i (g_i ln h_i - mean of g ln h under f)."""
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
        """Take one Adam step of lambda down the policy loss, whose derivative, float64 [1], is the sum "lambda_slope".

        Raises:
            AlgorithmError: that sum is not there. NonFiniteError: it is not finite. Lambda is left as it was.
        """
        slope = step_stats.sums.get("lambda_slope")
        if slope is None:
            raise AlgorithmError(
                'lambda_grpo: got a step without the sum "lambda_slope", allowed is with it: it learns in the '
                "closed-form worlds of examples/lab alone"
            )
        if not bool(torch.isfinite(slope).all()):
            raise NonFiniteError("the slope of lambda is not finite; lambda was not changed")
        moves = self._adam.moves(slope, torch.ones(1, dtype=torch.bool))
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


class CountWeights(SampleAlgorithm):
    """Weighs samples by how seldom their pass rate has occurred so far: the DARO author's first idea, with the data
    order `data.prioritised.by: gaussian`.

    n_k counts groups of bin k in the steps before, from 1. `sqrt`: u_k = 1 / sqrt(n_k); `ucb`: u_k = 4 mu (1 - mu) +
    width sqrt(2 ln(sum of n) / n_k), the upper confidence bound of a bandit whose arms are pass rates and whose reward
    is the signal. The loss is the token mean with u over the step's mean of u.

    Source: none was published with formulas; this reading is the lab's.
    """

    name = "count_weights"
    advantage_std = "population"

    def __init__(self, *, kind: str = "sqrt", width: float = 1.0, **common: Unpack[Common]) -> None:
        """Take the options of `Algorithm`; kind sqrt or ucb, width 0 or more.

        Raises:
            AlgorithmError: an option is out of range.
        """
        super().__init__(**common)
        if kind not in ("sqrt", "ucb"):
            raise AlgorithmError(f"kind: got {kind!r}, allowed are 'sqrt' and 'ucb'")
        if not 0 <= width < math.inf:
            raise AlgorithmError(f"width: got {width}, allowed is 0 or more")
        self.kind, self.width = kind, float(width)
        self.counts = torch.ones(self.rollouts_per_prompt + 1, dtype=torch.float64)

    @property
    def heights(self) -> Tensor:
        """float64 [K+1]: u_k of the next step."""
        if self.kind == "sqrt":
            return self.counts.rsqrt()
        mu_B = torch.arange(self.rollouts_per_prompt + 1, dtype=torch.float64) / self.rollouts_per_prompt
        bonus_B = (2 * self.counts.sum().log() / self.counts).sqrt()
        return 4 * mu_B * (1 - mu_B) + self.width * bonus_B

    def coefficients(self, samples: Samples, totals: StepTotals) -> Tensor:
        """See `Algorithm.coefficients`."""
        tokens_B = totals.tokens_per_bin.to(torch.float64)
        mean = float((self.heights * tokens_B).sum() / tokens_B.sum().clamp(min=1))
        return token_mean(samples.lengths_N, totals) * self.heights[samples.bins_N] / (mean or 1.0)

    def learn(self, step_stats: StepStats) -> None:
        """Count the step's groups."""
        self.counts += step_stats.totals.rollouts_per_bin / self.rollouts_per_prompt

    def state_dict(self) -> dict[str, Any]:
        """Return the counts."""
        return {**super().state_dict(), "counts": self.counts.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raise CheckpointError for another algorithm or a torn state."""
        super().load_state_dict(state)
        counts = state.get("counts")
        size, numbers = self.rollouts_per_prompt + 1, counts if isinstance(counts, list) else []
        if len(numbers) != size or not all(isinstance(x, float) and 1 <= x < math.inf for x in numbers):
            raise torn_entry("counts", counts, f"{size} numbers from 1")
        self.counts = torch.tensor(numbers, dtype=torch.float64)
