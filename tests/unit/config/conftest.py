"""A complete, valid set of files for a run: a small model directory and a data file."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_daro.config import Hardware

SHAPE = {
    "model_type": "qwen2",
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "vocab_size": 100,
    "max_position_embeddings": 8192,
    "eos_token_id": 1,
}


def write_safetensors(path: Path, num_bytes: int = 16) -> None:
    """A minimal file of the format: header size, header, data."""
    entry = {"w": {"dtype": "F32", "shape": [num_bytes // 4], "data_offsets": [0, num_bytes]}}
    header = json.dumps(entry).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(num_bytes))


class RunFiles:
    """Files of a run below a directory, and the YAML of its configuration, to be spoilt one by one."""

    def __init__(self, root: Path) -> None:
        self.root, self.model, self.file = root, root / "model", root / "quick.yaml"
        self.model.mkdir()
        self.set_shape()
        write_safetensors(self.model / "model.safetensors")
        (self.model / "tokenizer.json").write_text("{}")
        (root / "train.jsonl").write_text('{"problem": "1+1", "answer": "2"}\n')
        self.write({})

    def set_shape(self, **changes: Any) -> None:
        shape = {key: value for key, value in {**SHAPE, **changes}.items() if value is not None}
        (self.model / "config.json").write_text(json.dumps(shape))

    def write(self, sections: dict[str, Any]) -> Path:
        tree: dict[str, Any] = {"model": {"path": str(self.model)}, "data": {"train": [str(self.root / "train.jsonl")]}}
        for name, section in sections.items():
            tree[name] = {**tree.get(name, {}), **section} if isinstance(section, dict) else section
        self.file.write_text(yaml.safe_dump(tree))
        return self.file


@pytest.fixture(scope="session")
def new_run_files() -> type[RunFiles]:
    return RunFiles


@pytest.fixture
def run_files(tmp_path: Path) -> RunFiles:
    return RunFiles(tmp_path)


@pytest.fixture
def cpu() -> Hardware:
    return Hardware("cpu", 4)
