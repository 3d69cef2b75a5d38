"""What SGLang's own loader makes of DeepSeek-V3's tensors, in buckets as an update brings them. Its attention does not
run on a CPU (0.5.23, `torch_native`), so no server answers with them here."""

from __future__ import annotations

import json

import pytest
import torch
from published_configs import DEEPSEEK_V3
from safetensors.torch import load_file, save_file
from test_sglang_shard_plan import of_sglang

from megatron_daro.config.model_shape import read_model_shape
from megatron_daro.convert.mapping import hf_tensor_shapes
from megatron_daro.sync.buckets import bucketize

pytestmark = [pytest.mark.slow, pytest.mark.heavy]

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "kv_lora_rank": 24,
    "moe_intermediate_size": 32,
    "n_group": 4,
    "n_routed_experts": 8,
    "num_attention_heads": 4,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 5,
    "num_key_value_heads": 4,
    "num_nextn_predict_layers": 0,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "topk_group": 2,
    "torch_dtype": "float32",
    "v_head_dim": 12,
    "vocab_size": 64,
}
KV = "kv_a_proj_with_mqa"


@pytest.mark.parametrize("rank", [40, None])
def test_the_loader_of_sglang_takes_every_tensor(tmp_path, rank):
    config = {**DEEPSEEK_V3, **SIZES, "q_lora_rank": rank}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shapes = hf_tensor_shapes(read_model_shape(config))
    # As ranks send them (tests/parallel/test_experts.py): the two that SGLang fuses one after the other.
    order = sorted(shapes, key=lambda name: (name.split(".self_attn.")[0], "q_a_proj" not in name, KV not in name))
    sent = {name: torch.randn(shapes[name]) for name in order}
    save_file(sent, tmp_path / "model.safetensors")
    calls = [bucket.names for bucket in bucketize(sent.items(), 1)]
    of_sglang(tmp_path, [{"model": str(tmp_path), "arguments": {}, "load": calls}])
    found = load_file(tmp_path / "0_0.safetensors")
    for name, values in found.items():
        assert torch.equal(values, expected(name, sent)), name
    assert sum(values.numel() for values in found.values()) == sum(values.numel() for values in sent.values())


def expected(name, sent):
    """The parameter of this name out of the tensors of the checkpoint, as the models of SGLang fuse them."""
    if "fused_qkv_a_proj_with_mqa" in name:
        return torch.cat([sent[name.replace("fused_qkv_a_proj_with_mqa", part)] for part in ("q_a_proj", KV)])
    if "gate_up_proj" in name:
        return torch.cat([sent[name.replace("gate_up_proj", part)] for part in ("gate_proj", "up_proj")])
    if "experts.w" not in name:
        return sent[name]
    layer, _, kind = name.rpartition("experts.")
    parts = ("gate_proj", "up_proj") if kind == "w13_weight" else ("down_proj",)
    return torch.stack([torch.cat([sent[f"{layer}experts.{i}.{part}.weight"] for part in parts]) for i in range(8)])
