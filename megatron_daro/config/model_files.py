"""The model directory, examined without loading the model: shape, weights, tokenizer.

`read_model` reads config.json (model_shape.py) and the headers of the safetensors files (safetensors_header.py), and
reports torn files before any process starts. Nothing is unpickled: *.bin weights are not accepted.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_daro.config.model_shape import (
    CRITIC_HEADS,
    ModelShape,
    dangling_link,
    quantization,
    read_model_shape,
    require_regular_files,
    text_part,
)
from megatron_daro.config.problems import Problem
from megatron_daro.config.safetensors_header import GIT_LFS, HeaderError, read_header
from megatron_daro.config.sections import Config
from megatron_daro.errors import ModelError

_FIELD = "model.path"
_MEGATRON_FILES = ("metadata.json", "latest_checkpointed_iteration.txt")
_SMALL_FILES = ("generation_config.json", "tokenizer_config.json", "special_tokens_map.json")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
ADAPTER_FILE = "adapter_config.json"
ADAPTER = (
    f"{ADAPTER_FILE} but no model: an adapter without its base model. Merge the two (peft: merge_and_unload, then "
    "save_pretrained) and give the folder of the merged model"
)
QUANTIZED = (
    "Quantized models are not trained, and only fp8 blocks with scales converted; take the one that is not quantized"
)


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """shape: None if config.json cannot be used. has_end_token: whether a file names a token that ends an answer.
    problems: everything that is missing, torn or not supported."""

    shape: ModelShape | None = None
    has_end_token: bool = False
    problems: tuple[Problem, ...] = ()


def read_model(directory: Path) -> ModelFiles:
    """Return what a Hugging Face model directory holds, and its problems."""
    if not directory.is_dir():
        got = f"{str(directory)!r}, which is {'a file' if directory.exists() else 'not there'}"
        fix = "give the local directory of the model; names of a hub are not downloaded"
        problem = Problem(_FIELD, got, "a directory with config.json, *.safetensors and a tokenizer", fix)
        return ModelFiles(problems=(problem,))
    try:
        require_regular_files(directory)
    except ModelError as error:
        got, _, fix = str(error).removesuffix(".").rpartition(". ")
        return ModelFiles(problems=(Problem(_FIELD, got, "regular files", fix),))
    problems = [*_weight_problems(directory), *_tokenizer_problems(directory), *_small_file_problems(directory)]
    try:
        shape = read_model_shape(directory)
    except ModelError as error:
        allowed, fix = (
            "the config.json of a model of a known family (docs/models.md)",
            "copy the complete model, or choose another",
        )
        problem = Problem(_FIELD, f"a config.json that cannot be used ({error})", allowed, fix)
        return ModelFiles(problems=(problem, *problems))
    config = _read_json(directory / "config.json")[0] or {}
    allowed = "weights in bf16, which the policy has and engines begin with"
    if method := quantization(text_part(config)):
        problems.insert(0, Problem(_FIELD, f"{str(directory)!r}, a model in {method}", allowed, _converted(directory)))
    if text_part(config) != config:
        got, allowed = f"{str(directory)!r}, a model that sees images too", "a model of text, such as its text part"
        problems.insert(0, Problem(_FIELD, got, allowed, _converted(directory)))
    return ModelFiles(shape, _has_end_token(directory), tuple(problems))


def _converted(directory: Path) -> str:
    commands = f"`megatron-daro convert --hf {directory} --out A`, then `megatron-daro convert --megatron A --out B`"
    return f"run {commands}, and train B"


def critic_shape(config: Config, policy: ModelShape) -> ModelShape | None:
    """Return the shape of the critic. None: there is none, or not known, since an algorithm of the user's may have one
    without `critic.path`. Raises ModelError."""
    if (path := config.algorithm.critic.path) is not None:
        return read_model_shape(path, CRITIC_HEADS)
    return policy if config.algorithm.has_critic else None


def megatron_problems(directory: Path | None) -> Iterator[Problem]:
    """Return why `model.megatron_weights` cannot be a Megatron checkpoint; the files themselves are read later."""
    if directory is not None and not any((directory / name).is_file() for name in _MEGATRON_FILES):
        allowed = f"a Megatron checkpoint: a directory with {' or '.join(_MEGATRON_FILES)}"
        fix = "give what `megatron-daro convert --out` or a run wrote (RUN/checkpoints/step_...)"
        yield Problem("model.megatron_weights", repr(str(directory)), allowed, fix)


def _read_json(path: Path) -> tuple[dict[str, Any] | None, str]:
    """Return the object in a JSON file, or why there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if path.is_symlink():
            return None, dangling_link(path)
        return None, f"no {path.name} in {str(path.parent)!r}"
    except (OSError, ValueError, RecursionError) as error:
        if path.is_file() and path.read_bytes().startswith(GIT_LFS):
            return None, f"a {path.name} that is a git-lfs pointer, not the file (run `git lfs pull` in its folder)"
        return None, f"an unreadable {path.name} ({error})"
    return (value, "") if isinstance(value, dict) else (None, f"a {path.name} that is not a JSON object")


def _has_end_token(directory: Path) -> bool:
    """Return whether a file names a token that ends an answer; True if a file cannot be read, since it may name one."""
    names = ("config.json", *_SMALL_FILES)
    if any(_small_file_problems(directory)):
        return True
    sources = [_read_json(directory / name)[0] or {} for name in names]
    return any(source.get(key) is not None for source in sources for key in ("eos_token_id", "eos_token"))


def _small_file_problems(directory: Path) -> Iterator[Problem]:
    """Yield the optional files of the model that exist but cannot be read."""
    for name in _SMALL_FILES:
        if os.path.lexists(directory / name) and _read_json(directory / name)[0] is None:
            why = _read_json(directory / name)[1]
            yield Problem(_FIELD, why, f"a complete {name}, or none", "copy or download the complete model again")


def _weight_problems(directory: Path) -> Iterator[Problem]:
    allowed = "model.safetensors, or model.safetensors.index.json and all its parts"
    again = "copy or download the complete model again"
    index, single = directory / "model.safetensors.index.json", directory / "model.safetensors"
    names: dict[str, object] | None = {}
    if os.path.lexists(index):
        raw, why = _read_json(index)
        names = raw.get("weight_map") if raw else None
        if not isinstance(names, dict) or not names:
            yield Problem(_FIELD, why or "an index without weight_map", allowed, again)
            return
        files = [directory / str(name) for name in sorted(set(map(str, names.values())))]
        if single not in files and single.exists():
            got = f"{single.name} beside {index.name}, which names {files[0].name}"
            yield Problem(_FIELD, got, allowed, "remove the one that is not the model: transformers reads the first")
        for path in sorted(set(directory.glob("model-*-of-*.safetensors")) - {*files}):
            got = f"{path.name}, which {index.name} does not name"
            yield Problem(_FIELD, got, allowed, "remove it if an older checkpoint left it, else copy the index again")
    elif os.path.lexists(single):
        files = [single]
    else:
        yield _no_weights(directory, allowed, again)
        return
    for file in files:
        try:
            tensors = read_header(file)
        except FileNotFoundError:
            got = dangling_link(file) if file.is_symlink() else f"{file.name}: missing"
            yield Problem(_FIELD, got, "complete safetensors files", again)
            continue
        except OSError as error:
            yield Problem(_FIELD, f"{file.name}: {error.strerror}", "complete safetensors files", again)
            continue
        except HeaderError as error:
            got, fix = error.args
            yield Problem(_FIELD, got, "complete safetensors files", fix[0].lower() + fix[1:])
            continue
        unnamed = sorted(name for name in tensors if names and names.get(name) != file.name)
        if unnamed:
            more = f" and {len(unnamed) - 1} more" if len(unnamed) > 1 else ""
            got = f"{file.name} with {unnamed[0]}{more}, which {index.name} does not name there"
            yield Problem(_FIELD, got, "an index of all tensors", again)


def _no_weights(directory: Path, allowed: str, again: str) -> Problem:
    """Return the problem of a folder without weights, which says what is there instead."""
    if (directory / ADAPTER_FILE).exists():
        got, _, fix = ADAPTER.partition(". ")
        return Problem(_FIELD, f"{str(directory)!r} with {got}", allowed, fix[0].lower() + fix[1:])
    if parts := sorted(directory.glob("*.safetensors")):
        return Problem(_FIELD, f"{parts[0].name} without an index in {str(directory)!r}", allowed, again)
    pickled = any(directory.glob("*.bin"))
    got = f"no *.safetensors in {str(directory)!r}{' (only *.bin)' if pickled else ''}"
    fix = "convert the weights to safetensors; pickled *.bin files are never read" if pickled else again
    return Problem(_FIELD, got, allowed, fix)


def _tokenizer_problems(directory: Path) -> Iterator[Problem]:
    present = [name for name in _TOKENIZER_FILES if os.path.lexists(directory / name)]
    allowed = f"one of {', '.join(_TOKENIZER_FILES)}"
    if not present:
        got = f"no tokenizer in {str(directory)!r}"
        yield Problem(_FIELD, got, allowed, "copy the tokenizer files of the model into the directory")
    if present[:1] == ["tokenizer.json"] and _read_json(directory / "tokenizer.json")[0] is None:
        why = _read_json(directory / "tokenizer.json")[1]
        yield Problem(_FIELD, why, "a complete tokenizer.json", "copy or download the tokenizer again")


def token_numbers(path: Path) -> dict[str, int]:
    """Return token -> id from tokenizer.json; empty if it cannot be read from there."""
    try:
        content = json.loads((path / "tokenizer.json").read_text(encoding="utf-8"))
        vocabulary = content.get("model", {}).get("vocab") or {}
        if isinstance(vocabulary, list):  # Unigram: pairs of token and score, in order
            vocabulary = {token: number for number, (token, _) in enumerate(vocabulary)}
        return {**vocabulary, **{token["content"]: token["id"] for token in content.get("added_tokens") or ()}}
    except (OSError, ValueError, AttributeError, KeyError, TypeError, RecursionError):
        return {}
