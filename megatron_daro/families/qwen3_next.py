"""Qwen3-Next-80B-A3B: linear attention in three of four layers, gated attention in the fourth, experts beside a gated
shared expert.

Source: transformers 5.24, models/qwen3_next; config.json of Qwen/Qwen3-Next-80B-A3B-Instruct.
"""

from __future__ import annotations

from megatron_daro.families.table import (
    DENSE_MLP,
    EXPERTS,
    GATED_ATTENTION,
    LINEAR_ATTENTION,
    LINEAR_DEFAULTS,
    OUTSIDE,
    QWEN3_NEXT_EXPERTS,
    SHARED_EXPERT,
    Family,
)

_IN = "model.layers.{layer}.linear_attn.in_proj_"

FAMILY = Family(
    model_type="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    tensors={
        **OUTSIDE,
        **GATED_ATTENTION,
        "linear_in_by_head": (_IN + "qkvz.weight", _IN + "ba.weight"),
        **LINEAR_ATTENTION,
        **DENSE_MLP,
        **EXPERTS,
        **SHARED_EXPERT,
    },
    defaults={
        "head_dim": 256,
        **LINEAR_DEFAULTS,
        "max_position_embeddings": 32768,
        "norm_topk_prob": True,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "num_key_value_heads": 2,
        "partial_rotary_factor": 0.25,
        "shared_expert_intermediate_size": 512,
    },
    experts=QWEN3_NEXT_EXPERTS,
    window="switched",
    partial_rotary=True,
    untrained=("mtp.",),
    centered_norms=True,
)
