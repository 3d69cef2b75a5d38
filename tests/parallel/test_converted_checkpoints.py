"""Converted checkpoints in real Megatron: loaded by it, written by it, and trained from, in layouts that differ."""

from __future__ import annotations

import conversion_tasks as tasks
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from small_models import save_model
from test_gradients_exact import layout_for

from megatron_daro.convert import plan
from megatron_daro.workshop.convert.conversion import convert

MODELS = [
    "qwen2_tied",
    "qwen3",
    "qwen3_moe",
    "qwen3_moe_mixed",
    "glm4_moe",
    "deepseek_v3",
    "gpt_oss",
    "qwen3_next",
    "qwen3_5",
    "olmo3",
]


@pytest.fixture(scope="module", params=MODELS)
def model(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param) / "hf"
    save_model(request.param, directory)
    return directory


def to_megatron(hf, out, format_, *, per_layer_keys=False):
    made = plan.plan_to_megatron(hf, format_, None, per_layer_keys=per_layer_keys)
    convert(made, out, processes=1, verify=True, progress=lambda *_: None)


def to_hf(megatron, config, out):
    made = plan.plan_to_hf(megatron, config, None, 10**9)
    convert(made, out, processes=1, verify=True, progress=lambda *_: None)
    return load_file(out / "model.safetensors")


def assert_is(found: dict[str, np.ndarray] | dict[str, torch.Tensor], model) -> None:
    expected = load_file(model / "model.safetensors")
    assert sorted(found) == sorted(expected)
    for name, tensor in expected.items():
        np.testing.assert_array_equal(np.asarray(found[name]), tensor.numpy(), err_msg=name)


def has_experts(model) -> bool:
    return any(name in str(model) for name in ("moe", "deepseek", "gpt_oss", "qwen3_next"))


def joined(results):
    return {name: value for result in results for name, value in result.items()}


@pytest.mark.parametrize(("layout", "format_"), [("tp2_pp2", "daro"), ("tp2", "torch_dist"), ("pp2", "torch_dist")])
def test_training_starts_from_it_and_what_it_saves_is_the_model(rank_pool, tmp_path, model, layout, format_):
    to_megatron(model, tmp_path / "megatron", format_)
    saved = tmp_path / "step"
    saved.mkdir()
    start = {"path": model, "weights": tmp_path / "megatron", "save_to": saved}
    assert_is(joined(rank_pool.run(tasks.start_from, layout_for(model, layout), **start)), model)
    assert_is(to_hf(saved, model, tmp_path / "back"), model)


def test_experts_over_two_ranks_start_from_it_and_are_saved(rank_pool, tmp_path, model):
    if not has_experts(model):
        pytest.skip("a model without experts")
    from megatron_daro.actor.parallel import Layout

    to_megatron(model, tmp_path / "megatron", "torch_dist")
    saved = tmp_path / "step"
    saved.mkdir()
    start = {"path": model, "weights": tmp_path / "megatron", "save_to": saved}
    assert_is(joined(rank_pool.run(tasks.start_from, Layout(data=2, expert=2), **start)), model)
    assert_is(to_hf(saved, model, tmp_path / "back"), model)


@pytest.mark.parametrize("layout", ["single", "tp2_pp2"])
def test_megatron_loads_what_is_written_for_it(rank_pool, tmp_path, model, layout):
    lists_layers = has_experts(model)  # moe_layer_freq of our models with experts is a list
    to_megatron(model, tmp_path / "megatron", "torch_dist", per_layer_keys=lists_layers)
    call = {"path": model, "checkpoint": tmp_path / "megatron/release"}
    assert_is(joined(rank_pool.run(tasks.load_with_megatron, layout_for(model, layout), **call)), model)


@pytest.mark.parametrize("layout", [pytest.param("single", marks=pytest.mark.heavy), "tp2_pp2"])
def test_what_megatron_saved_becomes_the_hf_model(rank_pool, tmp_path, model, layout):
    saved = tmp_path / "iter_0000007"
    saved.mkdir()
    rank_pool.run(tasks.save_with_megatron, layout_for(model, layout), path=model, checkpoint=saved)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    assert_is(to_hf(tmp_path, model, tmp_path / "back"), model)


@pytest.mark.parametrize("layout", ["tp2", "pp2", "tp2_pp2"])
def test_a_rank_reads_the_bytes_of_its_slices_only(rank_pool, model, layout):
    padding = (64 - 50) * 64 * 4 * 2  # rows that no file has, at most those of embedding and output
    for read, held in rank_pool.run(tasks.bytes_read, layout_for(model, layout), path=model):
        assert held - padding <= read <= held
