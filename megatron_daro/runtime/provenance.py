"""What a run is made of: its configuration, the model's files, the data, packages and machine.

Every checkpoint holds this description; the restart audit compares it with that of the resumed run. Reads the model's
small files and the data files whole, and samples of the weights.
"""

from __future__ import annotations

import hashlib
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from megatron_daro.config import Config, detect
from megatron_daro.config.model_shape import read_json
from megatron_daro.errors import DataError
from megatron_daro.rollout.recorder import step_file

ABSENT = "(absent)"
_PACKAGES = ("megatron-daro", "torch", "megatron-core", "transformers", "tokenizers", "numpy", "ray", "math-verify")
_TOKENIZER = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")
FREE_FILES = ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "chat_template.jinja")
"""Files of a model that only say how answers end and how a chat is written."""
_SAMPLES, _SAMPLE_BYTES = 16, 1 << 20


def provenance(config: Config, replay: Path | None = None) -> dict[str, Any]:
    """Return what a run is made of, as plain values fit for JSON.

    Args:
        config: checked. replay: the run whose recording it trains on, identified by its first step; None: it generates.

    Raises:
        DataError: a file cannot be read. ModelError: config.json cannot be read.
    """
    path = config.model.path
    packages, hardware = {name: _version(name) for name in _PACKAGES}, detect()
    return {
        "config": config.model_dump(mode="json"),
        "model": read_json(path / "config.json"),
        "bound_files": tokenizer_files(path) | weight_files(path),
        "free_files": {name: digest(path / name) for name in FREE_FILES if (path / name).is_file()},
        "train_files": [digest(file) for file in config.data.train],
        "eval_files": {one.name: digest(one.path) for one in config.data.eval},
        "recording": digest(step_file(replay, 1)) if replay else None,
        "packages": packages | {"python": platform.python_version()},
        "machine": {name: getattr(hardware, name) for name in ("kind", "count", "fp8", "memory_bytes")},
    }


def tokenizer_files(path: Path) -> dict[str, str]:
    """Return the digests of the files that map tokens to text. Raises DataError."""
    return {name: digest(path / name) for name in _TOKENIZER if (path / name).is_file()}


def weight_files(path: Path) -> dict[str, str]:
    """Return digests of samples of the weights."""
    return {file.name: _sampled_digest(file) for file in sorted(path.glob("*.safetensors"))}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ABSENT


def digest(file: Path) -> str:
    """Return the start of a file's SHA-256. Raises DataError."""
    try:
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()[:16]
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror}; check the path and its permissions") from error


def _sampled_digest(file: Path) -> str:
    """Return a digest of size, header and 16 MiB spread over the file: it tells weights of many gigabytes apart within
    a second."""
    digest = hashlib.sha256()
    size = file.stat().st_size
    digest.update(str(size).encode())
    with file.open("rb") as opened:
        for index in range(_SAMPLES):
            opened.seek(max(0, size - _SAMPLE_BYTES) * index // (_SAMPLES - 1))
            digest.update(opened.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]
