"""What SGLang's own loaders make of tensors, in buckets as an update brings them, of families that it does not compute
on a CPU (0.5.23): latent attention is not in `torch_native`, and linear attention asks for kernels that are missing."""

from __future__ import annotations

import json

import pytest
import torch
from published_configs import DEEPSEEK_V3, QWEN3_5_27B, QWEN3_5_35B_A3B, QWEN3_NEXT_80B_A3B
from safetensors.torch import load_file, save_file
from test_sglang_shard_plan import of_sglang

from megatron_daro.config.model_shape import read_model_shape, text_part
from megatron_daro.convert.mapping import hf_tensor_shapes
from megatron_daro.sync.buckets import bucketize

pytestmark = [pytest.mark.slow, pytest.mark.heavy]

SMALL = {
    "head_dim": 32,
    "hidden_size": 64,
    "intermediate_size": 64,
    "kv_lora_rank": 24,
    "layer_types": [*["linear_attention"] * 3, "full_attention", "linear_attention"],
    "linear_key_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 16,
    "moe_intermediate_size": 32,
    "n_group": 4,
    "n_routed_experts": 8,
    "num_attention_heads": 4,
    "num_experts": 8,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 5,
    "num_key_value_heads": 2,
    "num_nextn_predict_layers": 0,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "shared_expert_intermediate_size": 48,
    "topk_group": 2,
    "torch_dtype": "float32",
    "v_head_dim": 12,
    "vocab_size": 64,
}
"""For those keys that a published config.json has."""
MODELS = {
    "deepseek_v3": (DEEPSEEK_V3, {"num_key_value_heads": 4, "q_lora_rank": 40}),
    "deepseek_v3_plain": (DEEPSEEK_V3, {"num_key_value_heads": 4, "q_lora_rank": None}),
    "qwen3_next": (QWEN3_NEXT_80B_A3B, {}),
    "qwen3_5": (text_part(QWEN3_5_27B), {}),
    "qwen3_5_moe": (text_part(QWEN3_5_35B_A3B), {}),
}
KV = "kv_a_proj_with_mqa"
FUSED = {
    "fused_qkv_a_proj_with_mqa": ("q_a_proj", KV),
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
    "w13_weight": ("gate_proj.weight", "up_proj.weight"),
    "w2_weight": ("down_proj.weight",),
}


@pytest.mark.parametrize("model", MODELS)
def test_the_loader_of_sglang_takes_every_tensor(tmp_path, model):
    published, changes = MODELS[model]
    config = published | {key: value for key, value in SMALL.items() if key in published} | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    shapes = hf_tensor_shapes(read_model_shape(config))
    # As ranks send them (tests/parallel/test_experts.py): the two that SGLang fuses one after the other.
    order = sorted(shapes, key=lambda name: (name.split(".self_attn.")[0], "q_a_proj" not in name, KV not in name))
    sent = {name: torch.randn(shapes[name]) for name in order}
    save_file(sent, tmp_path / "model.safetensors")
    calls = [bucket.names for bucket in bucketize(sent.items(), 1)]
    arguments = {"disable_radix_cache": True}  # which on a CPU cannot keep states
    of_sglang(tmp_path, [{"model": str(tmp_path), "arguments": arguments, "load": calls}])
    found = load_file(tmp_path / "0_0.safetensors")
    if "linear_num_key_heads" in config:  # such models have no name of their own for attention
        sent = {name.replace("self_attn.", ""): tensor for name, tensor in sent.items()}
    for name, values in found.items():
        assert torch.equal(values, expected(name, sent)), name
    assert sum(values.numel() for values in found.values()) == sum(values.numel() for values in sent.values())


def expected(name, sent):
    """The parameter of this name out of the tensors of the checkpoint, as the models of SGLang fuse them."""
    if name in sent:
        return sent[name]
    fused = next(part for part in FUSED if part in name)
    if "experts.w" not in name:
        return torch.cat([sent[name.replace(fused, part)] for part in FUSED[fused]])
    of_experts = [[sent[name.replace(fused, f"{i}.{part}")] for part in FUSED[fused]] for i in range(8)]
    return torch.stack([torch.cat(parts) for parts in of_experts])
