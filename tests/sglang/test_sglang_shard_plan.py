"""The shard-to-shard plan against SGLang: its models' parameters on every rank, and what its loaders put there."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from sglang_pool import required_environment
from shard_cases import (
    CASES,
    Case,
    all_writes,
    carried_out,
    checkpoint,
    padding,
    server_shapes,
    times_written,
    tiny_config,
)

from megatron_daro.convert.stacked import stack
from megatron_daro.engine.sglang.command import server_environment

SCRIPT = Path(__file__).parents[1] / "server_parameters.py"
CONFIGS = Path(__file__).resolve().parents[3] / "shared" / "data" / "configs"

REAL = {
    # The layouts of examples/recipes, those of the largest with fewer servers, and odd ones.
    "Qwen2.5-Math-1.5B": ({"data": 2}, {"tp_size": 1}, 6),
    "Qwen2.5-Math-7B": ({"data": 8}, {"tp_size": 4}, 2),
    "Llama-3.1-8B": ({"data": 8}, {"tp_size": 4}, 2),
    "Qwen2.5-32B": ({"tensor": 2, "pipeline": 2, "virtual": 8, "data": 16}, {"tp_size": 8}, 8),
    "Llama-3.3-70B": ({"tensor": 8, "pipeline": 2, "data": 8}, {"tp_size": 8}, 4),
    "Qwen3-30B-A3B": ({"data": 16, "expert": 8, "expert_tensor": 1}, {"tp_size": 4}, 3),
    "Qwen3-8B": ({"tensor": 4, "pipeline": 3}, {"tp_size": 16}, 1),
    "Qwen3-4B": ({"tensor": 16, "pipeline": 2, "context": 2}, {"tp_size": 2}, 3),
    "Qwen2.5-7B": ({"tensor": 2, "pipeline": 7}, {"tp_size": 2}, 2),
    "Qwen3-32B": ({"tensor": 2, "pipeline": 4}, {"tp_size": 8}, 1),
}


def of_sglang(work: Path, cases: list[dict]) -> list[list[dict[str, list[int]]]]:
    """The shapes [case][rank][name] of SGLang's parameters; values are in `work`."""
    python = required_environment() / "bin" / "python"
    (work / "cases.json").write_text(json.dumps(cases))
    environment = server_environment({}, host="127.0.0.1", python=python)
    command = [str(python), str(SCRIPT), str(work)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((work / "shapes.json").read_text())


def same_parameters(case: Case, rank: int, theirs: dict[str, list[int]]) -> None:
    assert {name: list(shape) for name, shape in server_shapes(case, rank).items()} == theirs


@pytest.mark.heavy
def test_loaders_of_sglang_put_the_same_bits_in_the_same_places(tmp_path):
    asked, expected = [], []
    for case in CASES:
        directory = tmp_path / case.name
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(case.config))
        expected.append(checkpoint(case))
        save_file(expected[-1], directory / "model.safetensors")
        asked.append({"model": str(directory), "arguments": case.server, "load": True})
    shapes = of_sglang(tmp_path, asked)
    for number, case in enumerate(CASES):
        for (_, rank), parameters in carried_out(case, expected[number]).items():
            same_parameters(case, rank, shapes[number][rank])
            rows, theirs = padding(case, rank), load_file(tmp_path / f"{number}_{rank}.safetensors")
            for name, values in parameters.items():
                unwritten = values.isnan()
                assert int(unwritten.sum()) == rows[name]
                assert not theirs[name][unwritten].any(), f"{case.name}: padding of {name} is not zero"
                assert values[~unwritten].equal(theirs[name][~unwritten]), f"{case.name} rank {rank}: {name}"


@pytest.mark.heavy
def test_the_loader_of_sglang_takes_experts_in_stacks(tmp_path):
    """No plan for these: what it makes of a checkpoint is compared with the stacks themselves."""
    case = Case("gpt_oss", tiny_config("gpt_oss"), {}, {"tp_size": 2})
    tensors = {name: tensor.contiguous() for name, tensor in stack(checkpoint(case).items(), case.shape)}
    (tmp_path / "config.json").write_text(json.dumps(case.config))
    save_file(tensors, tmp_path / "model.safetensors")
    of_sglang(tmp_path, [{"model": str(tmp_path), "arguments": case.server, "load": True}])
    for rank in range(2):
        theirs = load_file(tmp_path / f"0_{rank}.safetensors")
        for layer in range(6):
            experts, attention = (f"model.layers.{layer}.{part}" for part in ("mlp.experts.", "self_attn."))
            rows = slice(rank * 56, (rank + 1) * 56)  # of gate and up in turns
            columns = slice(rank * 28, (rank + 1) * 28)
            down_bias = tensors[f"{experts}down_proj_bias"]
            expected = {
                f"{experts}w13_weight": tensors[f"{experts}gate_up_proj"].mT[:, rows],
                f"{experts}w13_weight_bias": tensors[f"{experts}gate_up_proj_bias"][:, rows],
                f"{experts}w2_weight": tensors[f"{experts}down_proj"].mT[..., columns],
                f"{experts}w2_weight_bias": down_bias if rank == 0 else down_bias * 0,
                f"{attention}sinks": tensors[f"{attention}sinks"][4 * rank : 4 * rank + 4],
                f"{attention}o_proj.bias": tensors[f"{attention}o_proj.bias"],
                f"model.layers.{layer}.mlp.router.bias": tensors[f"model.layers.{layer}.mlp.router.bias"],
            }
            for name, values in expected.items():
                assert theirs[name].equal(values.to(theirs[name].dtype)), (rank, name)  # sinks are in bf16 there
        assert not any((values == 1).all() for values in theirs.values()), "a parameter that nothing was loaded into"


@pytest.mark.heavy
@pytest.mark.shared
def test_every_entry_of_a_real_models_parameters_is_written_once(tmp_path):
    if not CONFIGS.is_dir():
        pytest.skip(f"no {CONFIGS}")
    cases, asked = [], []
    for name, (trainer, server, servers) in REAL.items():
        directory = tmp_path / name
        directory.mkdir()
        text = (CONFIGS / f"{name}.json").read_text()
        (directory / "config.json").write_text(text)
        cases.append(Case(name, json.loads(text), trainer, server, servers))
        asked.append({"model": str(directory), "arguments": server, "load": False})
    for case, of_ranks in zip(cases, of_sglang(tmp_path, asked), strict=True):
        boxes: dict[tuple[int, int, str], list] = {}
        for _, write in all_writes(case, case.plan()):
            boxes.setdefault((write.server, write.rank, write.target), []).append(write.target_box)
        for rank, theirs in enumerate(of_ranks):
            same_parameters(case, rank, theirs)
            unwritten = padding(case, rank)
            for server in range(case.servers):
                for name, shape in theirs.items():
                    counts = times_written(tuple(shape), boxes.pop((server, rank, name), []))
                    assert counts.pop(0, 0) == unwritten[name], (case.name, rank, name)
                    assert counts.keys() <= {1}, (case.name, rank, name)
        assert not boxes
