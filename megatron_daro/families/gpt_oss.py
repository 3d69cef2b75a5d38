"""gpt-oss-20b and gpt-oss-120b: attention with sinks, a sliding window in every other layer, biases, clamped experts.

Source: transformers 5.24, models/gpt_oss.
"""

from __future__ import annotations

from megatron_daro.families.table import (
    ATTENTION,
    EXPERT_BIASES,
    EXPERTS,
    OUTSIDE,
    QKV_BIAS,
    ExpertKeys,
    Family,
)

_LAYER = "model.layers.{layer}."
_EXPERTS = _LAYER + "mlp.experts."

FAMILY = Family(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    tensors={
        **OUTSIDE,
        **ATTENTION,
        **QKV_BIAS,
        "attention_output_bias": (_LAYER + "self_attn.o_proj.bias",),
        "sinks": (_LAYER + "self_attn.sinks",),
        **EXPERTS,
        "router": (_LAYER + "mlp.router.weight",),
        "router_logit_bias": (_LAYER + "mlp.router.bias",),
        **EXPERT_BIASES,
    },
    stacked={
        "expert_gate_up": _EXPERTS + "gate_up_proj",
        "expert_gate_up_bias": _EXPERTS + "gate_up_proj_bias",
        "expert_down": _EXPERTS + "down_proj",
        "expert_down_bias": _EXPERTS + "down_proj_bias",
    },
    defaults={
        "attention_bias": True,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "num_experts_per_tok": 4,
        "num_key_value_heads": 8,
        "num_local_experts": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "sliding_window": 128,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    },
    window="alternating",
    experts=ExpertKeys(
        number=("num_local_experts", "num_experts"), width="intermediate_size", normalize=True, limit="swiglu_limit"
    ),
    only={"attention_bias": (True,), "swiglu_alpha": (1.702,)},
    harmless=frozenset({"experts_per_token", "initial_context_length"}),  # they repeat other keys
    quantized="mxfp4",
)
