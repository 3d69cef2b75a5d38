"""Which fp8 recipe can run where, what the model must be for it, and the nearest recipe that works."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_daro.config import precision
from megatron_daro.config.actor import ActorSection
from megatron_daro.config.hardware import capability_of, torch_cuda, version_of
from megatron_daro.config.model_shape import read_model_shape
from megatron_daro.config.precision import Surroundings

HOPPER = Surroundings(9.0, (13, 0), (2, 20, 2), (9, 19, 0))
BLACKWELL = replace(HOPPER, capability=10.0)


@pytest.mark.parametrize(
    ("recipe", "found", "why", "nearest"),
    [
        ("tensorwise", HOPPER, "", None),
        ("blockwise", HOPPER, "", None),
        ("mxfp8", BLACKWELL, "", None),
        ("tensorwise", Surroundings(), "", None),  # nothing is known, so nothing is refused
        ("tensorwise", Surroundings(capability=0), "there is no GPU", None),
        ("tensorwise", replace(HOPPER, capability=8.0), "capability 8, it needs 8.9 or newer", None),
        ("tensorwise", replace(HOPPER, transformer_engine=()), "Transformer Engine is not installed", None),
        ("tensorwise", replace(HOPPER, transformer_engine=(2, 1)), "Transformer Engine is 2.1, it needs 2.2", None),
        ("tensorwise", replace(HOPPER, cudnn=(9, 3, 0)), "cuDNN is 9.3.0, it needs 9.12", None),
        ("blockwise", replace(HOPPER, capability=8.9), "capability 8.9, it needs 9.0", "tensorwise"),
        ("blockwise", replace(HOPPER, cuda=(12, 8)), "torch's CUDA is 12.8, it needs 12.9", "tensorwise"),
        ("blockwise", replace(BLACKWELL, cuda=(12, 8)), "torch's CUDA is 12.8, it needs 12.9", "mxfp8"),
        ("mxfp8", HOPPER, "capability 9, it needs 10.0", "blockwise"),
        ("mxfp8", replace(HOPPER, cuda=(12, 4)), "capability 9, it needs 10.0", "tensorwise"),
        ("mxfp8", replace(HOPPER, capability=12.0), "where it lacks kernels (below 12.0)", "blockwise"),
    ],
)
def test_a_recipe_that_cannot_run_is_refused_with_the_nearest_that_can(recipe, found, why, nearest):
    assert why in precision.why_not(recipe, found)
    assert bool(precision.why_not(recipe, found)) == bool(why)
    problem = precision.problem(recipe, found)
    if not why:
        assert problem is None
    elif nearest:
        assert problem.field == "actor.fp8_recipe" and problem.fix == f"set actor.fp8_recipe={nearest}"
        assert nearest in problem.allowed
    else:
        assert problem.field == "actor.precision" and "set actor.precision=bf16" in problem.fix


def shape(**fields):
    base = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_size": 64, "num_hidden_layers": 8}
    base |= {"num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 128, "vocab_size": 100}
    return read_model_shape({**base, "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 1e4, **fields})


@pytest.mark.parametrize(
    ("options", "fields", "words"),
    [
        ({}, {}, None),
        ({"fp8_recipe": "mxfp8"}, {}, None),
        (
            {},
            {"intermediate_size": 136},
            "a rank has 136 MLP columns; allowed: matrices whose sides are multiples of 16",
        ),
        ({"tensor_parallel": 4, "fp8_recipe": "mxfp8"}, {}, "a rank has 16 columns of attention heads"),
        ({"num_layers_at_start_in_bf16": 1, "num_layers_at_end_in_bf16": 2}, {}, None),
        ({"num_layers_at_start_in_bf16": 4, "num_layers_at_end_in_bf16": 4}, {}, "got 4, with 4 at the start"),
        ({"num_layers_at_start_in_bf16": 3, "pipeline_parallel": 4}, {}, "at most 2, layers / pipeline_parallel"),
    ],
)
def test_the_model_must_fit_the_recipe(options, fields, words):
    found = [str(p) for p in precision.shape_problems(ActorSection(precision="fp8", **options), shape(**fields))]
    assert not found if words is None else words in found[0]


EXPERTS = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "head_dim": 16, "num_experts": 4}
EXPERTS |= {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}


@pytest.mark.parametrize(
    ("core", "engine", "fields", "refused"),
    [
        ((0, 16, 1), (2, 20, 2), EXPERTS, True),
        ((0, 18, 2), (2, 16), EXPERTS, True),
        ((0, 18, 2), (2, 15), EXPERTS, False),
        ((0, 19, 2), (2, 20, 2), EXPERTS, False),
        ((0, 16, 1), (2, 20, 2), {}, False),
        ((0, 16, 1), (), EXPERTS, False),  # refused for the missing Transformer Engine
        (None, (2, 20, 2), EXPERTS, False),
    ],
)
def test_experts_in_fp8_that_could_not_be_saved_are_refused_by_the_names_of_the_pair(core, engine, fields, refused):
    found = precision.experts_problem(shape(**fields), replace(HOPPER, transformer_engine=engine, megatron=core))
    assert bool(found) == refused
    if found:
        assert "Megatron-core 0.1" in found.got and "Transformer Engine 2." in found.got
        assert "Megatron-core 0.19 or newer, or Transformer Engine below 2.16" in found.allowed


def test_gpus_by_name_and_versions_by_text():
    names = {"H100": 9.0, "A100-80G": 8.0, "A10G": 8.6, "L40S": 8.9, "b200": 10.0, "X1": None, None: None}
    assert {name: capability_of(name) for name in names} == names
    assert version_of("2.20.2+cu13") == (2, 20, 2) and version_of("dev") == ()
    assert torch_cuda() is None or torch_cuda() > (11,)
