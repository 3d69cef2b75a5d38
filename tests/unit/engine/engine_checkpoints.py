"""Small models of every family with random weights, saved as ordinary checkpoints."""

from __future__ import annotations

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Glm4MoeConfig,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    Olmo3Config,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

CONFIGS = {"qwen2": Qwen2Config, "qwen3": Qwen3Config, "llama": LlamaConfig}
EXPERTS = {
    "qwen3_moe": (Qwen3MoeConfig, {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
    "mixtral": (MixtralConfig, {"num_local_experts": 3, "num_experts_per_tok": 2}),
    "deepseek_v3": (
        DeepseekV3Config,
        {"n_routed_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 16, "n_group": 2, "topk_group": 2}
        | {"num_key_value_heads": 4, "first_k_dense_replace": 1, "kv_lora_rank": 12, "q_lora_rank": 20}
        | {"qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "head_dim": 4, "v_head_dim": 5},
    ),
    "glm4_moe": (Glm4MoeConfig, {"n_routed_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
}
EXPERTS["gpt_oss"] = GptOssConfig, {"num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": 5}
EXPERTS["qwen3_next"] = (
    Qwen3NextConfig,
    {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24}
    | {"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4}
    | {"linear_key_head_dim": 6, "linear_value_head_dim": 5},
)
EXPERTS["olmo3"] = Olmo3Config, {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
VOCAB = 31


def save_small_model(directory, family="qwen2", *, tie=False, seed=0, spread=0.3):
    """Weights wide enough that the next-token distributions differ clearly from uniform and from each other."""
    own = {} if family == "qwen2" else {"head_dim": 8}
    config_class, experts = EXPERTS[family] if family in EXPERTS else (CONFIGS[family], {})
    config = config_class(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
        tie_word_embeddings=tie,
        **{"num_key_value_heads": 2, **own, **experts},
    )
    model = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(0.0, spread, generator=generator)
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):
                buffer.normal_(0.0, spread, generator=generator)
    model.save_pretrained(directory)
    return model
