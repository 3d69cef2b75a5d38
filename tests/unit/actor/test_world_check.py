"""The dry run of a world: what fits is counted, and every kind of mistake in the rules is found by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from published_configs import (
    DEEPSEEK_V3,
    GLM_45_AIR,
    GPT_OSS_120B,
    QWEN3_5_27B,
    QWEN3_5_35B_A3B,
    QWEN3_NEXT_80B_A3B,
)

from megatron_daro.actor.parallel import Layout
from megatron_daro.cli import main
from megatron_daro.config.model_shape import read_model_shape, text_part
from megatron_daro.errors import ModelError
from megatron_daro.workshop import check_layout
from megatron_daro.workshop.check_layout import check_world

SHARED_CONFIGS = Path(__file__).parents[4] / "shared" / "data" / "configs"
DENSE = {
    "model_type": "qwen2",
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "vocab_size": 100,
}
EXPERTS = {
    **DENSE,
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "mlp_only_layers": [1],
    "norm_topk_prob": True,
}
GLM = {**DENSE, "model_type": "glm4_moe", "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
DEEPSEEK = {
    **DENSE,
    **dict(GLM, model_type="deepseek_v3", num_key_value_heads=8, first_k_dense_replace=1, n_group=1, topk_group=1),
    "qk_rope_head_dim": 8,
    "kv_lora_rank": 20,
}
NEXT = {**DENSE, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8}
NEXT |= {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 6, "linear_value_head_dim": 10}
MIXTRAL = {**DENSE, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
# The embedding and the loss count as layers: the first part of the first stage and the last of the last have none.
BOTH_ENDS = {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}
WORLD = Layout(tensor=2, pipeline=2, data=4, expert=4)


@pytest.mark.parametrize(
    ("config", "layout", "options"),
    [
        (DENSE, Layout(), {}),
        (DENSE, Layout(tensor=4, pipeline=2, context=2), {}),  # more ranks than key-value heads
        ({**DENSE, "tie_word_embeddings": True}, Layout(tensor=2, pipeline=4), {}),
        ({**DENSE, "tie_word_embeddings": True}, Layout(data=2), {}),
        (DENSE, Layout(pipeline=2), {"num_layers_in_first_pipeline_stage": 1}),
        (DENSE, Layout(pipeline=2, virtual_pipeline=2), {}),
        ({**DENSE, "tie_word_embeddings": True}, Layout(tensor=2, pipeline=3, virtual_pipeline=2), BOTH_ENDS),
        (EXPERTS, replace(WORLD, virtual_pipeline=2), {}),
        (EXPERTS, WORLD, {}),
        (EXPERTS, Layout(tensor=2, data=2, expert=2, expert_tensor=2), {}),  # experts are cut and shared
        (MIXTRAL, Layout(data=4, expert=2), {}),
        ({**GLM, "use_qk_norm": True, "attention_bias": True}, WORLD, {}),
        ({**GLM, "n_group": 2}, Layout(data=4, expert=2), {}),
        (DEEPSEEK, replace(WORLD, virtual_pipeline=2), {}),
        ({**NEXT, "model_type": "qwen3_next"}, replace(WORLD, virtual_pipeline=2), {}),
        ({**NEXT, "model_type": "qwen3_5_moe_text"}, Layout(tensor=4, expert=4), {}),  # more ranks than key-value heads
        ({**DEEPSEEK, "q_lora_rank": None}, Layout(data=4, expert=2), {}),
    ],
)
def test_a_layout_that_fits(config, layout, options):
    shape = read_model_shape(config)
    report = check_world(shape, layout, options=options)
    assert [share.rank for share in report.ranks] == list(range(layout.world_size))
    assert {share.stage for share in report.ranks} == set(range(layout.pipeline))
    in_fp32 = shape.linear or (shape.experts is not None and shape.experts.scores == "sigmoid")
    assert in_fp32 or all(share.size_bytes == 2 * share.parameters for share in report.ranks)
    assert report.parameters == shape.num_parameters
    if layout.world_size == layout.data:  # whole replicas: of experts, each rank has its part
        padding = 12 * 64 * (1 if shape.tie else 2)
        experts = 3 * 64 * shape.experts.ffn * 8 * shape.expert_layers if shape.experts else 0
        own = shape.num_parameters + padding - experts + experts // layout.expert
        assert {share.parameters for share in report.ranks} == {own}


def drop_last(parameters):
    return parameters[:-1]


def twice(parameters):
    return [*parameters, parameters[-1]]


def first_expert_everywhere(parameters):
    return [replace(p, rule=p.peers[0]) if p.rule.expert is not None else p for p in parameters]


def uncut(parameters):
    return [replace(p, rule=replace(p.rule, kind="rows")) if "proj" in p.rule.megatron_name else p for p in parameters]


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (drop_last, r" 0 parameters"),
        (twice, r" 2 times"),
        (first_expert_everywhere, r"experts\.0.* 8 ranks"),
        (uncut, r"linear_proj.* shape"),
    ],
)
def test_a_mistake_is_found_by_name(monkeypatch, spoil, words):
    found = check_layout.local_parameters
    monkeypatch.setattr(check_layout, "local_parameters", lambda *arguments: spoil(found(*arguments)))
    with pytest.raises(ModelError, match=words):
        check_world(read_model_shape(EXPERTS), WORLD)


def test_ranks_that_all_take_the_first_slice_are_found(monkeypatch):
    place = check_layout.tensor_parallel_place
    monkeypatch.setattr(check_layout, "tensor_parallel_place", lambda rule: (0, place(rule)[1]))
    with pytest.raises(ModelError, match="no rank"):
        check_world(read_model_shape(DENSE), Layout(tensor=2))


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(EXPERTS))
    return str(path)


def test_the_command_prints_each_rank(config, capsys):
    assert main(["check-layout", config, *["--world", "8", "--tp", "2", "--ep", "4", "--etp", "1", "--json"]]) == 0
    report = json.loads(capsys.readouterr().out)
    assert len(report["ranks"]) == 8 and report["layout"]["data"] == 4


def test_the_command_names_every_problem_of_the_layout(config, capsys):
    assert main(["check-layout", config, *["--world", "12", "--tp", "2", "--ep", "3", "--pp", "3"]]) == 2
    printed = capsys.readouterr().err
    assert "actor.pipeline_parallel: got 3" in printed and "actor.expert_parallel: got 3" in printed


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("config", "parameters", "layout", "ends"),
    [
        (GLM_45_AIR, 106_852_251_264, Layout(8, 4, 1, 2, expert=8), (10, 12)),
        (GLM_45_AIR, 106_852_251_264, Layout(4, 2, 1, 8, expert=32), ()),
        (GLM_45_AIR, 106_852_251_264, Layout(2, 4, 4, 2, expert=16), (10, 12)),
        (GPT_OSS_120B, 116_829_156_672, Layout(8, 4, 1, 2, expert=16), ()),
        (GPT_OSS_120B, 116_829_156_672, Layout(4, 2, 2, 4, expert=32), ()),
        (DEEPSEEK_V3, 671_026_419_200, Layout(4, 4, 1, 4, expert=16), (16, 13)),
        (QWEN3_NEXT_80B_A3B, 79_674_391_296, Layout(4, 4, 1, 4, expert=16), ()),
        (QWEN3_5_27B, 26_895_998_464, Layout(8, 4, 1, 2), ()),
        (QWEN3_5_35B_A3B, 34_660_610_688, Layout(2, 2, 1, 16, expert=32), ()),
    ],
)
def test_published_families_on_a_world_of_64(config, parameters, layout, ends):
    stages = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
    report = check_world(read_model_shape(text_part(config)), layout, options=dict(zip(stages, ends, strict=False)))
    assert len(report.ranks) == 64 and report.parameters == parameters


@pytest.mark.heavy
@pytest.mark.shared
@pytest.mark.parametrize("file", sorted(SHARED_CONFIGS.glob("*.json")), ids=lambda file: file.stem)
def test_published_models_on_a_world_of_64(file):
    shape = read_model_shape(json.loads(file.read_text()))
    tensor = next(size for size in (8, 4, 2) if shape.heads % size == 0)
    layout = Layout(tensor=tensor, pipeline=4, data=64 // 4 // tensor)
    if shape.experts:
        layout = replace(layout, expert=8, expert_tensor=1)
    assert len(check_world(shape, layout).ranks) == 64
