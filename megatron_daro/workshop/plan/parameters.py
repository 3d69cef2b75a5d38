"""Parameters that one rank holds: the same numbers that Megatron's modules have, from the shape alone.

ModelShape and sizes -> numbers of elements -> memory.py. `tests/unit/plan` counts the real
modules on the meta device against it. The vocabulary is padded as actor/model.py pads it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from megatron_daro.config.model_shape import ModelShape

VOCABULARY_MULTIPLE = 16
"""Rows of the embedding are a multiple of this, and of TP (actor/model.py)."""
_PARAMETER_ALIGNMENT, _BUFFER_ALIGNMENT = 64, 128
# Elements, in the buffers of Megatron's distributed optimizer (distributed/param_and_grad_buffer.py).


def padded_vocabulary(vocab: int, tensor: int) -> int:
    """Return the rows of the whole embedding."""
    multiple = math.lcm(VOCABULARY_MULTIPLE, tensor)
    return -(-vocab // multiple) * multiple


@dataclass(frozen=True, slots=True)
class Cut:
    """How a model is cut: TP, PP, EP and ETP (ranks that share the experts of a layer, and each expert), VPP (parts of
    a stage)."""

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    expert_tensor: int = 1
    virtual: int = 1


def layer_parameters(shape: ModelShape, cut: Cut, layer: int = 0) -> tuple[int, ...]:
    """Return the elements of each parameter of one layer on one rank, those of experts left out."""
    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    columns = (query + 2 * key) // cut.tensor
    sizes = [shape.hidden, shape.hidden * columns, query // cut.tensor * shape.hidden, shape.hidden]
    sizes += [columns] if shape.qkv_bias else []
    sizes += [shape.head_dim, shape.head_dim] if shape.qk_norm else []
    if shape.experts and shape.has_experts(layer):
        return (*sizes, shape.experts.number * shape.hidden)
    width = shape.ffn // cut.tensor
    return (*sizes, 2 * width * shape.hidden, width * shape.hidden)


def expert_parameters(shape: ModelShape, cut: Cut, layer: int) -> tuple[int, ...]:
    """Return the elements of each parameter of the experts of one layer that one rank holds."""
    if shape.experts is None or not shape.has_experts(layer):
        return ()
    width = shape.experts.ffn // cut.expert_tensor
    return (2 * width * shape.hidden, width * shape.hidden) * (shape.experts.number // cut.expert)


def part_parameters(shape: ModelShape, cut: Cut, stage: int, part: int = 0) -> tuple[list[int], list[int]]:
    """Return the elements of each parameter of a part (0 .. VPP - 1) of a stage (0 .. PP - 1) on one rank: those of
    experts in the second list.

    With tied embeddings and several stages the last one holds a copy of the embedding.
    """
    table = padded_vocabulary(shape.vocab, cut.tensor) // cut.tensor * shape.hidden
    parts, place = cut.pipeline * cut.virtual, part * cut.pipeline + stage
    first, last, own = place == 0, place == parts - 1, shape.layers // parts
    layers = range(place * own, (place + 1) * own)
    sizes = [table] if first else []
    sizes += [size for layer in layers for size in layer_parameters(shape, cut, layer)]
    if last:
        sizes.append(shape.hidden)
        sizes += [table] if not (shape.tie and first) else []
    return sizes, [size for layer in layers for size in expert_parameters(shape, cut, layer)]


@lru_cache(maxsize=65536)
def counts(shape: ModelShape, cut: Cut, stage: int) -> tuple[int, int]:
    """Return all elements on a rank of this stage: those of experts by themselves."""
    parts = [part_parameters(shape, cut, stage, part) for part in range(cut.virtual)]
    return sum(sum(rest) for rest, _ in parts), sum(sum(experts) for _, experts in parts)


@lru_cache(maxsize=65536)
def _aligned(shape: ModelShape, cut: Cut, stage: int, part: int) -> tuple[int, int]:
    unit = _PARAMETER_ALIGNMENT
    rest, experts = (
        sum(-(-size // unit) * unit for size in sizes) for sizes in part_parameters(shape, cut, stage, part)
    )
    return rest, experts


def buffer_elements(shape: ModelShape, cut: Cut, stage: int, *, shards: int, expert_shards: int) -> int:
    """Return the elements of the gradient buffers, with the padding that the distributed optimizer asks for: each
    virtual part has its own.

    Args:
        shape, cut, stage: as of `counts`.
        shards: ranks that share the optimizer, DP * CP; 0 without the distributed optimizer.
        expert_shards: the same of the experts, TP * CP * DP / (ETP * EP).
    """
    if not shards:
        return sum(counts(shape, cut, stage))
    total = 0
    for part in range(cut.virtual):
        for elements, ranks in zip(_aligned(shape, cut, stage, part), (shards, expert_shards), strict=True):
            unit = math.lcm(ranks, _BUFFER_ALIGNMENT)
            total += -(-elements // unit) * unit
    return total


def active_parameters(shape: ModelShape) -> int:
    """Return the parameters that one token is multiplied with: all but an input embedding of its own."""
    lookup = 0 if shape.tie else shape.vocab * shape.hidden
    return shape.num_active_parameters - lookup


def checkpoint_bytes(shape: ModelShape, weight_bytes: int) -> int:
    """Return the size of a checkpoint: weights, and two fp32 moments of each, with an fp32 copy of bf16 weights.

    Args:
        shape: the model. weight_bytes: of a weight, 2 or 4.
    """
    return sum(counts(shape, Cut(1, 1, 1, 1, 1), 0)) * (weight_bytes + {2: 12, 4: 8}[weight_bytes])
