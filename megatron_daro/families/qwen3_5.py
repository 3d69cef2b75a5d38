"""The text part of Qwen3.5 and Qwen3.6 with a dense MLP (27B, 9B, 4B): layers as in Qwen3-Next.

Source: transformers 5.24, models/qwen3_5, `Qwen3_5ForCausalLM`.
"""

from __future__ import annotations

from collections.abc import Mapping

from megatron_daro.families.table import (
    DENSE_MLP,
    GATED_ATTENTION,
    LINEAR_ATTENTION,
    LINEAR_DEFAULTS,
    OUTSIDE,
    Family,
    Names,
    Value,
)

_IN = "model.layers.{layer}.linear_attn.in_proj_"

TENSORS: Names = {
    **OUTSIDE,
    **GATED_ATTENTION,
    "linear_in": tuple(f"{_IN}{part}.weight" for part in ("qkv", "z", "b", "a")),
    **LINEAR_ATTENTION,
}
DEFAULTS: Mapping[str, Value] = {
    "head_dim": 256,
    **LINEAR_DEFAULTS,
    "max_position_embeddings": 32768,
    "mtp_num_hidden_layers": 0,
    "partial_rotary_factor": 0.25,
}
ONLY: Mapping[str, tuple[object, ...]] = {"attn_output_gate": (True,)}
UNTRAINED = ("mtp.", "model.visual.")
FURTHER_TOKENS = "mtp_num_hidden_layers"
HARMLESS = frozenset({"mamba_ssm_dtype", "mtp_use_dedicated_embeddings"})
"""Keys for the precision in which servers keep states, and for the layer for multi-token prediction."""

FAMILY = Family(
    model_type="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    tensors={**TENSORS, **DENSE_MLP},
    defaults={**DEFAULTS, "num_key_value_heads": 4},
    window="switched",
    partial_rotary=True,
    further_tokens=FURTHER_TOKENS,
    untrained=UNTRAINED,
    centered_norms=True,
    only=ONLY,
    harmless=HARMLESS,
)
