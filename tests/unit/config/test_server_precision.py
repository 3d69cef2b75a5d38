"""Servers that quantize: taken where SGLang quantizes every update, refused where they could not follow the policy."""

from __future__ import annotations

import json

import pytest

from megatron_daro.config import Hardware, check, resolve

HOPPER, AMPERE = Hardware("gpu", 8, capability=9.0), Hardware("gpu", 8, capability=8.0)
FP8 = "engine.sglang.arguments={quantization: fp8, load_format: flash_rl}"


def found(run_files, *overrides, hardware=HOPPER, **shape):
    """Problems of engine and arguments."""
    path = run_files.model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": "qwen3", "head_dim": 8} | shape))
    servers = ["engine.kind=sglang", "engine.sglang.python=/usr/bin/python3"]
    report = check(resolve(run_files.file, [*servers, *overrides]), hardware)
    return [str(problem) for problem in report.problems if problem.field.startswith("engine.sglang")]


def test_servers_that_quantize_each_update_are_taken(run_files):
    assert found(run_files) == found(run_files, FP8) == []
    assert found(run_files, FP8, "engine.sglang.sync=tensor") == []
    assert found(run_files, FP8, hardware=Hardware("gpu", 8, capability=None)) == []
    assert found(run_files, "engine.sglang.arguments={load_format: dummy}") == []


@pytest.mark.parametrize(
    ("arguments", "got"),
    [
        ("{quantization: fp8}", "quantization 'fp8' with load_format null"),
        ("{quantization: w8a8_int8, load-format: flash_rl}", "quantization 'w8a8_int8' with load_format 'flash_rl'"),
        ("{load_format: flash_rl}", "quantization null with load_format 'flash_rl'"),
    ],
)
def test_servers_that_quantize_in_another_way_are_refused(run_files, arguments, got):
    (line,) = found(run_files, f"engine.sglang.arguments={arguments}")
    assert line.startswith(f"engine.sglang.arguments: got {got}; allowed: {{quantization: fp8, load_format: flash_rl}}")


@pytest.mark.parametrize(
    ("overrides", "hardware", "words"),
    [
        (["engine.sglang.sync=disk"], HOPPER, "weights from files would be quantized twice"),
        (["actor.precision=fp32"], HOPPER, "with actor.precision fp32"),
        ([], AMPERE, "a GPU of compute capability 8; allowed: GPUs of compute capability 8.9"),
        ([], Hardware("cpu", 4), "on no GPU"),
    ],
)
def test_what_else_fp8_servers_need_is_asked_for(run_files, overrides, hardware, words):
    (line,) = found(run_files, FP8, *overrides, hardware=hardware)
    assert words in line


def test_files_for_servers_that_quantize_name_the_arguments_too(run_files):
    servers = ["engine.kind=sglang", "engine.sglang.python=/usr/bin/python3", FP8, "engine.sglang.sync=disk"]
    problems = [p for p in check(resolve(run_files.file, servers), HOPPER).problems if p.field == "engine.sglang.sync"]
    assert [problem.also for problem in problems] == [("engine.sglang.arguments",)]


def test_a_family_that_sglang_does_not_requantize_is_refused(run_files):
    path = run_files.model / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    servers = ["engine.kind=sglang", "engine.sglang.python=/usr/bin/python3", FP8]
    lines = [str(p) for p in check(resolve(run_files.file, servers), HOPPER).problems]
    assert any("with a model of type llama; allowed: models of type qwen2 or qwen3" in line for line in lines)


BLOCKS = "engine.sglang.fp8_blocks=true"
WHOLE = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 512,
}


def test_blocks_are_taken_where_they_fit(run_files):
    assert found(run_files, BLOCKS, **WHOLE) == []
    assert (
        found(run_files, BLOCKS, "engine.sglang.sync=tensor", hardware=Hardware("gpu", 8, capability=8.9), **WHOLE)
        == []
    )
    assert found(run_files, BLOCKS, "engine.sglang.tensor_parallel=2", **WHOLE | {"head_dim": 128}) == []


@pytest.mark.parametrize(
    ("overrides", "hardware", "words"),
    [
        ([FP8], HOPPER, "allowed: without quantization and load_format in engine.sglang.arguments"),
        (["engine.sglang.sync=disk"], HOPPER, "engine.sglang.sync: got disk with engine.sglang.fp8_blocks"),
        (["actor.precision=fp32"], HOPPER, "true with actor.precision fp32"),
        ([], AMPERE, "true on a GPU of compute capability 8;"),
        ([], Hardware("gpu", 8, capability=10.0), "from 10 on SGLang 0.5.23 packs the scales"),
        ([], Hardware("cpu", 4), "true on no GPU"),
        (["engine.sglang.tensor_parallel=2"], HOPPER, "key/value heads x head_dim 64 on each of 2 ranks"),
        (["engine.sglang.tensor_parallel=4"], HOPPER, "query heads x head_dim 64, key/value heads x head_dim 64 on"),
    ],
)
def test_where_blocks_do_not_fit_is_said_before_anything_starts(run_files, overrides, hardware, words):
    (line,) = found(run_files, BLOCKS, *overrides, hardware=hardware, **WHOLE)
    assert words in line


def test_a_problem_of_two_fields_names_both(run_files):
    path = run_files.model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": "qwen3"} | WHOLE))
    servers = ["engine.kind=sglang", "engine.sglang.python=/usr/bin/python3", BLOCKS, FP8]
    problems = [p for p in check(resolve(run_files.file, servers), HOPPER).problems if p.field == BLOCKS.split("=")[0]]
    assert [problem.also for problem in problems] == [("engine.sglang.arguments",)]


def test_a_model_whose_widths_are_no_whole_blocks_is_refused(run_files):
    (line,) = found(run_files, BLOCKS, **WHOLE | {"hidden_size": 320, "intermediate_size": 500})
    assert "true with hidden_size 320, intermediate_size 500 on each of 1 ranks; allowed: multiples of 128" in line
