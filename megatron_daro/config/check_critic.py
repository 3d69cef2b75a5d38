"""Checks of a critic: whether there is one, and whether it is of the policy's shape and tokenizer.

Called by checks.py with the others, and by the ranks before they build one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from megatron_daro.config.model_shape import ModelShape, read_model_shape
from megatron_daro.config.problems import Problem
from megatron_daro.config.sections import Config
from megatron_daro.errors import ModelError

_SIZES = ("family", "layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "experts")


def different_sizes(critic: ModelShape, policy: ModelShape) -> str:
    """Return what of a critic's shape is not the policy's, for a message; empty where nothing is."""
    return ", ".join(
        f"{name} {getattr(critic, name)} (the policy: {getattr(policy, name)})"
        for name in _SIZES
        if getattr(critic, name) != getattr(policy, name)
    )
