"""Qwen3, dense."""

from __future__ import annotations

from megatron_daro.families.table import DECODER, QK_NORM, Family

FAMILY = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    tensors={**DECODER, **QK_NORM},
    defaults={
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    window="switched_from_layer",
)
