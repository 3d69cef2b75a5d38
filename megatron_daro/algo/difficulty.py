"""Difficulty: pass-rate bins, tokens per bin, and DARO's learnable weight per bin.

Place in the data flow: verdicts -> bins -> tokens per bin, summed over all ranks -> coefficients of the token losses;
after the backward pass the loss sums per bin, summed over all ranks, -> new weights, the same on every rank.
Refuses incomplete groups: a group of fewer than K rollouts has no bin among 0..K. Makes no collective call.

Shape letters: N samples, K rollouts per prompt, [K+1] one entry per bin 0..K. Bins 0 and K carry no signal.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from megatron_daro.algo.adam import Adam, column
from megatron_daro.errors import AlgorithmError, CheckpointError, NonFiniteError

Parameter = Literal["log", "linear"]
Magnitude = Literal["abs", "signed", "token"]
Normalizer = Literal["bin", "batch"]
Scale = Literal["sum", "mean"]


def pass_rate_bins(correct_N: Tensor, group_ids_N: Tensor, rollouts_per_prompt: int) -> Tensor:
    """Return the bin of every sample: how many rollouts of its group are correct.

    Args:
        correct_N: [N], bool or 0/1: the verifier's verdicts, never the shaped reward.
        group_ids_N: [N] integers, arbitrary values in any order.
        rollouts_per_prompt: K, 2 or more; every group must have exactly K samples.

    Returns:
        int64 [N], 0..K, the same for all samples of a group.

    Raises:
        AlgorithmError: a group has more or fewer than K samples (the message says which), or a verdict is not 0/1.
    """
    _check_rollouts_per_prompt(rollouts_per_prompt)
    correct_N = torch.as_tensor(correct_N)
    group_ids_N = torch.as_tensor(group_ids_N, device=correct_N.device)
    if correct_N.ndim != 1 or correct_N.shape != group_ids_N.shape:
        raise AlgorithmError(
            f"correct_N and group_ids_N: got shapes {tuple(correct_N.shape)} and {tuple(group_ids_N.shape)}, "
            "allowed are two vectors of the same length; give one verdict and one group id per rollout"
        )
    if not bool(((correct_N == 0) | (correct_N == 1)).all()):
        raise AlgorithmError("correct_N: got a value other than 0 and 1; give the verdict, not the shaped reward")
    ids_G, group_N, sizes_G = torch.unique(group_ids_N, return_inverse=True, return_counts=True)
    wrong = (sizes_G != rollouts_per_prompt).nonzero().flatten().tolist()
    if wrong:
        named = ", ".join(f"group {int(ids_G[g])} has {int(sizes_G[g])}" for g in wrong[:5])
        more = f" and {len(wrong) - 5} more groups" if len(wrong) > 5 else ""
        raise AlgorithmError(
            f"group_ids_N: {named}{more}; allowed is exactly rollouts_per_prompt = {rollouts_per_prompt} samples "
            "a group; complete the group or drop it"
        )
    bins_G = torch.zeros(len(ids_G), dtype=torch.int64, device=correct_N.device)
    return bins_G.index_add_(0, group_N, correct_N.to(torch.int64))[group_N]


def bin_sums(values_N: Tensor, bins_N: Tensor, rollouts_per_prompt: int) -> Tensor:
    """Sum of a per-sample value over each bin.

    Args:
        values_N: [N]; floating values are summed in float64, whole numbers in int64.
        bins_N: int64 [N], 0..K.
        rollouts_per_prompt: K.

    Returns:
        [K+1], float64 or int64, on the device of the values; gradient flows.

    Raises:
        AlgorithmError: shapes differ, or a bin is outside 0..K.
    """
    values_N = torch.as_tensor(values_N)
    bins_N = torch.as_tensor(bins_N, device=values_N.device).to(torch.int64)
    if values_N.ndim != 1 or values_N.shape != bins_N.shape:
        raise AlgorithmError(
            f"values and bins_N: got shapes {tuple(values_N.shape)} and {tuple(bins_N.shape)}, "
            "allowed are two vectors of the same length"
        )
    if bins_N.numel() and not 0 <= int(bins_N.min()) <= int(bins_N.max()) <= rollouts_per_prompt:
        raise AlgorithmError(
            f"bins_N: got {int(bins_N.min())}..{int(bins_N.max())}, allowed is 0..{rollouts_per_prompt} "
            "(rollouts_per_prompt); the bins were made with another K"
        )
    dtype = torch.float64 if values_N.is_floating_point() else torch.int64
    sums = torch.zeros(rollouts_per_prompt + 1, dtype=dtype, device=values_N.device)
    return sums.index_add(0, bins_N, values_N.to(dtype))


def token_counts(bins_N: Tensor, lengths_N: Tensor, rollouts_per_prompt: int) -> Tensor:
    """Trained tokens per bin. Sum the result over all ranks before it becomes a denominator.

    Args:
        bins_N: int64 [N], 0..K.
        lengths_N: [N], trained response tokens of each sample (after the loss mask).
        rollouts_per_prompt: K.

    Returns:
        int64 [K+1].

    Raises:
        AlgorithmError: shapes differ, or a bin is outside 0..K.
    """
    lengths_N = torch.as_tensor(lengths_N)
    return bin_sums(lengths_N.to(torch.int64), bins_N, rollouts_per_prompt)


def predicted_bin_loss(mu: Tensor | float, mean_len_right: Tensor | float, mean_len_wrong: Tensor | float) -> Tensor:
    """L_k of an on-policy step (ratio 1), from the pass rate and the mean lengths alone.

    Exact for 0/1 rewards and the population standard deviation with eps -> 0.

    Args:
        mu: pass rate k/K; mean_len_right, mean_len_wrong: mean trained tokens of the bin's right and wrong answers.
            Numbers or tensors of one shape.

    Returns:
        float64, sqrt(mu(1-mu)) (l- - l+) / (mu l+ + (1-mu) l-); 0 where mu is 0 or 1 or the bin has no tokens.
    """
    mu, right, wrong = (torch.as_tensor(x, dtype=torch.float64) for x in (mu, mean_len_right, mean_len_wrong))
    mixed = (mu > 0) & (mu < 1)
    right, wrong = torch.where(mixed, right, 0.0), torch.where(mixed, wrong, 0.0)
    mean_length = mu * right + (1 - mu) * wrong
    loss = (mu * (1 - mu)).clamp(min=0).sqrt() * (wrong - right) / torch.where(mean_length > 0, mean_length, 1.0)
    return torch.where(mixed & (mean_length > 0), loss, 0.0)


class DifficultyWeights:
    """DARO's weights w_k: the minimum of sum over present bins of (w_k m_k - ln w_k), followed by Adam.

    The policy sees w_k as a constant and the weights see the losses as constants. A bin that is absent from a step
    keeps its weight, its moments and its own step count. Float64 on the CPU: equal sums give equal weights everywhere.

    Source: DARO arXiv 2510.09001; what the paper leaves open is decided in docs/loss.md.
    """

    def __init__(
        self,
        rollouts_per_prompt: int,
        *,
        learning_rate: float = 0.01,
        parameter: Parameter = "log",
        magnitude: Magnitude = "abs",
        normalizer: Normalizer = "bin",
        scale: Scale = "sum",
        clamp: tuple[float, float] = (0.1, 10.0),
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        """All weights start at 1.

        Args:
            rollouts_per_prompt: K, 2 or more.
            learning_rate: of the weights' Adam; 0 keeps them at 1.
            parameter: what Adam moves: "log" s_k = ln w_k (gradient w_k m_k - 1), "linear" w_k itself (m_k - 1/w_k).
            magnitude: m_k from L_k: "abs" |L_k|, "signed" L_k, "token" the mean |token loss| (needs abs_loss_sums).
            normalizer: L_k is the bin's loss sum over its own tokens ("bin") or over those of bins 1..K-1 ("batch").
            scale: the policy loss is the sum over bins ("sum") or divided by the number of present bins ("mean").
                The weights' own gradient is not divided: the number of bins changes from step to step.
            clamp: (lowest, highest) weight, with 0 < lowest <= 1 <= highest.
            betas, eps: Adam's.

        Raises:
            AlgorithmError: an option is out of range.
        """
        _check_rollouts_per_prompt(rollouts_per_prompt)
        _check_clamp(clamp)
        choices = {"parameter": Parameter, "magnitude": Magnitude, "normalizer": Normalizer, "scale": Scale}
        given = {"parameter": parameter, "magnitude": magnitude, "normalizer": normalizer, "scale": scale}
        for field, allowed in choices.items():
            if given[field] not in get_args(allowed):
                raise AlgorithmError(f"{field}: got {given[field]!r}, allowed are {', '.join(get_args(allowed))}")
        self.rollouts_per_prompt = rollouts_per_prompt
        self.parameter, self.magnitude, self.normalizer, self.scale = parameter, magnitude, normalizer, scale
        self.clamp = (float(clamp[0]), float(clamp[1]))
        shape = rollouts_per_prompt + 1
        self._adam = Adam(shape, learning_rate=learning_rate, betas=betas, eps=eps)
        start = 0.0 if parameter == "log" else 1.0
        self._values = torch.full((shape,), start, dtype=torch.float64)

    @property
    def learning_rate(self) -> float:
        """Of the weights' Adam."""
        return self._adam.learning_rate

    @property
    def betas(self) -> tuple[float, float]:
        """Of the weights' Adam."""
        return self._adam.betas

    @property
    def weights(self) -> Tensor:
        """w, float64 [K+1] on the CPU, a copy; bins 0 and K stay at 1."""
        weights = self._values.exp() if self.parameter == "log" else self._values.clone()
        return weights.clamp(*self.clamp)

    @property
    def clamped(self) -> int:
        """How many of the weights 1..K-1 sit at either end of the clamp."""
        lowest, highest = self._value_bounds()
        inner = self._values[1:-1]
        return int(((inner <= lowest) | (inner >= highest)).sum())

    def coefficients(self, token_counts: Tensor) -> Tensor:
        """Return what a token loss of each bin is multiplied by, so that the plain sum is sum_k w_k L_k.

        Args:
            token_counts: [K+1], trained tokens per bin in the whole optimizer step (all ranks, all micro-batches).

        Returns:
            float64 [K+1] on the device of `token_counts`: w_k / N_k (or w_k / N, see `normalizer`), over the number of
            present bins for scale "mean"; 0 for bins 0, K and absent ones. Carries no gradient.

        Raises:
            AlgorithmError: another shape than [K+1], or a negative count.
        """
        counts = self._counts(token_counts)
        present = self._present(counts)
        coefficients = torch.where(present, self.weights / self._denominators(counts, present), 0.0)
        if self.scale == "mean":
            coefficients = coefficients / present.sum().clamp(min=1)
        device = token_counts.device if isinstance(token_counts, Tensor) else "cpu"
        return coefficients.to(device)

    def barrier(self, token_counts: Tensor) -> float:
        """-sum of ln w over the present bins (their mean for scale "mean"): the part of the loss the policy never sees.

        Args:
            token_counts: [K+1], as in `coefficients`.
        """
        present = self._present(self._counts(token_counts))
        logs = torch.where(present, self.weights.log(), 0.0)
        divisor = int(present.sum()) if self.scale == "mean" else 1
        return -float(logs.sum()) / max(divisor, 1)

    def update(self, loss_sums: Tensor, token_counts: Tensor, abs_loss_sums: Tensor | None = None) -> None:
        """One Adam step of the weights of the present bins.

        Args:
            loss_sums: [K+1], S_k = sum of the token losses of bin k in the whole step (unweighted).
            token_counts: [K+1], N_k of the whole step.
            abs_loss_sums: [K+1], sum of |token loss|; only read, and required, for magnitude "token".

        Raises:
            AlgorithmError: a shape is wrong, or abs_loss_sums is missing for magnitude "token".
            NonFiniteError: a sum of a present bin is NaN or infinite; the weights are left as they were.
        """
        present, measured = self._measured(loss_sums, token_counts, abs_loss_sums)
        weights = self.weights
        gradient = weights * measured - 1 if self.parameter == "log" else measured - 1 / weights
        moved = (self._values - self._adam.moves(gradient, present)).clamp(*self._value_bounds())
        self._values = torch.where(present, moved, self._values)

    def settle(self, loss_sums: Tensor, token_counts: Tensor, abs_loss_sums: Tensor | None = None) -> None:
        """Put the weights of the present bins where updates with these sums would leave them: 1/m_k, in the clamp.

        Args:
            loss_sums, token_counts, abs_loss_sums: as in `update`. The moments stay.

        Raises:
            AlgorithmError, NonFiniteError: as `update`.
        """
        present, measured = self._measured(loss_sums, token_counts, abs_loss_sums)
        # A measure of 0 or less has no rest point below the clamp: -ln w falls for ever.
        rest = torch.where(measured > 0, 1 / measured.clamp(min=1e-300), math.inf).clamp(*self.clamp)
        self._values = torch.where(present, rest.log() if self.parameter == "log" else rest, self._values)

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and lists (JSON keeps them bit for bit): K, parameter, values, both moments, steps per bin."""
        return {
            "rollouts_per_prompt": self.rollouts_per_prompt,
            "parameter": self.parameter,
            "values": self._values.tolist(),
            **self._adam.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a saved state; it is checked as a whole first, so a refused one changes nothing.

        A narrower clamp than the saved run's pulls the values into it.

        Raises:
            CheckpointError: another K, another parameter, a missing or misshapen entry, or a number that is not finite.
        """
        for field, own in (("rollouts_per_prompt", self.rollouts_per_prompt), ("parameter", self.parameter)):
            if state.get(field) != own:
                raise CheckpointError(
                    f"difficulty weights, {field}: the saved state has {state.get(field)!r}, this run has {own!r}; "
                    f"set {field} to the saved value, or start with fresh weights"
                )
        values = column(state, "values", len(self._values), "difficulty weights")
        self._adam.load_state_dict(state, "difficulty weights")
        self._values = values.clamp(*self._value_bounds())

    def _measured(self, loss_sums: Tensor, token_counts: Tensor, abs_loss_sums: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return which bins are present, bool [K+1], and m_k, float64 [K+1]."""
        counts = self._counts(token_counts)
        present = self._present(counts)
        if self.magnitude == "token" and abs_loss_sums is None:
            raise AlgorithmError(
                "abs_loss_sums: got None, but magnitude 'token' measures the mean |token loss|; "
                "hand in the sums of |token loss| per bin, or choose magnitude 'abs' or 'signed'"
            )
        sums = self._vector("loss_sums", loss_sums)
        if self.magnitude == "token":
            sums = self._vector("abs_loss_sums", abs_loss_sums)
        bad = (present & ~torch.isfinite(sums)).nonzero().flatten().tolist()
        if bad:
            raise NonFiniteError(f"loss sums of bins {bad} are not finite; the weights were not changed")
        measured = torch.where(present, sums, 0.0) / self._denominators(counts, present)
        if self.magnitude == "abs":
            measured = measured.abs()
        return present, measured

    def _value_bounds(self) -> tuple[float, float]:
        """Return the clamp in the parameter's own unit."""
        lowest, highest = self.clamp
        return (math.log(lowest), math.log(highest)) if self.parameter == "log" else (lowest, highest)

    def _present(self, counts: Tensor) -> Tensor:
        """Bins that take part: tokens in the step, and neither all wrong nor all right."""
        present = counts > 0
        present[0] = present[-1] = False
        return present

    def _denominators(self, counts: Tensor, present: Tensor) -> Tensor:
        """N_k, or N of bins 1..K-1 for normalizer "batch"; 1 where it would be 0."""
        if self.normalizer == "batch":
            return torch.where(present, counts, 0.0).sum().clamp(min=1).expand_as(counts)
        return counts.clamp(min=1)

    def _counts(self, token_counts: Tensor) -> Tensor:
        counts = self._vector("token_counts", token_counts)
        if not bool((counts >= 0).all()):
            raise AlgorithmError(f"token_counts: got {counts.tolist()}, allowed are counts of 0 or more")
        return counts

    def _vector(self, name: str, values: Tensor | None) -> Tensor:
        """Return a float64 CPU copy of a [K+1] argument."""
        vector = torch.as_tensor(values).detach().to("cpu", torch.float64, copy=True)
        if vector.shape != self._values.shape:
            raise AlgorithmError(
                f"{name}: got shape {tuple(vector.shape)}, allowed is ({len(self._values)},): one entry per bin "
                f"0..{self.rollouts_per_prompt} (rollouts_per_prompt)"
            )
        return vector


def _check_rollouts_per_prompt(rollouts_per_prompt: int) -> None:
    if rollouts_per_prompt < 2:
        raise AlgorithmError(
            f"rollouts_per_prompt: got {rollouts_per_prompt}, allowed is 2 or more: one rollout compares with nothing"
        )


def _check_clamp(clamp: tuple[float, float]) -> None:
    if len(clamp) != 2 or not (0 < clamp[0] <= 1 <= clamp[1] < math.inf):
        raise AlgorithmError(f"clamp: got {clamp}, allowed is (lowest, highest) with 0 < lowest <= 1 <= highest")
