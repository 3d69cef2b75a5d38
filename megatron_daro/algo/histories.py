"""HA-DW, which weights by the pass rates of earlier steps.

Data flows as in every algorithm (see `algorithm`). A step is weighted with the average pass rate of the steps before
it, and then updates that average, equally on every rank; the average is part of the checkpoint. Refuses options that
are out of range and states that are not its own.

Shape letters: N samples, K rollouts per prompt.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from typing_extensions import Unpack

from megatron_daro.algo.algorithm import Common, SampleAlgorithm, Samples, StepStats, StepTotals, number, token_mean
from megatron_daro.errors import AlgorithmError, CheckpointError

Every = Literal["step", "batch"]


class HaDw(SampleAlgorithm):
    """HA-DW: GRPO's advantage times scale * exp(-sgn(A) (mu - C)); C is the pass rate expected from earlier steps.

    For questions harder than usual, right answers count more and wrong ones less; for easier ones it is the reverse.
    After a step with pass rate y, C becomes (1 - eta) C + eta y, with eta = rate * standard deviation of the last
    `window` values of C, at most 1. This rule cannot move a C that has never moved, and the paper gives no start: until
    `window` steps have passed, C is the mean of their y (the paper's hard update, eq. 134); in the first step it is
    that step's own y (with `every="batch"` in each step of the first batch).

    Here a step is an optimizer step; in the paper it is a batch of several. With `every="batch"` C stays the same for
    all steps of a later batch, and is updated with the pass rate of all of them when the next batch begins.

    Source: arXiv 2601.08521, eq. 7 to 17; scale 1.3 is the best of its table 7. eta's factor and the window are not
    printed: chosen 1 and 10.
    """

    name = "ha_dw"
    weighs_by_advantage = True

    def __init__(
        self,
        *,
        scale: float = 1.3,
        rate: float = 1.0,
        window: int = 10,
        every: Every = "step",
        **common: Unpack[Common],
    ) -> None:
        """Take the options of `Algorithm`, and:

        Args:
            scale: factor of all weights, above 0.
            rate: how fast the expected pass rate follows the observed one, in units of its standard deviation, above 0.
            window: number of steps over which that standard deviation is taken, and after which it is first used, 2 or
                more.
            every: what updates the expected pass rate: each optimizer step, or each batch of several (as in the paper).
        """
        super().__init__(**common)
        self.scale, self.rate = number("scale", scale, 0.0, closed=False), number("rate", rate, 0.0, closed=False)
        if window < 2:
            raise AlgorithmError(f"window: got {window}, allowed is 2 or more: one value has no standard deviation")
        self.window, self.every = window, every
        self._pending: list[list[float]] = []
        self._anchor: float | None = None
        self._early: list[float] = []
        self._anchors: list[float] = []

    def coefficients(self, samples: Samples, totals: StepTotals) -> Tensor:
        """See `Algorithm.coefficients`."""
        anchor = totals.pass_rate if self._anchor is None else self._anchor
        gap_N = samples.bins_N.to(torch.float64) / self.rollouts_per_prompt - anchor
        factor_N = self.scale * torch.exp(-samples.advantages_N.to(torch.float64).sign() * gap_N)
        return token_mean(samples.lengths_N, totals) * factor_N

    def begin_batch(self) -> None:
        """Update C with the pass rate of the batch that ended, if `every` is "batch"."""
        if self._pending:
            rollouts = sum(count for _, count in self._pending)
            self._move(sum(rate * count for rate, count in self._pending) / rollouts)
            self._pending = []

    def learn(self, step_stats: StepStats) -> None:
        """Update C with the step's pass rate, or keep the pass rate until the next batch begins."""
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
        """Return C, its last values, the pass rates of the first steps, and those of the steps that have not updated C
        yet."""
        own = {"anchor": self._anchor, "anchors": self._anchors, "early": self._early}
        return {**super().state_dict(), **own, **({"pending": self._pending} if self._pending else {})}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a saved state; a shorter window drops the oldest values. Raises CheckpointError if it is of another
        algorithm or torn."""
        super().load_state_dict(state)
        anchors, early = _shares("anchors", state), _shares("early", state)
        anchor = saved_number("anchor", state)
        if (anchor is None) != (not anchors) or (anchors and anchors[-1] != anchor):
            raise torn_entry("anchor", anchor, "the last of anchors")
        self._pending = _pending(state)
        self._anchor, self._anchors, self._early = anchor, anchors[-self.window :], early


def saved_number(name: str, state: Mapping[str, Any]) -> float | None:
    """Return a saved number, or None if there was none yet."""
    value = state.get(name)
    if value is not None and not _is_number(value):
        raise torn_entry(name, value, "a finite number, or null before the first step")
    return value


def _is_number(value: object) -> bool:
    return isinstance(value, float) and math.isfinite(value)


def _shares(name: str, state: Mapping[str, Any]) -> list[float]:
    """Return a saved list of pass rates."""
    values = state.get(name)
    if not isinstance(values, list) or not all(_is_number(v) and 0 <= v <= 1 for v in values):
        raise torn_entry(name, values, "a list of numbers from 0 to 1")
    return values


def _pending(state: Mapping[str, Any]) -> list[list[float]]:
    """Return the saved pairs of pass rate and rollouts; empty if the state has none."""
    pairs = state.get("pending", [])
    allowed = "a list of pairs: a pass rate from 0 to 1, and a number of rollouts above 0"
    if not isinstance(pairs, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise torn_entry("pending", pairs, allowed)
    if not all(_is_number(rate) and 0 <= rate <= 1 and _is_number(count) and count > 0 for rate, count in pairs):
        raise torn_entry("pending", pairs, allowed)
    return pairs


def torn_entry(name: str, value: object, allowed: str) -> CheckpointError:
    return CheckpointError(
        f"algorithm state, {name}: the saved state has {value!r}, allowed is {allowed}; the checkpoint is torn "
        "or edited"
    )
