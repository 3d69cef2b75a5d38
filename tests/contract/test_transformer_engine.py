"""Our tables against what Transformer Engine's layers are called and do: facts that tools/record_te_facts.py took from
it, with the oldest Megatron-core that the package takes and with the pinned one."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_daro.config.hardware import version_of
from megatron_daro.config.model_shape import read_model_shape
from megatron_daro.config.precision import NEEDS, Surroundings, experts_problem, why_not
from megatron_daro.convert.mapping import hf_to_megatron, output_rule

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tools"))
from record_te_facts import FACTS, GPUS, MODELS  # noqa: E402  (found through the line above)

RECORDED = {path.stem.removeprefix("megatron_core_"): json.loads(path.read_text()) for path in FACTS.glob("*.json")}
TORCH = "2.11.0"
"""With which the facts were taken, where the pin says 2.13.0: for this one a compiled Transformer Engine was there."""


@pytest.fixture(params=sorted(RECORDED))
def recorded(request):
    """What was recorded with one Megatron-core."""
    return RECORDED[request.param]


@pytest.fixture(params=MODELS)
def model(request, recorded):
    """Name, shape, and what was recorded."""
    return request.param, read_model_shape(MODELS[request.param]), recorded["models"][request.param]


def test_every_parameter_has_a_rule_of_its_shape(model):
    name, shape, facts = model
    rules = hf_to_megatron(shape, fused_norms=True, grouped_experts=name == "qwen3_moe")
    expected = {rule.megatron_name: list(rule.local_shape(1)) for rule in [*rules, output_rule(shape)]}
    assert facts["parameters"] == {name: expected[name] for name in facts["parameters"]}
    assert expected.keys() == facts["parameters"].keys()


def test_extra_states_are_bytes_that_came_back(model):
    """A bf16 layer has none, and takes back exactly that: anything else it refuses as a pickle."""
    _, _, facts = model
    assert facts["extra_states"]
    assert all(state == ["uint8", [0]] for state in facts["extra_states"].values())
    assert facts["extra_states_saved_and_loaded"] > 0


def test_layers_add_their_weight_gradients_themselves_and_the_output_layer_does_not(model):
    """Every layer with a matrix but the router, whose gradients and the output layer's come from autograd."""
    _, _, facts = model
    fused = facts["weight_gradients_fused"]
    assert fused.pop("output_layer") is False
    assert fused and all(fused.values())
    layers = {name.rpartition(".")[0] for name in facts["parameters"] if "linear_" in name}
    assert layers == fused.keys()


def test_a_recipe_is_refused_where_transformer_engine_refuses_it_and_nowhere_else(recorded):
    """Upstream leaves mxfp8 and CUDA to the driver; we ask for the CUDA that knows these GPUs, which is stricter."""
    for recipe, by_cuda in recorded["supported"].items():
        for cuda, gpus in by_cuda.items():
            found = Surroundings(cuda=version_of(cuda))
            ours = [g for g, (a, b) in GPUS.items() if not why_not(recipe, replace(found, capability=a + b / 10))]
            knows_them = (recipe, cuda) != ("mxfp8", "12.1")
            assert ours == (gpus if knows_them else []), (recipe, cuda)


def test_megatron_makes_the_recipe_and_the_format_that_are_named(recorded):
    names = {"tensorwise": "Float8CurrentScaling", "blockwise": "Float8BlockScaling", "mxfp8": "MXFP8BlockScaling"}
    for recipe, formats in recorded["recipes"].items():
        assert formats == {"hybrid": f"{names[recipe]} HYBRID", "e4m3": f"{names[recipe]} E4M3"}
    assert recorded["recipes"].keys() == names.keys() == NEEDS.keys()


def test_a_checkpoint_from_before_the_first_update_loads(model):
    _, _, facts = model
    assert facts["loads_what_was_saved_before_an_update"] == {"distributed": True, "plain": True}


def test_layers_that_keep_8_bit_weights_have_them_where_the_policy_drops_them(model):
    """`_fp8_workspaces`, by which actor/host_memory.py finds them: every layer with a matrix of its own has it."""
    _, _, facts = model
    assert {"TELayerNormColumnParallelLinear", "TERowParallelLinear"} <= set(facts["with_fp8_workspaces"])


def test_experts_in_fp8_are_refused_where_saving_them_raises_and_nowhere_else(recorded):
    versions = {name: version_of(text) for name, text in recorded["versions"].items()}
    found = Surroundings(9.0, (13, 0), versions["transformer_engine"], megatron=versions["megatron-core"])
    problem = experts_problem(read_model_shape(MODELS["qwen3_moe"]), found)
    assert bool(problem) == bool(recorded["experts_in_fp8_saved"])


def test_the_facts_are_of_the_pinned_versions():
    """And of the oldest Megatron-core that requirements.txt takes."""
    pins = dict(line.split("==") for line in _lines("tools/environments/trainer.txt"))
    (oldest,) = re.findall(r"megatron-core>=([\d.]+)", (ROOT / "requirements.txt").read_text())
    assert RECORDED.keys() == {oldest, pins["megatron-core"]}
    for core, facts in RECORDED.items():
        assert facts["versions"] == {
            "transformer_engine": pins["transformer_engine"],
            "megatron-core": core,
            "torch": TORCH,
        }
    assert version_of(TORCH) <= version_of(pins["torch"])


def _lines(path):
    return [line for line in (ROOT / path).read_text().splitlines() if line and line[0] != "#"]
