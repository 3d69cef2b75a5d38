"""Small HF checkpoints with random weights, made without transformers, and the command that converts them."""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_mapping import EXPERTS, random_tensors

from megatron_daro.cli import main
from megatron_daro.config.model_shape import read_model_shape
from megatron_daro.convert import plan
from megatron_daro.convert.hf_files import write_hf_checkpoint
from megatron_daro.convert.stacked import stack
from megatron_daro.workshop.convert import conversion

CARD_FILE = "conversion.json"
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"head_dim": 8, "intermediate_size": 24, "vocab_size": 61, "max_position_embeddings": 64}


def config_of(family: str = "qwen2", **changes) -> dict:
    return {"model_type": family, **SIZES, "tie_word_embeddings": False, **EXPERTS.get(family, {}), **changes}


def make_hf(directory: Path, config: dict, *, dtype=torch.bfloat16, max_shard_bytes=4000) -> dict[str, torch.Tensor]:
    """A checkpoint directory; returns its tensors."""
    shape = read_model_shape(config)
    tensors = dict(stack(random_tensors(shape, dtype).items(), shape))
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


class RefusedError(Exception):
    """The command ended with another status than 0; its words on stderr."""


def convert(out: Path, *words: object, processes: int = 1) -> dict[str, Any]:
    """`megatron-daro convert`; returns the card that it wrote (conversion.json)."""
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
        status = main(["convert", *map(str, words), "--out", str(out), "--processes", str(processes)])
    if status:
        raise RefusedError(" ".join(errors.getvalue().split()))
    return json.loads((out / CARD_FILE).read_text())


def to_megatron(hf: Path, out: Path, *options: object, format_="daro", dtype=None, **given) -> dict[str, Any]:
    casts = ["--dtype", dtype] if dtype else []
    return convert(out, "--hf", hf, "--format", format_, *casts, *options, **given)


def to_hf(megatron: Path, out: Path, *options: object, config=None, dtype=None, **given) -> dict[str, Any]:
    """In files of some thousand bytes, unless an option says otherwise."""
    casts = ["--dtype", dtype] if dtype else []
    sizes = [] if "--max-shard-size" in options else ["--max-shard-size", "5KB"]
    configs = ["--hf-config", config] if config else []
    return convert(out, "--megatron", megatron, *casts, *sizes, *configs, *options, **given)


@contextmanager
def small_pieces() -> Iterator[None]:
    """Tensors of a few hundred bytes are split over pieces, parts and files, as those of gigabytes are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan.Plan.__init__, "__defaults__", ((), 300))
        patch.setattr(plan, "_LEAST_FILE_BYTES", 6000)
        patch.setattr(conversion, "PART_BYTES", 2500)
        patch.setattr(os, "fsync", lambda file: None)  # hundreds of small files
        yield


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Names, dtypes, shapes and bits."""
    assert sorted(found) == sorted(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape, name
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name
