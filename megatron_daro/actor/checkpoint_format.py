"""A storage back end for Megatron's distributed checkpoints: safetensors files and one JSON index, no pickle.

Place in the data flow: megatron.core.dist_checkpointing hands over the sharded tensors of each rank; each rank writes
one file with those it is the main replica of, rank 0 writes the index. Loading reads only the slices that overlap what
this rank asks for, so the layout may differ from the one that saved.

Why not upstream's "torch_dist" back end: its reader unpickles `.metadata`, which runs code from the file, and its
writer processes take seconds even for a few megabytes.
Refuses: sharded objects that are neither tensors nor bytes; a request that the files do not cover completely.
"""

from __future__ import annotations

import io
import itertools
import json
import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_daro.actor import device
from megatron_daro.errors import CheckpointError

device.prepare()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, is_main_replica
    from megatron.core.dist_checkpointing.strategies.base import LoadShardedStrategy, SaveShardedStrategy

BACKEND, VERSION = "daro_safetensors", 1
INDEX_FILE = "index.json"


@dataclass(frozen=True, slots=True)
class StoredShard:
    """One stored piece of a global tensor: elements [offset, offset + shape) in every axis."""

    key: str
    file: str
    name: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    global_shape: tuple[int, ...]


class SafetensorsSave(SaveShardedStrategy):
    """Writes this rank's main replicas to one file; rank 0 also writes the index."""

    def __init__(self) -> None:
        super().__init__(BACKEND, VERSION)

    @property
    def can_handle_sharded_objects(self) -> bool:
        return True

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        """Collective over all ranks."""
        file = f"shard_{dist.get_rank():05d}.safetensors"
        tensors: dict[str, Tensor] = {}
        shards: list[StoredShard] = []
        for item in nested_values(sharded_state_dict):
            if is_main_replica(item.replica_id):
                name = str(len(tensors))
                tensors[name], shard = _stored(item, file, name)
                shards.append(shard)
        if tensors:
            save_file(tensors, Path(checkpoint_dir) / file)
        gathered: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(shards, gathered)
        if gathered is not None:
            _write_index(Path(checkpoint_dir), [shard for part in gathered for shard in part])


class SafetensorsLoad(LoadShardedStrategy):
    """Fills every requested tensor from the stored pieces that overlap it."""

    @property
    def can_handle_sharded_objects(self) -> bool:
        return True

    def check_backend_compatibility(self, loaded_backend: str) -> None:
        if loaded_backend != BACKEND:
            raise CheckpointError(f"checkpoint back end: got {loaded_backend!r}, allowed is {BACKEND!r}")

    def check_version_compatibility(self, loaded_version: int) -> None:
        if loaded_version != VERSION:
            raise CheckpointError(
                f"checkpoint version: got {loaded_version}, allowed is {VERSION}; use the release that wrote it"
            )

    def load(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> Any:
        """Every sharded tensor and object replaced by its value. Raises CheckpointError if a piece is missing."""
        reader = _ShardReader(Path(checkpoint_dir))
        return dict_list_map_inplace(reader.value_of, sharded_state_dict)

    def load_tensors_metadata(self, checkpoint_dir: str | Path) -> dict[str, ShardedTensor]:
        """Key -> unsharded description of each stored tensor."""
        raise NotImplementedError("strict loading modes are not used: a missing tensor is an error when it is read")


class _ShardReader:
    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._shards: dict[str, list[StoredShard]] = {}
        for shard in _read_index(directory):
            self._shards.setdefault(shard.key, []).append(shard)
        self._open: dict[str, Any] = {}

    def value_of(self, item: Any) -> Any:
        """The value of one sharded tensor (a new CPU tensor) or object."""
        if isinstance(item, ShardedObject):
            stored = self._shards_of(item.unique_key)[0]
            return io.BytesIO(self._slice(stored, [slice(None)]).numpy().tobytes())
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
            overlap = _overlap(offset, tuple(view.shape), stored.offset, stored.shape)
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


def _stored(item: Any, file: str, name: str) -> tuple[Tensor, StoredShard]:
    """The tensor to write for one sharded tensor or object, with the prepended axes made real, and where it belongs."""
    if isinstance(item, ShardedTensor):
        data = item.data.detach().to("cpu")
        data = data.reshape(*([1] * item.prepend_axis_num), *item.local_shape).contiguous().clone()
        return data, StoredShard(
            item.key, file, name, tuple(item.global_offset), tuple(data.shape), tuple(item.global_shape)
        )
    payload = torch.frombuffer(bytearray(_bytes_of(item)) or bytearray(1), dtype=torch.uint8).clone()
    return payload, StoredShard(item.unique_key, file, name, (0,), tuple(payload.shape), tuple(payload.shape))


def _bytes_of(item: ShardedObject) -> bytes:
    if item.data is None:
        return b""
    if isinstance(item.data, io.BytesIO):
        return item.data.getvalue()
    if isinstance(item.data, Tensor):
        return item.data.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
    raise CheckpointError(
        f"{item.key}: an object of type {type(item.data).__name__} cannot be saved; allowed: tensors, bytes"
    )


def _overlap(
    want_offset: Sequence[int], want_shape: Sequence[int], have_offset: Sequence[int], have_shape: Sequence[int]
) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """The common box as slices into what is stored and into what is wanted; None if there is none."""
    theirs, ours = [], []
    for wo, ws, ho, hs in zip(want_offset, want_shape, have_offset, have_shape, strict=True):
        start, stop = max(wo, ho), min(wo + ws, ho + hs)
        if start >= stop:
            return None
        theirs.append(slice(start - ho, stop - ho))
        ours.append(slice(start - wo, stop - wo))
    return tuple(theirs), tuple(ours)


def _check_disjoint(key: str, shards: Sequence[StoredShard]) -> None:
    """Elements are counted, not marked: a piece stored twice would stand for one that is missing."""
    for one, other in itertools.combinations(shards, 2):
        if _overlap(one.offset, one.shape, other.offset, other.shape) is not None:
            raise CheckpointError(f"{key}: pieces at {one.offset} and {other.offset} overlap; the checkpoint is torn")


def _write_index(directory: Path, shards: Sequence[StoredShard]) -> None:
    rows = [[s.key, s.file, s.name, s.offset, s.shape, s.global_shape] for s in shards]
    (directory / INDEX_FILE).write_text(json.dumps({"version": VERSION, "shards": rows}))


def _read_index(directory: Path) -> Iterator[StoredShard]:
    try:
        rows = json.loads((directory / INDEX_FILE).read_text())["shards"]
        for key, file, name, offset, shape, global_shape in rows:
            if Path(file).name != file:
                raise ValueError(f"{file!r} is not a file name in the checkpoint's own directory")
            yield StoredShard(key, file, name, tuple(offset), tuple(shape), tuple(global_shape))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{directory / INDEX_FILE} cannot be read: {error}; the checkpoint is torn") from None
