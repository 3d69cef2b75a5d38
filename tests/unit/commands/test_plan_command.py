"""`megatron-daro plan` as it is typed."""

from __future__ import annotations

import json
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from published_configs import GPT_OSS_120B

from megatron_daro.cli import main
from megatron_daro.config import resolve

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


def test_the_tables_have_the_choices_of_the_json(tmp_path, capsys):
    _, command = written(tmp_path)
    assert main([*command, "--json", "--best", "1"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert main([*command, "--best", "1"]) == 0
    out = capsys.readouterr().out
    assert f"{record['choices'][0]['seconds']['step']:.0f}" in out and str(record["layouts"]) in out
    assert "optimizer" in out and all(reason in out for reason in record["refused"])


def test_a_model_config_may_lie_beside_a_pipe(tmp_path):
    _, command = written(tmp_path)
    os.mkfifo(tmp_path / "another")
    assert main([*command, "--best", "1"]) == 0


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
    assert "a100-40g" in capsys.readouterr().err


def test_adapters_fit_where_all_weights_do_not(tmp_path, capsys):
    _, command = written(tmp_path)
    small = [*command[:2], "lora.rank=32", "lora.targets=[q_proj, v_proj]", *command[2:], "--gpus", "4"]
    small += ["--gpu", "a100-40g", "--best", "1"]
    assert main([*command[:2], *small[4:], "--json"]) == 2
    assert main([*small, "--json"]) == 0
    (choice,) = json.loads(capsys.readouterr().out)["choices"]
    assert choice["trainer_memory"]["gradients"] < 0.01 * choice["trainer_memory"]["weights"]
    assert main(small) == 0 and "adapters of rank 32" in capsys.readouterr().out


def test_times_of_other_layers_than_those_that_run_are_said(tmp_path, capsys):
    _, command = written(tmp_path)
    assert main([*command, "--json", "--best", "1"]) == 0
    assert json.loads(capsys.readouterr().out)["warnings"] == []
    (tmp_path / "config.json").write_text(json.dumps(GPT_OSS_120B))
    command = [*command, "--gpus", "64", "--best", "1"]
    assert main([*command, "--json"]) == 0
    (warning,) = json.loads(capsys.readouterr().out)["warnings"]
    assert "Transformer Engine" in warning
    assert main(command) == 0 and "Transformer Engine" in capsys.readouterr().out


def test_an_unknown_gpu_is_a_configuration_error(tmp_path, capsys):
    _, command = written(tmp_path)
    assert main([*command, "--gpu", "h1000"]) == 2
    assert "h100-80g" in capsys.readouterr().err


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
    assert "quantization 'fp8'" in out


def test_a_job_costs_whole_batches(tmp_path, capsys):
    _, command = written(tmp_path)
    options = ["trainer.steps=7", "trainer.minibatches_per_batch=2", "--mean-response", "100", "--mean-prompt", "50"]
    assert main([*command[:2], *options, *command[2:], "--json", "--best", "1"]) == 0
    record = json.loads(capsys.readouterr().out)
    (choice,) = record["choices"]
    gpus = sum(choice["gpus"].values())
    assert choice["gpu_hours"] == pytest.approx(4 * choice["seconds"]["step"] * gpus / 3600), (
        "4 batches of 2 of 7 steps"
    )
    assert record["tokens_per_batch"] == pytest.approx(512 * 150, rel=0.01)


def test_a_recorded_run_gives_its_lengths_and_times(tmp_path, capsys):
    recipe, command = written(tmp_path)
    run = tmp_path / "run"
    (run / "rollouts").mkdir(parents=True)
    (run / "config.yaml").write_text(recipe.read_text() + "engine: {kind: sglang}\n")
    lengths = {"length": [10, 30], "prompt_tokens": [[1] * 5] * 2}
    pq.write_table(pa.table(lengths), run / "rollouts" / "step_000001.parquet")
    names = {"rollout_s": 600.0, "train_s": 40.0, "sync_s": 5.0, "step_s": 645.0}
    rows = [{"step": step, **{f"timing/{name}": value for name, value in names.items()}} for step in (1, 2, 3)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main([*command, "--from", str(run), "--json"]) == 0
    printed = capsys.readouterr()
    assert all(number in printed.err for number in ("2 steps", "645.0 s", "600.0", "20 tokens"))
    assert json.loads(printed.out)["tokens_per_batch"] == pytest.approx(512 * 25)


def test_scaling_says_every_size_and_writes_a_plot(tmp_path, capsys):
    _, command = written(tmp_path)
    page = tmp_path / "plot.html"
    assert main([*command, "--best", "1", "--scaling", str(page)]) == 0
    said = capsys.readouterr().err
    assert "8 GPUs" in said and "16 GPUs" in said and str(page) in said and page.exists()


def test_scaling_without_checkpoints_loses_more_to_failures(tmp_path, capsys):
    _, command = written(tmp_path)
    options = ["--gpus", "8", "--best", "1", "--mtbf-hours", "100", "--scaling", str(tmp_path / "plot.html")]

    def said(every: int) -> float:
        assert main([*command[:2], f"trainer.save_every_steps={every}", *command[2:], *options]) == 0
        return float(capsys.readouterr().err.split("8 GPUs:")[1].split("tokens/s")[0])

    assert said(0) < said(1)
