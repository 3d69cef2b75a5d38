"""OLMo 3: norms after attention and MLP, a window in three of four layers, YaRN in the fourth.

Source: transformers 5.24, models/olmo3.
"""

from __future__ import annotations

from megatron_daro.families.table import ATTENTION, DENSE_MLP, OUTSIDE, QK_NORM, Family

FAMILY = Family(
    model_type="olmo3",
    architecture="Olmo3ForCausalLM",
    tensors={
        **OUTSIDE,
        "qkv": ATTENTION["qkv"],
        **QK_NORM,
        "attention_output": ATTENTION["attention_output"],
        "attention_post_norm": ("model.layers.{layer}.post_attention_layernorm.weight",),
        **DENSE_MLP,
        "mlp_post_norm": ("model.layers.{layer}.post_feedforward_layernorm.weight",),
    },
    defaults={
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "sliding_window": 4096,
    },
    window="three_of_four",
    plain_windows=True,
    whole_qk_norm=True,
)
