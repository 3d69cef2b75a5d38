"""Hugging Face tensors into this rank's Megatron parameters, and out again as a stream.

Place in the data flow: HF checkpoint -> `load_hf_weights` -> training -> `export_hf_weights` -> sync, HF writer.
Conversion itself (names, slicing) is convert/mapping.py; here are the live parameters and the collectives.
Refuses: missing tensors and shapes that differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_daro.actor import device
from megatron_daro.actor.compat import HiddenStateGPTModel
from megatron_daro.actor.model import local_rules, padded_vocabulary
from megatron_daro.config.model_shape import ModelShape
from megatron_daro.convert.mapping import TensorRule, merge, shard

device.prepare()
from megatron.core import parallel_state  # noqa: E402  (the device must be prepared first)


def load_hf_weights(model: HiddenStateGPTModel, shape: ModelShape, tensors: Mapping[str, Tensor]) -> None:
    """Fill this rank's parameters.

    Args:
        model: built by actor/model.py.
        shape: of the checkpoint.
        tensors: HF name -> whole tensor (an HFCheckpoint reads each when it is asked for).

    Raises:
        ModelError: a tensor is missing or has the wrong shape.
    """
    rank, size = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()
    for parameter, rule in local_rules(model, shape):
        vocabulary = padded_vocabulary(shape.vocab, size) if rule.kind == "vocab" else None
        part = shard(rule, tensors, rank, size, padded_vocab=vocabulary)
        with torch.no_grad():
            parameter.copy_(part)


def export_hf_weights(model: HiddenStateGPTModel, shape: ModelShape) -> Iterator[tuple[str, Tensor]]:
    """Return the weights of this pipeline stage under Hugging Face names, one parameter at a time.

    Every rank of the tensor-parallel group must iterate to the end: each item is a gather. All of them get the tensors.
    A tied output layer on the last stage is the embedding's copy and is left out. Peak extra memory: one parameter.

    Yields:
        (HF name, whole tensor on this device, in the dtype of the parameter).
    """
    group = parallel_state.get_tensor_model_parallel_group()
    for parameter, rule in local_rules(model, shape):
        if shape.tie and rule.megatron_name == "output_layer.weight":
            continue
        yield from merge(rule, _gather(parameter.detach(), rule, group)).items()


def _gather(local: Tensor, rule: TensorRule, group: dist.ProcessGroup) -> list[Tensor]:
    if rule.kind == "copy" or group.size() == 1:
        return [local] * group.size()
    parts = [torch.empty_like(local) for _ in range(group.size())]
    dist.all_gather(parts, local.contiguous(), group=group)
    return parts


def exports_weights() -> bool:
    """Whether this rank takes part in an export: the first replica (DP and CP rank 0)."""
    return parallel_state.get_data_parallel_rank() == 0 and parallel_state.get_context_parallel_rank() == 0


def sends_for_stage() -> bool:
    """Whether this rank hands on what an export yields: TP rank 0 of the first replica, one per pipeline stage."""
    return exports_weights() and parallel_state.get_tensor_model_parallel_rank() == 0
