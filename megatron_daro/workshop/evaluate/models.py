"""The model that is measured: a Hugging Face directory, a checkpoint converted to one, or running servers.

Rejects torn checkpoints, directories without a model, servers that serve different models, and servers whose model's
files are not on this machine.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megatron_daro import durable
from megatron_daro.checkpoints import MANIFEST, check_format, read_provenance, read_state, verify
from megatron_daro.config.model_shape import read_json
from megatron_daro.engine.sglang.client import SGLangClient
from megatron_daro.errors import ConfigError, EngineError, ModelError
from megatron_daro.rollout.protocol import Notices
from megatron_daro.runtime import provenance

_CALL_S = 30.0
_MOST_PROCESSES = 4
_SHARD_BYTES = 5 * 10**9
CONVERTED, _NOTE = "model", "model_of.json"
"""In the directory of an evaluation: the checkpoint in Hugging Face form, and a note that says which checkpoint."""


@dataclass(frozen=True, slots=True)
class MeasuredModel:
    """path: folder of config.json, tokenizer and, unless `urls` are given, the weights. weights: values that identify
    the weights. urls: servers that have them."""

    path: Path
    weights: Mapping[str, Any]
    urls: tuple[str, ...] = ()

    @property
    def dtype(self) -> Literal["fp32", "bf16"]:
        """Type in which the model computes: fp32 if config.json says float32, else bf16."""
        config = read_json(self.path / "config.json")
        return "fp32" if (config.get("dtype") or config.get("torch_dtype")) == "float32" else "bf16"


def of_directory(path: Path) -> MeasuredModel:
    """Return the model of a Hugging Face directory. Raises ModelError if it holds none."""
    if not (path / "config.json").is_file():
        raise ModelError(
            f"--hf: {path} has no config.json; give a Hugging Face directory (megatron-daro convert writes one)"
        )
    files = provenance.weight_files(path)
    if not files:
        raise ModelError(f"--hf: {path} has no *.safetensors; give a directory with weights")
    return MeasuredModel(path, {"files": files})


def of_checkpoint(checkpoint: Path, config: Path, out: Path, notices: Notices) -> MeasuredModel:
    """Convert a Megatron checkpoint to a Hugging Face directory OUT/model, unless it is there already, and return it.

    Args:
        checkpoint: of a run (RUN/checkpoints/step_N), of `megatron-daro convert`, or Megatron-LM's torch_dist.
        config: folder of its model's config.json and tokenizer. out: directory of the evaluation.

    Raises:
        CheckpointError, ModelError: the checkpoint is torn, is of another model, or cannot be converted.
    """
    manifest, target, note = checkpoint / MANIFEST, out / CONVERTED, out / _NOTE
    if manifest.is_file():
        verify(checkpoint)
        _check_tokenizer(checkpoint, config)
        weights: dict[str, Any] = {"manifest": provenance.digest(manifest)}
    else:
        weights = {"files": {p.name: provenance.digest(p) for p in sorted(checkpoint.glob("*")) if p.is_file()}}
    if _read_note(note) != weights:
        from megatron_daro.convert.plan import plan_to_hf
        from megatron_daro.workshop.convert.conversion import convert

        notices.notice(f"{checkpoint} is written as a Hugging Face directory to {target}")
        if target.is_dir():
            shutil.rmtree(target)  # of another checkpoint
        out.mkdir(parents=True, exist_ok=True)
        processes = min(os.cpu_count() or 1, _MOST_PROCESSES)
        plan = plan_to_hf(checkpoint, config, None, _SHARD_BYTES)
        convert(plan, target, processes=processes, verify=False, progress=lambda phase, done: None)
        durable.write(note, json.dumps(weights))
    return MeasuredModel(target, {"checkpoint": weights})


def _read_note(note: Path) -> object:
    """Return what identifies the converted checkpoint; None, which leads to another conversion, if the note is missing
    or unreadable."""
    try:
        return json.loads(note.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _check_tokenizer(checkpoint: Path, config: Path) -> None:
    """Check that the folder has the tokenizer of the checkpoint's run. Raises ModelError if not, and CheckpointError if
    another version of the package wrote the checkpoint."""
    check_format(checkpoint, read_state(checkpoint))
    saved = read_provenance(checkpoint)
    if saved is None:
        return
    was, is_ = saved["bound_files"], provenance.tokenizer_files(config)
    other = [name for name, digest in is_.items() if was.get(name, digest) != digest]
    if other:
        raise ModelError(
            f"--checkpoint: {checkpoint} was trained with another tokenizer than that of {config} ({', '.join(other)} "
            "differs); allowed: the model that the run began with; set model.path to it"
        )


def of_servers(urls: Sequence[str], path: Path | None) -> MeasuredModel:
    """Return the model that servers have.

    Args:
        urls: of running SGLang servers. path: of its config.json and tokenizer; None: the path that the servers report.

    Raises:
        EngineError: a server does not answer. ConfigError: they serve different models, or the model's files are not
            on this machine.
    """
    facts = asyncio.run(_model_of_servers(urls))
    different = {url: fact for url, fact in facts.items() if fact != facts[urls[0]]}
    if different:
        shown = "; ".join(
            f"{url}: {fact['model_path']}, weights {fact['weight_version']}" for url, fact in facts.items()
        )
        raise ConfigError(
            f"--urls: got servers with different models ({shown}); allowed: one model; fix: evaluate each"
        )
    directory = path or Path(str(facts[urls[0]]["model_path"]))
    if not (directory / "config.json").is_file():
        raise ConfigError(
            f"--urls: the servers say that their model is {directory}, which is not on this machine; allowed: a "
            "directory with its config.json and tokenizer; fix: model.path=DIR"
        )
    return MeasuredModel(directory, {"served": facts[urls[0]]}, tuple(urls))


async def _model_of_servers(urls: Sequence[str]) -> dict[str, dict[str, str]]:
    facts = {}
    for url in urls:
        async with SGLangClient(url) as client:
            try:
                info = await client.model_info(timeout_s=_CALL_S)
            except EngineError as error:
                raise EngineError(
                    f"--urls: {url} does not answer ({error}); allowed: SGLang servers that run"
                ) from error
        facts[url] = {key: str(info.get(key, "")) for key in ("model_path", "weight_version")}
    return facts
