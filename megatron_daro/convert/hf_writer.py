"""Streamed, atomic writing of a Hugging Face checkpoint.

Actor -> convert.mapping.merge -> (name, tensor) stream -> directory that transformers can load.
Holds one file's tensors at a time. The directory appears whole or not at all: everything is written and synced to a
sibling, which is then renamed. Refuses to write over something that exists; copies no code (`*.py`) with the tokenizer.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from megatron_daro import durable
from megatron_daro.convert.hf_reader import INDEX_FILE, SINGLE_FILE
from megatron_daro.errors import ModelError

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
_TEMPLATE_FOLDER = "additional_chat_templates"  # of transformers: further templates, a .jinja file each
_LICENSES = ("LICENSE", "LICENCE", "NOTICE", "USE_POLICY")
"""How the names of files begin that must go wherever the weights go."""
_DTYPE_KEYS = ("dtype", "torch_dtype")  # of config.json: transformers 5 and 4; both read the second


def write_hf_checkpoint(
    directory: str | Path,
    tensors: Iterable[tuple[str, Tensor]],
    config: Mapping[str, Any],
    tokenizer_files: str | Path | None = None,
    *,
    max_shard_bytes: int = 5 * 1000**3,
) -> None:
    """Write a checkpoint directory that transformers loads.

    Args:
        directory: must not exist; its parent is made.
        tensors: (HF name, tensor), any device; consumed once, in order.
        config: the content of config.json, written as it is.
        tokenizer_files: a directory to copy the tokenizer and generation_config.json from; None copies nothing.
        max_shard_bytes: files hold at most this many bytes of tensors, or one larger tensor.

    Raises:
        ModelError: the directory exists, a name comes twice, no tensor came, or the disk refused. What was written is
            removed first; errors of the stream itself pass through, after the same.
    """
    target = Path(directory)
    if target.exists():
        raise ModelError(f"{target} exists already. Remove it or choose another directory; nothing was written.")
    partial = target.with_name(f".{target.name}.partial-{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        writer = _ShardWriter(partial, max_shard_bytes)
        for name, tensor in tensors:
            writer.add(name, tensor)
        writer.finish()
        _write_json(partial / "config.json", dict(config))
        copy_tokenizer(tokenizer_files, partial)
        durable.sync_folder(partial)
        partial.rename(target)
        durable.sync(target.parent)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise ModelError(
            f"{target} could not be written ({error}); nothing was left there. Free space or check rights."
        ) from error
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


class _ShardWriter:
    """Collects tensors until a file is full. File names carry the number of files, so they are given at the end."""

    def __init__(self, directory: Path, max_shard_bytes: int) -> None:
        self._directory = directory
        self._limit = max_shard_bytes
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._shards: list[list[str]] = []
        self._seen: set[str] = set()
        self._total_bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Take one tensor; write the file before it when both together would exceed the limit."""
        if name in self._seen:
            raise ModelError(f"tensor {name} came twice; a checkpoint holds each name once.")
        if self._pending and self._pending_bytes + tensor.nbytes > self._limit:
            self._flush()
        self._seen.add(name)
        # A clone frees the larger buffer a view would keep alive, and safetensors refuses tensors that share memory.
        shared = tensor.untyped_storage().nbytes() != tensor.nbytes or not tensor.is_contiguous()
        plain = tensor.detach().cpu()
        self._pending[name] = plain.clone().contiguous() if shared else plain
        self._pending_bytes += tensor.nbytes
        self._total_bytes += tensor.nbytes

    def finish(self) -> None:
        """Write what is left, give the files their names, and write the index if there are several."""
        if not self._seen:
            raise ModelError("no tensor came; a checkpoint without weights is not written.")
        self._flush()
        weight_map: dict[str, str] = {}
        for number, names in enumerate(self._shards):
            file = shard_name(number, len(self._shards))
            (self._directory / _unnamed(number)).rename(self._directory / file)
            weight_map |= dict.fromkeys(names, file)
        write_index(self._directory, weight_map, self._total_bytes)

    def _flush(self) -> None:
        save_file(self._pending, self._directory / _unnamed(len(self._shards)), metadata={"format": "pt"})
        self._shards.append(list(self._pending))
        self._pending, self._pending_bytes = {}, 0


def _unnamed(number: int) -> str:
    return f"shard-{number:05d}.tmp"


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def shard_name(number: int, count: int) -> str:
    """Return the name of file `number` of `count`, as transformers gives it; tools look for these names."""
    return SINGLE_FILE if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def write_index(directory: Path, weight_map: Mapping[str, str], total_bytes: int) -> None:
    """Write the index of several files: which of them has a tensor. One file has none."""
    if len(set(weight_map.values())) > 1:
        content = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        _write_json(directory / INDEX_FILE, content)


def copy_tokenizer(source: str | Path | None, target: Path) -> None:
    """Copy the tokenizer, chat templates, generation_config.json and licence of a model; None copies nothing."""
    if source is None:
        return
    for path in Path(source).iterdir():
        if path.is_file() and (path.name in TOKENIZER_FILES or path.name.upper().startswith(_LICENSES)):
            shutil.copyfile(path, target / path.name)
    for path in Path(source, _TEMPLATE_FOLDER).glob("*.jinja"):
        (target / _TEMPLATE_FOLDER).mkdir(exist_ok=True)
        shutil.copyfile(path, target / _TEMPLATE_FOLDER / path.name)


def copy_model_files(
    source: Path | Mapping[str, Any], target: Path, dtype: str | None, *, always: bool = False
) -> None:
    """Copy config.json and what `copy_tokenizer` takes; with `dtype`, config.json then says that dtype (torch's name):
    loaders would otherwise convert to that of the source. always: also where the source names none. A source that is
    no folder is the content of config.json."""
    folder = source if isinstance(source, Path) else None
    text = json.dumps(source) if folder is None else (folder / "config.json").read_text(encoding="utf-8")
    config = json.loads(text)
    keys = [key for key in _DTYPE_KEYS if key in config] or (_DTYPE_KEYS[1:] if always else ())
    named = {} if dtype is None else dict.fromkeys(keys, dtype)
    if folder is not None and config == {**config, **named}:
        shutil.copyfile(folder / "config.json", target / "config.json")
    else:
        _write_json(target / "config.json", {**config, **named})
    copy_tokenizer(folder, target)
