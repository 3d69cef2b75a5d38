"""This rank's own part of the optimizer's state, as boxes of global tensors: saved and loaded, never gathered.

The optimizer of a data-parallel rank owns a run of each flattened parameter; such a run is a few boxes in the
parameter's shape. So no rank ever holds more than its own state, whereas Megatron's `fully_reshardable` format gathers
the fp32 weights and both moments, 12 bytes a parameter, on every rank. The keys are those of that format.
Source: megatron/core/optimizer/distrib_optimizer.py, `get_parameter_state_dp_reshardable`, 0.16.1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron_daro.actor.compat import optimizer_parts
from megatron_daro.actor.megatron import (
    DistributedOptimizer,
    MegatronOptimizer,
    ShardedTensor,
    ShardedTensorFactory,
    extract_sharded_tensors_and_factories,
    nested_values,
)
from megatron_daro.actor.shard_file import OwnBox
from megatron_daro.convert.daro_format import DaroPieces
from megatron_daro.convert.pieces import overlap
from megatron_daro.errors import CheckpointError

_SHARDING_TYPE = "fully_reshardable"


@dataclass(frozen=True, slots=True)
class _OwnRun:
    """Elements [start, stop) of a flattened parameter, whose state this rank has in `part` of its optimizer."""

    part: DistributedOptimizer
    parameter: torch.nn.Parameter
    start: int
    stop: int


def is_distributed(optimizer: MegatronOptimizer) -> bool:
    """Whether the whole optimizer is split over the data-parallel ranks."""
    return all(isinstance(part, DistributedOptimizer) for part in optimizer_parts(optimizer))


def common_state(optimizer: MegatronOptimizer) -> dict[object, object]:
    """Return what is the same on all ranks: options and step counts of parameter groups, as upstream lays them out."""
    if len(optimizer_parts(optimizer)) > 1:
        optimizer._synchronize_steps()
    states = [{**part.state_dict(), "param_state_sharding_type": _SHARDING_TYPE} for part in optimizer_parts(optimizer)]
    return states[0] if len(states) == 1 else dict(enumerate(states))


def own_boxes(optimizer: MegatronOptimizer, model_state: dict[str, object]) -> list[OwnBox]:
    """Return this rank's state, fp32 weights and moments, as boxes that no other rank has; nothing is copied.

    Args:
        optimizer: distributed, with state. model_state: the model's sharded state dict.
    """
    places = _places(model_state)
    boxes = []
    for run in _own_runs(optimizer):
        for name, values in _state_of(run).items():
            for tensor, flat, offset, shape in _boxes(places[run.parameter], run):
                if _is_main(tensor):
                    data = values[flat : flat + math.prod(shape)]
                    key = f"optimizer.state.{name}.{tensor.key}"
                    boxes.append(OwnBox(key, data, *_global(tensor, offset, shape)))
    return boxes


@torch.no_grad()
def load_own_boxes(optimizer: MegatronOptimizer, model_state: dict[str, object], directory: Path) -> None:
    """Fill this rank's state from a checkpoint of any layout; reads only its own elements.

    Raises:
        CheckpointError: a tensor is missing, incomplete or of another shape.
    """
    places, pieces = _places(model_state), DaroPieces(directory)
    try:
        for run in _own_runs(optimizer):
            loaded = {}
            for name in _state_of(run):
                values = torch.zeros(run.stop - run.start)
                for tensor, flat, offset, shape in _boxes(places[run.parameter], run):
                    target = values[flat : flat + math.prod(shape)]
                    _read(pieces, f"optimizer.state.{name}.{tensor.key}", tensor, offset, shape, target)
                loaded[name] = values
            run.part._set_main_param_and_optimizer_states(run.parameter, loaded)
    finally:
        pieces.close()


def flat_boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield the boxes (offset, shape) that make up elements [start, stop) of a row-major array, in order."""
    if start >= stop:
        return
    if len(shape) <= 1:
        yield (start,), (stop - start,)
        return
    inner = math.prod(shape[1:])
    (first, head), (last, tail) = divmod(start, inner), divmod(stop, inner)
    if first == last:
        yield from _in_row(first, shape, head, tail)
        return
    if head:
        yield from _in_row(first, shape, head, inner)
        first += 1
    if first < last:
        yield (first, *[0] * (len(shape) - 1)), (last - first, *shape[1:])
    yield from _in_row(last, shape, 0, tail)


def _in_row(
    row: int, shape: tuple[int, ...], start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    for offset, size in flat_boxes(shape[1:], start, stop):
        yield (row, *offset), (1, *size)


def _own_runs(optimizer: MegatronOptimizer) -> Iterator[_OwnRun]:
    for part in optimizer_parts(optimizer):
        for ranges in part.gbuf_ranges:
            for buckets in ranges.values():
                for bucket in buckets:
                    for parameter, its in bucket["param_map"].items():
                        yield _OwnRun(part, parameter, its["param"].start, its["param"].end)


def _state_of(run: _OwnRun) -> dict[str, Tensor]:
    state = run.part._get_main_param_and_optimizer_states(run.parameter)
    return {name: values for name, values in state.items() if name != "step"}


def _places(model_state: dict[str, object]) -> dict[Tensor, list[tuple[int, ShardedTensor]]]:
    """Return by parameter the sharded tensors that it consists of, each with where it begins in the flattened
    parameter."""
    sharded, _ = extract_sharded_tensors_and_factories(model_state)
    places = {}
    for item in nested_values(sharded):
        tensors = nested_values(item.build()) if isinstance(item, ShardedTensorFactory) else [item]
        origin = item.data.storage_offset()
        places[item.data] = [(tensor.data.storage_offset() - origin, tensor) for tensor in tensors]
        if any(not tensor.data.is_contiguous() for _, tensor in places[item.data]):
            raise CheckpointError(
                f"{item.key}: a part of it is no run of its elements; its optimizer state is not saved"
            )
    return places


def _boxes(
    tensors: list[tuple[int, ShardedTensor]], run: _OwnRun
) -> Iterator[tuple[ShardedTensor, int, tuple[int, ...], tuple[int, ...]]]:
    """Yield the boxes of a run: sharded tensor, where its values begin in the run, offset and shape in its local
    shape."""
    for begin, tensor in tensors:
        size = math.prod(tensor.local_shape)
        start, stop = max(run.start - begin, 0), min(run.stop - begin, size)
        flat = begin + start - run.start
        for offset, shape in flat_boxes(tuple(tensor.local_shape), start, stop):
            yield tensor, flat, offset, shape
            flat += math.prod(shape)


def _global(
    tensor: ShardedTensor, offset: tuple[int, ...], shape: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return offset and shape in the global tensor of a box of the local one, and the global tensor's shape."""
    axes = tensor.prepend_axis_num
    base = tuple(tensor.global_offset)
    inner = tuple(b + o for b, o in zip(base[axes:], offset, strict=True))
    return (*base[:axes], *inner), (*[1] * axes, *shape), tuple(tensor.global_shape)


def _is_main(tensor: ShardedTensor) -> bool:
    """Whether this rank is the one of its model-parallel groups that saves it; data-parallel ranks have runs of their
    own."""
    replica = tensor.replica_id
    return all(number == 0 for number in (replica[:-1] if isinstance(replica, tuple) else ()))


def _read(
    pieces: DaroPieces,
    key: str,
    tensor: ShardedTensor,
    offset: tuple[int, ...],
    shape: tuple[int, ...],
    target: Tensor,
) -> None:
    """Read a box into `target`, flat. Rows that only pad the vocabulary may be absent, and stay zero."""
    where, size, whole = _global(tensor, offset, shape)
    stored = pieces.shape(key)
    if stored != whole and not tensor.allow_shape_mismatch:
        raise CheckpointError(f"{key}: shape {stored} in the checkpoint, {whole} in the model; load it into that model")
    both = overlap(where, size, (0,) * len(stored), stored)
    if both is not None:
        _, ours = both
        start = [at + part.start for at, part in zip(where, ours, strict=True)]
        target.view(size)[ours] = pieces.read(key, start, [part.stop - part.start for part in ours])
