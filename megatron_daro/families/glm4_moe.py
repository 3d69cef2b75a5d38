"""GLM-4.5, GLM-4.5-Air, GLM-4.6 and GLM-4.7: a mixture of experts behind a sigmoid router with a bias for the choice.

Source: transformers 5.24, models/glm4_moe.
"""

from __future__ import annotations

from megatron_daro.families.table import DECODER, DEEPSEEK_EXPERTS, EXPERTS, QK_NORM, QKV_BIAS, SHARED_EXPERTS, Family

FAMILY = Family(
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    tensors={**DECODER, **QKV_BIAS, **QK_NORM, **EXPERTS, **SHARED_EXPERTS},
    defaults={
        "attention_bias": False,
        "first_k_dense_replace": 1,
        "max_position_embeddings": 131072,
        "n_group": 1,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 8,
        "num_key_value_heads": 8,
        "num_nextn_predict_layers": 1,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-5,
        "routed_scaling_factor": 1.0,
        "topk_group": 1,
        "use_qk_norm": False,
    },
    experts=DEEPSEEK_EXPERTS,
    switches={"qkv_bias": "attention_bias", "query_norm": "use_qk_norm", "key_norm": "use_qk_norm"},
    partial_rotary=True,
    further_tokens="num_nextn_predict_layers",
)
