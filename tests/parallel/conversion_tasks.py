"""What ranks are asked to do with converted checkpoints; functions of plain arguments, as in megatron_tasks.py."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import torch
from policy_tasks import build_policy, save_policy

from megatron_daro.actor.compat import quiet


def _exported(policy: Any) -> dict[str, Any]:
    return {name: tensor.clone().numpy() for name, tensor in policy.export()}


def start_from(path: Path, layout: Any, weights: Path, save_to: Path | None = None) -> dict[str, Any]:
    """Start a policy from a Megatron checkpoint as `train` does; this stage's weights under Hugging Face names."""
    policy = build_policy(path, layout, {"name": "daro"}, weights=weights)
    if save_to:
        save_policy(policy, save_to)
    return _exported(policy)


def load_with_megatron(path: Path, layout: Any, checkpoint: Path) -> dict[str, Any]:
    """Megatron's own load of a torch_dist folder into its own sharded state dict."""
    from megatron.core import dist_checkpointing

    policy = build_policy(path, layout, {"name": "daro"})
    (model,) = policy.chunks
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, 7.0)
    with quiet():
        state = dist_checkpointing.load({"model": model.sharded_state_dict()}, str(checkpoint))
    model.load_state_dict(state["model"], strict=True)
    return _exported(policy)


def save_with_megatron(path: Path, layout: Any, checkpoint: Path) -> None:
    """Megatron's own save, as Megatron-LM and Megatron-Bridge call it."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    multiprocessing.current_process()._config["daemon"] = False  # its writer starts a process
    # Megatron would start a fresh interpreter for this queue, and import itself once more, on every rank.
    filesystem_async._results_queue = multiprocessing.get_context("fork").Manager().Queue()
    policy = build_policy(path, layout, {"name": "daro"})
    (model,) = policy.chunks
    with quiet():
        dist_checkpointing.save({"model": model.sharded_state_dict()}, str(checkpoint))
    filesystem_async._results_queue = None
    for child in multiprocessing.active_children():  # it would outlive this rank
        child.terminate()
        child.join()


def bytes_read(path: Path, layout: Any) -> tuple[int, int]:
    """Bytes that this rank read of a Hugging Face checkpoint, and bytes of its parameters."""
    from megatron_daro.actor.model import build_model, transformer_config
    from megatron_daro.actor.weights import load_hf_weights
    from megatron_daro.config.model_shape import read_model_shape
    from megatron_daro.convert.hf_files import HFCheckpoint

    shape = read_model_shape(path)
    chunks = build_model(shape, transformer_config(shape, layout, dtype="fp32"))
    with HFCheckpoint(path) as tensors:
        load_hf_weights(chunks, shape, tensors)
        return tensors.bytes_read, sum(parameter.nbytes for chunk in chunks for parameter in chunk.parameters())
