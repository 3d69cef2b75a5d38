"""The text part of Qwen3.5 and Qwen3.6 with experts (35B-A3B, 397B-A17B) beside a gated shared expert.

Source: transformers 5.24, models/qwen3_5_moe, `Qwen3_5MoeForCausalLM`.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_daro.families.qwen3_5 import DEFAULTS, FURTHER_TOKENS, HARMLESS, ONLY, TENSORS, UNTRAINED
from megatron_daro.families.table import EXPERTS, QWEN3_NEXT_EXPERTS, SHARED_EXPERT, Family

FAMILY = Family(
    model_type="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    tensors={**TENSORS, **EXPERTS, **SHARED_EXPERT},
    defaults={
        **DEFAULTS,
        "moe_intermediate_size": 512,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "num_key_value_heads": 2,
        "shared_expert_intermediate_size": 512,
    },
    experts=replace(QWEN3_NEXT_EXPERTS, normalize=True),
    window="switched",
    partial_rotary=True,
    further_tokens=FURTHER_TOKENS,
    untrained=UNTRAINED,
    packed={
        "expert_gate_up": "model.layers.{layer}.mlp.experts.gate_up_proj",
        "expert_down": "model.layers.{layer}.mlp.experts.down_proj",
    },
    centered_norms=True,
    only=ONLY,
    harmless=HARMLESS,
)
