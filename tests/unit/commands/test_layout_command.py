"""`megatron-daro check-layout`: what is refused before a rank starts."""

from __future__ import annotations

import json

import pytest

from megatron_daro.cli import main

MODEL = {"model_type": "llama", "num_hidden_layers": 8, "hidden_size": 64, "num_attention_heads": 8}
MODEL |= {"num_key_value_heads": 8, "intermediate_size": 128, "vocab_size": 100, "eos_token_id": 1}


@pytest.mark.parametrize(
    ("changes", "sizes", "names"),
    [
        ({}, "--world 7 --tp 2 --cp 2", ["--world 8"]),
        ({}, "--world 6 --tp 4 --pp 3", ["--world 12"]),
        ({}, "--world 8 --ep 2 --etp 3", ["actor.expert_tensor_parallel: got 3"]),
        ({"model_type": "qwen3_5_text"}, "--world 8 --cp 2", ["actor.context_parallel: got 2"]),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_those_that_do(tmp_path, capsys, changes, sizes, names):
    (tmp_path / "config.json").write_text(json.dumps(MODEL | changes))
    assert main(["check-layout", str(tmp_path / "config.json"), *sizes.split()]) == 2
    said = capsys.readouterr().err
    assert all(name in said for name in names), said
