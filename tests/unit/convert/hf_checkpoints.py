"""Small HF checkpoints with random weights, made without transformers, and what the tests ask of them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from test_mapping import EXPERTS, random_tensors

from megatron_daro.config.model_shape import read_model_shape
from megatron_daro.convert import plan
from megatron_daro.convert.hf_files import write_hf_checkpoint
from megatron_daro.workshop.convert import conversion
from megatron_daro.workshop.convert.jobs import TensorRecord

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"head_dim": 8, "intermediate_size": 24, "vocab_size": 61, "max_position_embeddings": 64}


def config_of(family: str = "qwen2", **changes) -> dict:
    return {"model_type": family, **SIZES, "tie_word_embeddings": False, **EXPERTS.get(family, {}), **changes}


def make_hf(directory: Path, config: dict, *, dtype=torch.bfloat16, max_shard_bytes=4000) -> dict[str, torch.Tensor]:
    """A checkpoint directory; returns its tensors."""
    tensors = random_tensors(read_model_shape(config), dtype)
    write_hf_checkpoint(directory, tensors.items(), config, max_shard_bytes=max_shard_bytes)
    (directory / "tokenizer.json").write_text('{"version": "1.0"}')
    return tensors


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    """What an HF directory holds, by the safetensors package."""
    return {name: t for file in sorted(directory.glob("*.safetensors")) for name, t in load_file(file).items()}


def replace_tensor(directory: Path, name: str, value: torch.Tensor | None) -> None:
    """Change one tensor of an HF directory, add it (to the first file), or remove it."""
    index = directory / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    file = content["weight_map"].get(name, sorted(set(content["weight_map"].values()))[0])
    tensors = load_file(directory / file)
    tensors.pop(name, None)
    content["weight_map"].pop(name, None)
    if value is not None:
        tensors[name], content["weight_map"][name] = value, file
    save_file(tensors, directory / file)
    index.write_text(json.dumps(content))


def to_megatron(hf: Path, out: Path, *, format_="daro", dtype=None, processes=1, verify=False, progress=None):
    made = plan.plan_to_megatron(hf, format_, dtype)
    silent = progress or (lambda phase, done: None)
    return conversion.convert(made, out, processes=processes, verify=verify, progress=silent)


def to_other(megatron: Path, out: Path, format_: str, *, config=None, **options):
    """From one of Megatron's formats to the other."""
    config = config or megatron / conversion.HF_FOLDER
    made = plan.plan_to_megatron(megatron, format_, None, megatron_config=config, **options)
    return conversion.convert(made, out, processes=1, verify=True, progress=lambda phase, done: None)


def to_hf(megatron: Path, out: Path, *, config=None, dtype=None, max_shard_bytes=5000, processes=1, verify=False):
    made = plan.plan_to_hf(megatron, config or megatron / conversion.HF_FOLDER, dtype, max_shard_bytes)
    return conversion.convert(made, out, processes=processes, verify=verify, progress=lambda phase, done: None)


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Names, dtypes, shapes and bits."""
    assert sorted(found) == sorted(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape, name
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name


def sha(values: torch.Tensor) -> str:
    return hashlib.sha256(values.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def record(
    name: str = "a", shape: tuple[int, ...] = (2, 3), dtype: str = "bfloat16", digest: str = "1"
) -> TensorRecord:
    return TensorRecord(name, shape, dtype, digest)
