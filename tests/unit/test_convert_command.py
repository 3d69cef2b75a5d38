"""`megatron-daro convert`: options, exit codes, what is printed; the command itself runs in this process."""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_daro import cli
from megatron_daro.commands.convert import parse_size
from megatron_daro.config.model_shape import read_model_shape
from megatron_daro.convert.mapping import hf_tensor_shapes
from megatron_daro.errors import ConfigError, ModelError
from megatron_daro.workshop.convert.model_config import find_config

CONFIG = {"model_type": "qwen2", "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
CONFIG |= {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 70, "max_position_embeddings": 128}
CONFIG |= {"architectures": ["Qwen2ForCausalLM"], "rope_theta": 10000.0, "tie_word_embeddings": False}


def make_model(directory: Path, **changes: object) -> Path:
    config = {**CONFIG, **changes}
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    tensors = {name: torch.randn(dims) * 0.1 for name, dims in hf_tensor_shapes(read_model_shape(config)).items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.fixture
def hf(tmp_path):
    return make_model(tmp_path / "hf")


def convert(*arguments: object) -> int:
    return cli.main(["convert", *map(str, arguments)])


@pytest.mark.parametrize("format_", ["daro", "torch_dist"])
def test_there_and_back_with_a_forward_pass_on_the_way(hf, tmp_path, capsys, format_):
    assert convert("--hf", hf, "--out", tmp_path / "m", "--format", format_, "--verify", "--processes", 1) == 0
    printed = capsys.readouterr().out
    assert "read back and compared" in printed and "forward pass" in printed
    assert convert("--megatron", tmp_path / "m", "--out", tmp_path / "back", "--verify", "--processes", 1) == 0
    assert "forward pass" in capsys.readouterr().out
    found, expected = (load_file(folder / "model.safetensors") for folder in (tmp_path / "back", hf))
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


def test_a_forward_pass_that_differs_fails(hf, tmp_path, capsys, monkeypatch):
    from transformers import Qwen2ForCausalLM

    forward = Qwen2ForCausalLM.forward

    def off(self, *given, **options):
        output = forward(self, *given, **options)
        output.logits = output.logits * 1.01
        return output

    monkeypatch.setattr(Qwen2ForCausalLM, "forward", off)
    assert convert("--hf", hf, "--out", tmp_path / "m", "--verify", "--processes", 1) == 1
    assert "CheckpointError" in capsys.readouterr().err
    assert not (tmp_path / "m").exists()


def test_a_cast_model_is_compared_with_the_source_cast_alike(hf, tmp_path, capsys):
    out = tmp_path / "m"
    assert convert("--hf", hf, "--out", out, "--dtype", "bf16", "--verify", "--processes", 1) == 0
    assert "forward pass" in capsys.readouterr().out


@pytest.mark.parametrize("back", [False, True])
def test_weights_that_are_not_finite_are_named(hf, tmp_path, capsys, back):
    tensors = load_file(hf / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = float("nan")
    save_file(tensors, hf / "model.safetensors", metadata={"format": "pt"})
    source = ("--hf", hf)
    if back:
        assert convert("--hf", hf, "--out", tmp_path / "m", "--processes", 1) == 0
        source = ("--megatron", tmp_path / "m")
    assert convert(*source, "--out", tmp_path / "out", "--verify", "--processes", 1) == 1
    errors = capsys.readouterr().err
    assert "CheckpointError: model.layers.1.mlp.up_proj.weight" in errors
    assert not (tmp_path / "out").exists()


def test_one_megatron_format_to_the_other(hf, tmp_path, capsys):
    assert convert("--hf", hf, "--out", tmp_path / "one", "--processes", 1) == 0
    there = ("--megatron", tmp_path / "one", "--format", "torch_dist", "--out", tmp_path / "two")
    assert convert(*there, "--verify", "--processes", 1) == 0
    assert "Megatron" in capsys.readouterr().out
    assert convert("--megatron", tmp_path / "two", "--format", "hf", "--out", tmp_path / "back", "--processes", 1) == 0
    found, expected = (load_file(folder / "model.safetensors") for folder in (tmp_path / "back", hf))
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_parameters": "yarn"}, "rope_parameters"),
        ({"layer_types": 5}, "layer_types"),
        ({"architectures": 5}, "architectures"),
        ({"num_hidden_layers": "2", "use_sliding_window": True}, "num_hidden_layers"),
        (
            {"model_type": "qwen3_moe", "architectures": None, "num_experts": 4, "num_experts_per_tok": 1}
            | {"moe_intermediate_size": 8, "norm_topk_prob": True},
            "num_experts_per_tok",
        ),
    ],
)
def test_values_of_another_kind_in_config_json(hf, tmp_path, capsys, changes, message):
    (hf / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    assert convert("--hf", hf, "--out", tmp_path / "m") == 1
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("ModelError: ") and message in last


def test_a_byte_order_mark_is_named(hf, tmp_path, capsys):
    (hf / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8-sig")
    assert convert("--hf", hf, "--out", tmp_path / "m") == 1
    assert "byte order mark" in capsys.readouterr().err


def test_dry_run_refuses_a_target_that_cannot_be(hf, tmp_path, capsys, monkeypatch):
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    assert convert("--hf", hf, "--out", ".", "--dry-run") == 2
    assert "--out: . is the current directory" in capsys.readouterr().err


def test_a_model_that_does_not_fit_is_not_run(hf, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1, total=1))
    assert convert("--hf", hf, "--out", tmp_path / "m", "--verify", "--processes", 1) == 0
    assert "not compared" in capsys.readouterr().out


def test_dry_run_says_what_would_be_written_and_writes_nothing(hf, tmp_path, capsys):
    assert convert("--hf", hf, "--out", tmp_path / "m", "--dry-run") == 0
    printed = capsys.readouterr().out
    assert "would write" in printed and "17 tensors" in printed and "1 files, format daro" in printed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--hf"),
        (["--hf", "a", "--megatron", "b"], "--hf"),
        (["--hf", "a", "--format", "hf"], "--format: got 'hf'"),
        (["--hf", "a", "--dtype", "int8"], "--dtype: got 'int8'"),
        (["--hf", "a", "--hf-config", "b"], "--hf-config"),
        (["--hf", "a"], "--hf: got 'a'"),
        (["--megatron", __file__], "--megatron: got "),
    ],
)
def test_options_that_do_not_go_together(tmp_path, capsys, options, message):
    assert convert(*options, "--out", tmp_path / "m") == cli.EXIT_CONFIG
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("text", "number"), [("5GB", 5 * 10**9), ("500 mb", 5 * 10**8), ("2GiB", 2**31), ("7", 7)])
def test_sizes(text, number):
    assert parse_size(text) == number


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "0", "5TB", "1.5.2"])
def test_sizes_that_are_none(text):
    with pytest.raises(ConfigError, match="--max-shard-size"):
        parse_size(text)


def test_the_configuration_of_a_runs_checkpoint_is_found(hf, tmp_path):
    checkpoint = tmp_path / "run/checkpoints/step_000002"
    checkpoint.mkdir(parents=True)
    (checkpoint / "metadata.json").write_text("{}")
    with pytest.raises(ModelError, match="--hf-config"):
        find_config(checkpoint)
    (tmp_path / "run/config.yaml").write_text(f"model: {{path: {hf}}}\ndata: {{train: [x.jsonl]}}\n")
    assert find_config(checkpoint) == hf


@pytest.mark.parametrize("tool", ["convert_hf_to_megatron", "convert_megatron_to_hf"])
def test_the_tools_are_the_command(tool, tmp_path, monkeypatch, capsys):
    path = Path(__file__).resolve().parents[2] / "tools" / f"{tool}.py"
    monkeypatch.setattr(sys, "argv", [str(path), "--out", str(tmp_path / "x")])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(path), run_name="__main__")
    assert ended.value.code == cli.EXIT_CONFIG and "--hf" in capsys.readouterr().err


def test_ctrl_c_leaves_nothing_under_the_name_and_the_next_run_finishes(tmp_path):
    """Dozens of files, so that there is something left to do when the signal comes."""
    hf = make_model(tmp_path / "hf", num_hidden_layers=6)
    assert convert("--hf", hf, "--out", tmp_path / "m", "--processes", 1) == 0
    out, done = tmp_path / "back", tmp_path / ".back.partial/done"
    arguments = ["--megatron", tmp_path / "m", "--out", out, "--max-shard-size", "20KB"]
    command = [sys.executable, "-m", "megatron_daro", "convert", *arguments, "--processes", 2]
    process = subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not list(done.glob("*.json")) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == cli.EXIT_INTERRUPTED, errors
    kept = len(list(done.glob("*.json")))
    assert not out.exists() and kept > 0
    assert convert(*arguments, "--processes", 1) == 0
    files = sorted(out.glob("*.safetensors"))
    assert kept < len(files) and not done.parent.exists()
    found = {name: tensor for path in files for name, tensor in load_file(path).items()}
    expected = load_file(hf / "model.safetensors")
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.parametrize("said", ["", "..", ".", "other", "\u00b2", "9" * 5000])
def test_a_tracker_that_names_no_iteration_is_refused(hf, tmp_path, capsys, said):
    (tmp_path / "m" / "other").mkdir(parents=True)
    (tmp_path / "m" / "latest_checkpointed_iteration.txt").write_text(said)
    assert convert("--megatron", tmp_path / "m", "--hf-config", hf, "--out", tmp_path / "out", "--dry-run") == 1
    assert "latest_checkpointed_iteration.txt" in capsys.readouterr().err


def _of_a_pipe(folder):
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")


def _of_an_adapter(folder):
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text("{}")


def _of_a_pointer(folder):
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"
    (folder / "model.safetensors").write_text(pointer)


def _of_bytes(dtype):
    def change(folder):
        tensors = load_file(folder / "model.safetensors")
        name = "model.layers.0.self_attn.q_proj.weight"
        save_file({**tensors, name: tensors[name].to(dtype)}, folder / "model.safetensors")

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_of_a_pipe, "pipe"),
        (_of_an_adapter, "merge_and_unload"),
        (_of_a_pointer, "git lfs pull"),
        (_of_bytes(torch.int8), "torch.int8"),
        (_of_bytes(torch.float8_e4m3fn), "torch.float8_e4m3fn"),
    ],
)
def test_what_is_no_checkpoint_to_convert_gets_the_advice_that_helps(hf, tmp_path, capsys, change, words):
    change(hf)
    assert convert("--hf", hf, "--out", tmp_path / "m", "--dry-run") == 1
    told = capsys.readouterr().err
    assert words in told and "--dtype" not in told


@pytest.mark.parametrize("options", [(), ("--dry-run",)])
@pytest.mark.parametrize("kind", ["not empty", "a file", "below a file"])
def test_a_target_that_cannot_be_one_is_wrong_usage_and_nothing_is_started(hf, tmp_path, capsys, kind, options):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    name = {"not empty": "out", "a file": "out/mine", "below a file": "out/mine/new"}[kind]
    assert convert("--hf", hf, "--out", tmp_path / name, "--processes", 1, *options) == 2
    assert "--out: " in capsys.readouterr().err and (tmp_path / "out" / "mine").read_text() == "x"
