"""A rank's parameters as mcore-bridge's loader fills them, and as ours does: two tables by different hands.

Run with mcore-bridge 1.6.5, in an environment of its own (tests/README.md).
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_daro.config.model_shape import read_model_shape
from megatron_daro.convert.hf_files import HFCheckpoint
from megatron_daro.convert.mapping import hf_to_megatron, shard

sys.path.append(str(Path(__file__).parents[1] / "parallel"))
from small_models import MODELS, save_model  # found through the line above

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("mcore_bridge") is None,
        reason="mcore-bridge is not installed; tests/README.md makes an environment with it",
    ),
]

UNKNOWN = ("mistral", "mixtral", "olmo3")
"""Families that mcore-bridge 1.6.5 does not have."""
CASES = [name for name in MODELS if not name.startswith(UNKNOWN)]
PLACES = [
    {"tp": [tensor, 2], "etp": [0, 1] if experts == 2 else [tensor, 2], "ep": [expert, experts]}
    for experts in (1, 2)
    for tensor in range(2)
    for expert in range(experts)
]


def as_published(folder):
    """Say what published checkpoints say and transformers leaves out: mcore-bridge has no default for it."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    if config["model_type"] == "deepseek_v3":
        config["scoring_func"] = "sigmoid"
    if "linear_num_key_heads" in config:
        config["full_attention_interval"] = 2
    if config["model_type"].startswith("qwen3_5"):
        tensors = load_file(folder / "model.safetensors")
        own = {name.replace("model.", "model.language_model.", 1): value for name, value in tensors.items()}
        save_file(own, folder / "model.safetensors")
        config = {"model_type": config["model_type"].removesuffix("_text"), "text_config": config}
    file.write_text(json.dumps(config))


def parameters_of(folder, shape, places):
    """What a rank holds of Transformer Engine's layers, by our table, under mcore-bridge's names."""
    tensors, parameters = HFCheckpoint(folder), {}
    own = shape.experts.number // places["ep"][1] if shape.experts else 0
    first = own * places["ep"][0]
    for rule in hf_to_megatron(shape, fused_norms=True):
        name = rule.megatron_name
        if rule.layer in shape.linear_layers:
            name = name.replace(".input_layernorm.", ".self_attention.in_proj.layer_norm_")
            name = name.replace(".gated_norm.", ".out_norm.")
        if rule.expert is None:
            parameters[name] = shard(rule, tensors, *places["tp"])
        elif first <= rule.expert < first + own:
            local = f"{name.removesuffix(str(rule.expert))}{rule.expert - first}"
            parameters[local] = shard(rule, tensors, *places["etp"])
    return parameters


def by_head(name, parameter, shape):
    """Put the rows of mcore-bridge's own attention layers, which stand head by head, into Megatron-core's order."""
    sizes = []
    if shape.gated and name.endswith("linear_qkv.weight"):
        heads = shape.heads // shape.kv_heads
        rows = parameter.unflatten(0, (-1, shape.head_dim * (2 * heads + 2)))
        queries_and_gates, rest = rows.split([2 * heads * shape.head_dim, 2 * shape.head_dim], dim=1)
        parts = queries_and_gates.unflatten(1, (heads, 2, -1)).transpose(1, 2).flatten(1, 3)
        return torch.cat([parts, rest], dim=1).flatten(0, 1)
    if shape.linear and ".in_proj.weight" in name:
        serves = shape.linear.value_heads // shape.linear.key_heads
        sizes = [shape.linear.key] * 2 + [shape.linear.value * serves] * 2 + [serves] * 2
    if shape.linear and ".conv1d." in name:
        sizes = [shape.linear.key] * 2 + [shape.linear.values // shape.linear.key_heads]
    if not sizes:
        return parameter
    return torch.cat([part.flatten(0, 1) for part in parameter.unflatten(0, (-1, sum(sizes))).split(sizes, dim=1)])


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """Model -> shape, and for each place our parameters and those that mcore-bridge loaded."""
    folders, results = {name: tmp_path_factory.mktemp(name) for name in CASES}, {}
    for name, folder in folders.items():
        save_model(name, folder)
        as_published(folder)
        shape, ranks = read_model_shape(folder), {}
        for places in PLACES:
            if shape.biases and places["etp"][1] > 1:
                continue  # neither program cuts biases of experts
            file = f"rank{len(ranks)}.safetensors"
            ranks[file] = places
            ours = parameters_of(folder, shape, places)
            results.setdefault(name, (shape, []))[1].append((ours, folder / file))
            save_file({n: torch.full_like(value, torch.nan) for n, value in ours.items()}, folder / file)
        (folder / "ranks.json").write_text(json.dumps(ranks))
    program = Path(__file__).with_name("mcore_bridge_loads.py")
    done = subprocess.run([sys.executable, program, *folders.values()], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return results


@pytest.mark.parametrize("name", CASES)
def test_every_rank_holds_the_same_values(name, loaded):
    shape, ranks = loaded[name]
    for ours, file in ranks:
        theirs = load_file(file)
        assert [n for n in ours if not torch.equal(by_head(n, theirs[n], shape), ours[n])] == []
