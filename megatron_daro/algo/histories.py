"""Algorithms that weigh by what earlier steps were like: HA-DW (pass rates) and FADE (pass rates and entropy).

As every algorithm (see `algorithm`). A step is weighed with the averages over the steps before
it, and changes them after it was applied, on every rank alike; the averages are part of the checkpoint. A step is one
optimizer step. Refuses options out of their range and states that are not its own.

Shape letters: N samples, K rollouts per prompt.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from typing_extensions import Unpack

from megatron_daro.algo.algorithm import BatchTotals, Common, SampleAlgorithm, Samples, StepStats, token_mean
from megatron_daro.errors import AlgorithmError, CheckpointError

Every = Literal["step", "batch"]


class HaDw(SampleAlgorithm):
    """HA-DW: GRPO's advantage times scale * exp(-sgn(A) (mu - C)), C the pass rate that earlier steps lead to expect.

    Right answers to questions harder than usual count more, wrong ones less, and the reverse. After a step with pass
    rate y, C becomes (1 - eta) C + eta y with eta = rate * standard deviation of the last `window` values of C, at most
    1 (eq. 7 to 12). That rule never moves a C that has not moved, and no start is given: until `window` steps have
    passed, C is the mean of their y (the paper's hard update, eq. 134), and the first step's own y before there is any.

    A step is an optimizer step here, and a batch of several in the paper: with `every="batch"` C stays as it is over
    all updates of a batch, and moves by the pass rate of all of them when the next batch begins.

    Source: arXiv 2601.08521, eq. 7 to 17; scale 1.3 is the best of its table 7. eta's factor and the window are not
    printed: chosen 1 and 10.
    """

    name = "ha_dw"

    def __init__(
        self,
        *,
        scale: float = 1.3,
        rate: float = 1.0,
        window: int = 10,
        every: Every = "step",
        **common: Unpack[Common],
    ) -> None:
        """Take the options of `Algorithm`, scale and rate above 0, window, 2 steps or more, and what a step is.

        Raises:
            AlgorithmError: an option is out of range.
        """
        super().__init__(**common)
        for field, value in (("scale", scale), ("rate", rate)):
            if not 0 < value < math.inf:
                raise AlgorithmError(f"{field}: got {value}, allowed is a number above 0")
        if window < 2:
            raise AlgorithmError(f"window: got {window}, allowed is 2 or more: one value has no standard deviation")
        self.scale, self.rate, self.window = float(scale), float(rate), int(window)
        if every not in get_args(Every):
            raise AlgorithmError(f"every: got {every!r}, allowed are {', '.join(get_args(Every))}")
        self.every = every
        self._pending: list[list[float]] = []
        self._anchor: float | None = None
        self._early: list[float] = []
        self._anchors: list[float] = []

    def coefficients(self, samples: Samples, totals: BatchTotals) -> Tensor:
        """See `Algorithm.coefficients`."""
        anchor = totals.pass_rate if self._anchor is None else self._anchor
        gap_N = samples.bins_N.to(torch.float64) / self.rollouts_per_prompt - anchor
        factor_N = self.scale * torch.exp(-samples.advantages_N.to(torch.float64).sign() * gap_N)
        return token_mean(samples.lengths_N, totals) * factor_N

    def begin_batch(self) -> None:
        """Move C by the pass rate of the batch that ended, where that is what moves it."""
        if self._pending:
            rollouts = sum(count for _, count in self._pending)
            self._move(sum(rate * count for rate, count in self._pending) / rollouts)
            self._pending = []

    def learn(self, step_stats: StepStats) -> None:
        """Move C by the step's pass rate, or keep that for the end of the batch."""
        totals = step_stats.totals
        if self.every == "step":
            self._move(totals.pass_rate)
        elif totals.num_rollouts:
            self._pending = [*self._pending, [totals.pass_rate, float(totals.num_rollouts)]]

    def _move(self, observed: float) -> None:
        if self._anchor is None or self._early:
            self._early = [*self._early, observed]
            self._anchor = sum(self._early) / len(self._early)
            self._early = self._early if len(self._early) < self.window else []
        else:
            recent = torch.tensor(self._anchors, dtype=torch.float64)
            eta = min(self.rate * float(recent.std(correction=0)), 1.0)
            self._anchor = (1 - eta) * self._anchor + eta * observed
        self._anchors = [*self._anchors, self._anchor][-self.window :]

    def state_dict(self) -> dict[str, Any]:
        """Return C, its last values, the pass rates of the first steps, and those of a batch that has not ended."""
        own = {"anchor": self._anchor, "anchors": self._anchors, "early": self._early}
        return {**super().state_dict(), **own, **({"pending": self._pending} if self._pending else {})}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raise CheckpointError for another algorithm or a torn state. A shorter window forgets the oldest values."""
        super().load_state_dict(state)
        anchors, early = _shares("anchors", state), _shares("early", state)
        anchor = _number("anchor", state)
        if (anchor is None) != (not anchors) or (anchors and anchors[-1] != anchor):
            raise _torn("anchor", anchor, "the last of anchors")
        self._pending = _pending(state)
        self._anchor, self._anchors, self._early = anchor, anchors[-self.window :], early


class Fade(SampleAlgorithm):
    """FADE: (1 - mu)^(alpha - 1) (r - mu), wrong answers over delta; two averages move alpha and delta.

    alpha = clip(3 (1 - p) / (2 p), 1, max_power), p the average pass rate of the steps: hard questions first, GRPO's
    middle ones later. delta = clip(1 + H - target, min_scale, 1), H the average entropy: wrong answers are pushed down
    harder once the entropy is below its target.

    Source: arXiv 2607.01490, through a reader's notes with its formulas and pseudo-code (the paper itself could not be
    had whole). The target is half of the first step's entropy unless given: what the paper found best. The averages
    start at 0.5 and at the first entropy; the weight of a new step in them is `rate`, 0.02. The notes print 0.02 in the
    place of the old value's weight, with which nothing would be averaged.
    """

    name = "fade"
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

    def coefficients(self, samples: Samples, totals: BatchTotals) -> Tensor:
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
        """Raise CheckpointError for another algorithm or a torn state. A target of the options replaces the saved."""
        super().load_state_dict(state)
        solved = _number("solved", state)
        if solved is None or not 0 <= solved <= 1:
            raise _torn("solved", solved, "a number from 0 to 1")
        entropy, target = _number("entropy", state), _number("target_entropy", state)
        self._solved, self._entropy = solved, entropy
        self._target = target if self._given_target is None else self._given_target


def _number(name: str, state: Mapping[str, Any]) -> float | None:
    """Return a saved number, or None where none was there yet."""
    value = state.get(name)
    if value is not None and not _is_number(value):
        raise _torn(name, value, "a finite number, or null before the first step")
    return value


def _is_number(value: object) -> bool:
    return isinstance(value, float) and math.isfinite(value)


def _shares(name: str, state: Mapping[str, Any]) -> list[float]:
    """Return a saved list of pass rates."""
    values = state.get(name)
    if not isinstance(values, list) or not all(_is_number(v) and 0 <= v <= 1 for v in values):
        raise _torn(name, values, "a list of numbers from 0 to 1")
    return values


def _pending(state: Mapping[str, Any]) -> list[list[float]]:
    """Return saved pairs of pass rate and rollouts; none where the state has none."""
    pairs = state.get("pending", [])
    allowed = "a list of pairs: a pass rate from 0 to 1, and a number of rollouts above 0"
    if not isinstance(pairs, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise _torn("pending", pairs, allowed)
    if not all(_is_number(rate) and 0 <= rate <= 1 and _is_number(count) and count > 0 for rate, count in pairs):
        raise _torn("pending", pairs, allowed)
    return pairs


def _torn(name: str, value: object, allowed: str) -> CheckpointError:
    return CheckpointError(
        f"algorithm state, {name}: the saved state has {value!r}, allowed is {allowed}; the checkpoint is torn "
        "or edited"
    )
