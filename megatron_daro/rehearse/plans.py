"""What each rank of a layout is, sends and saves, without a model: places, weight buckets, checkpoint files.

Place in the data flow: shape and layout -> plans -> thin ranks and report. Buckets come from the real packing over
tensors without memory (the meta device); a unit test compares places with Megatron's own groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megatron_daro.actor.parallel import Layout
from megatron_daro.config.model_shape import ModelShape
from megatron_daro.convert.mapping import hf_to_megatron
from megatron_daro.plan.parameters import Cut, counts
from megatron_daro.runtime.workers import Place
from megatron_daro.sync.buckets import bucketize

_DTYPES = {2: torch.bfloat16, 4: torch.float32}
_STATE_BYTES = {2: 12, 4: 8}
"""Of the optimizer for each element, by bytes of a weight: two fp32 moments, with bf16 also an fp32 copy."""


@dataclass(frozen=True, slots=True)
class StagePlan:
    """What the sender of a pipeline stage hands on in one weight sync."""

    stage: int
    tensors: int
    buckets: int
    num_bytes: int
    largest_bucket: int


@dataclass(frozen=True, slots=True)
class CheckpointPlan:
    """Each rank writes one file. least, most: bytes of a rank's file; total: of all."""

    files: int
    least: int
    most: int
    total: int


def place_of(rank: int, layout: Layout) -> Place:
    """Return a rank's part. Megatron numbers ranks TP fastest, then CP, DP, PP; experts lie on consecutive ranks."""
    tensor, rest = rank % layout.tensor, rank // layout.tensor
    context, rest = rest % layout.context, rest // layout.context
    data, stage = rest % layout.data, rest // layout.data
    in_stage = rank % (layout.world_size // layout.pipeline)
    first = data == 0 and context == 0
    return Place(
        data_parallel=data,
        stage=stage,
        exports=first or in_stage < layout.expert_group_size,
        sends=first and tensor == 0,
        answers=tensor == 0 and context == 0 and stage == layout.pipeline - 1,
    )


def stage_plans(
    shape: ModelShape, layers_of_stages: list[list[range]], bucket_bytes: int, dtype_bytes: int
) -> list[StagePlan]:
    """Return the buckets of each stage.

    Args:
        shape: the model. layers_of_stages: the layers of each part of each stage. bucket_bytes: limit of a bucket.
        dtype_bytes: of a weight, 2 or 4.
    """
    plans, dtype = [], _DTYPES[dtype_bytes]
    for stage, parts in enumerate(layers_of_stages):
        ends = stage == 0, stage == len(layers_of_stages) - 1
        tensors = [
            tensor
            for number, own in enumerate(parts)
            for tensor in _part_tensors(shape, own, ends[0] and number == 0, ends[1] and own is parts[-1], dtype)
        ]
        sizes = [len(bucket.data) for bucket in bucketize(tensors, bucket_bytes)]
        plans.append(StagePlan(stage, len(tensors), len(sizes), sum(sizes), max(sizes)))
    return plans


def _part_tensors(
    shape: ModelShape, own: range, is_first: bool, is_last: bool, dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (HF name, tensor on the meta device) of a part of the model in the order of the export."""
    for rule in hf_to_megatron(shape):
        if rule.layer is None:
            mine = is_first if rule.megatron_name.startswith("embedding") else is_last
        else:
            mine = rule.layer in own
        if mine:
            for name, dims in zip(rule.hf_names, rule.hf_shapes, strict=True):
                yield name, torch.empty(dims, dtype=dtype, device="meta")


def checkpoint_plan(shape: ModelShape, layout: Layout, dtype_bytes: int, *, distributed: bool) -> CheckpointPlan:
    """Return the files of a checkpoint: the weights by the first replica, optimizer state by who owns it.

    Args:
        shape, layout: what is saved. dtype_bytes: of a weight. distributed: whether ranks share the optimizer's state.
    """
    cut = Cut(layout.tensor, layout.pipeline, layout.expert, layout.expert_tensor_size, layout.virtual_pipeline)
    state, sizes = _STATE_BYTES[dtype_bytes], []
    shards = layout.data * layout.context
    in_stage = layout.world_size // layout.pipeline
    expert_shards = in_stage // layout.expert_group_size
    for rank in range(layout.world_size):
        rest, experts = counts(shape, cut, rank // in_stage)
        first = rank % in_stage < layout.tensor
        first_experts = rank % in_stage < layout.expert_group_size
        saved = dtype_bytes * (rest * first + experts * first_experts)
        if distributed:
            saved += round(state * (rest / shards + experts / expert_shards))
        else:
            saved += state * (rest * first + experts * first_experts)
        sizes.append(saved)
    return CheckpointPlan(len(sizes), min(sizes), max(sizes), sum(sizes))
