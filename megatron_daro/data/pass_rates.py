"""Pass rates that a file stores beside its problems, and of which model they are.

Place in the data flow: a row of a file -> PassRate -> the order of training (orders.py). `megatron-daro curate` writes
these fields; a file of somebody else with a field `pass_rate` from 0 to 1 can be used too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_daro.data.containers import WrittenNumber

FIELD = "pass_rate"
SAMPLES, MODEL, WEIGHTS = "pass_rate_samples", "pass_rate_model", "pass_rate_weights"


@dataclass(frozen=True, slots=True)
class PassRate:
    """How often a model solved a problem. rate: in [0, 1]; samples: answers asked for, 0 if not said; model: its name;
    weights: a digest of its weights (empty: not said)."""

    rate: float
    samples: int = 0
    model: str = ""
    weights: str = ""


def pass_rate_of(row: object) -> PassRate | None:
    """Return the pass rate of a row; None where it has none that is a number from 0 to 1."""
    if not isinstance(row, Mapping):
        return None
    rate = _number(row.get(FIELD))
    if rate is None or not 0 <= rate <= 1:
        return None
    samples, model, weights = _number(row.get(SAMPLES)), row.get(MODEL), row.get(WEIGHTS)
    return PassRate(
        rate,
        int(samples) if samples is not None and samples >= 0 else 0,
        model if isinstance(model, str) else "",
        weights if isinstance(weights, str) else "",
    )


def _number(value: object) -> float | None:
    if isinstance(value, WrittenNumber):
        value = float(value.text)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) else None
