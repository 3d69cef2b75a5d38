"""Mixtral 8x7B and 8x22B."""

from __future__ import annotations

from megatron_daro.families.table import ATTENTION, OUTSIDE, ExpertKeys, Family

_MOE = "model.layers.{layer}.block_sparse_moe."

FAMILY = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    tensors={
        **OUTSIDE,
        **ATTENTION,
        "router": (_MOE + "gate.weight",),
        "expert_gate_up": (_MOE + "experts.{expert}.w1.weight", _MOE + "experts.{expert}.w3.weight"),
        "expert_down": (_MOE + "experts.{expert}.w2.weight",),
    },
    defaults={
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
    },
    experts=ExpertKeys(number=("num_local_experts", "num_experts"), width="intermediate_size", normalize=True),
)
