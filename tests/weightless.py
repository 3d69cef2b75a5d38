"""Model directories without weights worth the name, for what only looks at a model: its files, shapes and tokens."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import tiny_task

from megatron_daro.config import resolve

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"


def save_weights(directory: Path, numbers: int) -> None:
    """A safetensors file of one tensor of so many zeros."""
    header = json.dumps({"w": {"dtype": "F32", "shape": [numbers], "data_offsets": [0, 4 * numbers]}}).encode()
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4 * numbers))


def save_tiny_model(directory: Path) -> Path:
    """The configuration and tokenizer of a Qwen2 of two layers."""
    tiny_task.save_tokenizer(directory, tiny_task.SYMBOLS)
    shape = {"model_type": "qwen2", "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    shape |= {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 64, "dtype": "float32"}
    (directory / "config.json").write_text(json.dumps(shape))
    save_weights(directory, 1)
    return directory


def save_recipe_model(recipe: Path, place: Path) -> Path:
    """The model that a recipe names, below `place`: its real configuration, a real tokenizer; needs SHARED."""
    directory = place / resolve(recipe).model.path
    directory.mkdir(parents=True)
    name = directory.name.removesuffix("-Instruct")  # which has the sizes of its base model
    shutil.copy(SHARED / "configs" / f"{name}.json", directory / "config.json")
    shutil.copy(SHARED / "tokenizer" / "tokenizer.qwen2.5.json", directory / "tokenizer.json")
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    options = {"eos_token": "<|endoftext|>", "tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(options))
    save_weights(directory, 0)
    return directory
