"""A sharded state dict as one safetensors file a rank, with a JSON index: written in one layout, read in any.

Each rank writes the tensors that it is the main replica of; rank 0 adds the index and what is not sharded. Loading
reads only the slices that overlap what a rank asks for. Nothing in these files can run code.

Of Megatron only the vocabulary of sharding is used: which box of which global tensor a rank holds, and the check that
every box has exactly one main replica. That is the same in 0.16.1 to 0.19.x. Megatron's own save and load are not
used: those of 0.19 take no other storage than "torch_dist", whose reader unpickles `.metadata` and whose writer
processes take seconds even for a few megabytes.

Rejected: sharded objects other than uint8 tensors and bytes; a request that the files do not cover completely.
"""

from __future__ import annotations

import io
import itertools
import math
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_daro.actor.megatron import (
    ShardedObject,
    ShardedTensor,
    apply_factory_merges,
    determine_global_metadata,
    dict_list_map_inplace,
    extract_sharded_base,
    is_main_replica,
    load_preprocess,
    merge,
    nested_values,
    save_preprocess,
    validate_sharding_integrity,
)
from megatron_daro.actor.shard_file import OwnBox, ShardFile
from megatron_daro.convert.daro_format import (
    COMMON_FILE,
    StoredShard,
    check_format,
    read_index,
    write_index,
    write_metadata,
)
from megatron_daro.convert.pieces import overlap as common_box
from megatron_daro.errors import CheckpointError


def save_sharded(state: dict[str, Any], directory: Path, own: Sequence[OwnBox] = ()) -> ShardFile:
    """Begin to write a sharded state dict into an existing, empty directory. Collective over all ranks.

    Returns:
        This rank's file. Writing it reads the tensors as they are then, is not collective and may run in a thread.

    Args:
        state: nested; its ShardedTensors and ShardedObjects are written by their main replicas, the rest by rank 0.
        directory: the same on all ranks. own: see `collect_shards`.

    Raises:
        CheckpointingException: a box of a tensor has no main replica, or two. OSError, SafetensorError: the disk.
    """
    sharded, common = save_preprocess(state)
    file = collect_shards(sharded, directory, own)
    if dist.get_rank() == 0:
        buffer = io.BytesIO()
        torch.save(common, buffer)
        (directory / COMMON_FILE).write_bytes(buffer.getvalue())
        write_metadata(directory)
    return file


def load_sharded(state: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Return the values of what `save_sharded` wrote, as this rank's state dict asks for them. Collective.

    Args:
        state: what this rank wants: sharded tensors of any layout. It stays as it is.
        directory: the same on all ranks.

    Raises:
        CheckpointError: written by something else, torn, or without a piece that is wanted.
    """
    check_format(directory)
    sharded, own, factories = load_preprocess(state)
    values = _read_common(directory)
    merge(values, own)
    sharded, _ = extract_sharded_base(sharded)
    validate_sharding_integrity(determine_global_metadata(sharded)[1])
    merge(values, read_shards(sharded, directory))
    return apply_factory_merges(values, factories)


def collect_shards(sharded: object, directory: Path, own: Sequence[OwnBox] = ()) -> ShardFile:
    """Collect what each rank will write; rank 0 writes the index. Collective over all ranks.

    Returns:
        The file of this rank's main replicas. Its hash is left for the manifest (`durable.write_hash`).

    Args:
        sharded: nested, of sharded tensors and objects. directory: existing. own: boxes that no other rank has.
    """
    path = directory / f"shard_{dist.get_rank():05d}.safetensors"
    items = [_stored(item) for item in nested_values(sharded) if is_main_replica(item.replica_id)]
    boxes = [*items, *own]
    shards = [
        StoredShard(box.key, path.name, str(number), box.offset, box.shape, box.global_shape)
        for number, box in enumerate(boxes)
    ]
    gathered: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object((shards, len(items)), gathered)
    if gathered is not None:
        every = [shard for part, _ in gathered for shard in part]
        _check_complete([shard for part, number in gathered for shard in part[number:]])
        write_index(directory, every)
    return ShardFile(path, [(shard.name, box) for shard, box in zip(shards, boxes, strict=True)])


def read_shards(sharded: object, directory: Path) -> object:
    """Replace every sharded tensor and object by its value. Raises CheckpointError if a piece is missing."""
    return dict_list_map_inplace(_ShardReader(directory).value_of, sharded)


def _read_common(directory: Path) -> dict[str, Any]:
    path = directory / COMMON_FILE
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; the checkpoint is torn") from None


class _ShardReader:
    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._shards: dict[str, list[StoredShard]] = {}
        for shard in read_index(directory):
            self._shards.setdefault(shard.key, []).append(shard)
        self._open: dict[str, Any] = {}

    def value_of(self, item: object) -> object:
        """Return the value of one sharded tensor (a new CPU tensor) or object (of the type it has in the model)."""
        if isinstance(item, ShardedObject):
            stored_B = self._slice(self._shards_of(item.unique_key)[0], [slice(None)])
            return stored_B if isinstance(item.data, Tensor) else io.BytesIO(stored_B.numpy().tobytes())
        if not isinstance(item, ShardedTensor):
            return item
        local = torch.zeros(item.local_shape, dtype=item.dtype)
        view = local.view(*([1] * item.prepend_axis_num), *item.local_shape)
        offset = tuple(item.global_offset)
        filled, used = 0, []
        for stored in self._shards_of(item.key):
            if stored.global_shape != tuple(item.global_shape) and not item.allow_shape_mismatch:
                shapes = f"{stored.global_shape} in the checkpoint, {tuple(item.global_shape)} in the model"
                raise CheckpointError(f"{item.key}: shape {shapes}; load it into the model that saved it")
            overlap = common_box(offset, tuple(view.shape), stored.offset, stored.shape)
            if overlap is not None:
                theirs, ours = overlap
                view[ours] = self._slice(stored, theirs)
                filled += math.prod(s.stop - s.start for s in ours)
                used.append(stored)
        if filled != local.numel() and not item.allow_shape_mismatch:
            raise CheckpointError(
                f"{item.key}: {filled} of {local.numel()} elements are in {self._directory}; it is incomplete"
            )
        _check_disjoint(item.key, used)
        return local

    def _shards_of(self, key: str) -> list[StoredShard]:
        if key not in self._shards:
            raise CheckpointError(
                f"{key} is not in the checkpoint {self._directory}; it was saved by another model or optimizer"
            )
        return self._shards[key]

    def _slice(self, stored: StoredShard, window: Sequence[slice]) -> Tensor:
        try:
            if stored.file not in self._open:
                self._open[stored.file] = safe_open(self._directory / stored.file, framework="pt")
            return self._open[stored.file].get_slice(stored.name)[tuple(window)]
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{self._directory / stored.file} cannot be read: {error}; the checkpoint is torn"
            ) from None


def _stored(item: ShardedTensor | ShardedObject) -> OwnBox:
    """Return what to write for one sharded tensor or object, with the prepended axes made real."""
    if isinstance(item, ShardedTensor):
        shape = (*[1] * item.prepend_axis_num, *item.local_shape)
        return OwnBox(item.key, item.data, tuple(item.global_offset), shape, tuple(item.global_shape))
    bytes_B = _bytes_of(item.data, item.key)
    return OwnBox(item.unique_key, bytes_B, (0,), tuple(bytes_B.shape), tuple(bytes_B.shape))


def _check_complete(shards: Sequence[StoredShard]) -> None:
    """Refuse boxes of all ranks that do not make whole tensors together; else it would be noticed only on loading."""
    written: dict[str, int] = {}
    for shard in shards:
        written[shard.key] = written.get(shard.key, 0) + math.prod(shard.shape)
    for shard in shards:
        if written[shard.key] != math.prod(shard.global_shape):
            raise CheckpointError(
                f"{shard.key}: {written[shard.key]} elements were to be written, of {shard.global_shape}"
            )


def _bytes_of(data: object, key: str) -> Tensor:
    """Return an object as uint8 [bytes]; Transformer Engine's extra state is such a tensor, and often has no bytes."""
    if isinstance(data, Tensor) and data.dtype is torch.uint8 and data.dim() == 1:
        return data.detach().to("cpu", copy=True)
    if data is None or isinstance(data, io.BytesIO):
        content = data.getvalue() if data else b""
        return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
    what = f"{data.dtype} tensor" if isinstance(data, Tensor) else type(data).__name__
    raise CheckpointError(f"{key}: an object of type {what} cannot be saved; allowed: uint8 [bytes], bytes, nothing")


def _check_disjoint(key: str, shards: Sequence[StoredShard]) -> None:
    """Refuse pieces that overlap: elements are only counted, so a piece stored twice would hide a missing one."""
    for one, other in itertools.combinations(shards, 2):
        if common_box(one.offset, one.shape, other.offset, other.shape) is not None:
            raise CheckpointError(f"{key}: pieces at {one.offset} and {other.offset} overlap; the checkpoint is torn")
