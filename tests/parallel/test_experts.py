"""Mixtures of experts under expert, tensor, pipeline and data parallelism: exact against transformers' own models."""

from __future__ import annotations

import megatron_tasks
import numpy as np
import policy_tasks
import pytest
import torch
from heavy_cases import mostly_heavy
from safetensors.torch import load_file
from small_models import as_in_checkpoint, random_batch, save_model
from test_gradients_exact import reference_gradients, relative_difference
from test_logprobs_models import TOLERANCE, plain_logprobs, run

from megatron_daro.sync.buckets import bucketize


def layouts():
    from megatron_daro.actor.parallel import Layout

    return {
        "single": Layout(),
        "ep2": Layout(data=2, expert=2),
        "tp2_ep2": Layout(tensor=2, expert=2),  # two ranks: TP for attention, EP for the experts
        "tp2": Layout(tensor=2),  # each expert is cut
        "tp2_etp1": Layout(tensor=2, expert_tensor=1),  # both ranks have all experts, for half of the tokens each
        "pp2": Layout(pipeline=2),
        "pp2_ep2": Layout(pipeline=2, data=2, expert=2),
        "pp2_vpp2_ep2": Layout(pipeline=2, data=2, expert=2, virtual_pipeline=2),
        "cp2_ep2": Layout(context=2, expert=2),
        "cp2": Layout(context=2),
        "dp2": Layout(data=2),
        "tp2_dp2_ep2": Layout(tensor=2, data=2, expert=2, expert_tensor=2),  # experts: ETP 2 x EP 2
        "tp4_ep2": Layout(tensor=4, expert=2, expert_tensor=1),  # two copies of the experts among the ranks of TP
        "dp4_ep2": Layout(data=4, expert=2),  # two copies of the experts, over DP
    }


FAMILIES = [
    "qwen3_moe",
    "glm4_moe",
    "deepseek_v3",
    "gpt_oss",
    "qwen3_next",
    "qwen3_5_moe",
    "deepseek_v3_plain",
    "glm4_moe_normed",
    "qwen3_moe_mixed",
    "mixtral",
]
# Experts with biases are not cut; nor are sequences where linear attention runs over them.
REFUSED = {"gpt_oss": ("tp2", "tp2_dp2_ep2"), **dict.fromkeys(("qwen3_next", "qwen3_5_moe"), ("cp2", "cp2_ep2"))}
CASES = [(family, layout) for family in FAMILIES[:6] for layout in layouts() if layout not in REFUSED.get(family, ())]
CASES += [(family, layout) for family in FAMILIES[6:] for layout in ("single", "tp2_ep2", "pp2_ep2", "pp2_vpp2_ep2")]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Family -> (directory, transformers model, gradients of the loss written out, as its checkpoint names them)."""
    found = {}
    for family in FAMILIES:
        directory = tmp_path_factory.mktemp(family)
        model = save_model(family, directory)
        loss, _, gradients = reference_gradients(model, random_batch(), "daro")
        tensors = {name: torch.from_numpy(gradient) for name, gradient in gradients.items()}
        named = as_in_checkpoint(model, tensors, tmp_path_factory.mktemp("gradients"))
        found[family] = directory, model, loss, named
    return found


@pytest.mark.parametrize(
    ("family", "layout"),
    mostly_heavy(
        CASES,
        *(("qwen3_moe", layout) for layout in ("tp2_etp1", "cp2_ep2", "tp2_dp2_ep2", "tp4_ep2", "dp4_ep2")),
        *(("glm4_moe", layout) for layout in ("single", "tp2_ep2", "pp2", "cp2_ep2", "tp2_dp2_ep2")),
        *(("deepseek_v3", layout) for layout in ("single", "tp2_ep2", "pp2")),
        ("deepseek_v3_plain", "tp2_ep2"),
        *(("gpt_oss", layout) for layout in ("single", "tp2_ep2", "tp2_etp1", "pp2", "cp2_ep2")),
        *(("qwen3_next", layout) for layout in ("single", "tp4_ep2", "pp2", "tp2_dp2_ep2")),
        ("glm4_moe_normed", "tp2_ep2"),
        ("qwen3_moe_mixed", "pp2_vpp2_ep2"),
        ("mixtral", "tp2_ep2"),
        ("qwen3_5_moe", "tp2_ep2"),
    ),
)
def test_logprobs_gradients_and_exported_weights(rank_pool, models, family, layout):
    check(rank_pool, models[family], layout)


def test_a_first_stage_with_fewer_layers(rank_pool, models):
    """Dense layers and layers with experts alternate: a stage that started at another layer would have other names."""
    check(rank_pool, models["qwen3_moe_mixed"], "pp2", megatron={"num_layers_in_first_pipeline_stage": 1})


@pytest.mark.parametrize(
    ("family", "saved_by", "loaded_by"),
    mostly_heavy(
        [
            ("qwen3_moe", "single", "ep2"),
            ("qwen3_moe", "tp2_dp2_ep2", "pp2"),
            ("qwen3_moe", "dp4_ep2", "tp2_etp1"),
            ("glm4_moe", "tp2_ep2", "pp2"),
            ("deepseek_v3", "tp2_ep2", "pp2"),
            ("gpt_oss", "tp2_ep2", "pp2"),
            ("qwen3_next", "tp2_ep2", "pp2"),
        ],
        ("qwen3_moe", "tp2_dp2_ep2", "pp2"),
    ),
)
def test_a_checkpoint_continues_with_other_expert_parallel_sizes(
    rank_pool, models, tmp_path, family, saved_by, loaded_by
):
    """Two steps, a checkpoint, two steps in another layout: the weights of four steps of one process."""
    model = models[family][0]
    whole = train(rank_pool, model, "single", range(4))
    train(rank_pool, model, saved_by, range(2), save_to=tmp_path)
    resumed = train(rank_pool, model, loaded_by, range(2, 4), load_from=tmp_path)
    assert set(resumed) == set(whole)
    for name, weights in whole.items():
        np.testing.assert_allclose(resumed[name], weights, rtol=0, atol=2e-5, err_msg=name)


@pytest.mark.parametrize("family", ["glm4_moe", "qwen3_next"])
def test_in_bf16_biases_of_routers_and_decays_are_in_fp32(rank_pool, models, family):
    directory, *_ = models[family]
    _, exported = run(rank_pool, "tp2", directory, random_batch(), 3, precision="bf16")
    for name, stored in load_file(directory / "model.safetensors").items():
        kept = name.endswith(("correction_bias", "A_log"))
        assert torch.equal(exported[name], stored if kept else stored.bfloat16()), name


def test_a_checkpoint_in_bf16_continues_with_what_is_in_fp32(rank_pool, models, tmp_path):
    model = models["qwen3_next"][0]
    whole = train(rank_pool, model, "single", range(2), precision="bf16")
    train(rank_pool, model, "single", range(1), precision="bf16", save_to=tmp_path)
    resumed = train(rank_pool, model, "single", range(1, 2), precision="bf16", load_from=tmp_path)
    for name, weights in whole.items():
        np.testing.assert_array_equal(resumed[name], weights, err_msg=name)


def train(pool, model, layout, seeds, **extra):
    """Weights after one step for each seed."""
    results = pool.run(
        megatron_tasks.train,
        layouts()[layout],
        path=model,
        batches=[random_batch(seed=seed) for seed in seeds],
        num_micro_batches=2,
        algorithm={"name": "daro"},
        optimizer={"learning_rate": 1e-2, "eps": 1e-3},
        **extra,
    )
    return {name: value for result in results for name, value in result["parameters"].items()}


def check(pool, saved, layout, **options):
    """Everything of one layout against the one process of transformers."""
    directory, model, loss, want = saved
    batch = random_batch()
    results = pool.run(
        policy_tasks.experts,
        layouts()[layout],
        path=directory,
        batch=batch,
        num_micro_batches=3,
        algorithm={"name": "daro"},
        **options,
    )
    logprobs = plain_logprobs(model, batch)
    for result in results:
        if result["logprobs"] is not None:
            np.testing.assert_allclose(result["logprobs"], logprobs, rtol=0, atol=TOLERANCE)
        assert result["policy_loss"] == pytest.approx(loss, rel=1e-5, abs=1e-7)
    gradients = {name: value for result in results for name, value in result["gradients"].items()}
    assert relative_difference(gradients, want) < 1e-5
    norm = np.sqrt(sum(float((value.astype(np.float64) ** 2).sum()) for value in want.values()))
    assert {round(result["grad_norm"] / norm, 5) for result in results} == {1.0}
    stored = load_file(directory / "model.safetensors")
    exported = {name: value for result in results if result["sends"] for name, value in result["exported"].items()}
    assert set(exported) == set(stored)
    assert all(torch.equal(exported[name], stored[name]) for name in stored)
    for names in (bucket.names for bucket in bucketize(exported.items(), 1)):  # what a server takes together, and alone
        assert len(names) == 1 or names[1] == names[0].replace("q_a_proj", "kv_a_proj_with_mqa")
