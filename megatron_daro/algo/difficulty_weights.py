"""DARO's learnable weight per pass rate: what is measured, how the weights follow it, and what is saved.

Tokens per bin (0..K correct answers), summed over all ranks before the forward pass, give the coefficients of the
token losses; loss sums per bin, reduced after the backward pass, give the new weights, the same on every rank. Formulas
and fixed points: docs/algorithms.md. A subclass may weight cells other than these, or learn fewer numbers than there
are cells: examples/lab/lab_algorithms.py does both.

The weights are moved by Adam in float64 on the CPU; every entry has its own step count. A bin that is absent from a
step keeps its moments and its count, so its next step is as large as if there had been no pause.

Shape letters: K rollouts per prompt; L classes of samples; C cells (a bin and a class) and W learned numbers, both
(K+1) L here, ordered by bin. Bins 0 and K carry no signal.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, get_args

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
        """Update the moments with a gradient, and return what the caller must subtract, float64 [size]; 0 where not
        present.

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
            state: from `state_dict`. owner: whose state this is, for the message.

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
    """Return the error for a field that cannot be used."""
    return CheckpointError(
        f"{owner}, {field}: the saved state has {state.get(field)!r}, allowed are {size} finite numbers, moments of "
        "squares and steps 0 or more; the checkpoint is torn or edited"
    )


Parameter = Literal["log", "linear"]
Normalizer = Literal["bin", "batch", "shared"]
Scale = Literal["sum", "mean"]

LEAST_MASS = 0.1
"""Least share of present cells in a learnt number for Adam to move it: Adam makes a full step of any gradient, however
small."""


class DifficultyWeights:
    """DARO's weights w_k: Adam moves them towards the minimum of the sum over present cells of (w_k m_k - ln w_k).

    The policy sees w_k as a constant, and the weights see the losses as constants. A cell that is absent from a step
    keeps its weight, its moments and its own step count. With `half_life` a moving average of m_k replaces Adam, and
    w_k is its inverse. Everything is float64 on the CPU, so equal sums give equal weights on every rank.

    Source: DARO arXiv 2510.09001; what the paper leaves open is decided in docs/algorithms.md.
    """

    sums_read: ClassVar[Mapping[str, str]] = {
        "abs": "loss_sums",
        "signed": "loss_sums",
        "token": "abs_loss_sums",
        "advantage": "advantage_sums",
    }
    """Magnitude -> name of the sums from which it is computed."""

    def __init__(
        self,
        rollouts_per_prompt: int,
        *,
        environments: Sequence[str] = (),
        learning_rate: float = 0.01,
        parameter: Parameter = "log",
        magnitude: str = "abs",
        normalizer: Normalizer = "bin",
        scale: Scale = "sum",
        clamp: tuple[float, float] = (0.1, 10.0),
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        half_life: float | None = None,
    ) -> None:
        """Start with all weights at 1.

        Args:
            rollouts_per_prompt: K, 2 or more.
            environments: names of the environments that have their own weights; L is their number. Empty: L is 1.
            learning_rate: of the weights' Adam; 0 keeps them at 1.
            parameter: what Adam moves: "log" s_k = ln w_k (gradient w_k m_k - 1), "linear" w_k itself (m_k - 1/w_k).
            magnitude: m_k: "abs" |L_k|, "signed" L_k, "token" the mean |token loss| (needs abs_loss_sums), "advantage"
                the mean |A| (needs advantage_sums).
            normalizer: L_k is the bin's loss sum over its own tokens ("bin"), or over N', the tokens of bins 1..K-1
                ("batch"). "shared": the weights learn as with "bin", but a token's coefficient is its weight over N',
                as with "batch".
            scale: the policy loss is the sum over bins ("sum"), or that sum divided by the number of present bins
                ("mean"). The gradient of the weights is never divided: the number of bins changes from step to step.
            clamp: (lowest, highest) weight, with 0 < lowest <= 1 <= highest.
            betas, eps: Adam's.
            half_life: number of steps in which the share of older measurements in the average halves; above 0. None:
                Adam.

        Raises:
            AlgorithmError: an option is out of range.
        """
        check_rollouts_per_prompt(rollouts_per_prompt)
        _check_clamp(clamp)
        for field, value, allowed in (
            ("parameter", parameter, get_args(Parameter)),
            ("magnitude", magnitude, tuple(self.sums_read)),
            ("normalizer", normalizer, get_args(Normalizer)),
            ("scale", scale, get_args(Scale)),
        ):
            if value not in allowed:
                raise AlgorithmError(f"{field}: got {value!r}, allowed are {', '.join(allowed)}")
        _check_half_life(half_life, parameter)
        self.rollouts_per_prompt, self.half_life = rollouts_per_prompt, half_life
        self.environments = tuple(environments)
        self.parameter, self.magnitude, self.normalizer, self.scale = parameter, magnitude, normalizer, scale
        self.clamp = (float(clamp[0]), float(clamp[1]))
        self._cells, size = self._sizes()
        self._adam = Adam(size, learning_rate=learning_rate, betas=betas, eps=eps)
        # ln w or w; with a half-life the average of m_k, of which w is the inverse.
        start = 0.0 if parameter == "log" and half_life is None else 1.0
        self._values = torch.full((size,), start, dtype=torch.float64)

    @property
    def num_classes(self) -> int:
        """L."""
        return max(len(self.environments), 1)

    @property
    def weights(self) -> Tensor:
        """w, float64 [C] on the CPU, a copy; the weights of bins 0 and K stay at 1."""
        spread = self._per_cell(self._values)
        if self.half_life is not None:
            weights = 1 / torch.where(spread > 0, spread, 1.0)
        else:
            weights = spread.exp() if self.parameter == "log" else spread
        return weights.clamp(*self.clamp)

    @property
    def clamped(self) -> int:
        """How many of the learnt numbers are at either bound of the clamp; those of bins 0 and K do not count."""
        lowest, highest = self._value_bounds()
        inner = self._inner(self._values)
        return int(((inner <= lowest) | (inner >= highest)).sum())

    def coefficients(self, token_counts: Tensor) -> Tensor:
        """Return the factor of each token loss by cell, with which the plain sum of token losses is sum_k w_k L_k.

        Args:
            token_counts: [C], trained tokens per bin in the whole optimizer step (all ranks, all micro-batches).

        Returns:
            float64 [C] on the device of `token_counts`: w_k / N_k (or w_k / N', see `normalizer`), with scale "mean"
            divided by the number of present cells; 0 for bins 0 and K and for absent cells. Carries no gradient.

        Raises:
            AlgorithmError: the shape is not [C], or a count is negative.
        """
        counts = self._counts(token_counts)
        present = self._present(counts)
        over = self._denominators(counts, present, together=self.normalizer != "bin")
        coefficients = torch.where(present, self.weights / over, 0.0)
        if self.scale == "mean":
            coefficients = coefficients / present.sum().clamp(min=1)
        return coefficients.to(token_counts.device)

    def barrier(self, token_counts: Tensor) -> float:
        """Return -sum of ln w over the present cells (with scale "mean" the mean): the part of the loss that does not
        depend on the policy.

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
        """Move the weights once, by the sums of one step.

        Args:
            loss_sums: [C], S_k = sum of the token losses of cell k in the whole step (unweighted).
            token_counts: [C], N_k of the whole step.
            abs_loss_sums: [C], sum of |token loss|; only read, and then required, with magnitude "token".
            more: further sums [C] that a magnitude reads, such as `advantage_sums`, the sum of |A| over the tokens;
                sums that it does not read are ignored.

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
        moving = masses >= LEAST_MASS
        moved = (self._values - self._adam.moves(gradient, moving)).clamp(*self._value_bounds())
        self._values = torch.where(moving, moved, self._values)

    def settle(
        self, loss_sums: Tensor, token_counts: Tensor, abs_loss_sums: Tensor | None = None, **more: Tensor
    ) -> None:
        """Set the weights to where repeated updates with these sums would converge, within the clamp. Adam's moments
        stay as they are.

        Args:
            loss_sums, token_counts, abs_loss_sums, more: as in `update`.

        Raises:
            AlgorithmError, NonFiniteError: as `update`.
        """
        present, measured = self._measured(loss_sums, token_counts, {"abs_loss_sums": abs_loss_sums, **more})
        if self.half_life is not None:
            self._average(present, measured, share=1.0)
        else:
            self._minimise(present, measured)

    def _minimise(self, present: Tensor, measured: Tensor) -> None:
        """Set the learnt numbers to the minimum, within the clamp, of the sum of (w_k m_k - ln w_k) over the present
        cells."""
        # With a measure of 0 or less there is no minimum below the upper bound: -ln w falls for ever.
        rest = torch.where(measured > 0, 1 / measured.clamp(min=1e-300), math.inf).clamp(*self.clamp)
        self._values = torch.where(present, rest.log() if self.parameter == "log" else rest, self._values)

    def _average(self, present: Tensor, measured: Tensor, *, share: float | None = None) -> None:
        """Move each average towards the measured magnitude by the share 1 - 2^(-1/half_life), or less if the number
        stands for less than one present cell. Args: share: used instead, for all numbers."""
        sums, masses = self._per_number(torch.where(present, measured, 0.0), present)
        assert self.half_life is not None
        shares = 1 - 2 ** (-masses.clamp(max=1.0) / self.half_life) if share is None else torch.full_like(masses, share)
        moved = self._values + shares * (sums / torch.where(masses > 0, masses, 1.0) - self._values)
        self._values = torch.where(masses > 0, moved.clamp(*self._value_bounds()), self._values)

    def _per_number(self, values: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
        """Return, for each learnt number, the sum of the values of its cells, [W], and how many present cells (or parts
        of cells) it stands for, [W]."""
        return values, present.to(torch.float64)

    def _per_cell(self, numbers: Tensor) -> Tensor:
        """Return the learnt number, out of [W], of each cell, [C]; a copy."""
        return numbers.clone()

    def _inner(self, values: Tensor) -> Tensor:
        """Return the learnt numbers, out of [W], that can move: those of bins 1..K-1."""
        return values[self.num_classes : -self.num_classes]

    def _sizes(self) -> tuple[int, int]:
        """Return C and W."""
        cells = (self.rollouts_per_prompt + 1) * self.num_classes
        return cells, cells

    def state_dict(self) -> dict[str, Any]:
        """Return plain numbers and lists, which JSON keeps bit for bit: the form of the weights, their values, moments
        and steps."""
        return {
            **self._form(),
            "values": self._values.tolist(),
            **self._adam.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a saved state; it is checked as a whole first, so a refused one changes nothing.

        If the clamp is narrower than in the saved run, the values are clamped to it.

        Raises:
            CheckpointError: the state has another K, parameter or form of weights, or averages instead of Adam (or the
                reverse); an entry is missing or misshapen, or a number is not finite.
        """
        form = self._form()
        learnt = {"values", "first_moments", "second_moments", "steps"}
        for field in (*form, *sorted(state.keys() - form.keys() - learnt)):
            own = form.get(field)
            if state.get(field) != own:
                raise CheckpointError(
                    f"difficulty weights, {field}: the saved state has {state.get(field)!r}, this run has {own!r}; "
                    f"set {'half_life' if field == 'averages' else field} to the saved value, "
                    "or start with fresh weights"
                )
        values = column(state, "values", len(self._values), "difficulty weights")
        self._adam.load_state_dict(state, "difficulty weights")
        self._values = values.clamp(*self._value_bounds())

    def _form(self) -> dict[str, Any]:
        """Return the entries that must be equal in a saved state; environments and averages only if they are used."""
        form: dict[str, Any] = {"rollouts_per_prompt": self.rollouts_per_prompt, "parameter": self.parameter}
        form |= {"environments": list(self.environments)} if self.environments else {}
        return form | ({} if self.half_life is None else {"averages": True})

    def _measured(
        self, loss_sums: Tensor, token_counts: Tensor, more: Mapping[str, Tensor | None]
    ) -> tuple[Tensor, Tensor]:
        """Return which cells are present, bool [C], and m_k, float64 [C]."""
        counts = self._counts(token_counts)
        present = self._present(counts)
        sums = self._vector("loss_sums", loss_sums)
        if (name := self.sums_read[self.magnitude]) != "loss_sums":
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
        return present, self._measure(torch.where(present, sums, 0.0), over, present)

    def _measure(self, sums: Tensor, over: Tensor, present: Tensor) -> Tensor:
        """Return m_k [C]. Args: sums: those that the magnitude reads, 0 where not present. over: their denominators."""
        measured = sums / over
        return measured.abs() if self.magnitude == "abs" else measured

    def _value_bounds(self) -> tuple[float, float]:
        """Return the clamp in the parameter's own unit."""
        lowest, highest = self.clamp
        if self.half_life is not None:
            return 1 / highest, 1 / lowest
        return (math.log(lowest), math.log(highest)) if self.parameter == "log" else (lowest, highest)

    def _present(self, counts: Tensor) -> Tensor:
        """Return which cells take part: those with tokens in the step, of bins 1..K-1."""
        present = counts > 0
        present[: self.num_classes] = present[-self.num_classes :] = False
        return present

    def _denominators(self, counts: Tensor, present: Tensor, *, together: bool) -> Tensor:
        """Return N_k, or with `together` N', the tokens of bins 1..K-1; 1 where it would be 0."""
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
            raise AlgorithmError(
                f"{name}: got shape {tuple(vector.shape)}, allowed is ({self._cells},): one entry per bin "
                f"0..{self.rollouts_per_prompt} (rollouts_per_prompt) and class of samples"
            )
        return vector


def _check_clamp(clamp: tuple[float, float]) -> None:
    if len(clamp) != 2 or not (0 < clamp[0] <= 1 <= clamp[1] < math.inf):
        raise AlgorithmError(f"clamp: got {clamp}, allowed is (lowest, highest) with 0 < lowest <= 1 <= highest")


def _check_half_life(half_life: float | None, parameter: str) -> None:
    if half_life is not None and not 0 < half_life < math.inf:
        raise AlgorithmError(f"half_life: got {half_life}, allowed is a number above 0, or None for Adam")
    if parameter == "linear" and half_life is not None:
        raise AlgorithmError("parameter: got 'linear' with half_life, allowed is 'log'; what is learnt is not w there")
