"""Whole runs of a family that the tiny task's own model does not stand for: two layouts, the same numbers."""

from __future__ import annotations

import pytest
import tiny_task
import torch
from cli_runs import metric_lines, trained
from safetensors.torch import load_file, save_file

GLM = {
    "num_hidden_layers": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "head_dim": 16,
    "n_group": 2,
    "attention_bias": True,
    "routed_scaling_factor": 1.5,
    "num_nextn_predict_layers": 0,
}
DEEPSEEK = {
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "head_dim": 8,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 32,
    "n_group": 4,
    "topk_group": 2,
    "num_nextn_predict_layers": 0,
}
FAMILIES = {"Glm4MoeConfig": GLM, "DeepseekV3Config": DEEPSEEK}
COMPARED = ("loss/", "policy/", "difficulty/", "accuracy/", "eval/", "optimizer/")


GPT_OSS = {
    "num_hidden_layers": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "head_dim": 16,
    "sliding_window": 3,
    "swiglu_limit": 0.5,
    "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "truncate": False}
    | {"original_max_position_embeddings": 16},
}


OLMO3 = {
    "num_hidden_layers": 4,
    "sliding_window": 3,
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
}


@pytest.mark.heavy
@pytest.mark.parametrize("family", FAMILIES)
def test_it_trains_alike_in_two_layouts_and_its_router_keeps_its_bias(tiny, tmp_path, family):
    model = tmp_path / "model"
    tiny_task.save_tokenizer(model, tiny_task.SYMBOLS)
    tiny_task.pretrain(model, family=family, **FAMILIES[family])
    file, generator = model / "model.safetensors", torch.Generator().manual_seed(0)
    first = load_file(file)
    biases = {name: torch.randn(8, generator=generator) * 0.02 for name in first if name.endswith("correction_bias")}
    save_file(first | biases, file, metadata={"format": "pt"})
    for exported in trains_alike(tiny, model, tmp_path):
        assert len(biases) == 3 and all(torch.equal(exported[bias], biases[bias]) for bias in biases)


QWEN_NEXT = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 16,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
EXPERTS |= {"shared_expert_intermediate_size": 48}
LINEAR = ("A_log", "dt_bias", "conv1d.weight", "attn.norm.weight", "expert_gate.weight")
OWN_PARTS = {
    "GptOssConfig": (GPT_OSS, ("sinks", "proj_bias", "router.bias")),
    "Olmo3Config": (OLMO3, ("norm.weight",)),
    "Qwen3NextConfig": (QWEN_NEXT | EXPERTS, LINEAR),
    "Qwen3_5TextConfig": (QWEN_NEXT, LINEAR),
    "Qwen3_5MoeTextConfig": (QWEN_NEXT | EXPERTS, LINEAR),
}


@pytest.mark.heavy
@pytest.mark.parametrize("family", OWN_PARTS)
def test_it_trains_alike_in_two_layouts_and_parts_of_its_own_with_it(tiny, tmp_path, family):
    model, (sizes, own) = tmp_path / "model", OWN_PARTS[family]
    tiny_task.save_tokenizer(model, tiny_task.SYMBOLS)
    tiny_task.pretrain(model, family=family, **sizes)
    first = load_file(model / "model.safetensors")
    for exported in trains_alike(tiny, model, tmp_path):
        moved = {name for name in first if not torch.equal(exported[name], first[name])}
        assert {name for name in first if name.endswith(own)} <= moved


def trains_alike(tiny, model, tmp_path):
    """The weights that two runs of ten steps exported, after their metrics were found equal."""
    runs, weights, first = [], [], load_file(model / "model.safetensors")
    shared = ["actor.expert_parallel=2"] if any("experts" in name for name in first) else []
    cut, staged = ["actor.tensor_parallel=2", *shared], ["actor.tensor_parallel=1", "actor.pipeline_parallel=2"]
    for name, layout in {"cut": cut, "staged": staged}.items():
        options = [f"model.path={model}", f"trainer.run_dir={tmp_path / name}", "trainer.steps=10"]
        options += ["trainer.eval_every_steps=5", "trainer.export_hf=true", *layout]
        trained(["train", tiny.config, *options], tmp_path / f"{name}.log")
        runs.append(metric_lines(tmp_path / name))
        exported = {}
        for path in (tmp_path / name / "hf").glob("*.safetensors"):
            exported |= load_file(path)
        assert exported.keys() == first.keys()
        assert not torch.equal(exported["lm_head.weight"], first["lm_head.weight"])
        weights.append(exported)
    for one, other in zip(*runs, strict=True):
        keys = [key for key in one if key.startswith(COMPARED)]
        assert {key: one[key] for key in keys} == pytest.approx({key: other[key] for key in keys}, rel=1e-4, abs=1e-6)
    return weights
