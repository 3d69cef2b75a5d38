"""Adapters between PEFT and us: what it saves is read bit for bit, what we write makes its model say what ours does,
and an adapter has the same gradients in both.

Run with PEFT 0.21.2, in an environment of its own (tests/README.md).
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megatron_daro.actor.parallel import Layout
from megatron_daro.config.lora import LoraSection, matrix_sides, peft_config
from megatron_daro.config.model_shape import read_model_shape
from megatron_daro.sync import files
from megatron_daro.sync.plan import WeightFiles

sys.path.append(str(Path(__file__).parents[1] / "parallel"))
import lora_tasks  # this and the next four are found through the line above
import test_lora
from ranks import RankPool
from small_models import random_batch, save_model
from test_gradients_exact import reference_gradients, relative_difference

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("peft") is None,
        reason="PEFT is not installed; tests/README.md makes an environment with it",
    ),
]

FAMILIES = ["qwen2", "qwen3", "llama", "mistral", "olmo3", "qwen3_moe", "mixtral", "glm4_moe", "gpt_oss"]
FAMILIES += ["deepseek_v3", "deepseek_v3_plain", "qwen3_next", "qwen3_5", "qwen3_5_moe"]


@pytest.fixture(scope="module")
def one_rank():
    pool = RankPool(1)
    yield pool
    pool.close()


def written(folder, adapter, section, model):
    """What a run writes of an adapter."""
    wanted = WeightFiles(directory=folder, file_bytes=1 << 20, remedy="")
    files.open_checkpoint(wanted)
    tensors = ((name, torch.from_numpy(value)) for name, value in adapter.items())
    report = files.write_weight_files(tensors, wanted, "")
    files.complete_adapter(wanted, report.files, peft_config(section, read_model_shape(model), str(model)))
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_each_reads_what_the_other_wrote(one_rank, tmp_path, family):
    from peft import LoraConfig, PeftModel, get_peft_model

    model, batch, generator = save_model(family, tmp_path), random_batch(), torch.Generator().manual_seed(3)
    targets = list(matrix_sides(read_model_shape(tmp_path)))
    settings = {"r": test_lora.RANK, "lora_alpha": test_lora.ALPHA, "use_rslora": True}
    theirs = get_peft_model(model, LoraConfig(**settings, target_modules=targets, task_type="CAUSAL_LM"))
    factors = {n.replace(".default.", "."): p for n, p in theirs.named_parameters() if p.requires_grad}
    for parameter in factors.values():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    theirs.save_pretrained(tmp_path / "theirs")
    theirs.named_parameters = lambda **_: factors.items()
    begun, (_, _, gradients) = test_lora.logprobs(theirs, batch), reference_gradients(theirs, batch, "daro")

    chosen = {"rank": test_lora.RANK, "alpha": test_lora.ALPHA, "rslora": True, "targets": targets}
    lora = {**chosen, "path": tmp_path / "theirs"}
    found = one_rank.run(lora_tasks.two_updates, Layout(), path=tmp_path, batch=batch, lora=lora)
    before, after = found[0]["updates"]
    saved = load_file(tmp_path / "theirs" / "adapter_model.safetensors")
    assert saved.keys() == before["adapters"].keys()
    assert all(np.array_equal(before["adapters"][name], value.numpy()) for name, value in saved.items())
    assert np.abs(before["logprobs"] - begun).max() < 1e-6 * np.abs(begun).max()
    assert relative_difference(before["gradients"], gradients) < 1e-5

    ours = written(tmp_path / "ours", after["adapters"], LoraSection(**chosen), tmp_path)
    loaded = PeftModel.from_pretrained(save_model(family, tmp_path), ours)
    moved = test_lora.logprobs(loaded, batch)
    assert np.abs(after["logprobs"] - moved).max() < 1e-6 * np.abs(moved).max()
    assert np.abs(moved - begun).max() > 1e-3
