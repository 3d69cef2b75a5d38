"""DeepSeek-V3 and R1, and Kimi-K2, which is the same under another `model_type`: latent attention, and a mixture of
experts behind a sigmoid router with groups and a bias for the choice.

Source: transformers 5.24, models/deepseek_v3; config.json of deepseek-ai/DeepSeek-V3.
"""

from __future__ import annotations

from megatron_daro.families.table import (
    DEEPSEEK_EXPERTS,
    DENSE_MLP,
    EXPERTS,
    LATENT_ATTENTION,
    OUTSIDE,
    SHARED_EXPERTS,
    Family,
)

FAMILY = Family(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    tensors={**OUTSIDE, **LATENT_ATTENTION, **DENSE_MLP, **EXPERTS, **SHARED_EXPERTS},
    defaults={
        "first_k_dense_replace": 3,
        "kv_lora_rank": 512,
        "max_position_embeddings": 4096,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 8,
        "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "routed_scaling_factor": 2.5,
        "topk_group": 4,
        "v_head_dim": 128,
    },
    experts=DEEPSEEK_EXPERTS,
    loaded_together=("q_down", "kv_down"),
    further_tokens="num_nextn_predict_layers",
    only={
        "moe_layer_freq": (1,),
        "rope_interleave": (True,),
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
    },
    # The loss that balanced experts in pretraining, expert parallelism of servers, and code that is not run.
    harmless=frozenset({"aux_loss_alpha", "seq_aux", "ep_size", "auto_map"}),
)
