"""Command lines: every kind of value as argparse reads it back, and what is refused."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from megatron_daro.engine.sglang.command import OWNED_ARGUMENTS, ServerPart, argument_problems, server_command
from megatron_daro.errors import ConfigError

PYTHON = Path("/env/bin/python")


def command(arguments, part=None):
    return server_command(
        PYTHON,
        model_path=Path("/models/m"),
        host="127.0.0.1",
        port=20001,
        nccl_port=20002,
        tensor_parallel=2,
        seed=11,
        arguments=arguments,
        part=part,
    )


def test_own_arguments_come_first():
    assert command({}) == [
        *("/env/bin/python", "-m", "sglang.launch_server", "--model-path", "/models/m", "--host", "127.0.0.1"),
        *("--port", "20001", "--nccl-port", "20002", "--tp-size", "2", "--random-seed", "11"),
    ]


def test_a_part_knows_which_it_is_and_where_all_meet():
    words = command({}, ServerPart(1, 2, "10.0.0.1:20002"))
    assert words[-6:] == ["--nnodes", "2", "--node-rank", "1", "--dist-init-addr", "10.0.0.1:20002"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"mem_fraction_static": 0.8}, ["--mem-fraction-static", "0.8"]),
        ({"mem-fraction-static": 0.8}, ["--mem-fraction-static", "0.8"]),
        ({"max_total_tokens": 0}, ["--max-total-tokens", "0"]),
        ({"attention_backend": "triton"}, ["--attention-backend", "triton"]),
        ({"trust_remote_code": True}, ["--trust-remote-code"]),
        ({"trust_remote_code": False, "quantization": None}, []),
        ({"cuda_graph_bs": [1, 2, 4]}, ["--cuda-graph-bs", "1", "2", "4"]),
        ({"lora_paths": ["a b", {"x": 1}]}, ["--lora-paths", "a b", '{"x": 1}']),
        ({"json_model_override_args": {"a": [1, None], "b": True}},)
        + (["--json-model-override-args", '{"a": [1, null], "b": true}'],),
        ({"served_model_name": "-m"}, ["--served-model-name=-m"]),
        ({"x": "--port"}, ["--x=--port"]),
        ({"schedule_conservativeness": -1.5}, ["--schedule-conservativeness=-1.5"]),
        ({"x": ""}, ["--x", ""]),
    ],
)
def test_values_as_words(given, words):
    assert command(given)[15:] == words


def test_argparse_reads_the_words_back():
    parser = argparse.ArgumentParser()
    for name in ("--text", "--mapping", "--negative"):
        parser.add_argument(name)
    parser.add_argument("--numbers", nargs="+", type=int)
    parser.add_argument("--flag", action="store_true")
    mapping = {"key": "-value with 'quotes'", "n": [1.5, None]}
    given = {"text": "--flag", "mapping": mapping, "negative": -3, "numbers": [-1, 2], "flag": True}
    found = parser.parse_args(command(given)[15:])
    assert found.text == "--flag" and found.flag and found.numbers == [-1, 2] and found.negative == "-3"
    assert json.loads(found.mapping) == mapping


def test_arguments_that_follow_from_other_options_are_refused_in_both_spellings():
    for spelled in {spelling for name in OWNED_ARGUMENTS for spelling in (name, name.replace("_", "-"))}:
        with pytest.raises(ConfigError) as caught:
            command({spelled: "1"})
        assert f"engine.sglang.arguments.{spelled}" in str(caught.value)


def test_owned_arguments_point_to_options_that_exist():
    """`set a.b.c` must name a field of the configuration."""
    from megatron_daro.config import Config

    for fix in OWNED_ARGUMENTS.values():
        for path in (word.strip(",:;") for word in fix.split() if word.count(".") and word[0].isalpha()):
            section: object = Config
            for part in path.split("."):
                section = section.model_fields[part].annotation  # type: ignore[attr-defined]


def test_all_problems_at_once():
    given = {
        "port": 1,
        "tp-size": 2,
        "--dtype": "float32",
        "empty": [],
        "numbers": [1, [2]],
        "nulls": [1, None],
        "words": ["a", "--port"],
        "infinite": float("inf"),
        "inside": {"a": float("nan")},
        "object": object(),
        "zero": "a\0b",
        "mem_fraction_static": 0.8,
        "mem-fraction-static": 0.9,
        "good": 1,
    }
    with pytest.raises(ConfigError) as caught:
        command(given)
    text = str(caught.value)
    for name in given:
        named = f"engine.sglang.arguments.{name}: got" in text
        assert named is (name not in ("good", "mem_fraction_static")), name


def test_unknown_names_get_the_nearest_known_one():
    known = {"mem_fraction_static", "max_total_tokens", "port", "dllm_fdfo", "no_dllm_fdfo"}
    assert argument_problems({"mem-fraction-static": 0.5, "max_total_tokens": 5}, known) == []
    (problem,) = argument_problems({"mem_fraction": 0.5}, known)
    assert problem.field == "engine.sglang.arguments.mem_fraction"
    assert "mem_fraction_static" in problem.fix


def test_false_that_would_be_ignored_is_refused():
    known = {"dllm_fdfo", "no_dllm_fdfo", "trust_remote_code"}
    (problem,) = argument_problems({"dllm_fdfo": False, "trust_remote_code": False}, known)
    assert problem.field.endswith(".dllm_fdfo") and "no_dllm_fdfo" in problem.fix
    assert argument_problems({"no_dllm_fdfo": True}, known) == []
