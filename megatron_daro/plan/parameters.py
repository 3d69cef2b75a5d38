"""Parameters that one rank holds: the same numbers that Megatron's modules have, from the shape alone.

Place in the data flow: ModelShape and sizes -> numbers of elements -> memory.py. `tests/unit/plan` counts the real
modules on the meta device against it. The vocabulary is padded as actor/model.py pads it.
"""

from __future__ import annotations

import math
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


def layer_parameters(shape: ModelShape, tensor: int) -> tuple[int, ...]:
    """Return the elements of each parameter of one layer on one tensor-parallel rank."""
    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    columns = (query + 2 * key) // tensor
    sizes = [shape.hidden, shape.hidden * columns, query // tensor * shape.hidden]
    sizes += [columns] if shape.qkv_bias else []
    sizes += [shape.head_dim, shape.head_dim] if shape.qk_norm else []
    return (*sizes, shape.hidden, 2 * shape.ffn // tensor * shape.hidden, shape.ffn // tensor * shape.hidden)


def stage_parameters(shape: ModelShape, tensor: int, pipeline: int, stage: int) -> list[int]:
    """Return the elements of each parameter on a rank of this stage (0 .. pipeline - 1).

    With tied embeddings and several stages the last one holds a copy of the embedding.
    """
    table = padded_vocabulary(shape.vocab, tensor) // tensor * shape.hidden
    first, last = stage == 0, stage == pipeline - 1
    sizes = [table] if first else []
    sizes += list(layer_parameters(shape, tensor)) * (shape.layers // pipeline)
    if last:
        sizes.append(shape.hidden)
        sizes += [table] if not (shape.tie and first) else []
    return sizes


@lru_cache(maxsize=65536)
def count(shape: ModelShape, tensor: int, pipeline: int, stage: int) -> int:
    """Return all elements on a rank of this stage."""
    return sum(stage_parameters(shape, tensor, pipeline, stage))


@lru_cache(maxsize=65536)
def _aligned(shape: ModelShape, tensor: int, pipeline: int, stage: int) -> int:
    unit = _PARAMETER_ALIGNMENT
    return sum(-(-size // unit) * unit for size in stage_parameters(shape, tensor, pipeline, stage))


def buffer_elements(shape: ModelShape, tensor: int, pipeline: int, stage: int, *, shards: int) -> int:
    """Return the elements of the gradient buffer, with the padding that the distributed optimizer asks for.

    Args:
        shape, tensor, pipeline, stage: as of `stage_parameters`.
        shards: ranks that share the optimizer, DP * CP; 0 without the distributed optimizer.
    """
    if not shards:
        return count(shape, tensor, pipeline, stage)
    unit = math.lcm(shards, _BUFFER_ALIGNMENT)
    return -(-_aligned(shape, tensor, pipeline, stage) // unit) * unit


def active_parameters(shape: ModelShape) -> int:
    """Return the parameters that one token is multiplied with: all but an input embedding of its own."""
    lookup = 0 if shape.tie else shape.vocab * shape.hidden
    return shape.num_active_parameters - lookup
