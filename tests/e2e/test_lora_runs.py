"""Runs with adapters by the command line: killed and resumed bit for bit, refused on another base, exported to PEFT."""

import json
import shutil
import signal

import pytest
import torch
from cli_runs import assert_same_run, last_step, run_cli, signalled, trained
from safetensors.torch import load_file, save_file

LORA = ["lora.rank=4", "lora.alpha=8", "trainer.export_adapter=true", "trainer.export_hf=true", "trainer.steps=4"]


@pytest.mark.heavy  # adapters, checkpoints and stored ones: tests/parallel/test_lora.py
@pytest.mark.timeout(900)
def test_a_run_with_adapters_resumes_and_exports_them(tiny, tmp_path):
    def options(name):
        return [f"trainer.run_dir={tmp_path / name}", *LORA]

    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    trained(["train", tiny.config, *options("whole")], tmp_path / "whole.log")
    arguments, place = ["train", tiny.config, *options("resumed")], {"place": "train", "after_step": 3}
    with signalled(arguments, tmp_path / "first.log", name="SIGKILL", **place, run_dir=resumed) as run:
        first = run.finish()
    assert first.code == -signal.SIGKILL and last_step(resumed) == 3
    assert "lora.rank" in first.stderr, "that engines get merged weights is said"
    refused = run_cli(["train", tiny.config, *options("resumed"), "lora.rank=2", "--resume"], tmp_path / "rank.log")
    assert refused.code != 0 and "lora.rank was 4, is 2" in refused.stderr
    other = shutil.copytree(tiny.model, tmp_path / "other")
    base = load_file(other / "model.safetensors")
    save_file({**base, "model.norm.weight": base["model.norm.weight"] + 1}, other / "model.safetensors")
    refused = run_cli(
        ["train", tiny.config, *options("resumed"), f"model.path={other}", "--resume"], tmp_path / "base.log"
    )
    assert refused.code != 0 and "model file model.safetensors was" in refused.stderr
    trained(["train", tiny.config, *options("resumed"), "--resume"], tmp_path / "second.log")
    assert_same_run(resumed, whole, range(1, 5), but=frozenset({"common.pt", "manifest.json"}))

    adapter, merged = (
        load_file(whole / "adapter" / "adapter_model.safetensors"),
        load_file(whole / "hf/model.safetensors"),
    )
    again = load_file(resumed / "adapter" / "adapter_model.safetensors")
    assert adapter.keys() == again.keys() and all(torch.equal(adapter[name], again[name]) for name in adapter)
    config = json.loads((whole / "adapter" / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 4, 8)
    for name, weight in base.items():
        a, b = (f"base_model.model.{name.removesuffix('weight')}lora_{letter}.weight" for letter in "AB")
        added = 2 * adapter[b] @ adapter[a] if a in adapter else torch.zeros(())
        assert torch.allclose(merged[name], weight + added, atol=1e-6)
    offline = tmp_path / "offline"
    command = ["convert", "--merge", whole / "adapter", "--hf", tiny.model, "--out", offline]
    assert run_cli(command, tmp_path / "merge.log").code == 0
    written = load_file(offline / "model.safetensors")
    assert all(torch.allclose(written[name], merged[name], atol=1e-6) for name in merged.keys() | written.keys())
    assert (offline / "config.json").is_file() and (offline / "tokenizer.json").is_file()
    assert len(adapter) == 2 * 7 * 2 and all(tensor.any() for tensor in adapter.values())
