"""Model directories without weights worth the name, for what only looks at a model: its files, shapes and tokens."""

from __future__ import annotations

import json
import math
import shutil
import struct
from pathlib import Path

import tiny_task
from published_configs import GLM_45_AIR, QWEN3_5_27B

from megatron_daro.config import resolve
from megatron_daro.config.model_shape import read_model_shape, text_part
from megatron_daro.convert.mapping import hf_tensor_shapes

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"

# The tokenizer that is at hand has fewer ids than that of Qwen3.5, whose end is not among them.
PUBLISHED = {"GLM-4.5-Air": GLM_45_AIR, "Qwen3.5-27B-text": {**text_part(QWEN3_5_27B), "eos_token_id": None}}


def save_weights(directory: Path) -> None:
    """All tensors of the model that config.json describes, in bf16: zeros that take no room on the disk."""
    rows, at = {}, 0
    for name, dims in hf_tensor_shapes(read_model_shape(directory)).items():
        rows[name] = {"dtype": "BF16", "shape": list(dims), "data_offsets": [at, at + 2 * math.prod(dims)]}
        at += 2 * math.prod(dims)
    header = json.dumps(rows).encode()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(file.tell() + at)


def save_tiny_model(directory: Path) -> Path:
    """The configuration and tokenizer of a Qwen2 of two layers."""
    tiny_task.save_tokenizer(directory, tiny_task.SYMBOLS)
    shape = {"model_type": "qwen2", "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    shape |= {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 64, "dtype": "float32"}
    (directory / "config.json").write_text(json.dumps(shape))
    save_weights(directory)
    return directory


def save_recipe_model(recipe: Path, place: Path) -> Path:
    """The model that a recipe names, below `place`: its real configuration, a real tokenizer; needs SHARED."""
    directory = place / resolve(recipe).model.path
    directory.mkdir(parents=True)
    name = directory.name.removesuffix("-Instruct")  # which has the sizes of its base model
    if config := PUBLISHED.get(name):
        (directory / "config.json").write_text(json.dumps(config))
    else:
        shutil.copy(SHARED / "configs" / f"{name}.json", directory / "config.json")
    shutil.copy(SHARED / "tokenizer" / "tokenizer.qwen2.5.json", directory / "tokenizer.json")
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    options = {"eos_token": "<|endoftext|>", "tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(options))
    save_weights(directory)
    return directory
