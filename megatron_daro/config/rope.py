"""Rotary position embeddings as a model's config.json describes them: plain, Llama 3's scaling, YaRN.

Keys of transformers 4 (`rope_theta`, `rope_scaling`) and 5 (`rope_parameters`) are both understood. Refuses every other
scaling: the checkpoint was trained with it, and its log-probabilities would be wrong without.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_daro.config.model_values import flag, integer, number
from megatron_daro.errors import ModelError


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3's frequency scaling. `original_max_positions` in tokens; the factors have no unit."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071). `original_max_positions` in tokens; beta_fast and beta_slow in rotations.

    attention_factor multiplies cosine and sine. truncate: bounds of the ramp are rounded to whole dimensions.
    """

    factor: float
    original_max_positions: int
    beta_fast: float
    beta_slow: float
    attention_factor: float
    truncate: bool


RopeScaling = Llama3Scaling | YarnScaling


def read_rope(config: Mapping[str, Any], where: str) -> tuple[float, RopeScaling | None]:
    """Return base frequency and scaling. Raises ModelError, naming the file as `where`."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = {"rope_theta": rope.get("rope_theta", config.get("rope_theta"))}
    base = number(theta, "rope_theta", where, default=1e4)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default" and any(isinstance(value, Mapping) for value in rope.values()):
        raise ModelError(f"{where}: rope_parameters per layer type are not supported; got {sorted(rope)}.")
    if rope.get("partial_rotary_factor", 1.0) not in (1.0, None):
        raise ModelError(
            f"{where}: partial_rotary_factor {rope['partial_rotary_factor']} is not supported (allowed: 1)."
        )
    if kind == "default":
        return base, None
    if kind == "llama3":
        return base, _llama3(rope, where)
    if kind == "yarn":
        return base, _yarn(rope, config, where)
    raise ModelError(f"{where}: rope type {kind!r} is not supported; allowed: 'default', 'llama3', 'yarn'.")


def _llama3(rope: Mapping[str, Any], where: str) -> Llama3Scaling:
    return Llama3Scaling(
        factor=number(rope, "factor", where),
        low_freq_factor=number(rope, "low_freq_factor", where),
        high_freq_factor=number(rope, "high_freq_factor", where),
        original_max_positions=integer(rope, "original_max_position_embeddings", where),
    )


def _yarn(rope: Mapping[str, Any], config: Mapping[str, Any], where: str) -> YarnScaling:
    """Read YaRN; a missing original length is max_position_embeddings, as for transformers."""
    longest = config.get("max_position_embeddings")
    original = integer(rope, "original_max_position_embeddings", where, default=longest)
    factor = number(rope, "factor", where)
    return YarnScaling(
        factor=factor,
        original_max_positions=original,
        beta_fast=number(rope, "beta_fast", where, default=32.0),
        beta_slow=number(rope, "beta_slow", where, default=1.0),
        attention_factor=_attention_factor(rope, factor, where),
        truncate=flag(rope, "truncate", where, default=True),
    )


def _attention_factor(rope: Mapping[str, Any], factor: float, where: str) -> float:
    """Return the given factor; else 0.1 * ln(factor) + 1, or the quotient of two such terms with their own weights."""
    if rope.get("attention_factor") is not None:
        return number(rope, "attention_factor", where)

    def concentration(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return concentration(number(rope, "mscale", where)) / concentration(number(rope, "mscale_all_dim", where))
    return concentration(1.0)
