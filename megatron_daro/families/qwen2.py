"""Qwen2, Qwen2.5 and Qwen2.5-Math, dense."""

from __future__ import annotations

from megatron_daro.families.table import DECODER, QKV_BIAS, Family

FAMILY = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    tensors={**DECODER, **QKV_BIAS},
    defaults={
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    window="switched_from_layer",
)
