"""How far the engine's log-probs are from the trainer's, and a warning when they drift apart.

A small constant mismatch (other kernels, another dtype) does no harm; a growing one precedes a collapse. `DriftWatch`
warns once per drift, and never because of a single step, unless log-probs are not finite. A resumed run learns its
baseline anew from its first steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

# The limits below are chosen, not measured on long runs: a late warning is better than one that people learn to ignore.
BASELINE_STEPS = 8
"""Finite steps whose median is the baseline of this run: two odd steps do not move a median of eight."""
FACTOR = 3.0
"""Growth over the baseline that counts as a drift; other lengths and prompts change the mean of a batch by less."""
PATIENCE = 3
"""Steps in a row above the limit before a warning, and steps in a row below it before the drift counts as over."""
LIMITS = {"mismatch/kl": (0.01, 0.1), "mismatch/logprob_abs_mean": (0.05, 0.3)}
"""Metric -> (floor, ceiling) of its limit, in nats per token. Below the floor growth is harmless: the largest
difference of any token between a bf16 server and transformers was 0.06, so a mean of 0.05 is more than rounding. Above
the ceiling something is wrong, even if the run began like that: the usual ratio is off by a third."""
CORRECTED = "mismatch/corrected_fraction"
CORRECTED_LIMIT = 0.2
"""Share of tokens that a correction may change. It is meant for outliers; above a fifth it shapes the gradient."""
_STALENESS = "rollout/staleness_mean"


@dataclass(slots=True)
class DriftWatch:
    """Watches one run.

    correction: how messages name the correction for the age of rollouts; "none"; or empty if it is not known.
    """

    correction: str = ""
    _baseline: dict[str, list[float]] = field(default_factory=dict)
    _above: int = 0
    _below: int = 0
    _warned: bool = False

    def observe(self, step: int, metrics: Mapping[str, float]) -> str | None:
        """Take one step's metrics in.

        Args:
            step: optimizer step. metrics: any; a step without mismatch metrics has no effect.

        Returns:
            A warning with the likely reason, once per drift; None otherwise.
        """
        seen = {key: metrics[key] for key in (*LIMITS, CORRECTED) if key in metrics}
        if not seen:
            return None
        broken = [key for key, value in seen.items() if not math.isfinite(value)]
        high = {key: limit for key, value in seen.items() if value > (limit := self._limit(key))}
        self._learn(seen)
        if not broken and not high:
            self._above, self._below = 0, self._below + 1
            self._warned = self._warned and self._below < PATIENCE
            return None
        self._above, self._below = self._above + 1, 0
        if self._warned or not (broken or self._above >= PATIENCE):
            return None
        self._warned = True
        if broken:
            return f"step {step}: {' and '.join(broken)} not finite. {_NOT_FINITE}"
        measured = ", ".join(f"{key} {seen[key]:.3g} (limit {limit:.3g})" for key, limit in high.items())
        text = f"step {step}: engine and trainer disagree about the same tokens for {self._above} steps: {measured}"
        return f"{text}. {self._reason(high, metrics.get(_STALENESS, 0.0))}"

    def _limit(self, key: str) -> float:
        """Return the limit of a metric; before the baseline is known, the ceiling."""
        if key == CORRECTED:
            return CORRECTED_LIMIT
        floor, ceiling = LIMITS[key]
        values = self._baseline.get(key, [])
        if len(values) < BASELINE_STEPS:
            return ceiling
        return min(max(floor, FACTOR * median(values)), ceiling)

    def _learn(self, seen: Mapping[str, float]) -> None:
        for key, value in seen.items():
            values = self._baseline.setdefault(key, [])
            if key in LIMITS and math.isfinite(value) and len(values) < BASELINE_STEPS:
                values.append(value)

    def _reason(self, high: Mapping[str, float], staleness: float) -> str:
        """Return the likely cause and what to do about it."""
        if set(high) == {CORRECTED}:
            return (
                "The correction changes so many tokens that it shapes the gradient: lower rollout.max_staleness or "
                "the learning rate, or widen algorithm.correction (cap, low, high)"
            )
        if staleness > 0 and self.correction in ("", "none"):
            return (
                f"Likely the age of the rollouts ({staleness:.2g} batches) without a correction: set "
                "algorithm.correction.kind=tis, or lower rollout.max_staleness"
            )
        if staleness > 0:
            return (
                f"Likely the age of the rollouts ({staleness:.2g} batches), which the correction {self.correction} "
                "cannot make good: lower rollout.max_staleness or the learning rate"
            )
        bound = "; algorithm.correction.kind=tis bounds the harm" if self.correction in ("", "none") else ""
        return (
            "The rollouts are fresh, so it is not their age: likely the numerics of the engine (dtype, quantization, "
            "attention backend, MoE routing) or weights that did not arrive whole. Compare the dtypes of engine and "
            f"actor{bound}"
        )


_NOT_FINITE = (
    "A log-prob of the engine or of the trainer is NaN or infinite: look at the rollouts of this step, and at the "
    "dtype and temperature of the engine"
)
