"""`megatron-daro plan` as it is typed."""

from __future__ import annotations

import json

import pytest

from megatron_daro.cli import main
from megatron_daro.config import resolve
from megatron_daro.errors import ConfigError
from megatron_daro.workshop.plan.tables import write_options

MODEL = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "max_position_embeddings": 131072,
}
RECIPE = """# A comment that stays.
model: {path: /models/llama}  # not on this machine
data:
  train:
    - a.jsonl
rollout: {max_response_tokens: 4096}
"""


def written(tmp_path):
    recipe, model = tmp_path / "run.yaml", tmp_path / "config.json"
    recipe.write_text(RECIPE)
    model.write_text(json.dumps(MODEL))
    return recipe, ["plan", str(recipe), "--gpus", "16", "--model-config", str(model)]


def test_the_tables_name_layouts_and_reasons(tmp_path, capsys):
    _, command = written(tmp_path)
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "TP PP VPP CP DP EP" in out and "optimizer" in out and "layouts were looked at; out are:" in out


def test_json_has_parts_of_memory_and_time(tmp_path, capsys):
    _, command = written(tmp_path)
    assert main([*command, "--json", "--best", "1", "--price", "2"]) == 0
    (choice,) = json.loads(capsys.readouterr().out)["choices"]
    assert choice["cost"] == 2 * choice["gpu_hours"] > 0
    assert {"weights", "gradients", "optimizer", "activations", "logits"} <= choice["trainer_memory"].keys()
    assert choice["seconds"]["step"] > choice["seconds"]["generation"] > 0


def test_write_sets_the_options_and_keeps_comments(tmp_path, capsys):
    recipe, command = written(tmp_path)
    assert main([*command, "--write"]) == 0
    text = recipe.read_text()
    assert "# A comment that stays." in text and "# not on this machine" in text and "    - a.jsonl" in text
    config = resolve(recipe)
    assert config.engine.kind == "sglang"
    servers = config.engine.replicas * config.engine.sglang.tensor_parallel
    assert config.actor.world_size + servers <= 16
    assert config.actor.micro_batch_tokens >= 1024 + 4096


def test_nothing_fits_is_a_configuration_error(tmp_path, capsys):
    _, command = written(tmp_path)
    assert main([*command, "--gpus", "2", "--gpu", "a100-40g"]) == 2
    assert "no layout of this model fits 2 GPUs of a100-40g" in capsys.readouterr().err


def test_an_unknown_gpu_is_a_configuration_error(tmp_path, capsys):
    _, command = written(tmp_path)
    assert main([*command, "--gpu", "h1000"]) == 2
    assert "did you mean h100-80g" in capsys.readouterr().err


def test_options_are_set_and_all_else_stays_as_it_was_written(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    text = "# Mine.\nmodel:\n  path: 'models/x'  # quoted\ndata:\n  train:\n    - \"a.jsonl\"\n"
    recipe.write_text(text)
    write_options(recipe, {"actor.tensor_parallel": 2, "data.order": "epochs"})
    assert recipe.read_text() == text + "  order: epochs\nactor:\n  tensor_parallel: 2\n"
    with pytest.raises(ConfigError, match=r"got train: .*; allowed: options below train"):
        write_options(recipe, {"data.train.x": 1})


def test_sync_has_a_row_for_the_recipe_and_for_each_choice(tmp_path, capsys):
    _, command = written(tmp_path)
    own = ["engine.kind=sglang", "engine.replicas=2", "engine.sglang.tensor_parallel=4", "actor.tensor_parallel=8"]
    command = [*command[:2], *own, *command[2:], "--best", "1", "--sync"]
    assert main([*command, "--json"]) == 0
    recipes, choice = json.loads(capsys.readouterr().out)["shard_sync"]
    assert recipes["layout"] == "recipe" and choice["layout"] == "1"
    assert len(recipes["sent_bytes"]) == 8 and recipes["busiest_sender_over_mean"] < 1.01
    copies = 2 * 2 * (8_030_261_248 + 3 * 65 * 4096)  # each norm is on four ranks of a server
    assert sum(recipes["sent_bytes"]) == 2 * sum(recipes["received_bytes"]) == copies
    assert main([*command, "engine.sglang.arguments={quantization: fp8}"]) == 0
    out = capsys.readouterr().out
    assert "Weights from shards to shards" in out and "quantization 'fp8'" in out
