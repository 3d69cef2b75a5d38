"""Our tables against what Transformer Engine's layers are called: facts that tools/record_te_facts.py took from it."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_daro.config.hardware import version_of
from megatron_daro.config.model_shape import read_model_shape
from megatron_daro.config.precision import NEEDS, Surroundings, why_not
from megatron_daro.convert.mapping import hf_to_megatron, output_rule

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tools"))
from record_te_facts import FACTS, GPUS, MODELS  # noqa: E402  (found through the line above)

RECORDED = json.loads(FACTS.read_text())


@pytest.fixture(params=MODELS)
def model(request, tmp_path):
    """Name, shape, and what was recorded."""
    (tmp_path / "config.json").write_text(json.dumps(MODELS[request.param]))
    return request.param, read_model_shape(tmp_path), RECORDED["models"][request.param]


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


def test_a_recipe_is_refused_where_transformer_engine_refuses_it_and_nowhere_else():
    """Upstream leaves mxfp8 and CUDA to the driver; we ask for the CUDA that knows these GPUs, which is stricter."""
    for recipe, by_cuda in RECORDED["supported"].items():
        for cuda, gpus in by_cuda.items():
            found = Surroundings(cuda=version_of(cuda))
            ours = [g for g, (a, b) in GPUS.items() if not why_not(recipe, replace(found, capability=a + b / 10))]
            knows_them = (recipe, cuda) != ("mxfp8", "12.1")
            assert ours == (gpus if knows_them else []), (recipe, cuda)


def test_megatron_makes_the_recipe_and_the_format_that_are_named():
    names = {"tensorwise": "Float8CurrentScaling", "blockwise": "Float8BlockScaling", "mxfp8": "MXFP8BlockScaling"}
    for recipe, formats in RECORDED["recipes"].items():
        assert formats == {"hybrid": f"{names[recipe]} HYBRID", "e4m3": f"{names[recipe]} E4M3"}
    assert RECORDED["recipes"].keys() == names.keys() == NEEDS.keys()


def test_the_facts_are_of_the_pinned_versions():
    pins = (ROOT / "tools" / "environments" / "trainer.txt").read_text()
    assert f"transformer_engine=={RECORDED['versions']['transformer_engine']}" in pins
