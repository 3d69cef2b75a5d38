"""Qwen3 with a mixture of experts: Qwen3-30B-A3B, Qwen3-235B-A22B."""

from __future__ import annotations

from megatron_daro.families.table import DECODER, EXPERTS, QK_NORM, ExpertKeys, Family

FAMILY = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    tensors={**DECODER, **QK_NORM, **EXPERTS},
    defaults={
        "max_position_embeddings": 32768,
        "num_key_value_heads": 4,
        "norm_topk_prob": False,
        "sliding_window": 4096,
    },
    window="switched",
    experts=ExpertKeys(
        number=("num_experts", "num_local_experts"), width="moe_intermediate_size", normalize="norm_topk_prob"
    ),
)
