"""The dry run of a world: what fits is counted, and every kind of mistake in the rules is found by name."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_daro.actor import model
from megatron_daro.actor.parallel import Layout
from megatron_daro.config.actor import ActorSection
from megatron_daro.config.model_shape import read_model_shape
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
    ],
)
def test_a_layout_that_fits(config, layout, options):
    shape = read_model_shape(config)
    report = check_world(shape, layout, options=options)
    assert [share.rank for share in report.ranks] == list(range(layout.world_size))
    assert {share.stage for share in report.ranks} == set(range(layout.pipeline))
    assert all(share.size_bytes == 2 * share.parameters for share in report.ranks)
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
        (drop_last, r"is used by 0 parameters"),
        (twice, r"comes 2 times on one rank"),
        (first_expert_everywhere, r"experts\.0.* are on 8 ranks, not on 2"),
        (uncut, r"linear_proj.* has shape .*, its tensors make"),
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
    with pytest.raises(ModelError, match="are held by no rank"):
        check_world(read_model_shape(DENSE), Layout(tensor=2))


def test_a_stage_with_layers_of_another_is_found(monkeypatch):
    right = model.global_name
    monkeypatch.setattr(model, "global_name", lambda name, layer, expert=0: right(name, min(layer, 1), expert))
    with pytest.raises(ModelError, match="are on 2 ranks, not on 1"):
        check_world(read_model_shape(DENSE), Layout(pipeline=2))


def command(directory, *options, name=("check-layout",)):
    config = directory / "config.json"
    config.write_text(json.dumps(EXPERTS))
    line = [sys.executable, "-m", "megatron_daro", *name, str(config), *options]
    return subprocess.run(line, capture_output=True, text=True, timeout=300)


def test_the_command_prints_each_rank(tmp_path):
    done = command(tmp_path, "--world", "8", "--tp", "2", "--ep", "4", "--etp", "1", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert len(report["ranks"]) == 8 and report["layout"]["data"] == 4


def test_the_bar_is_not_part_of_the_answer(tmp_path, monkeypatch):
    import rich.progress

    from megatron_daro.commands import check_layout

    consoles = []

    class Bar(rich.progress.Progress):
        def __init__(self, **options):
            consoles.append(options["console"])
            super().__init__(**options)

    monkeypatch.setattr(rich.progress, "Progress", Bar)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(DENSE))
    report = check_layout._checked(ActorSection(tensor_parallel=2), file)
    assert len(report.ranks) == 2 and [console.stderr for console in consoles] == [True]


def test_the_command_names_every_problem_of_the_layout(tmp_path):
    done = command(tmp_path, "--world", "8", "--tp", "2", "--ep", "3", "--pp", "3")
    assert (done.returncode, "--world: got 8" in done.stderr) == (2, True)
    same = command(tmp_path, "--world", "8", "--tp", "2", "--ep", "3", "--pp", "3", name=("convert", "--check"))
    assert (same.returncode, same.stderr) == (done.returncode, done.stderr)
    done = command(tmp_path, "--world", "12", "--tp", "2", "--ep", "3", "--pp", "3")
    assert done.returncode == 2
    assert "actor.pipeline_parallel: got 3" in done.stderr and "actor.expert_parallel: got 3" in done.stderr


@pytest.mark.shared
def test_a_published_model_of_experts_on_sixteen_ranks():
    file = SHARED_CONFIGS / "Qwen3-30B-A3B.json"
    if not file.is_file():
        pytest.skip(f"{file} is not there: shared data of the project is needed")
    shape = read_model_shape(json.loads(file.read_text()))
    report = check_world(shape, Layout(tensor=2, pipeline=8, expert=2, expert_tensor=1))
    assert report.tensors == 18_867


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
