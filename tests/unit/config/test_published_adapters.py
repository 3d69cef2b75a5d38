"""`lora.path`: an adapter in PEFT's files is that of the section and of the model, or nothing starts."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from megatron_daro.config import check, resolve
from megatron_daro.config.model_shape import read_model_shape

RANK = 2
Q_PROJ = "base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{letter}.weight"


def save_adapter(folder, shape, *, rows=0, layers=0, rank=RANK, **config):
    """One of q_proj, as PEFT writes it. rows, layers: more than the model has."""
    sides = {"A": (rank, shape.hidden), "B": (shape.heads * shape.head_dim + rows, rank)}
    tensors = {
        Q_PROJ.format(layer=layer, letter=letter): np.zeros(dims, np.float32)
        for layer in range(shape.layers + layers)
        for letter, dims in sides.items()
    }
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    content = {"peft_type": "LORA", "r": rank, "lora_alpha": 4, "target_modules": ["q_proj"], "bias": "none", **config}
    (folder / "adapter_config.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("adapter", "targets", "why"),
    [
        ({}, "q_proj", ""),
        ({"rank": 3}, "q_proj", "r 3; allowed: r 2"),
        ({"lora_alpha": 8}, "q_proj", "lora_alpha 8; allowed: lora_alpha 4"),
        ({"use_dora": True}, "q_proj", "use_dora True"),
        ({}, "q_proj,v_proj", "v_proj.lora_A.weight absent; allowed: "),
        ({"rows": 8}, "q_proj", "q_proj.lora_B.weight ("),
        ({"layers": 1}, "q_proj", "q_proj.lora_A.weight absent"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused_by_name(run_files, tmp_path, cpu, adapter, targets, why):
    save_adapter(tmp_path / "adapter", read_model_shape(run_files.model), **adapter)
    options = ["lora.rank=2", "lora.alpha=4", f"lora.targets=[{targets}]", f"lora.path={tmp_path / 'adapter'}"]
    problems = check(resolve(run_files.file, options), cpu).problems
    assert [problem.field for problem in problems] == ["lora.path"] * bool(why)
    assert all(why in str(problem) for problem in problems)
