"""Hugging Face tensors into this rank's Megatron parameters, and out again as a stream.

HF checkpoint -> `load_hf_weights` -> training -> `export_hf_weights` -> sync, HF writer.
Conversion itself (names, slicing) is convert/mapping.py; here are the live parameters and the collectives.
Refuses: missing tensors and shapes that differ.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_daro.actor import device
from megatron_daro.actor.megatron import parallel_state
from megatron_daro.actor.model import Chunks, LocalParameter, local_parameters
from megatron_daro.config.model_shape import ModelShape
from megatron_daro.convert.hf_files import HFCheckpoint
from megatron_daro.convert.mapping import VALUE_HEAD, TensorRule, merge
from megatron_daro.convert.plan import check_tied
from megatron_daro.convert.runs import RowReader, read_shard
from megatron_daro.convert.stacked import stack


def load_hf_weights(chunks: Chunks, shape: ModelShape, tensors: RowReader) -> None:
    """Fill this rank's parameters; read only the bytes that they are made of.

    Args:
        chunks: built by actor/model.py.
        shape: of the checkpoint.
        tensors: an HFCheckpoint, or the MegatronWeights of a Megatron checkpoint.

    Raises:
        ModelError: a tensor is missing or has the wrong shape, or an output layer differs from the embedding that it is
            tied to.
    """
    if shape.tie and isinstance(tensors, HFCheckpoint) and "lm_head.weight" in tensors:
        check_tied(tensors)
    for local in local_parameters(chunks, shape):
        if local.rule.hf_names == (VALUE_HEAD,) and VALUE_HEAD not in tensors:
            local.parameter.detach().zero_()  # a critic made from a policy, which has no such head, starts at 0
            continue
        rank, size = tensor_parallel_place(local.rule)
        vocabulary = shape.padded_vocab(size) if local.rule.kind == "vocab" else None
        with torch.no_grad():
            read_shard(local.rule, tensors, rank, size, padded_vocab=vocabulary, out=local.parameter.detach())


def tensor_parallel_place(rule: TensorRule) -> tuple[int, int]:
    """Return this process's rank in the group that a rule's parameter is cut over, and the size of the group."""
    if rule.expert is None:
        return (
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_tensor_model_parallel_world_size(),
        )
    return parallel_state.get_expert_tensor_parallel_rank(), parallel_state.get_expert_tensor_parallel_world_size()


def export_hf_weights(chunks: Chunks, shape: ModelShape) -> Iterator[tuple[str, Tensor]]:
    """Return the weights of this pipeline stage under Hugging Face names, one parameter at a time.

    Every rank for which `exports_weights` holds must iterate to the end: parameters are gathered over the
    tensor-parallel group, experts over the group that holds all of them. Each such rank gets all tensors. A tied output
    layer on the last stage is a copy of the embedding and is left out. Peak extra memory: one parameter; of experts one
    for each rank of their group, or all of a layer if the checkpoint stacks them in one tensor.

    Returns:
        (HF name, whole tensor on this device, in the dtype of the parameter).
    """
    own = local_parameters(chunks, shape)
    kept = (local for local in own if not (shape.tie and local.rule.megatron_name == "output_layer.weight"))
    return stack((item for local in kept for item in gathered(local, device.shown(local.values))), shape)


def gathered(local: LocalParameter, values: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Gather a parameter's values (or gradients) and yield them under Hugging Face names. Collective over its group.

    Args:
        local: the parameter. values: of the shape of the parameter.

    Yields:
        (HF name, whole tensor); for an expert's parameter also those of the experts in its place on other ranks.
    """
    if local.rule.expert is None:
        group = parallel_state.get_tensor_model_parallel_group()
        yield from merge(local.rule, _gather(values, group, is_cut=local.rule.is_cut)).items()
        return
    # In the order of this group's ranks, the expert-tensor-parallel rank varies fastest.
    parts = _gather(values, parallel_state.get_expert_tensor_and_model_parallel_group(), is_cut=True)
    cut = len(parts) // len(local.peers)
    for place, rule in enumerate(local.peers):
        yield from merge(rule, parts[place * cut : (place + 1) * cut]).items()


def _gather(values: Tensor, group: dist.ProcessGroup, *, is_cut: bool) -> list[Tensor]:
    if not is_cut or group.size() == 1:
        return [values] * group.size()
    parts = [torch.empty_like(values) for _ in range(group.size())]
    dist.all_gather(parts, values.contiguous(), group=group)
    return parts


def exports_weights() -> bool:
    """Whether this rank takes part in an export: it is of the first replica (DP and CP rank 0), or of the ranks with
    the first copy of the experts, which may extend over several replicas."""
    first = parallel_state.get_data_parallel_rank() == 0 and parallel_state.get_context_parallel_rank() == 0
    return first or parallel_state.get_expert_data_parallel_rank() == 0


def sends_for_stage() -> bool:
    """Whether this rank sends what an export yields: one rank per pipeline stage, the first of the first replica."""
    first = parallel_state.get_data_parallel_rank() == 0 and parallel_state.get_context_parallel_rank() == 0
    return first and parallel_state.get_tensor_model_parallel_rank() == 0
