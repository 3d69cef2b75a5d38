"""DARO's learnable weight per pass rate: what is measured, how the weights follow it, and what is saved.

Tokens per cell, summed over all ranks before the forward pass, give the coefficients of the token losses; loss sums
per cell, reduced after the backward pass, give the new weights, the same on every rank. A cell is a bin (0..K correct
answers), or a bin and a class of lengths. Formulas and rest points: docs/algorithms.md.

The weights move by an Adam in float64 on the CPU in which every entry has a step count of its own. A bin that is
absent from a step keeps its moments and its count, so its first step after a pause is as large as it would have been.

Shape letters: K rollouts per prompt, L classes of lengths, C = (K+1) L cells, bin by bin; P learned numbers (one per
cell, or one per kernel and class). Cells of bins 0 and K carry no signal.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from megatron_daro.algo.difficulty import check_rollouts_per_prompt
from megatron_daro.errors import AlgorithmError, CheckpointError, NonFiniteError


class Adam:
    """Moments and step counts of a vector. Source: Kingma and Ba, arXiv 1412.6980."""

    def __init__(
        self, size: int, *, learning_rate: float, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8
    ) -> None:
        """Start with moments of 0.

        Args:
            size: entries. learning_rate: 0 or more. betas: each from 0 to below 1. eps: above 0.

        Raises:
            AlgorithmError: an option is out of range.
        """
        if not (learning_rate >= 0 and math.isfinite(learning_rate)):
            raise AlgorithmError(f"learning_rate: got {learning_rate}, allowed is 0 or more")
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise AlgorithmError(f"betas: got {betas}, allowed are two numbers from 0 to below 1")
        if not eps > 0:
            raise AlgorithmError(f"eps: got {eps}, allowed is a number above 0")
        self.learning_rate = learning_rate
        self.betas, self.eps = (float(betas[0]), float(betas[1])), eps
        self._first_moments = torch.zeros(size, dtype=torch.float64)
        self._second_moments = torch.zeros(size, dtype=torch.float64)
        self._steps = torch.zeros(size, dtype=torch.int64)

    def moves(self, gradient: Tensor, present: Tensor) -> Tensor:
        """Return what is to be subtracted, float64 [size], and remember the gradient; 0 where not present.

        Args:
            gradient: float64 [size]. present: bool [size], which entries take part.
        """
        beta1, beta2 = self.betas
        steps = self._steps + present.to(torch.int64)
        first = torch.where(present, beta1 * self._first_moments + (1 - beta1) * gradient, self._first_moments)
        second = torch.where(present, beta2 * self._second_moments + (1 - beta2) * gradient**2, self._second_moments)
        age = steps.clamp(min=1).to(torch.float64)
        move = (first / (1 - beta1**age)) / ((second / (1 - beta2**age)).sqrt() + self.eps)
        self._first_moments, self._second_moments, self._steps = first, second, steps
        return torch.where(present, self.learning_rate * move, 0.0)

    def state_dict(self) -> dict[str, Any]:
        """Return lists of plain numbers: both moments, and steps per entry."""
        return {
            "first_moments": self._first_moments.tolist(),
            "second_moments": self._second_moments.tolist(),
            "steps": self._steps.tolist(),
        }

    def load_state_dict(self, state: Mapping[str, Any], owner: str) -> None:
        """Take over a saved state; it is checked as a whole first, so a refused one changes nothing.

        Args:
            state: of `state_dict`. owner: whose state this is, for the message.

        Raises:
            CheckpointError: a missing or misshapen entry, a number that is not finite, or a negative one.
        """
        columns = {}
        for field in ("first_moments", "second_moments", "steps"):
            columns[field] = column(state, field, len(self._steps), owner)
            if field != "first_moments" and bool((columns[field] < 0).any()):
                raise torn(state, field, len(self._steps), owner)
        self._first_moments, self._second_moments = columns["first_moments"], columns["second_moments"]
        self._steps = columns["steps"].to(torch.int64)


def column(state: Mapping[str, Any], field: str, size: int, owner: str) -> Tensor:
    """Return a saved list of finite numbers as float64 [size], or raise CheckpointError."""
    try:
        values = torch.as_tensor(state.get(field), dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        raise torn(state, field, size, owner) from None
    if values.shape != (size,) or not bool(torch.isfinite(values).all()):
        raise torn(state, field, size, owner)
    return values


def torn(state: Mapping[str, Any], field: str, size: int, owner: str) -> CheckpointError:
    """Return the error for a field of no use."""
    return CheckpointError(
        f"{owner}, {field}: the saved state has {state.get(field)!r}, allowed are {size} finite numbers, moments of "
        "squares and steps 0 or more; the checkpoint is torn or edited"
    )


Parameter = Literal["log", "linear"]
Magnitude = Literal["abs", "signed", "token", "advantage", "gradient"]
Normalizer = Literal["bin", "batch", "shared"]
Scale = Literal["sum", "mean"]

_SUMS = {"token": "abs_loss_sums", "advantage": "advantage_sums", "gradient": "gradient_squares"}
"""Which sums a magnitude reads, where these are not the loss sums."""

_LEAST_MASS = 0.1
"""Part of a bin that must lie in a kernel for Adam to move it: Adam would turn any small slope into a whole step."""


def gaussian_basis(rollouts_per_prompt: int, kernels: int, length_classes: int = 1) -> Tensor:
    """Return Gaussian bumps over the pass rate that sum to 1 at every pass rate, for each class of lengths by itself.

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


class DifficultyWeights:
    """DARO's weights w_k: the minimum of sum over present cells of (w_k m_k - ln w_k), followed by Adam.

    The policy sees w_k as a constant and the weights see the losses as constants. A cell that is absent from a step
    keeps its weight, its moments and its own step count. With `kernels` ln w is a sum of bumps over the pass rate,
    whose heights are learnt; with `half_life` a moving average of m_k takes the place of Adam, and w_k is its inverse.
    Float64 on the CPU: equal sums give equal weights everywhere.

    Source: DARO arXiv 2510.09001; what the paper leaves open is decided in docs/algorithms.md.
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
        kernels: int | None = None,
        half_life: float | None = None,
        length_classes: int = 1,
    ) -> None:
        """All weights start at 1.

        Args:
            rollouts_per_prompt: K, 2 or more.
            learning_rate: of the weights' Adam; 0 keeps them at 1.
            parameter: what Adam moves: "log" s_k = ln w_k (gradient w_k m_k - 1), "linear" w_k itself (m_k - 1/w_k).
            magnitude: m_k: "abs" |L_k|, "signed" L_k, "token" the mean |token loss| (needs abs_loss_sums), "advantage"
                the mean |A| (needs advantage_sums), "gradient" an estimate of the gradient's norm over its mean of the
                present cells (needs gradient_squares).
            normalizer: L_k is the bin's loss sum over its own tokens ("bin"), or over those of bins 1..K-1 ("batch").
                "shared": measured as with "bin", paid as with "batch": a token's coefficient is its weight over N.
            scale: the policy loss is the sum over bins ("sum") or divided by the number of present bins ("mean").
                The weights' own gradient is not divided: the number of bins changes from step to step.
            clamp: (lowest, highest) weight, with 0 < lowest <= 1 <= highest.
            betas, eps: Adam's.
            kernels: J, 2..K-1: this many numbers over the pass rate in the place of K - 1. None: a number per bin.
            half_life: steps after which half of an average is newer; above 0. None: Adam.
            length_classes: L, 1 or more.

        Raises:
            AlgorithmError: an option is out of range.
        """
        check_rollouts_per_prompt(rollouts_per_prompt)
        _check_clamp(clamp)
        choices = {"parameter": Parameter, "magnitude": Magnitude, "normalizer": Normalizer, "scale": Scale}
        given = {"parameter": parameter, "magnitude": magnitude, "normalizer": normalizer, "scale": scale}
        for field, allowed in choices.items():
            if given[field] not in get_args(allowed):
                raise AlgorithmError(f"{field}: got {given[field]!r}, allowed are {', '.join(get_args(allowed))}")
        _check_form(rollouts_per_prompt, parameter, kernels, half_life, length_classes)
        self.rollouts_per_prompt, self.length_classes = rollouts_per_prompt, length_classes
        self.kernels, self.half_life = kernels, half_life
        self.parameter, self.magnitude, self.normalizer, self.scale = parameter, magnitude, normalizer, scale
        self.clamp = (float(clamp[0]), float(clamp[1]))
        self._basis = None if kernels is None else gaussian_basis(rollouts_per_prompt, kernels, length_classes)
        self._cells = (rollouts_per_prompt + 1) * length_classes
        size = self._cells if self._basis is None else len(self._basis)
        self._adam = Adam(size, learning_rate=learning_rate, betas=betas, eps=eps)
        # ln w or w; with a half-life the average of m_k, whose inverse is w.
        start = 0.0 if parameter == "log" and half_life is None else 1.0
        self._values = torch.full((size,), start, dtype=torch.float64)

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
        """w, float64 [C] on the CPU, a copy; those of bins 0 and K stay at 1."""
        spread = self._values.clone() if self._basis is None else self._values @ self._basis
        if self.half_life is not None:
            weights = 1 / torch.where(spread > 0, spread, 1.0)
        else:
            weights = spread.exp() if self.parameter == "log" else spread
        return weights.clamp(*self.clamp)

    @property
    def clamped(self) -> int:
        """How many of the learnt numbers sit at either end of the clamp; those of bins 0 and K do not count."""
        lowest, highest = self._value_bounds()
        inner = self._values[self.length_classes : -self.length_classes] if self._basis is None else self._values
        return int(((inner <= lowest) | (inner >= highest)).sum())

    def coefficients(self, token_counts: Tensor) -> Tensor:
        """Return what a token loss of each bin is multiplied by, so that the plain sum is sum_k w_k L_k.

        Args:
            token_counts: [C], trained tokens per bin in the whole optimizer step (all ranks, all micro-batches).

        Returns:
            float64 [C] on the device of `token_counts`: w_k / N_k (or w_k / N, see `normalizer`), over the number of
            present bins for scale "mean"; 0 for bins 0, K and absent ones. Carries no gradient.

        Raises:
            AlgorithmError: another shape than [C], or a negative count.
        """
        counts = self._counts(token_counts)
        present = self._present(counts)
        over = self._denominators(counts, present, together=self.normalizer != "bin")
        coefficients = torch.where(present, self.weights / over, 0.0)
        if self.scale == "mean":
            coefficients = coefficients / present.sum().clamp(min=1)
        return coefficients.to(token_counts.device)

    def barrier(self, token_counts: Tensor) -> float:
        """-sum of ln w over the present bins (their mean for scale "mean"): the part of the loss the policy never sees.

        Args:
            token_counts: [C], as in `coefficients`.
        """
        present = self._present(self._counts(token_counts))
        logs = torch.where(present, self.weights.log(), 0.0)
        divisor = int(present.sum()) if self.scale == "mean" else 1
        return -float(logs.sum()) / max(divisor, 1)

    def update(
        self, loss_sums: Tensor, token_counts: Tensor, abs_loss_sums: Tensor | None = None, **more: Tensor
    ) -> None:
        """Move the weights by one step's sums.

        Args:
            loss_sums: [C], S_k = sum of the token losses of cell k in the whole step (unweighted).
            token_counts: [C], N_k of the whole step.
            abs_loss_sums: [C], sum of |token loss|; only read, and required, for magnitude "token".
            more: `advantage_sums` [C], sum of |A| over the tokens, and `gradient_squares` [C], sum of the squared
                derivatives of the token losses by their log-probs; required for magnitude "advantage" and "gradient".

        Raises:
            AlgorithmError: a shape is wrong, or the sums that the magnitude reads are missing.
            NonFiniteError: a sum of a present cell is NaN or infinite; the weights are left as they were.
        """
        present, measured = self._measured(loss_sums, token_counts, {"abs_loss_sums": abs_loss_sums, **more})
        if self.half_life is not None:
            self._average(present, measured)
            return
        weights = self.weights
        gradient = weights * measured - 1 if self.parameter == "log" else measured - 1 / weights
        gradient, masses = self._per_number(torch.where(present, gradient, 0.0), present)
        moving = masses >= _LEAST_MASS
        moved = (self._values - self._adam.moves(gradient, moving)).clamp(*self._value_bounds())
        self._values = torch.where(moving, moved, self._values)

    def settle(
        self, loss_sums: Tensor, token_counts: Tensor, abs_loss_sums: Tensor | None = None, **more: Tensor
    ) -> None:
        """Put the weights where updates with these sums would leave them in the end, within the clamp.

        Args:
            loss_sums, token_counts, abs_loss_sums, more: as in `update`. Adam's moments stay.

        Raises:
            AlgorithmError, NonFiniteError: as `update`.
        """
        present, measured = self._measured(loss_sums, token_counts, {"abs_loss_sums": abs_loss_sums, **more})
        if self.half_life is not None:
            self._average(present, measured, share=1.0)
        elif self._basis is not None:
            self._descend(self._basis, present, measured)
        else:
            # A measure of 0 or less has no rest point below the clamp: -ln w falls for ever.
            rest = torch.where(measured > 0, 1 / measured.clamp(min=1e-300), math.inf).clamp(*self.clamp)
            self._values = torch.where(present, rest.log() if self.parameter == "log" else rest, self._values)

    def _average(self, present: Tensor, measured: Tensor, *, share: float | None = None) -> None:
        """Move each average towards what was measured, by 1 - 2^(-1/half_life), less for a kernel with little in it."""
        sums, masses = self._per_number(torch.where(present, measured, 0.0), present)
        assert self.half_life is not None
        shares = 1 - 2 ** (-masses.clamp(max=1.0) / self.half_life) if share is None else torch.full_like(masses, share)
        moved = self._values + shares * (sums / torch.where(masses > 0, masses, 1.0) - self._values)
        self._values = torch.where(masses > 0, moved.clamp(*self._value_bounds()), self._values)

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
            free = (~outwards & (phi_PC.sum(dim=1) >= _LEAST_MASS)).nonzero().flatten()
            if not len(free) or float(slope[free].abs().max()) < 1e-13:
                return
            curvature = (phi_PC[free] * wm_C) @ phi_PC[free].T + 1e-12 * torch.eye(len(free), dtype=torch.float64)
            step, share = torch.zeros_like(slope).index_put((free,), torch.linalg.solve(curvature, slope[free])), 1.0
            while share > 1e-6 and value((self._values - share * step).clamp(low, high)) > value(self._values):
                share /= 2
            self._values = (self._values - share * step).clamp(low, high)

    def _per_number(self, values: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum of a value per learnt number, [P], and how much of the present cells lies in each, [P]."""
        mask = present.to(torch.float64)
        return (values, mask) if self._basis is None else (self._basis @ values, self._basis @ mask)

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and lists (JSON keeps them bit for bit): what the weights are, values, moments and steps."""
        return {
            **self._form(),
            "values": self._values.tolist(),
            **self._adam.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a saved state; it is checked as a whole first, so a refused one changes nothing.

        A narrower clamp than the saved run's pulls the values into it.

        Raises:
            CheckpointError: another K, another parameter, other kernels or length classes, averages in the place of
                Adam, a missing or misshapen entry, or a number that is not finite.
        """
        form = self._form()
        for field in ("rollouts_per_prompt", "parameter", "kernels", "length_classes", "averages"):
            own = form.get(field)
            if state.get(field) != own:
                raise CheckpointError(
                    f"difficulty weights, {field}: the saved state has {state.get(field)!r}, this run has {own!r}; "
                    f"set {field} to the saved value, or start with fresh weights"
                )
        values = column(state, "values", len(self._values), "difficulty weights")
        self._adam.load_state_dict(state, "difficulty weights")
        self._values = values.clamp(*self._value_bounds())

    def _form(self) -> dict[str, Any]:
        """Return what a saved state must agree in; what is not the default is written down."""
        form: dict[str, Any] = {"rollouts_per_prompt": self.rollouts_per_prompt, "parameter": self.parameter}
        form |= {} if self.kernels is None else {"kernels": self.kernels}
        form |= {} if self.length_classes == 1 else {"length_classes": self.length_classes}
        return form | ({} if self.half_life is None else {"averages": True})

    def _measured(
        self, loss_sums: Tensor, token_counts: Tensor, more: Mapping[str, Tensor | None]
    ) -> tuple[Tensor, Tensor]:
        """Return which cells are present, bool [C], and m_k, float64 [C]."""
        counts = self._counts(token_counts)
        present = self._present(counts)
        sums = self._vector("loss_sums", loss_sums)
        if name := _SUMS.get(self.magnitude):
            if more.get(name) is None:
                raise AlgorithmError(
                    f"{name}: got None, but magnitude {self.magnitude!r} measures them; hand them in per bin, or "
                    "choose magnitude 'abs' or 'signed'"
                )
            sums = self._vector(name, more[name])
        bad = (present & ~torch.isfinite(sums)).nonzero().flatten().tolist()
        if bad:
            raise NonFiniteError(f"sums of cells {bad} are not finite; the weights were not changed")
        over = self._denominators(counts, present, together=self.normalizer == "batch")
        measured = torch.where(present, sums, 0.0) / over
        if self.magnitude == "abs":
            measured = measured.abs()
        if self.magnitude == "gradient":
            norms = torch.where(present, sums, 0.0).sqrt() / over
            mean = norms.sum() / present.sum().clamp(min=1)
            measured = norms / torch.where(mean > 0, mean, 1.0)
        return present, measured

    def _value_bounds(self) -> tuple[float, float]:
        """Return the clamp in the parameter's own unit."""
        lowest, highest = self.clamp
        if self.half_life is not None:
            return 1 / highest, 1 / lowest
        return (math.log(lowest), math.log(highest)) if self.parameter == "log" else (lowest, highest)

    def _present(self, counts: Tensor) -> Tensor:
        """Cells that take part: tokens in the step, and neither all wrong nor all right."""
        present = counts > 0
        present[: self.length_classes] = present[-self.length_classes :] = False
        return present

    def _denominators(self, counts: Tensor, present: Tensor, *, together: bool) -> Tensor:
        """N_k, or N of bins 1..K-1 `together`; 1 where it would be 0."""
        if together:
            return torch.where(present, counts, 0.0).sum().clamp(min=1).expand_as(counts)
        return counts.clamp(min=1)

    def _counts(self, token_counts: Tensor) -> Tensor:
        counts = self._vector("token_counts", token_counts)
        if not bool((counts >= 0).all()):
            raise AlgorithmError(f"token_counts: got {counts.tolist()}, allowed are counts of 0 or more")
        return counts

    def _vector(self, name: str, values: Tensor | None) -> Tensor:
        """Return a float64 CPU copy of a [C] argument."""
        vector = torch.as_tensor(values).detach().to("cpu", torch.float64, copy=True)
        if vector.shape != (self._cells,):
            classes = "" if self.length_classes == 1 else f" and each of {self.length_classes} classes of lengths"
            raise AlgorithmError(
                f"{name}: got shape {tuple(vector.shape)}, allowed is ({self._cells},): one entry per bin "
                f"0..{self.rollouts_per_prompt} (rollouts_per_prompt){classes}"
            )
        return vector


def _check_clamp(clamp: tuple[float, float]) -> None:
    if len(clamp) != 2 or not (0 < clamp[0] <= 1 <= clamp[1] < math.inf):
        raise AlgorithmError(f"clamp: got {clamp}, allowed is (lowest, highest) with 0 < lowest <= 1 <= highest")


def _check_form(
    rollouts_per_prompt: int, parameter: str, kernels: int | None, half_life: float | None, length_classes: int
) -> None:
    if kernels is not None and not 2 <= kernels < rollouts_per_prompt:
        raise AlgorithmError(
            f"kernels: got {kernels}, allowed is 2 to {rollouts_per_prompt - 1} (rollouts_per_prompt - 1), or None for "
            "a number per pass rate"
        )
    if half_life is not None and not 0 < half_life < math.inf:
        raise AlgorithmError(f"half_life: got {half_life}, allowed is a number above 0, or None for Adam")
    if parameter == "linear" and (kernels is not None or half_life is not None):
        other = "kernels" if kernels is not None else "half_life"
        raise AlgorithmError(f"parameter: got 'linear' with {other}, allowed is 'log'; what is learnt is not w there")
    if length_classes < 1:
        raise AlgorithmError(f"length_classes: got {length_classes}, allowed is 1 or more")
